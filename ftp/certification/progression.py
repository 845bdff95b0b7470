"""Arithmetic progressions and arrays of ranks' numbers, which may be formulas of dynamic sizes.

Where a check speaks of all sizes (`ftp.certification.all_sizes`), positions are computed by plain
Python arithmetic: a `range` and numpy's arrays of ints would ask for the value of each formula.
Arrays of formulas are arrays of objects, with a dim for each mesh axis: ranks are numbers.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftp.dynamic_int import DynamicInt, is_dynamic

Index = np.ndarray
HOLE = -(1 << 60)
LEAST = HOLE // 2  # numbers below are a hole plus a position


class Progression(NamedTuple):
    """Numbers that count in digits, as positions along a dim that consists of several parts do.

    Attributes:
        start: the first number.
        digits: per digit its step and its count, major to minor.

    >>> Progression(3, ((10, 2), (1, 3))).numbers()
    array([ 3,  4,  5, 13, 14, 15])
    """

    start: int
    digits: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return math.prod(count for _, count in self.digits)

    def numbers(self) -> Index:
        """All of them as an array, which is made for one count."""
        found = np.array([self.start], dtype=object if is_dynamic(self.start) else np.int64)
        for step, count in self.digits:
            found = (found[:, None] + step * np.arange(operator.index(count))).reshape(-1)
        return found

    def at(self, places: Sequence[int]) -> Index:
        """The numbers at some places."""
        (step, _), *minor = self.digits
        if minor:
            return self.numbers().take(list(places))
        return array_of(self.start + step * place for place in places)

    def scaled(self, by: int) -> "Progression":
        return Progression(self.start * by, tuple((step * by, n) for step, n in self.digits))

    def within(self, first: int, step: int, count: int) -> "Progression | None":
        """``count`` of the numbers, each ``step`` places after the one before it; None if they do
        not count in digits.
        """
        (major, _), *minor = self.digits
        if minor and step == -1 and first == self.count - 1 and count == self.count:
            last = sum((step * (count - 1) for step, count in self.digits), self.start)
            return Progression(last, tuple((-step, count) for step, count in self.digits))
        block = math.prod(count for _, count in minor)
        if minor and (step != 1 or not divides(block, first) or not divides(block, count)):
            return None
        digits = (major * step, count // block), *minor
        return progression(self.start + major * (first // block), digits)

    def split(self, minor: int) -> "tuple[Progression, Progression] | None":
        """The first of each ``minor`` numbers, and what follows each; None if they do not count in
        digits.
        """
        before, after = list(self.digits), []
        while before and minor != 1:
            step, count = before.pop()
            if divides(count, minor):
                minor //= count
                after.insert(0, (step, count))
            elif divides(minor, count):
                before.append((step * minor, count // minor))
                after.insert(0, (step, minor))
                minor = 1
            else:
                return None
        if minor != 1:
            return None
        return progression(self.start, before), progression(0, after)


def progression(start: int, digits: Iterable[tuple[int, int]]) -> Progression:
    """Numbers in the fewest digits: equal ones are written alike. A count that is a formula stays,
    whether it is one or more.
    """
    if type(digits) is tuple and len(digits) == 1:
        ((step, count),) = digits
        return Progression(start, digits if (is_dynamic(count) or count > 1) and step else ())
    found: list[tuple[int, int]] = []
    for step, count in digits:
        if not is_dynamic(count) and count < 2:
            continue
        if found and found[-1][0] == step * count:
            _, more = found.pop()
            count *= more
        found.append((step, count))
    if len(found) == 1 and not found[0][0]:
        found = []
    return Progression(start, tuple(found))


def array_of(numbers: Iterable[Any]) -> Index:
    """Numbers as an array, of objects where one is a formula."""
    found = list(numbers)
    return np.array(found, dtype=object if any(map(is_dynamic, found)) else np.int64)


def divides(n: int, x: int) -> bool:
    """Whether ``n`` divides ``x``; of formulas, whether the quotient is a formula."""
    rest = x % n
    return not is_dynamic(rest) and rest == 0


def is_hole(x: Any) -> bool:
    """Whether a number stands for a zero of padding. No formula does."""
    return type(x) is not DynamicInt and x < LEAST


def text_of(values: Index) -> Any:
    """What arrays of equal numbers have in common."""
    return tuple(values.ravel().tolist()) if values.dtype == object else values.tobytes()


def holes_in(values: Index) -> Index:
    """Where an array has holes."""
    if values.dtype != object:
        return values < LEAST
    return np.array([is_hole(x) for x in values.flat], dtype=bool).reshape(values.shape)


def added(a: Index, b: Any) -> Index:
    """A sum; a hole in one term is a hole in the sum."""
    total = np.asarray(a + b)
    if total.dtype != object:
        return np.where(total < LEAST, HOLE, total)
    return np.where(holes_in(a) | holes_in(np.asarray(b)), HOLE, total)
