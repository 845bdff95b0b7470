"""Stack and unstack tensors of layers along dim 0: two ops that the tracer and every transform
keep.

A slice of a stack is gathered or reduced by itself, never the stack as a whole, so that a program
holds one layer's tensors at a time.
"""

from typing import Any

import torch
from torch import Tensor

from ftp.ops.define import define

UNSTACK = define("unstack(Tensor x) -> Tensor[]")
STACK = define("stack(Tensor[] xs) -> Tensor")


@torch.library.impl("ftp::unstack", "CompositeExplicitAutograd")
def _parts(x: Tensor) -> list[Tensor]:
    # An op must not return its input, nor a view of it.
    return [part.clone() for part in x.unbind(0)]


@torch.library.impl("ftp::stack", "CompositeExplicitAutograd")
def _together(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs)


class Unstack(torch.autograd.Function):
    """The slices along dim 0."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(UNSTACK(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Stack.apply(*grads)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return Unstack.apply(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> Any:
        parts: Any = Unstack.apply(x.movedim(in_dims[0], 1))
        return parts, (0,) * len(parts)


class Stack(torch.autograd.Function):
    """The inverse of ``Unstack``."""

    @staticmethod
    def forward(*xs: Tensor) -> Tensor:
        return STACK(list(xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Unstack.apply(grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return Stack.apply(*tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *xs: Tensor) -> Any:
        batched = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(xs, in_dims, strict=True)
        ]
        return Stack.apply(*batched), 1
