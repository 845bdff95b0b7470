"""Ops that are linear in their first tensor, with the gradient: another such op, the transpose."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Per op, from the shape of its tensor and its other arguments to the transpose and its arguments.
TRANSPOSES: dict[Any, Callable[..., tuple[Any, ...]]] = {}


def linear(x: Tensor, target: Any, *args: Any) -> Tensor:
    """``target(x, *args)`` with its gradient. Tensors among ``args`` come first."""
    applied: Any = _Linear.apply(x, target, *args)
    return applied


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, target: Any, *args: Any) -> Tensor:
        return target(x, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.target, *args = inputs
        tensors = [a for a in args if isinstance(a, Tensor)]
        ctx.shape, ctx.rest = x.shape, args[len(tensors) :]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        args = *ctx.saved_tensors, *ctx.rest
        found = _Linear.apply(grad, *TRANSPOSES[ctx.target](ctx.shape, *args))
        return found, None, *(None for _ in args)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Linear.apply(tangent, ctx.target, *ctx.saved_tensors, *ctx.rest)
