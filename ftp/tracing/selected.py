"""Rows that a mask selects, while a program is traced: ``x[mask]`` and ``torch.where(mask)`` have
shapes that depend on values, which a trace does not have.

A `Selected` holds all rows: each row that the mask leaves out is a copy of a selected row, so that
no function can fail, or give inf or nan, on such a row alone. A function that acts on each row by
itself gives a `Selected` again (``row_dims.py`` finds out). A sum, a mean or a loss counts the
selected rows only (``selected_reductions.py``); a write back ``x[mask] = rows`` leaves the other
rows as they were (``selected_places.py``). Every other function is refused.
"""

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ftp.axis import is_inside
from ftp.errors import TraceError
from ftp.ops.assume import assume
from ftp.source import at_line, user_line
from ftp.tracing.captured_tensors import node_of
from ftp.tracing.guards import asks_whether_any
from ftp.tracing.no_rows import finite, is_singular_call, unless_none
from ftp.tracing.refused_rows import number_refused, refused
from ftp.tracing.row_dims import RowDim, RowTrial, try_rows
from ftp.tracing.row_functions import (
    FILLING,
    JOINING,
    LOOKUPS,
    MAKING,
    OF_DTYPE,
    POINTWISE,
    PRODUCTS,
    SAME_VALUES,
    SIZED,
    VIEWING,
)
from ftp.tracing.same_values import holds_same
from ftp.tracing.traced_number import TracedNumber, without_numbers

# Functions of all rows, by name; the files named above fill the table. Each takes (group, *args,
# **kwargs), and returns None where this call acts on each row alone.
OF_ALL_ROWS: dict[str, Callable[..., Any]] = {}
# Those of ``OF_ALL_ROWS`` that find the dim of the rows themselves.
OF_ANY_DIM = {"__setitem__"}
# Those of ``OF_ALL_ROWS`` that take (x, dim, ...), whichever dim holds the rows.
OF_DIMS: set[str] = set()


@dataclass(frozen=True, eq=False)
class Selections:
    """Selections by one mask.

    Attributes:
        mask: a copy.
        valid: the same, flat.
        first: the index of the first selected row, and whether there is one.
        line: the user's line that selects.
        span: of a part that ``x.split`` gives: where it starts and ends.
    """

    mask: Tensor
    valid: Tensor
    first: tuple[Tensor, Tensor]
    line: str
    span: tuple[Any, Any] | None = None

    def count(self) -> TracedNumber:
        return TracedNumber(self.valid.sum(), self.mask)


