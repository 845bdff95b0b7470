"""Tensors that a traced function captured, and the variables and attributes that hold them: a step
warns if one of these holds another object later.
"""

import dis
import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ftp.dataclass import dataclass
from ftp.errors import InputError, StaleCaptureWarning
from ftp.functional.attributes import OF_MODULES, is_plain_object
from ftp.functional.module_program import ModuleProgram
from ftp.source import describe_line, is_users
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import DisableTorchFunction, disable_current_modes
from ftp.torch_internals.storages import storage_of, version

_VISITED = 1000  # most objects to search for captured tensors, the nearest first
NUMBERS = (int, float, bool)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_COPIED = 4096  # most elements of a tensor whose values are compared at each call
_LIBRARIES = ("builtins", "ftp", "numpy", "optree", "torch", "transformers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CACHE = type(functools.cache(repr))  # also of `functools.lru_cache`
kept_by_traces = WeakIdKeyDictionary()  # the tensors that traces left where the function keeps them
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True, eq=False)
class ReadTensor:
    """A captured tensor that a function read as Python numbers, and what it held then.

    Attributes:
        bits: its elements, as of `_bits`; None where only the version tells: on a device, of many
            elements.
    """

    tensor: Tensor
    version: int
    dtype: torch.dtype
    bits: Tensor | None

    @property
    def has_changed(self) -> bool:
        if self.bits is None:
            return version(self.tensor) != self.version
        if self.tensor.dtype is not self.dtype or self.tensor.device.type != "cpu":
            return True
        return not torch.equal(_bits(self.tensor), self.bits)


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """The elements as integers, which tell -0.0 from 0.0, and a NaN from none."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if not x.is_floating_point():
        return x
    return x.detach().resolve_neg().view(_OF_SIZE[x.element_size()])


def have_changed(read: Iterable[ReadTensor]) -> bool:
    """Whether any of these tensors has changed, asked while a function is traced."""
    with disable_current_modes(), temporarily_clear_interpreter_stack(), DisableTorchFunction():
        return any(each.has_changed for each in read)


def read_now(tensor: Tensor) -> ReadTensor:
    """A captured tensor as it is now. Its values show writes that versions do not, to ``x.data``
    or by numpy.
    """
    with disable_current_modes(), temporarily_clear_interpreter_stack(), DisableTorchFunction():
        bits, storage = None, storage_of(tensor)
        if storage is not None and tensor.device.type == "cpu" and tensor.numel() <= _COPIED:
            bits = _bits(tensor).clone()
        return ReadTensor(tensor, version(tensor), tensor.dtype, bits)


@dataclass(frozen=True, eq=False)
class Captured:
    """A tensor or number that a function finds outside of its arguments, and one place of it.

    Attributes:
        name: the place, as ``'masks['causal']', which loss (train.py:3) reads``.
        holder, key: a cell, dict or list, and where in it the tensor is.
        read: the tensor as it was, where the function read it as Python numbers.
    """

    name: str
    value: Any
    holder: Any
    key: Any
    read: ReadTensor | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the place holds another object, or other numbers than were read."""
        if self.now() is not self.value:
            return True
        return self.read is not None and self.read.has_changed

    def now(self) -> Any:
        """The object that the place holds now; the captured value if the place is gone."""
        return _item(self.holder, self.key, self.value)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class _TupleItems:
    """The items of the tuple that a place holds: an item is put there with another tuple."""

    def __init__(self, place: Captured) -> None:
        self._place = place

    def __getitem__(self, i: int) -> Any:
        return self._place.now()[i]

    def __setitem__(self, i: int, value: Any) -> None:
        now = self._place.now()
        items = (*now[:i], value, *now[i + 1 :])
        self._place.put(now._make(items) if hasattr(now, "_make") else type(now)(items))


