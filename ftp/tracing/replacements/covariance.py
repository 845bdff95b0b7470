"""Covariances without the reads of values by which torch checks weights."""

from functools import reduce

import torch
from torch import Tensor


def cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """``torch.cov``: rows are variables, weights multiply, and the normalization is NumPy's."""
    given = [w for w in (fweights, aweights) if w is not None]
    if input.ndim > 2 or input.dtype is torch.bool or any(w.ndim > 1 for w in given):
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    x = input.reshape(1, -1) if input.ndim < 2 else input
    count = x.shape[1]
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    if not given:
        centred = x - x.sum(1, True) / count
        return _squeezed(centred @ centred.mH / max(count - correction, 0))
    weights = reduce(torch.mul, given).reshape(-1)
    total = weights.sum()
    centred = x - (x * weights).sum(1, True) / total
    if aweights is None or correction == 0:
        norm = total - correction
    else:
        norm = total - correction * (weights * aweights.reshape(-1)).sum() / total
    return _squeezed((centred * weights) @ centred.mH / norm.clamp(min=0))


def _squeezed(c: Tensor) -> Tensor:
    return c.reshape(()) if c.numel() == 1 else c


def corrcoef(input: Tensor) -> Tensor:
    c = cov(input)
    if c.ndim == 0:
        return c / c
    deviation = torch.sqrt(torch.diagonal(c).real if c.is_complex() else torch.diagonal(c))
    c = c / deviation.unsqueeze(1) / deviation
    if c.is_complex():
        return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1))
    return c.clamp(-1, 1)
