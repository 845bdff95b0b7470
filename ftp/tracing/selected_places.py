"""Writes to the places that a mask selects."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def put(x: Tensor, at: Sequence[Tensor], value: Any, valid: Tensor, accumulate: bool) -> Tensor:
    """``x`` after ``x[at] = value`` at valid rows; the others are written behind its end, and cut.

    Args:
        at: an index of each first dim, not negative.
        value: a row for each index, or what is broadcast to them.
    """
    sizes, rest = x.shape[: len(at)], x.shape[len(at) :]
    count = math.prod(sizes)
    flat = x.reshape(count, *rest)
    place = at[0]
    for index, size in zip(at[1:], sizes[1:], strict=True):
        place = place * size + index
    place = torch.where(valid, place, count)
    value = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand(len(valid), *rest)
    behind = torch.cat([flat, flat.new_zeros(1, *rest)])
    return behind.index_put((place,), value, accumulate)[:count].reshape(x.shape)
