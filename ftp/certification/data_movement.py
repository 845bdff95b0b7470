"""What the steps between ops do to what a tensor holds: views, slices, pads, joins, and fills."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ftp.certification.element_map import (
    Held,
    pad_dim,
    permute,
    reshape,
    slice_dim,
    zeros_like,
)
from ftp.certification.packed_values import Row, row
from ftp.certification.unsound import Unsound

aten = torch.ops.aten
FILLS = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.new_ones.default: 1.0,
    aten.new_zeros.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
}  # what they fill with, or where it stands among the arguments


def constant(target: Any, args: Sequence[Any], dtype: torch.dtype) -> str:
    at = FILLS[target]
    value = args[at] if isinstance(at, int) else at
    return f"{torch.tensor(value, dtype=dtype).item()} as {dtype}"


def filled(node: fx.Node) -> Held:
    """A number that a fill gives."""
    dtype = node.kwargs.get("dtype")
    if (
        node.target is not aten.new_full.default
        or node.args[1]
        or not isinstance(dtype, torch.dtype)
    ):
        raise Unsound(f"{node.target} belongs to no op of the program, and moves nothing")
    return Held(constant(node.target, node.args, dtype), (), (), ())


def sliced(
    x: Held | Row, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Held | Row:
    if step != 1:
        raise Unsound(f"it is sliced in steps of {step}")
    size = x.shape[dim]
    first, last = (
        v + size if isinstance(v, int) and v < 0 else v
        for v in (0 if start is None else start, size if stop is None else stop)
    )
    if isinstance(x, Row):
        return x.sliced(dim % len(x.shape), first, last)
    return slice_dim(x, dim % len(x.shape), first, last)


def _padded(x: Held, pad: Sequence[Any], value: float = 0.0) -> Held:
    if value:
        raise Unsound(f"it is padded with {value}")
    for i in range(len(pad) // 2):
        x = pad_dim(x, len(x.shape) - 1 - i, pad[2 * i], pad[2 * i + 1])
    return x


def _selected(x: Held, dim: int, at: int) -> Held:
    y = slice_dim(x, dim, at, at + 1)
    return reshape(y, [size for d, size in enumerate(y.shape) if d != dim])


def _reshaped(x: Held | Row, shape: Sequence[int]) -> Held | Row:
    return x.reshaped(shape) if isinstance(x, Row) else reshape(x, shape)


MOVEMENTS: dict[Any, Callable[..., Held | Row]] = {
    aten.alias.default: lambda x: x,
    aten.cat.default: lambda parts, dim=0: row(parts, dim),
    aten.clone.default: lambda x: x,
    aten.constant_pad_nd.default: _padded,
    aten.contiguous.default: lambda x: x,
    aten.detach.default: lambda x: x,
    aten.permute.default: permute,
    aten.reshape.default: _reshaped,
    aten.select.int: _selected,
    aten.slice.Tensor: sliced,
    aten.view.default: _reshaped,
    aten.zeros_like.default: lambda x: zeros_like(x),
}
