"""Cells: ranks that run one graph on shards of equal shapes, and so are checked at once."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ftp.certification.certificate import Coordinate, Ranks
from ftp.certification.element_map import MeshAxis


@dataclass(frozen=True, eq=False)
class Cell:
    """Ranks that are checked together: they run one graph on shards of equal shapes.

    Attributes:
        at: per mesh axis, the coordinates; the cell is their product.
    """

    graph: int
    at: tuple[tuple[int, ...], ...]

    def coordinates(self) -> Iterator[Coordinate]:
        return itertools.product(*self.at)


class Cells:
    """The mesh as cells, and the ranks' names in messages.

    Args:
        lengths: of every claimed chunk on the rank at a coordinate; they are equal within a cell.
        alone: axes along which each cell is one rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        axes: Mapping[str, MeshAxis],
        lengths: Callable[[Coordinate], Sequence[int]],
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
        counts = [along.n for along in self.axes.values()]
        kinds: dict[Any, int] = {}
        kind = np.empty(counts, dtype=np.int64)
        for coordinate in itertools.product(*map(range, counts)):
            kind[coordinate] = kinds.setdefault(
                (self.ranks.at[coordinate][0], *self.lengths(coordinate)), len(kinds)
            )
        classes: list[list[tuple[int, ...]]] = []
        for dim, (axis, n) in enumerate(zip(self.axes, counts, strict=True)):
            alike: dict[bytes, list[int]] = {}
            for i in range(n):
                alike.setdefault(kind.take(i, dim).tobytes(), []).append(i)
            classes.append(
                [(i,) for i in range(n)]
                if axis in self.alone
                else [tuple(found) for found in alike.values()]
            )
        return [
            Cell(self.ranks.at[tuple(at[0] for at in together)][0], together)
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

    def where(self, coordinate: Coordinate) -> str:
        return (
            " on the rank at ("
            + ", ".join(f"{a} {i}" for a, i in zip(self.axes, coordinate, strict=True))
            + ")"
        )

    def among(self, cell: Cell) -> str:
        if all(len(at) == 1 for at in cell.at):
            return self.where(next(cell.coordinates()))
        ranges = [", ".join(map(str, at[:3])) + (", ..." if len(at) > 3 else "") for at in cell.at]
        return (
            " on one of the ranks at ("
            + ", ".join(f"{a} {r}" for a, r in zip(self.axes, ranges, strict=True))
            + ")"
        )