def places_of(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Captured]:
    """Where ``fn`` and the objects that it refers to hold ``tensors``: variables, items of dicts
    and lists, attributes.

    >>> import torch
    >>> mask = torch.ones(2)
    >>> [place.name for place in places_of(eval("lambda x: x * mask", {"mask": mask}), [mask])]
    ["'mask', which <lambda> reads"]
    """
    wanted = set(map(id, tensors))
    return [place for place in tensors_around(fn) if id(place.value) in wanted] if wanted else []


def tensors_around(fn: Callable[..., Any]) -> Iterator[Captured]:
    """The tensors that ``fn`` and the objects that it refers to hold."""
    return (place for place in places_around(fn) if isinstance(place.value, Tensor))


def places_around(fn: Callable[..., Any]) -> Iterator[Captured]:
    """The tensors and numbers that ``fn`` and the objects that it refers to hold."""
    for reader, name, holder, key, value in _around(fn):
        if _is_leaf(value):
            yield Captured(f"{name!r}, which {reader} reads", value, holder, key)


def held_around(fn: Callable[..., Any]) -> Iterator[tuple[Any, Any, Any]]:
    """What ``fn`` and the objects that it refers to hold: holder, key there, value."""
    return (place[2:] for place in _around(fn))


def functions_around(fn: Callable[..., Any]) -> list[types.FunctionType]:
    """``fn`` and the functions that it refers to, by name or in objects."""
    found = [fn, *(value for *_, value in _around(fn, _members))]
    return [value for value in found if isinstance(value, types.FunctionType)]


def caches_around(fn: Callable[..., Any]) -> list[Any]:
    """The functions that `functools.lru_cache` or `functools.cache` made, around ``fn``."""
    found = [fn, *(value for *_, value in _around(fn, _members))]
    return [value for value in found if isinstance(value, _CACHE)]


def _members(visited: Any) -> Iterator[Any]:
    """The functions of an object's classes, and the caches of a module's functions."""
    if isinstance(visited, types.ModuleType):
        # Its type, not its __class__: torch.distributed.reduce_op warns when it is asked for that.
        yield from (value for value in [*vars(visited).values()] if issubclass(type(value), _CACHE))
        return
    program = visited.modules if isinstance(visited, ModuleProgram) else ()
    own = visited if isinstance(visited, type) else type(visited)
    kinds = dict.fromkeys((own, *(type(m.module) for m in program)))
    for cls in dict.fromkeys(cls for kind in kinds for cls in kind.__mro__):
        if cls.__module__.partition(".")[0] not in _LIBRARIES:
            for value in [*vars(cls).values()]:
                if isinstance(value, property):
                    value = value.fget
                elif isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                if isinstance(value, types.FunctionType | _CACHE):
                    yield value


def _around(
    fn: Callable[..., Any], members: Callable[[Any], Iterable[Any]] = lambda _: ()
) -> Iterator[tuple[str, str, Any, Any, Any]]:
    """What ``fn`` and the objects that it refers to hold: the reader, a name, the holder, the key
    there, and the value; and what else are ``members`` of each.
    """
    seen: set[int] = set()
    queue = [("", Captured("", fn, {}, ""))]
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
            if not _is_leaf(value):
                queue.append((reader, Captured(own, value, holder, key)))
        for value in members(visited):
            yield reader, name, {}, "", value
            queue.append((reader, Captured(name, value, {}, "")))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value) in (*NUMBERS, *SYMBOLIC)


def with_read(places: Sequence[Captured], read: Sequence[ReadTensor]) -> list[Captured]:
    """The places, with what tensors held that the function read as Python numbers."""
    held = {id(each.tensor): each for each in read}
    found = [replace(place, read=held.get(id(place.value))) for place in places]
    placed = {id(place.value) for place in places}
    for each in read:
        if id(each.tensor) not in placed:
            name = f"A captured tensor of shape {tuple(each.tensor.shape)}"
            found.append(Captured(name, each.tensor, [each.tensor], 0, each))
    return found


