"""Trace ``x[mask]`` and ``torch.where(mask)``, whose shapes depend on values: a program has fixed
shapes, so a `Selected` keeps a row for every element of the mask.

A row that the mask does not select is a copy of the first selected row, so that a function which
succeeds on the selected rows also succeeds on all rows.

- A function that acts on each row by itself returns a `Selected`; ``row_dims.py`` finds out
  whether a function does.
- A sum, a mean or a loss counts the selected rows only (``reductions.py``).
- A write ``x[mask] = rows`` keeps the unselected rows of ``x`` (``writes.py``).
- Every other function is refused.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ftp.errors import TraceError
from ftp.tracing.captured_tensors import node_of
from ftp.tracing.data_dependent.guards import asking_frame, asks_whether_any
from ftp.tracing.data_dependent.traced_number import TracedNumber, without_numbers
from ftp.tracing.data_dependent.values_read import read_count
from ftp.tracing.nested_arguments import flat, map_leaves
from ftp.tracing.same_values import holds_same
from ftp.tracing.selected_rows.class_asked import is_asked_for_tensor
from ftp.tracing.selected_rows.group import (
    SelectionGroup,
    ShapeOfSelection,
    broadcast_mask,
    group_of,
    spread_rows,
)
from ftp.tracing.selected_rows.no_rows import finite, is_singular_call, unless_none
from ftp.tracing.selected_rows.refused import number_refused, refused
from ftp.tracing.selected_rows.row_dims import RowDim, RowTrial, try_rows
from ftp.tracing.selected_rows.row_functions import (
    CONCATENATING,
    FACTORIES,
    FILLING,
    LOOKUPS,
    MATMULS,
    OF_DTYPE,
    POINTWISE,
    SAME_VALUES,
    SIZED,
    VIEWING,
)

# Functions of all rows, by name; the files named above fill the table. Each is called with
# (group, *args, **kwargs), and returns None if this call acts on each row by itself.
OF_ALL_ROWS: dict[str, Callable[..., Any]] = {}
# Functions of ``OF_ALL_ROWS`` that accept selections whose rows are along any dim.
OF_ANY_DIM = {"__setitem__"}
# Functions of ``OF_ALL_ROWS`` that are called with (x, dim, ...): a selection whose rows are along
# another dim than the first is moved to the first one for the call.
OF_DIMS: set[str] = set()


class Selected:
    """The selected rows of a tensor: a tensor to the user's function, of an unknown number of rows.

    Attributes:
        rows: ``(N, ...)``, a row for each of the mask's N elements, selected or not.
        row_dim: the dim that holds the rows in the shape that the user's function sees.
        upper_bound: if the rows are indices in [0, upper_bound), this bound; else None.
        base: for ``x[start:stop]``, a view in torch: all of ``x``, to which writes go; else None.
        is_view_copy: whether torch gives a view of a ``base`` where this selection is a copy.
    """

    base: Tensor | None = None
    is_view_copy = False

    def __init__(
        self,
        rows: Tensor,
        group: SelectionGroup,
        upper_bound: int | None = None,
        row_dim: int = 0,
    ):
        self._rows, self.group = rows, group
        self.upper_bound, self.row_dim = upper_bound, row_dim

    @classmethod
    def of_view(cls, base: Tensor, group: SelectionGroup, row_dim: int) -> "Selected":
        view = cls(base, group, row_dim=row_dim)
        view.base = base
        return view

    @property
    def __class__(self) -> type:
        return Tensor if is_asked_for_tensor() else Selected

    @property
    def rows(self) -> Tensor:
        if self.base is None:
            return self._rows
        # Selected anew for each read, so that the rows show all writes to the base so far.
        rows = select(self.base.movedim(self.row_dim, 0), self.group).rows
        if (node := node_of(rows)) is not None:
            node.meta["slice_of"] = node_of(self.base)
        return rows

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
            return self.size()
        if name in ("T", "mT"):
            return apply(Tensor.transpose, (self, 0 if name == "T" else -2, -1), {})
        method = getattr(Tensor, name, None)
        if method is None or name.startswith("__"):
            raise AttributeError(name)
        if not callable(method):
            raise refused(name)
        return lambda *args, **kwargs: apply(method, (self, *args), kwargs)

    def dim(self) -> int:
        return self.rows.ndim

    def size(self, dim: int | None = None) -> Any:
        rows, *sizes = self.rows.shape
        sizes = (*sizes[: self.row_dim], rows, *sizes[self.row_dim :])
        shape = ShapeOfSelection(sizes, self.row_dim, self.group)
        return shape if dim is None else shape[dim]

    def numel(self) -> TracedNumber:
        count, of_each = self.group.count(), math.prod(self.rows.shape[1:])
        return count if of_each == 1 else TracedNumber(count.value * of_each)

    def __getitem__(self, key: Any) -> Any:
        return apply(Tensor.__getitem__, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        apply(Tensor.__setitem__, (self, key, value), {})

    def __len__(self) -> int:
        if self.row_dim:
            return self.size(0)
        if asks_whether_any(asking_frame()):
            return int(bool(self.group.valid.any()))
        count = read_count(self.group.mask, self.group.valid.sum)
        if count is not None:
            return count
        raise number_refused(True, "len()")

    def __iter__(self) -> Any:
        if self.row_dim:
            return iter(apply(Tensor.unbind, (self, 0), {}))
        raise refused(
            "a loop over rows",
            instead="Loop over all places (for e in range(n)): where none is selected, sums are"
            " zero, and writes write nothing.",
        )

    def __bool__(self) -> bool:
        raise refused("bool()")


def _different_masks(name: str) -> TraceError:
    return refused(f"{name} of rows that different masks select", as_it_is=True)


def select(x: Tensor, group: SelectionGroup) -> Selected:
    """``x[mask]``; the mask has the shape of ``x``'s first dims."""
    return selected(x.reshape(group.valid.numel(), *x.shape[group.mask.ndim :]), group)


