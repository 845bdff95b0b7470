"""Plans that are searched for, beside those that are written by hand."""

import math
import re
from pathlib import Path

import models
import pytest
import torch
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, specs
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.errors import InputError
from ftp.planning.planner import plan_few
from ftp.searching import axis_networks, candidates, extrapolate, loss_programs
from ftp.searching.open_layouts import shared_heads
from ftp.searching.result import Found
from ftp.sharding.mesh import resolve

CFG = LlamaConfig(vocab=32000, dim=4096, heads=32, kv_heads=8, hidden=14336, layers=2)
TOKENS = 16, 2048


WHOLE = {"layers.*": ftp.Constraint(outputs=P(), axes=("tp",))}
"""Keeps what passes between blocks whole, as plain tensor parallelism does."""


def program(cfg: LlamaConfig = CFG, constraints=None, dtype=torch.bfloat16):
    model = build(cfg, dtype=dtype, device="meta")
    fn, params = ftp.functionalize(model, constraints=constraints or {})
    return (
        lm_loss(fn),
        params,
        tuple(torch.empty(TOKENS, dtype=torch.int64, device="meta") for _ in range(2)),
    )


MEGATRON = {
    "layers.*.attn.wq.weight": P("tp", None),
    "layers.*.attn.wk.weight": P("tp", None),
    "layers.*.attn.wv.weight": P("tp", None),
    "layers.*.attn.wo.weight": P(None, "tp"),
    "layers.*.mlp.w1.weight": P("tp", None),
    "layers.*.mlp.w3.weight": P("tp", None),
    "layers.*.mlp.w2.weight": P(None, "tp"),
}


NETWORK = ftp.Hardware.h100({"dp": ftp.Link(latency=2e-5, bandwidth=5e10)})
"""Links of dp on which sending weights, as ZeRO-3 does, takes longer than reducing gradients."""


def by_hand(loss_fn, params, batch, mesh, batch_specs, hardware=None, **weights) -> ftp.Lowered:
    return ftp.shard(
        loss_fn,
        mesh,
        ftp.plan(params, specs(cuts(CFG), **weights)),
        batch_specs=batch_specs,
        hardware=hardware,
    ).lower(params, batch)


def is_the_cheapest(found: Found) -> bool:
    """Whether no other layout is said to be better than what was found by more than the gap."""
    return all(
        seconds >= -found.gap[axis]
        for (axis, _), others in found.alternatives.items()
        for seconds in others.values()
    )


def test_megatron_is_found():
    loss_fn, params, batch = program(constraints=WHOLE)
    mesh = ftp.AbstractMesh((8,), ("tp",))
    found = ftp.search(loss_fn, params, mesh, P(), batch)
    assert {p: found.patterns[p] for p in MEGATRON} == MEGATRON
    assert all(not spec.axes for p, spec in found.patterns.items() if "norm" in p)
    assert found.cost <= by_hand(loss_fn, params, batch, mesh, P(), tp="tp").cost()
    assert found.gap == {"tp": 0.0}
    assert is_the_cheapest(found)
    assert found.alternatives["tp", "layers.*.mlp.w1.weight"].keys() == {"whole", "dim 1"}
    assert all(
        "layers.*.mlp.w1.weight" not in line or "whole over tp +" in line
        for line in str(found).splitlines()
    )


def test_fewer_heads_of_keys_than_ranks():
    """Their weights stay whole: cut, the keys would be gathered."""
    loss_fn, params, batch = program(
        LlamaConfig(vocab=32000, dim=512, heads=8, kv_heads=4, hidden=1408, layers=1), WHOLE
    )
    found = ftp.search(loss_fn, params, ftp.AbstractMesh((8,), ("tp",)), P(), batch)
    whole = {f"layers.*.attn.w{name}.weight": P(None, None) for name in "kv"}
    assert {p: found.patterns[p] for p in MEGATRON} == MEGATRON | whole
    assert is_the_cheapest(found)


