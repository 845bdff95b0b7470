"""Layers that repeat are planned once: the same plan as layer by layer, at a cost that does not
grow with the depth.
"""

from collections import Counter
from typing import Any

import models
import pytest
import torch
from few_or_many import slow_unless
from models import LlamaConfig, MLPConfig, build, cuts, lm_batch, specs
from plan_reshards import unbucketed
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.planning.layers import repeats

LLAMA = LlamaConfig(vocab=4096, dim=512, heads=8, kv_heads=4, hidden=1536, layers=10)
OPT = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-3)
PLANS: dict[
    str, tuple[dict[str, int], dict[str, str], P, dict[str, P]]
] = {  # axes, what cuts the weights, the batch, constraints
    "dp": ({"dp": 4}, {}, P("dp"), {}),
    "tp": ({"tp": 4}, {"tp": "tp"}, P(), {}),
    "sp": ({"tp": 4}, {"tp": "tp"}, P(), models.sequence_parallel()),
    "zero-3×tp": ({"dp": 4, "tp": 2}, {"tp": "tp", "zero": "dp"}, P("dp"), {}),
    "cp": ({"cp": 4}, {}, P(None, "cp"), {}),
}


def lowered(plan: str, cfg: LlamaConfig, *, train: bool = False) -> ftp.Lowered:
    axes, weights, batch_specs, constraints = PLANS[plan]
    fn, params = ftp.functionalize(
        build(cfg, dtype=torch.bfloat16, device="meta"), constraints=constraints
    )
    mesh = ftp.AbstractMesh(tuple(axes.values()), tuple(axes))
    of_params = ftp.plan(params, specs(cuts(cfg), **weights))  # type: ignore[arg-type]
    loss_fn, batch = (
        models.lm_loss(fn),
        tuple(torch.empty(16, 512, dtype=torch.int64, device="meta") for _ in range(2)),
    )
    if not train:
        return ftp.shard(loss_fn, mesh, of_params, batch_specs=batch_specs).lower(params, batch)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
        return *OPT.update(grads, state, params), loss

    step = ftp.spmd(
        train_step,
        mesh,
        (of_params, of_params, batch_specs),
        (of_params, of_params, P()),
        donate=(0, 1),
    )
    return step.lower(params, OPT.init(params), batch)


def facts(program: ftp.Lowered) -> Any:
    """What must not depend on how it was planned."""
    plan = program.plan
    values = Counter(
        (
            n.kind,
            str(n.target),
            tuple(n.cuts),
            str(n.pending),
            n.phase,
            n.source,
            tuple(n.sizes.values()),
        )
        for n in plan.graph.nodes
    )
    records = Counter(
        (c.op, c.axes, c.shape, c.dtype, c.source) for c in unbucketed(program).collectives
    )
    inputs = [(n.name, tuple(n.cuts)) for n in plan.graph.inputs]
    return values, records, inputs, plan.out_specs, plan.kept_rules


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_the_plan_is_that_of_layer_by_layer(plan: str, monkeypatch: pytest.MonkeyPatch):
    train = plan == "zero-3×tp"
    folded = lowered(plan, LLAMA, train=train)
    assert folded.plan.alike > 2
    monkeypatch.setattr(repeats, "FEWEST", 10**9)
    whole = lowered(plan, LLAMA, train=train)
    assert whole.plan.alike == 0
    assert folded.plan.cost == pytest.approx(whole.plan.cost, rel=1e-12)
    assert facts(folded) == facts(whole)
    assert folded.memory == whole.memory
    ftp.certify(folded)