def selected(rows: Tensor, group: SelectionGroup) -> Selected:
    """The selection of rows ``(N, ...)``: the first selected row replaces every unselected one."""
    if not rows.shape[0]:
        return Selected(rows.clone(), group)
    first = unless_none(rows.detach().index_select(0, group.first.reshape(1)), group.is_any)
    return Selected(torch.where(broadcast_mask(group.valid, rows), rows, first), group)


def apply(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch on selections.

    Raises:
        TraceError: the function neither acts on each row by itself, nor reduces rows, nor writes
            them back.
    """
    name = getattr(func, "__name__", str(func))
    given = [a for a in flat((args, kwargs)) if isinstance(a, Selected)]
    group = given[0].group
    if name in OF_DTYPE:
        return func(given[0].rows)
    if name in FACTORIES:
        return OF_ALL_ROWS[name](group, *args, **kwargs)
    if name in SIZED:
        args, kwargs = _infer_row_count([*args, *kwargs.values()], group), {}
    args, kwargs = without_numbers(args, kwargs)
    if name in OF_ALL_ROWS:
        args, kwargs = _by_torchs_names(args, kwargs)
    is_one_mask = all(x.group is group or holds_same(x.group.mask, group.mask) for x in given)
    if not is_one_mask and name not in CONCATENATING:
        raise _different_masks(name)
    if (result := _across_rows(name, given, args, kwargs)) is not None:
        return result
    if not is_one_mask:
        raise _different_masks(name)
    if name.endswith("_") and not name.endswith("__"):
        return _in_place(func, name.removesuffix("_"), args, kwargs)
    return _row_by_row(func, name, given, args, kwargs)


def _counted(x: Selected) -> Any:
    """The selected rows as a plain tensor, if the trace may read their number."""
    group = x.group
    count = read_count(group.mask, group.valid.sum)
    if count is None or x.base is not None:
        return x
    at = torch.nonzero_static(group.valid, size=count)[:, 0]
    return _move_rows(x.rows.index_select(0, at), x.row_dim)


def all_counted(found: Any) -> Any:
    """Nested results with each selection's rows as a plain tensor."""
    if isinstance(found, list | tuple):
        return type(found)(map(all_counted, found))
    return _counted(found) if isinstance(found, Selected) else found


def _by_torchs_names(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments without numpy's names for them, and ``input`` by its position."""
    kwargs = {_OF_NUMPY.get(name, name): x for name, x in kwargs.items()}
    return (args, kwargs) if args or "input" not in kwargs else ((kwargs.pop("input"),), kwargs)


_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


def _across_rows(
    name: str, given: Sequence[Selected], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The result of a function of all rows; None if this call acts on each row by itself."""
    if (function := OF_ALL_ROWS.get(name)) is None:
        return None
    if name in OF_ANY_DIM or not any(x.row_dim for x in given):
        return function(given[0].group, *args, **kwargs)
    if name in OF_DIMS and isinstance(args[0], Selected):
        return _with_rows_first(function, args[0], args[1:], kwargs)
    return None


def _row_by_row(
    func: Callable[..., Any],
    name: str,
    given: Sequence[Selected],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """The result of a function that acts on each row by itself, or that sums over rows."""
    trial = _row_trial(func, name, given, args, kwargs)
    if trial.is_sum and name in MATMULS:

        def filled(x: Any) -> Any:
            return _move_rows(fill_unselected(x, 0), x.row_dim) if isinstance(x, Selected) else x

        args, kwargs = map_leaves(filled, (list(args), dict(kwargs)))
        return func(*args, **kwargs)
    if trial.result is None:
        raise refused(name)
    group = given[0].group
    is_singular = any(is_singular_call(*op) for op in trial.ops)
    is_lookup = name in LOOKUPS and any(isinstance(a, Tensor) for a in args)

    def plain(x: Any) -> Any:
        if isinstance(x, Selected):
            rows = finite(x.rows, group.is_any, is_singular) if is_singular else x.rows
            return _move_rows(rows, x.row_dim)
        if not isinstance(x, Tensor):
            return x
        if _is_pointwise(name, given):
            return finite(_broadcast_or_spread(x, given[0].rows, group), group.is_any, is_singular)
        is_made_finite = x.is_floating_point() and not is_lookup
        return finite(x, group.is_any, is_singular) if is_made_finite else x

    args, kwargs = map_leaves(plain, (list(args), dict(kwargs)))
    out = func(*args, **kwargs)
    if is_singular or is_lookup:
        out = optree.tree_map(lambda x: unless_none(x, group.is_any), out)
    if isinstance(out, tuple | list):
        pairs = zip(out, trial.result, strict=True)
        return type(out)([_selection_of(o, rows, given, name) for o, rows in pairs])
    result = _selection_of(out, trial.result, given, name)
    result.upper_bound = given[0].upper_bound if name in SAME_VALUES else None
    return result


def _row_trial(
    func: Callable[..., Any],
    name: str,
    given: Sequence[Selected],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> RowTrial:
    """Which dim of the result holds the rows; pointwise functions are not tried."""
    if not _is_pointwise(name, given):
        return try_rows(func, args, kwargs, _rows_and_dim)
    if len({x.rows.ndim for x in given}) > 1:
        raise refused(f"{name} of selected rows that differ in their number of dims", True)
    return RowTrial(RowDim(0), [(name, args)])


def _rows_and_dim(x: Any) -> tuple[Tensor, int] | None:
    return (x.rows, x.row_dim) if isinstance(x, Selected) else None


def _is_pointwise(name: str, given: Sequence[Selected]) -> bool:
    return name in POINTWISE and not any(x.row_dim for x in given)


def _move_rows(rows: Tensor, dim: int) -> Tensor:
    return rows.movedim(0, dim) if dim else rows


def _with_rows_first(
    function: Callable[..., Any], x: Selected, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``function``, which reduces rows along dim 0, on rows along another dim."""
    dim, *rest = args if args else (None,)
    dim = kwargs.get("dim", dim)
    if not isinstance(dim, int | tuple | list | None) or isinstance(dim, bool):
        return None
    others = [d for d in range(x.ndim) if d != x.row_dim]
    moved_to = {d: 0 if d == x.row_dim else 1 + others.index(d) for d in range(x.ndim)}
    if dim is not None:
        is_one = isinstance(dim, int)
        dim = moved_to[dim % x.ndim] if is_one else [moved_to[d % x.ndim] for d in dim]
    named = {key: value for key, value in kwargs.items() if key != "dim"}
    given = () if dim is None else (dim, *rest)
    result = function(x.group, Selected(x.rows, x.group), *given, **named)
    if isinstance(result, Selected):
        return Selected(result.rows, result.group, row_dim=x.row_dim)
    return result if result is None or result.ndim < x.ndim else result.movedim(0, x.row_dim)


def _infer_row_count(args: Sequence[Any], group: SelectionGroup) -> list[Any]:
    """Replace the number of selected rows by -1 among the sizes of ``x.view(*sizes)``."""
    x, *sizes = args
    sizes = [*sizes[0]] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    is_row_count = [isinstance(s, TracedNumber) and s.is_of(group.mask) for s in sizes]
    if not any(is_row_count):
        return [*args]
    others = [s for s, is_count in zip(sizes, is_row_count, strict=True) if not is_count]
    if isinstance(x, Selected) and -1 in others:
        rest = math.prod(x.rows.shape[1:]) // (-math.prod(others) or 1)
        others = [rest if s == -1 else s for s in others]
    next_other = iter(others)
    return [x, *(-1 if is_count else next(next_other) for is_count in is_row_count)]


def _selection_of(out: Any, rows: Any, given: Sequence[Selected], name: str) -> Selected:
    """The result tensor ``out`` as a selection; ``rows`` is the `RowDim` that a trial found."""
    if not isinstance(rows, RowDim) or (rows.dim and rows.per_row > 1):
        raise refused(name)
    group = given[0].group
    if rows.per_row > 1:  # each row became several rows
        group = group_of(group.valid[:, None].expand(-1, rows.per_row))
    result = Selected(out.movedim(rows.dim, 0) if rows.dim else out, group, row_dim=rows.dim)
    has_base = any(x.base is not None or x.is_view_copy for x in given)
    result.is_view_copy = name in VIEWING and has_base
    return result


def _in_place(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Selected:
    """Call a method that writes to selected rows, by the method that returns new rows."""
    x, method = args[0], FILLING.get(name) or getattr(Tensor, name, None)
    is_writable = isinstance(x, Selected) and (not x.row_dim or x.base is not None)
    # Indices stay as they are, since their bound is known.
    if not is_writable or method is None or x.upper_bound is not None:
        raise refused(f"{name}_")
    # The gradient may read the operand's values before the write.
    before = Selected(x.rows.clone(), x.group, row_dim=x.row_dim)
    return write_rows(x, apply(method, (before, *args[1:]), kwargs))


def write_rows(x: Selected, new: Selected) -> Selected:
    """Write ``new`` to the rows of ``x``, and to the tensor that ``x`` is a view of."""
    if new.row_dim != x.row_dim or new.rows.shape != x.rows.shape:
        raise refused("a write of another shape")
    if x.is_view_copy:
        raise refused("a write to a view of a slice between values", as_it_is=True)
    if x.base is None:
        x.rows.copy_(new.rows)
    else:
        base = x.base.movedim(x.row_dim, 0)
        base.copy_(torch.where(broadcast_mask(x.group.valid, base), new.rows, base))
    return x


def _broadcast_or_spread(x: Tensor, rows: Tensor, group: SelectionGroup) -> Tensor:
    """A plain operand of a pointwise function, in a shape that broadcasts with all rows."""
    if x.ndim < rows.ndim or x.shape[0] == 1:
        return x
    if x.ndim > rows.ndim or x.shape[0] in (0, rows.shape[0]):
        raise refused(f"a tensor of shape {tuple(x.shape)} beside selected rows", True)
    return spread_rows(x, group)


def fill_unselected(x: Selected, value: float) -> Tensor:
    """The rows of ``x``, with ``value`` in place of those that are not selected."""
    fill = torch.full((), value, dtype=x.rows.dtype, device=x.rows.device)
    return torch.where(broadcast_mask(x.group.valid, x.rows), x.rows, fill)


def is_over_rows(ndim: int, dim: Any) -> bool:
    """Whether a reduction over ``dim`` of a tensor with rows along dim 0 joins rows."""
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return any(d % ndim == 0 for d in dims)
