"""Normalisations as primitives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.moments import moments
from ftp.rules.decompositions.registry import HALF, decomposition, element_count, widened
from ftp.rules.overloads import aten

# Normalisations: two sums, the mean's and the centred squares'.


def _batch_and_normalized(x: Tensor, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    first = x.ndim - len(shape)
    return list(range(first)), list(range(first, x.ndim))


def _statistics(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Centred ``x``, and its mean and reciprocal standard deviation over ``dims`` (kept dims)."""
    n = element_count(x, dims)
    mean = x.sum(dims, True) / n
    centred = x - mean
    return centred, mean, torch.rsqrt((centred * centred).sum(dims, True) / n + eps)


def _normalised_backward(dy: Tensor, normal: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    n = element_count(dy, dims)
    return (dy - dy.sum(dims, True) / n - normal * ((dy * normal).sum(dims, True) / n)) * rstd


def _statistics_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    if x.device.type != "cpu" and x.dtype in HALF:
        return torch.float32
    parameter = weight if weight is not None else bias
    return x.dtype if parameter is None else parameter.dtype


@decomposition(aten.native_layer_norm.default)
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _, dims = _batch_and_normalized(x, normalized_shape)
    centred, mean, rstd = _statistics(widened(x), dims, eps)
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
    batch, dims = _batch_and_normalized(x, normalized_shape)
    wide, rstd = widened(dy), widened(rstd)
    normal = (widened(x) - mean) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        dx = _normalised_backward(wide if weight is None else wide * weight, normal, rstd, dims).to(
            x.dtype
        )
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
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    _, dims = _batch_and_normalized(x, normalized_shape)
    wide = widened(x)
    rstd = torch.rsqrt(
        (wide * wide).sum(dims, True) / element_count(x, dims)
        + (torch.finfo(wide.dtype).eps if eps is None else eps)
    )
    y = wide * rstd
    return (y if weight is None else y * weight).to(x.dtype), rstd


@decomposition(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    batch, dims = _batch_and_normalized(x, normalized_shape)
    wide = widened(dy)
    normal = widened(x) * rstd
    dx = dweight = None
    if output_mask[0]:
        grad = wide if weight is None else wide * weight
        dx = (
            (grad - normal * ((grad * normal).sum(dims, True) / element_count(x, dims))) * rstd
        ).to(x.dtype)
    if output_mask[1]:
        assert weight is not None
        dweight = _sum(wide * normal, batch).to(weight.dtype)
    return dx, dweight


@decomposition(aten.native_group_norm.default)
def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    space = x.shape[2:]
    grouped = widened(x).reshape(n, group, c // group, *space)
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
    wide, rstd = widened(dy).reshape(shape), widened(rstd).reshape(n, group, *ones)
    normal = (widened(x).reshape(shape) - mean.reshape(n, group, *ones)) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        scaled = (
            wide if weight is None else wide * weight.reshape(group, c // group, *(1,) * len(space))
        )
        dx = _normalised_backward(scaled, normal, rstd, dims).reshape(x.shape).to(x.dtype)
    over = [0, *range(3, len(shape))]
    if output_mask[1]:
        dweight = (
            (wide * normal).sum(over).reshape(c).to(x.dtype if weight is None else weight.dtype)
        )
    if output_mask[2]:
        dbias = wide.sum(over).reshape(c).to(x.dtype if weight is None else weight.dtype)
    return dx, dweight, dbias


def _of_channels(x: Tensor, *vectors: Tensor) -> list[Tensor]:
    """Vectors over channels, shaped to broadcast against ``x``."""
    return [widened(t).reshape(-1, *(1,) * (x.ndim - 2)) for t in vectors]


@decomposition(aten.native_batch_norm.default)
def batch_norm(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _batch_norm(x, *args)[:3]


@decomposition(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    return _batch_norm(x, weight, bias, None, None, *options)[:3]


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
    """The results and the new running statistics, whose variance is divided by one less than the
    number of elements.
    """
    dims, wide = [0, *range(2, x.ndim)], widened(x)
    n = element_count(x, dims)
    if training:
        mean, var = _mean_and_variance(wide, dims)
        centred, rstd = wide - mean.to(wide.dtype), torch.rsqrt(var + eps).to(wide.dtype)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = _of_channels(x, running_mean, running_var)
        centred, rstd = wide - mean, torch.rsqrt(var + eps)
    y = centred * (rstd if weight is None else rstd * _of_channels(x, weight)[0])
    y = y if bias is None else y + _of_channels(x, bias)[0]
    kept = _statistics_dtype(x, weight, bias)
    saved = (
        (mean.flatten().to(kept), rstd.flatten().to(kept))
        if training
        else (x.new_zeros((0,), dtype=kept),) * 2
    )
    if running_mean is None or running_var is None:
        return y.to(x.dtype), *saved
    if not training:
        return y.to(x.dtype), *saved, running_mean.clone(), running_var.clone()
    new_mean = running_mean * (1 - momentum) + mean.flatten() * momentum
    new_var = running_var * (1 - momentum) + var.flatten() * (n / max(n - 1, 1)) * momentum
    return y.to(x.dtype), *saved, new_mean.to(running_mean.dtype), new_var.to(running_var.dtype)


def _mean_and_variance(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance over ``dims`` (kept dims). By one reduction of sums in float64, which
    rounds less than ``x``'s dtype. For float64 by two reductions, as the square of a mean would
    round away a small variance.
    """
    n = element_count(x, dims)
    if x.dtype == torch.float64:
        mean = x.sum(dims, True) / n
        return mean, (x - mean).square().sum(dims, True) / n
    total, squares = moments(x, dims)
    mean = total / n
    return mean, torch.addcmul(squares / n, mean, mean, value=-1).clamp(min=0)


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
    dims, wide = [0, *range(2, x.ndim)], widened(dy)
    if train:
        assert save_mean is not None and save_rstd is not None
        mean, rstd = _of_channels(x, save_mean, save_rstd)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = _of_channels(x, running_mean, running_var)
        rstd = torch.rsqrt(var + eps)
    normal = (widened(x) - mean) * rstd
    dx = dweight = dbias = None
    # The gradient of ``x`` uses these two sums too, so that each is reduced once.
    total, products = wide.sum(dims, True), (wide * normal).sum(dims, True)
    if output_mask[0]:
        scale = rstd if weight is None else rstd * _of_channels(x, weight)[0]
        n = element_count(x, dims)
        inner = wide - total / n - normal * (products / n) if train else wide
        dx = (inner * scale).to(x.dtype)
    kept = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        dweight = products.flatten().to(kept)
    if output_mask[2]:
        dbias = total.flatten().to(kept)
    return dx, dweight, dbias


@decomposition(aten._weight_norm_interface.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norms = _along(widened(v).square(), dim).sqrt()
    kept = torch.float32 if g.dtype == torch.bfloat16 else g.dtype
    return (v * (g / norms)).to(v.dtype), norms.to(kept)


@decomposition(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    dw: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    products = _along(widened(dw) * v, dim)
    dv = g / norms * (dw - v * (products / norms.square()))
    return dv.to(v.dtype), (products / norms).to(g.dtype)


def _along(x: Tensor, dim: int) -> Tensor:
    """Sums over all dims but ``dim``; a vector stays as it is."""
    dims = [i for i in range(x.ndim) if i != dim % x.ndim]
    return x.sum(dims, True) if dims else x
