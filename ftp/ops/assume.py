"""Claims about values that a traced function takes as true: a trace has no values to look at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_listener: ContextVar[Callable[[Tensor, str], None] | None] = ContextVar("listener", default=None)


def assume(condition: Tensor, claim: str) -> None:
    """Note that ``condition``, a bool tensor, is taken to hold; nothing outside of a trace."""
    if (listener := _listener.get()) is not None:
        listener(condition, claim)


@contextmanager
def assumptions_to(listener: Callable[[Tensor, str], None] | None) -> Iterator[None]:
    """Inside the block, ``assume`` calls ``listener``; None takes no claim."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def is_listening() -> bool:
    """Whether claims are taken."""
    return _listener.get() is not None
