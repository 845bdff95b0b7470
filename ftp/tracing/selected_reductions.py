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
from ftp.tracing.no_rows import unless_none
from ftp.tracing.packed_sequences import BatchSizes, padded, recurrent
from ftp.tracing.refused_rows import refused
from ftp.tracing.row_functions import JOINING
from ftp.tracing.same_values import holds_same, is_same_along_last
from ftp.tracing.selected import (
    OF_ALL_ROWS,
    OF_DIMS,
    Selected,
    Selections,
    apply,
    beside,
    group_of,
    is_over_rows,
    order_of,
    row_of_each,
    selected,
    zeroed,
)
from ftp.tracing.selected_spans import joined_parts


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


def _count_nonzero(group: Selections, x: Selected, dim: Any = None) -> Any:
    return _sum(group, apply(torch.ne, (x, 0), {}), dim)


def _dims(x: Selected, dim: Any) -> tuple[int, ...]:
    """The dims that a reduction joins: ``dim``, or all dims if it is None or empty."""
    ndim = x.rows.ndim
    if dim is None or dim == () or dim == []:
        return tuple(range(ndim))
    return tuple(d % ndim for d in (dim if isinstance(dim, tuple | list) else (dim,)))


def _filled(x: Selected, value: float) -> Tensor:
    """The rows, with a value in the place of those that are not selected."""
    aside = torch.full((), value, dtype=x.rows.dtype, device=x.rows.device)
    return torch.where(beside(x.group.valid, x.rows), x.rows, aside)


def _over_filled(name: str, value: float) -> Callable[..., Any]:
    """A reduction to which ``value`` adds nothing."""

    def of(group: Selections, x: Any, dim: Any = None, *rest: Any, **named: Any) -> Any:
        if not isinstance(x, Selected) or 0 not in _dims(x, dim):
            return None
        at = () if dim is None else (dim,)
        return getattr(torch, name)(_filled(x, value), *at, *rest, **named)

    return of


