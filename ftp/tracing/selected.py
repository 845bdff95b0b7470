"""Rows that a mask selects, while a program is traced: ``x[mask]`` and ``torch.where(mask)`` have
shapes that depend on values, which a trace does not have.

A `Selected` holds all rows: each row that the mask leaves out is a copy of a selected row, so that
no function can fail, or give inf or nan, on such a row alone. A function that acts on each row by
itself gives a `Selected` again. A sum, a mean or a loss counts the selected rows only; a write back
``x[mask] = rows`` leaves the other rows as they were. Every other function is refused.

Above 450 lines: the functions that take selected rows are one table, each with its condition.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ftp.errors import TraceError
from ftp.ops.assume import assume
from ftp.source import user_line
from ftp.tracing.packed_sequences import BatchSizes, packed_steps, padded, recurrent
from ftp.tracing.same_values import holds_same, is_same_along_last
from ftp.tracing.selected_places import put


@dataclass(frozen=True, eq=False)
class Selections:
    """Selections by one mask.

    Attributes:
        mask: as the function gave it.
        valid: the same, flat.
        first: the index of the first selected row, and whether there is one.
        line: the user's line that selects.
    """

    mask: Tensor
    valid: Tensor
    first: tuple[Tensor, Tensor]
    line: str


class Selected:
    """The selected rows of a tensor, of an unknown number; ``rows`` has all, ``(N, ...)``."""

    def __init__(self, rows: Tensor, group: Selections, below: int | None = None):
        self.rows, self.group = rows, group
        self.below = below  # for indices: known to be in [0, below)

    def refused_as(self, name: str) -> str:
        """The message that the function cannot return a selection."""
        line = self.group.line
        return (
            f"{name} gives a shape that depends on values{f' at {line}' if line else ''}: it is the"
            " rows that a mask selects, and a program has fixed shapes. Return their sum or mean,"
            " or torch.where(mask, x, 0)."
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return apply(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "ndim", "is_cuda", "layout", "requires_grad"):
            return getattr(self.rows, name)
        if name == "shape":
            return _ShapeOfSelection(self.rows.shape)
        method = getattr(Tensor, name, None)
        if method is None or name.startswith("__"):
            raise AttributeError(name)
        if not callable(method):
            raise _refused(name)
        return lambda *args, **kwargs: apply(method, (self, *args), kwargs)

    def dim(self) -> int:
        return self.rows.ndim

    def size(self, dim: int | None = None) -> Any:
        return (
            _ShapeOfSelection(self.rows.shape)
            if dim is None
            else _ShapeOfSelection(self.rows.shape)[dim]
        )

    def __getitem__(self, key: Any) -> Any:
        return apply(Tensor.__getitem__, (self, key), {})

    def __len__(self) -> int:
        raise _refused("len()")

    def __iter__(self) -> Any:
        raise _refused("a loop over rows")

    def __bool__(self) -> bool:
        raise _refused("bool()")


class _ShapeOfSelection:
    """The shape of a selection: all sizes but the first."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes

    def __getitem__(self, at: Any) -> Any:
        places = range(len(self._sizes))[at]
        if (0 in places) if isinstance(places, range) else places == 0:
            raise _refused("the number of selected rows")
        return tuple(self._sizes)[at]

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Any:
        raise _refused("the number of selected rows")


def _binary(name: str, swapped: bool = False) -> Any:
    function = getattr(torch, name)
    if swapped:
        return lambda self, other: apply(function, (other, self), {})
    return lambda self, *others: apply(function, (self, *others), {})


for _sign, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow", "matmul": "matmul",
    "floordiv": "floor_divide", "mod": "remainder",
}.items():  # fmt: skip
    setattr(Selected, f"__{_sign}__", _binary(_name))
    setattr(Selected, f"__r{_sign}__", _binary(_name, swapped=True))
for _sign, _name in {
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "neg": "neg",
    "abs": "abs", "invert": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or",
}.items():  # fmt: skip
    setattr(Selected, f"__{_sign}__", _binary(_name))
Selected.__hash__ = object.__hash__  # type: ignore[method-assign]


def group_of(mask: Tensor) -> Selections:
    valid = mask.reshape(-1).clone()  # the function may change its mask later
    return Selections(mask, valid, (valid.to(torch.int64).argmax(0), valid.any()), user_line())


