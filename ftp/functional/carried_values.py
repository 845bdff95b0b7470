"""Python values that a call of a model leaves in the attributes of its modules, hooks among them.
``fn`` is pure: a call begins with the values of the model. A trace asks what the next call would do
with those that the last one left.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from torch import nn
from torch.utils.hooks import RemovableHandle

from ftp.context import set_within
from ftp.functional.attributes import CONSTANTS, NUMBERS, OF_MODULES, Root

Carried = dict[Root, Any]
HOOKS = tuple(name for name in sorted(OF_MODULES) if name.startswith("_forward_"))

_left: ContextVar[Carried | None] = ContextVar("left", default=None)
_given: ContextVar[Mapping[Root, Any]] = ContextVar("given", default={})  # noqa: B039


@contextmanager
def values_left() -> Iterator[Carried]:
    """Within the block calls of models note what they leave in attributes; a block in another one
    shares its notes.
    """
    left = _left.get()
    with set_within(_left, {} if left is None else left) as left:
        yield left


def as_left(left: Carried) -> AbstractContextManager[Any]:
    """A context in which calls of models begin with values that earlier ones left."""
    return set_within(_given, dict(left))


def given_to(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The values that a module's attributes have from an earlier call."""
    return ((name, value) for (of, name), value in _given.get().items() if of == id(module))


def note_left(modules: Sequence[tuple[nn.Module, Mapping[str, Any]]], first_hook: int) -> None:
    """Note the attributes of modules that hold other Python values than before a call, and the
    hooks of modules that have others. Numbers are told of at each call; they are noted where they
    may say that the hooks are registered.

    Args:
        modules: each with its attributes before the call.
        first_hook: torch's number for the first hook that the call registers.
    """
    if (left := _left.get()) is None:
        return
    hooks = {
        (id(module), name): found
        for module, before in modules
        for name in HOOKS
        if (found := _hooks_left(before, module.__dict__, name, first_hook)) is not None
    }
    left.update(hooks)
    for module, before in modules:
        for name, now in module.__dict__.items():
            was = before.get(name)
            is_told = not hooks and type(was) in NUMBERS and type(now) in NUMBERS
            if now is not was and name not in OF_MODULES and not is_told and _differ(was, now):
                left[id(module), name] = now


def _hooks_left(
    before: Mapping[str, Any], now: Mapping[str, Any], name: str, first_hook: int
) -> OrderedDict[int, Any] | None:
    """The hooks that a call leaves, without those that ftp registered for the call; None if they
    are those of before.
    """
    was, found = before.get(name, {}), now.get(name, {})
    left = [(n, hook) for n, hook in found.items() if n in was or n >= first_hook]
    return None if [n for n, _ in left] == [*was] else OrderedDict(left)


def _differ(was: Any, now: Any) -> bool:
    """Whether Python values differ; tensors and objects are none."""
    if not (_is_plain(was) and _is_plain(now)):
        return False
    try:
        return type(was) is not type(now) or bool(was != now)
    except ValueError:  # arrays
        return True


def _is_plain(x: Any) -> bool:
    """Whether a value consists of Python values and arrays alone."""
    if isinstance(x, list | tuple | set | frozenset):
        return all(map(_is_plain, x))
    if isinstance(x, dict):
        return all(map(_is_plain, x.values()))
    kinds = complex | np.ndarray | np.generic | RemovableHandle
    return type(x) in CONSTANTS or isinstance(x, kinds)
