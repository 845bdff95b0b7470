"""Traced numbers: what ``x.item()`` and ``x[mask].shape[0]`` return while a function is traced. The
function computes with them as with Python numbers; the program computes their values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftp.ops.assume import assume
from ftp.torch_internals.error_texts import Meaning, meaning_of
from ftp.torch_internals.fake_tensors import DataDependentOutputException
from ftp.tracing.data_dependent.texts import UNKNOWN, decides
from ftp.tracing.data_dependent.values_read import is_reading, python_value, read_count
from ftp.tracing.nested_arguments import map_leaves
from ftp.tracing.same_values import holds_same
from ftp.tracing.selected_rows.refused import note_needed, number_refused, numpy_refused


class TracedNumber:
    """A number computed from values, for arithmetic and comparisons.

    Attributes:
        value: 0-d, bool, int64 or float64.
        mask: the mask whose selected rows it counts; None for any other number.
    """

    __array_ufunc__ = None  # numpy's numbers leave arithmetic to this class

    def __init__(self, value: Tensor, mask: Tensor | None = None):
        self.value, self.mask = value, mask

    @property
    def __class__(self) -> type:
        if self.value.is_floating_point():
            return float
        return bool if self.value.dtype is torch.bool else int

    def is_of(self, mask: Tensor) -> bool:
        return self.mask is not None and holds_same(self.mask, mask)

    def beside(self, other: Any) -> Tensor:
        """The number as an operand of an op whose other operand is ``other``. As with a Python
        number, only its kind (bool, int or float) takes part in type promotion.
        """
        if other is None or self.value.dtype is torch.bool:
            return self.value
        if self.value.is_floating_point() and _kind(other) < 2:
            return self.value.to(torch.get_default_dtype())
        # A dtype of a tensor with dims is the result's, and may be too small for a place in it.
        return self.value if other.ndim or not _kind(other) else self.value.to(other.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        plain, by_name = without_numbers(args, kwargs or {})
        return func(*plain, **by_name)

    def __bool__(self) -> bool:
        return bool(self.value)

    def read(self, func: Any = Tensor.__index__) -> Any:
        """The number as one of Python, which the program reads before it runs."""
        if self.mask is None:
            number = python_value(func, self.value)
        else:
            number = read_count(self.mask, lambda: self.value)
        if number is None:
            raise number_refused(self.mask is not None)
        return number

    def __int__(self) -> int:
        return int(self.read(Tensor.__int__))

    def __index__(self) -> int:
        return self.read()

    def __float__(self) -> float:
        return float(self.read())

    def __hash__(self) -> int:
        return hash(self.read())

    def __round__(self, digits: int | None = None) -> Any:
        if not self.value.is_floating_point():
            return round(self.read(), digits) if (digits or 0) < 0 else +self
        if digits is None:
            x = self.value.detach()
            assume(lambda: x.abs() < 2.0**63, "round() gets a number of less than 64 bits")
            return TracedNumber(x.round().to(torch.int64))
        return TracedNumber(_rounded(self.value, digits))

    def __format__(self, spec: str) -> str:
        return format(self.read(), spec) if decides() else UNKNOWN

    __repr__ = __str__ = lambda self: format(self)

    def __neg__(self) -> "TracedNumber":
        return TracedNumber(-_counted(self))

    def __abs__(self) -> "TracedNumber":
        return TracedNumber(_counted(self).abs())

    def __pos__(self) -> "TracedNumber":
        return TracedNumber(_counted(self))

    def __invert__(self) -> "TracedNumber":
        return TracedNumber(-1 - _counted(self))

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self


def _operator(name: str, swapped: bool) -> Callable[[TracedNumber, Any], Any]:
    function = getattr(torch, name)

    def of(self: TracedNumber, other: Any) -> Any:
        if type(other).__module__ == "numpy" and not isinstance(other, int | float):
            if type(other).__name__ != "int64":  # others are rounded and wrap around otherwise
                raise numpy_refused(type(other).__name__)
            other = int(other)
        if not isinstance(other, TracedNumber | int | float):
            if not hasattr(other, "ndim"):
                return NotImplemented
            return function(other, self) if swapped else function(self, other)
        left, right = (other, self) if swapped else (self, other)
        is_float = any(isinstance(x, float) for x in (left, right))
        if name in _BITWISE.values():
            if is_float:
                return NotImplemented
            if all(isinstance(x, bool) for x in (left, right)) and "shift" not in name:
                return TracedNumber(function(_tensor(left), _tensor(right)))
        # As Python counts: a quotient of ints is a float, of 64 bits.
        if name == "div" or is_float or (name == "pow" and bool(_counted(right) < 0)):
            left, right = (_counted(x, torch.float64) for x in (left, right))
        return TracedNumber(function(_counted(left), _counted(right)))

    return of


def _counted(x: Any, dtype: torch.dtype | None = None) -> Any:
    """A number as an operand of arithmetic, in which a bool is an int."""
    if not isinstance(x, TracedNumber):
        return x
    is_bool = x.value.dtype is torch.bool
    return x.value.to(dtype or (torch.int64 if is_bool else x.value.dtype))


def _rounded(x: Tensor, digits: int) -> Tensor:
    """As Python rounds a float: the number nearest to the nearest multiple of ``10 ** -digits``.

    The exact product is ``scaled + rest`` (Dekker 1971); it decides where ``scaled`` is a tie.
    """
    if not 0 <= digits <= 22:  # 10 ** digits is exact
        raise number_refused(is_of_rows=False)
    scale = 10.0**digits
    scaled, whole = x * scale, (x * scale).round()
    high, low = _halves(x)
    scale_high, scale_low = (float(part) for part in _halves(torch.tensor(scale)))
    rest = high * scale_high - scaled + low * scale_high + high * scale_low + low * scale_low
    apart = scaled - whole
    down, up = (apart == -0.5) & (rest < 0), (apart == 0.5) & (rest > 0)
    whole = whole - (down.double() - up.double())  # in this order -0.0 keeps its sign
    return torch.where(scaled.abs() < 2.0**53, whole / scale, x)  # larger ones have no such digits


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """A number as a sum of two of half its bits, whose products are exact."""
    x = x.double()
    high = x * (2.0**27 + 1) - (x * (2.0**27 + 1) - x)
    return high, x - high


def _tensor(x: Any) -> Tensor:
    return x.value if isinstance(x, TracedNumber) else torch.tensor(x)


for _sign in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_sign}__", _operator(_sign, swapped=False))
_BITWISE = {
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
for _sign, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow",
    "floordiv": "floor_divide", "mod": "remainder", **_BITWISE,
}.items():  # fmt: skip
    setattr(TracedNumber, f"__{_sign}__", _operator(_name, swapped=False))
    setattr(TracedNumber, f"__r{_sign}__", _operator(_name, swapped=True))


def without_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments of a call with each traced number replaced by a tensor."""
    other = _other(args, kwargs)
    return map_leaves(
        lambda x: x.beside(other) if isinstance(x, TracedNumber) else x, (args, dict(kwargs))
    )


