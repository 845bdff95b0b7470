"""Values that a function needs as Python numbers: ``int(mask.sum())`` as a size, ``len(x[mask])``.

A trace has no values but those of captured tensors, and what is computed from them alone. If it
needs another one, it ends there, and its program returns the inputs that the value is computed from
(`ftp.tracing.input_values`): a step runs it, and traces the function again with these values, now
to its end. Where the inputs are large, the program returns the value, and the function is traced
again with the number: then each number that is read has its own program.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ftp.axis import is_inside
from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.errors import TraceError
from ftp.functional.remat import current_region
from ftp.ops.assume import assume, is_listening
from ftp.ops.choose import current_branch
from ftp.source import user_line
from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import is_batched, unwrapped

if TYPE_CHECKING:
    from ftp.tracing.input_values import InputValues

MOST = 32  # values of one call, that each have a program
MOST_BY_OPS = 1024  # values of one call, that plain ops compute
_MOST_ELEMENTS = 4096  # of one value


class Level(IntEnum):
    """Which values are read: as few as the function can be traced with."""

    NEEDED = 0  # those that torch or Python want as numbers
    INTEGERS = 1  # all results of item() and tolist() of integers, and all numbers of selected rows
    DECISIONS = 2  # conditions too, which are followed both ways otherwise


@dataclass(frozen=True)
class ValuesRead:
    """The values that a call has read so far, in order: numbers, and nested tuples of them.

    Attributes:
        inputs: the places of inputs that were whole for it.
        way: to take gradients, by which the function was traced (`ftp.tracing.gradient.WAYS`):
            another one may read other values.
    """

    values: tuple[Any, ...] = ()
    level: Level = Level.NEEDED
    inputs: tuple[int, ...] = ()
    way: str = ""

    def then(self, value: Any) -> "ValuesRead":
        return replace(self, values=(*self.values, frozen(value)))

    def more(self, *, decisions: bool) -> "ValuesRead | None":
        """The start of a trace that reads one more kind of values, or all up to decisions; None if
        all kinds are read.
        """
        if self.level is Level.DECISIONS:
            return None
        level = Level.DECISIONS if decisions else Level(self.level + 1)
        return replace(self, values=(), level=level)


@dataclass(frozen=True)
class Asked:
    """What a program returns in place of the function's result: a value that the function reads at
    ``line``, after those that are ``given``.

    Attributes:
        inputs: the places of inputs that the value can be computed from by plain ops. Where there
            are any, the program returns them instead, whole.
    """

    line: str
    given: ValuesRead
    inputs: tuple[int, ...] = ()


class ValueAsked(BaseException):
    """Ends a run of the function, which asks for a value that is not known."""


@dataclass
class Reading:
    """The values that one trace may read.

    Attributes:
        is_same: whether two tensors hold the same values.
        number: a number for each tensor, equal for those that may hold the same values.
        inputs: computes values from inputs of the program.
        values: those that were read.
        asked: the tensor whose value the run asks for.
        follows_decision: whether it asks after a decision on values, so that more must be read.
        known: tensors that were read, and their values, by number.
        counts: masks, and how many rows each selects, as far as it was read.
    """

    given: ValuesRead
    is_same: Callable[[Tensor, Tensor], bool]
    number: Callable[[Tensor], int]
    inputs: "InputValues"
    values: list[Any] = field(default_factory=list)
    asked: Tensor | None = None
    follows_decision: bool = False
    line: str = ""
    _at: int = 0
    _asked_inputs: tuple[int, ...] = ()
    known: dict[int, list[tuple[Tensor, Any]]] = field(default_factory=dict)
    counts: list[tuple[Tensor, int]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a run of the function, of which a trace may have several."""
        self.asked, self._at = None, 0
        self.inputs.begin()
        self.known.clear()
        self.counts.clear()

    @property
    def is_over(self) -> bool:
        return self.asked is not None or self.follows_decision

    def next(self, x: Tensor) -> Any:
        at, self._at = self._at, self._at + 1
        if not self.values:
            self.values += self.given.values
        if at >= self.inputs.after and at < MOST_BY_OPS:
            found = self.inputs.read_next(x)
            self.values += [found] if found is not None and at == len(self.values) else ()
        if at < len(self.values):
            value = self.values[at]
            claim = f"a value that the function needs as a Python number is {value}"
            assume(lambda: _holds(x, torch.tensor(value, device=x.device)), claim)
            return value
        self.line = user_line()
        self._asked_inputs = self.inputs.inputs_of(x)
        if at >= (MOST_BY_OPS if self._asked_inputs or self.inputs.whole else MOST):
            raise TraceError(
                f"The function reads more than {at} values as Python numbers, the last one at"
                f" {self.line}: they are computed by programs of their own before the function goes"
                " on. Keep numbers as tensors or as x.item(), or read them all by one .tolist(). A"
                " loop that ends by a value is one op with ftp.static.while_loop(cond_fn, body_fn,"
                " carried, max_steps=n)."
            )
        # A copy: the function may write to it in a ``finally`` block.
        self.asked = unwrapped(x.clone())
        raise ValueAsked

    @property
    def read(self) -> ValuesRead:
        return replace(self.given, values=tuple(self.values or self.given.values))

    def made(self) -> Asked:
        return Asked(self.line, self.read, self._asked_inputs)


