"""Convolutions, and transposed ones, on windows of a dim of space."""

from collections.abc import Sequence

from torch import Tensor

from ftp.rules.overloads import aten
from ftp.rules.windows.registry import FarApart, joined, places, split, windowed


def _convolved(
    x: Tensor,
    weight: Tensor,
    n: int,
    dim: int,
    length: int,
    how: Sequence[Sequence[int]],
    groups: int,
) -> Tensor:
    """A convolution without bias, whose result has ``length`` elements along ``dim``."""
    (stride, padding, dilation), at = how, dim - 2
    chunk, reach = -(-length // n), (weight.shape[dim] - 1) * dilation[at] + 1
    step = chunk * stride[at]
    x = split(x, dim, n, -padding[at], step, step - stride[at] + reach)
    inside = [0 if d == at else p for d, p in enumerate(padding)]
    y = aten.convolution.default(
        x.flatten(0, 1), weight, None, stride, inside, dilation, False, [0] * len(stride), groups
    )
    return joined(y.unflatten(0, (n, -1)), dim, length)


def _spread(
    x: Tensor,
    weight: Tensor,
    n: int,
    dim: int,
    shape: Sequence[int],
    how: Sequence[Sequence[int]],
    groups: int,
) -> Tensor:
    """A transposed convolution without bias, whose result has sizes ``shape`` in space: element i
    of ``x`` is added to the results from ``i * stride - padding`` on.
    """
    (stride, padding, dilation), at = how, dim - 2
    length, reach = shape[at], (weight.shape[dim] - 1) * dilation[at] + 1
    # A window of results starts at a multiple of the stride, so that all windows meet elements of
    # ``x`` alike.
    of_x = -(-length // (n * stride[at]))
    chunk = of_x * stride[at]
    first = -((reach - 1 - padding[at]) // stride[at])  # of x, that the first result needs
    last = (chunk - 1 + padding[at]) // stride[at]
    x = split(x, dim, n, first, of_x, last - first + 1)
    # Of all that the elements of a window are added to, the window's results are in the middle.
    begin = padding[at] - first * stride[at]
    end = (last - first) * stride[at] + reach - begin - chunk
    cropped = max(min(begin, end), 0)
    inside = [cropped if d == at else p for d, p in enumerate(padding)]
    made = [
        (x.shape[3 + d] - 1) * s - 2 * p + (weight.shape[2 + d] - 1) * dil + 1
        for d, (s, p, dil) in enumerate(zip(stride, inside, dilation, strict=True))
    ]
    more = [0 if d == at else s - m for d, (s, m) in enumerate(zip(shape, made, strict=True))]
    y = aten.convolution.default(
        x.flatten(0, 1), weight, None, stride, inside, dilation, True, more, groups
    )
    around = [*[0, 0] * (y.ndim - 1 - dim), cropped - begin, cropped - end]
    y = aten.constant_pad_nd.default(y, around) if any(around) else y
    return joined(y.unflatten(0, (n, -1)), dim, length)


def _weight_gradient(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    n: int,
    dim: int,
    how: Sequence[Sequence[int]],
    groups: int,
) -> Tensor:
    """The gradient of a convolution's weight, from its operand and its result's gradient."""
    (stride, padding, dilation), at = how, dim - 2
    chunk, reach = -(-grad.shape[dim] // n), (weight.shape[dim] - 1) * dilation[at] + 1
    step, whole = chunk * stride[at], x.shape[dim]
    x = split(x, dim, n, -padding[at], step, step - stride[at] + reach)
    read = (grad.shape[dim] - 1) * stride[at] + reach - padding[at]
    if read < whole and grad.shape[dim] < n * chunk:
        # The rest may be infinite, and times zeros beyond the last gradient NaN.
        x = x.masked_fill(places(x, dim, -padding[at], step) >= read, 0.0)
    grad = split(grad, dim, n, 0, chunk, chunk)
    inside = [0 if d == at else p for d, p in enumerate(padding)]
    _, made, _ = aten.convolution_backward.default(
        grad.flatten(0, 1), x.flatten(0, 1), weight, None, stride, inside, dilation, False,
        [0] * len(stride), groups, [False, True, False],
    )  # fmt: skip
    return made


def _each(numbers: Sequence[int], ndim: int) -> list[int]:
    """A number for each dim of space; a single one holds for all."""
    return [*numbers] * (ndim // len(numbers))


def _require_space(
    x: Tensor, dim: int, stride: Sequence[int], output_padding: Sequence[int]
) -> None:
    """Raise for a dim that is none of space, and where the convolution of a transposed one's result
    has more elements than its operand: torch gives it the operand's size all the same.
    """
    if not 2 <= dim < x.ndim or any(
        more >= step for more, step in zip(output_padding, stride, strict=True)
    ):
        raise FarApart


@windowed(aten.convolution.default)
def _convolution(
    n: int,
    dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    space = range(x.ndim - 2)
    how = stride, padding, dilation = [_each(v, x.ndim - 2) for v in (stride, padding, dilation)]
    output_padding = _each(output_padding, x.ndim - 2)
    _require_space(x, dim, stride, output_padding)
    if transposed:
        shape = [
            (x.shape[2 + d] - 1) * stride[d]
            - 2 * padding[d]
            + (weight.shape[2 + d] - 1) * dilation[d]
            + 1
            + output_padding[d]
            for d in space
        ]
        y = _spread(x, weight, n, dim, shape, how, groups)
    else:
        at = dim - 2
        taps = (weight.shape[dim] - 1) * dilation[at] + 1
        length = (x.shape[dim] + 2 * padding[at] - taps) // stride[at] + 1
        y = _convolved(x, weight, n, dim, length, how, groups)
    return y if bias is None else y + bias.reshape([-1, *[1] * len(space)])


@windowed(aten.convolution_backward.default)
def _convolution_backward(
    n: int,
    dim: int,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    how = [_each(v, x.ndim - 2) for v in (stride, padding, dilation)]
    _require_space(x, dim, how[0], _each(output_padding, x.ndim - 2))
    of_x = of_weight = of_bias = None
    if output_mask[0] and transposed:
        of_x = _convolved(grad, weight, n, dim, x.shape[dim], how, groups)
    elif output_mask[0]:
        of_x = _spread(grad, weight, n, dim, x.shape[2:], how, groups)
    if output_mask[1]:
        pair = (grad, x) if transposed else (x, grad)
        of_weight = _weight_gradient(*pair, weight, n, dim, how, groups)
    if output_mask[2]:
        of_bias = grad.sum([0, *range(2, grad.ndim)])
    return of_x, of_weight, of_bias
