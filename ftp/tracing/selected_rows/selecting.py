"""Calls on plain tensors that select rows: ``x[mask]``, ``nonzero``, ``unique`` and others."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.tracing.data_dependent.values_read import Level, is_reading
from ftp.tracing.replacements.packed_sequences import packed_steps
from ftp.tracing.selected_rows.group import SelectionGroup, group_of
from ftp.tracing.selected_rows.selected import Selected, all_counted, select
from ftp.tracing.selected_rows.slices import read_traced_slice, split

_PACK: Any = torch._VF._pack_padded_sequence
_UNIQUE = (torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive)
_SPLIT = (torch.split, Tensor.split)
_NONZERO = (torch.where, torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
_MASKED = (torch.masked_select, Tensor.masked_select)
SELECTING = frozenset((_PACK, Tensor.__getitem__, *_MASKED, *_NONZERO, *_UNIQUE, *_SPLIT))


def selection(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The selection that a call on plain tensors makes (``x[mask]``, ``masked_select``, ...); None
    if the call selects no rows.
    """
    if func is _PACK:
        x, sizes = packed_steps(*args)
        return select(x, group_of(sizes.kept)), sizes
    if func is Tensor.__getitem__:
        return _read(*args)
    if func in _SPLIT:
        return split(*args, **kwargs)
    if func in _MASKED and len(args) + len(kwargs) == 2 and set(kwargs) <= {"mask"}:
        x, mask = torch.broadcast_tensors(*args, *kwargs.values())
        return select(x, group_of(mask)) if is_selection(mask, x) else None
    if func in _UNIQUE:
        return _unique(*args, **kwargs) if func in _UNIQUE[:2] else _consecutive(*args, **kwargs)
    if len(args) == 1 and args[0].ndim and func in _NONZERO and set(kwargs) <= {"as_tuple"}:
        group = group_of(args[0] if args[0].dtype is torch.bool else args[0] != 0)
        found = places(group)
        return found if func is torch.where or kwargs.get("as_tuple") else _stacked(found, group)
    return None


def with_counts(func: Any, found: Any) -> Any:
    """A selection with its rows as plain tensors, in a trace that reads all numbers of rows; packed
    sequences stay as they are.
    """
    return found if func is _PACK else all_counted(found)


