"""Calls of torch in the traced function: which call each op belongs to, and where the call's result
stands in the user's code.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from ftp.axis import is_inside
from ftp.dataclass import dataclass
from ftp.ops.constrain import marked_gradients, probe
from ftp.source import describe_line, is_editable, is_users
from ftp.torch_internals.fake_tensors import FakeTensor
from ftp.torch_internals.functorch import is_batched

aten = torch.ops.aten


class Line(str):
    """A line of the user's code as messages show it, with the number of the call that runs there.
    All ops of one call of torch, forward and backward, have the same number.

    Attributes:
        probes: ``(index, number)``: result ``index`` of the op passes through probe ``number``.
    """

    call: int
    probes: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, call: int, probes: tuple[tuple[int, int], ...] = ()) -> "Line":
        made = super().__new__(cls, text)
        made.call, made.probes = call, probes
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.call, self.probes


@dataclass(frozen=True)
class Expression:
    """A place in a file: from line ``first``, byte ``start``, to before line ``last``, byte
    ``stop``.
    """

    file: str
    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True)
class Output:
    """The output of a module of a model, where the model's code is a library's."""

    module: str
    index: int | None = None


@dataclass(frozen=True)
class Operand:
    """An operand of a call as it is written: ``slot`` is an argument's number, its keyword, or
    ``self`` of a method. An operator is a method of its left operand.
    """

    call: Expression
    slot: int | str


Site = Expression | Output | Operand
"""Where a ``constrain`` can be written."""


@dataclass(frozen=True)
class Probe:
    """A probed place, and the number of the call whose result or operand is there; None for a
    module's output.
    """

    site: Site
    call: int | None


@dataclass
class TorchCalls:
    """Numbers the calls of a trace. With ``probes``, each result that the user could constrain
    passes through a probe, forward and backward.

    Attributes:
        now: the number of the call that runs.
        sites: the probes, by number.
    """

    probes: bool = False
    now: int | None = None
    sites: list[Probe] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _modules: list[nn.Module] = field(default_factory=list)

    def line(self, file: str, number: int) -> str:
        text = describe_line(file, number)
        return text if self.now is None else Line(text, self.now)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Number calls inside the block."""
        self._modules.clear()
        hooks = []
        if self.probes:
            hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave),
            ]
        try:
            with marked_gradients(), _Mode(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def probed(self, x: Any, site: Site) -> Any:
        """``x`` through a new probe. Unchanged if it is no tensor, or an example of ``vmap``, which
        has fewer dims in the source.
        """
        if type(x) not in (Tensor, FakeTensor) or is_batched(x):
            return x
        self.sites.append(Probe(site, self.now))
        return probe(x, len(self.sites) - 1)

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        site = None
        if self.probes and not is_inside() and _makes_new(func, kwargs):
            site = _expression(sys._getframe(2))
        before, self.now = self.now, next(self._numbers)
        try:
            if site is None:
                return func(*args, **kwargs)
            args = tuple(self.probed(x, Operand(site, _slot(func, i))) for i, x in enumerate(args))
            kwargs = {name: self.probed(x, Operand(site, name)) for name, x in kwargs.items()}
            return self.probed(func(*args, **kwargs), site)
        finally:
            self.now = before

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        self._modules.append(module)
        site = _expression(sys._getframe(1)) if len(self._modules) > 1 else None
        if site is None or is_inside():
            return args
        return tuple(self.probed(x, Operand(site, i)) for i, x in enumerate(args))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> Any:
        self._modules.pop()
        if not self._modules or is_inside():
            return None
        site = _expression(sys._getframe(1))
        if site is not None:
            return self.probed(out, site) if isinstance(out, Tensor) else None
        root = self._modules[0]
        path = next((name for name, m in root.named_modules() if m is module), "")
        if not path:
            return None
        if isinstance(out, Tensor):
            return self.probed(out, Output(path))
        if type(out) is tuple:
            return tuple(self.probed(x, Output(path, i)) for i, x in enumerate(out))
        return None


class _Mode(TorchFunctionMode):
    def __init__(self, calls: TorchCalls):
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._calls.call(func, args, kwargs or {})


def _slot(func: Callable[..., Any], i: int) -> int | str:
    name = getattr(func, "__name__", "")
    is_reversed = name.startswith("__r") and name != "__round__"
    if name.startswith("__"):
        return "self" if i == is_reversed else 0
    if getattr(Tensor, name, None) is func:
        return i - 1 if i else "self"
    return i


def _makes_new(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call's result has its own memory; a probe of a view would hide writes to it."""
    name = getattr(func, "__name__", "")
    name = {"__matmul__": "matmul", "__rmatmul__": "matmul"}.get(name, name)
    if "out" in kwargs or (name.endswith("_") and not name.endswith("__")):
        return False
    if name.startswith("__"):
        return name.strip("_") in _OPERATORS
    overloads = getattr(aten, name, None)
    if overloads is None:
        return True
    schemas = [getattr(overloads, overload)._schema for overload in overloads.overloads()]
    return not any(
        r.alias_info is not None
        for s in schemas
        if not any(a.is_out for a in s.arguments)
        for r in s.returns
    )


_NAMES = "add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs mod floordiv"
_OPERATORS = frozenset(_NAMES.split())
# Code that runs between the user's expression and the op or module that it calls.
_PASSED = (
    "overrides.py", "functional.py", "_tensor.py", "_jit_internal.py", "module.py",
    "_symbolic_trace.py", "proxy_tensor.py", "_ops.py", "function.py", "ops/constrain.py",
)  # fmt: skip


def _expression(frame: FrameType | None) -> Expression | None:
    """The user's expression that is being evaluated in the frames above the caller's."""
    while frame is not None and not is_users(frame.f_code):
        code = frame.f_code
        if code.co_name != "__torch_function__" and not code.co_filename.endswith(_PASSED):
            return None
        frame = frame.f_back
    if frame is None or not is_editable(frame.f_code.co_filename):
        return None
    return _at(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=65536)
def _at(code: CodeType, instruction: int) -> Expression | None:
    positions = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    if positions is None or None in positions:
        return None
    first, last, start, stop = positions
    return Expression(code.co_filename, first, last, start, stop)  # type: ignore[arg-type]
