"""Writes to the places that a mask selects."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.assume import assume
from ftp.tracing.refused_rows import refused
from ftp.tracing.same_values import holds_same
from ftp.tracing.selected import (
    OF_ALL_ROWS,
    Selected,
    Selections,
    apply,
    beside,
    order_of,
    written,
    zeroed,
)
from ftp.tracing.selected_spans import write_to_span
from ftp.tracing.selecting import is_selection, mask_in, masked_first


def _setitem(group: Selections, x: Any, key: Any, value: Any) -> Any:
    if isinstance(x, Selected):
        return written(x, apply(_with_item, (x, key, value), {}))
    if write_to_span(x, key, value):
        return x
    new = _put(group, x, key, value)
    if new is None:
        new = _written_to_mask(x, group, key, value)
    return x.copy_(new)


def _written_to_mask(x: Tensor, group: Selections, key: Any, value: Any) -> Tensor:
    if (found := mask_in(x, key)) is not None and not found[2] and isinstance(value, Selected):
        at, mask, _ = found
        if holds_same(mask, group.mask) and value.at == at:
            new = _write(masked_first(x, at, mask), group, value)
            return new.movedim(tuple(range(mask.ndim)), tuple(range(at, at + mask.ndim)))
    is_index = isinstance(key, Tensor) and key.ndim == 1 and key.dtype in (torch.int64, torch.int32)
    if is_index and isinstance(value, Selected) and not value.at:
        count = key.shape[0]
        claim = f"a mask selects {count} rows, as many as are written by an index"
        assume(group.valid.sum() == count, claim)
        if count <= len(group.valid):
            rows = value.rows.index_select(0, order_of(group)[:count])
            return torch.index_put(x, (key,), rows.to(x.dtype))
    raise refused("a write but to the places of the same mask", as_it_is=True)


def _with_item(x: Tensor, key: Any, value: Any) -> Tensor:
    x = x.clone()
    x[key] = value
    return x


_with_item.__name__ = "__setitem__ of rows"


def _write(x: Tensor, group: Selections, value: Selected) -> Tensor:
    """``x`` after ``x[mask] = value``."""
    flat = x.reshape(group.valid.numel(), *x.shape[group.mask.ndim :])
    rows = value.rows.to(x.dtype)
    return torch.where(beside(group.valid, flat), rows, flat).reshape(x.shape)


def _put(
    group: Selections, x: Any, key: Any, value: Any, accumulate: bool = False
) -> Tensor | None:
    """``x`` after ``x[i, j] = value`` at selected indices, which do not repeat."""
    keys = key if isinstance(key, tuple | list) else (key,)
    if isinstance(x, Selected) or len(keys) > x.ndim:
        return None
    if not all(isinstance(k, Selected) and k.rows.shape[1:].numel() == 1 for k in keys):
        return None
    if (behind := keys[0].rows.ndim - 1) and isinstance(value, Selected):  # mask.nonzero(): (n, 1)
        if value.rows.shape[1 : 1 + behind] != keys[0].rows.shape[1:]:
            return None
        value = Selected(value.rows.flatten(0, behind), group)
    keys = [Selected(k.rows.reshape(-1), group, k.below) for k in keys]
    if any(k.rows.dtype is torch.bool for k in keys):
        return None
    dims = 1 + x.ndim - len(keys)
    if isinstance(value, Selected) and value.rows.ndim != dims:
        raise refused("a write of selected rows of another number of dims", as_it_is=True)
    if isinstance(value, Tensor) and value.ndim >= dims and value.shape[0] != 1:
        raise refused(f"a write of a tensor of shape {tuple(value.shape)} to selected rows", True)
    sizes = x.shape[: len(keys)]
    for k, size in zip(keys, sizes, strict=True):
        if k.below is None or k.below > size:
            assume(lambda k=k, size=size: _are_in(k, size), f"indices are in [-{size}, {size})")
    at = [k.rows % size if size else k.rows for k, size in zip(keys, sizes, strict=True)]
    rows = value.rows if isinstance(value, Selected) else value
    return _written_at(x, at, rows, group.valid, accumulate)


def _are_in(key: Selected, size: int) -> Tensor:
    index = key.rows.detach()
    return (index >= -size) & (index < size) | ~key.group.valid


def _written_at(
    x: Tensor, at: Sequence[Tensor], value: Any, valid: Tensor, accumulate: bool
) -> Tensor:
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


def _index_add(
    group: Selections, x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1
) -> Any:
    if isinstance(x, Selected) or not isinstance(index, Selected) or dim % x.ndim:
        return None
    if not isinstance(source, Selected):
        return None
    return torch.index_add(x, dim, index.rows, zeroed(source).to(x.dtype), alpha=alpha)


def _index_put(
    group: Selections, x: Any, indices: Any, values: Any, accumulate: bool = False
) -> Any:
    return _put(group, x, indices, values, accumulate)


def _index_copy(group: Selections, x: Any, dim: int, index: Any, source: Any) -> Any:
    return None if isinstance(x, Selected) or dim % x.ndim else _put(group, x, index, source)


def _masked_scatter(group: Selections, x: Any, mask: Any, source: Any) -> Any:
    """``x.masked_scatter(mask, rows)``: the selected rows go back to the places of their mask."""
    is_back = isinstance(x, Tensor) and isinstance(source, Selected) and is_selection(mask, x)
    # torch broadcasts a mask of fewer dims over the first ones.
    if not is_back or mask.ndim < x.ndim or source.rows.ndim > 1:
        return None
    return _write(x, group, source) if holds_same(mask, group.mask) else None


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The form of ``function`` that writes to its first operand."""

    def of(group: Selections, x: Any, *args: Any, **kwargs: Any) -> Any:
        new = function(group, x, *args, **kwargs)
        return None if new is None else x.copy_(new)

    return of


OF_ALL_ROWS.update(
    {
        "__setitem__": _setitem,
        "index_add": _index_add,
        "index_add_": _written(_index_add),
        "index_copy": _index_copy,
        "index_copy_": _written(_index_copy),
        "index_put": _index_put,
        "masked_scatter": _masked_scatter,
        "masked_scatter_": _written(_masked_scatter),
        "index_put_": _written(_index_put),
    }
)
