"""Writes to rows that a mask selects: ``x[mask] = rows``, and writes at selected indices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.assume import assume
from ftp.tracing.same_values import holds_same
from ftp.tracing.selected_rows.group import SelectionGroup, broadcast_mask, selected_indices
from ftp.tracing.selected_rows.refused import refused
from ftp.tracing.selected_rows.selected import (
    OF_ALL_ROWS,
    Selected,
    apply,
    fill_unselected,
    write_rows,
)
from ftp.tracing.selected_rows.selecting import (
    is_selection,
    mask_in,
    masked_first,
    places,
    taken_before_mask,
)
from ftp.tracing.selected_rows.slices import write_traced_slice


def _setitem(group: SelectionGroup, x: Any, key: Any, value: Any) -> Any:
    if isinstance(x, Selected):
        return write_rows(x, apply(_with_item, (x, key, value), {}))
    if write_traced_slice(x, key, value):
        return x
    x, key = taken_before_mask(x, _with_indices(group, key))
    new = _put(group, x, key, value)
    if new is None:
        new = _write_to_mask(x, group, key, value)
    return x.copy_(new)


def _with_indices(group: SelectionGroup, key: Any) -> Any:
    """``key``, with selected indices for the group's mask if it stands beside such indices."""
    if not isinstance(key, tuple) or not any(isinstance(k, Selected) for k in key):
        return key
    indices: list[Any] = []
    for k in key:
        is_mask = isinstance(k, Tensor) and k.dtype is torch.bool and k.shape == group.mask.shape
        indices += places(group) if is_mask and holds_same(k, group.mask) else [k]
    return tuple(indices)


def _write_to_mask(x: Tensor, group: SelectionGroup, key: Any, value: Any) -> Tensor:
    """``x`` after ``x[key] = value``: at the mask of the value's rows, or at a plain index of as
    many places as there are rows.
    """
    if (found := mask_in(x, key)) is not None and not found[2] and isinstance(value, Selected):
        at, mask, _ = found
        if holds_same(mask, group.mask) and value.row_dim == at:
            new = _write(masked_first(x, at, mask), group, value)
            return new.movedim(tuple(range(mask.ndim)), tuple(range(at, at + mask.ndim)))
    is_index = isinstance(key, Tensor) and key.ndim == 1 and key.dtype in (torch.int64, torch.int32)
    if is_index and isinstance(value, Selected) and not value.row_dim:
        count = key.shape[0]
        claim = f"a mask selects {count} rows, as many as are written by an index"
        assume(group.valid.sum() == count, claim)
        if count <= len(group.valid):
            rows = value.rows.index_select(0, selected_indices(group)[:count])
            return torch.index_put(x, (key,), rows.to(x.dtype))
    raise refused("a write but to the places of the same mask", as_it_is=True)


def _with_item(x: Tensor, key: Any, value: Any) -> Tensor:
    x = x.clone()
    x[key] = value
    return x


_with_item.__name__ = "__setitem__ of rows"


def _write(x: Tensor, group: SelectionGroup, value: Selected) -> Tensor:
    """``x`` after ``x[mask] = value``."""
    flat = x.reshape(group.valid.numel(), *x.shape[group.mask.ndim :])
    rows = value.rows.to(x.dtype)
    return torch.where(broadcast_mask(group.valid, flat), rows, flat).reshape(x.shape)


