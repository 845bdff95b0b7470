"""Reductions as primitives."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.rules.decompositions.registry import (
    decomposition,
    element_count,
    from_torch,
    widened,
    wrapped_dims,
)
from ftp.rules.overloads import aten

# Reductions.


@decomposition(aten.mean.default)
def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean(x, None, False, dtype=dtype)


@decomposition(aten.mean.dim)
def mean(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = wrapped_dims(x, dim)
    x = x if dtype is None else x.to(dtype)
    return (widened(x).sum(dims, keepdim) / element_count(x, dims)).to(x.dtype)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _variance(
    x: Tensor, dim: Any, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    dims = wrapped_dims(x, dim)
    n = element_count(x, dims)
    mean = x.sum(dims, True) / n
    centred = x - mean
    rest = max(0.0, n - (1 if correction is None else correction))
    squares = centred * centred if not centred.is_complex() else (centred * centred.conj()).real
    var = squares.sum(dims, keepdim) / rest
    return var, mean if keepdim else mean.reshape(var.shape)


def _register(op: Any, is_root: bool, has_mean: bool) -> None:
    """Register all overloads of a variance or standard deviation, with or without the mean."""

    def corrected(
        x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        var, mean = _variance(widened(x), dim, correction, keepdim)
        found = (torch.sqrt(var) if is_root else var).to(_real(x.dtype))
        return (found, mean.to(x.dtype)) if has_mean else found

    def of_dims(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
        return corrected(x, dim, correction=int(unbiased), keepdim=keepdim)

    def of_all(x: Tensor, unbiased: bool = True) -> Any:
        return corrected(x, None, correction=int(unbiased))

    decomposition(op.correction)(corrected)
    if not (is_root and has_mean):
        decomposition(op.dim)(of_dims)
        decomposition(op.default)(of_all)


_register(aten.var, is_root=False, has_mean=False)
_register(aten.var_mean, is_root=False, has_mean=True)
_register(aten.std, is_root=True, has_mean=False)
_register(aten.std_mean, is_root=True, has_mean=True)


@decomposition(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dims = wrapped_dims(x, dim)
    x = x if dtype is None else x.to(dtype)
    size = widened(torch.abs(x))
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
    """``any`` as a maximum of bytes, which every backend reduces."""
    return _of_bytes(torch.amax, x, dim, keepdim, of_none=False)


@decomposition(aten.all.default, aten.all.dim, aten.all.dims)
def all_(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _of_bytes(torch.amin, x, dim, keepdim, of_none=True)


def _of_bytes(
    extreme: Callable[..., Tensor], x: Tensor, dim: Any, keepdim: bool, of_none: bool
) -> Tensor:
    dtype = torch.uint8 if x.dtype is torch.uint8 else torch.bool
    if isinstance(dim, list | tuple) and not dim:
        return (x != 0).to(dtype)
    dims = wrapped_dims(x, dim)
    if any(x.shape[d] == 0 for d in dims):
        shape = [
            1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims
        ]
        return x.new_full(shape, of_none, dtype=dtype)
    return extreme((x != 0).to(torch.uint8), dims, keepdim).to(dtype)


def _first_of(x: Tensor, value: Tensor, dim: int, keepdim: bool) -> Tensor:
    """The index of the first element along ``dim`` that equals ``value`` (kept dim); NaN equals
    NaN.
    """
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
        return _first_of(flat, extremum(flat, [0], True), 0, False).reshape(
            [1] * x.ndim if keepdim else []
        )
    dim = dim % x.ndim
    return _first_of(x, extremum(x, [dim], True), dim, keepdim)


@decomposition(aten.max.dim)
def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extremum(x, dim, keepdim, torch.amax)


@decomposition(aten.min.dim)
def min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extremum(x, dim, keepdim, torch.amin)


def _extremum(
    x: Tensor, dim: int, keepdim: bool, extremum: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    if x.ndim == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    dim = dim % x.ndim
    value = extremum(x, [dim], True)
    return (value if keepdim else value.squeeze(dim)), _first_of(x, value, dim, keepdim)


from_torch(aten.aminmax.default, aten.renorm.default)
