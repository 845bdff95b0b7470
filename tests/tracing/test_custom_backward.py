"""``backward`` of the user's ``torch.autograd.Function`` is traced as other code is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ftp
from ftp import P


def constant(x: Tensor, t: Tensor, g: Tensor) -> Tensor:
    """As solvers of differential equations check times that they have turned around."""
    rising = t.flip(0)[1:] > t.flip(0)[:-1]
    assert rising.all() or (~rising).all(), "times must be in order"
    return g * t.sum()


def branch(x: Tensor, t: Tensor, g: Tensor) -> Tensor:
    return g * 2 if g.square().sum() > x.square().sum() else g * 3


def number(x: Tensor, t: Tensor, g: Tensor) -> Tensor:
    return g * x.abs().max().item()


def mask(x: Tensor, t: Tensor, g: Tensor) -> Tensor:
    g = g.clone()
    g[x > 0] *= 0.5
    return g * g[x > 0].square().sum()


def again(x: Tensor, t: Tensor, g: Tensor) -> Tensor:
    """As the adjoint method computes products with Jacobians."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(of("number")(x, t), x, g)
    return found * 2 if found.sum() > 0 else found


HOWS = {how.__name__: how for how in (constant, branch, number, mask, again)}


def of(how: str, takes_ctx: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
            ctx.save_for_backward(x, t)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return HOWS[how](*ctx.saved_tensors, *grads), None

    class OfTwoParts(Function):
        @staticmethod
        def forward(x: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

    function: Any = Function if takes_ctx else OfTwoParts
    return lambda x, t: function.apply(x, t)


@pytest.mark.parametrize("takes_ctx", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_code_of_backward_that_depends_on_values(how: str, takes_ctx: bool):
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (
            (of(how, takes_ctx)(x @ w, torch.linspace(0.0, 1.0, 3, dtype=x.dtype)) * x).cos().sum()
        )

    torch.manual_seed(0)
    w, x = torch.randn(4, 4).double(), torch.randn(6, 4).double()
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"))
    for scale in (1.0, -0.3):  # both ways of the branches
        leaf = (scale * w).requires_grad_()
        expected = loss(leaf, x)
        (grad,) = torch.autograd.grad(expected, leaf)
        value, found = step(scale * w, x)
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(found, grad)
