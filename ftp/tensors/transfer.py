"""Send boxes of tensors from the ranks that hold them to the ranks that need them, in rounds of
bounded size.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import Mesh, mesh_device
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.boxes import Box, Shape, parts_on

ALIGNMENT = 16  # bytes; enough for an element of any dtype
DEFAULT_BYTES = 256 * 2**20  # bytes of messages at a time if no bound is given


@dataclass(frozen=True)
class ReshardedTensor:
    """A tensor to reshard: its global shape and dtype, its old and new spec."""

    shape: Shape
    dtype: torch.dtype
    old: PartitionSpec
    new: PartitionSpec

    def nbytes(self, box: Box) -> int:
        """Bytes that a box takes in a message."""
        return -(-box.numel * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Transfer:
    """One box of one tensor, to be sent from one rank of the world to another."""

    tensor: int
    box: Box
    source: int
    target: int


def members(mesh: Mesh, world: Sequence[int]) -> tuple[int, ...]:
    """The ranks of the world that hold tensors of a mesh. Each rank holds whole tensors of a
    simulated mesh.
    """
    return mesh.ranks if mesh.kind == "process" else tuple(world)


def position(mesh: Mesh, rank: int) -> int | None:
    """The position in `parts_on` of a rank of the world; None outside the mesh."""
    if mesh.kind != "process":
        return 0
    return mesh.ranks.index(rank) if rank in mesh.ranks else None


@lru_cache(maxsize=4096)
def routes(
    old: Mesh,
    new: Mesh,
    before: PartitionSpec,
    after: PartitionSpec,
    shape: Shape,
    world: tuple[int, ...],
) -> tuple[tuple[Box, int, int], ...]:
    """``(box, source, target)`` of all boxes that the new ranks need. The source is the target
    itself if it holds the box, else a rank that does; replicas take turns.
    """
    holding: dict[Box, list[int]] = defaultdict(list)
    for rank in members(old, world):
        for part in parts_on(old, before, shape)[position(old, rank) or 0]:
            holding[part.box].append(rank)
    found = []
    for turn, target in enumerate(members(new, world)):
        for part in parts_on(new, after, shape)[position(new, target) or 0]:
            for held, sources in holding.items():
                if box := held.meet(part.box):
                    found.append(
                        (box, target if target in sources else sources[turn % len(sources)], target)
                    )
    return tuple(found)


def rounds(
    pieces: Sequence[Transfer], tensors: Sequence[ReshardedTensor], max_bytes: int
) -> list[list[Transfer]]:
    """The pieces, cut and grouped so that no rank sends and receives more than ``max_bytes`` in a
    round; equal on every rank.

    >>> w = ReshardedTensor((8,), torch.float32, PartitionSpec("tp"), PartitionSpec())
    >>> [[p.box.start for p in r] for r in rounds([Transfer(0, Box((0,), (8,)), 0, 1)], [w], 16)]
    [[(0,)], [(4,)]]
    """
    # Small enough for several peers in one round.
    share = max_bytes // 4 if max_bytes >= 4 * ALIGNMENT else max_bytes
    limit = share // ALIGNMENT * ALIGNMENT
    found: list[list[Transfer]] = []
    room: list[dict[int, int]] = []
    first: dict[int, int] = defaultdict(int)  # by rank, the first round that may have room
    for piece in pieces:
        m = tensors[piece.tensor]
        for box in piece.box.split(max(1, limit // m.dtype.itemsize)):
            nbytes, at = m.nbytes(box), max(first[piece.source], first[piece.target])
            while (
                at < len(room)
                and min(room[at].get(r, max_bytes) for r in (piece.source, piece.target)) < nbytes
            ):
                at += 1
            if at == len(room):
                found.append([])
                room.append({})
            found[at].append(Transfer(piece.tensor, box, piece.source, piece.target))
            for rank in (piece.source, piece.target):
                room[at][rank] = room[at].get(rank, max_bytes) - nbytes
                while (
                    first[rank] < len(room) and room[first[rank]].get(rank, max_bytes) < ALIGNMENT
                ):
                    first[rank] += 1
    return found


def reshard_shards(
    tensors: Sequence[ReshardedTensor],
    shards: Sequence[Tensor | None],
    old: Mesh,
    new: Mesh,
    max_bytes: int | None,
    to: torch.device | None = None,
) -> list[Tensor | None]:
    """This rank's shards on the new mesh; None on a rank outside it. All ranks of either mesh call
    it, with equal ``tensors``.

    Args:
        shards: this rank's shards on the old mesh.
        max_bytes: the most that this rank's messages take at a time, sent and received; at least
            16.
        to: the device of the new shards, if not that of the mesh.
    """
    rank = old.rank if old.kind == "process" else new.rank
    world = tuple(sorted({*old.ranks, *new.ranks})) or (0,)
    device = mesh_device(new)
    there = position(new, rank)
    arrived: list[Tensor | None] = [None] * len(tensors)
    pieces = []
    for i, m in enumerate(tensors):
        if there is not None:
            shape = m.shape
            if new.kind == "process":
                shape = local_shape(m.new, m.shape, new.axes, new.coordinates()[there])
            arrived[i] = torch.empty(shape, dtype=m.dtype, device=to or device)
        for box, source, target in routes(old, new, m.old, m.new, m.shape, world):
            if source != target:
                pieces.append(Transfer(i, box, source, target))
            elif rank == target:
                source_box = _view(shards[i], old, m.old, m.shape, rank, box)
                _view(arrived[i], new, m.new, m.shape, rank, box).copy_(source_box)
    for turn in rounds(pieces, tensors, DEFAULT_BYTES if max_bytes is None else max_bytes):
        if mine := [p for p in turn if rank in (p.source, p.target)]:
            _exchange(mine, tensors, shards, arrived, old, new, rank, device)
    return arrived


def _exchange(
    pieces: Sequence[Transfer],
    tensors: Sequence[ReshardedTensor],
    shards: Sequence[Tensor | None],
    arrived: Sequence[Tensor | None],
    old: Mesh,
    new: Mesh,
    rank: int,
    device: torch.device,
) -> None:
    """One round: a message for each pair of ranks, freed when this returns."""
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for p in pieces:
        sizes[p.source, p.target] += tensors[p.tensor].nbytes(p.box)
    messages = {
        pair: torch.empty(size, dtype=torch.uint8, device=device) for pair, size in sizes.items()
    }
    for p, slot in _slots(pieces, tensors, messages):
        if p.source == rank:
            m = tensors[p.tensor]
            slot.copy_(_view(shards[p.tensor], old, m.old, m.shape, rank, p.box))
    calls = [
        dist.P2POp(dist.isend, message, target)
        if source == rank
        else dist.P2POp(dist.irecv, message, source)
        for (source, target), message in messages.items()
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    for p, slot in _slots(pieces, tensors, messages):
        if p.target == rank:
            m = tensors[p.tensor]
            _view(arrived[p.tensor], new, m.new, m.shape, rank, p.box).copy_(slot)


def _slots(
    pieces: Sequence[Transfer],
    tensors: Sequence[ReshardedTensor],
    messages: dict[tuple[int, int], Tensor],
) -> Iterator[tuple[Transfer, Tensor]]:
    """Each piece with a view of its bytes in the messages, in its shape and dtype."""
    begin: dict[tuple[int, int], int] = defaultdict(int)
    for p in pieces:
        m, pair = tensors[p.tensor], (p.source, p.target)
        raw = messages[pair][begin[pair] : begin[pair] + p.box.numel * m.dtype.itemsize]
        begin[pair] += m.nbytes(p.box)
        yield p, raw.view(m.dtype).view(p.box.size)


def _view(
    shard: Tensor | None, mesh: Mesh, spec: PartitionSpec, shape: Shape, rank: int, box: Box
) -> Tensor:
    """``box`` within a rank's shard on a mesh."""
    assert shard is not None
    parts = parts_on(mesh, spec, shape)[position(mesh, rank) or 0]
    return next(shard[part.slices(box)] for part in parts if part.box.meet(box) == box)