def select(x: Tensor, group: Selections) -> Selected:
    """``x[mask]``; the mask has ``x``'s first dims."""
    return _selected(x.reshape(group.valid.numel(), *x.shape[group.mask.ndim :]), group)


def _selected(flat: Tensor, group: Selections) -> Selected:
    """The valid rows; a copy of the first one in the place of each other row."""
    safe = _unless_none(flat.detach().index_select(0, group.first[0].reshape(1)), group)
    return Selected(torch.where(_beside(group.valid, flat), flat, safe), group)


def _unless_none(rows: Tensor, group: Selections) -> Tensor:
    """The rows if the mask selects any; else ones, at which most functions are smooth."""
    floats = rows.dtype.is_floating_point or rows.dtype.is_complex
    spare = torch.full((), 0.5 if floats else 0, dtype=rows.dtype, device=rows.device)
    return torch.where(group.first[1], rows, spare)


def places(group: Selections) -> tuple[Selected, ...]:
    """``torch.where(mask)``: the indices of each dim."""
    own = torch.arange(group.valid.numel(), device=group.valid.device)
    numbers = torch.where(group.valid, own, group.first[0])
    found, below = [], group.valid.numel()
    for size in group.mask.shape:
        below = below // size if size else 0
        found.append(Selected((numbers // below) % size if size else numbers, group, size))
    return tuple(found)


def _stacked(found: Sequence[Selected], group: Selections) -> Selected:
    """``torch.nonzero(mask)``: a row of indices for each place."""
    return Selected(torch.stack([x.rows for x in found], 1), group, max(group.mask.shape))


def write(x: Tensor, group: Selections, value: Selected) -> Tensor:
    """``x`` after ``x[mask] = value``."""
    flat = x.reshape(group.valid.numel(), *x.shape[group.mask.ndim :])
    rows = value.rows.to(x.dtype)
    return torch.where(_beside(group.valid, flat), rows, flat).reshape(x.shape)


_PACK: Any = torch._VF._pack_padded_sequence
SELECTING = frozenset(
    (
        _PACK,
        Tensor.__getitem__,
        Tensor.masked_select,
        Tensor.nonzero,
        Tensor.argwhere,
        torch.argwhere,
        torch.masked_select,
        torch.nonzero,
        torch.where,
    )
)


def selection(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The selection that a call on plain tensors makes (``x[mask]``, ``masked_select``, ...); None
    for a call that selects nothing.
    """
    if func is _PACK:
        x, sizes = packed_steps(*args)
        return select(x, group_of(sizes.kept)), sizes
    if func is Tensor.__getitem__:
        return select(args[0], group_of(args[1])) if is_selection(args[1], args[0]) else None
    if func in (torch.masked_select, Tensor.masked_select) and len(args) == 2 and not kwargs:
        x, mask = args
        return select(x, group_of(mask)) if is_selection(mask, x) and x.ndim == mask.ndim else None
    if len(args) == 1 and args[0].ndim and func in _NONZERO and set(kwargs) <= {"as_tuple"}:
        group = group_of(args[0] if args[0].dtype is torch.bool else args[0] != 0)
        found = places(group)
        return found if func is torch.where or kwargs.get("as_tuple") else _stacked(found, group)
    return None


_NONZERO = (torch.where, torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)


def is_selection(key: Any, x: Any) -> bool:
    """Whether ``x[key]`` selects by one mask of its first dims."""
    return (
        isinstance(key, Tensor)
        and key.dtype is torch.bool
        and 0 < key.ndim <= x.ndim
        and key.shape == x.shape[: key.ndim]
    )


def apply(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of torch on selections.

    Raises:
        TraceError: a function other than one of each row, a reduction over rows, or a write back.
    """
    name = getattr(func, "__name__", str(func))
    given = [a for a in _flat((args, kwargs)) if isinstance(a, Selected)]
    if name in _OF_DTYPE:
        return func(given[0].rows)
    group = given[0].group
    others = (x.group.mask for x in given if x.group is not group)
    if not all(holds_same(mask, group.mask) for mask in others):
        raise _refused(f"{name} of rows that different masks select", as_it_is=True)
    rows = given[0].rows
    if name == "__setitem__" and (put := _put(group, *args)) is not None:
        return args[0].copy_(put)
    if name == "__setitem__":
        x, key, value = args
        if isinstance(x, Selected) or not is_selection(key, x) or not holds_same(key, group.mask):
            raise _refused("a write but to the places of the same mask", as_it_is=True)
        return x.copy_(write(x, group, value))
    if name in _REDUCED:
        reduced = _REDUCED[name](group, *args, **kwargs)
        if reduced is not None:
            return reduced
    if name.removesuffix("_") in _POINTWISE and name not in _POINTWISE:
        return _in_place(func, name.removesuffix("_"), args, kwargs)
    if name not in _POINTWISE and not (name in _ALONG and _ALONG[name](rows.ndim, args, kwargs)):
        raise _refused(name)
    plain_args, plain_kwargs = _replaced((list(args), dict(kwargs)))
    if name in _POINTWISE:
        if len({x.rows.ndim for x in given}) > 1:
            raise _refused(f"{name} of selected rows that differ in their number of dims", True)
        for other in _flat((args, kwargs)):
            if isinstance(other, Tensor):
                _check_plain(other, rows)
    out = func(*plain_args, **plain_kwargs)
    if name == "__getitem__" and isinstance(args[0], Tensor):
        out = _unless_none(out, group)
    if isinstance(out, tuple | list):
        return type(out)([_wrapped(o, group, name) for o in out])
    made = _wrapped(out, group, name)
    made.below = given[0].below if name in _SAME_VALUES else None
    return made


def _in_place(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Selected:
    """A pointwise function that writes to selected rows, which are a copy."""
    x, method = args[0], getattr(Tensor, name, None)
    if not isinstance(x, Selected) or method is None or not x.rows.is_floating_point():
        raise _refused(f"{name}_")  # of indices too: they are known to be in range
    # The gradient may read the operand as it was.
    x.rows.copy_(apply(method, (Selected(x.rows.clone(), x.group), *args[1:]), kwargs).rows)
    return x


def _wrapped(out: Any, group: Selections, name: str) -> Selected:
    if not isinstance(out, Tensor) or not out.ndim or out.shape[0] != group.valid.numel():
        raise _refused(name)
    return Selected(out, group)


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _flat(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _flat(value)]
    return [tree]


def _replaced(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _replaced(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_replaced(value) for value in tree)
    return tree.rows if isinstance(tree, Selected) else tree


def _check_plain(other: Tensor, rows: Tensor) -> None:
    """Refuse a plain operand that is not broadcast over the rows of the selection beside it."""
    if other.ndim >= rows.ndim and other.shape[0] != 1:
        raise _refused(f"a tensor of shape {tuple(other.shape)} beside selected rows", True)


def _beside(valid: Tensor, rows: Tensor) -> Tensor:
    return valid.reshape(-1, *(1,) * (rows.ndim - 1))


def _zeroed(value: Selected) -> Tensor:
    zero = torch.zeros((), dtype=value.rows.dtype, device=value.rows.device)
    return torch.where(_beside(value.group.valid, value.rows), value.rows, zero)


def _over_rows(ndim: int, dim: Any) -> bool:
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return any(d % ndim == 0 for d in dims)


def _sum(
    group: Selections, x: Selected, dim: Any = None, keepdim: bool = False, **rest: Any
) -> Any:
    if set(rest) - {"dtype"} or (dim is not None and not _over_rows(x.rows.ndim, dim)):
        return None
    return torch.sum(_zeroed(x), *(() if dim is None else (dim, keepdim)), **rest)


def _mean(
    group: Selections, x: Selected, dim: Any = None, keepdim: bool = False, **rest: Any
) -> Any:
    total = _sum(group, x, dim, keepdim, **rest)
    if total is None:
        return None
    dims = range(x.rows.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    rest_of = math.prod(x.rows.shape[d] for d in dims if d % x.rows.ndim)
    return total / (group.valid.sum() * rest_of)


def _loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of pairs of elements, reduced over the selected rows."""

    def of(group: Selections, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.get("reduction", "mean")
        if args or not (isinstance(input, Selected) and isinstance(target, Selected)):
            return None
        if kwargs.get("weight") is not None or reduction not in ("mean", "sum", "none"):
            return None
        if input.rows.shape != target.rows.shape:
            return None
        each = function(input.rows, target.rows, **{**kwargs, "reduction": "none"})
        value = _wrapped(each, group, function.__name__)
        reduce = {"mean": _mean, "sum": _sum}.get(reduction)
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
        kept = torch.where(_beside(group.valid, target.rows), target.rows, aside)
        return function(input.rows, kept, **kwargs)

    return of


def _index_add(
    group: Selections, x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1
) -> Any:
    if isinstance(x, Selected) or not isinstance(index, Selected) or dim % x.ndim:
        return None
    if not isinstance(source, Selected):
        return None
    return torch.index_add(x, dim, index.rows, _zeroed(source).to(x.dtype), alpha=alpha)


def _are_packed(data: Any, sizes: Any, group: Selections) -> bool:
    """Whether a function takes a packed sequence, whose rows are those of its batch sizes."""
    if not (isinstance(data, Selected) and isinstance(sizes, BatchSizes)):
        return False
    if not holds_same(sizes.kept, group.mask):
        raise _refused("a PackedSequence of rows that another mask selects", as_it_is=True)
    return True


def _put(
    group: Selections, x: Any, key: Any, value: Any, accumulate: bool = False
) -> Tensor | None:
    """``x`` after ``x[i, j] = value`` at selected indices, which do not repeat."""
    keys = key if isinstance(key, tuple | list) else (key,)
    if isinstance(x, Selected) or len(keys) > x.ndim:
        return None
    if not all(isinstance(k, Selected) and k.rows.ndim == 1 for k in keys):
        return None
    if any(k.rows.dtype is torch.bool for k in keys):
        return None
    dims = 1 + x.ndim - len(keys)
    if isinstance(value, Selected) and value.rows.ndim != dims:
        raise _refused("a write of selected rows of another number of dims", as_it_is=True)
    if isinstance(value, Tensor) and value.ndim >= dims and value.shape[0] != 1:
        raise _refused(f"a write of a tensor of shape {tuple(value.shape)} to selected rows", True)
    sizes = x.shape[: len(keys)]
    for k, size in zip(keys, sizes, strict=True):
        if k.below is None or k.below > size:
            assume(lambda k=k, size=size: _are_in(k, size), f"indices are in [-{size}, {size})")
    at = [k.rows % size if size else k.rows for k, size in zip(keys, sizes, strict=True)]
    rows = value.rows if isinstance(value, Selected) else value
    return put(x, at, rows, group.valid, accumulate)


def _are_in(key: Selected, size: int) -> Tensor:
    index = key.rows.detach()
    return (index >= -size) & (index < size) | ~key.group.valid


def _index_put(
    group: Selections, x: Any, indices: Any, values: Any, accumulate: bool = False
) -> Any:
    return _put(group, x, indices, values, accumulate)


def _index_copy(group: Selections, x: Any, dim: int, index: Any, source: Any) -> Any:
    return None if isinstance(x, Selected) or dim % x.ndim else _put(group, x, index, source)


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The form of ``function`` that writes to its first operand."""

    def of(group: Selections, x: Any, *args: Any, **kwargs: Any) -> Any:
        new = function(group, x, *args, **kwargs)
        return None if new is None else x.copy_(new)

    return of


def _index_select(group: Selections, x: Any, dim: int, index: Any) -> Any:
    if isinstance(x, Selected) or dim % x.ndim:
        return None
    return apply(Tensor.__getitem__, (x, index), {})


def _extremum(name: str, fill: Callable[[Any], float]) -> Callable[..., Any]:
    """The largest or least over rows: rows that are not selected are no candidates."""

    def of(group: Selections, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Selected | Tensor) or not isinstance(x, Selected):
            both = {"max": torch.maximum, "min": torch.minimum}.get(name)
            return apply(both, (x, dim), {}) if both else None
        is_full = dim is None or (isinstance(dim, tuple | list) and not dim)
        if not is_full and (not _over_rows(x.rows.ndim, dim) or name in ("max", "min")):
            return None
        if x.rows.dtype is torch.bool or x.rows.dtype.is_complex:
            return None
        floats = x.rows.dtype.is_floating_point
        least = fill(torch.finfo(x.rows.dtype) if floats else torch.iinfo(x.rows.dtype))
        aside = x.rows.new_full((), least if not floats else math.copysign(math.inf, least))
        rows = torch.where(_beside(group.valid, x.rows), x.rows, aside)
        function = getattr(torch, name)
        return function(rows) if is_full else function(rows, dim, keepdim)

    return of


def _rows_of_elements(group: Selections, x: Any, *sizes: Any) -> Any:
    """``x[mask].view(-1, n)`` where all n elements of a row are selected, or none of them."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    mask = group.mask
    if not isinstance(x, Selected) or x.rows.ndim != 1 or mask.ndim < 2:
        return None
    if sizes != (-1, mask.shape[-1]) or not is_same_along_last(mask):
        return None
    return _selected(x.rows.reshape(-1, mask.shape[-1]), group_of(mask.select(-1, 0)))


def _padded(group: Selections, data: Any, sizes: Any, *args: Any) -> Any:
    if not _are_packed(data, sizes, group):
        return None
    return padded(data.rows, group.valid, sizes, *args)


def _recurrent(name: str) -> Callable[..., Any]:
    def of(group: Selections, data: Any, sizes: Any, *args: Any) -> Any:
        if not _are_packed(data, sizes, group):
            return None
        rows, *states = recurrent(name, data.rows, group.valid, sizes, *args)
        return (_selected(rows, group), *states)

    return of


_REDUCED: dict[str, Callable[..., Any]] = {
    "_pad_packed_sequence": _padded,
    **dict.fromkeys(("view", "reshape"), _rows_of_elements),
    **{name: _recurrent(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "sum": _sum,
    "mean": _mean,
    "index_add": _index_add,
    "index_add_": _written(_index_add),
    "index_copy": _index_copy,
    "index_copy_": _written(_index_copy),
    "index_put": _index_put,
    "index_put_": _written(_index_put),
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
        )
    },
    "cross_entropy": _cross_entropy(F.cross_entropy),
    "nll_loss": _cross_entropy(F.nll_loss),
}

_NAMES = """
    abs add sub subtract rsub mul multiply div divide true_divide pow neg negative exp exp2 expm1
    log log2 log10 log1p sqrt rsqrt square reciprocal relu relu6 gelu silu mish elu celu selu
    leaky_relu softplus softsign sigmoid logsigmoid hardsigmoid hardswish tanh hardtanh sin cos tan
    asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc erfinv lgamma digamma sign sgn clamp
    clip clamp_min clamp_max maximum minimum fmax fmin where eq ne lt le gt ge logical_and
    logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not isnan isfinite
    isinf isclose nan_to_num float double half bfloat16 long int bool to type type_as detach clone
    contiguous floor ceil round trunc frac fmod remainder floor_divide hypot logit logaddexp lerp
    addcmul addcdiv xlogy
"""
_POINTWISE = frozenset(_NAMES.split())
_SAME_VALUES = ("view", "reshape", "flatten", "squeeze", "detach", "clone", "contiguous", "long")
_OF_DTYPE = ("is_floating_point", "is_complex", "is_signed", "element_size", "get_device")


def _keeps_rows(at: int, default: Any = None) -> Callable[..., bool]:
    """For a function along the dim in argument ``at``: whether this is not the dim of rows."""

    def check(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        dim = args[at] if len(args) > at else kwargs.get("dim", default)
        return dim is not None and not _over_rows(ndim, dim)

    return check


def _features(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The selection is the first operand, with its features behind the rows."""
    others = _flat((args[1:], kwargs))
    return (
        isinstance(args[0], Selected)
        and ndim > 1
        and not any(isinstance(a, Selected) for a in others)
        and all(a.ndim <= 2 for a in others if isinstance(a, Tensor))
    )


def _normalized(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
    return _features(ndim, args, kwargs) and len(shape) < ndim


def _lookup(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return isinstance(args[0], Selected) and isinstance(args[1], Tensor)


def _same_rows(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``x.reshape(-1, ...)`` changes the shape of each row alone."""
    x, *sizes = args
    sizes = [*sizes[0]] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    is_first = sizes[:1] == [-1] and all(isinstance(s, int) and s >= 0 for s in sizes[1:])
    return is_first and not kwargs and math.prod(sizes[1:]) == math.prod(x.rows.shape[1:])


def _item(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``x[:, ...]`` of a selection, or ``x[i, j]`` at selected indices."""
    x, key = args
    keys = key if isinstance(key, tuple) else (key,)
    if isinstance(x, Selected):
        lists = [k for k in keys if isinstance(k, list)]
        simple = all(k is None or isinstance(k, int | slice | list) for k in keys[1:])
        simple = simple and len(lists) < 2 and all(isinstance(i, int) for k in lists for i in k)
        all_rows = isinstance(keys[0], slice) and keys[0] == slice(None)
        return simple and (all_rows or (keys[0] is Ellipsis and len(keys) <= ndim))
    if any(k is Ellipsis or isinstance(k, Tensor | int) for k in keys):
        return False
    chosen = [i for i, k in enumerate(keys) if isinstance(k, Selected)]
    together = chosen == list(range(len(chosen)))
    return together and all(
        keys[i].rows.ndim == 1 and keys[i].rows.dtype is not torch.bool for i in chosen
    )


def _joined(is_new: int) -> Callable[..., bool]:
    """Of ``cat`` and ``stack``: whether all operands are selected, and joined beside the rows."""

    def check(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return all(isinstance(x, Selected) for x in args[0]) and dim % (ndim + is_new) > 0

    return check


def _squeezed(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if len(args) == 1 and not kwargs and args[0].rows.shape[0] != 1:
        count = args[0].group.valid.sum()
        assume(count != 1, "the mask does not select one row alone, whose dim squeeze() drops")
        return True
    return _keeps_rows(1)(ndim, args, kwargs)


def _gathered(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``x.gather(dim, index)`` of rows, by an index of each."""
    if kwargs or len(args) != 3 or not isinstance(args[0], Selected):
        return False
    is_index = isinstance(args[2], Selected) and args[2].rows.ndim == ndim
    return is_index and args[1] % ndim > 0


def _flattened(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``flatten`` of the dims beside the rows, or of rows of one element."""
    start = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    return start % ndim > 0 or math.prod(args[0].rows.shape[1:]) == 1


def _of_first(check: Callable[..., bool]) -> Callable[..., bool]:
    """Whether the first operand alone is selected, and ``check`` holds."""

    def of(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        others = _flat((args[1:], kwargs))
        alone = not any(isinstance(a, Selected | Tensor) for a in others)
        return alone and isinstance(args[0], Selected) and check(ndim, args, kwargs)

    return of


_ALONG: dict[str, Callable[[int, Sequence[Any], Mapping[str, Any]], bool]] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "argmax", "argmin"), _keeps_rows(1)),
    **dict.fromkeys(("max", "min"), _of_first(_keeps_rows(1))),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cumsum"), _keeps_rows(1)),
    **dict.fromkeys(("chunk", "split"), _keeps_rows(2)),
    **dict.fromkeys(("linear", "matmul", "mm"), _features),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
    "embedding": _lookup,
    "unsqueeze": lambda ndim, args, kwargs: len(args) == 2 and args[1] % (ndim + 1) > 0,
    "squeeze": _squeezed,
    **dict.fromkeys(("view", "reshape"), _same_rows),
    **dict.fromkeys(("cat", "concat", "concatenate"), _joined(0)),
    "stack": _joined(1),
    "gather": _gathered,
    "flatten": _of_first(_flattened),
    "unflatten": _of_first(_keeps_rows(1)),
    "dropout": _of_first(lambda ndim, args, kwargs: True),
    "normalize": _of_first(_keeps_rows(2, 1)),
    **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm"), _of_first(_keeps_rows(2))),
    **dict.fromkeys(("var", "std"), _of_first(_keeps_rows(1))),
    "topk": _of_first(_keeps_rows(2, -1)),
    **dict.fromkeys(("sort", "argsort"), _of_first(_keeps_rows(1, -1))),
    "__getitem__": _item,
}


def _refused(what: str, as_it_is: bool = False) -> TraceError:
    line = user_line()
    does = what if as_it_is else f"{what}, which is asked of rows that a mask selects,"
    return TraceError(
        f"{does} depends on values{f' at {line}' if line else ''}: a program has fixed shapes."
        "\n  Selected rows may go through functions of each row, and end in a sum, a mean, a loss,"
        " x[mask] = rows or index_add. Else use torch.where(mask, x, 0) or weights, or"
        " ftp.static.masked_select and nonzero, which take a size."
    )