def test_a_folded_program_equals_one_device():
    cfg = LlamaConfig(layers=11, vocab=64)  # layers.10 comes before layers.2 among the names
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64))
    loss_fn, batch = models.lm_loss(fn), lm_batch(cfg, 4, 6)
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    step = ftp.shard(
        loss_fn,
        mesh,
        ftp.plan(params, specs(cuts(cfg), tp="tp", zero="dp")),
        batch_specs=P("dp"),
    )
    assert step.lower(params, batch).plan.alike
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    found_loss, found = step(params, batch)
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["layer_{}", "b{}", "layers.{}", "{}"])
def test_layers_are_found_by_the_numbers_in_their_names(name: str):
    """Also by those within a word; ``w1`` and ``w2`` of a layer number no layers."""
    made = {
        name.format(i): {
            f"w{k}": torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for k in (1, 2)
        }
        for i in range(9)
    }

    def loss(params, x):
        for i in range(9):
            layer = params[name.format(i)]
            x = x + torch.tanh(x @ layer["w1"]) @ layer["w2"]
        return x.square().mean()

    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    cut = {"w1": P(None, "tp"), "w2": P("tp")}
    step = ftp.shard(loss, mesh, dict.fromkeys(made, cut), batch_specs=P("dp"))
    x = torch.randn(4, 8, dtype=torch.float64)
    plan = step.lower(made, x).plan
    assert plan.alike == 4
    want = loss(made, x)
    want.backward()
    found, grads = step(made, x)
    torch.testing.assert_close(found, want.detach(), rtol=1e-12, atol=0)
    for layer in made:
        for key, w in made[layer].items():
            torch.testing.assert_close(grads[layer][key], w.grad, rtol=1e-9, atol=1e-12)


class Block(nn.Module):
    """With norms of two parameters and biases: of a bias' gradient only the next layer's is
    read.
    """

    def __init__(self, width: int):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


BIASED = {
    "norms are decomposed": {
        "*.qkv.weight": P(("tp", "dp")),
        "*.o.weight": P("dp", "tp"),
        "*.up.weight": P(("tp", "dp")),
        "*.up.bias": P(("tp", "dp")),
        "*.down.weight": P(None, "tp"),
        "*.down.bias": P("dp"),
        "*.n[12].*": P("dp"),
    },
    "biases over both": {
        "*.up.weight": P("tp", "dp"),
        "*.up.bias": P(("tp", "dp")),
        "*.down.*": P("dp"),
        "*.qkv.*": P("dp"),
        "*.n[12].bias": P("dp"),
    },
    "data parallel": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_unless(lambda plan: plan != "data parallel", BIASED))
def test_layers_with_biases_are_planned_once(plan: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    fn, params = ftp.functionalize(nn.Sequential(*(Block(16) for _ in range(9))).double())
    x = torch.randn(4, 6, 16, dtype=torch.float64)

    def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return fn(p, x).square().mean()

    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    step = ftp.shard(loss_fn, mesh, ftp.plan(params, BIASED[plan]), batch_specs=P("dp"))
    folded = step.lower(params, x)
    assert folded.plan.alike > 2
    grads, loss = torch.func.grad_and_value(loss_fn)(params, x)
    found_loss, found = step(params, x)
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(repeats, "FEWEST", 10**9)
    whole = ftp.shard(loss_fn, mesh, ftp.plan(params, BIASED[plan]), batch_specs=P("dp"))
    by_layer = whole.lower(params, x)
    assert by_layer.plan.alike == 0
    assert folded.plan.cost == pytest.approx(by_layer.plan.cost, rel=1e-12)
    assert facts(folded) == facts(by_layer) and folded.memory == by_layer.memory
    nodes, in_turn = folded.plan.graph.nodes, by_layer.plan.graph.nodes
    assert [n.name for n in nodes] == [n.name for n in in_turn]  # nothing is gathered early
    ftp.certify(folded)


def test_layers_that_differ_are_planned_one_by_one():
    cfg = MLPConfig(layers=12)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64))
    mesh, batch = ftp.simulated_mesh((2,), ("tp",)), models.class_batch(cfg, dtype=torch.float64)
    mixed = {
        name: P("tp")
        if name.endswith("up.weight") and int(name.split(".")[1]) in (1, 4, 5, 7, 8, 9)
        else P()
        for name in params
        if "layers" in name
    }
    of_params = ftp.plan(params, mixed)
    step = ftp.shard(models.class_loss(fn), mesh, of_params, certify=True)
    assert step.lower(params, batch).plan.alike == 0
    grads, _ = torch.func.grad_and_value(models.class_loss(fn))(params, batch)
    for name, grad in step(params, batch)[1].items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("period", [2, 3])
