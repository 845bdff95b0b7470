"""flex_attention with queries and keys cut over one axis: keys and values are passed around as in
`ftp.ops.attention_ring`, and a piece is computed as in `ftp.ops.attention_flex`.

Block tables and captured tensors are whole on each rank along the keys.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftp.errors import InputError
from ftp.ops import attention, attention_flex, attention_ring
from ftp.ops.attention import blocks, sum_dtype
from ftp.ops.attention_flex import GIVEN, Given
from ftp.ops.define import define, register_fake
from ftp.ops.key_ring import Steps, pass_keys, return_gradients, steps_of
from ftp.ops.listed_blocks import known_blocks
from ftp.ops.ring_pieces import Needs, Ring, Sees
from ftp.ops.sends import OneRank, on_processes

# ``columns`` is a `Ring`, as ints.
FLEX_RING = define(
    "scaled_dot_product_attention_flex_ring"
    f"(Tensor q, Tensor k, Tensor v, {GIVEN}, str group) -> (Tensor, Tensor, Tensor)"
)
FLEX_RING_BACKWARD = define(
    "scaled_dot_product_attention_flex_ring_backward"
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor logsumexp, Tensor delta,"
    f" {GIVEN}, bool[] wants, str group) -> Tensor[]"
)


@functools.lru_cache(256)
def sees_of(rows: int, columns: int, known: str) -> Sees:
    """`Sees` of a BlockMask that the trace knows: the key blocks that a query block lists.

    Args:
        rows, columns: numbers of queries and keys of a block.
    """
    if not known:
        return attention_ring.sees_of(False)
    table = known_blocks(known)

    def sees(first: int, stop: int) -> list[tuple[int, int]]:
        listed = table[first // rows : -(-stop // rows)].any(0)
        edges = np.flatnonzero(np.diff(listed, prepend=False, append=False))
        return [(a * columns, b * columns) for a, b in edges.reshape(-1, 2).tolist()]

    return sees


def needs_of(
    keys: Sequence[int], rows: Sequence[int], block: Sequence[int], known: str, returns: bool
) -> Needs:
    return Needs.of(Ring.of(keys, returns), rows, sees_of(block[0], block[1], known))


def _check_known(call: Given) -> None:
    """Raise if the queries of a rank list a key block that they did not list in the trace."""
    if not call.known:
        return
    known = known_blocks(call.known)
    every = slice(0, call.q.shape[0]), slice(0, call.q.shape[1]), slice(0, call.k.shape[1])
    for row in blocks(call.rows, call.q.shape[2], attention.TILE):
        first, last = row.first // call.block[0], (row.first + row.length - 1) // call.block[0]
        some, full = call.blocks_listed(every, first, last)
        now = (some | full).flatten(0, 1).any(0).cpu().numpy()
        if (now & ~known[first : last + 1]).any():
            raise InputError(
                "A BlockMask that is a constant of the step was changed after the step was traced:"
                f" it now lists blocks of keys for queries {row.first} to"
                f" {row.first + row.length - 1} that it did not list then. Make a new BlockMask"
                " and trace a new step, or make the mask inside the step."
            )


def _steps(call: Given, rank: int, returns: bool) -> Steps:
    _check_known(call)
    return steps_of(needs_of, rank, call.columns, call.rows, call.block, call.known, returns)


def one_rank(rank: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> OneRank:
    """One rank's result, log-sum-exps and highest scores."""
    call, wide = Given(q, k, v, *rest), sum_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    logsumexp = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    top = torch.full_like(logsumexp, -torch.inf)
    steps = _steps(call, rank, False)

    def visit(owner: int, piece: int, near: Sequence[Tensor]) -> None:
        of_k, of_v = near
        of_piece = replace(call, k=of_k, v=of_v, columns=steps.columns(owner, piece))
        attention_flex.attend(of_piece, out, logsumexp, top)

    yield from pass_keys(steps, k, v, visit)
    return out.to(q.dtype), logsumexp, top


def one_rank_backward(
    rank: int,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logsumexp: Tensor,
    delta: Tensor,
    *rest: Any,
) -> OneRank:
    """One rank's gradients of queries, keys, values and captured tensors."""
    *given, wants = rest
    call = Given(q, k, v, *given)
    like = (q, *attention_flex.wanted(call, wants))
    sums = [torch.zeros(x.shape, dtype=sum_dtype(x.dtype), device=x.device) for x in like]
    steps = _steps(call, rank, True)

    def visit(owner: int, piece: int, near: Sequence[Tensor], to: Sequence[Tensor]) -> None:
        of_k, of_v = near
        of_piece = replace(call, k=of_k, v=of_v, columns=steps.columns(owner, piece))
        into = sums[0], *to, *sums[1:]
        attention_flex.add_gradients(of_piece, into, wants, grad_out, logsumexp, delta)

    of_keys = yield from return_gradients(steps, k, v, visit)
    of_q, *captured = [sums.pop(0).to(x.dtype) for x in like]
    return [of_q, *(x.result() for x in of_keys), *captured]


on_processes("ftp::scaled_dot_product_attention_flex_ring", one_rank)
on_processes("ftp::scaled_dot_product_attention_flex_ring_backward", one_rank_backward)


@register_fake("ftp::scaled_dot_product_attention_flex_ring")
def _fake(q, k, v, *rest):
    return attention_flex.fake(q, k, v, *rest[:-1])


@register_fake("ftp::scaled_dot_product_attention_flex_ring_backward")
def _fake_backward(*args):
    return attention_flex.fake_backward(*args[:-1])
