"""Attention between parts of a sequence: the kernel gets the positions of queries and keys as
numbers and makes no mask.

A part of a dim is a list of ints, one group per cut of the dim, major to minor: ``outer, size,
inner, count, start, length, ...``. A cut views the part that the cuts before it leave as ``[outer,
size, inner]``, and keeps ``count`` pieces of ``size``, each given by ``start`` and ``length``. An
empty list is the whole dim.

Queries and keys are computed in tiles. A causal mask hides a tile, leaves all of it, or leaves the
keys up to its diagonal, where the kernel's own causal mask applies. The results of one block of
queries are merged by their log-sum-exps; the gradients of a tile follow from the merged result and
log-sum-exp. So attention needs one tile's memory in addition to operands and results.

Source: Dao (2023), FlashAttention-2, sections 3.1 and 3.2.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.ops import tile_kernels
from ftp.ops.define import define, register_fake
from ftp.ops.tile_kernels import over_heads, repeated_heads
from ftp.sharding.local_pieces import Interval, Piece, joined, pieces_within
from ftp.torch_internals.op_types import OpOverload

QUERIES, KEYS = 1024, 8192  # sizes of a tile, forward
TILE = 1024  # queries and keys of a tile, backward

PART = define(
    "scaled_dot_product_attention_part"
    "(Tensor q, Tensor k, Tensor v, SymInt[] rows, SymInt[] columns, bool is_causal=False, *,"
    " Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor)"
)
PART_BACKWARD = define(
    "scaled_dot_product_attention_part_backward"
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp,"
    " SymInt[] rows, SymInt[] columns, bool is_causal=False, *, Tensor? attn_mask=None,"
    " float? scale=None)"
    " -> (Tensor, Tensor, Tensor)"
)


def pieces_of(part: Sequence[int], size: int) -> list[Interval]:
    """The pieces of a sequence that a part holds, in its order.

    Args:
        size: how many elements the part holds.

    >>> pieces_of([1, 8, 1, 1, 4, 4], 4), pieces_of([1, 8, 1, 2, 0, 2, 6, 2], 4), pieces_of([], 3)
    ([(4, 4)], [(0, 2), (6, 2)], [(0, 3)])
    """
    if not part:
        return [(0, size)]
    held: list[Piece] | None = None
    for outer, whole, inner, pieces in cuts_of(part):
        if held is None:
            held = [(0, outer * whole * inner)]
        held = [
            span
            for o in range(outer)
            for start, length in pieces
            for span in pieces_within(
                held, (o * whole + start) * inner, (o * whole + start + length) * inner
            )
        ]
    return joined((start, stop - start) for start, stop in held or ())


def cuts_of(part: Sequence[int]) -> Iterator[tuple[int, int, int, list[Interval]]]:
    """The cuts of a part, each as ``(outer, size, inner, pieces)``."""
    at = 0
    while at < len(part):
        outer, size, inner, count = part[at : at + 4]
        numbers = part[at + 4 : at + 4 + 2 * count]
        at += 4 + 2 * count
        yield outer, size, inner, list(zip(numbers[::2], numbers[1::2], strict=True))


@dataclass(frozen=True)
class Block:
    """A run of elements: position ``first`` in the sequence, position ``at`` in a rank's tensor."""

    first: int
    at: int
    length: int

    def slice(self, start: int, stop: int) -> slice:
        """Elements ``start`` to ``stop`` of the sequence, as a slice of the tensor."""
        return slice(self.at + start - self.first, self.at + stop - self.first)


@dataclass(frozen=True)
class Tile:
    """Queries and keys as slices of the tensors; ``is_diagonal``: query i sees keys 0 to i."""

    queries: slice
    keys: slice
    is_diagonal: bool = False


def blocks(part: Sequence[int], size: int, most: int) -> list[Block]:
    """The pieces of a part, in blocks of at most ``most`` elements."""
    found, at = [], 0
    for first, length in pieces_of(part, size):
        for low in range(0, length, most):
            found.append(Block(first + low, at + low, min(most, length - low)))
        at += length
    return found


