"""Set a ``ContextVar`` within a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def set_within(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Within the block ``variable`` has ``value``; after it, its old value.

    >>> depth = ContextVar("depth", default=0)
    >>> with set_within(depth, 1):
    ...     depth.get()
    1
    >>> depth.get()
    0
    """
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
