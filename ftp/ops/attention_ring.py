"""Ring attention: queries, keys and values are cut over one axis. Each rank computes its queries
against one block of keys and values after another, while the next block travels.

A rank's keys and values travel in ``PIECES`` pieces, each straight from its owner: in step h every
rank sends to the rank h places after it. The gradients of a piece go back the same way and are
summed by its owner. A block that a causal mask hides from a rank is not sent to it. So a rank holds
two received pieces at a time, not all ranks' keys and values.

The algorithm is written once, for one rank, as a generator: what it yields is sent, and it is given
what arrived of what it yielded before, so that a transfer has the time of a computation to
complete (`ftp.ops.sends`). A mask that is given is cut as the scores are: it has the rank's rows,
and all columns.

Source: Liu, Zaharia and Abbeel (2023), Ring Attention with Blockwise Transformers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftp.ops import attention
from ftp.ops.attention import (
    Block,
    add_gradients,
    attend,
    blocks,
    pieces_of,
    sum_dtype,
)
from ftp.ops.sends import OneRank, Send, Sends, over, run
from ftp.sharding.layout import pieces
from ftp.sharding.spec import Interval

PIECES = 16  # in which a rank's keys and values travel
SHORTEST = 1024  # keys of a piece, where there are more
Needs = Callable[[int, int, int], bool]  # whether a rank needs an owner's piece of keys

# ``rows``: the queries' part, as in `ftp.ops.attention`. ``keys``: `Ring`, as ints.
_GIVEN = "Tensor? attn_mask, int[] rows, int[] keys, bool is_causal, float? scale, str group"
torch.library.define(
    "ftp::scaled_dot_product_attention_ring",
    f"(Tensor q, Tensor k, Tensor v, {_GIVEN}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "ftp::scaled_dot_product_attention_ring_backward",
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {_GIVEN})"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
RING = torch.ops.ftp.scaled_dot_product_attention_ring.default
RING_BACKWARD = torch.ops.ftp.scaled_dot_product_attention_ring_backward.default


@dataclass(frozen=True)
class Ring:
    """How keys are cut over the axis of ``n`` ranks, and which group of numbers of the queries'
    part is of that axis; as ints ``(size, n, is_zigzag, group, is_zigzag of the queries)``.

    Attributes:
        group: -1 where other axes cut the queries within it: then every block is sent.
    """

    size: int
    n: int
    is_zigzag: bool
    group: int
    is_zigzag_of_queries: bool

    @classmethod
    def of(cls, keys: Sequence[int]) -> "Ring":
        size, n, is_zigzag, group, of_queries = keys
        return cls(size, n, bool(is_zigzag), group, bool(of_queries))

    def keys_of(self, rank: int) -> list[Interval]:
        return [(a, length) for a, length in pieces(self.size, self.n, rank, self.is_zigzag)]

    def length_of(self, rank: int) -> int:
        return sum(length for _, length in self.keys_of(rank))

    @property
    def longest(self) -> int:
        return max(map(self.length_of, range(self.n)))

    @property
    def count(self) -> int:
        """The number of pieces in which keys travel."""
        return max(1, min(PIECES, self.longest // SHORTEST))

    @property
    def width(self) -> int:
        """Keys of a piece, at most."""
        return -(-self.longest // self.count)

    def piece(self, rank: int, at: int) -> slice:
        """Piece ``at`` of a rank's keys, as a slice of its tensor."""
        length = self.length_of(rank)
        return slice(min(at * self.width, length), min((at + 1) * self.width, length))

    def blocks(self, rank: int, at: int, most: int) -> list[Block]:
        """A piece in blocks, which stand in a tensor of the piece alone."""
        part, found, before = self.piece(rank, at), [], 0
        for first, length in self.keys_of(rank):
            low, high = max(part.start, before), min(part.stop, before + length)
            for a in range(low, high, most):
                count = min(most, high - a)
                found.append(Block(first + a - before, a - part.start, count))
            before += length
        return found

    def columns(self, rank: int, at: int) -> list[int]:
        """A piece as a part of the sequence, as in `ftp.ops.attention`."""
        held = self.blocks(rank, at, self.size + 1)
        return [1, self.size, 1, len(held), *(x for b in held for x in (b.first, b.length))]

    def last_query(self, rows: Sequence[int], rank: int) -> int | None:
        """The last position of a rank's queries; -1 without any; None where it is not known."""
        if self.group < 0:
            return None
        at, part = 0, list(rows)
        for _ in range(self.group):
            at += 4 + 2 * part[at + 3]
        held = pieces(part[at + 1], self.n, rank, self.is_zigzag_of_queries)
        numbers = [number for piece in held for number in piece]
        outer, inner = part[at], part[at + 2]
        length = outer * inner * sum(numbers[1::2])
        part = [*part[: at + 3], len(held), *numbers]
        return max((a + count - 1 for a, count in pieces_of(part, length)), default=-1)

    def sends(self, rows: Sequence[int], is_causal: bool) -> Needs:
        """What a causal mask leaves."""
        last = [self.last_query(rows, rank) for rank in range(self.n)]

        def needs(rank: int, owner: int, at: int) -> bool:
            held = self.blocks(owner, at, self.size + 1)
            if not held or last[rank] == -1:
                return False
            first = min(block.first for block in held)
            return not is_causal or last[rank] is None or first <= last[rank]  # type: ignore[operator]

        return needs

    def traffic(self, needs: Needs, returns: bool) -> tuple[int, int]:
        """How many keys, with their values, the rank that sends most sends, and the one that
        receives most receives.

        Args:
            returns: whether their gradients go back.
        """
        sent, received = [0] * self.n, [0] * self.n
        for owner in range(self.n):
            for at in range(self.count):
                length = _length(self.piece(owner, at))
                for rank in range(self.n):
                    if rank != owner and needs(rank, owner, at):
                        for a, b in ((owner, rank), (rank, owner))[: 1 + returns]:
                            sent[a] += length
                            received[b] += length
        return max(sent), max(received)


