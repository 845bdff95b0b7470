"""Claims about values. A trace has no values to check, so it takes a function's claims as true."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ftp.context import set_within

Condition = Tensor | Callable[[], Tensor]
_Listener = Callable[[Condition, str], None]
_listener: ContextVar[_Listener | None] = ContextVar("listener", default=None)


def assume(condition: Condition, claim: str) -> None:
    """Claim that ``condition`` holds: a bool tensor, or a function that returns one, which is
    called only if claims are checked. Outside of a trace it does nothing.
    """
    if (listener := _listener.get()) is not None:
        listener(condition, claim)


def assumptions_to(listener: _Listener | None) -> AbstractContextManager[Any]:
    """Within the block pass every claim to ``listener``; None ignores them."""
    return set_within(_listener, listener)


def is_listening() -> bool:
    """Whether a trace listens to claims."""
    return _listener.get() is not None