def _holds(x: Tensor, value: Tensor) -> Tensor:
    """Whether a tensor has a value that was read; of large floats up to the rounding of sums, which
    ranks add in another order.
    """
    if not x.is_floating_point():
        return x == value
    return torch.isclose(x, value.to(x.dtype), rtol=1e-5, atol=0, equal_nan=True)


_reading: ContextVar[Reading | None] = ContextVar("ftp_reading", default=None)
_has_decided: ContextVar[Callable[[], bool]] = ContextVar("ftp_decided", default=lambda: False)
ValueOf = Callable[[Tensor, Callable[[Tensor], Any]], Any]
_of_captured: ContextVar[ValueOf] = ContextVar("ftp_of_captured", default=lambda *_: None)


def captured_values_from(known: ValueOf) -> AbstractContextManager[Any]:
    """Within the block values that are computed from captured tensors alone are known."""
    return set_within(_of_captured, known)


def of_captured(x: Tensor, func: Callable[[Tensor], Any]) -> Any:
    """``func`` of a value that is computed from captured tensors alone; None of another one."""
    return _of_captured.get()(x, func)


@contextmanager
def reading_to(reading: Reading | None, has_decided: Callable[[], bool]) -> Iterator[None]:
    """Within the block functions read values.

    Args:
        has_decided: whether the run of the function has taken one of several ways by now.
    """
    with set_within(_reading, reading), set_within(_has_decided, has_decided):
        yield


def is_reading(level: Level = Level.NEEDED) -> bool:
    """Whether functions may read values, and those of a level."""
    reading = _reading.get()
    return reading is not None and reading.given.level >= level


def read(x: Tensor, *, has_fractions: bool = True) -> Any:
    """The value of a tensor of integers or bools, read once: a Python number, or nested tuples of
    them; None where none may be read.

    Args:
        has_fractions: False for a tensor of floats that are whole numbers, infinite or NaN.
    """
    if (value := of_captured(x, Tensor.tolist)) is not None:
        return frozen(value)
    is_refused = (x.is_floating_point() and has_fractions) or x.is_complex()
    if x.dtype is torch.uint64 or is_refused or (reading := _of(x)) is None:
        return None
    numbered = reading.known.setdefault(reading.number(x), [])
    for known, value in numbered:
        if known.shape == x.shape and reading.is_same(known, x):
            return value
    if current_region() is not None:
        return None
    value = reading.next(_plain(x))
    numbered.append((x, value))
    return value


def read_count(mask: Tensor, count: Callable[[], Tensor]) -> int | None:
    """The number of rows that a mask selects, read once for masks that are the same; None where it
    may not be read.
    """
    if of_captured(mask, Tensor.numel) is not None:
        return of_captured(count(), Tensor.item)
    if (reading := _of(mask)) is None:
        return None
    for known, number in reading.counts:
        if reading.is_same(known, mask):
            return number
    if current_region() is not None:
        return None
    number = reading.next(_plain(count()))
    reading.counts.append((mask, number))
    return number


def _of(x: Tensor) -> Reading | None:
    reading = _reading.get()
    if (
        reading is None
        or not is_listening()
        or is_inside()
        or current_branch()
        or x.numel() > _MOST_ELEMENTS
        or is_batched(x)
        or not is_fake(unwrapped(x))
    ):
        return None
    if reading.asked is not None:  # a block of the function caught the error, or reads at its end
        raise ValueAsked
    if _has_decided.get()():
        reading.follows_decision = True
        raise ValueAsked
    return reading


def _plain(x: Tensor) -> Tensor:
    return unwrapped(x.detach())


def frozen(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return math.nan  # one object, which equals itself in tuples
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def as_lists(value: Any) -> Any:
    return [*map(as_lists, value)] if isinstance(value, tuple) else value


def python_value(func: Any, x: Tensor) -> Any:
    """The result of a method of a tensor that gives Python numbers; None where none may be read.
    Fractions of arguments are not read: a step would have a program for each.
    """
    if func not in _OF_ALL and x.numel() != 1:
        return None  # torch raises an error
    if (known := captured_value(func, x)) is not None:
        return known
    is_truncated = func is Tensor.__int__ and x.is_floating_point()
    if is_truncated:  # not by x.long(), which makes an integer of NaN
        x = x.double().trunc()
    value = as_lists(read(x if func in _OF_ALL else x.reshape(()), has_fractions=not is_truncated))
    if func is Tensor.numpy and value is not None:
        return np.array(value, str(x.dtype).removeprefix("torch.")).reshape(x.shape)
    if value is None or func in _OF_ALL:
        return value
    return _CONVERTED.get(func, lambda number: number)(value)


def captured_value(func: Any, x: Tensor) -> Any:
    """As `python_value`, of captured tensors alone."""
    return of_captured(x, func)


_OF_ALL = (Tensor.tolist, Tensor.numpy)
_CONVERTED: dict[Any, Callable[[Any], Any]] = {
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.__float__: float,
    Tensor.__bool__: bool,
}