def _put(
    group: SelectionGroup, x: Any, key: Any, value: Any, accumulate: bool = False
) -> Tensor | None:
    """``x`` after ``x[i, j] = value`` at selected indices, none of which repeats; None for other
    keys.
    """
    keys = key if isinstance(key, tuple | list) else (key,)
    if isinstance(x, Selected) or len(keys) > x.ndim:
        return None
    if not all(isinstance(k, Selected) and k.rows.shape[1:].numel() == 1 for k in keys):
        return None
    ones = keys[0].rows.ndim - 1  # dims of size one: mask.nonzero() has shape (n, 1)
    if ones and isinstance(value, Selected):
        if value.rows.shape[1 : 1 + ones] != keys[0].rows.shape[1:]:
            return None
        value = Selected(value.rows.flatten(0, ones), group)
    keys = [Selected(k.rows.reshape(-1), group, k.upper_bound) for k in keys]
    if any(k.rows.dtype is torch.bool for k in keys):
        return None
    dims = 1 + x.ndim - len(keys)
    if isinstance(value, Selected) and value.rows.ndim != dims:
        raise refused("a write of selected rows of another number of dims", as_it_is=True)
    if isinstance(value, Tensor) and value.ndim >= dims and value.shape[0] != 1:
        raise refused(f"a write of a tensor of shape {tuple(value.shape)} to selected rows", True)
    sizes = x.shape[: len(keys)]
    for k, size in zip(keys, sizes, strict=True):
        if k.upper_bound is None or k.upper_bound > size:
            assume(lambda k=k, size=size: _are_in(k, size), f"indices are in [-{size}, {size})")
    at = [k.rows % size if size else k.rows for k, size in zip(keys, sizes, strict=True)]
    rows = value.rows if isinstance(value, Selected) else value
    return _write_at(x, at, rows, group.valid, accumulate)


def _are_in(key: Selected, size: int) -> Tensor:
    index = key.rows.detach()
    return (index >= -size) & (index < size) | ~key.group.valid


def _write_at(
    x: Tensor, at: Sequence[Tensor], value: Any, valid: Tensor, accumulate: bool
) -> Tensor:
    """``x`` after ``x[at] = value`` for the valid indices. The others write to a row appended to
    ``x``, which is dropped.

    Args:
        at: an index tensor for each leading dim of ``x``; no index is negative.
        value: a row for each index, or a value that broadcasts to them.
    """
    sizes, rest = x.shape[: len(at)], x.shape[len(at) :]
    count = math.prod(sizes)
    flat = x.reshape(count, *rest)
    place = at[0]
    for index, size in zip(at[1:], sizes[1:], strict=True):
        place = place * size + index
    place = torch.where(valid, place, count)
    value = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand(len(valid), *rest)
    padded = torch.cat([flat, flat.new_zeros(1, *rest)])
    return padded.index_put((place,), value, accumulate)[:count].reshape(x.shape)


def _index_add(
    group: SelectionGroup, x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1
) -> Any:
    if isinstance(x, Selected) or not isinstance(index, Selected) or dim % x.ndim:
        return None
    if not isinstance(source, Selected):
        return None
    return torch.index_add(x, dim, index.rows, fill_unselected(source, 0).to(x.dtype), alpha=alpha)


def _index_put(
    group: SelectionGroup, x: Any, indices: Any, values: Any, accumulate: bool = False
) -> Any:
    return _put(group, x, indices, values, accumulate)


def _index_copy(group: SelectionGroup, x: Any, dim: int, index: Any, source: Any) -> Any:
    return None if isinstance(x, Selected) or dim % x.ndim else _put(group, x, index, source)


def _masked_scatter(group: SelectionGroup, x: Any, mask: Any, source: Any) -> Any:
    """``x.masked_scatter(mask, rows)`` where ``mask`` selected the rows; None for other masks."""
    is_mask = isinstance(x, Tensor) and isinstance(source, Selected) and is_selection(mask, x)
    # torch broadcasts a mask of fewer dims over the leading dims of x.
    if not is_mask or mask.ndim < x.ndim or source.rows.ndim > 1:
        return None
    return _write(x, group, source) if holds_same(mask, group.mask) else None


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place form of ``function``, which writes to its first operand."""

    def of(group: SelectionGroup, x: Any, *args: Any, **kwargs: Any) -> Any:
        new = function(group, x, *args, **kwargs)
        return None if new is None else x.copy_(new)

    return of


OF_ALL_ROWS.update(
    {
        "__setitem__": _setitem,
        "index_add": _index_add,
        "index_add_": _in_place(_index_add),
        "index_copy": _index_copy,
        "index_copy_": _in_place(_index_copy),
        "index_put": _index_put,
        "masked_scatter": _masked_scatter,
        "masked_scatter_": _in_place(_masked_scatter),
        "index_put_": _in_place(_index_put),
    }
)
