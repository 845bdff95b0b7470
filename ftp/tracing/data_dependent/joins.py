"""Joins: an ``if`` that only computes is run once, for both values of its condition.

k decisions have 2^k paths, each of which takes a run. The body of a joinable statement
(``joinable.py``) always runs instead: its writes to tensors count only if the condition holds, each
name that it binds is chosen between its values before and after, and no gradient enters it if the
condition does not hold. If that is impossible, `Rerun` ends the run, and the paths are followed.

``sys.settrace`` tells when a statement ends, as it tells a debugger.
"""

import enum
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftp.dataclass import dataclass
from ftp.functional.writes import written_by
from ftp.ops.assume import Condition
from ftp.source import is_users, user_line
from ftp.torch_internals.autograd_state import current_graph_task_id
from ftp.torch_internals.functorch import unwrapped
from ftp.torch_internals.modes import DisableTorchFunction
from ftp.torch_internals.storages import version
from ftp.tracing.data_dependent.joinable import Joinable, changes_objects, joinable_at
from ftp.tracing.data_dependent.paths import Rerun
from ftp.tracing.data_dependent.traced_number import TracedNumber
from ftp.tracing.nested_arguments import flat
from ftp.tracing.selected_rows.row_functions import VIEWING
from ftp.tracing.selected_rows.selected import Selected


