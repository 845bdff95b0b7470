"""Collectives on element maps: what each rank receives, from what the ranks send."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ftp.certification.axis_collectives import (
    Contribution,
    exchange_axis,
    gather_axis,
    reduce_axis,
    scatter_axis,
)
from ftp.certification.cells import Cell
from ftp.certification.element_map import ElementMap, MeshAxis, reshape
from ftp.certification.packed_values import PackedValues
from ftp.certification.unsound import Unsound
from ftp.dataclass import dataclass
from ftp.ops.exchange import EXCHANGE
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class IssuedCollective:
    """A collective, as the ranks of ``cell`` issue it.

    Attributes:
        sent: from a cell to the element map that its ranks send.
        along: from a cell and an axis to the cells that differ from it on that axis only.
        axes: the mesh axes over which the collective runs, major first.
    """

    cell: Cell
    sent: Callable[[Cell], ElementMap | PackedValues]
    along: Callable[[Cell, MeshAxis], Sequence[Cell]]
    axes: Sequence[MeshAxis]

    def require_parts(self, n: int, done: str) -> None:
        """Raise Unsound unless the collective runs over ``n`` ranks."""
        size = math.prod(along.n for along in self.axes)
        if n != size:
            axes = " × ".join(a.name for a in self.axes)
            raise Unsound(f"{n} parts are {done} over {axes} of size {size}")

    def operand(self, cell: Cell, part: int | None) -> ElementMap:
        """The element map that the ranks of a cell send, or that of one part of packed values."""
        held, mine = self.sent(cell), self.sent(self.cell)
        if part is None:
            if isinstance(held, PackedValues):
                raise Unsound(
                    f"{len(held.parts)} packed values meet a single one in one collective"
                )
            return held
        if (
            not isinstance(held, PackedValues)
            or not isinstance(mine, PackedValues)
            or (held.dim, held.shape) != (mine.dim, mine.shape)
            or [p.shape for p in held.parts] != [p.shape for p in mine.parts]
        ):
            raise Unsound("ranks send differently packed values")
        return held.parts[part]

    def over(
        self,
        cell: Cell,
        axes: Sequence[MeshAxis],
        step: Callable[[Sequence[Contribution], MeshAxis], ElementMap],
        leaf: Callable[[Cell], ElementMap],
    ) -> ElementMap:
        """Apply a one-axis collective over each axis, the first of ``axes`` last."""
        if not axes:
            return leaf(cell)
        along = axes[0]
        peers = self.along(cell, along)
        return step(
            [Contribution(c.at[along.dim], self.over(c, axes[1:], step, leaf)) for c in peers],
            along,
        )

    def result(
        self,
        of_part: Callable[[int | None], ElementMap],
        packed: Callable[[PackedValues], ElementMap | PackedValues],
    ) -> ElementMap | PackedValues:
        """``packed`` of the values if packed values are sent, else ``of_part(None)``."""
        mine = self.sent(self.cell)
        return packed(mine) if isinstance(mine, PackedValues) else of_part(None)

    def reduced(self, op: str, part: int | None) -> ElementMap:
        return self.over(
            self.cell,
            self.axes,
            lambda parts, along: reduce_axis(parts, along, op),
            lambda cell: self.operand(cell, part),
        )

    def gathered(self, part: int | None) -> ElementMap:
        return self.over(self.cell, self.axes, gather_axis, lambda cell: self.operand(cell, part))

    def scattered(self, op: str, part: int | None) -> ElementMap:
        held = self.reduced(op, part)
        if part is not None:
            held = reshape(held, (-1,))  # each packed value is scattered as if it were alone
        for along in self.axes:
            held = scatter_axis(held, along, self.cell.at[along.dim])
        return held


def _all_reduce(issued: IssuedCollective, op: str) -> ElementMap | PackedValues:
    reduced = partial(issued.reduced, op)
    return issued.result(reduced, lambda packed: packed.reduced(reduced))


def _all_gather(issued: IssuedCollective, n: int) -> ElementMap | PackedValues:
    issued.require_parts(n, "gathered")
    return issued.result(issued.gathered, lambda packed: packed.gathered(n, issued.gathered))


def _reduce_scatter(issued: IssuedCollective, op: str, n: int) -> ElementMap | PackedValues:
    issued.require_parts(n, "scattered")
    scattered = partial(issued.scattered, op)
    return issued.result(scattered, lambda packed: packed.scattered(n, scattered))


def _all_to_all(
    issued: IssuedCollective, received: Sequence[int], sent: Sequence[int]
) -> ElementMap:
    if isinstance(issued.sent(issued.cell), PackedValues) or len(issued.axes) != 1:
        raise Unsound("an all-to-all of packed values, or over several axes, is not known")
    (along,) = issued.axes
    parts = [
        Contribution(c.at[along.dim], issued.operand(c, None))
        for c in issued.along(issued.cell, along)
    ]
    if (
        len({*received, *sent}) > 1
        or len(sent) != along.n
        or any(p.held.shape[:1] != (along.n * sent[0],) for p in parts)
    ):
        raise Unsound("an all-to-all sends parts of unequal sizes")
    return exchange_axis(parts, along, issued.cell.at[along.dim])


def _all_to_all_rows(issued: IssuedCollective, *_: Any) -> ElementMap:
    raise Unsound("an all-to-all sends parts whose sizes depend on values: they are not followed")


COLLECTIVES: dict[Any, Callable[..., ElementMap | PackedValues]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_reduce.default: _all_reduce,
    c10d.all_to_all_single.default: _all_to_all,
    ALL_TO_ALL_ROWS: _all_to_all_rows,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
}


def collective_count(graph: fx.Graph) -> int:
    """The number of collectives in a rank's graph; a recorded graph's sends and receives count."""
    return sum(
        n.target in COLLECTIVES or (n.target is EXCHANGE and n.args[0] != "barrier")
        for n in graph.nodes
    )
