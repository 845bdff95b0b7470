"""A multilayer perceptron in float8, and its placements."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ftp import P

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
ScalingType = F.ScalingType


def cast(x: Tensor, dtype: torch.dtype, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Numbers of ``dtype``, and the scale by which they are multiplied to give ``x``."""
    most = x.abs().amax(1, keepdim=True) if by_rows else x.abs().max()
    scale = torch.finfo(dtype).max / most.clamp(min=1e-12).float()
    return (x * scale).to(dtype), scale.reciprocal()


def product(a: Tensor, b: Tensor, dtype: torch.dtype, by_rows: bool, new: bool) -> Tensor:
    """``a @ b.T`` of float8."""
    (a, of_a), (b, of_b) = cast(a, dtype, by_rows), cast(b, E4, by_rows)
    of_b = of_b.t() if by_rows else of_b
    if not new:
        return torch._scaled_mm(a, b.t(), of_a, of_b, out_dtype=torch.float32)
    way = ScalingType.RowWise if by_rows else ScalingType.TensorWise
    return F.scaled_mm(a, b.t(), of_a, way, of_b, way, output_dtype=torch.float32)


def linear(by_rows: bool, new: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """``x @ w.T``, and its gradients, by products of float8."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return product(x, w, E4, by_rows, new)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, w = ctx.saved_tensors
            of_x = product(grad, w.t(), E5, by_rows, new)
            return of_x, product(grad.t(), x.t(), E5, by_rows, new)

    return Linear.apply


def mlp(linear: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(linear(F.gelu(linear(x, params["up"])), params["down"]), y)

    return loss


def drawn(tokens: int, d: int, hidden: int) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    params = {"up": torch.randn(hidden, d) / d**0.5, "down": torch.randn(d, hidden) / hidden**0.5}
    return params, (torch.randn(tokens, d), torch.randn(tokens, d))


def gradients(loss: Callable[..., Tensor], params: dict[str, Tensor], batch: Any) -> list[Tensor]:
    given = {path: p.clone().requires_grad_() for path, p in params.items()}
    value = loss(given, *batch)
    return [value.detach(), *torch.autograd.grad(value, list(given.values()))]


def distance(found: list[Tensor], due: list[Tensor]) -> float:
    return max(
        float((x.double() - y.double()).norm() / y.double().norm())
        for x, y in zip(found, due, strict=True)
    )


TP = {"up": P("tp"), "down": P(None, "tp")}
PLACEMENTS = {
    "tp": ((2,), ("tp",), TP, P()),
    "dp": ((3,), ("dp",), {"up": P(), "down": P()}, P("dp")),
    "ZeRO-3": ((2,), ("dp",), {"up": P("dp"), "down": P("dp")}, P("dp")),
    "dp x tp": ((2, 2), ("dp", "tp"), TP, P("dp")),
}
