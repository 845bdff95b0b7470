"""Sums of a tensor's elements and of their squares, in float64. Sums of parts add up, so ranks that
hold parts find a mean and a variance by one reduction.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.define import define

moments = define("moments(Tensor x, int[] dim) -> (Tensor, Tensor)")
aten = torch.ops.aten


@torch.library.impl("ftp::moments", "CompositeExplicitAutograd")
def _on_tensors(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    found = sums(lambda op, *args, **kwargs: op(*args, **kwargs), x, dims, x.shape, x.dtype)
    return found[0], found[1]


def sums(
    emit: Callable[..., Any], x: Any, dims: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> tuple[Any, Any]:
    """Emit the ops that compute the sums over ``dims``.

    Elements are centred in their own dtype by a rounded mean m before they are squared. The terms
    with m, which would round most, are in float64: ``sum x² = sum (x - m)² + m (2 sum x - n m)``.
    """
    n = max(math.prod(shape[d] for d in dims), 1)
    total = emit(aten.sum.dim_IntList, x, dims, True, dtype=torch.float64)
    rounded = emit(aten._to_copy.default, emit(aten.mul.Scalar, total, 1 / n), dtype=dtype)
    centred = emit(aten.sub.Tensor, x, rounded)
    squares = emit(aten.mul.Tensor, centred, centred)
    squares = emit(aten.sum.dim_IntList, squares, dims, True, dtype=torch.float64)
    mean = emit(aten._to_copy.default, rounded, dtype=torch.float64)
    rest = emit(aten.sub.Tensor, total, mean, alpha=n / 2)
    return total, emit(aten.addcmul.default, squares, mean, rest, value=2)