def _norm(name: str) -> Callable[..., Any]:
    def of(
        group: Selections,
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
            return None  # it is a matrix norm
        p = 2 if p in (None, "fro") and x.rows.ndim < 3 else p
        if not isinstance(p, int | float) or p < 0 or 0 not in _dims(x, dim) or out is not None:
            return None
        return torch.linalg.vector_norm(zeroed(x), p, dim, keepdim, dtype=dtype)

    return of


def _var(
    group: Selections,
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
    centred = Selected(x.rows - zeroed(x).sum(dims, True) / count, group)
    total = zeroed(centred).abs().square().sum(dims, keepdim)
    return total / (count - (int(unbiased) if correction is None else correction)).clamp(min=0)


def _std(group: Selections, x: Any, *args: Any, **kwargs: Any) -> Any:
    var = _var(group, x, *args, **kwargs)
    if var is None:
        return None
    is_zero = var.detach() == 0  # there torch takes zero for the gradient
    return torch.where(is_zero, var.detach(), torch.where(is_zero, 1, var).sqrt())


def _softmax(name: str) -> Callable[..., Any]:
    def of(group: Selections, x: Any, dim: int | None = None, *rest: Any, **named: Any) -> Any:
        if not isinstance(x, Selected) or dim is None or dim % x.rows.ndim or rest:
            return None
        if named.keys() - {"dtype"}:
            return None
        made = getattr(torch, name)(_filled(x, -math.inf), dim, **named)
        return selected(unless_none(made, group.first[1]), group)

    return of


def _quantile(name: str) -> Callable[..., Any]:
    """A quantile of all elements or over the rows: rows that are not selected are set to nan, which
    is left out. A selected nan makes the result nan.
    """

    def of(group: Selections, x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        dim = args[0] if name == "nanmedian" and args else dim
        if not isinstance(x, Selected) or 0 not in _dims(x, dim) or not x.is_floating_point():
            return None
        if name == "nanmedian" and dim is not None:
            return None  # it gives indices too
        made = getattr(torch, name)(_filled(x, math.nan), *args, **kwargs)
        keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        is_nan = zeroed(x).isnan()
        is_nan = is_nan.any() if dim is None else is_nan.any(dim, keepdim)
        return made.masked_fill(is_nan, math.nan)

    return of


def _cat(group: Selections, tensors: Any, dim: int = 0) -> Any:
    """Selected rows of several masks, or plain ones, below each other; plain rows beside selected
    ones.
    """
    chosen = next(x for x in tensors if isinstance(x, Selected))
    if dim % chosen.rows.ndim:
        given = [_of_each(x, group) for x in tensors]
        return None if given == [*tensors] else apply(torch.cat, (given, dim), {})
    if any(x.ndim != chosen.rows.ndim for x in tensors):
        return None
    if (joined := joined_parts(tensors)) is not None:
        return joined
    rows = [x.rows if isinstance(x, Selected) else x for x in tensors]
    valid = [
        x.group.valid
        if isinstance(x, Selected)
        else torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        for x in tensors
    ]
    return selected(torch.cat(rows), group_of(torch.cat(valid)))


def _stack(group: Selections, tensors: Any, dim: int = 0) -> Any:
    given = [_of_each(x, group) for x in tensors]
    return None if given == [*tensors] else apply(torch.stack, (given, dim), {})


def _of_each(x: Any, group: Selections) -> Selected:
    return x if isinstance(x, Selected) else Selected(row_of_each(x, group), group)


def _squeeze(group: Selections, x: Any, *dims: Any) -> Any:
    if dims or x.rows.shape[0] == 1:
        return None
    claim = "the mask does not select one row alone, whose dim squeeze() drops"
    assume(group.valid.sum() != 1, claim)
    ones = tuple(d for d, size in enumerate(x.rows.shape) if d and size == 1)
    return Selected(x.rows.squeeze(ones), group, x.below)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "mean": _mean,
    "sum": _sum,
    "batchmean": _mean_over_rows,
}  # "none" is a function of each row


def _loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of each row or element, reduced over the selected rows."""

    def of(group: Selections, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        if reduction not in _REDUCTIONS:
            return None
        each = apply(function, args, {**kwargs, "reduction": "none"})
        return _REDUCTIONS[reduction](group, each)

    return of


def _cross_entropy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of classes: rows that are not selected get the class ``ignore_index``."""

    def of(group: Selections, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if args or not (isinstance(input, Selected) and isinstance(target, Selected)):
            return None
        if target.is_floating_point():
            return _loss(function)(group, input, target, **kwargs)
        if kwargs.get("reduction", "mean") == "none":
            return None
        ignored = kwargs.get("ignore_index", -100)
        return function(input.rows, _filled(target, ignored), **kwargs)

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
        rows = _filled(x, least if not floats else math.copysign(math.inf, least))
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


_OF_DIMS = {
    "var": _var,
    "std": _std,
    **{name: _softmax(name) for name in ("softmax", "log_softmax")},
    "logsumexp": _over_filled("logsumexp", -math.inf),
    "prod": _over_filled("prod", 1),
    "any": _over_filled("any", 0),
    "all": _over_filled("all", 1),
    "count_nonzero": _count_nonzero,
    "nansum": _over_filled("nansum", 0),
    "nanmean": _over_filled("nanmean", math.nan),
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
        **dict.fromkeys(JOINING, _cat),
        "stack": _stack,
        "squeeze": _squeeze,
        **{name: _norm(name) for name in ("norm", "linalg_norm", "linalg_vector_norm")},
        "median": _quantile("nanmedian"),
        "quantile": _quantile("nanquantile"),
        **{name: _recurrent(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
        "index_select": _index_select,
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
                F.cosine_embedding_loss,
                F.poisson_nll_loss,
                F.hinge_embedding_loss,
                F.margin_ranking_loss,
                F.multi_margin_loss,
                F.multilabel_margin_loss,
                F.multilabel_soft_margin_loss,
                F.soft_margin_loss,
                F.triplet_margin_loss,
            )
        },
        "cross_entropy": _cross_entropy(F.cross_entropy),
        "nll_loss": _cross_entropy(F.nll_loss),
    }
)