def arrays_stacked(tree: Any) -> Any:
    """A tree of arguments with arrays of traced numbers, such as ``x.numpy()``, as tensors."""
    if isinstance(tree, dict):
        return {key: arrays_stacked(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(arrays_stacked, tree))
    if isinstance(tree, np.ndarray) and tree.dtype == object and tree.size:
        return torch.stack([_tensor(x) for x in tree.flat]).reshape(tree.shape)
    return tree


def numbers_read(tree: Any) -> Any:
    """Nested arguments with traced numbers read as Python's."""
    return map_leaves(lambda x: x.read() if isinstance(x, TracedNumber) else x, tree)


def is_answered_by_reading(error: Exception) -> bool:
    """Whether torch may have raised an error because it got a tensor in place of a number, which
    can be read.
    """
    kinds = TypeError, DataDependentOutputException
    if not isinstance(error, kinds) and meaning_of(error) is not Meaning.NUMBER:
        return False
    if not is_reading():
        note_needed(error)
    return is_reading()


def beside_narrow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of a call on a traced number and a 0-d tensor of less than 32 bits, to whose dtype
    the number would be rounded; None for another call.
    """
    other = _other(args, kwargs)
    if not isinstance(other, Tensor) or other.ndim or other.dtype not in _NARROW:
        return None
    given = [other.reshape(1) if x is other else x for x in args]
    return TracedNumber.__torch_function__(func, (), given, kwargs).reshape(())


_NARROW = (torch.bfloat16, torch.float16)


def _other(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor, or selected rows, among arguments that decides a number's type: the first one of
    the highest kind, so that in ``torch.where(mask, 0.1, x)`` it is ``x``.
    """
    leaves = [*args, *kwargs.values()]
    leaves += [x for leaf in leaves if isinstance(leaf, list | tuple) for x in leaf]
    leaves = [x for x in leaves if not isinstance(x, TracedNumber)]
    tensors = [x for x in leaves if isinstance(getattr(x, "dtype", None), torch.dtype)]
    return max(tensors, key=_kind, default=None)


def _kind(x: Any) -> int:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return 2
    return 0 if x.dtype is torch.bool else 1
