"""Experts cut on the axis of the batch: tokens travel to them by all-to-all, their weights stay."""

from collections import Counter
from typing import Any

import pytest
import torch
from plan_reshards import unbucketed
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P

ROOM = 3  # tokens of one group that an expert takes


def model(p: Any, x: Tensor) -> Tensor:
    """(group, token, dim) to the same; what an expert has no room for is dropped."""
    experts = p["up"].shape[0]
    gates = (x @ p["router"]).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), experts)
    place = chosen.cumsum(1) * chosen - 1
    slots = (
        F.one_hot(place.clamp(0, ROOM - 1), ROOM).to(x.dtype)
        * ((place >= 0) & (place < ROOM)).to(x.dtype)[..., None]
    )
    tokens = torch.einsum("gsec,gsd->egcd", slots, x)
    hidden = torch.einsum("egcd,edf->egcf", tokens, p["up"]).relu()
    made = torch.einsum("egcf,efd->egcd", hidden, p["down"])
    return x + torch.einsum("egcd,gsec->gsd", made, slots * gates[..., None])


def loss(p: Any, x: Tensor, target: Tensor) -> Tensor:
    return (model(p["second"], model(p["first"], x @ p["in"])) - target).square().mean()


def drawn(groups: int, experts: int, dim: int = 8, hidden: int = 16) -> tuple[Any, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def layer() -> dict[str, Tensor]:
        return {
            "router": randn(dim, experts),
            "up": randn(experts, dim, hidden),
            "down": randn(experts, hidden, dim),
        }

    return (
        {"in": randn(dim, dim), "first": layer(), "second": layer()},
        randn(groups, 6, dim),
        randn(groups, 6, dim),
    )


def specs(tp: str | None) -> Any:
    layer = {"router": P(), "up": P("dp", None, tp), "down": P("dp", tp)}
    return {"in": P(), "first": layer, "second": layer}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("mesh", "axes", "groups", "experts"),
    [
        ((4,), ("dp",), 4, 4),
        ((2,), ("dp",), 4, 4),
        ((3,), ("dp",), 5, 7),
        ((2, 2), ("dp", "tp"), 4, 6),
        pytest.param((3, 2), ("dp", "tp"), 4, 5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_travel(mesh: tuple[int, ...], axes: tuple[str, ...], groups: int, experts: int):
    params, *batch = drawn(groups, experts)
    step = ftp.shard(
        loss,
        ftp.simulated_mesh(mesh, axes),
        specs("tp" if "tp" in axes else None),
        batch_specs=P("dp"),
    )
    grads, value = torch.func.grad_and_value(loss)(params, *batch)
    torch.testing.assert_close(step(params, *batch), (value, grads), rtol=1e-10, atol=1e-10)
    moved = Counter(
        c.op for c in unbucketed(step.lower(params, *batch)).collectives if c.axes == ("dp",)
    )
    assert set(moved) == {"all_to_all", "all_reduce"}
    assert moved["all_to_all"] == 8  # there and back, forward and backward, in each layer


def test_weights_of_experts_are_never_resharded():
    params, *batch = drawn(8, 8, dim=64, hidden=256)
    step = ftp.shard(loss, ftp.AbstractMesh((8,), ("dp",)), specs(None), batch_specs=P("dp"))
    weight = params["first"]["up"].numel()
    assert all(
        torch.Size(c.global_shape).numel() < weight or c.op == "all_to_all"
        for c in unbucketed(step.lower(params, *batch)).collectives
    )


@pytest.mark.parametrize("entries", [lambda w: [w[e] for e in range(len(w))], Tensor.unbind])
def test_a_loop_over_experts_shares_each_experts_work(entries: Any):
    """Their weights are exchanged once for parts of every expert, and their sum is reduced once."""

    def loss(p: Any, x: Tensor) -> Tensor:
        gates, out = (x @ p["router"]).softmax(-1), torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(entries(p["up"]), entries(p["down"]), strict=True)):
            out = out + gates[:, e : e + 1] * ((x @ up).relu() @ down)
        return (x + out).square().mean()

    experts, dim, hidden = 4, 8, 16
    shapes = {
        "router": (dim, experts),
        "up": (experts, dim, hidden),
        "down": (experts, hidden, dim),
    }
    g = torch.Generator().manual_seed(0)
    params = {k: torch.randn(s, generator=g, dtype=torch.float64) / 3 for k, s in shapes.items()}
    x = torch.randn(256, dim, generator=g, dtype=torch.float64)
    specs = {"router": P(), "up": P("ep"), "down": P("ep")}
    mesh = ftp.simulated_mesh((2,), ("ep",))
    step = ftp.shard(loss, mesh, specs, batch_specs=P(), certify=True)
    lowered = step.lower(params, x)
    assert lowered.work < 1.1 and lowered.plan.kept_rules == {"ep": True}
    of_tokens = Counter(c.op for c in unbucketed(lowered).collectives if 256 in c.global_shape)
    assert of_tokens == {"all_reduce": 2}  # the gates, and the sum
    grads, value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-10, atol=1e-10)
