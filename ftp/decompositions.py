"""Fused ops as primitives that have rules, for when a factor that the fused op keeps whole is cut.

Written so that a cut dim costs few small collectives: reductions before anything else, sums rather than means, nothing materialised that
the fused op does not hold. Half precision is computed in float32 and rounded at the end, as the kernels do.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {}
HALF = (torch.float16, torch.bfloat16)
NONE, MEAN = 0, 1


def decomposition(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of the op's signature that computes it from other ops."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update(dict.fromkeys(ops, fn))
        return fn

    return register


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in HALF else x


def _top(x: Tensor, dim: Any) -> Tensor:
    """The largest along ``dim``, which stays; ``-inf`` of none."""
    dims = _dims(x, dim)
    if any(x.shape[d] == 0 for d in dims):
        return x.new_full([1 if d in dims else size for d, size in enumerate(x.shape)], -math.inf)
    return torch.amax(x, dims, True)


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims) if x.ndim else 1


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.ndim))
    return [d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)] if x.ndim else []


# Softmaxes, and attention by them.


@decomposition(aten._softmax.default)
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x)
    e = torch.exp(wide - _top(wide, dim))
    return (e / e.sum(dim, True)).to(torch.float32 if half_to_float else x.dtype)


@decomposition(aten._safe_softmax.default)
def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of nothing but ``-inf`` are zero."""
    x = x if dtype is None else x.to(dtype)
    wide = _wide(x)
    top = _top(wide, dim)
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
    """Each key's product with its value waits for no other: where keys are cut, a maximum, a sum and the result are reduced."""
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = _wide(q @ k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        rows, columns = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(columns > rows.unsqueeze(1), -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    top = _top(scores, -1)
    top = torch.where(top == -math.inf, 0.0, top)
    e = torch.exp(scores - top)
    total = e.sum(-1, True)
    total = torch.where(total == 0, 1.0, total)
    return (e.to(v.dtype) @ v) / total.to(v.dtype), (top + total.log()).squeeze(-1)


@decomposition(aten._log_softmax.default)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x)
    shifted = wide - _top(wide, dim)
    return (shifted - torch.log(torch.exp(shifted).sum(dim, True))).to(torch.float32 if half_to_float else x.dtype)


@decomposition(aten._softmax_backward_data.default)
def softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide_out = _wide(out)
    product = _wide(grad) * wide_out
    return (product - wide_out * product.sum(dim, True)).to(input_dtype)


@decomposition(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = _wide(grad)
    return (wide - torch.exp(_wide(out)) * wide.sum(dim, True)).to(input_dtype)


# Losses. The mean divides two sums, so that uneven parts and ignored targets weigh right.


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
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
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total_weight: Tensor
) -> Tensor:
    dim = min(1, x.ndim - 1)
    kept = target != ignore_index
    safe = target.masked_fill(~kept, 0)
    if reduction == MEAN:
        grad = grad / total_weight
    grad = -grad if weight is None else -grad * aten.index.Tensor(weight, [safe])
    grad = grad.expand(target.shape).masked_fill(~kept, 0)
    return torch.scatter_add(torch.zeros_like(x), dim, safe.unsqueeze(dim), grad.to(x.dtype).unsqueeze(dim))


# Normalisations: two sums, the mean's and the centred squares'.


def _statistics(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Centred ``x``, its mean and reciprocal standard deviation over ``dims``, kept."""
    n = _count(x, dims)
    mean = x.sum(dims, True) / n
    centred = x - mean
    return centred, mean, torch.rsqrt((centred * centred).sum(dims, True) / n + eps)


def _normalised_backward(dy: Tensor, normal: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    n = _count(dy, dims)
    return (dy - dy.sum(dims, True) / n - normal * ((dy * normal).sum(dims, True) / n)) * rstd


def _statistics_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    if x.device.type != "cpu" and x.dtype in HALF:
        return torch.float32
    parameter = weight if weight is not None else bias
    return x.dtype if parameter is None else parameter.dtype


@decomposition(aten.native_layer_norm.default)
def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    centred, mean, rstd = _statistics(_wide(x), dims, eps)
    y = centred * rstd
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    kept = _statistics_dtype(x, weight, bias)
    return y.to(x.dtype), mean.to(kept), rstd.to(kept)


@decomposition(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    batch, dims = list(range(x.ndim - len(normalized_shape))), list(range(x.ndim - len(normalized_shape), x.ndim))
    wide, rstd = _wide(dy), _wide(rstd)
    normal = (_wide(x) - mean) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        dx = _normalised_backward(wide if weight is None else wide * weight, normal, rstd, dims).to(x.dtype)
    if output_mask[1]:
        assert weight is not None
        dweight = _sum(wide * normal, batch).to(weight.dtype)
    if output_mask[2]:
        assert bias is not None
        dbias = _sum(wide, batch).to(bias.dtype)
    return dx, dweight, dbias


def _sum(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims) if dims else x


@decomposition(aten._fused_rms_norm.default)
def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    wide = _wide(x)
    rstd = torch.rsqrt((wide * wide).sum(dims, True) / _count(x, dims) + (torch.finfo(wide.dtype).eps if eps is None else eps))
    y = wide * rstd
    return (y if weight is None else y * weight).to(x.dtype), rstd


@decomposition(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    dy: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    batch, dims = list(range(x.ndim - len(normalized_shape))), list(range(x.ndim - len(normalized_shape), x.ndim))
    wide = _wide(dy)
    normal = _wide(x) * rstd
    dx = dweight = None
    if output_mask[0]:
        grad = wide if weight is None else wide * weight
        dx = ((grad - normal * ((grad * normal).sum(dims, True) / _count(x, dims))) * rstd).to(x.dtype)
    if output_mask[1]:
        assert weight is not None
        dweight = _sum(wide * normal, batch).to(weight.dtype)
    return dx, dweight


@decomposition(aten.native_group_norm.default)
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    space = x.shape[2:]
    grouped = _wide(x).reshape(n, group, c // group, *space)
    dims = list(range(2, grouped.ndim))
    centred, mean, rstd = _statistics(grouped, dims, eps)
    y = (centred * rstd).reshape(x.shape)
    affine = (c, *(1,) * len(space))
    y = y if weight is None else y * weight.reshape(affine)
    y = y if bias is None else y + bias.reshape(affine)
    kept = _statistics_dtype(x, weight, bias) if x.device.type == "cpu" else x.dtype
    return y.to(x.dtype), mean.reshape(n, group).to(kept), rstd.reshape(n, group).to(kept)


@decomposition(aten.native_group_norm_backward.default)
def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    space = x.shape[2:]
    shape, ones = (n, group, c // group, *space), (1,) * (len(space) + 1)
    dims = list(range(2, len(shape)))
    wide, rstd = _wide(dy).reshape(shape), _wide(rstd).reshape(n, group, *ones)
    normal = (_wide(x).reshape(shape) - mean.reshape(n, group, *ones)) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        scaled = wide if weight is None else wide * weight.reshape(group, c // group, *(1,) * len(space))
        dx = _normalised_backward(scaled, normal, rstd, dims).reshape(x.shape).to(x.dtype)
    over = [0, *range(3, len(shape))]
    if output_mask[1]:
        dweight = (wide * normal).sum(over).reshape(c).to(x.dtype if weight is None else weight.dtype)
    if output_mask[2]:
        dbias = wide.sum(over).reshape(c).to(x.dtype if weight is None else weight.dtype)
    return dx, dweight, dbias


def _of_channels(x: Tensor, *vectors: Tensor) -> list[Tensor]:
    """Vectors over channels, shaped to broadcast against ``x``."""
    return [_wide(t).reshape(-1, *(1,) * (x.ndim - 2)) for t in vectors]


@decomposition(aten.native_batch_norm.default)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@decomposition(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@decomposition(aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """With the statistics that it leaves, whose variance is divided by one less than the number of elements."""
    dims, wide = [0, *range(2, x.ndim)], _wide(x)
    if training:
        centred, mean, rstd = _statistics(wide, dims, eps)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = _of_channels(x, running_mean, running_var)
        centred, rstd = wide - mean, torch.rsqrt(var + eps)
    y = centred * rstd
    y = y if weight is None else y * _of_channels(x, weight)[0]
    y = y if bias is None else y + _of_channels(x, bias)[0]
    kept = _statistics_dtype(x, weight, bias)
    saved = (mean.flatten().to(kept), rstd.flatten().to(kept)) if training else (x.new_zeros((0,), dtype=kept),) * 2
    if running_mean is None or running_var is None:
        return y.to(x.dtype), *saved
    if not training:
        return y.to(x.dtype), *saved, running_mean.clone(), running_var.clone()
    n = _count(x, dims)
    var = (centred * centred).sum(dims, True).flatten() / max(n - 1, 1)
    new_mean = running_mean * (1 - momentum) + mean.flatten() * momentum
    new_var = running_var * (1 - momentum) + var * momentum
    return y.to(x.dtype), *saved, new_mean.to(running_mean.dtype), new_var.to(running_var.dtype)


@decomposition(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dims, wide = [0, *range(2, x.ndim)], _wide(dy)
    if train:
        assert save_mean is not None and save_rstd is not None
        mean, rstd = _of_channels(x, save_mean, save_rstd)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = _of_channels(x, running_mean, running_var)
        rstd = torch.rsqrt(var + eps)
    normal = (_wide(x) - mean) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        scale = rstd if weight is None else rstd * _of_channels(x, weight)[0]
        dx = (_normalised_backward(wide, normal, scale, dims) if train else wide * scale).to(x.dtype)
    kept = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        dweight = (wide * normal).sum(dims).to(kept)
    if output_mask[2]:
        dbias = wide.sum(dims).to(kept)
    return dx, dweight, dbias


# Reductions.


@decomposition(aten.mean.default)
def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean(x, None, False, dtype=dtype)


@decomposition(aten.mean.dim)
def mean(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = _dims(x, dim)
    x = x if dtype is None else x.to(dtype)
    return (_wide(x).sum(dims, keepdim) / _count(x, dims)).to(x.dtype)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _variance(x: Tensor, dim: Any, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    n = _count(x, dims)
    mean = x.sum(dims, True) / n
    centred = x - mean
    rest = max(0.0, n - (1 if correction is None else correction))
    squares = centred * centred if not centred.is_complex() else (centred * centred.conj()).real
    var = squares.sum(dims, keepdim) / rest
    return var, mean if keepdim else mean.reshape(var.shape)


@decomposition(aten.var.correction)
def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _variance(_wide(x), dim, correction, keepdim)[0].to(_real(x.dtype))


@decomposition(aten.var_mean.correction)
def var_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    var, mean = _variance(_wide(x), dim, correction, keepdim)
    return var.to(_real(x.dtype)), mean.to(x.dtype)


@decomposition(aten.std.correction)
def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return torch.sqrt(_variance(_wide(x), dim, correction, keepdim)[0]).to(_real(x.dtype))


@decomposition(aten.std_mean.correction)
def std_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    var, mean = _variance(_wide(x), dim, correction, keepdim)
    return torch.sqrt(var).to(_real(x.dtype)), mean.to(x.dtype)


@decomposition(aten.var.dim)
def var_dim(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return var(x, dim, correction=int(unbiased), keepdim=keepdim)


@decomposition(aten.var.default)
def var_all(x: Tensor, unbiased: bool = True) -> Tensor:
    return var(x, None, correction=int(unbiased))


@decomposition(aten.std.dim)
def std_dim(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return std(x, dim, correction=int(unbiased), keepdim=keepdim)


@decomposition(aten.std.default)
def std_all(x: Tensor, unbiased: bool = True) -> Tensor:
    return std(x, None, correction=int(unbiased))


@decomposition(aten.var_mean.dim)
def var_mean_dim(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return var_mean(x, dim, correction=int(unbiased), keepdim=keepdim)


@decomposition(aten.var_mean.default)
def var_mean_all(x: Tensor, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    return var_mean(x, None, correction=int(unbiased))


@decomposition(aten.logsumexp.default)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    dims = _dims(x, dim)
    wide = _wide(x)
    top = _top(wide.real if wide.is_complex() else wide, dims)
    top = torch.where(torch.abs(top) == math.inf, 0.0, top)
    total = torch.log(torch.exp(wide - top).sum(dims, keepdim))
    return (total + (top if keepdim else top.reshape(total.shape))).to(x.dtype)


@decomposition(aten.linalg_vector_norm.default)
def vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = _dims(x, dim)
    x = x if dtype is None else x.to(dtype)
    size = _wide(torch.abs(x))
    if ord == math.inf:
        norm = torch.amax(size, dims, keepdim)
    elif ord == -math.inf:
        norm = torch.amin(size, dims, keepdim)
    elif ord == 0:
        norm = (size != 0).sum(dims, keepdim).to(size.dtype)
    elif ord == 1:
        norm = size.sum(dims, keepdim)
    elif ord == 2:
        norm = torch.sqrt((size * size).sum(dims, keepdim))
    else:
        norm = torch.pow(torch.pow(size, ord).sum(dims, keepdim), 1.0 / ord)
    return norm.to(size.dtype if x.is_complex() else x.dtype)


@decomposition(aten.norm.Scalar)
def norm_all(x: Tensor, p: float = 2) -> Tensor:
    return vector_norm(x, p)


@decomposition(aten.norm.ScalarOpt_dim)
def norm(x: Tensor, p: float | None, dim: Any, keepdim: bool = False) -> Tensor:
    return vector_norm(x, 2 if p is None else p, dim, keepdim)


@decomposition(aten.dist.default)
def dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return vector_norm(x - y, p)


@decomposition(aten.any.default, aten.any.dim, aten.any.dims)
def any_(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """As a maximum of bytes, which every backend reduces."""
    return _of_bytes(torch.amax, x, dim, keepdim, of_none=False)


@decomposition(aten.all.default, aten.all.dim, aten.all.dims)
def all_(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _of_bytes(torch.amin, x, dim, keepdim, of_none=True)


def _of_bytes(extreme: Callable[..., Tensor], x: Tensor, dim: Any, keepdim: bool, of_none: bool) -> Tensor:
    dims = _dims(x, dim)
    dtype = torch.uint8 if x.dtype is torch.uint8 else torch.bool
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
        return x.new_full(shape, of_none, dtype=dtype)
    return extreme((x != 0).to(torch.uint8), dims, keepdim).to(dtype)


def _first_of(x: Tensor, value: Tensor, dim: int, keepdim: bool) -> Tensor:
    """Where ``value`` (kept dim) first stands along ``dim``; NaN counts as equal to NaN."""
    here = (x == value) | ((x != x) & (value != value))
    shape = [1] * x.ndim
    shape[dim] = n = x.shape[dim]
    at = torch.arange(n, device=x.device).reshape(shape)
    return torch.amin(torch.where(here, at, n), [dim], keepdim)


@decomposition(aten.argmax.default)
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(x, dim, keepdim, torch.amax)


@decomposition(aten.argmin.default)
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(x, dim, keepdim, torch.amin)


def _arg(x: Tensor, dim: int | None, keepdim: bool, extremum: Callable[..., Tensor]) -> Tensor:
    if x.ndim == 0:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    if dim is None:
        flat = x.reshape(-1)
        return _first_of(flat, extremum(flat, [0], True), 0, False).reshape([1] * x.ndim if keepdim else [])
    dim = dim % x.ndim
    return _first_of(x, extremum(x, [dim], True), dim, keepdim)


@decomposition(aten.max.dim)
def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extremum(x, dim, keepdim, torch.amax)


@decomposition(aten.min.dim)
def min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extremum(x, dim, keepdim, torch.amin)


def _extremum(x: Tensor, dim: int, keepdim: bool, extremum: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    if x.ndim == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    dim = dim % x.ndim
    value = extremum(x, [dim], True)
    return (value if keepdim else value.squeeze(dim)), _first_of(x, value, dim, keepdim)


@decomposition(aten.aminmax.default)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    return torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)


# Products with something added.


@decomposition(aten.addmm.default, aten.addmv.default, aten.baddbmm.default)
def added_product(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    alpha, beta = _scale(x, alpha), _scale(x, beta)
    product = torch.bmm(a, b) if a.ndim == 3 else torch.mm(a, b) if b.ndim == 2 else torch.mv(a, b)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (x if beta == 1 else x * beta)


def _scale(x: Tensor, factor: float) -> float:
    """``factor`` as the kernels take it: of integers its whole part."""
    return factor if x.is_floating_point() or x.is_complex() else int(factor)


@decomposition(aten.addbmm.default)
def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    batch, m, k = a.shape
    flat = a.transpose(0, 1).reshape(m, batch * k)
    return added_product(x, flat, b.reshape(batch * k, b.shape[2]), beta=beta, alpha=alpha)


@decomposition(aten.trace.default)
def trace(x: Tensor) -> Tensor:
    return torch.diagonal(x).sum()


@decomposition(aten.diag_embed.default)
def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    padded = torch.constant_pad_nd(x, [offset, 0] if offset > 0 else [0, -offset])
    at = torch.arange(padded.shape[-1], device=x.device)
    made = torch.where(at.unsqueeze(0) == at.unsqueeze(1) + offset, padded.unsqueeze(-2), torch.zeros((), dtype=x.dtype, device=x.device))
    return made.movedim((-2, -1), (dim1, dim2))


@decomposition(aten.rot90.default)
def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    match k % 4:
        case 0:
            return x.clone()
        case 1:
            return torch.flip(x, [second]).transpose(first, second)
        case 2:
            return torch.flip(x, [first, second])
        case _:
            return torch.flip(x, [first]).transpose(first, second)


@decomposition(aten.index_fill.int_Scalar)
def index_fill(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    shape = [1] * max(x.ndim, 1)
    size = shape[dim] = x.shape[dim] if x.ndim else 1
    index = index.reshape(-1)
    filled = torch.zeros((size,), dtype=torch.bool, device=x.device).scatter(0, torch.where(index < 0, index + size, index), True)
    return x.masked_fill(filled.reshape(shape[: x.ndim]), value)


# Gathers that a mask guards.


def _clamped(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if i is None else i.clamp(0, x.shape[d] - 1) for d, i in enumerate(indices)]


@decomposition(aten._unsafe_masked_index.default)
def masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float) -> Tensor:
    return aten.index.Tensor(x, _clamped(x, indices)).masked_fill(~mask, fill)


@decomposition(aten._unsafe_masked_index_put_accumulate.default)
def masked_index_put(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    return aten.index_put.default(x, _clamped(x, indices), values.masked_fill(~mask, 0), True)


# Bags of embeddings: rows are looked up, then added to the bag that they belong to, so that the table may be cut along either dim.

MAX = 2


@decomposition(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    starts = offsets[:-1] if include_last_offset else offsets
    bags, width = starts.shape[0], weight.shape[1]
    bag = _bag_of(indices, starts)
    kept = indices != padding_idx
    count = torch.index_add(torch.zeros((bags,), dtype=indices.dtype, device=indices.device), 0, bag, kept.to(indices.dtype))
    rows = aten.embedding.default(weight, indices)
    if mode == MAX:
        at = torch.arange(indices.shape[0], device=indices.device, dtype=indices.dtype)
        spread = bag.unsqueeze(1).expand(-1, width)
        rows = rows.masked_fill(~kept.unsqueeze(1), -math.inf)
        least = torch.full((bags, width), -math.inf, dtype=rows.dtype, device=rows.device)
        top = torch.scatter_reduce(least, 0, spread, rows, "amax")
        beyond = torch.full((bags, width), indices.shape[0], dtype=indices.dtype, device=indices.device)
        wins = (rows == aten.index.Tensor(top, [bag])) & kept.unsqueeze(1)
        first = torch.scatter_reduce(beyond, 0, spread, torch.where(wins, at.unsqueeze(1), indices.shape[0]), "amin")
        winner = aten.index.Tensor(torch.nn.functional.pad(indices, (0, 1)), [first])
        return top.masked_fill((count == 0).unsqueeze(1), 0), bag, count, winner
    rows = rows.masked_fill(~kept.unsqueeze(1), 0)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(1)
    out = torch.index_add(torch.zeros((bags, width), dtype=rows.dtype, device=rows.device), 0, bag, rows)
    if mode == MEAN:
        out = out / count.clamp(min=1).unsqueeze(1).to(out.dtype)
    return out, bag, count, count


@decomposition(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag: Tensor,
    count: Tensor,
    winner: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    if mode == MAX:
        grad = grad.masked_fill((count == 0).unsqueeze(1), 0)
        return torch.scatter_add(torch.zeros((num_weights, grad.shape[1]), dtype=grad.dtype, device=grad.device), 0, winner, grad)
    if mode == MEAN:
        grad = grad / count.clamp(min=1).unsqueeze(1).to(grad.dtype)
    rows = aten.index.Tensor(grad, [_bag_of(indices, offsets)])
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(1)
    return aten.embedding_dense_backward.default(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


@decomposition(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, bag: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    rows = aten.index.Tensor(grad, [_bag_of(indices, offsets)]) * aten.embedding.default(weight, indices)
    return rows.sum(1).masked_fill(indices == padding_idx, 0)


def _bag_of(indices: Tensor, starts: Tensor) -> Tensor:
    at = torch.arange(indices.shape[0], device=indices.device, dtype=starts.dtype)
    return (torch.searchsorted(starts, at, right=True) - 1).to(indices.dtype)
