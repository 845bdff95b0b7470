"""Positions: where each local element is along one dim of a value, on every rank.

A position is a base plus terms. Each term varies along some dims, which are mesh axes or atoms. For
even shards each term is an arithmetic progression, so that positions on thousands of ranks take a
few numbers. For uneven shards and padding a term is an array over its dims. A zero
of padding has no position: it is a hole in the base or in a term.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
    progression,
)


@dataclass(frozen=True, eq=False)
class Term:
    """Amounts that positions vary by along ``dims``, which ascend; a progression has one dim."""

    dims: tuple[int, ...]
    values: Progression | Index


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
        found = added(_joined(self.terms, range(self.ndim)), self.base)
        return np.where(holes_in(found), -1, found)

    # Dims.

    def renamed(self, places: Sequence[int], ndim: int) -> "Positions":
        """Dim ``d`` becomes dim ``places[d]`` of ``ndim``."""
        terms = []
        for t in self.terms:
            dims = [places[d] for d in t.dims]
            order = sorted(range(len(dims)), key=dims.__getitem__)
            values = t.values if isinstance(t.values, Progression) else t.values.transpose(order)
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
        if isinstance(r, Progression) and (halves := r.split(minor)):
            parts = [Term((dim + i,), half) for i, half in enumerate(halves)]
            return sum_of(wide.ndim, wide.base, [*rest, *parts])
        r, at = _array(term), term.dims.index(dim)
        shape = (*r.shape[:at], major, minor, *r.shape[at + 1 :])
        dims = (*term.dims[:at], dim, dim + 1, *term.dims[at + 1 :])
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
        dims = sorted({dim, dim + 1}.union(*(t.dims for t in mine)))
        values, at = _joined(mine, dims), dims.index(dim)
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
        r = term.values
        values = (
            r.at(places)
            if isinstance(r, Progression)
            else r.take(list(places), term.dims.index(dim))
        )
        return sum_of(self.ndim, self.base, [*rest, Term(term.dims, values)])

    def within(self, dim: int, first: int, step: int, count: int) -> "Positions":
        """``count`` elements along a dim, each ``step`` places after the one before it."""
        term, rest = self._along(dim)
        if term is None:
            return self
        r = term.values
        values = r.within(first, step, count) if isinstance(r, Progression) else None
        if values is None:
            places = first + step * np.arange(operator.index(count))
            values = _array(term).take(places.astype(np.int64), term.dims.index(dim))
        return sum_of(self.ndim, self.base, [*rest, Term(term.dims, values)])

    def from_starts(self, dim: int, starts: Index, length: int) -> "Positions":
        """``length`` elements along a dim, from each rank's start on. ``starts`` has a dim for each
        mesh axis.
        """
        term, rest = self._along(dim)
        if term is None:
            return self
        start, r = _of_ranks(starts), term.values
        line = r.within(0, 1, length) if isinstance(r, Progression) else None
        if isinstance(r, Progression) and line is not None:
            (major, _), *minor = r.digits
            block = math.prod(count for _, count in minor)
            first = np.asarray(start.values)
            if block == 1 or all(divides(block, x) for x in first.ravel().tolist()):
                steps = Term(start.dims, first // block * major)
                return sum_of(self.ndim, self.base, [*rest, steps, Term((dim,), line)])
        dims = sorted({*start.dims, *term.dims})
        at = dims.index(dim)
        places = _joined([start], dims) + _counted(length, at, len(dims))
        values = np.take_along_axis(_over(term, dims), places, at)
        return sum_of(self.ndim, self.base, [*rest, Term(tuple(dims), values)])

    def padded(self, dim: int, size: int, before: Index, total: int) -> "Positions":
        """Pad the ``size`` elements along a dim with holes to ``total``. ``before``, the number of
        holes in front, has a dim for each mesh axis.
        """
        term, rest = self._along(dim)
        start = _of_ranks(before)
        dims = sorted({dim, *start.dims, *(() if term is None else term.dims)})
        at = dims.index(dim)
        held = _joined([] if term is None else [term], dims)
        held = np.broadcast_to(held, (*held.shape[:at], size, *held.shape[at + 1 :]))
        places = _counted(total, at, len(dims)) - _joined([start], dims)
        values = np.take_along_axis(held, np.clip(places, 0, size - 1), at)
        values = np.where((places >= 0) & (places < size), values, HOLE)
        return sum_of(self.ndim, self.base, [*rest, Term(tuple(dims), values)])

    # Sums.

    def scaled(self, by: int) -> "Positions":
        terms = [
            Term(t.dims, t.values.scaled(by))
            if isinstance(t.values, Progression)
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
        todo = [_merged_terms(group) for group in _groups(todo)]
    for term in todo:
        constant, parts = _parts(term)
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
    for group in _groups([*x.terms, *y.terms]):
        difference = _difference(
            [t for t in group if id(t) in mine], [t for t in group if id(t) not in mine]
        )
        if difference is None:
            return False
        total += difference
    return total == 0


def concatenated(parts: Sequence[Positions], dim: int, sizes: Sequence[int]) -> Positions:
    """Concatenate parts of these sizes along a dim."""
    first = parts[0]
    if len(parts) == 1 or all(not p.varies(dim) and is_same(p, first) for p in parts):
        return first
    held = [p for p in parts if not p.is_hole]
    along = {dim}
    owner = {id(t): i for i, p in enumerate(held) for t in p.terms}
    shared: list[Term] = []
    bases = [p.base for p in held]
    apart: list[Term] = []
    for group in _groups([t for p in held for t in p.terms]):
        mine = [[t for t in group if owner[id(t)] == i] for i in range(len(held))]
        # Terms that vary along ``dim`` are not compared: parts may have different sizes there.
        gains: list[Any] = [None]
        if not any(dim in t.dims for t in group):
            gains = [_difference(terms, mine[0]) for terms in mine]
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
            values = added(_joined([t for t in part.terms if id(t) in kept], dims), next(base_of))
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
    arrays = [_joined([t], dims) for t in terms]
    is_element = np.logical_and.reduce(np.broadcast_arrays(*(~holes_in(a) for a in arrays)))
    at = dims.index(dim)
    if (is_element.sum(at) > 1).any():
        return None
    kept = [np.where(is_element, a, HOLE).max(at, keepdims=True) for a in arrays]
    return [
        sum_of(i.ndim, i.base, [*rest, Term(dims, values)])
        for i, rest, values in zip(index, rests, kept, strict=True)
    ]


# Terms.


def _of_ranks(values: Index) -> Term:
    """A number for each rank as a term; ``values`` has a dim for each mesh axis."""
    dims = tuple(d for d, size in enumerate(values.shape) if size > 1)
    return Term(dims, values.reshape([values.shape[d] for d in dims]))


def _counted(count: int, at: int, ndim: int) -> Index:
    return np.arange(operator.index(count)).reshape([count if d == at else 1 for d in range(ndim)])


def _array(term: Term) -> Index:
    return term.values.numbers() if isinstance(term.values, Progression) else term.values


def _over(term: Term, dims: Sequence[int]) -> Index:
    """A term as an array over dims that contain its own."""
    values = _array(term)
    sizes = dict(zip(term.dims, values.shape, strict=True))
    return values.reshape([sizes.get(d, 1) for d in dims])


def _joined(terms: Sequence[Term], dims: Sequence[int]) -> Index:
    """The sum of terms as an array over ``dims``; a hole in one term is a hole in the sum."""
    total = np.zeros((1,) * len(dims), dtype=np.int64)
    for term in terms:
        total = added(total, _over(term, dims))
    return total


def _merged_terms(terms: Sequence[Term]) -> Term:
    if len(terms) == 1:
        return terms[0]
    dims = sorted({d for t in terms for d in t.dims})
    return Term(tuple(dims), _joined(terms, dims))


def _groups(terms: Sequence[Term]) -> list[list[Term]]:
    """The terms in groups: terms that share dims are in one group."""
    groups: list[tuple[set[int], list[Term]]] = []
    for term in terms:
        dims, members = set(term.dims), [term]
        apart = []
        for group in groups:
            if group[0] & dims:
                dims |= group[0]
                members = [*group[1], *members]
            else:
                apart.append(group)
        groups = [*apart, (dims, members)]
    return [members for _, members in groups]


def _difference(a: Sequence[Term], b: Sequence[Term]) -> int | None:
    """The sum of ``a`` minus the sum of ``b``; None if it is not constant, or the holes differ."""
    lines = [
        {t.dims: t.values for t in terms if isinstance(t.values, Progression)} for terms in (a, b)
    ]
    if len(lines[0]) == len(a) and len(lines[1]) == len(b):
        mine, theirs = ({d: line.digits for d, line in of.items()} for of in lines)
        starts = (sum(line.start for line in of.values()) for of in lines)
        return operator.sub(*starts) if mine == theirs else None
    dims = sorted({d for t in (*a, *b) for d in t.dims})
    x, y = np.broadcast_arrays(_joined(a, dims), _joined(b, dims))
    nothing = holes_in(x)
    if not np.array_equal(nothing, holes_in(y)):
        return None
    differences = (x - y)[~nothing]
    if not differences.size:
        return 0
    first = differences.tolist()[0]
    return first if (differences == first).all() else None


def _parts(term: Term) -> tuple[int, list[Term]]:
    """A term as a constant and terms in normal form."""
    values = term.values
    if isinstance(values, Progression):
        start, digits = progression(*values)
        if not digits:
            return start, []
        is_normal = digits is values.digits and type(start) is int and not start
        return start, [term if is_normal else Term(term.dims, Progression(0, digits))]
    if not values.size:
        return 0, []
    dims = tuple(d for d, size in zip(term.dims, values.shape, strict=True) if size > 1)
    values = values.reshape([size for size in values.shape if size > 1])
    nothing = holes_in(values)
    found: list[Term] = []
    if nothing.any():
        if nothing.all():
            return HOLE, []
        for dim in dims:  # remove dims along which nothing varies
            at = dims.index(dim)
            line = values.take([0], at)
            if len(dims) > 1 and (values == line).all():
                values, dims = line.squeeze(at), (*dims[:at], *dims[at + 1 :])
        return 0, [Term(dims, values)]
    base = values.item(0)
    values = values - base
    for dim in dims if len(dims) > 1 else ():
        at = dims.index(dim)
        line = values[tuple(slice(None) if d == dim else 0 for d in dims)]
        rest = values.take([0], at)
        if (values == rest + line.reshape([-1 if d == dim else 1 for d in dims])).all():
            found += _line(dim, line)
            values, dims = rest.squeeze(at), (*dims[:at], *dims[at + 1 :])
    if len(dims) == 1:
        found += _line(dims[0], values)
    elif dims:
        found.append(Term(dims, values))
    return base, found


def _line(dim: int, values: Index) -> list[Term]:
    """Numbers along one dim, the first of them 0, as at most one term: a progression if
    possible.
    """
    step, count = values.item(1), len(values)
    if np.array_equal(values, np.arange(count) * step):
        return [Term((dim,), Progression(0, ((step, count),)))] if step else []
    return [Term((dim,), values)]
