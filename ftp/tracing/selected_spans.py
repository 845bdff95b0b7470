"""Rows between places that are values: ``x[start:stop]``, ``x.narrow(dim, start, length)`` and
``x.split(counts.tolist())``. As in torch they are views: writes to them go to ``x``.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ftp.ops.assume import assume
from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped
from ftp.tracing.refused_rows import refused
from ftp.tracing.same_values import holds_same
from ftp.tracing.selected import Selected, beside, group_of, selected
from ftp.tracing.traced_number import TracedNumber


def is_span(key: Any) -> bool:
    """Whether a key of an index is a slice whose start or end is a value."""
    return isinstance(key, slice) and any(map(is_value, (key.start, key.stop, key.step)))


def is_value(end: Any) -> bool:
    """A number of the program, or an integer in a tensor, but one whose value is known: that of a
    literal or of a captured tensor.
    """
    if type(end) is TracedNumber:
        return True
    if not isinstance(end, Tensor) or end.numel() != 1 or end.is_floating_point():
        return False
    end = unwrapped(end)
    return is_fake(end) and getattr(end, "constant", None) is None


def span_in(x: Tensor, key: Any) -> Selected | None:
    """``x[key]`` where one slice in the key is between values; None where none is, or several, or
    where torch gives no view.
    """
    found = _spans_in(x, key)
    if found is None or len(found[1]) != 1:
        return None
    viewed, ((dim, valid),) = found[0], found[1].items()
    return Selected.of_view(viewed, group_of(valid), dim)


def _spans_in(x: Tensor, key: Any) -> tuple[Tensor, dict[int, Tensor]] | None:
    """``x[key]`` with full slices in the place of those between values, and which places of these
    dims the key takes.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    spans = {i: k for i, k in enumerate(keys) if is_span(k)}
    others = [k for k in keys if k is not None and k is not Ellipsis]
    if not spans or not all(type(k) in (int, slice) for k in others):
        return None
    if any(is_value(k.step) or k.step not in (None, 1) for k in spans.values()):
        return None
    widths = [x.ndim - len(others) if k is Ellipsis else type(k) is not int for k in keys]
    viewed = Tensor.__getitem__(x, tuple(slice(None) if is_span(k) else k for k in keys))
    dims = {int(sum(widths[:i])): k for i, k in spans.items()}
    return viewed, {dim: _taken_by(k, viewed.movedim(dim, 0)) for dim, k in dims.items()}


def _taken_by(key: slice, x: Tensor) -> Tensor:
    size = x.shape[0]
    start = _as_place(0 if key.start is None else key.start, size)
    return _between(start, _as_place(size if key.stop is None else key.stop, size), x)


def write_to_span(x: Tensor, key: Any, value: Any) -> bool:
    """``x[key] = value`` where slices in the key are between values; whether any is."""
    if (found := _spans_in(x, key)) is None:
        return False
    viewed, spans = found
    if isinstance(value, Selected):
        ((dim, valid), *rest) = spans.items()
        is_own = not rest and holds_same(value.group.mask, valid)
        if not is_own or value.rows.ndim - value.at != viewed.ndim - dim:
            raise refused("a write but to the places of the same rows", as_it_is=True)
        value = value.rows.movedim(0, value.at)
    elif isinstance(value, Tensor):
        behind = [viewed.ndim - dim for dim in spans]
        if any(value.ndim >= n and value.shape[-n] != 1 for n in behind):
            shape = tuple(value.shape)
            raise refused(f"a write of a tensor of shape {shape} to a slice between values", True)
    value = torch.as_tensor(
        getattr(value, "value", value), dtype=viewed.dtype, device=viewed.device
    )
    for dim, valid in spans.items():
        value = torch.where(valid.reshape(-1, *(1,) * (viewed.ndim - 1 - dim)), value, viewed)
    viewed.copy_(value)
    return True


def _between(start: Any, stop: Any, x: Tensor) -> Tensor:
    place = torch.arange(x.shape[0], device=x.device)
    return (place >= start) & (place < stop)


def _as_place(end: Any, size: int) -> Any:
    """A slice's end as Python counts it: a negative one from the end of the rows."""
    if not is_value(end):
        return end + size if end < 0 else end
    place = getattr(end, "value", end).detach().reshape(()).long()
    return torch.where(place < 0, place + size, place)


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
        Selected.of_view(x, group, at)
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
