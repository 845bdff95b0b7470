"""Concatenation, writes to slices, and padding by elements of the dim: windows of several tensors,
one over the other.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.windows import WINDOWS
from ftp.rules.overloads import aten
from ftp.rules.size_functions import slice_bounds
from ftp.rules.windows.registry import MOST_PACKS, FarApart, joined, places, split, windowed


def _overlaid(n: int, over: int, length: int, parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Windows of a dim of ``length`` elements from parts and the place of each one's first: the
    later parts over the earlier ones.
    """
    (x, at), *rest = parts
    chunk = -(-length // n)

    def windows(part: Tensor, first: int) -> Tensor:
        if part.dtype != x.dtype:
            raise FarApart
        # The elements of a small part are few, wherever they go.
        cut = WINDOWS if part.shape[over] <= chunk else split
        return cut(part, over, n, -first, chunk, chunk)

    made = windows(x, at)
    place = places(made, over, 0, chunk)
    for part, first in rest:
        held = windows(part, first)
        is_here = place >= first
        if first + part.shape[over] < length:
            is_here = is_here & (place < first + part.shape[over])
        made = torch.where(is_here, held, made)
    return made


@windowed(aten.cat.default)
def _cat(n: int, over: int, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    ndim = tensors[-1].ndim
    if len({(t.ndim, t.dtype) for t in tensors}) > 1 or dim % ndim != over:
        raise FarApart
    sizes = [t.shape[over] for t in tensors]
    if MOST_PACKS * math.gcd(*sizes) >= sum(sizes):
        raise FarApart
    firsts = itertools.accumulate(sizes, initial=0)
    parts = [(t, first) for t, first in zip(tensors, firsts, strict=False) if t.shape[over]]
    return joined(_overlaid(n, over, sum(sizes), parts), over, sum(sizes))


@windowed(aten.slice_scatter.default)
def _slice_scatter(
    n: int, over: int, x: Tensor, part: Tensor,
    dim: int = 0, start: Any = None, end: Any = None, step: int = 1,
) -> Tensor:  # fmt: skip
    if dim % x.ndim != over or step != 1 or not part.shape[over]:
        raise FarApart
    first, _, _ = slice_bounds(start, end, step, x.shape[over])
    length = x.shape[over]
    return joined(_overlaid(n, over, length, [(x, 0), (part, first)]), over, length)


OVERLAYS = frozenset((aten.cat.default, aten.slice_scatter.default))  # of several such tensors


# Padding by elements of the dim: these are few, and are looked up.


def _split_pad(x: Tensor, over: int, pad: Sequence[int]) -> tuple[int, int, list[int]]:
    """Padding before and after a dim, and of the other dims."""
    at = 2 * (x.ndim - 1 - over)
    if not 0 <= at < len(pad) or min(pad) < 0:
        raise FarApart
    return pad[at], pad[at + 1], [*pad[:at], 0, 0, *pad[at + 2 :]]


def _read(is_reflected: bool, size: int, before: int, after: int, device: Any) -> list[Tensor]:
    """The elements of a dim that are put before and after it."""
    first, last = torch.arange(before, device=device), torch.arange(after, device=device)
    if is_reflected:
        return [before - first, size - 2 - last]
    return [torch.zeros_like(first), torch.full_like(last, size - 1)]


def _padded(
    op: Any, ndim: int, is_reflected: bool, n: int, over: int, x: Tensor, pad: Sequence[int]
) -> Tensor:
    before, after, rest = _split_pad(x, over, pad)
    size = x.shape[over]
    read = _read(is_reflected, size, before, after, x.device)
    parts = [(x, before)]
    for at, first in zip(read, (0, before + size), strict=True):
        if len(at):
            parts.append((x.index_select(over, at), first))
    y = _overlaid(n, over, before + size + after, parts)
    if any(rest):
        batch = x.ndim > ndim + 1
        y = op(y.flatten(0, 1) if batch else y, rest)
        y = y.unflatten(0, (n, -1)) if batch else y
    return joined(y, over, before + size + after)


def _padded_backward(
    op: Any, ndim: int, is_reflected: bool,
    n: int, over: int, grad: Tensor, x: Tensor, pad: Sequence[int],
) -> Tensor:  # fmt: skip
    before, after, rest = _split_pad(x, over, pad)
    size, chunk = x.shape[over], -(-x.shape[over] // n)

    def unpadded(grad: Tensor) -> Tensor:
        """The gradient without the padding of the other dims."""
        if not any(rest):
            return grad
        shape = [*x.shape]
        shape[over] = grad.shape[over - x.ndim]
        batch = grad.ndim > ndim + 2
        like = grad.new_empty([*grad.shape[: grad.ndim - x.ndim], *shape])
        made = op(*((t.flatten(0, 1) if batch else t) for t in (grad, like)), rest)
        return made.unflatten(0, grad.shape[:2]) if batch else made

    made = joined(unpadded(split(grad, over, n, before, chunk, chunk)), over, size)
    read = _read(is_reflected, size, before, after, x.device)
    for at, first in zip(read, (0, before + size), strict=True):
        if len(at):
            place = torch.arange(first, first + len(at), device=x.device)
            made = made.index_add(over, at, unpadded(grad.index_select(over, place)))
    return made


for _ndim in (1, 2, 3):
    for _name, _is_reflected in (("reflection", True), ("replication", False)):
        _op = getattr(aten, f"{_name}_pad{_ndim}d").default
        _back = getattr(aten, f"{_name}_pad{_ndim}d_backward").default
        windowed(_op)(functools.partial(_padded, _op, _ndim, _is_reflected))
        windowed(_back)(functools.partial(_padded_backward, _back, _ndim, _is_reflected))