def tiles(rows: Block, columns: Block, is_causal: bool) -> list[Tile]:
    """The tiles that a mask leaves of a block of queries and a block of keys.

    >>> for tile in tiles(Block(2, 0, 3), Block(0, 0, 4), True):
    ...     print(tile.queries, tile.keys, tile.is_diagonal)
    slice(0, 3, None) slice(0, 2, None) False
    slice(0, 2, None) slice(2, 4, None) True
    slice(2, 3, None) slice(2, 4, None) False
    """
    first, last = rows.first, rows.first + rows.length
    begin, end = columns.first, columns.first + columns.length
    every = rows.slice(first, last)
    if not is_causal:
        return [Tile(every, columns.slice(begin, end))]
    end = min(end, last)
    found = []
    if begin < min(end, first):
        found.append(Tile(every, columns.slice(begin, min(end, first))))
    begin = max(begin, first)
    if begin < end:
        found.append(Tile(rows.slice(begin, end), columns.slice(begin, end), True))
        if end < last:
            found.append(Tile(rows.slice(end, last), columns.slice(begin, end)))
    return found


def visible(rows: Sequence[Interval], columns: Sequence[Interval], is_causal: bool) -> int:
    """The number of (query, key) pairs that the mask leaves.

    >>> visible([(2, 3)], [(0, 4)], True), visible([(2, 3)], [(0, 4)], False)
    (11, 12)
    """
    total = 0
    for first, length in rows:
        for begin, count in columns:
            for t in tiles(Block(first, 0, length), Block(begin, 0, count), is_causal):
                n = t.queries.stop - t.queries.start
                total += n * (n + 1) // 2 if t.is_diagonal else n * (t.keys.stop - t.keys.start)
    return total


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps, and of sums over parts."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _mask_of(mask: Tensor | None, tile: Tile) -> Tensor | None:
    if mask is None:
        return None
    for dim, part in ((-2, tile.queries), (-1, tile.keys)):
        if mask.shape[dim] != 1:
            mask = mask.narrow(dim, part.start, part.stop - part.start)
    return mask


def rows_of(x: Tensor, part: slice) -> Tensor:
    return x.narrow(2, part.start, part.stop - part.start)


@torch.library.impl("ftp::scaled_dot_product_attention_part", "CompositeExplicitAutograd")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: list[int],
    columns: list[int],
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    wide = sum_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    logsumexp = q.new_zeros(q.shape[:3], dtype=wide)
    if 0 in out.shape[:3] or not k.shape[2]:
        return out, logsumexp
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    key_blocks = blocks(columns, k.shape[2], KEYS)
    for block in blocks(rows, q.shape[2], QUERIES):
        whole = block.slice(block.first, block.first + block.length)
        total = rows_of(logsumexp, whole).fill_(-math.inf)
        merged = rows_of(out, whole)
        result = merged if wide == q.dtype else merged.to(wide)
        for keys in key_blocks:
            attend(result, total, q, k, v, block, keys, is_causal, scale, attn_mask)
        if result is not merged:
            merged.copy_(result)
        total.masked_fill_(total == -math.inf, 0)  # like the kernel, for rows that see nothing
    return out, logsumexp


def attend(
    result: Tensor,
    total: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Block,
    keys: Block,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> None:
    """Merge the attention of a block of queries to a block of keys into ``result`` and ``total``
    (its log-sum-exps), which have only the block's rows.
    """
    for tile in tiles(rows, keys, is_causal):
        part, weight = _tile(q, k, v, mask, tile, scale)
        queries = slice(tile.queries.start - rows.at, tile.queries.stop - rows.at)
        merge(rows_of(result, queries), rows_of(total, queries), part, weight)


def merge(out: Tensor, logsumexp: Tensor, part: Tensor, of_part: Tensor) -> None:
    """Merge the attention to more keys into the attention so far, in place.

    Args:
        out, logsumexp: so far: (batch, heads, queries, dim), (batch, heads, queries).
        part, of_part: the same, for the new keys.
    """
    both = torch.logaddexp(logsumexp, of_part)
    shift = both.masked_fill(both == -math.inf, 0)
    out.mul_((logsumexp - shift).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (of_part - shift).exp_().unsqueeze(-1))
    logsumexp.copy_(both)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tile: Tile, scale: float
) -> tuple[Tensor, Tensor]:
    """One tile's result and log-sum-exp, ``-inf`` for rows that see nothing."""
    q, k, v = rows_of(q, tile.queries), rows_of(k, tile.keys), rows_of(v, tile.keys)
    mask = _mask_of(mask, tile)
    if kernel := tile_kernels.kernel_of(q, v, mask is not None):
        q, k, v = (x.contiguous() for x in (q, k, v))
        part, logsumexp = tile_kernels.forward(kernel, q, k, v, mask, tile.is_diagonal, scale)
        if mask is not None:
            sees = _sees(mask, tile, q)
            logsumexp = logsumexp.masked_fill(~sees, -math.inf)
        return part, logsumexp
    scores = _scores(q, k, mask, tile, scale)
    logsumexp = torch.logsumexp(scores, -1)
    shift = logsumexp.masked_fill(logsumexp == -math.inf, 0)
    values = repeated_heads(v, q.shape[1]).to(scores.dtype)
    return (scores - shift.unsqueeze(-1)).exp_() @ values, logsumexp


