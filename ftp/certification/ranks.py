"""The ranks' programs of a certificate, for all ranks of a mesh at once."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import fx

from ftp.dataclass import dataclass
from ftp.dynamic_int import is_dynamic

MeshIndex = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks' programs: per rank a graph, and the values of the graph's offsets, number inputs
    that come after the tensors. Arrays have a dim for each mesh axis, of size 1 where nothing
    changes along it.

    Attributes:
        shape: of the mesh.
        number: index of the graph that each rank runs.
        offsets: per graph and offset, the values on the ranks that run the graph.
    """

    shape: tuple[int, ...]
    graphs: tuple[fx.Graph, ...]
    number: np.ndarray
    offsets: tuple[tuple[np.ndarray, ...], ...]

    @staticmethod
    def of(
        graphs: Sequence[fx.Graph], at: Mapping[MeshIndex, tuple[int, Sequence[int]]]
    ) -> "Ranks":
        """From ``{coordinate: (graph, offsets)}``."""
        shape = tuple(max(c) + 1 for c in zip(*at, strict=True))
        number = np.zeros(shape, dtype=np.int64)
        counts = {graph: len(given) for graph, given in at.values()}
        of_numbers = any(is_dynamic(x) for _, given in at.values() for x in given)
        offsets = [
            [
                np.zeros(shape, dtype=object if of_numbers else np.int64)
                for _ in range(counts.get(graph, 0))
            ]
            for graph in range(len(graphs))
        ]
        for coordinate, (graph, given) in at.items():
            number[coordinate] = graph
            for values, value in zip(offsets[graph], given, strict=True):
                values[coordinate] = value
        return Ranks(
            shape, tuple(graphs), shrunk(number), tuple(tuple(map(shrunk, o)) for o in offsets)
        )

    @property
    def at(self) -> dict[MeshIndex, tuple[int, tuple[int, ...]]]:
        """``{coordinate: (graph, offsets)}``."""
        number = np.broadcast_to(self.number, self.shape)
        given = [[np.broadcast_to(v, self.shape) for v in values] for values in self.offsets]
        return {
            c: (number.item(c), tuple(v.item(c) for v in given[number[c]]))
            for c in np.ndindex(*self.shape)
        }

    def graph_at(self, coordinate: Sequence[int]) -> int:
        return int(np.broadcast_to(self.number, self.shape)[tuple(coordinate)])

    def first(self, graph: int) -> MeshIndex:
        """The first rank that runs a graph."""
        return tuple(np.argwhere(self.number == graph)[0].tolist())

    @property
    def misfit(self) -> str:
        """What does not fit the mesh or the graphs; "" if everything fits."""
        arrays = [self.number, *(v for values in self.offsets for v in values)]
        if len(self.offsets) != len(self.graphs):
            return f"{len(self.graphs)} graphs, and offsets for {len(self.offsets)}"
        dims = [set(sizes) for sizes in zip(*(a.shape for a in arrays), strict=False)]
        if any(a.ndim != len(self.shape) for a in arrays) or any(
            sizes - {1, n} for sizes, n in zip(dims, self.shape, strict=True)
        ):
            return f"arrays that do not fit ranks of shape {self.shape}"
        if set(np.unique(self.number).tolist()) != set(range(len(self.graphs))):
            return f"{len(self.graphs)} graphs, of which the ranks run others"
        return ""


def shrunk(of_ranks: np.ndarray) -> np.ndarray:
    """Shrink dims along which nothing changes to size 1."""
    for dim in range(of_ranks.ndim):
        first = of_ranks.take([0], dim)
        if (of_ranks == first).all():
            of_ranks = first
    return of_ranks
