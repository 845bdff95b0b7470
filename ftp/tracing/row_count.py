"""The number of rows that a mask selects, as ``x[mask].shape[0]`` gives it: a number to the
function, a value of the program.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.tracing.refused_rows import number_refused
from ftp.tracing.same_values import holds_same


class RowCount:
    """A number computed from the number of selected rows, for arithmetic alone.

    Attributes:
        value: 0-d, int64 or float64.
        mask: whose rows it is the number of; None if it is another number.
    """

    def __init__(self, value: Tensor, mask: Tensor | None = None):
        self.value, self.mask = value, mask

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return float if self.value.is_floating_point() else int

    def is_of(self, mask: Tensor) -> bool:
        return self.mask is not None and holds_same(self.mask, mask)

    def beside(self, other: Any) -> Tensor:
        """The number as an operand beside ``other``. As with a Python number, only its kind (int or
        float) takes part in type promotion.
        """
        if other is None:
            return self.value
        if other.dtype.is_floating_point or other.dtype.is_complex:
            return self.value if other.ndim else self.value.to(other.dtype)
        if self.value.is_floating_point():
            return self.value.to(torch.get_default_dtype())
        return self.value if other.dtype is torch.bool else self.value.to(other.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        plain, by_name = without_counts(args, kwargs or {})
        return func(*plain, **by_name)

    def _asked(self, *_: Any) -> Any:
        raise number_refused("the number of selected rows")

    __bool__ = __int__ = __float__ = __index__ = __round__ = _asked
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _asked  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __neg__(self) -> "RowCount":
        return RowCount(-self.value)

    def __abs__(self) -> "RowCount":
        return RowCount(self.value.abs())


def _operator(name: str, swapped: bool) -> Callable[[RowCount, Any], Any]:
    function = getattr(torch, name)

    def of(self: RowCount, other: Any) -> Any:
        if not isinstance(other, RowCount | int | float):  # a tensor, or selected rows
            return function(other, self) if swapped else function(self, other)
        given = [x.value if isinstance(x, RowCount) else x for x in (self, other)]
        left, right = reversed(given) if swapped else given
        # As Python counts: a quotient of ints is a float, of 64 bits.
        is_root = name == "pow" and isinstance(right, int) and right < 0
        if name == "div" or is_root or any(_is_float(x) for x in given):
            left, right = (x.double() if isinstance(x, Tensor) else x for x in (left, right))
        return RowCount(function(left, right))

    return of


def _is_float(x: Any) -> bool:
    return x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)


for _sign, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow",
    "floordiv": "floor_divide", "mod": "remainder",
}.items():  # fmt: skip
    setattr(RowCount, f"__{_sign}__", _operator(_name, swapped=False))
    setattr(RowCount, f"__r{_sign}__", _operator(_name, swapped=True))


def without_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments of a call with tensors in the place of counts."""
    return _without((args, dict(kwargs)), _other(args, kwargs))


def beside_narrow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """A function of a count and a 0-d tensor of less than 32 bits, to which the count would be
    rounded; None for another call.
    """
    other = _other(args, kwargs)
    if not isinstance(other, Tensor) or other.ndim or other.dtype not in _NARROW:
        return None
    given = [other.reshape(1) if x is other else x for x in args]
    return RowCount.__torch_function__(func, (), given, kwargs).reshape(())


_NARROW = (torch.bfloat16, torch.float16)


def _other(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first tensor, or selected rows, among arguments."""
    leaves = [*args, *kwargs.values()]
    leaves += [x for leaf in leaves if isinstance(leaf, list | tuple) for x in leaf]
    return next((x for x in leaves if hasattr(x, "ndim") and not isinstance(x, RowCount)), None)


def _without(tree: Any, other: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without(value, other) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_without(value, other) for value in tree)
    return tree.beside(other) if isinstance(tree, RowCount) else tree
