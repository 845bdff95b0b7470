"""Tensors that travel with the tokens to a layer of experts: chosen experts and their weights,
positions, masks. Values and gradients are those of one device.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropless import DIM, drawn, routed
from few_or_many import few_or_many
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ftp
from ftp import P
from tests.plans.test_send_tokens import PLANS, ROUTINGS


def sent(p: Any, x: torch.Tensor, rows: torch.Tensor, weights: Any, experts: Any) -> torch.Tensor:
    """The layer's experts: ``rows`` go to the experts that are given for each token."""
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=p["up"].shape[0])
    offs = counts.cumsum(0).to(torch.int32)
    y = F.silu(F.grouped_mm(rows[order // k], p["up"], offs=offs))
    y = F.grouped_mm(y, p["down"], offs=offs) * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, order // k, y)


def layer(p: Any, x: torch.Tensor, places: Any, chosen: Any, mask: Any) -> torch.Tensor:
    rows = x + p["table"][places]
    return torch.where(mask[:, None], sent(p, x, rows, *chosen), x)


def plain(p: Any, x: torch.Tensor, places: Any, chosen: Any, mask: Any) -> torch.Tensor:
    rows, (weights, experts), out = x + p["table"][places], chosen, torch.zeros_like(x)
    for e in range(p["up"].shape[0]):
        made = F.silu(rows @ p["up"][e]) @ p["down"][e]
        out = out + made * (weights * (experts == e)).sum(-1, keepdim=True)
    return torch.where(mask[:, None], out, x)


def loss_of(layer: Any, k: int) -> Any:
    """A loss whose router, with a loss over all tokens, is outside of the layer."""

    def loss(p: Any, x: torch.Tensor, places: Any, mask: Any) -> torch.Tensor:
        x = x.sin()
        weights, experts = chosen = routed(p, x, k)
        share = F.one_hot(experts, p["up"].shape[0]).to(x.dtype).mean((0, 1))
        balance = (share * (x @ p["router"]).softmax(-1).mean(0)).sum()
        out = layer(p, x, places, chosen, mask)
        return (out * torch.arange(x.numel()).view(x.shape)).sum() + balance + weights.sum()

    return loss


def check(routing: Any, plan: str, **options: Any) -> ftp.Lowered:
    count, tokens, k, favoured, seed = routing
    shape, axes, axis, token_axes, tp = PLANS[plan]
    k, favoured = min(k, count), None if favoured is None else favoured % count
    params, x = drawn(count, tokens, favoured, seed)
    generator = torch.Generator().manual_seed(seed)
    params["table"] = torch.randn(9, DIM, dtype=torch.float64, generator=generator)
    places = torch.randint(9, (tokens,), generator=generator)
    batch = x, places, torch.rand(tokens, generator=generator) < 0.7
    specs = {"router": P(), "favour": P(), "table": P()}
    specs |= {"up": P(axis, None, tp), "down": P(axis, tp)}
    travels = ftp.plans.send_tokens(layer, axis, token_axes=token_axes)
    mesh = ftp.simulated_mesh(shape, axes)
    step = ftp.shard(
        loss_of(travels, k), mesh, specs, batch_specs=P(token_axes), certify=True, **options
    )
    expected = torch.func.grad_and_value(loss_of(plain, k))(params, *batch)
    torch.testing.assert_close(step(params, *batch), expected[::-1], rtol=1e-10, atol=1e-10)
    return step.lower(params, *batch)


@few_or_many(ROUTINGS, st.sampled_from(sorted(PLANS)), few=1, many=4)
def test_what_travels_beside_the_tokens(routing, plan):
    """Tokens that do not divide, ranks without tokens, and gradients of the router's weights."""
    check(routing, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@settings(max_examples=20)
@given(ROUTINGS)
def test_what_travels_beside_the_tokens_often(plan, routing):
    check(routing, plan)


@pytest.mark.slow
def test_it_holds_with_the_assumption_checked_and_no_weight_moves():
    """One token on three ranks, two of which have none."""
    check((7, 1, 2, None, 0), "3 ranks", check_inputs=True)
    lowered = check((4, 6, 2, None, 0), "ep")
    kept = {"up": 4 * DIM * 6, "table": 9 * DIM}
    gathered = [c for c in lowered.collectives if c.op == "all_gather" and c.worst_nbytes is None]
    assert max(c.nbytes // c.dtype.itemsize for c in gathered) < min(kept.values())


def test_experts_that_choose_their_tokens_outside_of_the_layer():
    """Each expert takes its two best of all tokens; the layer gets who is taken by whom."""

    def by_mask(p: Any, x: torch.Tensor, taken: Any, weights: Any) -> torch.Tensor:
        pairs = taken.t().flatten()  # by expert; those that are not taken stand last
        order = (~pairs).to(torch.int64).argsort(stable=True)
        offs = taken.sum(0).cumsum(0).to(torch.int32)
        rows = x[order % len(x)]
        y = F.grouped_mm(F.silu(F.grouped_mm(rows, p["up"], offs=offs)), p["down"], offs=offs)
        y = y * weights.t().flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order % len(x), y)

    def loss_of(layer: Any) -> Any:
        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            scores = (x @ p["router"]).softmax(-1)
            best = scores.t().topk(2, 1).indices
            taken = torch.zeros_like(scores.t(), dtype=torch.bool).scatter(1, best, True).t()
            out = layer(p, x, taken, torch.where(taken, scores, 0))
            return (out * torch.arange(x.numel()).view(x.shape)).sum()

        return loss

    def dense(p: Any, x: torch.Tensor, taken: Any, weights: Any) -> torch.Tensor:
        made = [F.silu(x @ up) @ down for up, down in zip(p["up"], p["down"], strict=True)]
        return (torch.stack(made, 1) * weights[..., None]).sum(1)

    params, x = drawn(4, 7, None, 0)
    params.pop("favour")
    specs = {"router": P(), "up": P("ep"), "down": P("ep")}
    travels = loss_of(ftp.plans.send_tokens(by_mask, "ep"))
    expected = torch.func.grad_and_value(loss_of(dense))(params, x)
    for n in (2, 3):
        mesh = ftp.simulated_mesh(n, "ep")
        step = ftp.shard(travels, mesh, specs, batch_specs=P("ep"), certify=True)
        torch.testing.assert_close(step(params, x), expected[::-1], rtol=1e-10, atol=1e-10)


class Experts(nn.Module):
    """Experts that take positions and, by name, the router's choice."""

    def __init__(self):
        super().__init__()
        params = drawn(4, 1, None, 0)[0]
        self.up, self.down = nn.Parameter(params["up"]), nn.Parameter(params["down"])
        self.is_loop = False

    def forward(self, x: Any, turn: Any, *, weights: Any, experts: Any, scale: Any = None) -> Any:
        p = {"up": self.up, "down": self.down, "table": x.new_zeros(1, x.shape[1])}
        mask = torch.ones_like(x[:, 0], dtype=torch.bool)
        zeros = torch.zeros_like(mask, dtype=torch.int64)
        form = plain if self.is_loop else layer
        return form(p, x * turn, zeros, (weights, experts), mask)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 4).double(), Experts()

    def forward(self, x: torch.Tensor) -> Any:
        rows, turn = x.flatten(0, 1), torch.arange(x.shape[1]).cos()[:, None]
        logits = self.router(rows)
        weights, experts = logits.softmax(-1).topk(2, -1)
        turn = turn.expand(x.shape[0], -1, -1).flatten(0, 1)
        out = self.experts(rows, turn, weights=weights, experts=experts)
        return out.view(x.shape), logits.logsumexp(-1).square().mean()


def test_a_module_that_takes_the_choice_of_its_router():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 3, DIM, dtype=torch.float64)
    sends = ftp.plans.on_expert_axis("ep", token_axes=("dp", "ep"))
    fn, params = ftp.functionalize(model, constraints={"experts": sends})
    specs = ftp.plan(params, {"experts.*": P("ep")})
    step = ftp.shard(
        lambda p, x: sum(part.square().sum() for part in fn(p, x)),
        ftp.simulated_mesh((2, 2), ("dp", "ep")),
        specs,
        batch_specs=P(("dp", "ep")),
        certify=True,
    )
    loss, grads = step(params, x)
    model.experts.is_loop = True
    value: Any = sum(part.square().sum() for part in model(x))
    value.backward()
    torch.testing.assert_close(loss, value.detach(), rtol=1e-11, atol=1e-11)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-10)
    sizes = [c.worst_nbytes for c in step.lower(params, x).collectives]
    # There, back, and the gradient of what came back; that of x is not asked for.
    assert sum(size is not None for size in sizes) == 3


def test_positions_of_a_sequence_travel_with_it():
    """Tokens (batch, sequence, dim) with positions (batch, sequence) and masks (batch, 1)."""

    def by_place(p: Any, x: torch.Tensor, places: Any, kept: Any) -> torch.Tensor:
        rows = (x + p["table"][places]).flatten(0, 1)
        return x * kept[..., None] + sent(p, rows, rows, *routed(p, rows, 2)).view(x.shape)

    def dense(p: Any, x: torch.Tensor, places: Any, kept: Any) -> torch.Tensor:
        rows = (x + p["table"][places]).flatten(0, 1)
        mask = torch.ones(len(rows), dtype=torch.bool)
        alone = {**p, "table": torch.zeros_like(p["table"])}
        made = plain(alone, rows, places.flatten(), routed(p, rows, 2), mask)
        return x * kept[..., None] + made.view(x.shape)

    params, _ = drawn(4, 1, None, 0)
    params["table"] = torch.randn(9, DIM, dtype=torch.float64)
    x = torch.randn(5, 3, DIM, dtype=torch.float64)
    batch = x, torch.randint(9, (5, 3)), torch.rand(5, 1, dtype=torch.float64)
    specs = {"router": P(), "favour": P(), "table": P(), "up": P("ep"), "down": P("ep")}
    travels = ftp.plans.send_tokens(by_place, "ep")
    weigh = torch.arange(x.numel()).view(x.shape)
    mesh = ftp.simulated_mesh(2, "ep")
    step = ftp.shard(
        lambda p, *b: (travels(p, *b) * weigh).sum(), mesh, specs, batch_specs=P("ep"), certify=True
    )
    expected = torch.func.grad_and_value(lambda p, *b: (dense(p, *b) * weigh).sum())(params, *batch)
    torch.testing.assert_close(step(params, *batch), expected[::-1], rtol=1e-10, atol=1e-10)


def with_the_scale_before(p: Any, x: Any, weights: Any, experts: Any) -> torch.Tensor:
    return sent(p, x, x, weights.roll(1, 0), experts)


def beyond_a_capacity(p: Any, x: Any, weights: Any, experts: Any) -> torch.Tensor:
    order = experts.flatten().argsort(stable=True)
    counts = F.one_hot(experts, 4).sum((0, 1)).clamp(max=5)
    y = F.grouped_mm(x[order], p["up"], offs=counts.cumsum(0).to(torch.int32))
    y = F.grouped_mm(y, p["down"], offs=counts.cumsum(0).to(torch.int32))
    return torch.zeros_like(x).index_copy(0, order, y)


def by_the_mean(p: Any, x: Any, weights: Any, experts: Any) -> torch.Tensor:
    return sent(p, x, x, weights / weights.mean(0), experts)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (with_the_scale_before, "results for a few random tokens"),
        (beyond_a_capacity, "results for a few random tokens"),
        (by_the_mean, r"by aten\.sum"),
    ],
)
def test_what_mixes_tokens_beside_them_is_refused(layer, said):
    params, x = drawn(4, 12, None, 2)
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    moe = ftp.plans.send_tokens(layer, "ep")
    step = ftp.spmd(
        lambda p, x: moe(p, x, *routed(p, x, 1)), ftp.simulated_mesh(2, "ep"), (specs, P("ep"))
    )
    with pytest.raises(ftp.errors.SpecError, match=f"depends on other tokens.*{said}"):
        step(params, x)


def test_what_is_not_of_the_tokens_is_refused():
    params, x = drawn(4, 6, None, 0)
    moe = ftp.plans.send_tokens(with_the_scale_before, "ep")
    mesh = ftp.simulated_mesh(2, "ep")
    step = ftp.spmd(lambda p, x: moe(p, x, x[:1], x), mesh, (P(), P("ep")))
    with pytest.raises(ftp.errors.InputError, match=r"beside\[0\] of shape \(1, 4\) is beside"):
        step(params, x)
    module: Any = Experts()
    module.forward = lambda name: name
    fn, params = ftp.functionalize(
        nn.Sequential(module), constraints={"0": ftp.plans.on_expert_axis("ep")}
    )
    with pytest.raises(ftp.errors.InputError, match=r"first argument is the tokens; .* with str"):
        ftp.spmd(lambda p, x: fn(p, "x") and x, mesh, (P(), P("ep")))(params, x)
