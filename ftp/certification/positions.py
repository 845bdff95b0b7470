"""Positions: where each local element is along one dim of a value, on every rank.

A position is a base plus terms. Each term varies along some dims, which are mesh axes or atoms. For
even shards each term is an arithmetic progression, so that positions on thousands of ranks take a
few numbers; for uneven shards, padded to one size, it is one that ends in holes. For other paddings
and cuts a term is an array over its dims. A zero of padding has no position: it is a hole in the
base or in a term.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ftp.certification.progression import (
    HOLE,
    Index,
    Progression,
    added,
    divides,
    holes_in,
    is_hole,
)
from ftp.certification.ragged import Ragged, padded
from ftp.certification.rows import RowPart, in_row
from ftp.certification.terms import (
    Term,
    counted,
    difference,
    in_groups,
    joined,
    merged_terms,
    of_ranks,
    over,
    parts_of,
)
from ftp.dataclass import dataclass


@dataclass(frozen=True, eq=False)
class Positions:
    """The sum of ``base`` and ``terms``, whose dims are disjoint; ``sum_of`` makes it.

    >>> x = whole(2, 1, 6).from_starts(1, np.array([[0], [3]]).reshape(2), 3)
    >>> x.terms[0].values, x.terms[1].values
    (Progression(start=0, digits=((3, 2),)), Progression(start=0, digits=((1, 3),)))
    """

    ndim: int
    base: int
    terms: tuple[Term, ...]

    @property
    def is_hole(self) -> bool:
        return is_hole(self.base)

    def varies(self, dim: int) -> bool:
        return any(dim in t.dims for t in self.terms)

    def dense(self) -> Index:
        """The positions as an array of ``ndim`` dims, of size 1 where constant; a hole is -1."""
        found = added(joined(self.terms, range(self.ndim)), self.base)
        return np.where(holes_in(found), -1, found)

    # Dims.

    def renamed(self, places: Sequence[int], ndim: int) -> "Positions":
        """Dim ``d`` becomes dim ``places[d]`` of ``ndim``."""
        terms = []
        for t in self.terms:
            dims = [places[d] for d in t.dims]
            order = sorted(range(len(dims)), key=dims.__getitem__)
            is_kept = order == list(range(len(dims))) and not isinstance(t.values, np.ndarray)
            values = t.values if is_kept else t.array.transpose(order)
            terms.append(Term(tuple(dims[i] for i in order), values))
        return Positions(ndim, self.base, tuple(terms))

    def with_dim(self, dim: int) -> "Positions":
        """Insert a dim along which nothing varies."""
        return self.renamed([d + (d >= dim) for d in range(self.ndim)], self.ndim + 1)

    def without_dim(self, dim: int) -> "Positions":
        """Remove a dim of size 1."""
        assert not self.varies(dim), "a dim along which positions vary is no dim of size 1"
        return self.renamed([d - (d > dim) for d in range(self.ndim)], self.ndim - 1)

    def split(self, dim: int, major: int, minor: int) -> "Positions":
        wide = self.renamed([d + (d > dim) for d in range(self.ndim)], self.ndim + 1)
        term, rest = wide._along(dim)
        if term is None:
            return wide
        r = term.values
        if isinstance(r, Progression) and type(minor) is int and not minor:
            return sum_of(wide.ndim, wide.base + r.start, rest)  # no element is there
        if isinstance(r, Progression) and (halves := r.split(minor)):
            parts = [Term((dim + i,), half) for i, half in enumerate(halves)]
            return sum_of(wide.ndim, wide.base, [*rest, *parts])
        at = term.dims.index(dim)
        dims = (*term.dims[:at], dim, dim + 1, *term.dims[at + 1 :])
        if isinstance(r, Ragged) and (ragged := r.split(at, minor)):
            return sum_of(wide.ndim, wide.base, [*rest, Term(dims, ragged)])
        r = term.array
        shape = (*r.shape[:at], major, minor, *r.shape[at + 1 :])
        return sum_of(wide.ndim, wide.base, [*rest, Term(dims, r.reshape(shape))])

    def merged(self, dim: int, major: int, minor: int) -> "Positions":
        """Merge ``dim`` and the next dim, of sizes ``major`` and ``minor``."""
        places, ndim = [d - (d > dim) for d in range(self.ndim)], self.ndim - 1
        mine = [t for t in self.terms if dim in t.dims or dim + 1 in t.dims]
        if not mine:
            return self.renamed(places, ndim)
        others = [t for t in self.terms if all(t is not m for m in mine)]
        rest = replace(self, terms=tuple(others)).renamed(places, ndim).terms
        lines = {t.dims[0]: t.values for t in mine if isinstance(t.values, Progression)}
        if len(lines) == len(mine):
            halves = (dim, major), (dim + 1, minor)
            digits = [lines[d].digits if d in lines else ((0, n),) for d, n in halves]
            start = sum(line.start for line in lines.values())
            line = Term((dim,), Progression(start, (*digits[0], *digits[1])))
            return sum_of(ndim, self.base, [*rest, line])
        (term, *more), dims = mine, sorted({dim, dim + 1}.union(*(t.dims for t in mine)))
        if not more and isinstance(term.values, Ragged) and tuple(dims) == term.dims:
            at = dims.index(dim)
            left = tuple(places[d] for d in dims if d != dim + 1)
            return sum_of(ndim, self.base, [*rest, Term(left, term.values.merged(at))])
        values, at = joined(mine, dims), dims.index(dim)
        before, after = values.shape[:at], values.shape[at + 2 :]
        values = np.broadcast_to(values, (*before, major, minor, *after))
        values = values.reshape(*before, major * minor, *after)
        left = tuple(places[d] for d in dims if d != dim + 1)
        return sum_of(ndim, self.base, [*rest, Term(left, values)])

    # Elements.

    def taken(self, dim: int, places: Sequence[int]) -> "Positions":
        """The elements at ``places`` along a dim."""
        term, rest = self._along(dim)
        if term is None:
            return self
        r, at, values = term.values, term.dims.index(dim), None
        if isinstance(r, Progression):
            values = r.at(places)
        elif isinstance(r, Ragged):
            values = r.taken(at, places)
        if values is None:
            values = term.array.take(list(places), at)
        return sum_of(self.ndim, self.base, [*rest, Term(term.dims, values)])

    def within(self, dim: int, first: int, step: int, count: int) -> "Positions":
        """``count`` elements along a dim, each ``step`` places after the one before it."""
        term, rest = self._along(dim)
        if term is None:
            return self
        r, at, values = term.values, term.dims.index(dim), None
        if isinstance(r, Progression):
            values = r.within(first, step, count)
        elif isinstance(r, Ragged):
            values = r.within(at, first, step, count)
        if values is None:
            places = first + step * np.arange(operator.index(count))
            values = term.array.take(places.astype(np.int64), at)
        return sum_of(self.ndim, self.base, [*rest, Term(term.dims, values)])

    def from_starts(self, dim: int, starts: Index, length: int) -> "Positions":
        """``length`` elements along a dim, from each rank's start on. ``starts`` has a dim for each
        mesh axis.
        """
        term, rest = self._along(dim)
        if term is None:
            return self
        start, r = of_ranks(starts), term.values
        line = r.within(0, 1, length) if isinstance(r, Progression) else None
        if isinstance(r, Progression) and line is not None:
            (major, _), *minor = r.digits
            block = math.prod(count for _, count in minor)
            first = np.asarray(start.values)
            if block == 1 or all(divides(block, x) for x in first.ravel().tolist()):
                steps = Term(start.dims, np.asarray(first // block * major))
                return sum_of(self.ndim, self.base, [*rest, steps, Term((dim,), line)])
        dims = sorted({*start.dims, *term.dims})
        at = dims.index(dim)
        places = joined([start], dims) + counted(length, at, len(dims))
        values = np.take_along_axis(over(term, dims), places, at)
        return sum_of(self.ndim, self.base, [*rest, Term(tuple(dims), values)])

    def padded(self, dim: int, size: int, before: Index, total: int) -> "Positions":
        """Pad the ``size`` elements along a dim with holes to ``total``. ``before``, the number of
        holes in front, has a dim for each mesh axis.
        """
        term, rest = self._along(dim)
        start = of_ranks(before)
        line = None if term is None or before.any() else term.values
        if isinstance(line, Progression) and (ragged := padded(line, total)):
            return sum_of(self.ndim, self.base, [*rest, Term((dim,), ragged)])
        dims = sorted({dim, *start.dims, *(() if term is None else term.dims)})
        at = dims.index(dim)
        held = joined([] if term is None else [term], dims)
        held = np.broadcast_to(held, (*held.shape[:at], size, *held.shape[at + 1 :]))
        places = counted(total, at, len(dims)) - joined([start], dims)
        values = np.take_along_axis(held, np.clip(places, 0, size - 1), at)
        values = np.where((places >= 0) & (places < size), values, HOLE)
        return sum_of(self.ndim, self.base, [*rest, Term(tuple(dims), values)])

    # Sums.

    def scaled(self, by: int) -> "Positions":
        terms = [
            Term(t.dims, t.values.scaled(by))
            if not isinstance(t.values, np.ndarray)
            else Term(t.dims, np.where(holes_in(t.values), HOLE, t.values * by))
            for t in self.terms
        ]
        return sum_of(self.ndim, self.base if self.is_hole else self.base * by, terms)

    def plus(self, other: "Positions") -> "Positions":
        if self.is_hole or other.is_hole:
            return holes(self.ndim)
        return sum_of(self.ndim, self.base + other.base, [*self.terms, *other.terms])

    def _along(self, dim: int) -> tuple[Term | None, list[Term]]:
        """The term that varies along a dim, and the others."""
        found = next((t for t in self.terms if dim in t.dims), None)
        return found, [t for t in self.terms if t is not found]


def whole(ndim: int, dim: int, size: int) -> Positions:
    """All ``size`` positions, along ``dim``."""
    return sum_of(ndim, 0, [Term((dim,), Progression(0, ((1, size),)))])


def holes(ndim: int) -> Positions:
    return Positions(ndim, HOLE, ())


def from_array(values: Index) -> Positions:
    """Positions from an array without holes."""
    return sum_of(values.ndim, 0, [Term(tuple(range(values.ndim)), values)])


def sum_of(ndim: int, base: int, terms: Iterable[Term]) -> Positions:
    """The sum in normal form: no two terms share a dim, none is constant along one of its dims, and
    progressions are kept as such.
    """
    if is_hole(base):
        return holes(ndim)
    found: list[Term] = []
    todo = list(terms)
    if len({d for t in todo for d in t.dims}) < sum(len(t.dims) for t in todo):
        todo = [merged_terms(group) for group in in_groups(todo)]
    for term in todo:
        constant, parts = parts_of(term)
        if is_hole(constant):
            return holes(ndim)
        base += constant
        found += parts
    return Positions(ndim, base, tuple(found))


def is_same(x: Positions, y: Positions) -> bool:
    """Whether the positions and the holes are the same."""
    if x is y:
        return True
    if x.is_hole or y.is_hole:
        return x.is_hole and y.is_hole
    total = x.base - y.base
    mine = set(map(id, x.terms))
    for group in in_groups([*x.terms, *y.terms]):
        gain = difference(
            [t for t in group if id(t) in mine], [t for t in group if id(t) not in mine]
        )
        if gain is None:
            return False
        total += gain
    return total == 0


def concatenated(parts: Sequence[Positions], dim: int, sizes: Sequence[int]) -> Positions:
    """Concatenate parts of these sizes along a dim."""
    first = parts[0]
    if len(parts) == 1 or all(not p.varies(dim) and is_same(p, first) for p in parts):
        return first
    held = [p for p in parts if not p.is_hole]
    if held and all(p.is_hole for p in parts[len(held) :]):
        chunks = [RowPart(p.base, p.terms, n) for p, n in zip(held, sizes, strict=False)]
        row = in_row(chunks, dim, sum(sizes[len(held) :]))
        if row is not None:
            return sum_of(first.ndim, held[0].base, row)
    along = {dim}
    owner = {id(t): i for i, p in enumerate(held) for t in p.terms}
    shared: list[Term] = []
    bases = [p.base for p in held]
    apart: list[Term] = []
    for group in in_groups([t for p in held for t in p.terms]):
        mine = [[t for t in group if owner[id(t)] == i] for i in range(len(held))]
        # Terms that vary along ``dim`` are not compared: parts may have different sizes there.
        gains: list[Any] = [None]
        if not any(dim in t.dims for t in group):
            gains = [difference(terms, mine[0]) for terms in mine]
        if None in gains:
            apart += group
            along.update(d for t in group for d in t.dims)
        else:
            shared += mine[0]
            bases = [base + gain for base, gain in zip(bases, gains, strict=True)]
    dims = sorted(along)
    at, kept = dims.index(dim), {id(t) for t in apart}
    arrays, base_of = [], iter(bases)
    for part, size in zip(parts, sizes, strict=True):
        if part.is_hole:
            values = np.full((1,) * len(dims), HOLE)
        else:
            values = added(joined([t for t in part.terms if id(t) in kept], dims), next(base_of))
        arrays.append(np.broadcast_to(values, (*values.shape[:at], size, *values.shape[at + 1 :])))
    most = [max(a.shape[k] for a in arrays) for k in range(len(dims))]
    wide = [np.broadcast_to(a, (*most[:at], a.shape[at], *most[at + 1 :])) for a in arrays]
    return sum_of(first.ndim, 0, [*shared, Term(tuple(dims), np.concatenate(wide, at))])


def overlaid(index: Sequence[Positions], dim: int) -> list[Positions] | None:
    """Overlay the slices along a dim, along which all of ``index`` vary: of the elements that meet,
    one may be no hole. None if two are no holes.
    """
    terms, rests = zip(*(i._along(dim) for i in index), strict=True)
    dims = tuple(sorted({d for t in terms for d in t.dims}))
    arrays = [joined([t], dims) for t in terms]
    is_element = np.logical_and.reduce(np.broadcast_arrays(*(~holes_in(a) for a in arrays)))
    at = dims.index(dim)
    if (is_element.sum(at) > 1).any():
        return None
    kept = [np.where(is_element, a, HOLE).max(at, keepdims=True) for a in arrays]
    return [
        sum_of(i.ndim, i.base, [*rest, Term(dims, values)])
        for i, rest, values in zip(index, rests, kept, strict=True)
    ]
