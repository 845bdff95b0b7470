"""Traced slices, whose bounds are values that the program computes: ``x[start:stop]``,
``x.narrow(dim, start, length)`` and ``x.split(counts.tolist())``. They are views, as in torch:
writes to them go to ``x``.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ftp.ops.assume import assume
from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped
from ftp.tracing.data_dependent.traced_number import TracedNumber
from ftp.tracing.data_dependent.values_read import python_value
from ftp.tracing.nested_arguments import map_leaves
from ftp.tracing.same_values import holds_same
from ftp.tracing.selected_rows.group import broadcast_mask, group_of
from ftp.tracing.selected_rows.refused import refused
from ftp.tracing.selected_rows.selected import Selected, selected


def is_traced_slice(key: Any) -> bool:
    """Whether a key is a slice whose start or end is a value of the program."""
    return isinstance(key, slice) and any(map(is_traced_int, (key.start, key.stop, key.step)))


def is_traced_int(end: Any) -> bool:
    """Whether a slice's bound is a value of the program: a `TracedNumber`, or an integer tensor
    other than a literal or a captured one, whose values are known.
    """
    if type(end) is TracedNumber:
        return True
    if not isinstance(end, Tensor) or end.numel() != 1 or end.is_floating_point():
        return False
    end = unwrapped(end)
    return is_fake(end) and getattr(end, "constant", None) is None


def slices_read(tree: Any) -> Any:
    """Nested arguments with the bounds of traced slices as Python numbers, if they may be read."""

    def bound(end: Any) -> Any:
        if not is_traced_int(end):
            return end
        number = python_value(Tensor.__index__, getattr(end, "value", end))
        return end if number is None else number

    def read(x: Any) -> Any:
        return slice(*map(bound, (x.start, x.stop, x.step))) if is_traced_slice(x) else x

    return map_leaves(read, tree)


def read_traced_slice(x: Tensor, key: Any) -> Selected | None:
    """``x[key]`` with one traced slice in the key; None for other keys, and where torch's result is
    not a view.
    """
    found = _find_traced_slices(x, key)
    if found is None or len(found[1]) != 1:
        return None
    viewed, ((dim, valid),) = found[0], found[1].items()
    return Selected.of_view(viewed, group_of(valid), dim)


def _find_traced_slices(x: Tensor, key: Any) -> tuple[Tensor, dict[int, Tensor]] | None:
    """``x[key]`` with traced slices replaced by full ones, and for each dim that has a traced slice
    the mask of the places it takes; None if the key has no traced slice.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    spans = {i: k for i, k in enumerate(keys) if is_traced_slice(k)}
    others = [k for k in keys if k is not None and k is not Ellipsis]
    if not spans or not all(type(k) in (int, slice) for k in others):
        return None
    if any(is_traced_int(k.step) or k.step not in (None, 1) for k in spans.values()):
        return None
    widths = [x.ndim - len(others) if k is Ellipsis else type(k) is not int for k in keys]
    viewed = Tensor.__getitem__(x, tuple(slice(None) if is_traced_slice(k) else k for k in keys))
    dims = {int(sum(widths[:i])): k for i, k in spans.items()}
    return viewed, {dim: _taken_by(k, viewed.movedim(dim, 0)) for dim, k in dims.items()}


def _taken_by(key: slice, x: Tensor) -> Tensor:
    size = x.shape[0]
    start = _as_place(0 if key.start is None else key.start, size)
    return _between(start, _as_place(size if key.stop is None else key.stop, size), x)


def write_traced_slice(x: Tensor, key: Any, value: Any) -> bool:
    """Do ``x[key] = value`` if the key has traced slices; returns whether it has."""
    if (found := _find_traced_slices(x, key)) is None:
        return False
    viewed, spans = found
    if isinstance(value, Selected):
        ((dim, valid), *rest) = spans.items()
        is_same_slice = not rest and holds_same(value.group.mask, valid)
        if not is_same_slice or value.rows.ndim - value.row_dim != viewed.ndim - dim:
            raise refused("a write but to the places of the same rows", as_it_is=True)
        value = value.rows.movedim(0, value.row_dim)
    elif isinstance(value, Tensor):
        from_end = [viewed.ndim - dim for dim in spans]
        if any(value.ndim >= n and value.shape[-n] != 1 for n in from_end):
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
    """A slice's bound as an index that is not negative."""
    if not is_traced_int(end):
        return end + size if end < 0 else end
    place = getattr(end, "value", end).detach().reshape(()).long()
    return torch.where(place < 0, place + size, place)


def split(x: Tensor, sizes: Any, dim: int = 0) -> list[Selected] | None:
    """``x.split(sizes)`` if a size is a value of the program; None otherwise."""
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


def join_split(parts: Sequence[Any]) -> Any:
    """Concatenate consecutive parts of one traced ``split``. All parts together give a plain
    tensor. None if ``parts`` are anything else.
    """
    if not all(isinstance(x, Selected) and x.group.bounds for x in parts):
        return None
    spans = [x.group.bounds for x in parts]
    if len({x.rows.shape for x in parts}) > 1:
        return None
    if any(a[1] is not b[0] for a, b in pairwise(spans)):
        return None
    rows, valid = parts[0].rows, parts[0].group.valid
    for x in parts[1:]:
        rows = torch.where(broadcast_mask(x.group.valid, x.rows), x.rows, rows)
        valid = valid | x.group.valid
    is_all = type(spans[0][0]) is int and type(spans[-1][1]) is int
    return rows if is_all else selected(rows, group_of(valid, (spans[0][0], spans[-1][1])))