def one_rank(
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rows: Sequence[int],
    keys: Sequence[int],
    is_causal: bool,
    scale: float | None,
) -> OneRank:
    """One rank's result and log-sum-exps."""
    ring = Ring.of(keys)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=sum_dtype(q.dtype))
    total = q.new_full(q.shape[:3], -math.inf, dtype=sum_dtype(q.dtype))
    row_blocks = blocks(rows, q.shape[2], attention.QUERIES) if out.numel() else []

    def visit(owner: int, piece: int, near: Sequence[Tensor]) -> None:
        for block in row_blocks:
            whole = slice(block.at, block.at + block.length)
            into = out[:, :, whole], total[:, :, whole]
            for held in ring.blocks(owner, piece, attention.KEYS):
                alone, (of_k, of_v), of_mask = _alone(held, near, mask)
                attend(*into, q, of_k, of_v, block, alone, is_causal, scale, of_mask)

    yield from pass_keys(Steps(ring, rank, ring.sends(rows, is_causal)), k, v, visit)
    return out.to(q.dtype), total.masked_fill_(total == -math.inf, 0)


def one_rank_backward(
    rank: int,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    rows: Sequence[int],
    keys: Sequence[int],
    is_causal: bool,
    scale: float | None,
) -> OneRank:
    """One rank's gradients of queries, keys and values."""
    ring = Ring.of(keys)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    grad_q = torch.zeros_like(q, dtype=sum_dtype(q.dtype), memory_format=torch.contiguous_format)
    row_blocks = blocks(rows, q.shape[2], attention.TILE) if grad_out.numel() else []

    def visit(owner: int, piece: int, near: Sequence[Tensor], to: Sequence[Tensor]) -> None:
        given = grad_out, q, *near, out, logsumexp
        key_blocks = ring.blocks(owner, piece, attention.TILE)
        _add_all((grad_q, *to), given, mask, row_blocks, key_blocks, is_causal, scale)

    steps = Steps(ring, rank, ring.sends(rows, is_causal))
    grads = yield from return_gradients(steps, k, v, visit)
    return grad_q.to(q.dtype), *grads


def _add_all(
    sums: Sequence[Tensor],
    given: tuple[Tensor, ...],
    mask: Tensor | None,
    rows: Sequence[Block],
    keys: Sequence[Block],
    is_causal: bool,
    scale: float,
) -> None:
    grad_q, *to = sums
    grad_out, q, *near, out, logsumexp = given
    for held in keys:
        alone, (k, v), of_mask = _alone(held, near, mask)
        into = (grad_q, *_alone(held, to, None)[1])
        for block in rows:
            of_block = grad_out, q, k, v, out, logsumexp
            add_gradients(into, of_block, block, alone, is_causal, scale, of_mask)


def _alone(
    held: Block, tensors: Sequence[Tensor], mask: Tensor | None
) -> tuple[Block, list[Tensor], Tensor | None]:
    """One block of keys of a piece, and its columns of the mask."""
    if mask is not None and mask.shape[-1] != 1:
        mask = mask.narrow(-1, held.first, held.length)
    near = [x[:, :, held.at : held.at + held.length] for x in tensors]
    return Block(held.first, 0, held.length), near, mask


def _add(sums: Sequence[Tensor], arrived: Sequence[Tensor | None]) -> None:
    for total, x in zip(sums, arrived, strict=False):
        if x is not None:
            total.add_(x)


