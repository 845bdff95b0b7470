"""Pooling, and upsampling to the nearest element, on windows of a dim of space."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftp.rules.overloads import aten
from ftp.rules.windows.registry import FarApart, joined, places, split, windowed


class _Back(NamedTuple):
    """Windows of operands and of the results that they are in, for a gradient.

    Attributes:
        chunk: operands of a window.
        first, step, size: the windows of results.
        held: operands that a window's results are of.
        start: where the first of these is, from the window's own first operand.
    """

    chunk: int
    first: int
    step: int
    size: int
    held: int
    start: int


class _Pool(NamedTuple):
    """Pooling of a tensor along ``dim``, the ``at``-th of its last ``ndim``."""

    dim: int
    at: int
    ndim: int
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @classmethod
    def of(cls, x: Tensor, dim: int, ndim: int, *how: Any, dilation: Any = (1,)) -> "_Pool":
        """Of an op's kernel, stride and padding; a single number holds for every dim."""
        at = dim - (x.ndim - ndim)
        if not 0 <= at < ndim:
            raise FarApart
        kernel, stride, padding = how
        every = (kernel, stride or kernel, padding, dilation)
        return cls(dim, at, ndim, *([*v] * (ndim // len(v)) for v in every))

    @property
    def reach(self) -> int:
        """Elements from the first to the last that a result is of."""
        return (self.kernel[self.at] - 1) * self.dilation[self.at] + 1

    @property
    def inside(self) -> list[int]:
        """The padding of the other dims; windows have theirs."""
        return [0 if d == self.at else p for d, p in enumerate(self.padding)]

    def length(self, size: int) -> int:
        """The number of results of so many elements."""
        return (size + 2 * self.padding[self.at] - self.reach) // self.stride[self.at] + 1

    def step(self, n: int, size: int) -> int:
        """From one window of operands to the next."""
        return -(-self.length(size) // n) * self.stride[self.at]

    def windows(self, x: Tensor, n: int) -> Tensor:
        step = self.step(n, x.shape[self.dim])
        size = step - self.stride[self.at] + self.reach
        return split(x, self.dim, n, -self.padding[self.at], step, size)

    def batch(self, x: Tensor) -> Tensor:
        """Windows as the op's batch."""
        return x.flatten(0, 1) if x.ndim == self.ndim + 3 else x

    def unbatch(self, x: Tensor, n: int, ndim: int) -> Tensor:
        return x.unflatten(0, (n, -1)) if x.ndim == ndim else x

    def back(self, n: int, size: int) -> _Back:
        stride, padding = self.stride[self.at], self.padding[self.at]
        step = -(-size // (n * stride))
        first = -((self.reach - 1 - padding) // stride)
        count = (step * stride - 1 + padding) // stride - first + 1
        held = (count - 1) * stride + self.reach
        return _Back(step * stride, first, step, count, held, first * stride - padding)

    def gradient(
        self,
        back: _Back,
        n: int,
        shape: Sequence[int],
        by: Callable[[Tensor], Tensor],
        like: Tensor,
    ) -> Tensor:
        """The gradient of an operand of this shape: ``by`` gives it from operands of windows, of
        which only the shape counts.
        """
        held = [n, *shape]
        held[1 + self.dim] = back.held
        made = self.unbatch(by(self.batch(like.new_zeros(held))), n, len(shape))
        end = back.chunk - back.start - back.held
        around = [*[0, 0] * (len(shape) - 1 - self.dim), back.start, end]
        made = aten.constant_pad_nd.default(made, around) if back.start or end else made
        return joined(made, self.dim, shape[self.dim])


def _placed(index: Tensor, sizes: tuple[int, int], first: int, step: int, inner: int) -> Tensor:
    """Indices within planes of another size along a dim: ``sizes`` before and now. Window j begins
    ``first + j * step`` after what the indices now count from.
    """
    before, now = sizes
    window = torch.arange(index.shape[0], device=index.device)
    window = window.reshape([-1, *[1] * (index.ndim - 1)])
    rows = index // inner
    place = (rows % before + window * step + first).clamp(0, now - 1)
    return (rows // before * now + place) * inner + index % inner


def _max_pool(
    op: Any, ndim: int, n: int, dim: int, x: Tensor, kernel: Any, stride: Any = (),
    padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pool = _Pool.of(x, dim, ndim, kernel, stride, padding, dilation=dilation)
    if ceil_mode:
        raise FarApart
    held, whole = pool.windows(x, n), x.shape[dim]
    size, step, first = held.shape[1 + dim], pool.step(n, whole), -pool.padding[pool.at]
    if first:
        place = places(held, dim, first, step)
        held = held.masked_fill((place < 0) | (place >= whole), -math.inf)
    made = op(pool.batch(held), pool.kernel, pool.stride, pool.inside, pool.dilation)
    y, index = (pool.unbatch(part, n, x.ndim) for part in made)
    index = _placed(index, (size, whole), first, step, math.prod(x.shape[dim + 1 :]))
    return tuple(joined(part, dim, pool.length(whole)) for part in (y, index))  # type: ignore


def _max_pool_backward(
    op: Any, ndim: int, n: int, dim: int, grad: Tensor, x: Tensor, kernel: Any, stride: Any,
    padding: Any, dilation: Any, ceil_mode: bool, index: Tensor,
) -> Tensor:  # fmt: skip
    pool = _Pool.of(x, dim, ndim, kernel, stride, padding, dilation=dilation)
    if ceil_mode:
        raise FarApart
    whole = x.shape[dim]
    back = pool.back(n, whole)
    grad, index = (split(t, dim, n, back.first, back.step, back.size) for t in (grad, index))
    sizes, inner = (whole, back.held), math.prod(x.shape[dim + 1 :])
    index = _placed(index, sizes, -back.start, -back.chunk, inner)
    how = pool.kernel, pool.stride, pool.inside, pool.dilation, False

    def by(like: Tensor) -> Tensor:
        return op(pool.batch(grad), like, *how, pool.batch(index))

    return pool.gradient(back, n, x.shape, by, grad)


def _mean_pool(
    op: Any, ndim: int, n: int, dim: int, x: Tensor, kernel: Any, stride: Any = (),
    padding: Any = (0,), ceil_mode: bool = False, counts_padding: bool = True,
    divisor: int | None = None,
) -> Tensor:  # fmt: skip
    pool = _Pool.of(x, dim, ndim, kernel, stride, padding)
    _require_one_divisor(pool, ceil_mode, counts_padding)
    held = pool.batch(pool.windows(x, n))
    y = op(held, pool.kernel, pool.stride, pool.inside, False, counts_padding, divisor)
    return joined(pool.unbatch(y, n, x.ndim), dim, pool.length(x.shape[dim]))


def _mean_pool_backward(
    op: Any, ndim: int, n: int, dim: int, grad: Tensor, x: Tensor, kernel: Any, stride: Any,
    padding: Any, ceil_mode: bool, counts_padding: bool, divisor: int | None,
) -> Tensor:  # fmt: skip
    pool = _Pool.of(x, dim, ndim, kernel, stride, padding)
    _require_one_divisor(pool, ceil_mode, counts_padding)
    back = pool.back(n, x.shape[dim])
    grad = split(grad, dim, n, back.first, back.step, back.size)
    how = pool.kernel, pool.stride, pool.inside, False, counts_padding, divisor
    return pool.gradient(back, n, x.shape, lambda like: op(pool.batch(grad), like, *how), grad)


def _require_one_divisor(pool: _Pool, ceil_mode: bool, counts_padding: bool) -> None:
    """Raise where results at the ends are means of fewer elements."""
    if ceil_mode or (pool.padding[pool.at] and not counts_padding):
        raise FarApart


for _ndim, _max, _max_back, _mean, _mean_back in (
    (
        2, aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default, aten.avg_pool2d_backward.default,
    ),
    (
        3, aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default,
        aten.avg_pool3d.default, aten.avg_pool3d_backward.default,
    ),
):  # fmt: skip
    windowed(_max)(functools.partial(_max_pool, _max, _ndim))
    windowed(_max_back)(functools.partial(_max_pool_backward, _max_back, _ndim))
    windowed(_mean)(functools.partial(_mean_pool, _mean, _ndim))
    windowed(_mean_back)(functools.partial(_mean_pool_backward, _mean_back, _ndim))


# Upsampling: a window's results are of its own elements.


def _times(
    dim: int, sizes: Sequence[int], of: Sequence[int], scales: Sequence[float | None]
) -> int:
    """How many results an element has along a dim."""
    at = dim - 2
    if not 0 <= at < len(of) or of[at] == 0 or sizes[at] % of[at]:
        raise FarApart
    times = sizes[at] // of[at]
    if scales and scales[at] not in (None, times):
        raise FarApart
    return times


def _upsampled(
    op: Any, n: int, dim: int, x: Tensor, sizes: Sequence[int], *scales: float | None
) -> Tensor:
    times, chunk = _times(dim, sizes, x.shape[2:], scales), -(-x.shape[dim] // n)
    now = [chunk * times if d == dim else s for d, s in enumerate(sizes, 2)]
    y = op(split(x, dim, n, 0, chunk, chunk).flatten(0, 1), now, *scales)
    return joined(y.unflatten(0, (n, -1)), dim, sizes[dim - 2])


def _upsampled_vec(
    op: Any,
    n: int,
    dim: int,
    x: Tensor,
    sizes: Sequence[int] | None,
    scales: Sequence[float] | None,
) -> Tensor:
    given = [*(scales or [None] * (x.ndim - 2))]
    made = sizes or [int(s * f) for s, f in zip(x.shape[2:], scales or (), strict=True)]
    return _upsampled(op, n, dim, x, made, *given)


def _upsampled_backward(
    op: Any, n: int, dim: int, grad: Tensor, sizes: Sequence[int], of: Sequence[int],
    *scales: float | None,
) -> Tensor:  # fmt: skip
    times, chunk = _times(dim, sizes, of[2:], scales), -(-of[dim] // n)
    grad = split(grad, dim, n, 0, chunk * times, chunk * times).flatten(0, 1)
    now = [chunk if d == dim else s for d, s in enumerate(of)]
    made = op(grad, grad.shape[2:], [n * of[0], *now[1:]], *scales)
    return joined(made.unflatten(0, (n, -1)), dim, of[dim])


for _op in (
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d,
):  # fmt: skip
    windowed(_op.default)(functools.partial(_upsampled, _op.default))
    windowed(_op.vec)(functools.partial(_upsampled_vec, _op.default))
for _op in (
    aten.upsample_nearest1d_backward, aten.upsample_nearest2d_backward,
    aten.upsample_nearest3d_backward, aten._upsample_nearest_exact1d_backward,
    aten._upsample_nearest_exact2d_backward, aten._upsample_nearest_exact3d_backward,
):  # fmt: skip
    windowed(_op.default)(functools.partial(_upsampled_backward, _op.default))
