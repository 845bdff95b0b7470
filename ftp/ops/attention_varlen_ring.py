"""Attention within packed documents, with queries and keys cut over one axis: keys and values are
passed around as in `ftp.ops.attention_ring`, a piece is computed as in `ftp.ops.attention_varlen`.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ftp.ops import attention, attention_varlen
from ftp.ops.attention import sum_dtype
from ftp.ops.attention_varlen import GIVEN, Documents
from ftp.ops.define import define
from ftp.ops.key_ring import Steps, pass_keys, return_gradients, steps_of
from ftp.ops.ring_pieces import EVERY, Needs, Ring, Sees
from ftp.ops.sends import OneRank, on_processes

# ``columns`` is a `Ring`, as ints.
VARLEN_RING = define(
    "scaled_dot_product_attention_varlen_ring"
    f"(Tensor q, Tensor k, Tensor v, {GIVEN}, str group) -> (Tensor, Tensor)"
)
VARLEN_RING_BACKWARD = define(
    "scaled_dot_product_attention_varlen_ring_backward"
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp,"
    f" {GIVEN}, str group) -> (Tensor, Tensor, Tensor)"
)


@functools.cache
def sees_of(left: int, right: int, is_self: bool) -> Sees:
    """`Sees` of a window: no keys before the first query's window or after the last query's,
    wherever documents end.
    """

    def sees(first: int, stop: int) -> list[tuple[int, int]]:
        begin, end = EVERY
        begin = first - left if is_self and left >= 0 else begin
        return [(begin, stop + right if is_self and right >= 0 else end)]

    return sees


def needs_of(
    keys: Sequence[int], rows: Sequence[int], left: int, right: int, is_self: bool, returns: bool
) -> Needs:
    return Needs.of(Ring.of(keys, returns), rows, sees_of(left, right, is_self))


def _steps(documents: Documents, rank: int, returns: bool) -> Steps:
    """``columns`` are those of the whole ring."""
    window = documents.left, documents.right, documents.is_self
    return steps_of(needs_of, rank, documents.columns, documents.rows, *window, returns)


def one_rank(rank: int, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> OneRank:
    """One rank's result and log-sum-exps."""
    documents, wide = Documents(*given), sum_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    total = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    steps = _steps(documents, rank, False)

    def visit(owner: int, piece: int, near: Sequence[Tensor]) -> None:
        of_k, of_v = near
        of_piece = replace(documents, columns=steps.columns(owner, piece))
        attention_varlen.merge_tiles((out, total), q, of_k, of_v, of_piece)

    yield from pass_keys(steps, k, v, visit)
    return out.to(q.dtype), total


def one_rank_backward(
    rank: int,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *given: Any,
) -> OneRank:
    """One rank's gradients of queries, keys and values."""
    documents = Documents(*given)
    wide, layout = sum_dtype(q.dtype), torch.contiguous_format
    of_q = [torch.zeros_like(q, dtype=wide, memory_format=layout)]  # alone, to be freed
    steps = _steps(documents, rank, True)

    def visit(owner: int, piece: int, near: Sequence[Tensor], to: Sequence[Tensor]) -> None:
        of_k, of_v = near
        of_piece = replace(documents, columns=steps.columns(owner, piece))
        tensors = grad_out, q, of_k, of_v, out, logsumexp
        attention_varlen.add_tiles((*of_q, *to), tensors, of_piece)

    of_keys = yield from return_gradients(steps, k, v, visit)
    return of_q.pop().to(q.dtype), *(x.result() for x in of_keys)


on_processes("ftp::scaled_dot_product_attention_varlen_ring", one_rank)
on_processes("ftp::scaled_dot_product_attention_varlen_ring_backward", one_rank_backward)

attention.register_shapes(VARLEN_RING, VARLEN_RING_BACKWARD)
