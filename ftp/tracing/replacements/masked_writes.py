"""Writes of plain tensors to the places of a mask: one value by ``where``, a value for each
selected element by their indices.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from ftp.ops.assume import assume
from ftp.torch_internals.functorch import is_gradtrackingtensor
from ftp.tracing.selected_rows.selecting import (
    mask_in,
    masked_first,
    taken_before_mask,
    with_places,
)


def write_at_mask(input: Tensor, key: Any, value: Any) -> bool:
    """Whether ``input[key] = value`` is a write of a tensor to a mask's places, which is done."""
    if (indices := with_places(input, key)) is not None:
        input[indices] = value
        return True
    if not isinstance(value, Tensor):
        return False
    value = value.to(input.dtype)
    if is_mask(key) and key.ndim:
        input.copy_(index_put(input, (key,), value))
        return True
    input, key = taken_before_mask(input, key)
    if (found := mask_in(input, key)) is None:
        return False
    at, mask, rest = found
    if not all(k is None or k is Ellipsis or type(k) in (int, slice) for k in rest):
        return False
    part = input[(*(slice(None),) * (at + mask.ndim), *rest)] if rest else input
    part = masked_first(part, at, mask)
    if at:
        ones = (1,) * (part.ndim - mask.ndim + 1 - value.ndim)
        value = value.reshape(*ones, *value.shape).movedim(at, 0)
    part.copy_(index_put(part, (mask,), value))
    return True


def index_put(input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """``x[mask] = value``: one value for all selected elements by ``where``; a value per selected
    element by their indices.
    """
    at = [d for d, i in enumerate(indices) if i is not None]
    mask = indices[at[0]] if len(at) == 1 else None
    if not is_mask(mask) or mask.shape != input.shape[at[0] : at[0] + mask.ndim]:
        return torch.index_put(input, indices, values, accumulate)
    behind = input.ndim - at[0] - mask.ndim
    before = values.ndim - behind
    if before <= 0 or values.shape[before - 1] == 1:
        kept = mask.to(torch.bool).reshape(*mask.shape, *(1,) * behind)
        if before > 0:
            ones = (1,) * mask.ndim
            values = values.reshape(*values.shape[: before - 1], *ones, *values.shape[before:])
        if accumulate:
            return (input + torch.where(kept, values, 0)).to(input.dtype)
        return torch.where(kept, values, input).to(input.dtype)
    if not (values.requires_grad or is_gradtrackingtensor(values)):
        return torch.index_put(input, indices, values, accumulate)
    count = values.shape[before - 1]
    claim = f"a mask selects {count} elements, as many as values that are written there"
    assume(lambda: (mask != 0).sum() == count, claim)
    places = torch.nonzero_static(mask, size=count).unbind(1)
    return torch.index_put(input, (*indices[: at[0]], *places), values, accumulate)


def is_mask(key: Any) -> TypeGuard[Tensor]:
    return isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8)
