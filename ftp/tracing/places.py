"""Where a function finds values outside of its arguments: variables, items of containers,
attributes of objects, functions, classes and modules.
"""

import dis
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ftp.dataclass import dataclass
from ftp.functional.attributes import (
    CONSTANTS,
    NAMESPACES,
    OF_MODULES,
    held_in,
    is_of_library,
    join,
    key_text,
    slots_of,
)
from ftp.functional.contents import CACHE, values_of_cache
from ftp.functional.module_program import ModuleProgram, items_of
from ftp.functional.slots import Slot
from ftp.source import describe_line, is_editable, is_users

_VISITED = 1000  # most objects to search, the nearest first
LARGE = 1000  # the items of a longer container that are constants are no places
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
_CACHED = "(...)"
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LIBRARIES = ("builtins", "ftp", "numpy", "optree", "torch", "transformers")


@dataclass(frozen=True, eq=False)
class StatePlace:
    """A value that a function finds outside of its arguments, and one place of it.

    Attributes:
        name: the place, as ``'masks['causal']', which loss (train.py:3) reads``.
        holder, key: a cell, dict, list or `_Attributes`, and where in it the value is.
    """

    name: str
    value: Any
    holder: Any
    key: Any

    @property
    def is_cached(self) -> bool:
        """Whether it is in what a cached function gave for some arguments."""
        return _CACHED in self.name

    @property
    def is_fixed(self) -> bool:
        """Whether nothing can put another value there, as into an argument of a partial."""
        if isinstance(self.holder, _TupleItems):
            return self.holder.place.is_fixed
        return type(self.holder) is dict and self.holder.keys() == {""}

    def now(self) -> Any:
        """The object that the place holds now; the value of then if the place is gone."""
        return _item(self.holder, self.key, self.value)

    @property
    def is_unchanged(self) -> bool:
        """Whether the place is there, and holds the same object."""
        return _held(self.holder, self.key) is self.value

    def put(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class _TupleItems:
    """The items of the tuple that a place holds: an item is put there with another tuple."""

    def __init__(self, place: StatePlace) -> None:
        self.place = place

    def __getitem__(self, i: int) -> Any:
        now = self.place.now()
        return now[i] if isinstance(now, tuple) else now

    def __setitem__(self, i: int, value: Any) -> None:
        now = self.place.now()
        now = now if isinstance(now, tuple) else self.place.value
        items = (*now[:i], value, *now[i + 1 :])
        self.place.put(getattr(now, "_make", type(now))(items))


class _Attributes:
    """The attributes of a class, or those that an object holds in slots, by name."""

    def __init__(self, of: Any) -> None:
        self._of, self._by = of, type if isinstance(of, type) else object

    def __getitem__(self, name: str) -> Any:
        try:
            return self._by.__getattribute__(self._of, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._by.__setattr__(self._of, name, value)


class _ContextValue:
    """The value of a context variable, under any key."""

    def __init__(self, of: "ContextVar[Any]") -> None:
        self._of = of

    def __getitem__(self, key: Any) -> Any:
        return self._of.get()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of.set(value)


def tensors_around(fn: Callable[..., Any]) -> Iterator[StatePlace]:
    """The tensors that ``fn`` and the objects that it refers to hold."""
    return (place for place in places_around(fn) if isinstance(place.value, Tensor))


def places_around(fn: Callable[..., Any]) -> Iterator[StatePlace]:
    """What ``fn`` and the objects that it refers to hold."""
    for reader, name, holder, key, value in _around(fn):
        yield StatePlace(f"{name!r}, which {reader} reads", value, holder, key)


def functions_around(fn: Callable[..., Any]) -> list[types.FunctionType]:
    """``fn`` and the functions that it refers to, by name or in objects."""
    found = [fn, *(value for *_, value in _around(fn, _members))]
    return [value for value in found if isinstance(value, types.FunctionType)]


def caches_around(fn: Callable[..., Any]) -> list[Any]:
    """The functions that `functools.lru_cache` or `functools.cache` made, around ``fn``."""
    found = [fn, *(value for *_, value in _around(fn, _members))]
    return [value for value in found if isinstance(value, CACHE)]


def _members(visited: Any) -> Iterator[Any]:
    """The functions of an object's classes, and the caches of a module's functions."""
    if isinstance(visited, types.ModuleType):
        # Its type, not its __class__: torch.distributed.reduce_op warns when it is asked for that.
        yield from (value for value in [*vars(visited).values()] if issubclass(type(value), CACHE))
        return
    program = visited.modules if isinstance(visited, ModuleProgram) else ()
    own = visited if isinstance(visited, type) else type(visited)
    kinds = dict.fromkeys((own, *(type(m.module) for m in program)))
    for cls in dict.fromkeys(cls for kind in kinds for cls in kind.__mro__):
        if not _is_library(cls):
            yield from functions_of(cls)


def functions_of(kind: type) -> Iterator[Any]:
    """The functions and caches that a class has of its own."""
    for value in [*vars(kind).values()]:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, types.FunctionType | CACHE):
            yield value


def _is_library(kind: type) -> bool:
    # Of classes made by Cython it is a descriptor.
    return str(kind.__module__).partition(".")[0] in _LIBRARIES


def _around(
    fn: Callable[..., Any], members: Callable[[Any], Iterable[Any]] = lambda _: ()
) -> Iterator[tuple[str, str, Any, Any, Any]]:
    """What ``fn`` and the objects that it refers to hold: the reader, a name, the holder, the key
    there, and the value; and what else are ``members`` of each.
    """
    seen: set[int] = set()
    queue = [("", StatePlace("", fn, {}, ""))]
    for reader, place in queue:  # the loop appends to it
        name, visited = place.name, place.value
        if id(visited) in seen or len(seen) == _VISITED:
            continue
        seen.add(id(visited))
        reader = _described(visited) or reader
        for own, holder, key in _places_in(visited, name):
            value = _item(holder, key, None)
            if holder is visited and isinstance(visited, tuple):
                holder = _TupleItems(place)
            yield reader, own, holder, key, value
            if not is_leaf(value):
                queue.append((reader, StatePlace(own, value, holder, key)))
        for value in members(visited):
            yield reader, name, {}, "", value
            queue.append((reader, StatePlace(name, value, {}, "")))


def is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value) in CONSTANTS or type(value) in SYMBOLIC


