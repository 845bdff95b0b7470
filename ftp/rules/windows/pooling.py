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

    def require_even(self, size: int, ceil_mode: bool) -> None:
        """Raise where the last result along the dim would be of elements past its end."""
        if ceil_mode and (size + 2 * self.padding[self.at] - self.reach) % self.stride[self.at]:
            raise FarApart

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
    pool.require_even(x.shape[dim], ceil_mode)
    held, whole = pool.windows(x, n), x.shape[dim]
    size, step, first = held.shape[1 + dim], pool.step(n, whole), -pool.padding[pool.at]
    if first:
        place = places(held, dim, first, step)
        held = held.masked_fill((place < 0) | (place >= whole), -math.inf)
    made = op(pool.batch(held), pool.kernel, pool.stride, pool.inside, pool.dilation, ceil_mode)
    y, index = (pool.unbatch(part, n, x.ndim) for part in made)
    index = _placed(index, (size, whole), first, step, math.prod(x.shape[dim + 1 :]))
    return tuple(joined(part, dim, pool.length(whole)) for part in (y, index))  # type: ignore


def _max_pool_backward(
    op: Any, ndim: int, n: int, dim: int, grad: Tensor, x: Tensor, kernel: Any, stride: Any,
    padding: Any, dilation: Any, ceil_mode: bool, index: Tensor,
) -> Tensor:  # fmt: skip
    pool = _Pool.of(x, dim, ndim, kernel, stride, padding, dilation=dilation)
    pool.require_even(x.shape[dim], ceil_mode)
    whole = x.shape[dim]
    back = pool.back(n, whole)
    grad, index = (split(t, dim, n, back.first, back.step, back.size) for t in (grad, index))
    sizes, inner = (whole, back.held), math.prod(x.shape[dim + 1 :])
    index = _placed(index, sizes, -back.start, -back.chunk, inner)
    how = pool.kernel, pool.stride, pool.inside, pool.dilation, ceil_mode

    def by(like: Tensor) -> Tensor:
        return op(pool.batch(grad), like, *how, pool.batch(index))

    return pool.gradient(back, n, x.shape, by, grad)


def _mean_pool(
    op: Any, ndim: int, n: int, dim: int, x: Tensor, kernel: Any, stride: Any = (),
    padding: Any = (0,), ceil_mode: bool = False, counts_padding: bool = True,
    divisor: int | None = None,
) -> Tensor:  # fmt: skip
    pool = _Pool.of(x, dim, ndim, kernel, stride, padding)
    _require_one_divisor(pool, x, ceil_mode, counts_padding)
    held = pool.batch(pool.windows(x, n))
    y = op(held, pool.kernel, pool.stride, pool.inside, ceil_mode, counts_padding, divisor)
    return joined(pool.unbatch(y, n, x.ndim), dim, pool.length(x.shape[dim]))


def _mean_pool_backward(
    op: Any, ndim: int, n: int, dim: int, grad: Tensor, x: Tensor, kernel: Any, stride: Any,
    padding: Any, ceil_mode: bool, counts_padding: bool, divisor: int | None,
) -> Tensor:  # fmt: skip
    pool = _Pool.of(x, dim, ndim, kernel, stride, padding)
    _require_one_divisor(pool, x, ceil_mode, counts_padding)
    back = pool.back(n, x.shape[dim])
    grad = split(grad, dim, n, back.first, back.step, back.size)
    how = pool.kernel, pool.stride, pool.inside, ceil_mode, counts_padding, divisor
    return pool.gradient(back, n, x.shape, lambda like: op(pool.batch(grad), like, *how), grad)


def _require_one_divisor(pool: _Pool, x: Tensor, ceil_mode: bool, counts_padding: bool) -> None:
    """Raise where results at the ends are means of fewer elements."""
    pool.require_even(x.shape[pool.dim], ceil_mode)
    if pool.padding[pool.at] and not counts_padding:
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


