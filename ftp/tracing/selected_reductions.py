"""Functions that join selected rows: sums, means, losses, the largest and the least, and layers of
packed sequences.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ftp.ops.assume import assume
from ftp.tracing.packed_sequences import BatchSizes, padded, recurrent
from ftp.tracing.same_values import holds_same, is_same_along_last
from ftp.tracing.selected import (
    OF_ALL_ROWS,
    Selected,
    Selections,
    apply,
    beside,
    group_of,
    is_over_rows,
    order_of,
    refused,
    selected,
    wrapped,
    zeroed,
)


def _sum(
    group: Selections, x: Selected, dim: Any = None, keepdim: bool = False, **rest: Any
) -> Any:
    if set(rest) - {"dtype"} or (dim is not None and not is_over_rows(x.rows.ndim, dim)):
        return None
    return torch.sum(zeroed(x), *(() if dim is None else (dim, keepdim)), **rest)


def _mean(
    group: Selections, x: Selected, dim: Any = None, keepdim: bool = False, **rest: Any
) -> Any:
    total = _sum(group, x, dim, keepdim, **rest)
    if total is None:
        return None
    dims = range(x.rows.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    rest_of = math.prod(x.rows.shape[d] for d in dims if d % x.rows.ndim)
    return total / (group.valid.sum() * rest_of)


def _mean_over_rows(group: Selections, x: Selected) -> Tensor:
    return _sum(group, x) / group.valid.sum()


_REDUCTIONS = {"mean": _mean, "sum": _sum, "batchmean": _mean_over_rows, "none": None}


def _loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of pairs of elements, reduced over the selected rows."""

    def of(group: Selections, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.get("reduction", "mean")
        if args or not (isinstance(input, Selected) and isinstance(target, Selected)):
            return None
        if kwargs.get("weight") is not None or reduction not in _REDUCTIONS:
            return None
        if input.rows.shape != target.rows.shape:
            return None
        each = function(input.rows, target.rows, **{**kwargs, "reduction": "none"})
        value = wrapped(each, group, function.__name__)
        reduce = _REDUCTIONS[reduction]
        return reduce(group, value) if reduce else value

    return of


def _cross_entropy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of classes: rows that are not selected get the class ``ignore_index``."""

    def of(group: Selections, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if args or not (isinstance(input, Selected) and isinstance(target, Selected)):
            return None
        if target.rows.dtype.is_floating_point or kwargs.get("reduction", "mean") == "none":
            return None
        ignored = kwargs.get("ignore_index", -100)
        aside = torch.full((), ignored, dtype=target.rows.dtype, device=target.rows.device)
        kept = torch.where(beside(group.valid, target.rows), target.rows, aside)
        return function(input.rows, kept, **kwargs)

    return of


def _extremum(name: str, fill: Callable[[Any], float]) -> Callable[..., Any]:
    """The largest or least over rows: rows that are not selected are no candidates."""

    def of(group: Selections, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Selected | Tensor) or not isinstance(x, Selected):
            both = {"max": torch.maximum, "min": torch.minimum}.get(name)
            return apply(both, (x, dim), {}) if both else None
        is_full = dim is None or (isinstance(dim, tuple | list) and not dim)
        if not is_full and (not is_over_rows(x.rows.ndim, dim) or name in ("max", "min")):
            return None
        if x.rows.dtype is torch.bool or x.rows.dtype.is_complex:
            return None
        floats = x.rows.dtype.is_floating_point
        least = fill(torch.finfo(x.rows.dtype) if floats else torch.iinfo(x.rows.dtype))
        aside = x.rows.new_full((), least if not floats else math.copysign(math.inf, least))
        rows = torch.where(beside(group.valid, x.rows), x.rows, aside)
        function = getattr(torch, name)
        return function(rows) if is_full else function(rows, dim, keepdim)

    return of


def taken(group: Selections, x: Any, key: Any) -> Any:
    """``x[mask][key]`` at plain indices, as those of ``torch.unique(return_inverse=True)``."""
    is_index = isinstance(key, Tensor) and key.dtype in (torch.int64, torch.int32)
    if not is_index or not isinstance(x, Selected) or not x.rows.shape[0]:
        return None
    count, known = group.valid.sum(), key.detach()
    assume((known >= -count) & (known < count), "indices are below the number of selected rows")
    place = torch.where(key < 0, key + count, key).clamp(0, x.rows.shape[0] - 1)
    return x.rows[order_of(group)[place]]


def _index_select(group: Selections, x: Any, dim: int, index: Any) -> Any:
    if dim % x.ndim:
        return None
    if isinstance(x, Selected):
        return taken(group, x, index)
    return apply(Tensor.__getitem__, (x, index), {})


def _rows_of_elements(group: Selections, x: Any, *sizes: Any) -> Any:
    """``x[mask].view(-1, n)`` where all n elements of a row are selected, or none of them."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    mask = group.mask
    if not isinstance(x, Selected) or x.rows.ndim != 1 or mask.ndim < 2:
        return None
    if sizes != (-1, mask.shape[-1]) or not is_same_along_last(mask):
        return None
    return selected(x.rows.reshape(-1, mask.shape[-1]), group_of(mask.select(-1, 0)))


def _are_packed(data: Any, sizes: Any, group: Selections) -> bool:
    """Whether a function takes a packed sequence, whose rows are those of its batch sizes."""
    if not (isinstance(data, Selected) and isinstance(sizes, BatchSizes)):
        return False
    if not holds_same(sizes.kept, group.mask):
        raise refused("a PackedSequence of rows that another mask selects", as_it_is=True)
    return True


def _padded(group: Selections, data: Any, sizes: Any, *args: Any) -> Any:
    if not _are_packed(data, sizes, group):
        return None
    return padded(data.rows, group.valid, sizes, *args)


def _recurrent(name: str) -> Callable[..., Any]:
    def of(group: Selections, data: Any, sizes: Any, *args: Any) -> Any:
        if not _are_packed(data, sizes, group):
            return None
        rows, *states = recurrent(name, data.rows, group.valid, sizes, *args)
        return (selected(rows, group), *states)

    return of


OF_ALL_ROWS.update(
    {
        "_pad_packed_sequence": _padded,
        **dict.fromkeys(("view", "reshape"), _rows_of_elements),
        **{name: _recurrent(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
        "sum": _sum,
        "mean": _mean,
        "index_select": _index_select,
        **{name: _extremum(name, lambda of: of.min) for name in ("amax", "max")},
        **{name: _extremum(name, lambda of: of.max) for name in ("amin", "min")},
        **{
            f.__name__: _loss(f)
            for f in (
                F.mse_loss,
                F.l1_loss,
                F.smooth_l1_loss,
                F.huber_loss,
                F.binary_cross_entropy,
                F.binary_cross_entropy_with_logits,
                F.kl_div,
            )
        },
        "cross_entropy": _cross_entropy(F.cross_entropy),
        "nll_loss": _cross_entropy(F.nll_loss),
    }
)
