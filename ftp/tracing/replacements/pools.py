"""Pools over one dim whose C++ asks for its size."""

from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

_PerDim = int | Sequence[int]


def max_pool1d(
    x: Tensor,
    kernel_size: _PerDim,
    stride: _PerDim | None = None,
    padding: _PerDim = 0,
    dilation: _PerDim = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """As `torch.max_pool1d`, by the pool over two dims that it calls under autograd, whose windows
    are of known sizes, or by the maximum of the dim.
    """
    (size,), (pad,), (apart,) = map(_numbers, (kernel_size, padding, dilation))
    (step,) = _numbers(stride) if stride is not None and stride != [] else (size,)
    if isinstance(size, SymInt) and (pad, apart) == (0, 1) and size == x.shape[-1]:
        return x.max(-1, keepdim=True).values
    sizes = [1, size], [1, step], [0, pad], [1, apart]
    return torch.max_pool2d(x.unsqueeze(-2), *sizes, ceil_mode).squeeze(-2)


def _numbers(x: _PerDim) -> Sequence[int]:
    return x if isinstance(x, Sequence) else [x]