# Upsampling by whole numbers: a window's results are of its own elements and, where it is linear or
# cubic, of so many ``beside`` them; past the ends of the dim, copies of the last element.


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


def _split_how(beside: int, how: Sequence[Any]) -> tuple[Sequence[Any], Sequence[float | None]]:
    """``align_corners``, of linear and cubic upsampling alone, and the scales."""
    if beside and how[0]:
        raise FarApart  # places between elements, other ones in each window
    return (how[:1], how[1:]) if beside else ((), how)


def _upsampled(
    op: Any, beside: int, n: int, dim: int, x: Tensor, sizes: Sequence[int], *how: Any
) -> Tensor:
    align, scales = _split_how(beside, how)
    if beside and not x.is_floating_point():
        raise FarApart
    times, whole = _times(dim, sizes, x.shape[2:], scales), x.shape[dim]
    chunk = -(-whole // n)
    held = split(x, dim, n, -beside, chunk, chunk + 2 * beside)
    place = places(held, dim, -beside, chunk)
    for k in range(1, beside + 1):
        held = torch.where(place == -k, held.roll(-k, 1 + dim), held)
        held = torch.where(place == whole - 1 + k, held.roll(k, 1 + dim), held)
    now = [held.shape[1 + d] * times if d == dim else s for d, s in enumerate(sizes, 2)]
    y = op(held.flatten(0, 1), now, *align, *scales).unflatten(0, (n, -1))
    own = y.narrow(1 + dim, beside * times, chunk * times) if beside else y
    return joined(own, dim, sizes[dim - 2])


def _upsampled_vec(
    op: Any, beside: int, n: int, dim: int, x: Tensor, sizes: Sequence[int] | None, *how: Any
) -> Tensor:
    *align, scales = how
    given = [*(scales or [None] * (x.ndim - 2))]
    made = sizes or [int(s * f) for s, f in zip(x.shape[2:], scales or (), strict=True)]
    return _upsampled(op, beside, n, dim, x, made, *align, *given)


def _upsampled_backward(
    op: Any, beside: int, n: int, dim: int, grad: Tensor, sizes: Sequence[int],
    of: Sequence[int], *how: Any,
) -> Tensor:  # fmt: skip
    align, scales = _split_how(beside, how)
    times, whole = _times(dim, sizes, of[2:], scales), of[dim]
    chunk = -(-whole // n)
    size = chunk + 2 * beside
    grad = split(grad, dim, n, -beside * times, chunk * times, size * times).flatten(0, 1)
    now = [size if d == dim else s for d, s in enumerate(of)]
    made = op(grad, grad.shape[2:], [n * of[0], *now[1:]], *align, *scales).unflatten(0, (n, -1))
    total, place = made, places(made, dim, -beside, chunk)
    for k in range(1, beside + 1):
        total = total + torch.where(place == 0, made.roll(k, 1 + dim), 0.0)
        total = total + torch.where(place == whole - 1, made.roll(-k, 1 + dim), 0.0)
    own = total.narrow(1 + dim, beside, chunk) if beside else total
    return joined(own, dim, whole)


for _name, _beside in (
    ("upsample_nearest1d", 0), ("upsample_nearest2d", 0), ("upsample_nearest3d", 0),
    ("_upsample_nearest_exact1d", 0), ("_upsample_nearest_exact2d", 0),
    ("_upsample_nearest_exact3d", 0), ("upsample_linear1d", 1), ("upsample_bilinear2d", 1),
    ("upsample_trilinear3d", 1), ("upsample_bicubic2d", 2),
):  # fmt: skip
    _op = getattr(aten, _name)
    _back = getattr(aten, f"{_name}_backward").default
    windowed(_op.default)(functools.partial(_upsampled, _op.default, _beside))
    windowed(_op.vec)(functools.partial(_upsampled_vec, _op.default, _beside))
    windowed(_back)(functools.partial(_upsampled_backward, _back, _beside))