def check_unchanged(captured: list[Captured], *, stacklevel: int) -> None:
    """Warn of each place that now holds another object, once, and forget it. What a trace of the
    function put there, such as a longer table, is no reason to warn.

    Raises:
        InputError: a tensor that the function read as Python numbers was written to since.
    """
    for place in [place for place in captured if place.now() is not place.value]:
        captured.remove(place)
        now = place.now()
        if isinstance(now, Tensor) and now in kept_by_traces:
            continue
        what = f"a tensor of shape {tuple(now.shape)}" if isinstance(now, Tensor) else repr(now)
        warnings.warn(
            f"{place.name}, is another object now, {what}. The step still uses the tensor of shape"
            f" {tuple(place.value.shape)} that it captured when it was traced. Pass a tensor that"
            " changes as an argument of the step, or make the step anew.",
            StaleCaptureWarning,
            stacklevel=stacklevel + 1,
        )
    for place in captured:
        if place.is_stale:
            raise InputError(
                f"{place.name}, was read as Python numbers when the step was traced, by int(x),"
                " .item() or .tolist(), and was written to since: the step would go on with the"
                " numbers of then. Pass the numbers as an argument, or make the step anew."
            )


def _item(holder: Any, key: Any, default: Any) -> Any:
    try:
        return holder.cell_contents if isinstance(holder, types.CellType) else holder[key]
    except (ValueError, LookupError):  # an empty cell, an item that is gone
        return default


def _described(visited: Any) -> str:
    code = getattr(visited, "__code__", None)
    if not isinstance(code, types.CodeType):
        return ""
    line = describe_line(code.co_filename, code.co_firstlineno).split("  ")[0]
    return code.co_name if code.co_filename.startswith("<") else f"{code.co_name} ({line})"


def _places_in(visited: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The objects that an object refers to: a name for each, its holder (cell, dict or list), and
    its key there.
    """
    if isinstance(visited, types.FunctionType):
        yield from zip(
            visited.__code__.co_freevars,
            visited.__closure__ or (),
            visited.__code__.co_freevars,
            strict=True,
        )
        yield from _defaults(visited)
        if is_users(visited.__code__):
            yield from (
                (variable, visited.__globals__, variable)
                for variable in _globals_read(visited.__code__)
            )
    elif isinstance(visited, types.MethodType):
        yield "self", {"": visited.__self__}, ""
        yield name, {"": visited.__func__}, ""
    elif isinstance(visited, functools.partial):
        yield from (
            (name, values, key)
            for values in ({"": visited.func}, visited.keywords)
            for key in values
        )
    elif isinstance(visited, dict):
        yield from ((f"{name}[{key!r}]", visited, key) for key in list(visited))
    elif isinstance(visited, list | tuple | deque):
        yield from ((f"{name}[{i}]", visited, i) for i in range(len(visited)))
    elif isinstance(visited, ModuleProgram):
        yield from (
            (f"{module.path}.{key}", module.attributes, key)
            for module in visited.modules
            for key, value in module.attributes.items()
            if (key in _HOOKS and value)
            or (key not in OF_MODULES and (isinstance(value, _FUNCTIONS) or is_plain_object(value)))
        )
    elif isinstance(visited, nn.Module):
        own, registered = visited.__dict__, ("_parameters", "_buffers", "_modules")
        held = (own, *(own[kind] for kind in registered))
        yield from (
            (f"{name}.{key}", of, key) for of in held for key in list(of) if key not in registered
        )
    elif type(visited).__module__.partition(".")[0] not in _LIBRARIES and not isinstance(
        visited, type
    ):
        own = getattr(visited, "__dict__", {})
        yield from ((f"{name}.{key}", own, key) for key in list(own))
        if isinstance(call := vars(type(visited)).get("__call__"), types.FunctionType):
            yield name, {"": call}, ""


def _defaults(fn: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
    values, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    yield from ((names[i - len(values)], values, i) for i in range(len(values)))
    yield from ((name, keywords, name) for name in keywords)


@functools.cache
def _globals_read(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    read = [
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    return tuple(dict.fromkeys([*read, *(name for c in inner for name in _globals_read(c))]))
