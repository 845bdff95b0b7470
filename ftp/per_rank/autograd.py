"""Per-rank code in autograd, torch.func and torch.vmap.

The op ``ftp::local`` carries a program through a surrounding trace; here it gets its gradient and
its map over a batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from ftp.errors import TraceError
from ftp.ops.axis_collectives import OPS
from ftp.per_rank.gradient import Pair
from ftp.per_rank.program import RankCode, has_gradient, program_of
from ftp.per_rank.transforms import batched, pair_of
from ftp.rules.call import formula_of
from ftp.source import at_line


class _ReverseMode(torch.autograd.Function):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise TraceError(
            f"{at_line()}ftp.local is differentiated in forward mode (jvp, jacfwd); it has reverse"
            " mode only."
        )


class Apply(_ReverseMode):
    """The op ``ftp::local`` with its gradient, for autograd and torch.func."""

    @staticmethod
    def forward(pair: Pair, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(OPS.local.default(list(xs), pair.forward.key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pair: Pair = inputs[0]
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        # Residuals have gradients too: second derivatives pass through them.
        ctx.mark_non_differentiable(*(y for y in output if not has_gradient(y.dtype)))
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in output]
        ctx.save_for_backward(
            *(
                (inputs[1 + i] if kind == "operand" else output[i])
                for kind, i in pair.given
                if kind != "cotangent"
            ),
            *inputs[1:],
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pair: Pair = ctx.pair
        if all(g is None for g in grads):
            return (None,) * (1 + len(pair.forward.operands))
        every = ctx.saved_tensors  # read once, as torch.utils.checkpoint requires
        xs = every[-len(pair.forward.operands) :]
        if any(g is not None and i not in pair.differentiable for i, g in enumerate(grads)):
            return _gradients(pair.forward, xs, grads)
        saved = iter(every)
        taken = []
        for kind, i in pair.given:
            if kind != "cotangent":
                taken.append(next(saved))
            elif (grad := grads[i]) is not None:
                taken.append(grad)
            else:
                shape, dtype, device = ctx.shapes[i]
                taken.append(torch.zeros(shape, dtype=dtype, device=device))
        return _run_backward(pair, taken, len(pair.forward.operands))

    @staticmethod
    def vmap(info: Any, in_dims: Any, pair: Pair, *xs: Tensor) -> Any:
        return _mapped(info, in_dims[1:], pair.forward, xs)


class PerRankRun(_ReverseMode):
    """The op ``ftp::local``, whose gradient is derived only when asked for: that of a backward
    program rarely is.
    """

    @staticmethod
    def forward(program: RankCode, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(OPS.local.default(list(xs), program.key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.program, *xs = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in output if not has_gradient(y.dtype)))
        ctx.save_for_backward(*xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(g is None for g in grads):
            return (None,) * (1 + len(ctx.program.operands))
        return _gradients(ctx.program, ctx.saved_tensors, grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: RankCode, *xs: Tensor) -> Any:
        return _mapped(info, in_dims[1:], program, xs)


def _gradients(program: RankCode, xs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Any:
    """The gradients of a program's operands, after a None for the program."""
    pair = pair_of(program.key, xs[0].device.type)
    outputs: Any = PerRankRun.apply(pair.forward, *xs)
    taken = []
    for kind, i in pair.given:
        if kind != "cotangent":
            taken.append(xs[i] if kind == "operand" else outputs[i])
        else:
            grad = grads[i]
            taken.append(torch.zeros_like(outputs[i]) if grad is None else grad)
    return _run_backward(pair, taken, len(xs))


def _run_backward(pair: Pair, given: Sequence[Tensor], n_operands: int) -> Any:
    found = PerRankRun.apply(pair.backward, *given)
    by_operand = dict(zip(pair.wrt, found, strict=True))
    return (None, *(by_operand.get(i) for i in range(n_operands)))


def _mapped(
    info: Any, in_dims: Sequence[int | None], program: RankCode, xs: Sequence[Tensor]
) -> Any:
    """A program mapped over a batch, on tensors whose batch dims are ``in_dims``."""
    has = tuple(d is not None for d in in_dims)
    mapped = batched(program.key, has, formula_of(info.batch_size), xs[0].device.type)
    given = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, in_dims, strict=True)]
    made: Any = PerRankRun.apply(mapped, *given)
    return made, (0,) * len(program.results)


def _vmap_of_op(info: Any, in_dims: Any, xs: list[Tensor], key: str) -> Any:
    made, dims = _mapped(info, in_dims[0], program_of(key), xs)
    return list(made), list(dims)


library.register_vmap("ftp::local", _vmap_of_op)