def test_layers_that_alternate_are_planned_by_periods(period: int, monkeypatch: pytest.MonkeyPatch):
    """As local and global attention, dense layers and experts, or attention and recurrences do."""
    cfg = MLPConfig(layers=8 * period + 1)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64))
    mesh, batch = (
        ftp.simulated_mesh((2, 2), ("dp", "tp")),
        models.class_batch(cfg, dtype=torch.float64),
    )
    cut = {"up.weight": P("tp", "dp"), "down.weight": P("dp", "tp")}
    alternating = {
        name: P("dp") if int(name.split(".")[1]) % period else cut[name.split(".", 2)[2]]
        for name in params
        if name.startswith("layers") and name.split(".", 2)[2] in cut
    }
    step = ftp.shard(
        models.class_loss(fn),
        mesh,
        ftp.plan(params, alternating),
        batch_specs=P("dp"),
        certify=True,
    )
    lowered = step.lower(params, batch)
    assert lowered.plan.alike >= 3 * period
    loss, grads = step(params, batch)
    expected, right = torch.func.grad_and_value(models.class_loss(fn))(params, batch)
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=0)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(repeats, "FEWEST", 10**9)
    whole = ftp.shard(
        models.class_loss(fn), mesh, ftp.plan(params, alternating), batch_specs=P("dp")
    ).lower(params, batch)
    assert whole.plan.alike == 0 and whole.plan.cost == pytest.approx(lowered.plan.cost, rel=1e-12)
    assert facts(lowered) == facts(whole)


class Biased(nn.Module):
    """Layers that each read a buffer of their own, as routers with a correction bias."""

    def __init__(self, layers: int, dim: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        for layer in self.layers:
            layer.register_buffer("bias_of_router", torch.randn(dim, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            bias: Any = layer.bias_of_router
            x = x + (layer(x) + bias.exp()).tanh()
        return x


def test_layers_that_read_captured_constants_are_planned_once(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    fn, params = ftp.functionalize(Biased(9).double())
    mesh, x = ftp.simulated_mesh((2, 2), ("dp", "tp")), torch.randn(4, 8, dtype=torch.float64)
    cut = ftp.plan(params, {"layers.*.weight": P("tp", "dp"), "layers.*.bias": P("tp")})

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fn(params, x).square().sum()

    step = ftp.shard(loss, mesh, cut, batch_specs=P("dp"), certify=True)
    few = step.lower(params, x)
    assert few.plan.alike == 4
    expected = torch.func.grad_and_value(loss)(params, x)
    for found, right in zip(step(params, x)[::-1], expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(repeats, "FEWEST", 10**9)
    whole = ftp.shard(loss, mesh, cut, batch_specs=P("dp")).lower(params, x)
    assert whole.plan.alike == 0 and whole.plan.cost == pytest.approx(few.plan.cost, rel=1e-12)
    assert facts(few) == facts(whole)


@pytest.mark.slow
def test_clipping_leaves_layers_alike():
    """A global norm reads every layer and every layer reads it."""
    cfg = LlamaConfig(layers=14, vocab=64)
    fn, params = ftp.functionalize(build(cfg, device="meta"))
    of_params = ftp.plan(params, specs(cuts(cfg), tp="tp", zero="dp"))
    mesh, loss_fn = ftp.AbstractMesh((2, 2), ("dp", "tp")), models.lm_loss(fn)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
        grads, norm = ftp.optim.clip_by_global_norm(grads, 1.0)
        return *OPT.update(grads, state, params), loss, norm

    step = ftp.spmd(
        train_step,
        mesh,
        (of_params, of_params, P("dp")),
        (of_params, of_params, P(), P()),
        donate=(0, 1),
    )
    assert step.lower(params, OPT.init(params), lm_batch(cfg)).plan.alike > 6


@pytest.mark.slow
def test_planning_does_not_grow_with_the_depth(monkeypatch: pytest.MonkeyPatch):
    """Counted, not timed: the variables of the networks."""
    from ftp.planning import cost_network as network

    seen: list[int] = []
    minimize = network.minimize

    def counted(domains: Any, *args: Any) -> Any:
        seen.append(len(domains))
        return minimize(domains, *args)

    monkeypatch.setattr(network, "minimize", counted)
    sizes = []
    for layers in (10, 16):
        seen.clear()
        lowered("zero-3×tp", LlamaConfig(**{**LLAMA.__dict__, "layers": layers}))
        sizes.append(list(seen))
    assert sizes[0] == sizes[1]
