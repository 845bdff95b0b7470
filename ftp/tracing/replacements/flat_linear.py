"""``F.linear`` of three dims, where sizes are dynamic."""

from torch import Tensor
from torch.nn import functional as F


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of two dims: with a bias torch flattens three dims itself, and under a gradient
    of torch.func then asks for their sizes as numbers (2.13).
    """
    if bias is None or input.ndim != 3 or all(type(size) is int for size in input.shape):
        return F.linear(input, weight, bias)
    return F.linear(input.flatten(0, 1), weight, bias).unflatten(0, input.shape[:2])
