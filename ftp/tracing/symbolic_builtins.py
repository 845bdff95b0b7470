"""``int``, ``float``, ``range``, ``divmod`` and ``len`` of sizes, which stay formulas, and their
``type``. Python's own give plain numbers, and such a trace serves one size.

No class can make Python's ``int`` return anything but an int. So while a function is traced with
symbolic sizes, the user's code calls functions of ours instead. Of installed libraries a trace
finds out that they need it, where Python's own ask a size for its value: it ends, and is made anew.
"""

import builtins
import dis
import functools
import gc
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt

from ftp.dataclass import dataclass
from ftp.source import is_editable, is_users
from ftp.torch_internals.tracer_lock import TRACING
from ftp.tracing.kept_state import kept_state
from ftp.tracing.places import functions_around
from ftp.tracing.python_numbers import KINDS
from ftp.tracing.replacements.replaced import replaced

_MARK = " of sizes"  # no name that code can have


class AsksNumber(BaseException):
    """Ends a trace, which is made again as `NumbersMade` has changed. Only ours catches it."""


@dataclass
class NumbersMade:
    """How the code of a function makes numbers of sizes.

    Attributes:
        libraries: the globals of installed modules whose code calls our functions.
        are_plain: the function needs plain numbers, as for keys of dicts.
        has_made: a call of `int` has given a formula.
        is_over: the trace was to end.
    """

    libraries: list[dict[str, Any]] = field(default_factory=list)
    are_plain: bool = False
    has_made: bool = False
    is_over: bool = False

    @contextmanager
    def traced(self, fn: Callable[..., Any]) -> Iterator[None]:
        """Within the block ``fn`` is traced once.

        Raises:
            AsksNumber: trace it again.
        """
        self.is_over = self.has_made = False
        hooks: dict[Any, dict[str, Any]] = {
            SymInt: {name: self._asked(SymInt, name) for name in ("__int__", "__index__")},
            SymFloat: {name: self._asked(SymFloat, name) for name in ("__int__", "__float__")},
        }
        hooks[SymInt] |= {"__hash__": self._hashed(SymInt.__hash__), **_METHODS}
        hooks[SymBool] = {"__hash__": lambda x: hash(bool(x)), "__eq__": _are_equal}
        with TRACING, kept_state(fn), ExitStack() as stack:
            if not self.are_plain:
                stack.enter_context(_called(fn, self.libraries))
            for kind, functions in hooks.items():
                stack.enter_context(replaced(kind, functions))
            _traced.append(self)
            try:
                yield
            except Exception:
                if not self.is_over:
                    raise
            finally:
                _traced.remove(self)
        if self.is_over:  # code may have caught the error
            raise AsksNumber

    def _asked(self, kind: Any, name: str) -> Callable[[Any], Any]:
        """A method that Python calls where code asks a symbolic number for its value."""
        plain = getattr(kind, name)

        def ask(x: Any) -> Any:
            frame = sys._getframe(1)
            is_known = any(frame.f_globals is module for module in self.libraries)
            if not (is_known or self.are_plain) and is_users(frame.f_code) and _can_call(frame):
                self.libraries.append(frame.f_globals)
                self._end()
            return plain(x)

        return ask

    def _hashed(self, plain: Callable[[Any], int]) -> Callable[[Any], int]:
        def hash_of(x: Any) -> int:
            # Of x.shape[1] itself it is an error, which libraries expect.
            if self.has_made and not self.are_plain and is_users(sys._getframe(1).f_code):
                self.are_plain = True
                self._end()
            return plain(x)

        return hash_of

    def _end(self) -> None:
        self.is_over = True
        raise AsksNumber


_traced: list[NumbersMade] = []


def int_of(*args: Any, **named: Any) -> Any:
    if len(args) != 1 or named or not isinstance(args[0], SymInt | SymFloat):
        return int(*args, **named)
    for numbers in _traced:
        numbers.has_made = True
    return args[0] if isinstance(args[0], SymInt) else math.trunc(args[0])


def float_of(*args: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], SymInt | SymFloat):
        return torch.sym_float(args[0])
    return float(*args)


def range_of(*args: Any) -> Any:
    are_ints = len(args) <= 3 and all(isinstance(x, int | SymInt) for x in args)
    if not are_ints or not any(isinstance(x, SymInt) for x in args):
        return range(*args)
    start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    return SymbolicRange(start, stop, step) if step else range(0, 0, 0)


def type_of(*args: Any, **named: Any) -> Any:
    found = type(*args, **named)
    return _KINDS.get(found, found) if len(args) == 1 else found


