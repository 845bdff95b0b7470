"""Terms: the amounts by which positions vary along some dims.

A term is a progression along one dim, a progression that ends in holes along several, or an array.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ftp.certification.progression import (
    HOLE,
    Index,
    Progression,
    added,
    holes_in,
    progression,
)
from ftp.certification.ragged import Ragged, has_formulas
from ftp.dataclass import dataclass
from ftp.dynamic_int import is_dynamic


@dataclass(frozen=True, eq=False)
class Term:
    """Amounts that positions vary by along ``dims``, which ascend; a progression has one dim."""

    dims: tuple[int, ...]
    values: Progression | Ragged | Index

    @property
    def array(self) -> Index:
        """The values, which are made for one size."""
        return self.values if isinstance(self.values, np.ndarray) else self.values.numbers()


def of_ranks(values: Index) -> Term:
    """A number for each rank as a term; ``values`` has a dim for each mesh axis."""
    dims = tuple(d for d, size in enumerate(values.shape) if size > 1)
    return Term(dims, values.reshape([values.shape[d] for d in dims]))


def counted(count: int, at: int, ndim: int) -> Index:
    return np.arange(operator.index(count)).reshape([count if d == at else 1 for d in range(ndim)])


def over(term: Term, dims: Sequence[int]) -> Index:
    """A term as an array over dims that contain its own."""
    values = term.array
    sizes = dict(zip(term.dims, values.shape, strict=True))
    return values.reshape([sizes.get(d, 1) for d in dims])


def joined(terms: Sequence[Term], dims: Sequence[int]) -> Index:
    """The sum of terms as an array over ``dims``; a hole in one term is a hole in the sum."""
    total = np.zeros((1,) * len(dims), dtype=np.int64)
    for term in terms:
        total = added(total, over(term, dims))
    return total


def merged_terms(terms: Sequence[Term]) -> Term:
    if len(terms) == 1:
        return terms[0]
    dims = sorted({d for t in terms for d in t.dims})
    return Term(tuple(dims), joined(terms, dims))


def in_groups(terms: Sequence[Term]) -> list[list[Term]]:
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


def difference(a: Sequence[Term], b: Sequence[Term]) -> int | None:
    """The sum of ``a`` minus the sum of ``b``, terms in normal form; None if it is not constant, or
    the holes differ.
    """
    values = [t.values for t in (*a, *b)]
    lines = [x for x in values if not isinstance(x, np.ndarray)]
    if len(lines) == len(values):
        if {t.dims: t.values for t in a} == {t.dims: t.values for t in b}:
            return 0
        if all(isinstance(x, Progression) for x in lines) or any(map(has_formulas, lines)):
            return None
    dims = sorted({d for t in (*a, *b) for d in t.dims})
    x, y = np.broadcast_arrays(joined(a, dims), joined(b, dims))
    nothing = holes_in(x)
    if not np.array_equal(nothing, holes_in(y)):
        return None
    differences = (x - y)[~nothing]
    if not differences.size:
        return 0
    first = differences.tolist()[0]
    return first if (differences == first).all() else None


def parts_of(term: Term) -> tuple[int, list[Term]]:
    """A term as a constant and terms in normal form."""
    values = term.values
    if isinstance(values, Progression):
        start, digits = progression(*values)
        if not digits:
            return start, []
        is_normal = digits is values.digits and type(start) is int and not start
        return start, [term if is_normal else Term(term.dims, Progression(0, digits))]
    if isinstance(values, Ragged):
        return _parts_of_ragged(term.dims, values)
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


def _parts_of_ragged(dims: Sequence[int], values: Ragged) -> tuple[int, list[Term]]:
    if values.held <= 0:
        return HOLE, []
    start: Any = sum(line.start for line in values.lines)
    lines = {d: Progression(0, n.digits) for d, n in zip(dims, values.lines, strict=True)}
    if math.prod(values.counts) <= values.held:
        found = [parts_of(Term((d,), line))[1] for d, line in lines.items()]
        return start, [term for terms in found for term in terms]
    kept = {d: line for d, line in lines.items() if is_dynamic(line.count) or line.count > 1}
    return start, [Term(tuple(kept), Ragged(tuple(kept.values()), values.held))]


def _line(dim: int, values: Index) -> list[Term]:
    """Numbers along one dim, the first of them 0, as at most one term: a progression if
    possible.
    """
    step, count = values.item(1), len(values)
    if np.array_equal(values, np.arange(count) * step):
        return [Term((dim,), Progression(0, ((step, count),)))] if step else []
    return [Term((dim,), values)]
