"""``varlen_attn`` by tiles while a program is traced.

torch's own kernel needs whole sequences, and does not exist on a CPU. Derivatives of higher order
and in forward mode use the full score matrix.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ftp.errors import TraceError
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD, in_documents
from ftp.ops.dense_attention import jvp_of, one_by_one, scores_of, weighted
from ftp.tracing.replacements.replaced import replaced


@contextmanager
def varlen_attention() -> Iterator[None]:
    """``varlen_attn`` by tiles."""
    loaded = "torch.nn.attention.varlen" in sys.modules
    with replaced(torch.ops.torch_attn if loaded else None, {"_varlen_attn": _varlen}):
        yield


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result (tokens, heads, dim), the log-sum-exps (heads, tokens), and a placeholder for the
    kernel's generator state.
    """
    left, right = window_size or (-1, -1)
    right = 0 if is_causal else right
    ends = cu_seq_q, cu_seq_q if cu_seq_k is None else cu_seq_k
    if block_table is not None:
        if seqused_k is None:
            raise TraceError(
                "varlen_attn with block_table needs seqused_k, the number of valid tokens of each"
                " sequence."
            )
        key, value = (_of_pages(x, block_table) for x in (key, value))
        slots = key.shape[0] // block_table.shape[0]
        at = torch.arange(block_table.shape[0] + 1, device=cu_seq_q.device)
        ends = cu_seq_q, at * slots
    if seqused_k is not None:
        ends = _ends_of_used(*ends, seqused_k)
        key, value = (_used(x, ends[1]) for x in (key, value))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    is_self = ends[1] is cu_seq_q
    out, logsumexp = _Varlen.apply(q, k, v, *ends, left, right, scale, is_self)
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    return out.squeeze(0).transpose(0, 1), logsumexp.squeeze(0), state


def _of_pages(pool: Tensor, table: Tensor) -> Tensor:
    """The pages of each sequence, one sequence after the other. Entries beyond a sequence's pages
    may be any number.

    Args:
        pool: (pages, tokens of a page, heads, dim).
    """
    pages = table.flatten().clamp(0, pool.shape[0] - 1)
    return pool.index_select(0, pages).flatten(0, 1)


def _ends_of_used(ends_q: Tensor, ends_k: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of twice as many documents: after each, the keys that are not used, without queries."""
    used = torch.minimum(used.to(ends_k.dtype), ends_k.diff())
    of_keys = torch.stack([ends_k[:-1], ends_k[:-1] + used], 1)
    of_queries = torch.stack([ends_q[:-1], ends_q[1:]], 1)
    return (
        torch.cat([of_queries.flatten(), ends_q[-1:]]),
        torch.cat([of_keys.flatten(), ends_k[-1:]]),
    )


def _used(x: Tensor, ends: Tensor) -> Tensor:
    """Keys or values, with zeros for those that are not used: they may be NaN."""
    document, _ = in_documents(ends, torch.arange(x.shape[0], device=ends.device))
    is_used = (document % 2 == 0) & (document < ends.shape[0] - 1)
    return torch.where(is_used.unsqueeze(1).unsqueeze(2), x, 0)


def _dense_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    left: int,
    right: int,
    scale: float,
    _: bool,
) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exps by the full score matrix, for derivatives of higher order."""
    of_query, query_at = in_documents(ends_q, torch.arange(q.shape[2], device=ends_q.device))
    of_key, key_at = in_documents(ends_k, torch.arange(k.shape[2], device=ends_k.device))
    # In a document with more keys than queries, the last query is aligned with the last key.
    lengths = ends_k.diff() - ends_q.diff()
    more = torch.cat([lengths, lengths.new_zeros(1)]).index_select(0, of_query)
    ahead = key_at.unsqueeze(0) - (query_at + more).unsqueeze(1)
    sees = of_query.unsqueeze(1) == of_key.unsqueeze(0)
    sees = sees & (of_query < ends_q.shape[0] - 1).unsqueeze(1)
    if right >= 0:
        sees = sees & (ahead <= right)
    if left >= 0:
        sees = sees & (ahead >= -left)
    return weighted(scores_of(q, k, scale), sees, v, q.dtype)[:2]


class _Varlen(torch.autograd.Function):
    """Attention within documents by tiles, forward and backward."""

    @staticmethod
    def forward(q, k, v, ends_q, ends_k, *rest):
        return VARLEN(q, k, v, ends_q, ends_k, [], [], *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.rest = inputs[5:]
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.save_for_forward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_weights: Tensor | None) -> Any:
        q, k, v, *ends, out, logsumexp = ctx.saved_tensors
        if of_weights is not None:
            run: Any = lambda *x: _dense_varlen(*x, *ends, *ctx.rest)  # noqa: E731
            linear: Any = torch.func.vjp(run, q, k, v)
            made, vjp = linear
            given = torch.zeros_like(made[0]) if grad is None else grad, of_weights
            found = vjp(given)
        elif grad is None:
            found = None, None, None
        else:
            found = _VarlenGradient.apply(grad, q, k, v, out, logsumexp, *ends, *ctx.rest)
        return *found, *[None] * 6

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        q, k, v, *ends = ctx.saved_tensors
        run = lambda *x: _dense_varlen(*x, *ends, *ctx.rest)  # noqa: E731
        return jvp_of(run, (q, k, v), tangents[:3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(_Varlen, info, in_dims, args)


class _VarlenGradient(torch.autograd.Function):
    """The gradients of queries, keys and values; their derivatives use the full score matrix."""

    @staticmethod
    def forward(grad, q, k, v, out, logsumexp, ends_q, ends_k, *rest):
        return VARLEN_BACKWARD(grad, q, k, v, out, logsumexp, ends_q, ends_k, [], [], *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[8:]
        kept = (*inputs[:4], *inputs[6:8])
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def _dense(ctx: Any) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        *given, ends_q, ends_k = ctx.saved_tensors

        def gradients(grad: Tensor, *x: Tensor) -> Any:
            rest: Any = (ends_q, ends_k, *ctx.rest)
            run = lambda q, k, v: _dense_varlen(q, k, v, *rest)[0]  # noqa: E731
            return torch.func.vjp(run, *x)[1](grad)

        return gradients, tuple(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The result and the log-sum-exps are functions of the others: theirs are in those.
        run, given = _VarlenGradient._dense(ctx)
        found = torch.func.vjp(run, *given)[1](grads)
        return *found, *[None] * 8

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        run, given = _VarlenGradient._dense(ctx)
        return jvp_of(run, given, tangents[:4])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(_VarlenGradient, info, in_dims, args)
