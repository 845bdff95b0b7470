"""To the user's own code the rows that a mask selects are a tensor: who asks for their class."""

import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType, UnionType
from typing import Any

import torch
from torch import Tensor

from ftp.source import is_users

# Of an expression that asks for a class: for each instruction that loads, what it loads, and
# whether that is an attribute of what was loaded before.
_Loaded = tuple[tuple[str, bool], ...]
_OF_DTYPE = type(torch.FloatTensor)


def is_asked_for_tensor() -> bool:
    """Whether the property that calls this is read by ``isinstance`` of a ``Tensor``, by ``match``,
    by ``torch.is_tensor``, by ``singledispatch``, or as ``x.__class__``, in code that is neither
    torch's nor ours. torch's C++ code reads ``__class__`` too, of its arguments, and takes memory
    that says it is a tensor for one.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code is torch.is_tensor.__code__:
        return frame.f_back is not None and is_users(frame.f_back.f_code)
    if frame is None or not (frame.f_code in _DISPATCHES or is_users(frame.f_code)):
        return False
    loads = _asking(frame.f_code).get(frame.f_lasti)
    return loads is not None and (not loads or _names_tensor(loads, frame))


def _functions(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _functions(inner)


_DISPATCHES = frozenset(
    found
    for by in (functools.singledispatch, functools.singledispatchmethod.__get__)
    for found in _functions(by.__code__)
)


@functools.lru_cache(maxsize=4096)
def _asking(code: CodeType) -> dict[int, _Loaded]:
    """By the offsets of instructions that call ``isinstance`` or match a class, what is loaded from
    where the expression begins on; nothing by those of ``x.__class__``.
    """
    found, begun = list(dis.get_instructions(code)), dict[Any, int]()
    asking: dict[int, _Loaded] = {}
    for i, at in enumerate(found):
        if at.opname == "LOAD_ATTR" and at.argval == "__class__":
            asking[at.offset] = ()
        if at.positions is None or at.positions.col_offset is None:
            continue
        begin, matches = begun.setdefault(at.positions[::2], i), at.opname == "MATCH_CLASS"
        if matches or "CALL" in at.opname:
            loads = tuple(each for x in found[begin:i] for each in _loaded(x))
            if loads and (matches or loads[0][0] == "isinstance"):
                asking[at.offset] = loads
    return asking


def _loaded(at: dis.Instruction) -> Iterator[tuple[str, bool]]:
    if at.opname.startswith("LOAD") and at.opname != "LOAD_CONST":
        names = at.argval if isinstance(at.argval, tuple) else (at.argval,)
        for name in names:
            yield str(name), at.opname in ("LOAD_ATTR", "LOAD_METHOD")


def _names_tensor(loads: _Loaded, frame: FrameType) -> bool:
    """Whether a class that is loaded is ``Tensor``, and none that of a dtype
    (``torch.FloatTensor``): these read the memory of what says it is a tensor.
    """
    classes, value = list[Any](), None
    for name, is_attribute in loads:
        if not is_attribute:
            value = frame.f_locals.get(name, frame.f_globals.get(name))
        elif isinstance(value, ModuleType | type):
            value = getattr(value, name, None)
        else:
            value = inspect.getattr_static(value, name, None)
        classes += _classes_in(value)
    return any(of is Tensor for of in classes) and not any(type(of) is _OF_DTYPE for of in classes)


def _classes_in(value: Any) -> Iterator[Any]:
    """The classes that a second argument of ``isinstance`` names."""
    if type(value) is tuple:
        for each in value:
            yield from _classes_in(each)
    elif isinstance(value, UnionType):
        yield from value.__args__
    elif isinstance(value, type) or type(value) is _OF_DTYPE:
        yield value
