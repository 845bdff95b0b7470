"""Slices, padding, rolls and flips on windows."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.rules.overloads import aten
from ftp.rules.size_functions import slice_bounds
from ftp.rules.windows.registry import MOST_PACKS, FarApart, joined, places, split, windowed


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
    if dim % x.ndim != over:
        raise FarApart
    first, last, _ = slice_bounds(start, end, step, x.shape[over])
    length = -(-(last - first) // step)
    if _is_apart(x.shape[over], first, length, step):
        at = torch.arange(first, last, step, device=x.device)
        return aten.index_select.default(x, over, at)
    if step == 1:
        return _moved(x, n, over, first, length)
    chunk = -(-length // n)
    held = split(x, over, n, first, chunk * step, (chunk - 1) * step + 1)
    every = aten.slice.Tensor(held, 1 + over, 0, held.shape[1 + over], step)
    return joined(every, over, length)


@windowed(aten.slice_backward.default)
def _slice_backward(
    n: int, over: int, grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    if dim % grad.ndim != over:
        raise FarApart
    whole, length = sizes[over], grad.shape[over]
    first, last, _ = slice_bounds(start, end, step, whole)
    if -(-(last - first) // step) != length:  # one element, which is broadcast
        raise FarApart
    if _is_apart(whole, first, length, step):
        onto = grad.new_zeros(sizes)
        at = torch.arange(first, last, step, device=grad.device)
        return aten.index_add.default(onto, over, at, grad)
    if step == 1:
        return _moved(grad, n, over, -first, whole)
    of_grad = -(-whole // (n * step))
    held = split(grad, over, n, -(first // step), of_grad, of_grad)
    shape = [*held.shape[: 1 + over], of_grad * step, *held.shape[2 + over :]]
    made = aten.slice_backward.default(held, shape, 1 + over, first % step, of_grad * step, step)
    return joined(made, over, whole)


def _is_apart(whole: int, first: int, length: int, step: int) -> bool:
    """Whether a slice takes few elements, which are looked up, and no pack of several."""
    return 4 * length <= whole and MOST_PACKS * math.gcd(whole, first, length) < whole


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
