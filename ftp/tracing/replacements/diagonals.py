"""Writes to diagonals by masks: torch takes strides, for which each rank needs the whole tensor."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor


def fill_diagonal_(input: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """``Tensor.fill_diagonal_``: where all indices are equal; with ``wrap`` a tall matrix has the
    diagonal again below an empty row.
    """
    is_cube = input.ndim > 2 and len(set(input.shape)) == 1
    is_known = not isinstance(fill_value, Tensor) and (input.ndim == 2 or is_cube)
    if not is_known or (wrap and not input.is_contiguous()):  # which wraps as memory does
        value: Any = fill_value
        return input.fill_diagonal_(value, wrap)
    first, *rest = (
        torch.arange(n, device=input.device).view(-1, *[1] * (input.ndim - 1 - d))
        for d, n in enumerate(input.shape)
    )
    if wrap and input.ndim == 2:
        first = first % (input.shape[1] + 1)
    return input.masked_fill_(reduce(torch.logical_and, [first == at for at in rest]), fill_value)