def _unique(
    x: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """``torch.unique``: the distinct elements are rows; None if ``dim`` is given."""
    if dim is not None or not x.numel():
        return None
    ordered, order = x.reshape(-1).sort(stable=True)
    values, inverse, counts = _runs(ordered)
    inverse = torch.zeros_like(inverse).scatter(0, order, inverse)
    found = [values, inverse.reshape(x.shape), counts]
    return _asked(found, return_inverse, return_counts)


def _consecutive(
    x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """``torch.unique_consecutive``: each run's first element is a row; None if ``dim`` is given."""
    if dim is not None or not x.numel():
        return None
    values, inverse, counts = _runs(x.reshape(-1))
    return _asked([values, inverse.reshape(x.shape), counts], return_inverse, return_counts)


def _runs(x: Tensor) -> tuple[Selected, Tensor, Selected]:
    """Runs of equal elements: the first element of each, each element's run, the runs' lengths."""
    is_first = torch.cat([x.new_ones(1, dtype=torch.bool), x[1:] != x[:-1]])
    run = is_first.cumsum(0) - 1
    group = group_of(is_first)
    lengths = torch.zeros_like(run).index_add(0, run, torch.ones_like(run))
    return select(x, group), run, select(lengths.index_select(0, run), group)


def _asked(found: list[Any], inverse: bool, counts: bool) -> Any:
    made = [x for x, is_asked in zip(found, (True, inverse, counts), strict=True) if is_asked]
    return made[0] if len(made) == 1 else tuple(made)


def _read(x: Tensor, key: Any) -> Tensor | Selected | None:
    """``x[key]`` for a key with a traced slice, or with a mask after slices and numbers; else
    None.
    """
    if (span := read_traced_slice(x, key)) is not None:
        return span
    x, key = taken_before_mask(x, key)
    if (indices := with_places(x, key)) is not None:
        return x[indices]
    if (found := mask_in(x, key)) is None:
        return None
    at, mask, rest = found
    if not all(k is None or k is Ellipsis or type(k) in (int, slice) for k in rest):
        return None
    x = x[(*(slice(None),) * (at + mask.ndim), *rest)] if rest else x
    group = group_of(mask)
    return Selected(select(masked_first(x, at, mask), group).rows, group, row_dim=at)


def taken_before_mask(x: Tensor, key: Any) -> tuple[Tensor, Any]:
    """``x`` after the slices and numbers that precede a mask in a key, and the key that is left:
    ``x[1, 2:, mask]`` is ``x[1, 2:][:, mask]``.
    """
    keys = _spelled_out(x, key if isinstance(key, tuple) else (key,))
    at = next((i for i, k in enumerate(keys) if isinstance(k, Tensor)), 0)
    before = keys[:at]
    if all(_is_full(k) for k in before) or not all(
        k is None or type(k) in (int, slice) for k in before
    ):
        return x, key
    left = sum(type(k) is not int for k in before)
    return x[before], (*(slice(None),) * left, *keys[at:])


def with_places(x: Tensor, key: Any) -> tuple[Any, ...] | None:
    """A key with a mask beside other masks or indices, ``x[mask, index]``, with the mask's places
    for the mask; None for another key.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if sum(isinstance(k, Tensor) and k.ndim > 0 for k in keys) < 2 or any(
        k is Ellipsis for k in keys
    ):
        return None
    found: list[Any] = []
    dim, has_mask = 0, False
    for k in keys:
        is_mask = is_selection(k, x, dim)
        found += _indices_of(k) if is_mask else [k]
        dim += k.ndim if is_mask else k is not None
        has_mask = has_mask or is_mask
    return tuple(found) if has_mask else None


def _indices_of(mask: Tensor) -> Any:
    found = places(group_of(mask))
    return all_counted(found) if is_reading(Level.INTEGERS) else found


def mask_in(x: Tensor, key: Any) -> tuple[int, Tensor, tuple[Any, ...]] | None:
    """Of a mask in the key of ``x[key]``: the first dim that it masks, the mask, and the rest of
    the key. None if there is no mask, or if anything but full slices precedes it.
    """
    keys = _spelled_out(x, key if isinstance(key, tuple) else (key,))
    at = [*map(_is_full, keys), False].index(False)
    if not at < len(keys) <= x.ndim + sum(k is None or k is Ellipsis for k in keys):
        return None
    if not is_selection(keys[at], x, at):
        return None
    return at, keys[at], tuple(keys[at + 1 :])


def _is_full(key: Any) -> bool:
    return isinstance(key, slice) and key.start is key.stop is key.step is None


def _spelled_out(x: Tensor, keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """The keys with full slices in place of ``...`` before all others."""
    if not keys or keys[0] is not Ellipsis:
        return keys
    is_mask = [isinstance(k, Tensor) and k.dtype is torch.bool for k in keys[1:]]
    taken = sum(
        k.ndim if mask else k is not None for k, mask in zip(keys[1:], is_mask, strict=True)
    )
    return (*(slice(None),) * (x.ndim - taken), *keys[1:])


def masked_first(x: Tensor, at: int, mask: Tensor) -> Tensor:
    """``x`` with the dims that the mask covers, from ``at`` on, moved to the front."""
    return x.movedim(tuple(range(at, at + mask.ndim)), tuple(range(mask.ndim))) if at else x


def is_selection(key: Any, x: Any, at: int = 0) -> bool:
    """Whether ``key`` is a bool mask of the dims of ``x`` from ``at`` on."""
    return (
        isinstance(key, Tensor)
        and key.dtype is torch.bool
        and key.ndim > 0
        and key.shape == x.shape[at : at + key.ndim]
    )


def places(group: SelectionGroup) -> tuple[Selected, ...]:
    """``torch.where(mask)``: the indices of each dim."""
    own = torch.arange(group.valid.numel(), device=group.valid.device)
    numbers = torch.where(group.valid, own, group.first)
    found, below = [], group.valid.numel()
    for size in group.mask.shape:
        below = below // size if size else 0
        found.append(Selected((numbers // below) % size if size else numbers, group, size))
    return tuple(found)


def _stacked(found: Sequence[Selected], group: SelectionGroup) -> Selected:
    """``torch.nonzero(mask)``: a row of indices for each place."""
    return Selected(torch.stack([x.rows for x in found], 1), group, max(group.mask.shape))