class _Entered(torch.autograd.Function):
    """A tensor as a statement reads it: its gradient is zero if the condition does not hold."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, is_taken: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _or_zero(ctx.saved_tensors[0], grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return _or_zero(ctx.saved_tensors[0], tangent)


def _or_zero(is_taken: Tensor, x: Tensor) -> Tensor:
    return torch.where(is_taken, x, torch.zeros((), dtype=x.dtype, device=x.device))


_ASKED_BY_IDENTITY = enum.Enum, type, FunctionType, MethodType, BuiltinFunctionType
_REFUSED = ("grad", "backward", "requires_grad_", "set_", "__set__")
# Writes whose gradients are those of the written values, times one or zero.
_PLAIN_WRITES = {
    "__setitem__", "copy_", "fill_", "zero_", "add_", "__iadd__", "sub_", "__isub__",
    "masked_fill_", "index_put_", "index_add_", "index_copy_", "index_fill_", "scatter_",
    "scatter_add_",
}  # fmt: skip


class _Statement(TorchFunctionMode):
    """The run of one statement.

    Attributes:
        is_taken: whether the condition holds.
        line: of the condition.
        before: the names of the frame before it.
        own: tensors that it made, by their memory.
    """

    def __init__(
        self, joins: "Joins", frame: FrameType, statement: Joinable, is_taken: Tensor, line: str
    ):
        super().__init__()
        self.joins = joins
        self.frame, self.statement, self.is_taken, self.line = frame, statement, is_taken, line
        self.before: dict[str, Any] = dict(frame.f_locals)
        self.is_entered, self.own = False, dict[int, Tensor]()
        self._entered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _REFUSED or kwargs.get("out") is not None:
            raise Rerun
        written = [x for x in map(_storing, written_by(func, args, kwargs)) if not self._is_own(x)]
        if written:
            if name not in _PLAIN_WRITES and any(map(_is_smooth, written)):
                return self._computed_in_place(func, written, args, kwargs)
            before = [x.clone() for x in written]
            out = func(*args, **kwargs)
            for x, was in zip(written, before, strict=True):
                x.copy_(torch.where(self.is_taken, x, was))
            return out
        if name in VIEWING:
            return func(*args, **kwargs)
        entered, by_name = self._as_entered(args), self._as_entered(kwargs)
        out = func(*entered, **by_name)
        given = {_memory(x) for x in flat((args, kwargs)) if isinstance(x, Tensor)}
        results = [x for x in flat(out) if isinstance(x, Tensor)]
        if any(_memory(x) in given and not self._is_own(x) for x in results):
            out = func(*args, **kwargs)  # a view, to which the statement may write
        for x in flat(out):
            if isinstance(x, Tensor) and (memory := _memory(x)) not in given:
                self.own[memory] = x
        return out

    def _computed_in_place(self, func: Any, written: list[Any], args: Any, kwargs: Any) -> Tensor:
        """Compute a tensor in place, as ``mul_`` does. The tensor enters the statement like other
        operands: the op's gradient may be zero times infinity if the condition does not hold.
        """
        x: Any = args[0] if args else None
        if len(written) != 1 or written[0] is not x:
            raise Rerun
        new = self._as_entered(x).clone()
        func(new, *self._as_entered(args[1:]), **self._as_entered(kwargs))
        x.copy_(torch.where(self.is_taken, new, x))
        return x

    def _is_own(self, x: Tensor) -> bool:
        return _memory(x) in self.own

    def _as_entered(self, tree: Any) -> Any:
        if isinstance(tree, Selected):
            return Selected(self._as_entered(tree.rows), tree.group, tree.upper_bound, tree.row_dim)
        if isinstance(tree, Tensor):
            if not _is_smooth(tree) or self._is_own(tree) or not torch.is_grad_enabled():
                return tree
            key = id(tree), version(tree)
            if key not in self._entered:
                entered: Any = _Entered.apply(tree, self.is_taken)
                self._entered[key] = entered, tree
            return self._entered[key][0]
        if type(tree) in (list, tuple):
            return type(tree)(map(self._as_entered, tree))
        if type(tree) is dict:
            return {key: self._as_entered(value) for key, value in tree.items()}
        return tree

    def check_written(self, after: Mapping[str, Any]) -> None:
        """End the run if the statement writes to elements of anything but a tensor, such as a
        dict.
        """
        for path in self.statement.written:
            name, *attributes = path.split(".")
            target = after.get(name, self.frame.f_globals.get(name))
            for attribute in attributes:
                target = getattr(target, attribute, None)
            if not isinstance(target, Tensor | Selected):
                raise Rerun

    def chosen(self, after: Mapping[str, Any]) -> dict[str, Any]:
        """The values after the statement of the names that it binds."""
        return {
            name: self._either(self.before[name], after[name])
            for name in self.statement.names
            if name in self.before and name in after
        }

    def _either(self, was: Any, now: Any) -> Any:
        if Either in (type(was), type(now)):
            return Either()
        if (was is None) != (now is None):
            raise Rerun  # ``is None`` cannot be asked of both
        if was is not now and isinstance(now, _ASKED_BY_IDENTITY):
            raise Rerun
        if was is now:
            if isinstance(was, list | dict | set):
                raise Rerun  # it may have other elements now
            return now
        if _is_number(was) and _is_number(now):
            if type(was) is type(now) and not isinstance(was, TracedNumber) and was == now:
                return now
            return TracedNumber(torch.where(self.is_taken, _value(now), _value(was)))
        pair = self._as_tensors(was, now)
        if pair is not None:
            chosen = torch.where(self.is_taken, *pair)
            self.joins.outside.of.append((chosen, *pair))
            return chosen
        if type(was) is type(now) is tuple and len(was) == len(now):
            return tuple(map(self._either, was, now))
        return Either()

    def _as_tensors(self, was: Any, now: Any) -> tuple[Tensor, Tensor] | None:
        """Both values as tensors that ``torch.where`` takes: (now, was)."""
        if isinstance(was, int | float) and isinstance(now, Tensor) and not now.ndim:
            if isinstance(was, TracedNumber) or (type(was) is float and not _is_smooth(now)):
                return None
            was = torch.full((), was, dtype=now.dtype, device=now.device)
        if not (isinstance(was, Tensor) and isinstance(now, Tensor)):
            return None
        is_alike = (was.shape, was.dtype, was.device) == (now.shape, now.dtype, now.device)
        return (now, was) if is_alike else None


def _held(x: Any) -> list[Tensor]:
    if type(x) is Either:
        return []
    if isinstance(x, Selected):
        return [_storing(x)]
    if type(x) in (list, tuple):
        return [y for item in x for y in _held(item)]
    return [x] if isinstance(x, Tensor) else []


def _memory(x: Tensor) -> int:
    with DisableTorchFunction():
        return unwrapped(x).untyped_storage()._cdata


def _is_smooth(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_number(x: Any) -> bool:
    return isinstance(x, TracedNumber) or type(x) in (int, float, bool)


def _value(x: Any) -> Tensor:
    if isinstance(x, TracedNumber):
        return x.value
    return torch.tensor(x, dtype=torch.float64 if type(x) is float else None)


def _storing(x: Any) -> Tensor:
    """The tensor to which a write to ``x`` goes."""
    if not isinstance(x, Selected):
        return x
    return x._rows if x.base is None else x.base


class Either:
    """The value of a name whose two values no tensor can stand for, such as a loop's temporary. The
    name may be bound again, but not used.
    """

    def _used(self, *_: Any, **__: Any) -> Any:
        raise Rerun

    __class__ = property(_used)
    __getattr__ = __call__ = __iter__ = __len__ = __bool__ = __index__ = __int__ = __float__ = _used
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __contains__ = _used
    __getitem__ = __setitem__ = __enter__ = __exit__ = __str__ = __repr__ = __format__ = _used

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise Rerun


_OPERATORS = """
    add sub mul truediv floordiv mod pow matmul and or xor lshift rshift
