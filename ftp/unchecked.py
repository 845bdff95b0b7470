"""Functions of torch that look at values only to check them, without the check: a trace has no values to look at."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class unchecked(TorchFunctionMode):
    """While it is on, ``one_hot`` with a number of classes, ``cov``, ``corrcoef`` and ``gaussian_nll_loss`` read no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_UNCHECKED.get(func) or func)(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 1 or tensor.dtype is not torch.int64:
        return F.one_hot(tensor, num_classes)  # for its error
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and (
        input.ndim != var.ndim or sum(v for n, v in zip(input.shape, var.shape, strict=True) if n != v) != 1
    ):
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    with torch.no_grad():
        below = (eps - var).clamp(min=0)  # added, so that the gradient is that of var itself, as torch's is
    var = var + below
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """Of rows that are variables; weights multiply, and the norm is as NumPy's."""
    if input.ndim > 2 or input.dtype is torch.bool or any(w is not None and w.ndim > 1 for w in (fweights, aweights)):
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    x = input.reshape(1, -1) if input.ndim < 2 else input
    count = x.shape[1]
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        centred = x - x.sum(1, True) / count
        return _squeezed(centred @ centred.mH / max(count - correction, 0))
    weights = weights.reshape(-1)
    total = weights.sum()
    centred = x - (x * weights).sum(1, True) / total
    if aweights is None or correction == 0:
        norm = total - correction
    else:
        norm = total - correction * (weights * aweights.reshape(-1)).sum() / total
    return _squeezed((centred * weights) @ centred.mH / norm.clamp(min=0))


def _squeezed(c: Tensor) -> Tensor:
    return c.reshape(()) if c.numel() == 1 else c


def _corrcoef(input: Tensor) -> Tensor:
    c = _cov(input)
    if c.ndim == 0:
        return c / c
    deviation = torch.sqrt(torch.diagonal(c).real if c.is_complex() else torch.diagonal(c))
    c = c / deviation.unsqueeze(1) / deviation
    return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)


_UNCHECKED: dict[Any, Callable[..., Any]] = {
    F.one_hot: _one_hot,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
}
