"""What code can reach and change: variables, containers, attributes, random generators. Note what
they hold now, and put it back later.
"""

import functools
import gc
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from operator import is_
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
from torch import Tensor, nn

from ftp.functional.attributes import (
    CONSTANTS,
    OF_MODULES,
    REGISTERED,
    is_library,
    is_of_library,
    is_plain_object,
    slots_of,
)
from ftp.functional.held_values import (
    Globals,
    Hooks,
    has_content,
    has_own_state,
    is_empty,
    now_in,
    put_in,
)
from ftp.source import is_editable, is_users

_VISITED = 10_000  # most objects to look into, the nearest first,
_OF_MODULE = 100  # and as many more for each module
_COPIED = 2**22  # most bytes of an array that are copied
_LEAVES = (*CONSTANTS, Tensor)
CACHE = type(functools.cache(repr))  # also of `functools.lru_cache`
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_WITH_GENERATORS = ("random", "numpy")  # libraries whose functions draw from generators


def bound_now(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with the present values of its captured variables, and of the containers and
    attributes that they hold. Without it, a lambda in a loop that runs again in the backward pass
    reads the loop variable's last value.

    >>> def outer(i, seen):
    ...     late = lambda: (i, seen[0])
    ...     now = bound_now(late)
    ...     i = seen[0] = 2
    ...     return late(), now()
    >>> outer(1, [1])
    ((2, 2), (1, 1))
    """
    contents = contents_of(fn)

    def now(*args: Any, **kwargs: Any) -> Any:
        with restored(contents):
            return fn(*args, **kwargs)

    return now if contents else fn


class Content:
    """What something holds at present, to be restored later.

    Attributes:
        held: the values by name, the items of a container, or a state as bytes.
    """

    def __init__(self, of: Any) -> None:
        self.of = of
        self.held = now_in(of)

    @property
    def values(self) -> Iterable[Any]:
        """What may hold tensors: of a module, not what every module has."""
        return values_in(own_attributes(self.held) if isinstance(self.of, nn.Module) else self.held)

    def give_back(self) -> None:
        put_in(self.of, self.held)


def is_leaf_state(x: Any) -> bool:
    """Whether a value has a state of its own, without parts, that can be copied."""
    return has_own_state(x) and _is_changeable(x)


def values_in(held: Any) -> Iterable[Any]:
    if isinstance(held, dict):
        return held.values()
    return () if isinstance(held, bytes) else held


def is_same(held: Any, now: Any) -> bool:
    """Whether two contents have the same values under the same names."""
    if isinstance(held, set | bytes):
        return held == now
    if len(held) != len(now) or not all(map(is_, held, now)):
        return False  # of dicts, the keys
    return not isinstance(held, dict) or all(map(is_, held.values(), now.values()))


@contextmanager
def restored(contents: Sequence[Content]) -> Iterator[None]:
    """Within the block, variables and containers hold ``contents``."""
    later = [now for c in contents if not is_same(c.held, (now := Content(c.of)).held)]
    changed = set(map(id, (now.of for now in later)))
    try:
        for content in contents:
            if id(content.of) in changed:
                content.give_back()
        yield
    finally:
        for content in later:
            content.give_back()


def contents_of(root: Any, seen: dict[int, Any] | None = None) -> list[Content]:
    """The contents of what ``root`` refers to, directly or through others.

    Args:
        seen: by id, what has been visited and is left out; it gets what is visited now.
    """
    found: list[Content] = []
    spaces: dict[int, Globals] = {}
    seen = {} if seen is None else seen
    queue: list[Any] = [root]
    most = len(seen) + _VISITED
    for visited in queue:  # the loop appends to it
        if isinstance(visited, _LEAVES) or id(visited) in seen or len(seen) >= most:
            continue
        seen[id(visited)] = visited  # which keeps it alive: another object would get its id
        queue += _parts(visited)
        if isinstance(visited, FunctionType):
            queue += _globals(visited, spaces)
        if isinstance(visited, nn.Module):
            most += _OF_MODULE
            found.append(Content(Hooks(visited)))
        if _is_changeable(visited):
            content = Content(visited)
            found.append(content)
            queue += content.values
    return found + [Content(space) for space in spaces.values()]


def _is_changeable(x: Any) -> bool:
    if isinstance(x, type):
        return not is_of_library(x)
    if isinstance(x, partial):
        return any(isinstance(value, Tensor) for value in x.args)
    if isinstance(x, FunctionType):
        return is_users(x.__code__)
    if isinstance(x, np.ndarray):
        return x.flags.writeable and not x.dtype.hasobject and x.nbytes <= _COPIED
    if isinstance(x, bytearray | array):
        return len(x) * getattr(x, "itemsize", 1) <= _COPIED
    if has_content(x):
        return True
    return bool(slots_of(x)) if is_plain_object(x) else False


def _parts(x: Any) -> Iterable[Any]:
    """What an object refers to apart from its content."""
    if isinstance(x, FunctionType):
        held = (*(x.__closure__ or ()), *(x.__defaults__ or ()), x.__kwdefaults__, vars(x))
        return held if is_users(x.__code__) else [y for y in held if _is_called(y)]
    if isinstance(x, tuple | frozenset):
        return x
    for kind, names in _REFERENCES.items():
        if isinstance(x, kind):
            return [getattr(x, name, None) for name in names]
    if isinstance(x, ref):
        return [x()]
    if isinstance(x, CACHE):
        return [x.__wrapped__, *values_of_cache(x)]
    if isinstance(x, nn.Module):
        hooks = [hook for name in _HOOKS for hook in x.__dict__[name].values()]
        return [*hooks, type(x)]
    if isinstance(x, type):
        return _of_class(x)
    if isinstance(x, BaseException) or is_plain_object(x):
        return [getattr(x, "__dict__", ()), type(x)]
    return ()


_REFERENCES = {
    MethodType: ("__self__", "__func__"),
    BuiltinMethodType: ("__self__",),  # of a container, or a generator
    partial: ("func", "args", "keywords"),
    property: ("fget", "fset", "fdel"),
    cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}


def values_of_cache(cache: Any) -> Iterator[Any]:
    """The values that a function of `functools.cache` or `functools.lru_cache` keeps."""
    for entries in gc.get_referents(cache):
        if type(entries) is dict and entries is not cache.__dict__:
            for entry in list(entries.values()):
                is_element = type(entry).__name__ == "_lru_list_elem"
                yield from gc.get_referents(entry) if is_element else (entry,)


def _is_called(x: Any) -> bool:
    """Whether a value, or that of a variable, may be called."""
    return callable(x.cell_contents if isinstance(x, CellType) and not is_empty(x) else x)


def _of_class(kind: type) -> Iterator[Any]:
    """A user's class's bases, and its functions."""
    if is_of_library(kind):
        return
    yield from kind.__bases__
    for value in vars(kind).values():
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(inner, FunctionType) and is_editable(inner.__code__.co_filename):
            yield value


def _globals(fn: FunctionType, spaces: dict[int, Globals]) -> Iterator[Any]:
    """The values of the global variables that a function names, and of those of modules."""
    if not is_users(fn.__code__):
        return
    names, queue = _named(fn.__code__), [fn.__globals__]
    captured = [c.cell_contents for c in fn.__closure__ or () if not is_empty(c)]
    modules = (*captured, *map(sys.modules.get, names))
    queue += [vars(m) for m in modules if isinstance(m, ModuleType)]
    for namespace in queue:  # the loop appends to it
        name = namespace.get("__name__", "")
        if is_library(name) and name.partition(".")[0] not in _WITH_GENERATORS:
            continue
        space = spaces.setdefault(id(namespace), Globals(namespace))
        for value in [namespace[name] for name in space.new(names)]:
            if isinstance(value, ModuleType):
                queue.append(vars(value))
            else:
                yield value


@lru_cache(maxsize=4096)
def _named(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function and those within it."""
    inner = [_named(each) for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module without those that every module has, such as its hooks."""
    return {k: v for k, v in attributes.items() if k not in OF_MODULES or k in REGISTERED}
