"""Cells: ranks that run one graph on shards of equal shapes, and so are checked at once."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ftp.certification.element_map import MeshAxis
from ftp.certification.positions import Index
from ftp.certification.ranks import MeshIndex, Ranks


@dataclass(frozen=True, eq=False)
class Cell:
    """Ranks that are checked together: they run one graph on shards of equal shapes.

    Attributes:
        at: per mesh axis, the coordinates; the cell is their product.
    """

    graph: int
    at: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return math.prod(map(len, self.at))

    def coordinates(self) -> Iterator[MeshIndex]:
        return itertools.product(*self.at)


class Cells:
    """The mesh as cells, and the ranks' names in messages.

    Args:
        lengths: of every claimed chunk on each rank, as arrays with a dim for each axis; they are
            equal within a cell.
        alone: axes along which a cell holds a single rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        axes: Mapping[str, MeshAxis],
        lengths: Sequence[Index],
        *,
        alone: Collection[str] = (),
    ):
        self.ranks, self.axes, self.lengths = ranks, axes, lengths
        self.alone = alone

    @cached_property
    def all(self) -> list[Cell]:
        """Every rank in one cell. Coordinates of an axis share a cell if exchanging them changes no
        rank's graph or lengths.
        """
        facts = [self.ranks.number, *self.lengths]
        classes: list[list[tuple[int, ...]]] = []
        for dim, (axis, along) in enumerate(self.axes.items()):
            varying = [fact for fact in facts if fact.shape[dim] > 1]
            alike: dict[Any, list[int]] = {}
            for i in range(along.n):
                alike.setdefault(tuple(fact.take(i, dim).tobytes() for fact in varying), []).append(
                    i
                )
            classes.append(
                [(i,) for i in range(along.n)]
                if axis in self.alone
                else [tuple(found) for found in alike.values()]
            )
        return [
            Cell(self.ranks.graph_at([at[0] for at in together]), together)
            for together in itertools.product(*classes)
        ]

    def along(self, cell: Cell, along: MeshAxis) -> list[Cell]:
        """The cells that differ from ``cell`` on one axis only."""
        key = (along.dim, cell.at[: along.dim], cell.at[along.dim + 1 :])
        return self._columns[key]

    @cached_property
    def _columns(self) -> dict[Any, list[Cell]]:
        found: dict[Any, list[Cell]] = {}
        for cell in self.all:
            for dim in range(len(self.axes)):
                found.setdefault((dim, cell.at[:dim], cell.at[dim + 1 :]), []).append(cell)
        return found

    def where(self, coordinate: MeshIndex) -> str:
        return (
            " on the rank at ("
            + ", ".join(f"{a} {i}" for a, i in zip(self.axes, coordinate, strict=True))
            + ")"
        )

    def among(self, cell: Cell) -> str:
        if cell.size == 1:
            return self.where(next(cell.coordinates()))
        ranges = [", ".join(map(str, at[:3])) + (", ..." if len(at) > 3 else "") for at in cell.at]
        return (
            " on one of the ranks at ("
            + ", ".join(f"{a} {r}" for a, r in zip(self.axes, ranges, strict=True))
            + ")"
        )
