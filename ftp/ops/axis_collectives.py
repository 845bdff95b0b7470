"""Ops for collectives along a mesh axis, as ``ftp.axis`` traces them, with their gradients.

The ops compute shapes only: the partitioner replaces them by collectives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.define import define
from ftp.ops.exchange_rows import ExchangeRows


def _define(
    schema: str, kernel: Callable[..., Tensor], vmap: Callable[..., tuple[Any, ...]]
) -> None:
    target = define(schema)
    torch.library.impl(target._name, "CompositeExplicitAutograd")(kernel)

    def batched(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any
    ) -> tuple[Tensor, int | None]:
        at = in_dims[0]
        return target(x, *(args if at is None else vmap(at, *args))), at

    torch.library.register_vmap(target._name, batched)


def _scaled(x: Tensor, dim: int, times: int = 1, by: int = 1) -> list[int]:
    return [s * times // by if d == dim else s for d, s in enumerate(x.shape)]


def _batched_dim(at: int, dim: int) -> int:
    """``dim`` after a batch dim is inserted at ``at``."""
    return dim + (dim >= at)


_define(
    "all_reduce(Tensor x, str op, str axis) -> Tensor",
    lambda x, op, axis: x.new_empty(x.shape),
    lambda at, *args: args,
)
_define(
    "contribute(Tensor x, str axis) -> Tensor",
    lambda x, axis: x.new_empty(x.shape),
    lambda at, *args: args,
)
_define(
    "ppermute(Tensor x, str axis, int n, int[] perm) -> Tensor",
    lambda x, axis, n, perm: x.new_empty(x.shape),
    lambda at, *args: args,
)
_define(
    "all_gather(Tensor x, str axis, int n, int dim) -> Tensor",
    lambda x, axis, n, dim: x.new_empty(_scaled(x, dim, n)),
    lambda at, axis, n, dim: (axis, n, _batched_dim(at, dim)),
)
_define(
    "reduce_scatter(Tensor x, str axis, int n, int dim) -> Tensor",
    lambda x, axis, n, dim: x.new_empty(_scaled(x, dim, by=n)),
    lambda at, axis, n, dim: (axis, n, _batched_dim(at, dim)),
)
_define(
    "own_part(Tensor x, str axis, int n, int dim) -> Tensor",
    lambda x, axis, n, dim: x.new_empty(_scaled(x, dim, by=n)),
    lambda at, axis, n, dim: (axis, n, _batched_dim(at, dim)),
)
# This rank's part of a dim, with zeros in place of the other ranks' parts.
_define(
    "place_part(Tensor x, str axis, int n, int dim) -> Tensor",
    lambda x, axis, n, dim: x.new_empty(_scaled(x, dim, n)),
    lambda at, axis, n, dim: (axis, n, _batched_dim(at, dim)),
)
_define(
    "all_to_all(Tensor x, str axis, int n, int split, int concat) -> Tensor",
    lambda x, axis, n, split, concat: x.new_empty(
        [s // n if d == split else s * n if d == concat else s for d, s in enumerate(x.shape)]
    ),
    lambda at, axis, n, split, concat: (axis, n, _batched_dim(at, split), _batched_dim(at, concat)),
)
OPS = torch.ops.ftp


def axis_of(target: Any, args: Sequence[Any]) -> str | None:
    """The mesh axis of a call of one of the ops above (``args`` without the tensor), else None."""
    if target in (OPS.all_reduce.default, OPS.exchange_rows.default):
        return args[1]
    return args[0] if target in _ALL else None


_ALL = {
    op.default
    for op in (
        OPS.all_reduce,
        OPS.contribute,
        OPS.ppermute,
        OPS.all_gather,
        OPS.reduce_scatter,
        OPS.own_part,
        OPS.place_part,
        OPS.all_to_all,
    )
}


def linear(x: Tensor, target: Any, args: tuple[Any, ...]) -> Tensor:
    """Apply a linear collective with its gradient."""
    applied: Any = _Linear.apply(x, target, args)
    return applied


def reduced(x: Tensor, op: str, axis: str) -> Tensor:
    if op == "sum":
        return linear(x, OPS.all_reduce.default, (op, axis))
    return _Extremum.apply(x, op, axis)  # type: ignore[return-value]


def differentiable(target: Any) -> Callable[..., Tensor]:
    """A collective's op with its gradient."""
    if target is OPS.exchange_rows.default:
        return lambda *args: ExchangeRows.apply(*args)  # type: ignore[return-value]
    if target is OPS.all_reduce.default:
        return lambda x, op, axis: reduced(x, op, axis)
    return lambda x, *args: linear(x, target, args)


def _transpose(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    if target is OPS.all_gather.default:
        return OPS.reduce_scatter.default, args
    if target is OPS.reduce_scatter.default:
        return OPS.all_gather.default, args
    if target is OPS.own_part.default:
        return OPS.place_part.default, args
    if target is OPS.place_part.default:
        return OPS.own_part.default, args
    if target is OPS.ppermute.default:
        axis, n, perm = args
        pairs = sorted(zip(perm[1::2], perm[::2], strict=True))
        return target, (axis, n, tuple(i for pair in pairs for i in pair))
    if target is OPS.all_to_all.default:
        axis, n, split, concat = args
        return target, (axis, n, concat, split)
    assert target in (OPS.all_reduce.default, OPS.contribute.default)
    return target, args


class _Linear(torch.autograd.Function):
    """A linear collective; its gradient is its transpose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, target: Any, args: tuple[Any, ...]) -> Tensor:  # type: ignore[override]
        return target(x, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Linear.apply(grad, *_transpose(*ctx.call)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:  # type: ignore[override]
        return _Linear.apply(tangent, *ctx.call)


class _Extremum(torch.autograd.Function):
    """Maximum or minimum over ranks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, op: str, axis: str) -> Tensor:  # type: ignore[override]
        return OPS.all_reduce.default(x, op, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.axis = inputs[2]
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        ties = (x == y).to(x.dtype)
        share = reduced(grad, "sum", ctx.axis) / OPS.all_reduce.default(ties, "sum", ctx.axis)
        return share * ties, None, None
