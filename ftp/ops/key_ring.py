"""Pass keys and values around the ranks of one or several axes, and their gradients back.

A rank sends its keys and values in pieces, each directly from its owner: in step h every rank sends
to the rank h places after it. The gradients of a piece are sent back to its owner, which
sums them. Keys that no query of a rank sees, as far as the mask is known before, are not sent to
it. So a rank holds two received pieces at a time, not all ranks' keys and values.

The caller computes with a piece: it visits one piece after another. The programs are written once,
for one rank, as generators: they yield tensors to send, and receive those that arrived for the
yield before, so that a transfer overlaps with a computation (`ftp.ops.sends`).

Source: Liu, Zaharia and Abbeel (2023), Ring Attention with Blockwise Transformers.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.attention import Block, rows_of, sum_dtype
from ftp.ops.ring_pieces import Needs
from ftp.ops.sends import OneRank, Send, Sends
from ftp.sharding.local_pieces import Interval, joined


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
            return rows_of(self._whole, part)
        of = rows_of(self._like, part)
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
            near = [rows_of(x, ring.piece(rank, piece)) for x in (k, v)]
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
        for done in [of for of in sums if steps.last_of[of] <= at - 2]:
            of_done = sums.pop(done)
            for x in grads:
                x.finish(of_done.pop(0))
        if at >= len(steps.all):
            continue
        if not step:
            near = [rows_of(x, ring.piece(rank, piece)) for x in (k, v)]
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


def _add(sums: Sequence[Tensor], arrived: Sequence[Tensor | None], held: Sequence[Block]) -> None:
    for total, x in zip(sums, arrived, strict=False):
        before = 0
        for at, length in _runs(held) if x is not None else ():
            of_x = rows_of(x, slice(before, before + length))  # type: ignore[arg-type]
            rows_of(total, slice(at, at + length)).add_(of_x)
            before += length


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
        last_of: per piece its last step.
    """

    def __init__(self, needs: Needs, rank: int):
        self.needs, self.ring, self.rank, n = needs, needs.ring, rank, needs.ring.n
        self.all = [
            (piece, step)
            for piece in range(self.ring.count)
            for step in range(n)
            if not step or any(needs.held(r, (r - step) % n, piece) for r in range(n))
        ]
        self.last_of = {piece: at for at, (piece, _) in enumerate(self.all)}

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
        tensors = [_taken(rows_of(x, own), sent) if sent else None for x in (k, v)]
        return self._sends(step, tensors, length, (k, v))

    def returns(self, at: int, made: Sequence[Tensor], k: Tensor, v: Tensor) -> Sends:
        """The gradients of step ``at``, to send back."""
        piece, step = self.at(at)
        if not step:
            return []
        length = sum(block.length for block in self.sent(piece, step))
        tensors = [x.contiguous() for x in made] if made else [None, None]
        return self._sends(-step, tensors, length, (k, v))

    def _sends(
        self, step: int, tensors: Sequence[Tensor | None], length: int, like: Sequence[Tensor]
    ) -> Sends:
        """Send ``tensors``, and receive ``length`` keys and values, or their gradients."""
        return [
            Send(
                step,
                tensor,
                (*x.shape[:2], length, x.shape[3]) if length else None,
                x,
                x.shape[0] * x.shape[1] * self.ring.width * x.shape[3],
            )
            for tensor, x in zip(tensors, like, strict=True)
        ]


def _runs(held: Sequence[Block]) -> list[Interval]:
    """The positions of blocks in a tensor, with adjacent ones joined."""
    return joined((block.at, block.length) for block in held)


def _taken(x: Tensor, held: Sequence[Block]) -> Tensor:
    parts = [rows_of(x, slice(at, at + length)) for at, length in _runs(held)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 2)
