"""torch's attention functions that take functions or lengths, as primitives while a program is
traced: ``flex_attention`` and ``varlen_attn``.

torch's own kernels see whole sequences, and on a CPU lack a backward pass or do not exist.
``varlen_attn`` is an op of ftp's, by tiles. Of ``flex_attention``, as primitives, the scores are a
tensor, which is cut as everything else; positions are global ones.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ftp.errors import TraceError
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD, in_documents

_WHOLE = 1 << 30  # the size of a block that stands for all of a sequence
_IN_DIMS = (
    (None, None, None, 0),
    (None, None, 0, None),
    (None, 0, None, None),
    (0, None, None, None),
)


@contextmanager
def flex_attention() -> Iterator[None]:
    """``flex_attention`` as primitives."""
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    new = {
        "flex_attention_hop": _flex,
        "_validate_device": lambda *_: None,  # that a CPU has no backward pass
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    with _replaced(module, new):
        yield


@contextmanager
def varlen_attention() -> Iterator[None]:
    """``varlen_attn`` by tiles."""
    loaded = "torch.nn.attention.varlen" in sys.modules
    with _replaced(torch.ops.torch_attn if loaded else None, {"_varlen_attn": _varlen}):
        yield


@contextmanager
def _replaced(owner: Any, new: dict[str, Any]) -> Iterator[None]:
    old = {name: getattr(owner, name) for name in new if hasattr(owner, name)}
    for name in old:
        setattr(owner, name, new[name])
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the log-sum-exp and the maximum of the scores in base 2, as the kernel has
    them.
    """
    _, _, kv_count, kv_index, full_count, full_index = block_mask[:6]
    rows, columns, mask_mod = block_mask[-3:]
    scores = _scores(query, key, scale)
    at = [torch.arange(n, device=query.device) for n in scores.shape]
    scores = _at_each(score_mod, 1)(scores, *at)
    sees = _at_each(mask_mod, 0)(*at)
    if rows < _WHOLE or columns < _WHOLE:
        blocks = at[2] // rows, at[3] // columns, -(-scores.shape[3] // columns)
        sees = sees & _listed(kv_count, kv_index, *blocks)
        if full_count is not None:
            sees = sees | _listed(full_count, full_index, *blocks)
    out, logsumexp, top = _weighted(scores, sees, value, query.dtype)
    return out, logsumexp / math.log(2), top / math.log(2)


