"""``torch.repeat_interleave`` by a tensor, whose result is as long as the sum of the repeats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

REPEATS = (torch.repeat_interleave, Tensor.repeat_interleave)


def with_size(
    args: Sequence[Any], kwargs: Mapping[str, Any], integer: Callable[[Tensor], Any]
) -> Mapping[str, Any]:
    """The keywords of a call with the size of its result, if that can be known.

    Args:
        integer: gives the number that a tensor of one integer holds, or the tensor.
    """
    named = dict(zip(("input", "repeats", "dim"), args, strict=False)) | dict(kwargs)
    repeats = named.get("repeats", named["input"])
    if not isinstance(repeats, Tensor) or named.get("output_size") is not None:
        return kwargs
    rows = 1
    if repeats.numel() == 1 and "repeats" in named:  # one number for all rows
        x, dim = named["input"], named.get("dim")
        rows = x.numel() if dim is None else x.shape[dim]
    size = integer(repeats.sum())
    return {**kwargs, "output_size": size * rows} if isinstance(size, int) else kwargs
