"""Attention within packed documents, with queries and keys cut over one axis: keys and values
travel as in `ftp.ops.attention_ring`, a piece is computed as in `ftp.ops.attention_varlen`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ftp.ops import attention_varlen
from ftp.ops.attention import sum_dtype
from ftp.ops.attention_varlen import GIVEN
from ftp.ops.key_ring import Needs, Ring, pass_keys, return_gradients, steps_of
from ftp.ops.sends import OneRank, on_processes

# ``columns`` is a `Ring`, as ints.
torch.library.define(
    "ftp::scaled_dot_product_attention_varlen_ring",
    f"(Tensor q, Tensor k, Tensor v, {GIVEN}, str group) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "ftp::scaled_dot_product_attention_varlen_ring_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp,"
    f" {GIVEN}, str group) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
VARLEN_RING = torch.ops.ftp.scaled_dot_product_attention_varlen_ring.default
VARLEN_RING_BACKWARD = torch.ops.ftp.scaled_dot_product_attention_varlen_ring_backward.default


def needs_of(
    keys: Sequence[int], rows: Sequence[int], left: int, right: int, is_self: bool
) -> Needs:
    """Of a window: no keys before the first query's and after the last query's, wherever
    documents end.
    """
    ring = Ring.of(keys)

    def sees(first: int, stop: int) -> tuple[int, int]:
        begin = first - left if is_self and left >= 0 else 0
        return begin, stop + right if is_self and right >= 0 else ring.size

    return Needs.of(ring, rows, sees)


def one_rank(
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    rows: Sequence[int],
    keys: Sequence[int],
    left: int,
    right: int,
    scale: float,
    is_self: bool,
) -> OneRank:
    """One rank's result and log-sum-exps."""
    wide, steps = sum_dtype(q.dtype), steps_of(needs_of, rank, keys, rows, left, right, is_self)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    total = q.new_full(q.shape[:3], -torch.inf, dtype=wide)

    def visit(owner: int, piece: int, near: Sequence[Tensor]) -> None:
        of_k, of_v = near
        held = steps.columns(owner, piece)
        given = (ends_q, ends_k), rows, held, (left, right), scale
        attention_varlen.merge_tiles((out, total), q, of_k, of_v, *given)

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
    ends_q: Tensor,
    ends_k: Tensor,
    rows: Sequence[int],
    keys: Sequence[int],
    left: int,
    right: int,
    scale: float,
    is_self: bool,
) -> OneRank:
    """One rank's gradients of queries, keys and values."""
    wide, steps = sum_dtype(q.dtype), steps_of(needs_of, rank, keys, rows, left, right, is_self)
    grad_q = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)

    def visit(owner: int, piece: int, near: Sequence[Tensor], to: Sequence[Tensor]) -> None:
        of_k, of_v = near
        held = steps.columns(owner, piece)
        rest = (ends_q, ends_k), rows, held, (left, right), scale
        given = grad_out, q, of_k, of_v, out, logsumexp
        attention_varlen.add_tiles((grad_q, *to), given, *rest)

    of_k, of_v = yield from return_gradients(steps, k, v, visit)
    return grad_q.to(q.dtype), of_k, of_v


on_processes("ftp::scaled_dot_product_attention_varlen_ring", one_rank)
on_processes("ftp::scaled_dot_product_attention_varlen_ring_backward", one_rank_backward)


@torch.library.register_fake("ftp::scaled_dot_product_attention_varlen_ring")
def _fake(q, k, v, *rest):
    return attention_varlen.fake(q, k, v, *rest)


@torch.library.register_fake("ftp::scaled_dot_product_attention_varlen_ring_backward")
def _fake_backward(grad_out, q, k, v, *rest):
    return attention_varlen.fake_backward(grad_out, q, k, v, *rest)