def _sees(mask: Tensor, tile: Tile, q: Tensor) -> Tensor:
    """Whether each query of a tile sees any key."""
    sees = mask > -math.inf if mask.is_floating_point() else mask
    if tile.is_diagonal:
        size = q.shape[2]
        sees = sees.expand(*sees.shape[:-2], size, size).tril()
    return sees.any(-1).expand(q.shape[:3])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, tile: Tile, scale: float) -> Tensor:
    wide = sum_dtype(q.dtype)
    keys = repeated_heads(k, q.shape[1]).to(wide)
    scores = (q.to(wide) @ keys.transpose(-2, -1)).mul_(scale)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
    if tile.is_diagonal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(ahead, -math.inf)
    return scores


@torch.library.impl("ftp::scaled_dot_product_attention_part_backward", "CompositeExplicitAutograd")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    rows: list[int],
    columns: list[int],
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = sum_dtype(q.dtype)
    grad_q = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
    grad_k, grad_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    row_blocks = blocks(rows, q.shape[2], TILE) if grad_out.numel() else []
    for keys in blocks(columns, k.shape[2], TILE):
        whole = keys.slice(keys.first, keys.first + keys.length)
        of_k, of_v = (rows_of(x, whole) for x in (grad_k, grad_v))
        sums = [x if x.dtype == wide else x.to(wide) for x in (of_k, of_v)]
        for block in row_blocks:
            of_q = rows_of(grad_q, block.slice(block.first, block.first + block.length))
            add_gradients(
                (of_q, *sums),
                (grad_out, q, k, v, out, logsumexp),
                block,
                keys,
                is_causal,
                scale,
                attn_mask,
            )
        if wide != k.dtype:
            of_k.copy_(sums[0])
            of_v.copy_(sums[1])
    return grad_q.to(q.dtype), grad_k, grad_v


def add_gradients(
    sums: Sequence[Tensor],
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    rows: Block,
    keys: Block,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> None:
    """Add the gradients from the attention of a block of queries to a block of keys.

    Args:
        sums: the gradients of only this block's queries, keys and values.
        given: the result's gradient, q, k, v, the result, its log-sum-exps.
    """
    grad_q, grad_k, grad_v = sums
    for tile in tiles(rows, keys, is_causal):
        dq, dk, dv = _tile_backward(*given, mask, tile, scale)
        here = slice(tile.queries.start - rows.at, tile.queries.stop - rows.at)
        rows_of(grad_q, here).add_(dq)
        here = slice(tile.keys.start - keys.at, tile.keys.stop - keys.at)
        rows_of(grad_k, here).add_(dk)
        rows_of(grad_v, here).add_(dv)


def _tile_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    tile: Tile,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a tile's queries, keys and values."""
    grad_out, q, out, logsumexp = (
        rows_of(x, tile.queries).contiguous() for x in (grad_out, q, out, logsumexp)
    )
    k, v = (rows_of(x, tile.keys).contiguous() for x in (k, v))
    mask = _mask_of(mask, tile)
    if kernel := tile_kernels.kernel_of(q, v, mask is not None):
        given = grad_out, q, k, v, out, logsumexp, mask
        return tile_kernels.backward(kernel, *given, tile.is_diagonal, scale)
    weights = (_scores(q, k, mask, tile, scale) - logsumexp.unsqueeze(-1)).exp_()
    grad = grad_out.to(weights.dtype)
    keys, values = (repeated_heads(x, q.shape[1]).to(weights.dtype) for x in (k, v))
    delta = (grad * out).sum(-1, True)
    of_scores = weights * (grad @ values.transpose(-2, -1) - delta) * scale
    of_keys = of_scores.transpose(-2, -1) @ q.to(weights.dtype)
    of_values = weights.transpose(-2, -1) @ grad
    return of_scores @ keys, over_heads(of_keys, k), over_heads(of_values, v)


def register_shapes(forward: OpOverload, backward: OpOverload) -> None:
    """Register the shapes of an attention's result and log-sum-exps, and of its gradients."""
    register_fake(forward, _result_shapes)
    register_fake(backward, _gradient_shapes)


def _result_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    wide = sum_dtype(q.dtype)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


def _gradient_shapes(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


register_shapes(PART, PART_BACKWARD)