@pytest.mark.slow
def test_blocks_cut_along_the_sequence_are_found_without_a_limit():
    """Of many tokens and few weights: the weights stay whole, and the ranks divide the sequence.
    Not where the program says how its blocks' outputs are sharded.
    """
    cfg = LlamaConfig(vocab=32000, dim=512, heads=8, kv_heads=4, hidden=1408, layers=2)
    loss_fn, params, batch = program(cfg)
    mesh = ftp.AbstractMesh((8,), ("tp",))
    found = ftp.search(loss_fn, params, mesh, P(), batch)
    assert found.constraints == {"layers.*": ftp.Constraint(outputs=P(None, "tp"), axes=("tp",))}
    of_blocks = models.sequence_parallel(tp="tp")
    for constraints in (None, of_blocks):
        fn, _, _ = program(cfg, constraints)
        hand = ftp.shard(fn, mesh, ftp.plan(params, specs(cuts(cfg), tp="tp")))
        assert found.cost < float(hand.lower(params, batch).cost())
    for constraints in (WHOLE, of_blocks):
        assert not ftp.search(program(cfg, constraints)[0], params, mesh, P(), batch).constraints


class Residual(nn.Module):
    """A block that returns what it adds beside its output, as one with a cache does."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y, [y]


class Plain(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class Summed(Residual):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": super().forward(x)[0]}


class Stack(nn.Module):
    def __init__(self, *kinds: type[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(kind(256) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = y["x"] if isinstance(y, dict) else y[0] if isinstance(y, tuple) else y
        return x.square().mean()


OF_TENSOR = ftp.Constraint(outputs=P(None, "tp"), axes=("tp",))
OF_TUPLE = ftp.Constraint(outputs=(P(None, "tp"), ...), axes=("tp",))


@pytest.mark.parametrize(
    ("kinds", "cut"),
    [
        ((Residual, Residual), {"layers.*": OF_TUPLE}),
        ((Plain, Residual), {"layers.0": OF_TENSOR, "layers.1": OF_TUPLE}),
        ((Plain, Summed, Plain), {"layers.0": OF_TENSOR, "layers.2": OF_TENSOR}),
    ],
)
def test_the_outputs_of_blocks_are_cut_as_each_of_them_returns(kinds, cut):
    """Models whose blocks return a tuple were given no sequence parallelism; constraints for blocks
    that return different things could not be applied.
    """
    mesh, x = ftp.AbstractMesh((4,), ("tp",)), torch.empty(4, 2048, 256, device="meta")
    with torch.device("meta"):
        model = Stack(*kinds)
    fn, params = ftp.functionalize(model)
    found = ftp.search(fn, params, mesh, P(), x)
    assert found.constraints == cut and "returns P(None, 'tp') over tp" in str(found)
    by_hand, _ = ftp.functionalize(model, constraints=cut)
    lowered = ftp.shard(by_hand, mesh, found.specs(params)).lower(params, x)
    assert float(lowered.cost()) == found.cost


def test_of_plans_that_take_equally_long_the_one_that_holds_less_is_found():
    """The network of tp counts the embedding alike whether whole or cut; cut, the reduction of its
    gradient over dp sends half of the bytes.
    """
    cfg = LlamaConfig(vocab=32000, dim=1024, heads=16, hidden=2048, layers=1)
    loss_fn, params, _ = program(cfg, WHOLE, torch.float32)
    batch = tuple(torch.empty(8, 128, dtype=torch.int64, device="meta") for _ in range(2))
    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    found = ftp.search(loss_fn, params, mesh, P("dp"), batch, hardware="h100")
    assert "tp" in found.patterns["emb.weight"].axes


@pytest.mark.slow
def test_zero_is_found_where_memory_forces_it():
    loss_fn, params, batch = program()
    mesh = ftp.AbstractMesh((8,), ("dp",))
    free = ftp.search(loss_fn, params, mesh, P("dp"), batch, hardware=NETWORK)
    assert not any(spec.axes for spec in free.patterns.values())
    assert free.cost <= by_hand(loss_fn, params, batch, mesh, P("dp"), NETWORK).cost()
    zero = by_hand(loss_fn, params, batch, mesh, P("dp"), NETWORK, zero="dp")
    limit = int(zero.memory * 1.02)
    assert limit < free.memory
    found = ftp.search(loss_fn, params, mesh, P("dp"), batch, memory=limit, hardware=NETWORK)
    assert found.memory <= limit
    assert all("dp" in found.patterns[p].axes for p in MEGATRON if "mlp" in p)
    assert found.cost <= zero.cost()
    assert is_the_cheapest(found)


def test_memory_left_below_a_limit_is_used_for_many_parameters_of_a_large_program():
    """Few plans are tried of a large program: every change that helps is kept."""
    params = {name: torch.empty(256, 256, device="meta") for name in "abcdef"}

    def loss_fn(p, x):
        for name in p:
            x = x @ p[name]
            for _ in range(8):
                x = torch.sin(x)
        return x.sum()

    mesh, x = ftp.AbstractMesh((4,), ("dp",)), torch.empty(64, 256, device="meta")
    hardware = ftp.Hardware(link=ftp.Link(latency=1e-5, bandwidth=1e9))
    given = loss_fn, params, mesh, P("dp"), x
    free = ftp.search(*given, hardware=hardware)
    zero = ftp.shard(loss_fn, mesh, P("dp"), batch_specs=P("dp"), hardware=hardware)
    cut = zero.lower(params, x)
    found = ftp.search(*given, hardware=hardware, memory=(free.memory + cut.memory) // 2)
    assert found.cost < (free.cost + cut.cost()) / 2


@pytest.mark.slow
def test_all_prices_of_memory_share_a_network(monkeypatch: pytest.MonkeyPatch):
    """Prices change the costs of its values alone: its tables are built once."""
    made, prices = [], []

    class Counted(axis_networks.PricedNetwork):
        def __init__(self, problem):
            made.append(problem)
            super().__init__(problem)

        def solve(self, price):
            prices.append((self, price))
            return super().solve(price)

    monkeypatch.setattr(axis_networks, "PricedNetwork", Counted)
    loss_fn, params, batch = program()
    mesh = ftp.AbstractMesh((8,), ("dp",))
    free = ftp.search(loss_fn, params, mesh, P("dp"), batch, hardware=NETWORK)
    assert len(made) == 1
    prices.clear()
    limit = free.memory * 9 // 10
    found = ftp.search(loss_fn, params, mesh, P("dp"), batch, memory=limit, hardware=NETWORK)
    assert found.memory <= limit
    first = prices[0][0]
    assert len({price for network, price in prices if network is first}) > 2
    # The only other network is that of the specs found, where these came from no network.
    assert len(made) <= 3


@pytest.mark.slow
def test_both_axes_and_many_layers():
    cfg = LlamaConfig(**{**CFG.__dict__, "layers": 10})
    loss_fn, params, batch = program(cfg, WHOLE)
    found = ftp.search(loss_fn, params, ftp.AbstractMesh((4, 8), ("dp", "tp")), P("dp"), batch)
    assert {p: found.patterns[p] for p in MEGATRON} == MEGATRON
    assert found.lowered.plan.alike


def test_numbered_modules_of_other_numbers_of_dims():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
    fn, params = ftp.functionalize(model.double())

    def loss(params, x):
        return fn(params, x).square().mean()

    x = torch.randn(4, 8, dtype=torch.float64)
    mesh = ftp.simulated_mesh((2,), ("dp",))
    found = ftp.search(loss, params, mesh, P("dp"), x)
    assert set(found.patterns) == {f"{i}.weight" for i in (0, 1, 3)} | {"*.bias"}
    value, grads = ftp.shard(loss, mesh, found.specs(params), batch_specs=P("dp"))(params, x)
    due, due_value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(value, due_value)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, due[name])


@pytest.mark.slow
def test_what_is_found_equals_one_device():
    cfg = LlamaConfig(layers=1, vocab=64)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64))
    loss_fn, batch = models.lm_loss(fn), lm_batch(cfg, 4, 6)
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    free = ftp.search(loss_fn, params, mesh, P("dp"), batch)
    limit = int(0.6 * free.memory)
    found = ftp.search(loss_fn, params, mesh, P("dp"), batch, memory=limit)
    assert found.memory <= limit
    # Gaps and alternatives are seconds, as ``planned`` is, whatever the price of memory was.
    assert 0 <= max(found.gap.values()) < found.planned
    others = [s for each in found.alternatives.values() for s in each.values() if s < math.inf]
    assert others and max(map(abs, others)) < 10 * found.planned
    assert is_the_cheapest(found)
    # No tensor of the model is packed, so none is cut in packs.
    assert not any("units" in str(spec) for spec in found.patterns.values())
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    step = ftp.shard(loss_fn, mesh, found.specs(params), batch_specs=P("dp"), certify=True)
    found_loss, found_grads = step(params, batch)
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(found_grads[name], grad, rtol=1e-9, atol=1e-12)


def test_buckets_that_a_limit_leaves_no_room_for_are_left_out(monkeypatch: pytest.MonkeyPatch):
    """A bucket holds copies of all gradients of a small model. No candidate is planned twice."""
    planned: list[tuple[str, ...]] = []

    def noted(graph, axes, specs, **options):
        planned.append(tuple(map(str, specs.inputs.values())))
        return plan_few(graph, axes, specs, **options)

    monkeypatch.setattr(loss_programs, "plan_few", noted)
    params = {name: torch.empty(256, 256, device="meta") for name in ("a", "b", "c")}
    mesh, x = ftp.AbstractMesh((4,), ("dp",)), torch.empty(8, 256, device="meta")

    def loss_fn(p, x):
        return (x @ p["a"] @ p["b"] @ p["c"]).sum()

    def lowered(specs, bucket):
        step = ftp.shard(loss_fn, mesh, specs, batch_specs=P("dp"), bucket=bucket)
        return step.lower(params, x)

    free = ftp.search(loss_fn, params, mesh, P("dp"), x)
    assert free.bucket
    limit = int(lowered(dict.fromkeys(params, P("dp")), False).memory)
    assert limit < min(free.memory, int(lowered(dict.fromkeys(params, P("dp")), True).memory))
    planned.clear()
    found = ftp.search(loss_fn, params, mesh, P("dp"), x, memory=limit)
    assert 1 < len(planned) == len(set(planned))
    assert not found.bucket and "bucket=False" in str(found)
    assert found.memory == int(lowered(found.specs(params), found.bucket).memory) <= limit


def deep():
    """A loss of ten equal layers, its parameters and a batch."""
    params = {
        "layers": [
            {name: torch.empty(64, 64, device="meta") for name in ("up", "down")} for _ in range(10)
        ]
    }

    def loss_fn(p, x):
        for layer in p["layers"]:
            x = x + (x @ layer["up"]).relu() @ layer["down"]
        return x.square().mean()

    return loss_fn, params, torch.empty(16, 64, device="meta")


def test_what_fits_without_buckets_is_not_given_up_for_a_slower_plan():
    """The fastest plan that fits does not fit with buckets; one that cuts more does, but it takes
    longer than the first without them.
    """
    loss_fn, params, x = deep()
    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    found = ftp.search(loss_fn, params, mesh, P("dp"), x, memory=690_000, hardware="cpu")
    fitting = [rival for rival in found.rivals.values() if rival.nbytes <= 690_000]
    assert found.memory <= 690_000 and not found.bucket
    assert found.cost <= min(rival.seconds for rival in fitting) * (1 + 1e-9)


def test_heads_that_neighbours_share():
    """Where memory forces it, keys of fewer heads than ranks are held by head."""
    cfg = LlamaConfig(vocab=64, dim=512, heads=8, kv_heads=4, hidden=64, layers=1)
    loss_fn, params, batch = program(cfg)
    mesh = ftp.AbstractMesh((8,), ("tp",))
    cpu = ftp.Hardware.cpu()
    specs = [P(), P()]
    net = candidates.Searching(
        loss_fn, params, (batch,), P(), specs, resolve(mesh), (), cpu, None
    ).net
    keys = shared_heads(net, "layers.*.attn.wk.weight", 8)
    assert keys is not None and (keys.dim, keys.inner) == (0, 64)
    assert shared_heads(net, "layers.*.attn.wq.weight", 8) is None
    assert shared_heads(net, "layers.*.attn.wk.weight", 4) is None


@pytest.mark.slow
def test_sequence_parallelism_within_a_limit():
    cfg = LlamaConfig(vocab=1024, dim=2048, heads=16, hidden=8192, layers=1)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.bfloat16, device="meta"))
    batch = tuple(torch.empty(4, 512, dtype=torch.int64, device="meta") for _ in range(2))
    mesh = ftp.AbstractMesh((4,), ("tp",))
    free = ftp.search(lm_loss(fn), params, mesh, P(), batch)
    limit = int(free.memory * 0.97)
    found = ftp.search(lm_loss(fn), params, mesh, P(), batch, memory=limit)
    assert found.memory <= limit
    assert found.constraints == {"layers.*": ftp.Constraint(outputs=P(None, "tp"), axes=("tp",))}
    assert {p: found.patterns[p] for p in MEGATRON} == MEGATRON
    assert "returns P(None, 'tp') over tp" in str(
        found
    ) and "tensor parallel over tp, sequence parallel over tp" in str(found)
    # Written into the model by hand the constraints make the same program, and so does the loss
    # that has them.
    by_hand, _ = ftp.functionalize(
        build(cfg, dtype=torch.bfloat16, device="meta"), constraints=found.constraints
    )
    for loss_fn in (lm_loss(by_hand), found.loss_fn):
        lowered = ftp.shard(loss_fn, mesh, found.specs(params), batch_specs=P()).lower(
            params, batch
        )
        assert lowered.memory == found.memory and float(lowered.cost()) == found.cost
        assert [c.op for c in lowered.collectives] == [c.op for c in found.lowered.collectives]
    limit = free.memory // 8
    refused = f"No plan found fits in {limit:,} bytes a rank; the smallest takes"
    with pytest.raises(ftp.errors.PlanningError, match=refused):
        ftp.search(lambda p, b: lm_loss(fn)(p, b), params, mesh, P(), batch, memory=limit)


@pytest.mark.slow
def test_what_is_promised_is_what_is_lowered():
    """Of many layers a few are planned and counted; what they promise for all of them holds."""
    cfg = LlamaConfig(vocab=512, dim=256, heads=4, hidden=512, layers=9)
    loss_fn, params, batch = program(cfg)
    found = ftp.search(loss_fn, params, ftp.AbstractMesh((2, 2), ("dp", "tp")), P("dp"), batch)
    assert len(found.rivals) == 4 and found.constraints

    def lowered(patterns, bucket, is_cut=True):
        mesh, of_params = ftp.AbstractMesh((2, 2), ("dp", "tp")), ftp.plan(params, dict(patterns))
        loss = found.loss_fn if is_cut else loss_fn
        step = ftp.shard(loss, mesh, of_params, batch_specs=P("dp"), bucket=bucket)
        return step.lower(params, batch)

    # Plans are compared without buckets; the one found is given as it runs, with them.
    for name, rival in found.rivals.items():
        alone = lowered(rival.patterns, False, "sequence parallel" in name)
        assert alone.plan.alike
        assert int(alone.memory) == rival.nbytes
        assert float(alone.cost()) == pytest.approx(rival.seconds, rel=1e-6)
    best = min(found.rivals.values(), key=lambda rival: rival.seconds)
    assert found.patterns == dict(best.patterns) and found.bucket
    as_run = lowered(found.patterns, bucket=True)
    assert (found.cost, found.memory) == (float(as_run.cost()), int(as_run.memory))


def test_estimates_count_the_checks_of_the_arguments_of_layers_left_out():
    loss_fn, params, x = deep()
    mesh = ftp.AbstractMesh((2,), ("dp",))
    cpu = ftp.Hardware.cpu()
    task = candidates.Searching(
        loss_fn, params, (x,), P("dp"), [P("dp")], resolve(mesh), ("dp",), cpu, None
    )
    patterns = dict.fromkeys(task.net.patterns.values(), P("dp"))
    found = task.estimate_of(patterns, {})
    step = ftp.shard(
        loss_fn, mesh, ftp.plan(params, patterns), batch_specs=P("dp"), hardware=cpu, bucket=False
    )
    lowered = step.lower(params, x)
    assert lowered.plan.alike
    assert found.nbytes == int(lowered.memory)
    assert found.seconds == pytest.approx(float(lowered.cost(cpu)), rel=1e-6)


@pytest.mark.parametrize("kept", [1, 2])
def test_few_layers_count_as_all_layers_do(kept: int):
    """One or two layers are kept at each end of a run of equal ones. Bytes are exact; the layers
    next to the ends may wait for other collectives.
    """
    loss_fn, params, x = deep()
    mesh, cpu = resolve(ftp.AbstractMesh((2, 2), ("dp", "tp"))), ftp.Hardware.cpu()
    task = candidates.Searching(
        loss_fn, params, (x,), P("dp"), [P("dp")], mesh, ("dp",), cpu, None, kept=kept
    )
    for up, down in ((P(), P()), (P(None, "tp"), P("tp")), (P("dp"), P("dp", "tp"))):
        patterns = {p: up if "up" in p else down for p in task.net.patterns.values()}
        found, lowered = task.estimate_of(patterns, {}), task.whole(patterns, {}, bucket=False)
        assert task.kept == kept and task.net.folded is not None
        assert task.net.folded.left_out == 7 - 2 * kept
        assert found.nbytes == int(lowered.memory)
        assert found.seconds == pytest.approx(float(lowered.cost(cpu)), rel=0.006)


def test_ops_that_leave_their_layer_do_not_change_what_a_layer_adds():
    """The gather of the later layer runs in the earlier one: before its start, as it is not before
    the start of the earlier layer.
    """
    gather, mm, relu = ((False, at) for at in range(3))
    order = [(3, gather), (3, mm), (4, gather), (3, relu), (4, mm), (4, relu)]
    live = [10, 12, 17, 13, 19, 20]  # 7 bytes a layer
    twins = extrapolate.Twins([(layer, *place) for layer, place in order], 3)
    assert twins.added(live, False) == 7
    assert twins.added(live, True) == 0


def test_heads_that_do_not_divide_are_cut_whole():
    loss_fn, params, batch = program(
        LlamaConfig(vocab=32000, dim=1536, heads=12, kv_heads=12, hidden=4096, layers=1), WHOLE
    )
    found = ftp.search(loss_fn, params, ftp.AbstractMesh((8,), ("tp",)), P(), batch)
    heads = ftp.units("tp", 128)
    assert found.patterns["layers.*.attn.wq.weight"] == P(heads, None)
    assert found.patterns["layers.*.mlp.w1.weight"] == P("tp", None)


class _Packed(torch.nn.Module):
    """Attention whose queries, keys and values are one product."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(512, 3 * 512)
        self.out = torch.nn.Linear(512, 512, bias=False)

    def forward(self, x):
        packed = self.qkv(x).split(512, -1)
        q, k, v = (y.unflatten(-1, (8, 64)).transpose(1, 2) for y in packed)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_packed_weights_are_cut_in_packs():
    with torch.device("meta"):
        fn, params = ftp.functionalize(_Packed())
        x = torch.empty(16, 256, 512)

    def loss_fn(p, x):
        return fn(p, x).square().mean()

    mesh = ftp.AbstractMesh((4,), ("tp",))
    found = ftp.search(loss_fn, params, mesh, P(), x, hardware="h100")
    packed = ftp.units("tp", 1, pack=3)
    assert found.patterns["qkv.weight"] == P(packed, None)
    assert found.patterns["qkv.bias"] == P(packed)


