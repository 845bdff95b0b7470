"""Functions of torch whose C++ asks for a size as a number."""

from typing import Any

import torch
from torch import SymInt, Tensor

from ftp.tracing.replacements.pools import max_pool1d

_linspace, _take_along_dim = torch.linspace, torch.take_along_dim


def linspace(start: Any, end: Any, steps: Any, **kwargs: Any) -> Tensor:
    """As `torch.linspace`, from both ends as its kernels count, by `torch.arange` of the size."""
    count: Any = steps  # torch's stubs have no symbolic numbers
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    ends_are_numbers = not any(isinstance(x, Tensor | complex) for x in (start, end))
    is_plain = not isinstance(steps, SymInt) or "out" in kwargs
    if is_plain or not ends_are_numbers or not dtype.is_floating_point:
        return _linspace(start, end, count, **kwargs)
    kwargs.pop("dtype", None)
    if count == 1:
        return torch.full((1,), start, dtype=dtype, **kwargs)
    needs_gradient = kwargs.pop("requires_grad", False)
    at: Any = torch.arange(count, dtype=torch.float64, **kwargs)
    step = (end - start) / (count - 1)
    found = torch.where(at < count // 2, start + at * step, end - (count - 1 - at) * step)
    return found.to(dtype).requires_grad_(needs_gradient)


def kron(input: Tensor, other: Tensor) -> Tensor:
    """As `torch.kron`."""
    ndim = max(input.ndim, other.ndim)
    a, b = (x.reshape((1,) * (ndim - x.ndim) + tuple(x.shape)) for x in (input, other))
    for d in range(ndim):
        a, b = a.unsqueeze(2 * d + 1), b.unsqueeze(2 * d)
    return (a * b).reshape([a.shape[2 * d] * b.shape[2 * d + 1] for d in range(ndim)])


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """As `torch.take_along_dim`."""
    if dim is None:
        input, indices, dim = input.flatten(), indices.flatten(), 0
    ndim = input.ndim
    if indices.dtype != torch.int64 or ndim != indices.ndim or not -ndim <= dim < ndim:
        return _take_along_dim(input, indices, dim)
    dim %= ndim
    others = [(*x.shape[:dim], 1, *x.shape[dim + 1 :]) for x in (input, indices)]
    shape = list(torch.broadcast_shapes(*others))
    shape[dim] = -1
    return input.expand(shape).gather(dim, indices.expand(shape))


OF_SIZES = {
    "linspace": linspace,
    "max_pool1d": max_pool1d,
    "kron": kron,
    "take_along_dim": take_along_dim,
}
"""Functions of torch that take symbolic sizes in these forms."""