def divmod_of(x: Any, y: Any) -> Any:
    return (x // y, x % y) if isinstance(x, SymInt) or isinstance(y, SymInt) else divmod(x, y)


def len_of(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.ndim or not isinstance(x.shape[0], SymInt):
        return len(x)
    for numbers in _traced:
        numbers.has_made = True
    return x.shape[0]


CALLS = {
    "int": int_of,
    "float": float_of,
    "range": range_of,
    "type": type_of,
    "divmod": divmod_of,
    "len": len_of,
}


def _are_equal(x: SymBool, y: Any) -> Any:
    """Whether an answer is another one, or a number, at the sizes at hand: a condition."""
    y = bool(y) if isinstance(y, SymBool) else y
    return bool(x) == y if isinstance(y, int | float) else NotImplemented


def _bit_length(x: Any) -> int:
    size, length = abs(x), 0
    while size >= 1 << length:
        length += 1
    return length


_METHODS: dict[str, Callable[..., Any]] = {
    "bit_length": _bit_length,
    "__rpow__": lambda x, base: base ** int(x),
    "__rlshift__": lambda x, n: n << int(x),
    "__lshift__": lambda x, n: x * (1 << int(n)),
    "__rshift__": lambda x, n: x // (1 << int(n)),
}
"""Methods of ``SymInt`` that give formulas which `Sizes` can hold, or numbers of many sizes."""


class SymbolicRange(Sequence[Any]):
    """A ``range`` of sizes: its length is a number, a condition of the trace."""

    def __init__(self, start: Any, stop: Any, step: Any, length: int | None = None):
        self.start, self.stop, self.step = start, stop, step
        if length is None:
            count: Any = -((start - stop) // step)
            # Not equal to 0 or to 1: the size of a dim is taken for neither.
            length = 0 if count < 1 else 1 if count < 2 else int(count)
        self._numbers = range(length)

    @property
    def __class__(self) -> type:
        return range

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            part = self._numbers[i]
            start, stop = (self.start + n * self.step for n in (part.start, part.stop))
            return SymbolicRange(start, stop, part.step * self.step, len(part))
        return self.start + self._numbers[i] * self.step

    def __eq__(self, other: object) -> bool:
        return isinstance(other, range) and [*self] == [*other]

    def __hash__(self) -> int:
        return hash(self._plain())

    def __repr__(self) -> str:
        return repr(self._plain())

    def _plain(self) -> range:
        """The range at the sizes at hand, which become guards."""
        return range(int(self.start), int(self.stop), int(self.step))


_LARGE = 10_000  # entries of a container that holds data rather than functions
_CONTAINERS = (dict, list, tuple)
_HOLDERS = (
    *(*_CONTAINERS, CellType, MethodType),
    *(classmethod, staticmethod, property, functools.partial),
)
_KINDS = {**KINDS, SymbolicRange: range}


def _can_call(frame: FrameType) -> bool:
    """Whether the code that runs would call one of our functions in the next trace. Code that the
    trace itself makes by ``exec`` is another one then.
    """
    module = sys.modules.get(str(frame.f_globals.get("__name__")))
    is_of_module = getattr(module, "__dict__", None) is frame.f_globals
    return is_of_module and _calling(frame.f_code, _names(frame.f_globals)) is not frame.f_code


def _names(module: dict[str, Any]) -> list[str]:
    """The names by which a module's code calls Python's own functions."""
    if module.get("__builtins__") not in (builtins, vars(builtins)):
        return []
    return [name for name in CALLS if name not in module]


@contextmanager
def _called(fn: Callable[..., Any], libraries: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Within the block the user's functions call ours, and so do those of these libraries."""
    # Kept: other threads may go on with the code.
    for name, function in CALLS.items():
        setattr(builtins, name + _MARK, function)
    functions = _functions(fn, libraries)
    changed = [
        (function, code, new)
        for function in functions
        if (new := _calling(code := function.__code__, _names(function.__globals__))) is not code
    ]
    try:
        for function, _, code in changed:
            function.__code__ = code
        yield
    finally:
        for function, code, _ in changed:
            function.__code__ = code


def _functions(fn: Callable[..., Any], libraries: Sequence[dict[str, Any]]) -> list[FunctionType]:
    """The user's functions, around ``fn`` and of modules, and those of these libraries."""
    modules = {
        name: module
        for name, module in [*sys.modules.items()]
        if name == "__main__"
        or is_editable(str(getattr(module, "__dict__", {}).get("__file__") or math))
    }
    names = {*modules, *(str(module.get("__name__")) for module in libraries)}
    own = set(map(id, libraries))
    # The collector's list of all objects would hold tuples that other threads are filling.
    stack: list[Any] = [*functions_around(fn), *map(vars, modules.values()), *libraries]
    seen, found = set[int](), []
    while stack:
        x = stack.pop()
        kind = type(x)  # not its __class__, which proxies compute
        is_large = kind in _CONTAINERS and len(x) > _LARGE
        if id(x) in seen or is_large:
            continue
        seen.add(id(x))
        if kind is FunctionType:
            if is_editable(x.__code__.co_filename) or id(x.__globals__) in own:
                found.append(x)
                stack += [*(x.__closure__ or ()), x.__dict__]
        elif issubclass(kind, _HOLDERS) or (
            str((x if issubclass(kind, type) else kind).__module__) in names
        ):
            stack += gc.get_referents(x)
    return found


def _calling(code: CodeType, names: Sequence[str]) -> CodeType:
    """The code with calls of our functions instead of those of these names; ``code`` itself where
    it has none.
    """
    inner = tuple(_calling(x, names) if type(x) is CodeType else x for x in code.co_consts)
    raw, globals_read = bytearray(code.co_code), list(code.co_names)
    if not set(names).isdisjoint(globals_read):
        for each in dis.get_instructions(code):
            # The last bit of the argument: the global is called.
            if each.opname == "LOAD_GLOBAL" and each.argval in names and (each.arg or 0) & 1:
                if each.argval + _MARK not in globals_read:
                    globals_read.append(each.argval + _MARK)
                new = globals_read.index(each.argval + _MARK)
                if new < 128:  # else the argument needs an instruction of its own
                    raw[each.offset + 1] = 2 * new + 1
    if bytes(raw) == code.co_code and all(map(operator.is_, inner, code.co_consts)):
        return code
    return code.replace(co_code=bytes(raw), co_names=tuple(globals_read), co_consts=inner)
