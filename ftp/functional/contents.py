"""What code can reach and change: variables, containers, attributes, random generators. Note what
they hold now, and put it back later.
"""

import functools
import gc
import pickle
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from operator import is_
from threading import local
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
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
from ftp.source import is_editable, is_users
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import DisableTorchFunction

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


class Globals:
    """The variables of a module's namespace that code names."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace, self.names = namespace, dict[str, None]()

    def new(self, names: Iterable[str]) -> list[str]:
        """Add names; return those that have a value and are new."""
        found = [name for name in names if name in self.namespace and name not in self.names]
        self.names.update(dict.fromkeys(names))
        return found


class _Way(NamedTuple):
    """How to copy what an object holds, and how to put it back."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def now_in(of: Any) -> Any:
    """A copy of what ``of`` holds."""
    return _kind(type(of)).get(of)


def put_in(of: Any, held: Any) -> None:
    """Make ``held`` the content of ``of``."""
    _kind(type(of)).put(of, held)


def is_leaf_state(x: Any) -> bool:
    """Whether a value has a state of its own, without parts: an array, a set, a generator of random
    numbers.
    """
    return isinstance(x, (*_STATES, *(kind for kind, _ in _of_numpy()))) and _is_changeable(x)


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
    if _kind(type(x)) is not _SLOTS:
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
    return callable(x.cell_contents if isinstance(x, CellType) and not _is_empty(x) else x)


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
    captured = [c.cell_contents for c in fn.__closure__ or () if not _is_empty(c)]
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


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _put_cell(cell: CellType, held: list[Any]) -> None:
    if held:
        (cell.cell_contents,) = held
    elif not _is_empty(cell):
        del cell.cell_contents


def _of_container(kind: Any, copy: Callable[[Any], Any]) -> _Way:
    """By the functions of ``kind``: a class made from it may have others of their names."""
    fill = kind.update if hasattr(kind, "update") else kind.extend

    def put(of: Any, held: Any) -> None:
        kind.clear(of)
        fill(of, held)

    return _Way(copy, put)


def _of_attributes(names: Callable[[Any], Mapping[str, Any]], by: Any) -> _Way:
    """By the functions ``__setattr__`` and ``__delattr__`` of the class ``by``."""

    def put(of: Any, held: dict[str, Any]) -> None:
        now = names(of)
        for name in now.keys() - held.keys():
            by.__delattr__(of, name)
        for name, value in held.items():
            if name not in now or now[name] is not value:
                with suppress(AttributeError):  # read-only, and made anew each time it is read
                    by.__setattr__(of, name, value)

    return _Way(lambda of: dict(names(of)), put)


def _of_dict(namespace: Callable[[Any], dict[str, Any]]) -> _Way:
    put = _of_container(dict, dict).put
    return _Way(lambda of: dict(namespace(of)), lambda of, held: put(namespace(of), held))


def _put_globals(of: Globals, held: dict[str, Any]) -> None:
    for name in of.names:
        if name in held:
            of.namespace[name] = held[name]
        else:
            of.namespace.pop(name, None)


def _of_generator(get: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> _Way:
    return _Way(lambda of: pickle.dumps(get(of)), lambda of, held: put(of, pickle.loads(held)))


@contextmanager
def _outside() -> Iterator[None]:
    with DisableTorchFunction(), temporarily_clear_interpreter_stack():
        yield


def _state_of(of: torch.Generator) -> bytes:
    with _outside():
        return of.get_state().numpy().tobytes()


def _put_state(of: torch.Generator, state: bytes) -> None:
    with _outside():
        of.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _put_array(of: np.ndarray, held: bytes) -> None:
    of[...] = np.frombuffer(held, of.dtype).reshape(of.shape)


def _refill(of: "array[Any]", held: bytes) -> None:
    del of[:]
    of.frombytes(held)


def _of_function(fn: FunctionType) -> dict[str, Any]:
    return {"__defaults__": fn.__defaults__}


def _of_type(kind: type) -> dict[str, Any]:
    """A class's attributes that are neither functions nor properties."""
    own = ((k, v) for k, v in vars(kind).items() if not k.startswith("__"))
    return {name: value for name, value in own if not hasattr(type(value), "__get__")}


def _of_error(error: BaseException) -> dict[str, Any]:
    own = {name: getattr(error, name) for name in ("args", "__cause__", "__context__")}
    return {**slots_of(error), **own}


_SLOTS = _of_attributes(slots_of, object)
_KINDS: dict[Any, _Way] = {
    CellType: _Way(lambda of: [] if _is_empty(of) else [of.cell_contents], _put_cell),
    nn.Module: _of_dict(lambda of: of.__dict__),
    OrderedDict: _of_container(OrderedDict, lambda of: dict(OrderedDict.items(of))),
    dict: _of_container(dict, lambda of: dict(dict.items(of))),
    list: _of_container(list, list),
    deque: _of_container(deque, list),
    set: _of_container(set, set),
    type: _of_attributes(_of_type, type),
    FunctionType: _of_attributes(_of_function, object),
    partial: _Way(
        lambda of: {"args": of.args},
        lambda of, held: of.__setstate__((of.func, held["args"], of.keywords, vars(of))),
    ),
    BaseException: _of_attributes(_of_error, object),
    Globals: _Way(
        lambda of: {name: of.namespace[name] for name in of.names if name in of.namespace},
        _put_globals,
    ),
    local: _of_dict(vars),
    ContextVar: _Way(
        lambda of: [] if of.get(_KINDS) is _KINDS else [of.get()],
        lambda of, held: [of.set(value) for value in held],
    ),
    random.Random: _of_generator(random.Random.getstate, random.Random.setstate),
    torch.Generator: _Way(_state_of, _put_state),
    np.ndarray: _Way(lambda of: of.tobytes(), _put_array),
    bytearray: _Way(bytes, lambda of, held: of.__setitem__(slice(None), held)),
    array: _Way(lambda of: of.tobytes(), lambda of, held: _refill(of, held)),
}


_STATES = (set, random.Random, np.ndarray, bytearray, array)


@lru_cache(maxsize=4096)
def _kind(of: type) -> _Way:
    kinds = [*_KINDS.items(), *_of_numpy()]
    return next((kind for base, kind in kinds if issubclass(of, base)), _SLOTS)


def _of_numpy() -> list[tuple[type, _Way]]:
    """numpy's generators; none where nobody has loaded them."""
    if "numpy.random" not in sys.modules:
        return []
    random_state = _of_generator(
        lambda of: of.get_state(legacy=False), lambda of, state: of.set_state(state)
    )
    generator = _of_generator(
        lambda of: of.bit_generator.state,
        lambda of, state: setattr(of.bit_generator, "state", state),
    )
    return [(np.random.RandomState, random_state), (np.random.Generator, generator)]
