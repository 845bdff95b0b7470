"""Rows between places that are values: ``x[start:stop]`` and ``x.split(counts.tolist())``."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ftp.ops.assume import assume
from ftp.tracing.selected import Selected, beside, group_of, select, selected
from ftp.tracing.traced_number import TracedNumber


def is_span(key: Any) -> bool:
    """Whether a key of an index is a slice whose start or end is a value."""
    return isinstance(key, slice) and any(
        type(x) is TracedNumber for x in (key.start, key.stop, key.step)
    )


def span_of(key: slice, x: Tensor) -> Tensor | None:
    """The mask of the rows of ``x[key]``; None where they do not follow each other."""
    if type(key.step) is TracedNumber or key.step not in (None, 1):
        return None
    size = x.shape[0]
    start = _as_place(0 if key.start is None else key.start, size)
    return _between(start, _as_place(size if key.stop is None else key.stop, size), x)


def _between(start: Any, stop: Any, x: Tensor) -> Tensor:
    place = torch.arange(x.shape[0], device=x.device)
    return (place >= start) & (place < stop)


def _as_place(end: Any, size: int) -> Any:
    """A slice's end as Python counts it: a negative one from the end of the rows."""
    if type(end) is not TracedNumber:
        return end + size if end < 0 else end
    return torch.where(end.value < 0, end.value + size, end.value)


def split(x: Tensor, sizes: Any, dim: int = 0) -> list[Selected] | None:
    """``x.split(sizes)`` where sizes are values; None where none is."""
    if not isinstance(sizes, list | tuple) or all(type(s) is not TracedNumber for s in sizes):
        return None
    moved, at = x.movedim(dim, 0), dim % x.ndim
    counts = torch.stack([torch.as_tensor(getattr(s, "value", s), device=x.device) for s in sizes])
    claim = f"sizes of parts are not negative, and {x.shape[at]} in all"
    assume((counts >= 0).all() & (counts.sum() == x.shape[at]), claim)
    ends = [0, *counts.cumsum(0)[:-1].unbind(), x.shape[at]]
    return [
        Selected(select(moved, group).rows, group, at=at)
        for start, stop in pairwise(ends)
        for group in (group_of(_between(start, stop, moved), (start, stop)),)
    ]


def joined_parts(parts: Sequence[Any]) -> Any:
    """Parts that a split made, in their order, below each other: in as many rows as were split. It
    is a plain tensor where they are all. None where they are not such parts.
    """
    if not all(isinstance(x, Selected) and x.group.span for x in parts):
        return None
    spans = [x.group.span for x in parts]
    if len({x.rows.shape for x in parts}) > 1:
        return None
    if any(a[1] is not b[0] for a, b in pairwise(spans)):
        return None
    rows, valid = parts[0].rows, parts[0].group.valid
    for x in parts[1:]:
        rows = torch.where(beside(x.group.valid, x.rows), x.rows, rows)
        valid = valid | x.group.valid
    is_all = type(spans[0][0]) is int and type(spans[-1][1]) is int
    return rows if is_all else selected(rows, group_of(valid, (spans[0][0], spans[-1][1])))