class Selected:
    """The selected rows of a tensor, of an unknown number; ``rows`` has all, ``(N, ...)``.

    Attributes:
        below: for indices: known to be in [0, below).
        at: the dim that the function sees them in.
        viewed: of ``x[start:stop]``, which is a view: ``x`` at all places, to which writes go.
        is_alias: whether it is a copy, where torch has a view of ``viewed``.
    """

    viewed: Tensor | None = None
    is_alias = False

    def __init__(self, rows: Tensor, group: Selections, below: int | None = None, at: int = 0):
        self._rows, self.group, self.below, self.at = rows, group, below, at

    @classmethod
    def of_view(cls, viewed: Tensor, group: Selections, at: int) -> "Selected":
        made = cls(viewed, group, at=at)
        made.viewed = viewed
        return made

    @property
    def rows(self) -> Tensor:
        if self.viewed is None:
            return self._rows
        rows = select(self.viewed.movedim(self.at, 0), self.group).rows  # as they are by now
        if (node := node_of(rows)) is not None:
            node.meta["span_of"] = node_of(self.viewed)
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
        sizes = (*sizes[: self.at], rows, *sizes[self.at :])
        shape = _ShapeOfSelection(sizes, self.at, self.group)
        return shape if dim is None else shape[dim]

    def numel(self) -> TracedNumber:
        count, of_each = self.group.count(), math.prod(self.rows.shape[1:])
        return count if of_each == 1 else TracedNumber(count.value * of_each)

    def __getitem__(self, key: Any) -> Any:
        return apply(Tensor.__getitem__, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        apply(Tensor.__setitem__, (self, key, value), {})

    def __len__(self) -> int:
        if self.at:
            return self.size(0)
        if asks_whether_any(sys._getframe(1)):
            return int(bool(self.group.valid.any()))
        raise number_refused(True, "len()")

    def __iter__(self) -> Any:
        if self.at:
            return iter(apply(Tensor.unbind, (self, 0), {}))
        raise refused(
            "a loop over rows",
            instead="Loop over all places (for e in range(n)): where none is selected, sums are"
            " zero, and writes write nothing.",
        )

    def __bool__(self) -> bool:
        raise refused("bool()")


def _different(name: str) -> TraceError:
    return refused(f"{name} of rows that different masks select", as_it_is=True)


class _ShapeOfSelection:
    """The shape of a selection: the dim of rows has a `TracedNumber`."""

    def __init__(self, sizes: Sequence[int], rows_at: int, group: Selections):
        self._sizes, self._rows_at, self._group = sizes, rows_at, group

    def _size(self, at: int) -> Any:
        return self._group.count() if at == self._rows_at else self._sizes[at]

    def __getitem__(self, at: Any) -> Any:
        places = range(len(self._sizes))[at]
        return tuple(self)[at] if isinstance(places, range) else self._size(places)

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Any:
        return map(self._size, range(len(self._sizes)))

    def __eq__(self, other: Any) -> Any:
        sizes = [self._sizes[:], other._sizes[:]] if isinstance(other, _ShapeOfSelection) else []
        is_alike = len({len(x) for x in sizes}) == 1 and self._rows_at == other._rows_at
        if is_alike and holds_same(other._group.mask, self._group.mask):
            return sizes[0] == sizes[1]
        raise number_refused(True, "a comparison of shapes")

    __hash__ = object.__hash__


def group_of(mask: Tensor, span: tuple[Any, Any] | None = None) -> Selections:
    mask = mask.clone()  # the function may change its own later
    valid = mask.reshape(-1)
    place = valid.to(torch.int64).argmax(0) if valid.shape[0] else valid.sum()
    first = place, valid.any()
    return Selections(mask, valid, first, user_line(), span)


def select(x: Tensor, group: Selections) -> Selected:
    """``x[mask]``; the mask has ``x``'s first dims."""
    return selected(x.reshape(group.valid.numel(), *x.shape[group.mask.ndim :]), group)


def selected(flat: Tensor, group: Selections) -> Selected:
    """The valid rows; a copy of the first one in the place of each other row."""
    if not flat.shape[0]:
        return Selected(flat.clone(), group)
    safe = unless_none(flat.detach().index_select(0, group.first[0].reshape(1)), group.first[1])
    return Selected(torch.where(beside(group.valid, flat), flat, safe), group)


def apply(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of torch on selections.

    Raises:
        TraceError: a function other than one of each row, a reduction over rows, or a write back.
    """
    name = getattr(func, "__name__", str(func))
    given = [a for a in flat((args, kwargs)) if isinstance(a, Selected)]
    if name in OF_DTYPE:
        return func(given[0].rows)
    group = given[0].group
    if name in MAKING:
        return OF_ALL_ROWS[name](group, *args, **kwargs)
    if name in SIZED:
        args = _own_count(args, group)
    args, kwargs = without_numbers(args, kwargs)
    others = (x.group.mask for x in given if x.group is not group)
    is_one_mask = all(holds_same(mask, group.mask) for mask in others)
    if not is_one_mask and name not in JOINING:
        raise _different(name)
    is_moved = any(x.at for x in given)
    if name in OF_ALL_ROWS and (not is_moved or name in OF_ANY_DIM):
        reduced = OF_ALL_ROWS[name](group, *args, **kwargs)
        if reduced is not None:
            return reduced
    elif name in OF_DIMS and isinstance(args[0], Selected):
        reduced = _with_rows_first(OF_ALL_ROWS[name], args[0], args[1:], kwargs)
        if reduced is not None:
            return reduced
    if not is_one_mask:
        raise _different(name)
    if name.endswith("_") and not name.endswith("__"):
        return _in_place(func, name.removesuffix("_"), args, kwargs)
    is_pointwise = name in POINTWISE and not is_moved
    if is_pointwise and len({x.rows.ndim for x in given}) > 1:
        raise refused(f"{name} of selected rows that differ in their number of dims", True)
    trial = (
        RowTrial(RowDim(0), [(name, args)]) if is_pointwise else try_rows(func, args, kwargs, _seen)
    )
    if trial.is_sum and name in PRODUCTS:
        own = _replaced((list(args), dict(kwargs)), lambda x: x, lambda x: _at_own(zeroed(x), x.at))
        return func(*own[0], **own[1])
    if trial.result is None:
        raise refused(name)
    is_singular = any(is_singular_call(*op) for op in trial.ops)
    is_any = group.first[1]
    is_lookup = name in LOOKUPS and any(isinstance(a, Tensor) for a in args)

    def of_plain(x: Tensor) -> Tensor:
        if is_pointwise:
            return finite(_row_by_row(given[0].rows, group, x), is_any, is_singular)
        return finite(x, is_any, is_singular) if x.is_floating_point() and not is_lookup else x

    def of_selected(x: Selected) -> Tensor:
        rows = finite(x.rows, is_any, is_singular) if is_singular else x.rows
        return _at_own(rows, x.at)

    plain_args, plain_kwargs = _replaced((list(args), dict(kwargs)), of_plain, of_selected)
    out = func(*plain_args, **plain_kwargs)
    if is_singular or is_lookup:
        out = optree.tree_map(lambda x: unless_none(x, is_any), out)
    if isinstance(out, tuple | list):
        pairs = zip(out, trial.result, strict=True)
        return type(out)([_with_rows(o, at, given, name) for o, at in pairs])
    made = _with_rows(out, trial.result, given, name)
    made.below = given[0].below if name in SAME_VALUES else None
    return made


def _at_own(rows: Tensor, at: int) -> Tensor:
    return rows.movedim(0, at) if at else rows


def _with_rows_first(
    function: Callable[..., Any], x: Selected, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A reduction of rows that are not the first dim, by ``function``, which takes them as the
    first.
    """
    dim, *rest = args if args else (None,)
    dim = kwargs.get("dim", dim)
    if not isinstance(dim, int | tuple | list | None) or isinstance(dim, bool):
        return None
    rest_of = [d for d in range(x.ndim) if d != x.at]
    first = {d: 0 if d == x.at else 1 + rest_of.index(d) for d in range(x.ndim)}
    if dim is not None:
        dim = first[dim % x.ndim] if isinstance(dim, int) else [first[d % x.ndim] for d in dim]
    named = {key: value for key, value in kwargs.items() if key != "dim"}
    given = () if dim is None else (dim, *rest)
    made = function(x.group, Selected(x.rows, x.group), *given, **named)
    if isinstance(made, Selected):
        return Selected(made.rows, made.group, at=x.at)
    return made if made is None or made.ndim < x.ndim else made.movedim(0, x.at)


def _own_count(args: Sequence[Any], group: Selections) -> list[Any]:
    """Sizes, with -1 in the place of the number of rows."""
    x, *sizes = args
    sizes = [*sizes[0]] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    is_own = [isinstance(s, TracedNumber) and s.is_of(group.mask) for s in sizes]
    if not any(is_own):
        return [*args]
    others = [s for s, own in zip(sizes, is_own, strict=True) if not own]
    if isinstance(x, Selected) and -1 in others:
        rest = math.prod(x.rows.shape[1:]) // (-math.prod(others) or 1)
        others = [rest if s == -1 else s for s in others]
    beside = iter(others)
    return [x, *(-1 if own else next(beside) for own in is_own)]


def _seen(x: Any) -> tuple[Tensor, int] | None:
    return (x.rows, x.at) if isinstance(x, Selected) else None


def _with_rows(out: Any, at: Any, given: Sequence[Selected], name: str) -> Selected:
    if not isinstance(at, RowDim) or (at.dim and at.of_one > 1):
        raise refused(name)
    group = given[0].group
    if at.of_one > 1:  # several rows of each one
        group = group_of(group.valid[:, None].expand(-1, at.of_one))
    made = Selected(out.movedim(at.dim, 0) if at.dim else out, group, at=at.dim)
    made.is_alias = name in VIEWING and any(x.viewed is not None or x.is_alias for x in given)
    return made


def _in_place(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Selected:
    """A function that writes to selected rows, which are a copy."""
    x, method = args[0], FILLING.get(name) or getattr(Tensor, name, None)
    is_other = not isinstance(x, Selected) or (x.at and x.viewed is None)
    if is_other or method is None or x.below is not None:
        raise refused(f"{name}_")  # of places too, which are known to be in range
    # The gradient may read the operand as it was.
    own = Selected(x.rows.clone(), x.group, at=x.at)
    return written(x, apply(method, (own, *args[1:]), kwargs))


def written(x: Selected, new: Selected) -> Selected:
    """``x`` with other elements. It is a copy of what was selected, or a view."""
    if new.at != x.at or new.rows.shape != x.rows.shape:
        raise refused("a write of another shape")
    if x.is_alias:
        raise refused("a write to a view of a slice between values", as_it_is=True)
    if x.viewed is None:
        x.rows.copy_(new.rows)
    else:
        places = x.viewed.movedim(x.at, 0)
        places.copy_(torch.where(beside(x.group.valid, places), new.rows, places))
    return x


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in flat(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in flat(value)]
    return [tree]


def _replaced(
    tree: Any, of: Callable[[Tensor], Tensor], of_selected: Callable[[Selected], Tensor]
) -> Any:
    """``tree`` with ``of`` each plain tensor, and ``of_selected`` each selection."""
    if isinstance(tree, dict):
        return {key: _replaced(value, of, of_selected) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_replaced(value, of, of_selected) for value in tree)
    if isinstance(tree, Selected):
        return of_selected(tree)
    return of(tree) if isinstance(tree, Tensor) else tree


def _row_by_row(rows: Tensor, group: Selections, other: Tensor) -> Tensor:
    """A plain operand beside ``rows``: broadcast over them, or of one row for each selected one."""
    if other.ndim < rows.ndim or other.shape[0] == 1:
        return other
    if other.ndim > rows.ndim or other.shape[0] in (0, rows.shape[0]):
        raise refused(f"a tensor of shape {tuple(other.shape)} beside selected rows", True)
    return row_of_each(other, group)


def row_of_each(plain: Tensor, group: Selections) -> Tensor:
    """A plain tensor of a row for each selected one, at the places of the selected rows."""
    size = plain.shape[0]
    if is_inside():  # where no claim is noted
        raise refused(f"a tensor of shape {tuple(plain.shape)} beside a rank's own rows", True)
    claim = f"a mask selects {size} rows, as many as a tensor of shape {tuple(plain.shape)} has"
    assume(group.valid.sum() == size, claim)
    warnings.warn(
        f"{at_line()}A tensor of shape {tuple(plain.shape)} is combined with rows that a mask"
        f" selects, whose number is a value: ftp assumes that the mask selects {size} rows."
        " check_inputs=True checks it.",
        stacklevel=2,
    )
    return plain.index_select(0, (group.valid.cumsum(0) - 1).clamp(0, size - 1))


def order_of(group: Selections) -> Tensor:
    """The places of selected rows, in front of zeros."""
    return torch.nonzero_static(group.valid, size=group.valid.numel(), fill_value=0)[:, 0]


def beside(valid: Tensor, rows: Tensor) -> Tensor:
    return valid.reshape(-1, *(1,) * (rows.ndim - 1))


def zeroed(value: Selected) -> Tensor:
    zero = torch.zeros((), dtype=value.rows.dtype, device=value.rows.device)
    return torch.where(beside(value.group.valid, value.rows), value.rows, zero)


def is_over_rows(ndim: int, dim: Any) -> bool:
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return any(d % ndim == 0 for d in dims)
