"""The keys of a ring in pieces: which keys each rank holds, and which of each piece it needs."""

import bisect
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ftp.dataclass import dataclass
from ftp.ops.attention import Block, cuts_of, pieces_of
from ftp.sharding.layout import pieces
from ftp.sharding.local_pieces import Interval

# Pieces in which a rank sends its keys and values, one step per piece. The forward pass sums and
# sends back no gradients, so that there is memory for larger pieces.
PIECES, PIECES_OF_FORWARD = 14, 6
SHORTEST = 1024  # least number of keys of a piece in the mean, if a rank has more


Sees = Callable[[int, int], Sequence[tuple[int, int]]]
"""Function ``(first, stop)`` to the most keys that these queries see, as runs (start, stop) of
keys, which may exceed the sequence. Equal masks have one function object, as it is a cache key."""
EVERY = (0, sys.maxsize)  # the run of all keys


class RingAxis(NamedTuple):
    """How one axis of ``n`` ranks cuts keys, viewed as ``[outer, cut, inner]``, and queries.

    Attributes:
        group: index of the axis' group of numbers in the queries' part; -1 if other axes cut the
            queries within it: then every block is sent.
        stride: how far apart two ranks are that follow one another on the axis, in a group of all
            axes' ranks.
    """

    n: int
    outer: int = 1
    inner: int = 1
    is_zigzag: int = 0
    group: int = 0
    is_zigzag_of_queries: int = 0
    stride: int = 1


