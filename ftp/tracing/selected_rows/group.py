"""What the selections by one mask share: the mask, the number and the places of its rows."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.axis import is_inside
from ftp.dataclass import dataclass
from ftp.ops.assume import assume
from ftp.source import at_line, user_line
from ftp.tracing.data_dependent.traced_number import TracedNumber
from ftp.tracing.same_values import holds_same
from ftp.tracing.selected_rows.refused import number_refused, refused


@dataclass(frozen=True, eq=False)
class SelectionGroup:
    """What all selections by one mask share.

    Attributes:
        mask: a copy of the user's mask.
        valid: the mask, flattened: one bool per row.
        first: 0-d, the index of the first selected row; zero if there is none.
        is_any: 0-d, whether a row is selected.
        line: the user's line that selects.
        bounds: the first row and the end of a part of ``x.split``; None for other selections.
    """

    mask: Tensor
    valid: Tensor
    first: Tensor
    is_any: Tensor
    line: str
    bounds: tuple[Any, Any] | None = None

    def count(self) -> TracedNumber:
        return TracedNumber(self.valid.sum(), self.mask)


def group_of(mask: Tensor, bounds: tuple[Any, Any] | None = None) -> SelectionGroup:
    mask = mask.clone()  # the function may write to its mask later
    valid = mask.reshape(-1)
    first = valid.to(torch.int64).argmax(0) if valid.shape[0] else valid.sum()
    return SelectionGroup(mask, valid, first, valid.any(), user_line(), bounds)


def broadcast_mask(valid: Tensor, rows: Tensor) -> Tensor:
    """``valid`` with dims of size one behind it, to broadcast over ``rows``."""
    return valid.reshape(-1, *(1,) * (rows.ndim - 1))


def selected_indices(group: SelectionGroup) -> Tensor:
    """``(N,)``: the indices of the selected rows in order, then zeros."""
    return torch.nonzero_static(group.valid, size=group.valid.numel(), fill_value=0)[:, 0]


def spread_rows(plain: Tensor, group: SelectionGroup) -> Tensor:
    """Move the i-th row of a plain tensor to the place of the i-th selected row.

    The program assumes that the mask selects as many rows as ``plain`` has, and warns of it.
    """
    size = plain.shape[0]
    if is_inside():  # within ftp.local, where a program notes no assumption
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


class ShapeOfSelection:
    """The shape of a selection: the dim of rows has a `TracedNumber`."""

    def __init__(self, sizes: Sequence[int], rows_at: int, group: SelectionGroup):
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
        sizes = [self._sizes[:], other._sizes[:]] if isinstance(other, ShapeOfSelection) else []
        is_alike = len({len(x) for x in sizes}) == 1 and self._rows_at == other._rows_at
        if is_alike and holds_same(other._group.mask, self._group.mask):
            return sizes[0] == sizes[1]
        raise number_refused(True, "a comparison of shapes")

    __hash__ = object.__hash__
