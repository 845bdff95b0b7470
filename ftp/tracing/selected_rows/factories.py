"""Tensors made with a number of selected rows as a size: ``torch.zeros(rows.shape[0], 3)``,
``x.new_ones(n)``, ``torch.arange(n)``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.tracing.data_dependent.traced_number import TracedNumber
from ftp.tracing.selected_rows.group import SelectionGroup, group_of
from ftp.tracing.selected_rows.row_functions import FACTORIES
from ftp.tracing.selected_rows.selected import OF_ALL_ROWS, Selected, select

_MAKING = {torch.zeros, torch.ones, torch.full, torch.empty}
_MAKING |= {getattr(Tensor, name) for name in FACTORIES}


def sized_by_row_count(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Selected | None:
    """The result of a call that has a number of selected rows as a size; None for other calls."""
    if func is torch.arange and len(args) == 1 and _is_count(args[0]):
        group = group_of(args[0].mask)
        places = group.valid.cumsum(0) - 1
        counted = select(places.reshape(group.mask.shape), group).rows
        return Selected(counted.to(kwargs.get("dtype") or torch.int64), group)
    if func not in _MAKING:
        return None
    is_method = func not in (torch.zeros, torch.ones, torch.full, torch.empty)
    own, sizes = list(args[:is_method]), list(args[is_method:])
    size = kwargs.get("size", sizes[0] if sizes else None)
    shape = [*size] if isinstance(size, tuple | list) else sizes
    at = [i for i, n in enumerate(shape) if _is_count(n)]
    if len(at) != 1 or not all(type(n) is int for i, n in enumerate(shape) if i != at[0]):
        return None
    group = group_of(shape[at[0]].mask)
    shape[at[0]] = group.valid.numel()
    rest = () if shape is sizes or "size" in kwargs else sizes[1:]
    others = {name: value for name, value in kwargs.items() if name != "size"}
    given = [shape] if func is not Tensor.new else shape
    rows = func(*own, *given, *rest, **others)
    return Selected(rows.movedim(at[0], 0), group, row_dim=at[0])


def _is_count(x: Any) -> bool:
    return type(x) is TracedNumber and x.mask is not None


def _method(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def of(group: SelectionGroup, x: Any, *args: Any, **kwargs: Any) -> Any:
        found = sized_by_row_count(method, (x.rows, *args), kwargs)
        return method(x.rows, *args, **kwargs) if found is None else found

    return of


OF_ALL_ROWS.update({name: _method(name) for name in FACTORIES})