def _item(holder: Any, key: Any, default: Any) -> Any:
    if isinstance(holder, dict) and key not in holder:
        return default  # a defaultdict would add one
    try:
        return holder.cell_contents if isinstance(holder, types.CellType) else holder[key]
    except (ValueError, LookupError):  # an empty cell, an item that is gone
        return default


def _held(holder: Any, key: Any) -> Any:
    """The object at a place; None if the place is gone."""
    if not isinstance(holder, _TupleItems):
        return _item(holder, key, None)
    return _item(_held(holder.place.holder, holder.place.key) or (), key, None)


def _described(visited: Any) -> str:
    if type(visited) is ModuleProgram:
        return visited.name
    if not isinstance(visited, types.FunctionType | types.MethodType):
        return ""
    code: Any = getattr(visited, "__code__", None)  # none of a method of an object
    if code is None:
        return ""
    line = describe_line(code.co_filename, code.co_firstlineno).split("  ")[0]
    return code.co_name if code.co_filename.startswith("<") else f"{code.co_name} ({line})"


_PlacesWithin = Iterator[tuple[str, Any, Any]]


def _places_in(visited: Any, name: str) -> _PlacesWithin:
    """The objects that an object refers to: a name for each, its holder, and its key there."""
    return _places_of(type(visited))(visited, name)


@functools.lru_cache(maxsize=4096)
def _places_of(kind: type) -> Callable[[Any, str], _PlacesWithin]:
    found = (places for base, places in _PLACES.items() if issubclass(kind, base))
    is_opaque = _is_library(kind) and not issubclass(kind, NAMESPACES)
    return next(found, (lambda x, name: iter(())) if is_opaque else _of_object)


def _of_function(fn: types.FunctionType, name: str) -> _PlacesWithin:
    variables = fn.__code__.co_freevars
    yield from zip(variables, fn.__closure__ or (), variables, strict=True)
    values, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    yield from ((names[i - len(values)], values, i) for i in range(len(values)))
    yield from ((key, keywords, key) for key in keywords)
    if not is_users(fn.__code__):
        return
    yield from ((f"{fn.__name__}.{key}", fn.__dict__, key) for key in fn.__dict__)
    named = _globals_of(fn.__code__)
    yield from ((variable, fn.__globals__, variable) for variable in named)
    for variable in named:
        if isinstance(module := fn.__globals__.get(variable), types.ModuleType):
            yield from _of_module(module, variable, fn.__code__)


def _of_module(module: types.ModuleType, name: str, code: types.CodeType) -> _PlacesWithin:
    """What a user's module holds under the names of attributes in a function's code."""
    file = getattr(module, "__file__", None)
    if not file or not is_editable(file):
        return
    namespace = vars(module)
    yield from ((f"{name}.{key}", namespace, key) for key in _names(code) if key in namespace)


