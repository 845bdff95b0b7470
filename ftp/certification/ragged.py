"""Progressions that end in holes: the positions of uneven shards that are padded to one size.

Of ``S`` elements in chunks of ``k``, rank ``r`` holds ``r*k + i``. Padded to ``k`` elements, the
ranks' chunks beside each other are a progression along two dims, of which the first ``S`` places
hold elements. Where the dims become one, a slice of the first ``S`` is a progression again.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ftp.certification.progression import HOLE, Index, Progression, progression
from ftp.dynamic_int import is_dynamic


class Ragged(NamedTuple):
    """Progressions along several dims, major to minor. The first ``held`` places, in the order of
    the dims, hold their sum, the others are holes.

    >>> Ragged((Progression(0, ((3, 2),)), Progression(0, ((1, 3),))), 5).numbers() % 100
    array([[ 0,  1,  2],
           [ 3,  4, 24]])
    """

    lines: tuple[Progression, ...]
    held: int

    @property
    def counts(self) -> list[int]:
        return [line.count for line in self.lines]

    def numbers(self) -> Index:
        """All of them as an array, which is made for one count."""
        found = np.zeros((), dtype=np.int64)
        for line in self.lines:
            found = found[..., None] + line.numbers()
        places = np.arange(found.size).reshape(found.shape)
        return np.where(places < self.held, found, HOLE)

    def scaled(self, by: int) -> "Ragged":
        return Ragged(tuple(line.scaled(by) for line in self.lines), self.held)

    def within(self, at: int, first: int, step: int, count: int) -> "Ragged | None":
        """``count`` places along the ``at``-th dim; None where that is no such progression."""
        line = self.lines[at].within(first, step, count)
        if at or step != 1 or line is None:
            return None
        return Ragged((line, *self.lines[1:]), self.held - first * math.prod(self.counts[1:]))

    def taken(self, at: int, places: Sequence[int]) -> "Ragged | None":
        """The places along the ``at``-th dim."""
        first, count = places[0], len(places)
        return (
            self.within(at, first, 1, count)
            if list(places) == list(range(first, first + count))
            else None
        )

    def split(self, at: int, minor: int) -> "Ragged | None":
        halves = self.lines[at].split(minor)
        if halves is None:
            return None
        return Ragged((*self.lines[:at], *halves, *self.lines[at + 1 :]), self.held)

    def merged(self, at: int) -> "Ragged":
        """The ``at``-th dim and the next one as one dim."""
        a, b = self.lines[at : at + 2]
        both = progression(a.start + b.start, (*a.digits, *b.digits))
        return Ragged((*self.lines[:at], both, *self.lines[at + 2 :]), self.held)


def padded(line: Progression, total: int) -> Ragged | None:
    """A progression with holes after it, up to ``total`` places."""
    (major, _), *minor = line.digits
    if minor:
        return None
    return Ragged((Progression(line.start, ((major, total),)),), line.count)


def has_formulas(x: Progression | Ragged) -> bool:
    """Whether the number of elements is a formula."""
    return any(map(is_dynamic, (x.count,) if isinstance(x, Progression) else (*x.counts, x.held)))
