"""What ranks receive of a collective, from what those that it talks to hold."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ftp.certification.axis_collectives import Part, added, concatenated, dealt, exchanged
from ftp.certification.cells import Cell
from ftp.certification.element_map import Along, Held, reshape
from ftp.certification.packed_values import Row
from ftp.certification.unsound import Unsound

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Issued:
    """A collective of the ranks of a cell: what each of those that it talks to brings.

    Attributes:
        sent: what the ranks of a cell send.
        along: the cells that differ from one on an axis only.
        axes: over which it runs, major first.
    """

    cell: Cell
    sent: Callable[[Cell], Held | Row]
    along: Callable[[Cell, Along], Sequence[Cell]]
    axes: Sequence[Along]

    @property
    def n(self) -> int:
        return math.prod(along.n for along in self.axes)

    def brought(self, cell: Cell, part: int | None) -> Held:
        """What the ranks of a cell bring, or one part of a row of values."""
        held, mine = self.sent(cell), self.sent(self.cell)
        if part is None:
            if isinstance(held, Row):
                raise Unsound(f"{len(held.parts)} values in a row are moved with one")
            return held
        if (
            not isinstance(held, Row)
            or not isinstance(mine, Row)
            or (held.dim, held.shape) != (mine.dim, mine.shape)
        ):
            raise Unsound("ranks bring different rows of values")
        if [p.shape for p in held.parts] != [p.shape for p in mine.parts]:
            raise Unsound("ranks bring different rows of values")
        return held.parts[part]

    def over(
        self,
        cell: Cell,
        axes: Sequence[Along],
        step: Callable[[Sequence[Part], Along], Held],
        leaf: Callable[[Cell], Held],
    ) -> Held:
        """A step over one axis after the other, the first of ``axes`` last."""
        if not axes:
            return leaf(cell)
        along = axes[0]
        peers = self.along(cell, along)
        return step(
            [Part(c.at[along.dim], self.over(c, axes[1:], step, leaf)) for c in peers], along
        )

    def row(self) -> Row | None:
        mine = self.sent(self.cell)
        return mine if isinstance(mine, Row) else None

    def reduced(self, op: str, part: int | None) -> Held:
        return self.over(
            self.cell,
            self.axes,
            lambda parts, along: added(parts, along, op),
            lambda cell: self.brought(cell, part),
        )

    def gathered(self, part: int | None) -> Held:
        return self.over(self.cell, self.axes, concatenated, lambda cell: self.brought(cell, part))

    def scattered(self, op: str, part: int | None) -> Held:
        held = self.reduced(op, part)
        if part is not None:
            held = reshape(held, (-1,))  # as it would be scattered alone
        for along in self.axes:
            held = dealt(held, along, self.cell.at[along.dim])
        return held


def _all_reduce(issued: Issued, op: str) -> Held | Row:
    found = issued.row()
    return (
        issued.reduced(op, None)
        if found is None
        else found.reduced(lambda i: issued.reduced(op, i))
    )


def _all_gather(issued: Issued, n: int) -> Held | Row:
    if n != issued.n:
        raise Unsound(
            f"{n} parts are gathered over {' × '.join(a.name for a in issued.axes)} of size"
            f" {issued.n}"
        )
    found = issued.row()
    return issued.gathered(None) if found is None else found.gathered(n, issued.gathered)


def _reduce_scatter(issued: Issued, op: str, n: int) -> Held | Row:
    if n != issued.n:
        raise Unsound(
            f"{n} parts are scattered over {' × '.join(a.name for a in issued.axes)} of size"
            f" {issued.n}"
        )
    found = issued.row()
    return (
        issued.scattered(op, None)
        if found is None
        else found.scattered(n, lambda i: issued.scattered(op, i))
    )


def _all_to_all(issued: Issued, received: Sequence[int], sent: Sequence[int]) -> Held:
    if issued.row() is not None or len(issued.axes) != 1:
        raise Unsound("several values, or those of several axes, are dealt out")
    (along,) = issued.axes
    parts = [
        Part(c.at[along.dim], issued.brought(c, None)) for c in issued.along(issued.cell, along)
    ]
    if (
        len({*received, *sent}) > 1
        or len(sent) != along.n
        or any(p.held.shape[:1] != (along.n * sent[0],) for p in parts)
    ):
        raise Unsound("ranks deal out unequal parts")
    return exchanged(parts, along, issued.cell.at[along.dim])


COLLECTIVES: dict[Any, Callable[..., Held | Row]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_reduce.default: _all_reduce,
    c10d.all_to_all_single.default: _all_to_all,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
}
