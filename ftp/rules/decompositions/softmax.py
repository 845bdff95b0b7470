"""Softmax, attention and losses as primitives."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.rules.decompositions.registry import (
    MEAN,
    NONE,
    decomposition,
    largest,
    widened,
    wrapped_dims,
)
from ftp.rules.overloads import aten

# Softmaxes, and attention by them.


@decomposition(aten._softmax.default)
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x)
    e = torch.exp(wide - largest(wide, dim))
    return (e / e.sum(dim, True)).to(torch.float32 if half_to_float else x.dtype)


@decomposition(aten._safe_softmax.default)
def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A row in which all elements are ``-inf`` gives zeros."""
    x = x if dtype is None else x.to(dtype)
    wide = widened(x)
    top = largest(wide, dim)
    e = torch.exp(wide - torch.where(top == -math.inf, 0.0, top))
    total = e.sum(dim, True)
    return (e / torch.where(total == 0, 1.0, total)).to(x.dtype)


@decomposition(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights are normalised after the matmul with the values, so that cut keys cost three
    reductions: of the maximum, the sum and the result.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = widened(q @ k.transpose(-2, -1)) * (
        1 / math.sqrt(q.shape[-1]) if scale is None else scale
    )
    if is_causal:
        rows, columns = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(columns > rows.unsqueeze(1), -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    top = largest(scores, -1)
    top = torch.where(top == -math.inf, 0.0, top)
    e = torch.exp(scores - top)
    total = e.sum(-1, True)
    total = torch.where(total == 0, 1.0, total)
    return (e.to(v.dtype) @ v) / total.to(v.dtype), (top + total.log()).squeeze(-1)


@decomposition(aten._log_softmax.default)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x)
    shifted = wide - largest(wide, dim)
    return (shifted - torch.log(torch.exp(shifted).sum(dim, True))).to(
        torch.float32 if half_to_float else x.dtype
    )


def exponential_and_total(
    x: Any, made: Callable[[Any], Any], is_same: Callable[[Any, Any], bool]
) -> tuple[Any, Any] | None:
    """The ``e`` and its sum ``total`` of a ``x`` that `log_softmax` computes of numbers of one
    dtype: ``x.exp()`` is ``e / total``, without overflow, as no ``e`` is above 1. None for another
    ``x``.

    Args:
        made: gives the call, with ``target`` and ``args``, that makes a value; None for an input
            or a number.
        is_same: whether two values are equal.
    """

    def arguments(value: Any, target: Any, count: int) -> Any:
        call = made(value)
        if call is None or call.target is not target or call.kwargs or len(call.args) != count:
            return (None,) * count
        return call.args

    shifted, logarithm = arguments(x, aten.sub.Tensor, 2)
    (total,) = arguments(logarithm, aten.log.default, 1)
    e, dims, is_kept = arguments(total, aten.sum.dim_IntList, 3)
    (again,) = arguments(e, aten.exp.default, 1)
    wide, top = arguments(shifted, aten.sub.Tensor, 2)
    of, dims_of_top, is_top_kept = arguments(top, aten.amax.default, 3)
    if not (is_kept and is_top_kept) or list(dims or ()) != list(dims_of_top or ()):
        return None
    if again is None:
        return None
    return (e, total) if is_same(again, shifted) and is_same(of, wide) else None


@decomposition(aten._softmax_backward_data.default)
def softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide_out = widened(out)
    product = widened(grad) * wide_out
    return (product - wide_out * product.sum(dim, True)).to(input_dtype)


@decomposition(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = widened(grad)
    return (wide - torch.exp(widened(out)) * wide.sum(dim, True)).to(input_dtype)


# Losses. The mean divides two sums, so that uneven shards and ignored targets have their weight.


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    dim = min(1, x.ndim - 1)
    kept = target != ignore_index
    safe = target.masked_fill(~kept, 0)
    loss = -torch.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim)
    if weight is not None:
        weights = aten.index.Tensor(weight, [safe]).masked_fill(~kept, 0)
        loss = loss * weights
    loss = loss.masked_fill(~kept, 0)
    if reduction == NONE and x.ndim > 1:
        return loss, torch.zeros((), dtype=x.dtype, device=x.device)
    total = weights.sum() if weight is not None else kept.sum(dtype=x.dtype)
    return (loss.sum() / total if reduction == MEAN else loss.sum()), total


@decomposition(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    dim = min(1, x.ndim - 1)
    kept = target != ignore_index
    safe = target.masked_fill(~kept, 0)
    if reduction == MEAN:
        grad = grad / total_weight
    grad = -grad if weight is None else -grad * aten.index.Tensor(weight, [safe])
    grad = grad.expand(target.shape).masked_fill(~kept, 0)
    return torch.scatter_add(
        torch.zeros_like(x), dim, safe.unsqueeze(dim), grad.to(x.dtype).unsqueeze(dim)
    )


@decomposition(aten.logsumexp.default)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    dims = wrapped_dims(x, dim)
    wide = widened(x)
    top = largest(wide.real if wide.is_complex() else wide, dims)
    top = torch.where(torch.abs(top) == math.inf, 0.0, top)
    total = torch.log(torch.exp(wide - top).sum(dims, keepdim))
    return (total + (top if keepdim else top.reshape(total.shape))).to(x.dtype)
