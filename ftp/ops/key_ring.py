"""Pass keys and values around the ranks of one or several axes, and their gradients back.

A rank sends its keys and values in pieces, each directly from its owner: in step h every rank sends
to the rank h places after it. The gradients of a piece are sent back to its owner, which
sums them. Keys that no query of a rank sees, as far as the mask is known before, are not sent to
it. So a rank holds two received pieces at a time, not all ranks' keys and values.

The caller computes with a piece: it visits one piece after another. The programs are written once,
for one rank, as generators: they yield tensors to send, and receive those that arrived for the
yield before, so that a transfer overlaps with a computation (`ftp.ops.sends`).

Source: Liu, Zaharia and Abbeel (2023), Ring Attention with Blockwise Transformers.

Above 450 lines: the programs of both directions share the places of pieces and their order.
"""

import bisect
import functools
import itertools
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ftp.ops.attention import Block, pieces_of, sum_dtype
from ftp.ops.sends import OneRank, Send, Sends
from ftp.sharding.layout import pieces
from ftp.sharding.spec import Interval

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
        length, at, group = None, 0, 0
        while at < len(rows):
            outer, extent, inner, count = rows[at : at + 4]
            numbers = rows[at + 4 : at + 4 + 2 * count]
            if group in axes:
                axis = axes[group]
                extent = extent if length is None else length // (outer * inner)
                of = bool(axis.is_zigzag_of_queries)
                numbers = [*itertools.chain(*pieces(extent, axis.n, self._at(rank, axis), of))]
                length = outer * inner * sum(numbers[1::2])
            part += [outer, extent, inner, len(numbers) // 2, *numbers]
            at, group = at + 4 + 2 * count, group + 1
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


def _add(sums: Sequence[Tensor], arrived: Sequence[Tensor | None], held: Sequence[Block]) -> None:
    for total, x in zip(sums, arrived, strict=False):
        before = 0
        for at, length in _runs(held) if x is not None else ():
            of_x = _part(x, slice(before, before + length))  # type: ignore[arg-type]
            _part(total, slice(at, at + length)).add_(of_x)  # type: ignore[arg-type]
            before += length


class PartSums:
    """Sums of a tensor's gradients, made and finished in parts along the sequence, in order.

    Sums of a wider dtype than the tensor's are tensors of their own for each part, which are
    converted one by one: the sums and the result are not held at once.
    """

    def __init__(self, like: Tensor):
        self._like, self._wide = like, sum_dtype(like.dtype)
        is_wider = self._wide != like.dtype
        layout = torch.contiguous_format
        self._whole = None if is_wider else torch.zeros_like(like, memory_format=layout)
        self._finished: list[Tensor] = []

    def part(self, part: slice) -> Tensor:
        """Zeros to add to."""
        if self._whole is not None:
            return _part(self._whole, part)
        of = _part(self._like, part)
        return torch.zeros_like(of, dtype=self._wide, memory_format=torch.contiguous_format)

    def finish(self, sums: Tensor) -> None:
        """Take the sums of the next part, to which nothing is added any more."""
        if self._whole is None:
            self._finished.append(sums.to(self._like.dtype))

    def result(self) -> Tensor:
        if self._whole is not None:
            return self._whole
        finished, self._finished = self._finished, []
        return torch.cat(finished, 2) if finished else torch.zeros_like(self._like)


def pass_keys(
    steps: "Steps", k: Tensor, v: Tensor, visit: Callable[[int, int, list[Tensor]], None]
) -> OneRank:
    """Visit the pieces that a rank needs: ``visit(owner, piece, [keys, values])``."""
    ring, rank = steps.ring, steps.rank
    for at, (piece, step) in enumerate(steps.all):
        near: Any = yield steps.sends_keys(at + 1, k, v)
        if not step:
            near = [_part(x, ring.piece(rank, piece)) for x in (k, v)]
        if near[0] is not None:
            visit((rank - step) % ring.n, piece, near)
        near.clear()


def return_gradients(
    steps: "Steps",
    k: Tensor,
    v: Tensor,
    visit: Callable[[int, int, list[Tensor], list[Tensor]], None],
) -> Generator[Sends, Any, "list[PartSums]"]:
    """The gradients of a rank's keys and values, as `PartSums`. A visit gets a piece and the sums
    of its gradients, and adds to them.
    """
    ring, rank, wide = steps.ring, steps.rank, sum_dtype(k.dtype)
    grads = [PartSums(x) for x in (k, v)]
    sums: dict[int, list[Tensor]] = {}  # of the gradients of a piece
    made: list[Tensor] = []  # the gradients of the step before
    for at in range(len(steps.all) + 2):
        near: Any = yield [*steps.sends_keys(at + 1, k, v), *steps.returns(at - 1, made, k, v)]
        piece, step = steps.at(at)
        returned, places = steps.at(at - 2)
        held = steps.sent(returned, places) if places else []
        _add(sums.get(returned, ()), near[2 if step else 0 :], held)
        del near[2 if step else 0 :]
        made = []
        for done in [of for of in sums if steps.last_of(of) <= at - 2]:
            of_done = sums.pop(done)
            for x in grads:
                x.finish(of_done.pop(0))
        if at >= len(steps.all):
            continue
        if not step:
            near = [_part(x, ring.piece(rank, piece)) for x in (k, v)]
            to = sums[piece] = [x.part(ring.piece(rank, piece)) for x in grads]
        elif near[0] is not None:
            to = [torch.zeros_like(x, dtype=wide) for x in near]
        else:
            continue
        visit((rank - step) % ring.n, piece, near, to)
        near.clear()
        made = [x.to(k.dtype) for x in to] if step else []
        del to
    return grads


def steps_of(needs_of: Callable[..., Needs], rank: int, *given: Any) -> "Steps":
    """A rank's steps, cached for equal calls: with many ranks they take long to make.

    Args:
        given: to ``needs_of``.
    """
    return _steps_of(needs_of, rank, tuple(tuple(x) if isinstance(x, list) else x for x in given))


@functools.lru_cache(maxsize=256)
def _steps_of(needs_of: Callable[..., Needs], rank: int, given: tuple[Any, ...]) -> "Steps":
    return Steps(needs_of(*given), rank)


class Steps:
    """The steps of a rank: pairs of a piece and the distance of its owner, 0 for its own. Steps in
    which no rank needs keys are left out.

    Attributes:
        needs: equal on all ranks.
    """

    def __init__(self, needs: Needs, rank: int):
        self.needs, self.ring, self.rank, n = needs, needs.ring, rank, needs.ring.n
        self.all = [
            (piece, step)
            for piece in range(self.ring.count)
            for step in range(n)
            if not step or any(needs.held(r, (r - step) % n, piece) for r in range(n))
        ]

        self._last = {piece: at for at, (piece, _) in enumerate(self.all)}

    def last_of(self, piece: int) -> int:
        return self._last[piece]

    def at(self, at: int) -> tuple[int, int]:
        """The piece and distance of a pair; before the first and after the last there is none."""
        return self.all[at] if 0 <= at < len(self.all) else (-1, 0)

    def received(self, owner: int, piece: int) -> list[Block]:
        """The rank's part of a piece, as blocks of the tensor that arrived."""
        found, before = [], 0
        for block in self.needs.held(self.rank, owner, piece):
            found.append(Block(block.first, before, block.length))
            before += block.length
        return found

    def blocks(self, owner: int, piece: int, most: int) -> list[Block]:
        """The same in blocks of at most ``most`` keys."""
        return [
            Block(block.first + low, block.at + low, min(most, block.length - low))
            for block in self.received(owner, piece)
            for low in range(0, block.length, most)
        ]

    def columns(self, owner: int, piece: int) -> list[int]:
        """The same as a part of the sequence, as in `ftp.ops.attention`."""
        held = self.received(owner, piece)
        numbers = (x for block in held for x in (block.first, block.length))
        return [1, self.ring.size, 1, len(held), *numbers]

    def sent(self, piece: int, step: int) -> list[Block]:
        """The blocks of the rank's own piece that it sends in a step."""
        return self.needs.held((self.rank + step) % self.ring.n, self.rank, piece)

    def sends_keys(self, at: int, k: Tensor, v: Tensor) -> Sends:
        """The keys and values to send for step ``at``."""
        piece, step = self.at(at)
        if not step:
            return []
        ring, rank = self.ring, self.rank
        own, sent = ring.piece(rank, piece), self.sent(piece, step)
        length = self.needs.length(rank, (rank - step) % ring.n, piece)
        return [
            Send(
                step,
                _taken(_part(x, own), sent) if sent else None,
                (*x.shape[:2], length, x.shape[3]) if length else None,
                x,
                _elements(x, ring.width),
            )
            for x in (k, v)
        ]

    def returns(self, at: int, made: Sequence[Tensor], k: Tensor, v: Tensor) -> Sends:
        """The gradients of step ``at``, to send back."""
        piece, step = self.at(at)
        if not step:
            return []
        length = sum(block.length for block in self.sent(piece, step))
        return [
            Send(
                -step,
                made[i].contiguous() if made else None,
                (*x.shape[:2], length, x.shape[3]) if length else None,
                x,
                _elements(x, self.ring.width),
            )
            for i, x in enumerate((k, v))
        ]


def _runs(held: Sequence[Block]) -> list[Interval]:
    """The positions of blocks in a tensor, with adjacent ones joined."""
    found: list[Interval] = []
    for block in held:
        if found and sum(found[-1]) == block.at:
            found[-1] = (found[-1][0], found[-1][1] + block.length)
        else:
            found.append((block.at, block.length))
    return found


def _taken(x: Tensor, held: Sequence[Block]) -> Tensor:
    parts = [_part(x, slice(at, at + length)) for at, length in _runs(held)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 2)


def _part(x: Tensor, part: slice) -> Tensor:
    return x.narrow(2, part.start, part.stop - part.start)


def _elements(x: Tensor, length: int) -> int:
    return x.shape[0] * x.shape[1] * length * x.shape[3]
