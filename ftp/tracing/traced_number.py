"""A number that a function reads from a tensor, as ``x.item()`` and ``x[mask].shape[0]`` give it: a
number to the function, a value of the program.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.tracing.refused_rows import number_refused
from ftp.tracing.same_values import holds_same


class TracedNumber:
    """A number computed from values, for arithmetic and comparisons.

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
        plain, by_name = without_numbers(args, kwargs or {})
        return func(*plain, **by_name)

    def __bool__(self) -> bool:
        return bool(self.value)

    def _asked(self, *_: Any) -> Any:
        raise number_refused(self.mask is not None)

    __int__ = __float__ = __index__ = __round__ = __hash__ = _asked

    def __format__(self, spec: str) -> str:
        return "a value of the program"  # of a message that is printed while tracing

    __repr__ = __str__ = lambda self: format(self)

    def __neg__(self) -> "TracedNumber":
        return TracedNumber(-self.value)

    def __abs__(self) -> "TracedNumber":
        return TracedNumber(self.value.abs())


def _operator(name: str, swapped: bool) -> Callable[[TracedNumber, Any], Any]:
    function = getattr(torch, name)

    def of(self: TracedNumber, other: Any) -> Any:
        if not isinstance(other, TracedNumber | int | float) and not hasattr(other, "ndim"):
            return NotImplemented
        if not isinstance(other, TracedNumber | int | float):  # a tensor, or selected rows
            return function(other, self) if swapped else function(self, other)
        given = [x.value if isinstance(x, TracedNumber) else x for x in (self, other)]
        left, right = reversed(given) if swapped else given
        # As Python counts: a quotient of ints is a float, of 64 bits.
        is_root = name == "pow" and isinstance(right, int) and right < 0
        if name == "div" or is_root or any(_is_float(x) for x in given):
            left, right = (x.double() if isinstance(x, Tensor) else x for x in (left, right))
        found = function(left, right)
        return found if name in _COMPARISONS else TracedNumber(found)

    return of


def _is_float(x: Any) -> bool:
    return x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
for _sign in _COMPARISONS:
    setattr(TracedNumber, f"__{_sign}__", _operator(_sign, swapped=False))
for _sign, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow",
    "floordiv": "floor_divide", "mod": "remainder",
}.items():  # fmt: skip
    setattr(TracedNumber, f"__{_sign}__", _operator(_name, swapped=False))
    setattr(TracedNumber, f"__r{_sign}__", _operator(_name, swapped=True))


def without_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
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
    return TracedNumber.__torch_function__(func, (), given, kwargs).reshape(())


_NARROW = (torch.bfloat16, torch.float16)


def _other(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first tensor, or selected rows, among arguments."""
    leaves = [*args, *kwargs.values()]
    leaves += [x for leaf in leaves if isinstance(leaf, list | tuple) for x in leaf]
    return next((x for x in leaves if hasattr(x, "ndim") and not isinstance(x, TracedNumber)), None)


def _without(tree: Any, other: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without(value, other) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_without(value, other) for value in tree)
    return tree.beside(other) if isinstance(tree, TracedNumber) else tree
