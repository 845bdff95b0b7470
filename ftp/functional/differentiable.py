"""Shared by the autograd functions of remat and cond: which values have gradients, what is saved
for them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_differentiable(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def save_inputs(ctx: Any, tensors: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    """Save an autograd function's tensors, and note in ``ctx.has_gradient`` which results have a
    gradient.
    """
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.has_gradient = [is_differentiable(x) for x in output]
    ctx.mark_non_differentiable(*(x for x in output if not is_differentiable(x)))


def of_some(
    fn: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], at: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    """``fn`` as a function of the tensors ``at``, to its differentiable results."""

    def some(*given: Tensor) -> tuple[Tensor, ...]:
        filled = list(tensors)
        for i, tensor in zip(at, given, strict=True):
            filled[i] = tensor
        return tuple(x for x in fn(*filled) if is_differentiable(x))

    return some


def pulled_by_autograd(
    fn: Callable[..., Sequence[Tensor]],
    given: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    again: bool,
) -> Sequence[Tensor | None]:
    """The gradients of ``given`` by torch.autograd, from those of the results of ``fn``.

    Args:
        again: for a second derivative; a tensor that has a gradient already keeps it.
    """
    with torch.enable_grad():
        own = [x.view_as(x) if again and x.requires_grad else x.detach() for x in given]
        own = [x if x.requires_grad else x.requires_grad_() for x in own]
        pairs = [(x, grad) for x, grad in zip(fn(*own), grads, strict=True) if x.requires_grad]
        if not pairs:
            return [None] * len(given)
        of, pulled = zip(*pairs, strict=True)
        return torch.autograd.grad(of, own, pulled, allow_unused=True, create_graph=again)
