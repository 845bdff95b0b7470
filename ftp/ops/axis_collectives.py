"""Ops for collectives along a mesh axis, as ``ftp.axis`` traces them, with their gradients.

The ops compute shapes only: the partitioner replaces them by collectives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.define import define
from ftp.ops.exchange_rows import EXCHANGE_ROWS
from ftp.ops.linear import TRANSPOSES, linear

_ALL: set[Any] = set()


def _define(schema: str, kernel: Callable[..., Tensor], dims: int = 0) -> None:
    """Define an op whose last arguments are ``dims`` dims of ``x``."""
    target = define(schema)
    torch.library.impl(target._name, "CompositeExplicitAutograd")(kernel)
    _ALL.add(target)

    def batched(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any
    ) -> tuple[Tensor, int | None]:
        at, first = in_dims[0], len(args) - dims
        after = args if at is None else (*args[:first], *(d + (d >= at) for d in args[first:]))
        return target(x, *after), at

    torch.library.register_vmap(target._name, batched)


def _scaled(x: Tensor, dim: int, times: int = 1, by: int = 1) -> list[int]:
    return [s * times // by if d == dim else s for d, s in enumerate(x.shape)]


_define("all_reduce(Tensor x, str op, str axis) -> Tensor", lambda x, *_: x.new_empty(x.shape))
_define("contribute(Tensor x, str axis) -> Tensor", lambda x, *_: x.new_empty(x.shape))
_define(
    "ppermute(Tensor x, str axis, int n, int[] perm) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
)
_define(
    "all_gather(Tensor x, str axis, int n, int dim) -> Tensor",
    lambda x, axis, n, dim: x.new_empty(_scaled(x, dim, n)),
    dims=1,
)
_define(
    "reduce_scatter(Tensor x, str axis, int n, int dim) -> Tensor",
    lambda x, axis, n, dim: x.new_empty(_scaled(x, dim, by=n)),
    dims=1,
)
_define(
    "own_part(Tensor x, str axis, int n, int dim) -> Tensor",
    lambda x, axis, n, dim: x.new_empty(_scaled(x, dim, by=n)),
    dims=1,
)
# This rank's part of a dim, with zeros in place of the other ranks' parts.
_define(
    "place_part(Tensor x, str axis, int n, int dim) -> Tensor",
    lambda x, axis, n, dim: x.new_empty(_scaled(x, dim, n)),
    dims=1,
)
_define(
    "all_to_all(Tensor x, str axis, int n, int split, int concat) -> Tensor",
    lambda x, axis, n, split, concat: x.new_empty(
        [s // n if d == split else s * n if d == concat else s for d, s in enumerate(x.shape)]
    ),
    dims=2,
)
OPS = torch.ops.ftp


def axis_of(target: Any, args: Sequence[Any]) -> str | None:
    """The mesh axis of a call of one of the ops above (``args`` without the tensor), else None."""
    if target in (OPS.all_reduce.default, EXCHANGE_ROWS):
        return args[1]
    return args[0] if target in _ALL else None


def _permuted_back(_: Any, axis: str, n: int, perm: Sequence[int]) -> tuple[Any, ...]:
    pairs = sorted(zip(perm[1::2], perm[::2], strict=True))
    return OPS.ppermute.default, axis, n, tuple(i for pair in pairs for i in pair)


TRANSPOSES.update({
    OPS.all_reduce.default: lambda _, *args: (OPS.all_reduce.default, *args),
    OPS.contribute.default: lambda _, *args: (OPS.contribute.default, *args),
    OPS.ppermute.default: _permuted_back,
    OPS.all_gather.default: lambda _, *args: (OPS.reduce_scatter.default, *args),
    OPS.reduce_scatter.default: lambda _, *args: (OPS.all_gather.default, *args),
    OPS.own_part.default: lambda _, *args: (OPS.place_part.default, *args),
    OPS.place_part.default: lambda _, *args: (OPS.own_part.default, *args),
    OPS.all_to_all.default: lambda _, axis, n, split, concat: (
        OPS.all_to_all.default, axis, n, concat, split,
    ),
})  # fmt: skip


def reduced(x: Tensor, op: str, axis: str) -> Tensor:
    if op == "sum":
        return linear(x, OPS.all_reduce.default, op, axis)
    return _Extremum.apply(x, op, axis)


def differentiable(target: Any) -> Callable[..., Tensor]:
    """A collective's op with its gradient."""
    if target is OPS.all_reduce.default:
        return reduced
    return lambda x, *args: linear(x, target, *args)


class _Extremum(torch.autograd.Function):
    """Maximum or minimum over ranks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, op: str, axis: str) -> Tensor:
        return OPS.all_reduce.default(x, op, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.axis = inputs[2]
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        ties = (x == y).to(x.dtype)
        share = reduced(grad, "sum", ctx.axis) / OPS.all_reduce.default(ties, "sum", ctx.axis)
        return share * ties, None, None