def test_a_small_program_is_refined_with_few_plans(monkeypatch: pytest.MonkeyPatch):
    """Changes on one axis, in the order of axes of the plan that they change; those that did not
    help once are not tried again. All changes were 45 plans, each in both orders.
    """
    planned = []

    def noted(*args, order, **options):
        planned.append(order)
        return plan_few(*args, order=order, **options)

    monkeypatch.setattr(loss_programs, "plan_few", noted)
    with torch.device("meta"):
        fn, params = ftp.functionalize(_Packed())
        x = torch.empty(16, 256, 512)

    def loss_fn(p, x):
        return fn(p, x).square().mean()

    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    found = ftp.search(loss_fn, params, mesh, P("dp"), x, hardware="h100")
    for out in (P("dp", "tp"), P(None, "tp"), P("tp"), P("tp", "dp"), P("dp")):
        specs = {**found.specs(params), "out.weight": out}
        step = ftp.shard(loss_fn, mesh, specs, batch_specs=P("dp"), hardware="h100")
        assert found.cost <= float(step.lower(params, x).cost())
    assert len(planned) <= 22 and sum(order is None for order in planned) <= 4


def test_a_small_parameter_is_not_left_cut_where_whole_it_fits_and_is_faster():
    shapes = {"up": (128, 512), "down": (512, 128), "g": (128,), "b": (512,), "gate": (128, 512)}
    with torch.device("meta"):
        params = {"layers": [{name: torch.empty(shape) for name, shape in shapes.items()}]}
        params |= {"emb": torch.empty(512, 128), "head": torch.empty(128, 512)}
        tokens = torch.empty(16, 64, dtype=torch.int64)

    def loss(p, x, y):
        h, layer = p["emb"][x], p["layers"][0]
        n = F.layer_norm(h, (128,), layer["g"])
        up = n @ layer["up"] + layer["b"]
        h = h + (F.silu(n @ layer["gate"]) * up) @ layer["down"]
        return F.cross_entropy((h @ p["head"]).flatten(0, 1), y.flatten())

    mesh, memory = ftp.AbstractMesh((4,), ("dp",)), 5113530
    given = params, mesh, P("dp"), tokens, tokens
    found = ftp.search(loss, *given, memory=memory, hardware="h100")
    whole = found.specs(params)
    whole["layers"][0]["b"] = P()
    step = ftp.shard(loss, mesh, whole, batch_specs=P("dp"), hardware="h100")
    lowered = step.lower(params, tokens, tokens)
    assert int(lowered.memory) > memory or found.cost <= lowered.cost()