def pass_keys(
    steps: "Steps", k: Tensor, v: Tensor, visit: Callable[[int, int, list[Tensor]], None]
) -> OneRank:
    """Visit the pieces that a rank needs: their owner, which piece it is, its keys and values."""
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
) -> OneRank:
    """The gradients of a rank's keys and values. A visit adds those of a piece to sums, which it is
    given beside the piece.
    """
    ring, rank, wide = steps.ring, steps.rank, sum_dtype(k.dtype)
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v)]
    sums: dict[int, list[Tensor]] = {}  # of the gradients of a piece
    made: list[Tensor] = []  # the gradients of the step before
    for at in range(len(steps.all) + 2):
        near: Any = yield [*steps.sends_keys(at + 1, k, v), *steps.returns(at - 1, made, k, v)]
        piece, step = steps.at(at)
        _add(sums.get(steps.at(at - 2)[0], ()), near[2 if step else 0 :])
        del near[2 if step else 0 :]
        made = []
        for done in [of for of in sums if steps.last_of(of) <= at - 2]:
            for x, total in zip(grads, sums.pop(done), strict=True):
                if total.dtype != x.dtype:
                    _part(x, ring.piece(rank, done)).copy_(total)
        if at >= len(steps.all):
            continue
        if not step:
            near = [_part(x, ring.piece(rank, piece)) for x in (k, v)]
            parts = [_part(x, ring.piece(rank, piece)) for x in grads]
            sums[piece] = [x if x.dtype == wide else x.to(wide) for x in parts]
            to = sums[piece]
        elif near[0] is not None:
            to = [torch.zeros_like(x, dtype=wide) for x in near]
        else:
            continue
        visit((rank - step) % ring.n, piece, near, to)
        near.clear()
        made = [x.to(k.dtype) for x in to] if step else []
        del to
    return grads


class Steps:
    """What a rank computes: pairs of a piece and the places that it comes from, 0 its own; steps
    in which no rank needs anything are left out.

    Args:
        needs: the same function on all ranks.
    """

    def __init__(self, ring: Ring, rank: int, needs: Needs):
        self.ring, self.rank, self.needs, n = ring, rank, needs, ring.n
        self.all = [
            (piece, step)
            for piece in range(ring.count)
            for step in range(n)
            if not step or any(self.needs(r, (r - step) % n, piece) for r in range(n))
        ]

    def last_of(self, piece: int) -> int:
        return max(at for at, (of, _) in enumerate(self.all) if of == piece)

    def at(self, at: int) -> tuple[int, int]:
        """The piece and step of a pair; before the first and after the last there is no piece."""
        return self.all[at] if 0 <= at < len(self.all) else (-1, 0)

    def sends_keys(self, at: int, k: Tensor, v: Tensor) -> Sends:
        """The keys and values that travel for step ``at``."""
        piece, step = self.at(at)
        if not step:
            return []
        ring, rank = self.ring, self.rank
        own, owner = ring.piece(rank, piece), (rank - step) % ring.n
        is_sent = self.needs((rank + step) % ring.n, rank, piece)
        length = _length(ring.piece(owner, piece)) if self.needs(rank, owner, piece) else None
        return [_send(step, x, own if is_sent else None, length, ring.width) for x in (k, v)]

    def returns(self, at: int, made: Sequence[Tensor], k: Tensor, v: Tensor) -> Sends:
        """The gradients of step ``at`` on their way back."""
        piece, step = self.at(at)
        if not step:
            return []
        ring, rank = self.ring, self.rank
        length = _length(ring.piece(rank, piece))
        is_due = self.needs((rank + step) % ring.n, rank, piece)
        return [
            Send(
                -step,
                made[i].contiguous() if made else None,
                (*x.shape[:2], length, x.shape[3]) if is_due else None,
                x,
                _elements(x, ring.width),
            )
            for i, x in enumerate((k, v))
        ]


def _part(x: Tensor, part: slice) -> Tensor:
    return x[:, :, part]


def _length(part: slice) -> int:
    return part.stop - part.start


def _elements(x: Tensor, length: int) -> int:
    return x.shape[0] * x.shape[1] * length * x.shape[3]


def _send(step: int, x: Tensor, own: slice | None, length: int | None, width: int) -> Send:
    arrives = None if length is None else (*x.shape[:2], length, x.shape[3])
    sent = None if own is None else _part(x, own).contiguous()
    return Send(step, sent, arrives, x, _elements(x, width))


@torch.library.impl("ftp::scaled_dot_product_attention_ring", ("cpu", "cuda"))
def _ring(*args: Any) -> Any:
    rank, start = over(args[-1])
    return run(one_rank(rank, *args[:-1]), start)


@torch.library.impl("ftp::scaled_dot_product_attention_ring_backward", ("cpu", "cuda"))
def _ring_backward(*args: Any) -> Any:
    rank, start = over(args[-1])
    return run(one_rank_backward(rank, *args[:-1]), start)


@torch.library.register_fake("ftp::scaled_dot_product_attention_ring")
def _fake(q, k, v, *_):
    wide = sum_dtype(q.dtype)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.register_fake("ftp::scaled_dot_product_attention_ring_backward")
def _fake_backward(grad_out, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
