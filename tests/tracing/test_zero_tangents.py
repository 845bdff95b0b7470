"""Derivatives in forward mode: zero tangents cost nothing, and sizes may be dynamic."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacfwd, jvp, vmap

import ftp
from ftp import P

aten = torch.ops.aten


def _network(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ w + w[0]) @ w - w[1]) @ w


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "jvp by w": lambda w, x: jvp(lambda w: torch.tanh(x @ w) * x, (w,), (w.sin(),))[1],
    "jvp by x": lambda w, x: jvp(lambda x: _network(w, x), (x,), (x.cos(),))[1],
    "jacfwd": lambda w, x: jacfwd(lambda v: x @ v)(w[0]),
    "vmap of jacfwd": lambda w, x: vmap(jacfwd(lambda x: _network(w, x)))(x),
    "jacfwd of einsum": lambda w, x: jacfwd(lambda v: torch.einsum("bi,qi->bq", x, w * v))(w[0]),
    "grad of jacfwd": lambda w, x: grad(lambda w: jacfwd(lambda v: x @ (v * w[0]))(w[0]).sum())(w),
    "subtracted": lambda w, x: jvp(lambda w: x - x @ w - (x.sin() - w[0]), (w,), (w,))[1],
    "strides": lambda w, x: jvp(
        lambda x: (x.T * 2).T.unsqueeze(0).permute(2, 1, 0).reshape(-1), (x.T.contiguous().T,), (x,)
    )[1],
    "hessian by vector": lambda w, x: jvp(
        grad(lambda w: _network(w, x).square().sum()), (w,), (w,)
    )[1],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_sizes_have_one_trace(name):
    fn = FUNCTIONS[name]
    w = torch.randn(4, 4, dtype=torch.float64)
    step = ftp.spmd(fn, ftp.simulated_mesh((3,), ("dp",)), (P(), P("dp")))
    for n in (5, 6, 7, 9):
        x = torch.randn(n, 4, dtype=torch.float64)
        torch.testing.assert_close(step(w, x), fn(w, x))
    assert step.shapes.traces == 1 and not step.shapes.one_by_one


@pytest.mark.parametrize(("name", "products"), [("jvp by x", 5), ("jvp by w", 2)])
def test_products_of_zero_tangents_are_not_computed(name, products):
    mesh = ftp.AbstractMesh((2,), ("dp",))
    lowered = ftp.spmd(FUNCTIONS[name], mesh, (P(), P("dp"))).lower(
        torch.ones(4, 4), torch.ones(6, 4)
    )
    called = [node.target for node in lowered.graph.graph.nodes]
    assert called.count(aten.mm.default) == products
    assert called.count(aten.add.Tensor) == (name == "jvp by x")


@pytest.mark.parametrize(
    "by_zeros",
    [lambda x: x @ torch.zeros(2, 2) + 1, lambda x: x * torch.zeros(()).expand(2) + x],
)
def test_zeros_of_the_function_stay(by_zeros):
    """What the function multiplies by its own zeros is NaN where torch says so."""
    x = torch.tensor([[float("inf"), 1.0]])
    step = ftp.spmd(by_zeros, ftp.simulated_mesh((2,), ("dp",)), P())
    torch.testing.assert_close(step(x), by_zeros(x), equal_nan=True)
