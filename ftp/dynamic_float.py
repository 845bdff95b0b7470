"""Floats computed from the sizes of dynamic dims, such as the ``1 / S`` of a mean's gradient: a
value at one size, and the formula for others.

They are arguments of ops, and nothing decides by them: code that asks for the value, or compares
it with a number, gets an error, and the program is planned size by size. Rounded, they are
`DynamicInt`s.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

from ftp.dataclass import dataclass
from ftp.dynamic_int import DynamicInt, Sizes, is_dynamic, moved

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "/": operator.truediv,
    "*": operator.mul,
    "+": operator.add,
    "-": operator.sub,
    "**": operator.pow,
}
FUNCTIONS = ("sqrt", "log", "log2", "exp")  # of Python's math


@dataclass(frozen=True, repr=False)
class DynamicFloat:
    """One of ``OPERATORS`` between two numbers, of which one at least is a formula; or one of
    ``FUNCTIONS`` of ``left``.

    >>> from ftp.dynamic_int import Symbol
    >>> sizes = Sizes([Symbol("S", 7, 1, 512)])
    >>> (s,) = sizes.symbols
    >>> half = DynamicFloat("/", 1.0, 2 * s)
    >>> half, sizes.function([half, s])([4])
    ((1.0 / (2*S)), (0.125, 4))
    """

    operator: str
    left: Any
    right: Any = None

    @property
    def __class__(self) -> type:
        return float

    @property
    def value(self) -> float:
        """The value at the current sizes, as `Sizes.function` computes it."""
        left = evaluated(self.left)
        if self.operator in FUNCTIONS:
            return getattr(math, self.operator)(left)
        return OPERATORS[self.operator](left, evaluated(self.right))

    def ints(self) -> list[DynamicInt]:
        """The formulas of ints that it is computed from."""
        return [x for part in (self.left, self.right) if is_formula(part) for x in part.ints()]

    def moved(self, to: Sizes) -> "DynamicFloat":
        """See `ftp.dynamic_int.moved`."""
        return DynamicFloat(self.operator, moved(self.left, to), moved(self.right, to))

    def written(self) -> str:
        """As `DynamicInt.written`."""
        left, right = (x.written() if is_formula(x) else repr(x) for x in (self.left, self.right))
        return self._joined(left, right)

    def _joined(self, left: str, right: str) -> str:
        if self.operator in FUNCTIONS:
            return f"math.{self.operator}({left})"
        return f"({left} {self.operator} {right})"

    def __repr__(self) -> str:
        left, right = (f"({x!r})" if is_dynamic(x) else repr(x) for x in (self.left, self.right))
        return self._joined(left, right)

    def _asked(self, *_: object) -> Any:
        raise TypeError(f"the value of {self!r} is asked for, which is another at every size")

    def __eq__(self, other: object) -> bool:
        if is_formula(other):
            return type(other) is DynamicFloat and self._parts() == other._parts()
        return self._asked() if isinstance(other, int | float | complex) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._parts())

    def _parts(self) -> tuple[str, tuple[type, type], Any, Any]:
        return self.operator, (type(self.left), type(self.right)), self.left, self.right

    def __floor__(self) -> Any:
        return self.ints()[0].sizes.rounded("floor", self)

    def __ceil__(self) -> Any:
        return self.ints()[0].sizes.rounded("ceil", self)

    def __trunc__(self) -> Any:
        return self.ints()[0].sizes.rounded("trunc", self)

    def __round__(self, digits: None = None) -> Any:
        return self._asked() if digits is not None else self.ints()[0].sizes.rounded("round", self)

    __float__ = __bool__ = __int__ = __index__ = _asked
    __lt__ = __gt__ = __le__ = __ge__ = _asked


def is_formula(x: Any) -> bool:
    """Whether a number, int or float, is a formula of dynamic sizes."""
    return type(x) in (DynamicInt, DynamicFloat)


def evaluated(x: Any) -> Any:
    """The number that a formula has at the sizes at hand: for what serves these sizes alone.

    >>> from ftp.dynamic_int import Symbol
    >>> (s,) = Sizes([Symbol("S", 7, 1, 512)]).symbols
    >>> evaluated(s + 1), evaluated(DynamicFloat("/", 1.0, s + 1)), evaluated("S")
    (8, 0.125, 'S')
    """
    return x.value if is_formula(x) else x