@dataclass(frozen=True)
class Ring:
    """The cuts of ``size`` keys over the axes of a ring, each within the part that the one before
    leaves; as ints ``(size, *axis, *axis)``.

    Attributes:
        returns: whether gradients of keys and values are sent back.
    """

    size: int
    axes: tuple[RingAxis, ...]
    returns: bool

    @classmethod
    def of(cls, keys: Sequence[int], returns: bool) -> "Ring":
        count = len(RingAxis._fields)
        starts = range(1, len(keys), count)
        return cls(keys[0], tuple(RingAxis(*keys[at : at + count]) for at in starts), returns)

    @property
    def n(self) -> int:
        return math.prod(axis.n for axis in self.axes)

    def _at(self, rank: int, axis: RingAxis) -> int:
        return rank // axis.stride % axis.n

    @functools.cached_property
    def _keys(self) -> list[list[Interval]]:
        return list(map(self._held_by, range(self.n)))

    def _held_by(self, rank: int) -> list[Interval]:
        part: list[int] = []
        length = self.size
        for axis in self.axes:
            extent = length // (axis.outer * axis.inner)
            held = pieces(extent, axis.n, self._at(rank, axis), bool(axis.is_zigzag))
            part += [axis.outer, extent, axis.inner, len(held), *itertools.chain(*held)]
            length = axis.outer * axis.inner * sum(length for _, length in held)
        return pieces_of(part, length)

    def keys_of(self, rank: int) -> list[Interval]:
        return self._keys[rank]

    def length_of(self, rank: int) -> int:
        return sum(length for _, length in self.keys_of(rank))

    @functools.cached_property
    def longest(self) -> int:
        return max(map(self.length_of, range(self.n)))

    @functools.cached_property
    def count(self) -> int:
        """The number of pieces of a rank's keys."""
        most = PIECES if self.returns else PIECES_OF_FORWARD
        return max(1, min(most, self.longest // SHORTEST))

    @functools.cached_property
    def width(self) -> int:
        """The most keys of a piece."""
        edges = map(self._edge, range(self.count + 1))
        return max(stop - start for start, stop in itertools.pairwise(edges))

    def _edge(self, at: int) -> int:
        """Where piece ``at`` begins. Each piece is smaller than the one before, the last a third of
        the first: the finished gradients of those before take its room.
        """
        n = self.count
        return -(-self.longest * at * (3 * n - at) // (2 * n * n))

    def piece(self, rank: int, at: int) -> slice:
        """Piece ``at`` of a rank's keys, as a slice of its tensor."""
        length = self.length_of(rank)
        return slice(min(self._edge(at), length), min(self._edge(at + 1), length))

    def blocks(self, rank: int, at: int, most: int) -> list[Block]:
        """A piece in blocks of at most ``most`` keys, placed in a tensor of only this piece."""
        part, found, before = self.piece(rank, at), [], 0
        for first, length in self.keys_of(rank):
            low, high = max(part.start, before), min(part.stop, before + length)
            for a in range(low, high, most):
                count = min(most, high - a)
                found.append(Block(first + a - before, a - part.start, count))
            before += length
        return found

    def queries_of(self, rows: Sequence[int], rank: int) -> list[Interval] | None:
        """The runs of queries of a rank; None if unknown.

        Args:
            rows: the queries' part of one of the ranks.
        """
        axes = {axis.group: axis for axis in self.axes}
        if min(axes) < 0:
            return None
        part: list[int] = []
        length = None
        for group, (outer, extent, inner, held) in enumerate(cuts_of(rows)):
            if group in axes:
                axis = axes[group]
                extent = extent if length is None else length // (outer * inner)
                is_zigzag = bool(axis.is_zigzag_of_queries)
                held = pieces(extent, axis.n, self._at(rank, axis), is_zigzag)
                length = outer * inner * sum(count for _, count in held)
            part += [outer, extent, inner, len(held), *itertools.chain(*held)]
        return pieces_of(part, length or 0)


class Needs:
    """The keys of each piece that each rank needs; equal on all ranks.

    Args:
        seen: per rank, the runs of keys that its queries see, in order.
    """

    def __init__(self, ring: Ring, seen: Sequence[Sequence[Interval]]):
        self.ring, self.seen = ring, seen
        self._held: dict[tuple[int, int, int], list[Block]] = {}

    @classmethod
    def of(cls, ring: Ring, rows: Sequence[int], sees: Sees) -> "Needs":
        """The needs by the keys that each run of queries sees.

        Args:
            rows: the queries' part of one of the ranks.
        """
        seen = []
        for rank in range(ring.n):
            queries = ring.queries_of(rows, rank)
            if queries is None:
                seen.append([(0, ring.size)])
                continue
            found: list[list[int]] = []
            for run in sorted(run for a, n in queries for run in sees(a, a + n)):
                first, stop = max(run[0], 0), min(run[1], ring.size)
                if found and first <= found[-1][1]:
                    found[-1][1] = max(found[-1][1], stop)
                elif first < stop:
                    found.append([first, stop])
            seen.append([(first, stop - first) for first, stop in found])
        return cls(ring, seen)

    def held(self, rank: int, owner: int, at: int) -> list[Block]:
        """The keys of an owner's piece that a rank needs, as blocks of it; all keys of its own
        piece.
        """
        key = rank, owner, at
        if key not in self._held:
            every = self.ring.blocks(owner, at, self.ring.size + 1)
            self._held[key] = every if rank == owner else list(_seen(every, self.seen[rank]))
        return self._held[key]

    def length(self, rank: int, owner: int, at: int) -> int:
        return sum(block.length for block in self.held(rank, owner, at))

    def traffic(self, among: int = 0) -> tuple[int, int]:
        """The most keys (with their values) that a rank sends, and the most that a rank receives;
        with those whose gradients it sends and receives.

        Args:
            among: if not 0, only what so many consecutive ranks send one another.
        """
        moved = self.overlap.copy()
        np.fill_diagonal(moved, 0)
        if among:
            of = np.arange(self.ring.n) // among
            moved[of[:, None] != of] = 0
        sent, received = moved.sum(0), moved.sum(1)
        if self.ring.returns:
            sent = received = sent + received
        return int(sent.max()), int(received.max())

    @functools.cached_property
    def overlap(self) -> np.ndarray:
        """The number of each owner's keys that each rank needs, of shape (rank, owner)."""
        held = [(first, n, owner) for owner, of in enumerate(self.ring._keys) for first, n in of]
        first, length, owner = np.array(held, np.int64).reshape(-1, 3).T
        found = np.zeros((self.ring.n, self.ring.n), np.int64)
        for rank, runs in enumerate(self.seen):
            if not runs:
                continue
            start, count = np.array(runs, np.int64).T
            before = np.cumsum(count) - count
            both = []
            for x in (first, first + length):  # the number of keys seen before x
                at = np.searchsorted(start, x, "right") - 1
                seen = before[at] + np.minimum(x - start[at], count[at])
                both.append(np.where(at < 0, 0, seen))
            np.add.at(found[rank], owner, both[1] - both[0])
        return found

    @property
    def steps(self) -> int:
        """The most steps in which a rank sends."""
        rank, owner = self.overlap.nonzero()
        return self.ring.count * len(set(((rank - owner) % self.ring.n).tolist()) - {0})


def _seen(blocks: Sequence[Block], seen: Sequence[Interval]) -> Iterator[Block]:
    """The parts of blocks that are in some runs of the sequence."""
    for block in blocks:
        start = bisect.bisect_right(seen, (block.first, math.inf)) - 1
        for first, length in itertools.islice(seen, max(start, 0), None):
            if first >= block.first + block.length:
                break
            low, high = max(first, block.first), min(first + length, block.first + block.length)
            if low < high:
                yield Block(low, block.at + low - block.first, high - low)
