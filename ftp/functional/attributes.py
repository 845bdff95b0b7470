"""Walk the attributes of a model's modules: tensors and other values, also inside containers and
plain objects, at any depth.
"""

import sys
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

Modules = Sequence[tuple[str, nn.Module]]  # by path
Root = tuple[int, str]  # a module's id, and the name of its attribute


_T = TypeVar("_T")


class Held(NamedTuple):
    """A value that an attribute of a module holds, itself or inside a container.

    Attributes:
        root: that attribute.
    """

    path: str
    value: Any
    root: Root


_VISITED = 10_000  # most containers and objects to look into
_SMALL = 1000  # most items of a container of which numbers are looked at
NUMBERS = (int, float, bool)
CONSTANTS = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device})
_CONTAINERS = (dict, list, tuple, deque, set, frozenset, nn.Module)
NAMESPACES = (
    *(SimpleNamespace, Namespace, UserDict, UserList, ChainMap),
    *(WeakKeyDictionary, WeakValueDictionary),
    *(torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler),
)
_LIBRARIES = frozenset({"ftp", "numpy", "optree", "torch"}) | sys.stdlib_module_names
REGISTERED = ("_parameters", "_buffers", "_modules")
OF_MODULES = frozenset(vars(nn.Module()))


def attributes_of(modules: Modules) -> Iterator[Held]:
    """The values of the modules' attributes and of their classes' containers: each container, then
    its items.
    """
    seen = {id(module) for _, module in modules}
    for path, module in modules:
        own = (
            (name, value)
            for name, value in module.__dict__.items()
            if name not in REGISTERED and (name not in OF_MODULES or value)  # hooks: mostly none
        )
        for name, value in (*own, *of_class(type(module))):
            yield from _held(join(path, name), value, (id(module), name), seen)


def of_class(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The containers that are attributes of a user's module class, shared by its modules."""
    for owner in kind.__mro__:
        if not is_of_library(owner):
            yield from (
                (name, value)
                for name, value in vars(owner).items()
                if type(value) in (list, dict, set, deque) and not name.startswith("__")
            )


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_of_library(kind: type) -> bool:
    return is_library(kind.__module__)


def is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def is_plain_object(value: Any) -> bool:
    """Whether a value is of a user's class, or of a class that only holds attributes."""
    if type(value) in CONSTANTS or isinstance(value, (Tensor, type)):  # most are constants
        return False
    return isinstance(value, NAMESPACES) or not is_of_library(type(value))


def _held(path: str, value: Any, root: Root, seen: set[int]) -> Iterator[Held]:
    stack = [(path, value)]  # a recursion would end at a chain of a thousand objects
    while stack:
        path, value = stack.pop()
        yield Held(path, value, root)
        if id(value) in seen or len(seen) >= _VISITED or not has_parts(value):
            continue
        seen.add(id(value))
        stack += reversed([(path + name, item) for name, item in parts_of(value) or ()])


def has_parts(value: Any) -> bool:
    """Whether `parts_of` gives the parts of a value."""
    if type(value) in CONSTANTS:
        return False
    return isinstance(value, _CONTAINERS) or is_plain_object(value)


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """The items of a container or a plain object, as ``(end of the path, item)``; None of another
    value.

    >>> parts_of({"a": [1]}), parts_of(SimpleNamespace(n=2)), parts_of("text")
    ([("['a']", [1])], [('.n', 2)], None)
    """
    if isinstance(value, dict):
        entries = _of_interest(enumerate(value.items()), len(value), lambda entry: entry[1][1])
        return [(f"[{key_text(key, i)}]", item) for i, (key, item) in entries]
    if isinstance(value, list | tuple | deque):
        held = held_in(value)
        items = _of_interest(enumerate(held), len(held), itemgetter(1))
        return [(f"[{i}]", item) for i, item in items]
    if isinstance(value, set | frozenset):  # in no order
        return [("{...}", item) for item in value if isinstance(item, Tensor)]
    if isinstance(value, nn.Module):
        own = value.__dict__
        held = {**own, **{k: v for kind in REGISTERED for k, v in own[kind].items()}}
        return [(f".{name}", item) for name, item in held.items() if name not in OF_MODULES]
    if not is_plain_object(value):
        return None
    own = {**getattr(value, "__dict__", {}), **slots_of(value)}
    return [(f".{name}", item) for name, item in own.items()]


def held_in(container: dict | list | tuple | deque) -> list[Any]:
    """The values of a container, whose class may have no length."""
    if isinstance(container, dict):
        return [*container.values()]
    kind: Any = next(kind for kind in (list, tuple, deque) if isinstance(container, kind))
    return [*kind.__iter__(container)]


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes that an object holds in slots."""
    own = ((name, getattr(value, name, _MISSING)) for name in _slots(type(value)))
    return {name: held for name, held in own if held is not _MISSING}


_MISSING = object()


@lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    of_all = [name_value for owner in kind.__mro__ for name_value in vars(owner).items()]
    return tuple(
        name
        for name, value in of_all
        if isinstance(value, MemberDescriptorType) and not name.startswith("__")
    )


def _of_interest(entries: Iterable[_T], n: int, value: Callable[[_T], Any]) -> Iterable[_T]:
    """The entries of a container; of a large one, such as a vocabulary, only the non-constants."""
    return entries if n <= _SMALL else [e for e in entries if type(value(e)) not in CONSTANTS]


def key_text(key: Any, i: int) -> str:
    plain = key is None or isinstance(key, str | int | float | tuple)
    return repr(key) if plain else f"{type(key).__name__} {i}"
