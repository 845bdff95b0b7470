"""``sum(parts)`` of Python begins with ``0 + parts[0]``, which passes a pending sum on."""

import pytest
import torch
from torch.func import grad_and_value

import ftp
from ftp import P

D = torch.float64
SPECS = {"up": P(None, None, "tp"), "down": P(None, "tp"), "gate": P()}


def experts(params, x):
    weights = (x @ params["gate"]).softmax(-1)
    parts = [
        weights[:, i, None] * ((x @ up).relu() @ down)
        for i, (up, down) in enumerate(zip(params["up"], params["down"], strict=True))
    ]
    return sum(parts).square().mean()


def test_a_layer_that_adds_its_experts_is_reduced_once():
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (3, 64, 32), "down": (3, 32, 64), "gate": (64, 3)}
    params = {k: torch.randn(s, generator=generator, dtype=D) for k, s in shapes.items()}
    x = torch.randn(256, 64, generator=generator, dtype=D)
    step = ftp.spmd(grad_and_value(experts), ftp.simulated_mesh((4,), ("tp",)), (SPECS, P()))
    gradients, loss = step(params, x)
    wanted, of = grad_and_value(experts)(params, x)
    torch.testing.assert_close((gradients, loss), (wanted, of), rtol=1e-11, atol=1e-13)
    sizes = [r.nbytes for r in step.lower(params, x).collectives]
    assert sizes.count(x.numel() * 8) == 1 and max(sizes) == x.numel() * 8, sizes


@pytest.mark.parametrize("number", [1, 0.5])
def test_other_numbers_are_added_once(number):
    x, w = torch.ones(2, 4, dtype=D), torch.ones(4, 3, dtype=D)
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(lambda w, x: number + x @ w, mesh, (P("tp"), P()))
    assert torch.equal(step(w, x), number + x @ w)
