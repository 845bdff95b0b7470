"""Rows: parts beside each other along a dim, each of which begins where the one before it ends.

Shards are such rows along a mesh axis: the first are full, the next may be padded with holes, and
the others hold nothing but holes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ftp.certification.progression import Progression
from ftp.certification.ragged import Ragged
from ftp.certification.terms import Term
from ftp.dataclass import dataclass

TermsByDims = Mapping[tuple[int, ...], Any]


@dataclass(frozen=True)
class RowPart:
    """A part's base, its terms in normal form, and its size along the dim."""

    base: int
    terms: Sequence[Term]
    size: int

    def line(self, dim: int) -> int | None:
        """Its step along the dim, 0 if it has one place; None if its numbers are no line."""
        along = [t for t in self.terms if dim in t.dims]
        if not along:
            return 0 if self.size == 1 else None
        x = along[0].values
        return x.digits[0][0] if isinstance(x, Progression) and len(x.digits) == 1 else None

    def across(self, dim: int) -> TermsByDims:
        """The terms along other dims."""
        return {t.dims: t.values for t in self.terms if dim not in t.dims}


def in_row(parts: Sequence[RowPart], dim: int, more: int) -> list[Term] | None:
    """The terms of parts, the last of which may end in holes, and of ``more`` holes after them,
    beside each other along ``dim``. None if they are no row.
    """
    step = _step(parts, dim)
    (first, *_), last = parts, parts[-1]
    shared, ending = first.across(dim), last.across(dim)
    if step is None or not all(_is_alike(p.across(dim), shared) for p in parts[:-1]):
        return None
    rows = sum(p.size for p in parts) + more
    if _is_zero(more) and _is_alike(ending, shared) and len(parts) > 1:
        line = Term((dim,), Progression(0, ((step, rows),)))
        return [*(Term(dims, x) for dims, x in shared.items()), line]
    for dims, x in ending.items():
        rest = {d: y for d, y in ending.items() if d != dims}
        chunk, held = x, 0
        if isinstance(x, Ragged) and len(dims) == 1 and last.size == 1:
            chunk, held = x.lines[0], x.held - x.lines[0].count
        if not isinstance(chunk, Progression) or len(chunk.digits) != 1 or dims[0] < dim:
            continue
        ((unit, count),) = chunk.digits
        if len(parts) > 1 and not _is_alike({**rest, dims: chunk}, shared):
            continue
        if unit * count == (step if len(parts) > 1 or first.size != 1 else unit * count):
            # The holes are the last places of this dim and the row together.
            held += sum(p.size for p in parts) * count
            row = Ragged((Progression(0, ((unit * count, rows),)), chunk), held)
            return [*(Term(d, y) for d, y in rest.items()), Term((dim, *dims), row)]
    return None


def _step(parts: Sequence[RowPart], dim: int) -> int | None:
    """The step from place to place along the dim, 0 for one place; None if there is none."""
    steps = [p.line(dim) for p in parts]
    if None in steps:
        return None
    step = next((s for s in steps if s is not None and not _is_zero(s)), 0)
    if _is_zero(step) and len(parts) > 1:
        step = parts[1].base - parts[0].base
    base = parts[0].base
    for part, own in zip(parts, steps, strict=True):
        if not _is_zero(part.base - base) or not (_is_zero(own) or own == step):
            return None
        base = base + step * part.size
    return step


def _is_zero(x: Any) -> bool:
    """Whether a number is 0; a formula is not."""
    return type(x) is int and not x


def _is_alike(a: TermsByDims, b: TermsByDims) -> bool:
    return a.keys() == b.keys() and all(
        x is b[d]
        or (
            np.array_equal(x, b[d])
            if isinstance(x, np.ndarray) and isinstance(b[d], np.ndarray)
            else not isinstance(x, np.ndarray) and not isinstance(b[d], np.ndarray) and x == b[d]
        )
        for d, x in a.items()
    )