def _of_object(x: Any, name: str) -> _PlacesWithin:
    own = getattr(x, "__dict__", {})
    yield from ((f"{name}.{key}", own, key) for key in list(own))
    if slots := slots_of(x):
        held = _Attributes(x)
        yield from ((f"{name}.{key}", held, key) for key in slots)
    yield from _of_its_class(x, name)


def _of_its_class(x: Any, name: str) -> _PlacesWithin:
    """The attributes of an object's class, and where the class is the user's its functions."""
    kind = type(x)
    if isinstance(call := vars(kind).get("__call__"), types.FunctionType):
        yield name, {"": call}, ""
    yield from _of_classes(kind, name)


def _of_classes(kind: type, name: str) -> _PlacesWithin:
    yield from ((name, {"": own}, "") for own in kind.__mro__ if not _is_closed(own))


def _is_closed(kind: type) -> bool:
    return _is_library(kind) or is_of_library(kind)


def _of_class(kind: type, name: str) -> _PlacesWithin:
    if _is_closed(kind):
        return
    held = _Attributes(kind)
    for key, value in [*vars(kind).items()]:
        if not (key.startswith("__") or hasattr(type(value), "__get__")):
            yield f"{kind.__name__}.{key}", held, key
    functions = [f for f in functions_of(kind) if isinstance(f, CACHE) or _is_own(f)]
    yield from ((name, {"": function}, "") for function in functions)


def _is_own(fn: types.FunctionType) -> bool:
    return is_editable(fn.__code__.co_filename)


def _of_nn_module(module: nn.Module, name: str) -> _PlacesWithin:
    own, registered = module.__dict__, ("_parameters", "_buffers", "_modules")
    held = (own, *(own[kind] for kind in registered))
    yield from (
        (f"{name}.{key}", of, key) for of in held for key in list(of) if key not in registered
    )
    yield from _of_its_class(module, name)


def _of_program(program: ModuleProgram, name: str) -> _PlacesWithin:
    """What the modules hold when a call begins, and what is not copied for a call."""
    for module in program.modules:
        held = module.attributes
        for key, value in held.items():
            is_own = key not in OF_MODULES and not all(map(_is_fixed, items_of(value)))
            if is_own or (key in _HOOKS and value):
                yield join(module.path, key), held, key
    for kind in dict.fromkeys(type(m.module) for m in program.modules):
        yield from _of_classes(kind, kind.__name__)


def _is_fixed(x: Any) -> bool:
    """Whether each call finds a module's attribute, or an item of it, as it was."""
    return is_leaf(x) or isinstance(x, Slot | nn.Module)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _of_sequence(x: Any, name: str) -> _PlacesWithin:
    held = held_in(x)
    for i, value in enumerate(held):
        if len(held) <= LARGE or type(value) not in CONSTANTS:
            yield f"{name}[{i}]", x, i


def _of_cache(cache: Any, name: str) -> _PlacesWithin:
    """The function of a `functools.cache`, and the values that it gave."""
    yield name, {"": cache.__wrapped__}, ""
    yield from ((f"{name}{_CACHED}", {"": value}, "") for value in values_of_cache(cache))


_PLACES: dict[Any, Callable[[Any, str], _PlacesWithin]] = {
    types.FunctionType: _of_function,
    types.MethodType: lambda x, name: iter(
        [("self", {"": x.__self__}, ""), (name, {"": x.__func__}, "")]
    ),
    types.BuiltinMethodType: lambda x, name: iter([(name, {"": x.__self__}, "")]),
    functools.partial: lambda x, name: (
        (name, held, key)
        for held in ({"": x.func}, *({"": value} for value in x.args), x.keywords)
        for key in held
    ),
    dict: lambda x, name: (
        (f"{name}[{key_text(key, i)}]", x, key)
        for i, (key, value) in enumerate(list(x.items()))
        if len(x) <= LARGE or type(value) not in CONSTANTS
    ),
    (list, tuple, deque): _of_sequence,
    ModuleProgram: _of_program,
    nn.Module: _of_nn_module,
    CACHE: _of_cache,
    type: _of_class,
    ref: lambda x, name: iter([(name, {"": x()}, "")]),
    ContextVar: lambda x, name: iter([(f"{name}.get()", _ContextValue(x), "")]),
}


@functools.cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function and those within it read or set."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    own = [i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS]
    return tuple(dict.fromkeys([*own, *(name for c in inner for name in _globals_of(c))]))


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function and those within it."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))
