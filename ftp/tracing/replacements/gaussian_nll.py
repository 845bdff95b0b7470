"""The Gaussian negative log likelihood without torch's check of variances, which reads values."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and (
        input.ndim != var.ndim
        or sum(v for n, v in zip(input.shape, var.shape, strict=True) if n != v) != 1
    ):
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    with torch.no_grad():
        below = (eps - var).clamp(min=0)
    var = var + below  # not var.clamp: the gradient is that of var itself, like torch's
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
