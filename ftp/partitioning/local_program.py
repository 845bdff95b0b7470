"""The program of ranks with equal local shapes, and the offsets of their shards that it takes."""

from collections.abc import Mapping

from torch import fx

from ftp.dataclass import dataclass
from ftp.partitioning.collectives import Collective
from ftp.partitioning.rank_tables import Table, chunk_table
from ftp.sharding.layout import Chunk, Size, chunk_at, pieces_at, size_at

Coordinate = Mapping[str, int]


@dataclass(frozen=True)
class ShardOffset:
    """An offset of a rank's chunk of a dim of ``size``, by kind: its ``start``, its ``stop``, the
    length ``after`` it, or the start of the ``second`` piece of a zigzag.
    """

    kind: str
    size: Size
    axis: str
    n: int
    zigzag: bool = False

    def at(self, coordinate: Coordinate) -> int:
        chunk = Chunk(self.size, self.axis, self.n, self.zigzag)
        if self.kind == "second":
            return pieces_at(chunk, coordinate)[1][0]
        start, length = chunk_at(chunk, coordinate)
        match self.kind:
            case "start":
                return start
            case "stop":
                return start + length
            case _:
                return size_at(self.size, coordinate) - start - length

    def table(self, axes: Mapping[str, int]) -> Table:
        """The offset on every rank."""
        return chunk_table(axes, self, ShardOffset.at)


@dataclass(frozen=True)
class LocalProgram:
    """The program of every rank with the same local shapes.

    Attributes:
        gm: takes the local input tensors, then the rank's ``offsets`` as ints; returns the local
            outputs.
        offsets: of the trailing int inputs.
        collectives: in the order in which they are issued.
    """

    gm: fx.GraphModule
    offsets: tuple[ShardOffset, ...]
    collectives: tuple[Collective, ...]

    def offsets_at(self, coordinate: Coordinate) -> list[int]:
        return [o.at(coordinate) for o in self.offsets]

    def offset_tables(self, axes: Mapping[str, int]) -> list[Table]:
        """Every offset, on each rank of a mesh that runs this program."""
        return [offset.table(axes) for offset in self.offsets]
