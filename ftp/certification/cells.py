"""Cells: groups of ranks that run one graph on shards of equal shapes and are checked together."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ftp.certification.element_map import MeshAxis
from ftp.certification.progression import Index, text_of
from ftp.certification.ranks import MeshIndex, Ranks
from ftp.dataclass import dataclass


@dataclass(frozen=True, eq=False)
class Cell:
    """Ranks that are checked together.

    Attributes:
        graph: index of the graph that they run.
        at: per mesh axis, coordinates; the cell's ranks are the product.
    """

    graph: int
    at: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(map(len, self.at))

    def coordinates(self) -> Iterator[MeshIndex]:
        return itertools.product(*self.at)


class Cells:
    """The mesh divided into cells, and the names of ranks in messages.

    Args:
        lengths: per claimed chunk, its length on each rank, an array with a dim for each axis. The
            ranks of a cell have equal lengths.
        alone: axes along which each cell has one coordinate.
    """

    def __init__(
        self,
        ranks: Ranks,
        axes: Mapping[str, MeshAxis],
        lengths: Sequence[Index],
        alone: Collection[str],
    ):
        self.ranks, self.axes, self.lengths = ranks, axes, lengths
        self.alone = alone

    @cached_property
    def all(self) -> list[Cell]:
        """All cells; each rank is in one. Coordinates of an axis share a cell if exchanging them
        changes no rank's graph or lengths.
        """
        facts = [self.ranks.number, *self.lengths]
        classes: list[list[tuple[int, ...]]] = []
        for dim, (axis, along) in enumerate(self.axes.items()):
            varying = [fact for fact in facts if fact.shape[dim] > 1]
            alike: dict[Any, list[int]] = {}
            for i in range(along.n):
                known = tuple(text_of(fact.take([i], dim)) for fact in varying)
                alike.setdefault(i if axis in self.alone else known, []).append(i)
            classes.append([tuple(found) for found in alike.values()])
        return [
            Cell(self.ranks.graph_at([at[0] for at in together]), together)
            for together in itertools.product(*classes)
        ]

    def along(self, cell: Cell, along: MeshAxis) -> list[Cell]:
        """The cells that differ from ``cell`` on one axis only."""
        return self._columns[along.dim, cell.at[: along.dim], cell.at[along.dim + 1 :]]

    @cached_property
    def _columns(self) -> dict[Any, list[Cell]]:
        found: dict[Any, list[Cell]] = {}
        for cell in self.all:
            for dim in range(len(self.axes)):
                found.setdefault((dim, cell.at[:dim], cell.at[dim + 1 :]), []).append(cell)
        return found

    def where(self, coordinate: MeshIndex) -> str:
        return self._named([(i,) for i in coordinate], "the rank")

    def among(self, cell: Cell) -> str:
        return self._named(cell.at, "the rank" if cell.size == 1 else "one of the ranks")

    def _named(self, coordinates: Sequence[tuple[int, ...]], who: str) -> str:
        named = [
            f"{axis} {', '.join(map(str, at[:3]))}{', ...' if len(at) > 3 else ''}"
            for axis, at in zip(self.axes, coordinates, strict=True)
        ]
        return f" on {who} at ({', '.join(named)})"