def _at_each(mod: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """A function of one score and its place as one of all scores and places."""
    for dims in _IN_DIMS:
        mod = torch.vmap(mod, in_dims=(0,) * scores + dims)
    return mod


def _listed(count: Tensor, index: Tensor, row: Tensor, column: Tensor, blocks: int) -> Tensor:
    """Whether the block of each query and key is listed: (batch or 1, heads or 1, queries, keys).

    Args:
        count, index: per block of queries how many blocks of keys are listed, and which come
            first in ``index``.
        row, column: the block of each query and key.
        blocks: the number of blocks of keys.
    """
    is_listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    at = torch.where(is_listed, index, blocks).long()
    table = torch.zeros((*index.shape[:-1], blocks + 1), device=index.device)
    table = table.scatter(-1, at, 1.0)
    return table.index_select(2, row).index_select(3, column) > 0


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
    """The result (tokens, heads, dim), the log-sum-exps (heads, tokens), and what stands for the
    state of a generator.
    """
    if seqused_k is not None or block_table is not None:
        raise TraceError(
            "varlen_attn with seqused_k or block_table is for decoding from a paged cache, and has"
            " no sharded form. Gather the pages, or call it outside of the step."
        )
    left, right = window_size or (-1, -1)
    right = 0 if is_causal else right
    ends = cu_seq_q, cu_seq_q if cu_seq_k is None else cu_seq_k
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out, logsumexp = _Varlen.apply(q, k, v, *ends, left, right, scale)
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    return out.squeeze(0).transpose(0, 1), logsumexp.squeeze(0), state


def _dense_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exps by the scores: what derivatives of higher order take."""
    of_query, query_at = in_documents(ends_q, torch.arange(q.shape[2], device=ends_q.device))
    of_key, key_at = in_documents(ends_k, torch.arange(k.shape[2], device=ends_k.device))
    # Of a document with more keys than queries the last query stands beside the last key.
    lengths = ends_k.diff() - ends_q.diff()
    more = torch.cat([lengths, lengths.new_zeros(1)]).index_select(0, of_query)
    ahead = key_at.unsqueeze(0) - (query_at + more).unsqueeze(1)
    sees = of_query.unsqueeze(1) == of_key.unsqueeze(0)
    sees = sees & (of_query < ends_q.shape[0] - 1).unsqueeze(1)
    if right >= 0:
        sees = sees & (ahead <= right)
    if left >= 0:
        sees = sees & (ahead >= -left)
    return _weighted(_scores(q, k, scale), sees, v, q.dtype)[:2]


class _Varlen(torch.autograd.Function):
    """Attention within documents by tiles, forward and backward."""

    @staticmethod
    def forward(q, k, v, ends_q, ends_k, left, right, scale):  # type: ignore[override]
        return VARLEN(q, k, v, ends_q, ends_k, [], [], left, right, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.rest = inputs[5:]
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.save_for_forward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_weights: Tensor | None) -> Any:  # type: ignore[override]
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
        return *found, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
        q, k, v, *ends = ctx.saved_tensors
        run = lambda *x: _dense_varlen(*x, *ends, *ctx.rest)  # noqa: E731
        return _jvp(run, (q, k, v), tangents[:3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:  # type: ignore[override]
        return _one_by_one(_Varlen, info, in_dims, args)


class _VarlenGradient(torch.autograd.Function):
    """The gradients of queries, keys and values; their own derivatives take the scores."""

    @staticmethod
    def forward(grad, q, k, v, out, logsumexp, ends_q, ends_k, left, right, scale):  # type: ignore[override]
        ends = ends_q, ends_k
        return VARLEN_BACKWARD(grad, q, k, v, out, logsumexp, *ends, [], [], left, right, scale)

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
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        # The result and the log-sum-exps are functions of the others: theirs are in those.
        run, given = _VarlenGradient._dense(ctx)
        found = torch.func.vjp(run, *given)[1](grads)
        return *found, *[None] * 7

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
        run, given = _VarlenGradient._dense(ctx)
        return _jvp(run, given, tangents[:4])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:  # type: ignore[override]
        return _one_by_one(_VarlenGradient, info, in_dims, args)


def _jvp(run: Callable[..., Any], given: Sequence[Tensor], tangents: Sequence[Any]) -> Any:
    known = [torch.zeros_like(x) if t is None else t for x, t in zip(given, tangents, strict=True)]
    return torch.func.jvp(run, tuple(given), tuple(known))[1]


def _one_by_one(function: Any, info: Any, in_dims: tuple[Any, ...], args: Any) -> Any:
    """A function of each member of a batch."""
    found = [
        function.apply(
            *(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True))
        )
        for i in range(info.batch_size)
    ]
    return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(batch, heads, queries, keys), in single precision at least."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (query.to(wide) @ _like(key, query).to(wide).transpose(-2, -1)) * scale


def _like(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values with the batch and the heads of the queries."""
    batch, heads = query.shape[:2]
    if x.shape[1] != heads:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    return x.expand(batch, *x.shape[1:])


def _weighted(
    scores: Tensor, sees: Tensor, value: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The values weighted by the softmax of the scores that are seen, its log-sum-exp and the
    scores' maximum; rows that see nothing are zero.
    """
    scores = torch.where(sees, scores, -math.inf)
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    out = weights.to(dtype) @ _like(value, scores)
    return out, torch.logsumexp(scores, -1), scores.amax(-1)
