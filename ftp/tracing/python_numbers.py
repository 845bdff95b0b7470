"""Symbolic numbers as the function's own code sees them: ints, floats and bools, whose text is the
number. torch gives ``str(x.shape[0])`` as "s63", and ``isinstance(x.shape[0], int)`` as False.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ftp.source import is_ours, is_users
from ftp.tracing.replacements.replaced import replaced

KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@contextmanager
def python_numbers() -> Iterator[None]:
    """Within the block a symbolic number is a Python number for all code but torch's and ours: of
    its class, and with its text, which becomes a guard.
    """
    with ExitStack() as stack:
        for kind, python in KINDS.items():
            stack.enter_context(_claimed(kind, python))
            stack.enter_context(replaced(kind, _texts(kind, python)))
        yield


def plain_number(x: Any) -> Any:
    """The number that a symbolic one is at the sizes at hand, which becomes a guard; else ``x``."""
    return KINDS[type(x)](x) if type(x) in KINDS else x


def _texts(kind: Any, python: type) -> dict[str, Callable[..., str]]:
    plain = kind.__repr__

    def text(self: Any) -> str:
        return repr(python(self)) if _by_user() else plain(self)

    def formatted(self: Any, spec: str) -> str:
        return format(python(self), spec) if _by_user() else format(plain(self), spec)

    return {"__repr__": text, "__format__": formatted}


@contextmanager
def _claimed(kind: type, python: type) -> Iterator[None]:
    """Within the block ``isinstance(x, python)`` holds for the instances of ``kind``.

    A class cannot be given a ``__class__`` for its instances by setattr, only in its dict.
    """
    (attributes,) = gc.get_referents(vars(kind))
    before = attributes.get("__class__")
    attributes["__class__"] = property(lambda self: python if _by_user() else kind)
    try:
        yield
    finally:
        if before is None:
            del attributes["__class__"]
        else:
            attributes["__class__"] = before
        kind.__repr__ = kind.__repr__  # so that Python forgets what it has looked up


def _by_user() -> bool:
    """Whether the code that asks is neither torch's nor ours; Python's own asks for its caller."""
    frame = sys._getframe(2)
    while frame is not None and not is_ours(frame.f_code.co_filename):
        if is_users(frame.f_code):
            return True
        frame = frame.f_back
    return False
