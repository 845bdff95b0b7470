"""Several values in one tensor, one behind the other, as a collective that does the work of
several moves them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ftp.certification.element_map import (
    Held,
    Where,
    joined,
    number,
    reshape,
    resolved,
    slice_dim,
)
from ftp.certification.unsound import Unsound


@dataclass(frozen=True, eq=False)
class Row:
    """The ``parts`` along ``dim``, as a tensor of ``shape``: in the order of memory."""

    parts: tuple[Held, ...]
    dim: int
    shape: tuple[int, ...]

    @property
    def natural(self) -> tuple[int, ...]:
        """The shape before it was flattened."""
        first = self.parts[0].shape
        return (
            *first[: self.dim],
            sum(p.shape[self.dim] for p in self.parts),
            *first[self.dim + 1 :],
        )

    def require_natural(self) -> None:
        if self.shape != self.natural:
            raise Unsound(
                f"several values in a row of shape {self.natural} are taken apart as one of shape"
                f" {self.shape}"
            )

    def reshaped(self, shape: Sequence[int]) -> "Row":
        return replace(self, shape=tuple(resolved(shape, math.prod(self.shape))))

    def sliced(self, dim: int, start: Where, stop: Where) -> "Held | Row":
        self.require_natural()
        if dim != self.dim:
            return row([slice_dim(p, dim, start, stop) for p in self.parts], self.dim)
        first, last = number(start), number(stop)
        if first is None or last is None:
            raise Unsound("ranks with one program take different parts of several values in a row")
        taken, at = [], 0
        for part in self.parts:
            size = part.shape[dim]
            a, b = max(first - at, 0), min(last - at, size)
            if a < b:
                taken.append(slice_dim(part, dim, a, b))
            at += size
        return row(taken or [slice_dim(self.parts[0], dim, 0, 0)], dim)

    # What ranks do together: each part is moved as it would be alone.

    def reduced(self, each: Callable[[int], Held]) -> "Row":
        return replace(self, parts=tuple(each(i) for i in range(len(self.parts))))

    def gathered(self, n: int, each: Callable[[int], Held]) -> "Row":
        self.require_natural()
        if self.dim or len(self.shape) != 1:
            raise Unsound("several values that are no row are gathered")
        parts = [reshape(each(i), (n, p.shape[0])) for i, p in enumerate(self.parts)]
        return Row(tuple(parts), 1, (n * self.shape[0],))

    def scattered(self, n: int, each: Callable[[int], Held]) -> "Held | Row":
        if self.dim != 1 or len(self.natural) != 2 or self.natural[0] != n or len(self.shape) != 1:
            raise Unsound(f"several values that are no {n} rows are scattered")
        return row([each(i) for i in range(len(self.parts))], 0)


def row(parts: Sequence[Held], dim: int) -> "Held | Row":
    """Parts along a dim: a part of one value if they are of one, otherwise a row."""
    if (
        all(
            p.value == parts[0].value and p.pending == parts[0].pending and not p.is_zero
            for p in parts
        )
        or len(parts) == 1
    ):
        return joined(parts, dim)
    shapes = [(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts]
    if any(not p.groups for p in parts) or any(s != shapes[0] for s in shapes):
        raise Unsound(f"tensors of shapes {[p.shape for p in parts]} are put in a row")
    made = Row(tuple(parts), dim, ())
    return replace(made, shape=made.natural)