"""
for _name in _OPERATORS.split():
    for _kind in ("", "r", "i"):
        setattr(Either, f"__{_kind}{_name}__", Either._used)
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Either, f"__{_name}__", Either._used)


class _Outside(TorchFunctionMode):
    """Ends the run if an op reads memory that would hold other values on one device.

    Attributes:
        of: tensors chosen between two values, with both. On one device a chosen tensor has the
            memory of one of them, so that a write to one of the three changes the others.
        stale: tensors that no op may read, by their memory: these, and what a statement made and
            kept elsewhere than in its names, such as a cached property, which has a gradient only
            where the statement is taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: list[tuple[Tensor, Tensor, Tensor]] = []
        self.stale: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (self.of or self.stale) and current_graph_task_id() == -1:
            self.check(flat((args, kwargs)))
            for x in map(_storing, written_by(func, args, kwargs)):
                self._write(_memory(x))
        return func(*args, **kwargs)

    def check(self, tensors: Iterable[Any]) -> None:
        if self.stale and any(isinstance(x, Tensor) and _memory(x) in self.stale for x in tensors):
            raise Rerun

    def _write(self, memory: int) -> None:
        found = {memory}
        linked = [{_memory(x): x for x in group} for group in self.of]
        while more := [g for g in linked if found & g.keys() and g.keys() - found]:
            found.update(*more)
        self.stale |= {
            m: x for g in linked if found & g.keys() for m, x in g.items() if m != memory
        }


_DRAW = "ftp.random.draws", "next_key"
_LIBRARIES = ("ftp", "torch", "optree")  # what they change is no part of the function's results


@dataclass
class Joins:
    """The statements of one run that are being run for both values of their conditions."""

    outside: _Outside = field(default_factory=_Outside)
    _open: list[_Statement] = field(default_factory=list)

    def __enter__(self) -> "Joins":
        self.outside = _Outside()
        self.outside.__enter__()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        is_open = bool(self._open)
        self._abandon()
        self.outside.__exit__(None, None, None)
        if is_open and kind is None:
            raise Rerun  # the end of a statement was not seen

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def begin(self, condition: Tensor, frame: FrameType | None) -> bool | None:
        """Begin the statement whose condition ``frame`` evaluates: the condition's value in the
        run; None where it cannot be joined.
        """
        statement = None if frame is None else joinable_at(frame)
        other_tracer = sys.gettrace() is not None and not self._open
        if frame is None or statement is None or other_tracer:
            return None
        is_taken = condition if statement.value else ~condition
        region = _Statement(self, frame, statement, is_taken, user_line())
        self._open.append(region)
        frame.f_trace, frame.f_trace_opcodes = self._enter(region), True
        sys.settrace(self._call)
        return statement.value

    def _enter(self, region: _Statement) -> Any:
        def step(frame: FrameType, event: str, _: Any) -> Any:
            # The first instruction of the frame after the condition's value was asked for.
            frame.f_trace_opcodes = False
            region.__enter__()
            region.is_entered = True
            return self._line(frame, event, _)

        return step

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "exception":
            if value[0] is not StopIteration:
                self._abandon(frame)
            return self._line
        if event not in ("line", "return"):
            return self._line
        names = frame.f_locals
        while self._open and self._open[-1].frame is frame:
            region = self._open[-1]
            inside = region.statement.first <= frame.f_lineno <= region.statement.last
            if event == "line" and inside:
                break
            self._close()
            region.check_written(names)
            if event == "line":
                names.update(region.chosen(names))
                kept = {_memory(x) for n in region.statement.names for x in _held(names.get(n))}
                self.outside.stale |= {m: x for m, x in region.own.items() if m not in kept}
        return self._line

    def _close(self) -> None:
        region = self._open.pop()
        if region.is_entered:
            region.__exit__(None, None, None)
        if not self._open:
            sys.settrace(None)

    def _abandon(self, frame: FrameType | None = None) -> None:
        """End the open statements of ``frame``, or of all frames, after an error, and with them
        the use of the run.
        """
        while self._open and (frame is None or self._open[-1].frame is frame):
            self._close()
            Rerun()

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        if (name, frame.f_code.co_name) == _DRAW and self._open:
            raise Rerun  # the numbers of later draws depend on whether it is made
        module = name.partition(".")[0]
        is_called = event == "call" and self._open and module not in _LIBRARIES
        if is_called and is_users(frame.f_code) and changes_objects(frame.f_code):
            raise Rerun
        return None

    def where_taken(self, condition: Condition, claim: str) -> tuple[Condition, str]:
        """A claim that is made in the open statements."""
        if not self._open:
            return condition, claim
        lines = " and ".join(region.line for region in self._open)
        is_taken = torch.stack([region.is_taken for region in self._open]).all()

        def of_all() -> Tensor:
            whole = condition if isinstance(condition, Tensor) else condition()
            return whole | ~is_taken

        return of_all, f"{claim}, where {lines} goes on"
