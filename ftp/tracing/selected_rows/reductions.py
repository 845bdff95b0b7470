"""Functions of all selected rows: sums, means, losses, max and min, concatenation, softmax over
rows, and recurrent layers of packed sequences.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ftp.ops.assume import assume
from ftp.tracing.replacements.packed_sequences import BatchSizes, padded
from ftp.tracing.replacements.recurrent_layers import recurrent
from ftp.tracing.same_values import holds_same, is_same_along_last
from ftp.tracing.selected_rows.group import SelectionGroup, group_of, selected_indices, spread_rows
from ftp.tracing.selected_rows.no_rows import unless_none
from ftp.tracing.selected_rows.refused import refused
from ftp.tracing.selected_rows.row_functions import CONCATENATING
from ftp.tracing.selected_rows.selected import (
    OF_ALL_ROWS,
    OF_DIMS,
    Selected,
    apply,
    fill_unselected,
    is_over_rows,
    selected,
)
from ftp.tracing.selected_rows.slices import join_split


def _sum(
    group: SelectionGroup, x: Selected, dim: Any = None, keepdim: bool = False, **rest: Any
) -> Any:
    if set(rest) - {"dtype"} or (dim is not None and not is_over_rows(x.rows.ndim, dim)):
        return None
    return torch.sum(fill_unselected(x, 0), *(() if dim is None else (dim, keepdim)), **rest)


def _mean(
    group: SelectionGroup, x: Selected, dim: Any = None, keepdim: bool = False, **rest: Any
) -> Any:
    total = _sum(group, x, dim, keepdim, **rest)
    if total is None:
        return None
    dims = range(x.rows.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    elements_per_row = math.prod(x.rows.shape[d] for d in dims if d % x.rows.ndim)
    return total / (group.valid.sum() * elements_per_row)


def _dims(x: Selected, dim: Any) -> tuple[int, ...]:
    """The dims that a reduction joins: ``dim``, or all dims if it is None or empty."""
    ndim = x.rows.ndim
    if dim is None or dim == () or dim == []:
        return tuple(range(ndim))
    return tuple(d % ndim for d in (dim if isinstance(dim, tuple | list) else (dim,)))


def _ignoring(name: str, value: float) -> Callable[..., Any]:
    """The reduction ``name`` over rows, whose result an element ``value`` does not change."""

    def of(group: SelectionGroup, x: Any, dim: Any = None, *rest: Any, **named: Any) -> Any:
        if not isinstance(x, Selected) or 0 not in _dims(x, dim):
            return None
        at = () if dim is None else (dim,)
        if value == -math.inf and not (x.rows.is_floating_point() or x.rows.is_complex()):
            x = Selected(x.rows.to(torch.get_default_dtype()), group)
        return getattr(torch, name)(fill_unselected(x, value), *at, *rest, **named)

    return of


def _norm(name: str) -> Callable[..., Any]:
    def of(
        group: SelectionGroup,
        x: Any,
        p: Any = None,
        dim: Any = None,
        keepdim: bool = False,
        *,
        ord: Any = None,
        out: Any = None,
        dtype: Any = None,
    ) -> Any:
        p = p if ord is None else ord
        if name == "linalg_norm" and isinstance(p, int | float) and len(_dims(x, dim)) > 1:
            return None  # a matrix norm
        p = 2 if p in (None, "fro") and x.rows.ndim < 3 else p
        if not isinstance(p, int | float) or p < 0 or 0 not in _dims(x, dim) or out is not None:
            return None
        return torch.linalg.vector_norm(fill_unselected(x, 0), p, dim, keepdim, dtype=dtype)

    return of


def _var(
    group: SelectionGroup,
    x: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    dim, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
    dims = _dims(x, dim)
    if 0 not in dims:
        return None
    count = group.valid.sum() * math.prod(x.rows.shape[d] for d in dims if d)
    centred = Selected(x.rows - fill_unselected(x, 0).sum(dims, True) / count, group)
    total = fill_unselected(centred, 0).abs().square().sum(dims, keepdim)
    return total / (count - (int(unbiased) if correction is None else correction)).clamp(min=0)


def _std(group: SelectionGroup, x: Any, *args: Any, **kwargs: Any) -> Any:
    var = _var(group, x, *args, **kwargs)
    if var is None:
        return None
    is_zero = var.detach() == 0  # torch's gradient is zero there
    return torch.where(is_zero, var.detach(), torch.where(is_zero, 1, var).sqrt())


def _softmax(name: str) -> Callable[..., Any]:
    def of(group: SelectionGroup, x: Any, dim: int | None = None, *rest: Any, **named: Any) -> Any:
        named.pop("_stacklevel", None)
        if not isinstance(x, Selected) or dim is None or dim % x.rows.ndim or rest:
            return None
        if named.keys() - {"dtype"}:
            return None
        if named.get("dtype") is not None:
            x = Selected(x.rows.to(named["dtype"]), group)
        made = getattr(torch, name)(fill_unselected(x, -math.inf), dim, **named)
        return selected(unless_none(made, group.is_any), group)

    return of


def _quantile(name: str) -> Callable[..., Any]:
    """A quantile of all elements or over rows, by a function that ignores nan: unselected rows are
    set to nan. Where a selected row has a nan, the result is nan.
    """

    def of(group: SelectionGroup, x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        dim = args[0] if name == "nanmedian" and args else dim
        if not isinstance(x, Selected) or 0 not in _dims(x, dim) or not x.is_floating_point():
            return None
        if name == "nanmedian" and dim is not None:
            return None  # returns indices too
        made = getattr(torch, name)(fill_unselected(x, math.nan), *args, **kwargs)
        keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        is_nan = fill_unselected(x, 0).isnan()
        is_nan = is_nan.any() if dim is None else is_nan.any(dim, keepdim)
        return made.masked_fill(is_nan, math.nan)

    return of


def _cat(group: SelectionGroup, tensors: Any, dim: int = 0) -> Any:
    """Concatenate: along the dim of rows, selections by any masks and plain tensors; along another
    dim, selections by one mask and plain tensors with a row per selected row.
    """
    chosen = next(x for x in tensors if isinstance(x, Selected))
    if dim % chosen.rows.ndim:
        given = [_as_selected(x, group) for x in tensors]
        return None if given == [*tensors] else apply(torch.cat, (given, dim), {})
    if any(x.ndim != chosen.rows.ndim for x in tensors):
        return None
    if (joined := join_split(tensors)) is not None:
        return joined
    rows = [x.rows if isinstance(x, Selected) else x for x in tensors]
    valid = [
        x.group.valid
        if isinstance(x, Selected)
        else torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        for x in tensors
    ]
    return selected(torch.cat(rows), group_of(torch.cat(valid)))


def _stack(group: SelectionGroup, tensors: Any, dim: int = 0) -> Any:
    given = [_as_selected(x, group) for x in tensors]
    return None if given == [*tensors] else apply(torch.stack, (given, dim), {})


def _as_selected(x: Any, group: SelectionGroup) -> Selected:
    return x if isinstance(x, Selected) else Selected(spread_rows(x, group), group)


def _squeeze(group: SelectionGroup, x: Any, *dims: Any) -> Any:
    if dims or x.rows.shape[0] == 1:
        return None
    claim = "the mask does not select one row alone, whose dim squeeze() drops"
    assume(group.valid.sum() != 1, claim)
    ones = tuple(d for d, size in enumerate(x.rows.shape) if d and size == 1)
    return Selected(x.rows.squeeze(ones), group, x.upper_bound)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "mean": _mean,
    "sum": _sum,
    "batchmean": lambda group, x: _sum(group, x) / group.valid.sum(),
}  # "none" acts on each row by itself


def _loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of each row or element, reduced over the selected rows."""

    def of(group: SelectionGroup, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        if reduction not in _REDUCTIONS:
            return None
        each = apply(function, args, {**kwargs, "reduction": "none"})
        return _REDUCTIONS[reduction](group, each)

    return of


def _cross_entropy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A classification loss: the targets of unselected rows are set to ``ignore_index``."""

    def of(group: SelectionGroup, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if args or not (isinstance(input, Selected) and isinstance(target, Selected)):
            return None
        if target.is_floating_point():
            return _loss(function)(group, input, target, **kwargs)
        if kwargs.get("reduction", "mean") == "none":
            return None
        ignored = kwargs.get("ignore_index", -100)
        return function(input.rows, fill_unselected(target, ignored), **kwargs)

    return of


def _extremum(name: str, fill: Callable[[Any], float]) -> Callable[..., Any]:
    """The maximum or minimum over selected rows; ``fill`` gives a dtype's least candidate."""

    def of(group: SelectionGroup, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
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
        rows = fill_unselected(x, least if not floats else math.copysign(math.inf, least))
        assume(group.is_any, f"the mask selects a row: {name}() of none is an error")
        function = getattr(torch, name)
        return function(rows) if is_full else function(rows, dim, keepdim)

    return of


def index_rows(group: SelectionGroup, x: Any, key: Any) -> Any:
    """``x[mask][key]`` for plain indices, such as ``torch.unique(return_inverse=True)`` gives."""
    is_index = isinstance(key, Tensor) and key.dtype in (torch.int64, torch.int32)
    if not is_index or not isinstance(x, Selected) or not x.rows.shape[0]:
        return None
    count, known = group.valid.sum(), key.detach()
    assume((known >= -count) & (known < count), "indices are below the number of selected rows")
    place = torch.where(key < 0, key + count, key).clamp(0, x.rows.shape[0] - 1)
    return x.rows[selected_indices(group)[place]]


def _index_select(group: SelectionGroup, x: Any, dim: int, index: Any) -> Any:
    if dim % x.ndim:
        return None
    if isinstance(x, Selected):
        return index_rows(group, x, index)
    return apply(Tensor.__getitem__, (x, index), {})


def _rows_of_elements(group: SelectionGroup, x: Any, *sizes: Any) -> Any:
    """``x[mask].view(-1, n)`` for a mask that is the same in all n places of its last dim."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    mask = group.mask
    if not isinstance(x, Selected) or x.rows.ndim != 1 or mask.ndim < 2:
        return None
    if sizes != (-1, mask.shape[-1]) or not is_same_along_last(mask):
        return None
    return selected(x.rows.reshape(-1, mask.shape[-1]), group_of(mask.select(-1, 0)))


def _are_packed(data: Any, sizes: Any, group: SelectionGroup) -> bool:
    """Whether the arguments are a packed sequence: selected rows and the batch sizes that select
    them.
    """
    if not (isinstance(data, Selected) and isinstance(sizes, BatchSizes)):
        return False
    if not holds_same(sizes.kept, group.mask):
        raise refused("a PackedSequence of rows that another mask selects", as_it_is=True)
    return True


def _padded(group: SelectionGroup, data: Any, sizes: Any, *args: Any) -> Any:
    if not _are_packed(data, sizes, group):
        return None
    return padded(data.rows, group.valid, sizes, *args)


def _recurrent(name: str) -> Callable[..., Any]:
    def of(group: SelectionGroup, data: Any, sizes: Any, *args: Any) -> Any:
        if not _are_packed(data, sizes, group):
            return None
        shape = sizes.steps, sizes.sequences
        x, kept = data.rows.reshape(*shape, -1), group.valid.reshape(*shape, 1)
        x, *states = recurrent(name, x, kept, *args)
        return (selected(x.flatten(0, 1), group), *states)

    return of


def _ctc_loss(
    group: SelectionGroup,
    log_probs: Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """CTC of targets that a mask selects, in rows of one length: the selected ones of each row
    come first.
    """
    mask = group.mask
    if not isinstance(targets, Selected) or targets.rows.ndim != 1 or mask.ndim != 2:
        return None
    if not isinstance(target_lengths, Tensor):
        return None
    if not any(holds_same(target_lengths, mask.sum(dim)) for dim in (-1, 1)):
        return None
    order = mask.logical_not().to(torch.uint8).sort(dim=-1, stable=True).indices
    padded = targets.rows.reshape(mask.shape).gather(1, order)
    return F.ctc_loss(log_probs, padded, input_lengths, target_lengths, *rest, **named)


_LOSSES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    kl_div cosine_embedding_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss
    multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss soft_margin_loss
    triplet_margin_loss
"""
_OF_DIMS = {
    "var": _var,
    "std": _std,
    **{name: _softmax(name) for name in ("softmax", "log_softmax")},
    "logsumexp": _ignoring("logsumexp", -math.inf),
    "prod": _ignoring("prod", 1),
    "any": _ignoring("any", 0),
    "all": _ignoring("all", 1),
    "count_nonzero": lambda group, x, dim=None: _sum(group, apply(torch.ne, (x, 0), {}), dim),
    "nansum": _ignoring("nansum", 0),
    "nanmean": _ignoring("nanmean", math.nan),
    "sum": _sum,
    "mean": _mean,
    **{name: _extremum(name, lambda of: of.min) for name in ("amax", "max")},
    **{name: _extremum(name, lambda of: of.max) for name in ("amin", "min")},
}
OF_DIMS.update(_OF_DIMS)
OF_ALL_ROWS.update(
    {
        **_OF_DIMS,
        "_pad_packed_sequence": _padded,
        **dict.fromkeys(("view", "reshape"), _rows_of_elements),
        **dict.fromkeys(CONCATENATING, _cat),
        "stack": _stack,
        "squeeze": _squeeze,
        **{name: _norm(name) for name in ("norm", "linalg_norm", "linalg_vector_norm")},
        "median": _quantile("nanmedian"),
        "quantile": _quantile("nanquantile"),
        **{name: _recurrent(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
        "index_select": _index_select,
        **{name: _loss(getattr(F, name)) for name in _LOSSES.split()},
        "cross_entropy": _cross_entropy(F.cross_entropy),
        "nll_loss": _cross_entropy(F.nll_loss),
        "ctc_loss": _ctc_loss,
    }
)
