"""The cuts of dims that several mesh axes share, or that are cut in units, on one rank."""

from collections.abc import Mapping, Sequence

from ftp.dataclass import dataclass
from ftp.partitioning.local_program import Coordinate
from ftp.sharding.local_pieces import Piece, cut_pieces, is_factored
from ftp.sharding.spec import PartitionSpec, Units


@dataclass(frozen=True)
class NestedCut:
    """One of several cuts of a dim, on one rank: the dim's size before the cut, and the pieces of
    it that the rank holds after the cut.
    """

    dim: int
    cut: Units
    size: int
    pieces: tuple[Piece, ...]
    is_irregular: bool

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.pieces)


def nested_cuts(
    spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int], coordinate: Coordinate
) -> list[NestedCut]:
    """The cuts, major to minor, of every dim that several cuts share or that is cut in units."""
    found = []
    for dim in range(len(spec)):
        cuts = spec.cuts(dim)
        size = shape[dim]
        for cut in cuts if len(cuts) > 1 or not all(c.is_plain for c in cuts) else ():
            n = axes[cut.axis]
            pieces = tuple(cut_pieces(size, n, coordinate[cut.axis], cut))
            irregular = not is_factored(PartitionSpec(cut), 0, size, {cut.axis: n})
            found.append(NestedCut(dim, cut, size, pieces, irregular))
            size = found[-1].length
    return found
