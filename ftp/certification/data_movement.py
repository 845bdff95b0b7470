"""Data movement on element maps: views, slices, pads, concatenations, and fills."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from ftp.certification.element_map import (
    ElementMap,
    flip_dim,
    pad_dim,
    permute,
    reshape,
    slice_dim,
    zeros_like,
)
from ftp.certification.packed_values import PackedValues, pack
from ftp.certification.unsound import Unsound
from ftp.dynamic_float import is_formula

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
}  # the value (a float), or its position among the arguments (an int)


def constant(target: Any, args: Sequence[Any], dtype: torch.dtype) -> str:
    at = FILLS[target]
    value = args[at] if isinstance(at, int) else at
    if is_formula(value):
        return f"{value!r} as {dtype}"
    return f"{torch.tensor(value, dtype=dtype).item()} as {dtype}"


def filled(node: fx.Node) -> ElementMap:
    """The element map of a scalar that ``new_full`` makes."""
    dtype = node.kwargs.get("dtype")
    if (
        node.target is not aten.new_full.default
        or node.args[1]
        or not isinstance(dtype, torch.dtype)
    ):
        raise Unsound(f"{node.target} belongs to no op of the program and is no data movement")
    return ElementMap(constant(node.target, node.args, dtype), (), (), ())


def sliced(
    x: ElementMap | PackedValues, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> ElementMap | PackedValues:
    if step != 1:
        raise Unsound(f"it is sliced in steps of {step}")
    _require_dims(x, [dim])
    size = x.shape[dim]
    first, last = (
        v + size * (v < 0)  # an int, or an array with one for each rank
        for v in (0 if start is None else start, size if stop is None else stop)
    )
    if isinstance(x, PackedValues):
        return x.sliced(dim % len(x.shape), first, last)
    return slice_dim(x, dim % len(x.shape), first, last)


def divided(
    x: ElementMap | PackedValues, dim: int, sizes: Sequence[int]
) -> Sequence[ElementMap | PackedValues]:
    """``x`` split along a dim into parts of these sizes, which add up to the dim's."""
    if isinstance(x, PackedValues):
        return x.split(dim, sizes)
    ends = accumulate(sizes)
    return [slice_dim(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _padded(x: ElementMap, pad: Sequence[Any], value: float = 0.0) -> ElementMap:
    if value:
        raise Unsound(f"it is padded with {value}")
    if len(pad) % 2 or len(pad) // 2 > len(x.shape):
        raise Unsound(f"a tensor of {len(x.shape)} dims is padded by {list(pad)}")
    for i in range(len(pad) // 2):
        x = pad_dim(x, len(x.shape) - 1 - i, pad[2 * i], pad[2 * i + 1])
    return x


def _require_dims(x: ElementMap | PackedValues, dims: Sequence[int]) -> None:
    """Raise Unsound for dims that the tensor lacks."""
    if any(not -len(x.shape) <= d < len(x.shape) for d in dims):
        raise Unsound(f"a tensor of {len(x.shape)} dims is moved along dims {list(dims)}")


def _permuted(x: ElementMap, dims: Sequence[int]) -> ElementMap:
    if sorted(dims) != list(range(len(x.shape))):
        raise Unsound(f"the {len(x.shape)} dims of a tensor are permuted as {list(dims)}")
    return permute(x, dims)


def _selected(x: ElementMap, dim: int, at: int) -> ElementMap:
    _require_dims(x, [dim])
    if not 0 <= at < x.shape[dim]:
        raise Unsound(f"element {at} is selected of {x.shape[dim]}")
    y = slice_dim(x, dim, at, at + 1)
    return reshape(y, [size for d, size in enumerate(y.shape) if d != dim])


def _reshaped(x: ElementMap | PackedValues, shape: Sequence[int]) -> ElementMap | PackedValues:
    return x.reshaped(shape) if isinstance(x, PackedValues) else reshape(x, shape)


MOVEMENTS: dict[Any, Callable[..., ElementMap | PackedValues]] = {
    aten.alias.default: lambda x: x,
    aten.cat.default: lambda parts, dim=0: pack(parts, dim),
    aten.clone.default: lambda x: x,
    aten.constant_pad_nd.default: _padded,
    aten.contiguous.default: lambda x: x,
    aten.detach.default: lambda x: x,
    aten.flip.default: lambda x, dims: reduce(flip_dim, [d % len(x.shape) for d in dims], x),
    aten.permute.default: _permuted,
    aten.reshape.default: _reshaped,
    aten.select.int: _selected,
    aten.slice.Tensor: sliced,
    aten.view.default: _reshaped,
    aten.zeros_like.default: zeros_like,
}
