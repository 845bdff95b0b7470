"""Slices, padding, rolls and flips on windows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ftp.rules.overloads import aten
from ftp.rules.size_functions import slice_bounds
from ftp.rules.windows.registry import FarApart, joined, places, split, windowed


def _moved(x: Tensor, n: int, dim: int, start: int, length: int) -> Tensor:
    """Elements from ``start`` on, with zeros beyond the ends; not the half of a dim, or its double,
    whose chunks have no neighbours in common, nor fewer elements than there are ranks.
    """
    chunk, held = -(-length // n), -(-x.shape[dim] // n)
    if length < n or 2 * min(chunk, held) <= max(chunk, held):
        raise FarApart
    return joined(split(x, dim, n, start, chunk, chunk), dim, length)


@windowed(aten.slice.Tensor)
def _slice(
    n: int, over: int, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    if step != 1 or dim % x.ndim != over:
        raise FarApart
    first, last, _ = slice_bounds(start, end, step, x.shape[over])
    return _moved(x, n, over, first, last - first)


@windowed(aten.slice_backward.default)
def _slice_backward(
    n: int, over: int, grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    if step != 1 or dim % grad.ndim != over:
        raise FarApart
    first, last, _ = slice_bounds(start, end, step, sizes[over])
    if last - first != grad.shape[over]:  # one element, which is broadcast
        raise FarApart
    return _moved(grad, n, over, -first, sizes[over])


@windowed(aten.constant_pad_nd.default)
def _pad(n: int, over: int, x: Tensor, pad: Sequence[int], value: float = 0.0) -> Tensor:
    at = 2 * (x.ndim - 1 - over)
    if value or not 0 <= at < len(pad):
        raise FarApart
    rest = [*pad[:at], 0, 0, *pad[at + 2 :]]
    moved = _moved(x, n, over, -pad[at], x.shape[over] + pad[at] + pad[at + 1])
    return aten.constant_pad_nd.default(moved, rest, value) if any(rest) else moved


@windowed(aten.roll.default)
def _roll(n: int, over: int, x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    rolled_dims = [d % x.ndim for d in dims]
    if rolled_dims.count(over) != 1 or not x.shape[over]:
        raise FarApart
    at, whole = rolled_dims.index(over), x.shape[over]
    shift, chunk = shifts[at] % whole, -(-whole // n)
    shift = shift - whole if 2 * shift > whole else shift
    inside = split(x, over, n, -shift, chunk, chunk)
    # What one end of the dim gives to the other one.
    around = split(x, over, n, (whole if shift > 0 else -whole) - shift, chunk, chunk)
    at_place = places(inside, over, -shift, chunk)
    # Chosen, not added: -0.0 and the other windows' zero have the sum 0.0.
    is_inside = at_place >= 0 if shift > 0 else at_place < whole
    rolled = joined(aten.where.self(is_inside, inside, around), over, whole)
    left = [i for i in range(len(dims)) if i != at]
    return (
        aten.roll.default(rolled, *([of[i] for i in left] for of in (shifts, dims)))
        if left
        else rolled
    )


@windowed(aten.flip.default)
def _flip(n: int, over: int, x: Tensor, dims: Sequence[int]) -> Tensor:
    if over not in [d % x.ndim for d in dims]:
        raise FarApart
    whole, chunk = x.shape[over], -(-x.shape[over] // n)
    held = split(x, over, n, whole - chunk, -chunk, chunk)
    return joined(aten.flip.default(held, [d % x.ndim + 1 for d in dims]), over, whole)
