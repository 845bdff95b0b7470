"""Ring attention: queries, keys and values are cut over one axis. Each rank computes its queries
against one block of keys and values after another, while the next block is being sent
(`ftp.ops.key_ring`).

A given mask has this rank's rows and all columns.

Source: Liu, Zaharia and Abbeel (2023), Ring Attention with Blockwise Transformers.
"""

import functools
import math
from collections.abc import Sequence

from torch import Tensor

from ftp.ops import attention
from ftp.ops.attention import (
    Block,
    add_gradients,
    attend,
    blocks,
    sum_dtype,
)
from ftp.ops.define import define
from ftp.ops.key_ring import PartSums, pass_keys, return_gradients, steps_of
from ftp.ops.ring_pieces import EVERY, Needs, Ring, Sees
from ftp.ops.sends import OneRank, on_processes

# ``rows``: the queries' part, as in `ftp.ops.attention`. ``keys``: `Ring`, as ints.
_GIVEN = "Tensor? attn_mask, SymInt[] rows, SymInt[] keys, bool is_causal, float? scale, str group"
RING = define(
    f"scaled_dot_product_attention_ring(Tensor q, Tensor k, Tensor v, {_GIVEN}) -> (Tensor, Tensor)"
)
RING_BACKWARD = define(
    "scaled_dot_product_attention_ring_backward"
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {_GIVEN})"
    " -> (Tensor, Tensor, Tensor)"
)


@functools.cache
def sees_of(is_causal: bool) -> Sees:
    """`Sees` of a causal mask: no keys after the last query."""
    return lambda first, stop: [(0, stop) if is_causal else EVERY]


def needs_of(keys: Sequence[int], rows: Sequence[int], is_causal: bool, returns: bool) -> Needs:
    return Needs.of(Ring.of(keys, returns), rows, sees_of(is_causal))


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
    steps = steps_of(needs_of, rank, keys, rows, is_causal, False)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=sum_dtype(q.dtype))
    total = q.new_full(q.shape[:3], -math.inf, dtype=sum_dtype(q.dtype))
    row_blocks = blocks(rows, q.shape[2], attention.QUERIES) if out.numel() else []

    def visit(owner: int, piece: int, near: Sequence[Tensor]) -> None:
        for block in row_blocks:
            into = (
                out.narrow(2, block.at, block.length),
                total.narrow(2, block.at, block.length),
            )
            for held in steps.blocks(owner, piece, attention.KEYS):
                alone, (of_k, of_v), of_mask = _alone(held, near, mask)
                attend(*into, q, of_k, of_v, block, alone, is_causal, scale, of_mask)

    yield from pass_keys(steps, k, v, visit)
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
    steps = steps_of(needs_of, rank, keys, rows, is_causal, True)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    row_blocks = blocks(rows, q.shape[2], attention.TILE)
    grad_q = PartSums(q)
    of_rows = [grad_q.part(slice(block.at, block.at + block.length)) for block in row_blocks]

    def visit(owner: int, piece: int, near: Sequence[Tensor], to: Sequence[Tensor]) -> None:
        given = grad_out, q, *near, out, logsumexp
        key_blocks = steps.blocks(owner, piece, attention.TILE)
        if grad_out.numel():
            of_blocks = list(zip(row_blocks, of_rows, strict=True))
            _add_all(of_blocks, to, given, mask, key_blocks, is_causal, scale)

    of_keys = yield from return_gradients(steps, k, v, visit)
    while of_rows:
        grad_q.finish(of_rows.pop(0))
    return grad_q.result(), *(x.result() for x in of_keys)


def _add_all(
    of_rows: Sequence[tuple[Block, Tensor]],
    to: Sequence[Tensor],
    given: tuple[Tensor, ...],
    mask: Tensor | None,
    keys: Sequence[Block],
    is_causal: bool,
    scale: float,
) -> None:
    grad_out, q, *near, out, logsumexp = given
    for held in keys:
        alone, (k, v), of_mask = _alone(held, near, mask)
        of_keys = _alone(held, to, None)[1]
        for block, of_q in of_rows:
            of_block = grad_out, q, k, v, out, logsumexp
            add_gradients((of_q, *of_keys), of_block, block, alone, is_causal, scale, of_mask)


def _alone(
    held: Block, tensors: Sequence[Tensor], mask: Tensor | None
) -> tuple[Block, list[Tensor], Tensor | None]:
    """The keys and values of one block of a piece, and its columns of the mask."""
    if mask is not None and mask.shape[-1] != 1:
        mask = mask.narrow(-1, held.first, held.length)
    near = [x.narrow(2, held.at, held.length) for x in tensors]
    return Block(held.first, 0, held.length), near, mask


on_processes("ftp::scaled_dot_product_attention_ring", one_rank)
on_processes("ftp::scaled_dot_product_attention_ring_backward", one_rank_backward)

attention.register_shapes(RING, RING_BACKWARD)