def test_stacked_experts_are_cut_by_expert():
    """Each rank computes its experts; cut within experts, it would be no faster."""

    def loss_fn(p, x):
        gates = (x @ p["router"]).softmax(-1)
        hidden = torch.einsum("td,edh->eth", x, p["up"]).relu()
        out = torch.einsum("eth,ehd->etd", hidden, p["down"])
        return ((out * gates.T[..., None]).sum(0) + x).square().mean()

    shapes = {"router": (512, 8), "up": (8, 512, 2048), "down": (8, 2048, 512)}
    params = {k: torch.empty(shape, device="meta") for k, shape in shapes.items()}
    mesh, x = ftp.AbstractMesh((4,), ("tp",)), torch.empty(4096, 512, device="meta")
    found = ftp.search(loss_fn, params, mesh, P(), x, hardware="h100")
    assert [found.patterns[k] for k in ("up", "down")] == [P("tp", None, None)] * 2
    for up, down in ((P("tp"), P("tp")), (P(None, None, "tp"), P(None, "tp")), (P(), P())):
        given = {"router": P(), "up": up, "down": down}
        by_hand = ftp.shard(loss_fn, mesh, given, hardware="h100").lower(params, x)
        assert found.cost <= by_hand.cost()


def test_memory_is_a_number():
    x, params = torch.empty(8, 8, device="meta"), {"w": torch.empty(8, 8, device="meta")}
    mesh = ftp.AbstractMesh((2,), ("tp",))
    with pytest.raises(InputError, match=r"memory is '1GiB'; it must be a number of bytes a rank"):
        ftp.search(lambda p, x: (x @ p["w"]).sum(), params, mesh, P(), x, memory="1GiB")  # pyright: ignore[reportArgumentType]


def test_the_page():
    cfg = LlamaConfig(layers=1, vocab=64)
    fn, params = ftp.functionalize(build(cfg, device="meta"))
    page = (Path(__file__).resolve().parents[2] / "docs/search.md").read_text()
    names = {
        "ftp": ftp,
        "P": P,
        "loss_fn": lm_loss(fn),
        "params": params,
        "batch": lm_batch(cfg, 4, 6),
    }
    names["mesh"] = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/search.md", "exec"), names)
    assert (
        names["step"].lower(params, names["batch"]).collectives
        == names["found"].lowered.collectives
    )


@pytest.mark.slow
def test_a_batch_that_knows_its_specs():
    cfg = LlamaConfig(layers=1, vocab=64)
    fn, params = ftp.functionalize(build(cfg, device="meta"))
    mesh, batch = ftp.AbstractMesh((2, 2), ("dp", "tp")), lm_batch(cfg, 4, 6)
    placed = ftp.device_put(tuple(x.to("meta") for x in batch), mesh, P("dp"))
    limit = 10**9
    found = ftp.search(
        lm_loss(fn), params, mesh, placed, memory=limit, hardware=ftp.Hardware.h100()
    )
    assert (
        found.patterns
        == ftp.search(
            lm_loss(fn), params, mesh, P("dp"), batch, memory=limit, hardware=ftp.Hardware.h100()
        ).patterns
    )
    fn2 = lm_loss(fn)
    two = ftp.search(
        lambda params, x, y: fn2(params, (x, y)),
        params,
        mesh,
        placed,
        memory=limit,
        hardware=ftp.Hardware.h100(),
    )
    assert two.patterns == found.patterns
    for given, what in (
        (P("dp"), r"batch\[0\] is P\('dp'\)"),
        (batch, r"batch\[0\]\[0\] is a Tensor"),
        ((), "there is no tensor"),
    ):
        with pytest.raises(
            ftp.errors.InputError,
            match=f"search needs the shapes of a batch beside its specs, and {what}",
        ):
            ftp.search(lm_loss(fn), params, mesh, given, memory=limit)
    with pytest.raises(
        ftp.errors.InputError,
        match=r"does not take the 3 arguments of the search, params and each of the batch: ",
    ):
        ftp.search(lm_loss(fn), params, mesh, P("dp"), *batch, memory=limit)
