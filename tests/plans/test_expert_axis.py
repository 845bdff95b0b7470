"""Experts on a mesh axis: tokens travel to them and back, their weights stay; values and gradients
are those of one device.
"""

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import expert_table
import pytest
import torch
import torch.nn.functional as F
from dropless import DIM, HIDDEN, drawn, loop, routed
from expert_table import MODELS, expert_program
from few_or_many import few_or_many
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.per_rank.dispatch import dispatch
from ftp.sharding.mesh import resolve


def own_experts(rows: torch.Tensor, own: torch.Tensor, parts: Any) -> torch.Tensor:
    """What a rank's experts make of the rows that came to it."""
    up, down = parts
    order = own.argsort(stable=True)
    offs = (own[:, None] <= torch.arange(up.shape[0])).sum(0).to(torch.int32)
    y = F.silu(F.grouped_mm(rows[order], up, offs=offs))
    return torch.zeros_like(rows).index_copy(0, order, F.grouped_mm(y, down, offs=offs))


def step_of(mesh: Any, k: int, axis: str, token_axes: tuple[str, ...], specs: Any, **options: Any):
    def layer(p, x):
        weights, experts = routed(p, x, k)
        return dispatch(
            own_experts,
            resolve(None),
            x,
            experts,
            weights,
            [p["up"], p["down"]],
            axis=axis,
            token_axes=token_axes,
            **options,
        )

    specs = {"router": P(), "favour": P(), **specs}
    return ftp.shard(loss_of(layer), mesh, specs, batch_specs=P(token_axes), certify=True)


def loss_of(layer: Any) -> Any:
    return lambda p, x: (layer(p, x.sin()) * torch.arange(x.numel()).view(x.shape)).sum()


PLANS = {
    "data axis": ((2,), ("dp",), "dp", ("dp",), None),
    "3 ranks": ((3,), ("ep",), "ep", ("ep",), None),
    "data axis, and tp within": ((2, 2), ("dp", "tp"), "dp", ("dp",), "tp"),
    "an axis of its own beside dp": ((2, 2), ("dp", "ep"), "ep", ("dp", "ep"), None),
}


@st.composite
def routings(draw):
    k = draw(st.integers(1, 8))
    favoured = draw(st.none() | st.integers(0, 7))
    count = draw(st.sampled_from((8, 7, 2)))
    return count, draw(st.integers(1, 7)), k, favoured, draw(st.integers(0, 99))


def check(routing: Any, plan: str) -> None:
    count, tokens, k, favoured, seed = routing
    shape, axes, axis, token_axes, tp = PLANS[plan]
    k, favoured = min(k, count), None if favoured is None else favoured % count
    params, x = drawn(count, tokens, favoured, seed)
    specs = {"up": P(axis, None, tp), "down": P(axis, tp)}
    step = step_of(ftp.simulated_mesh(shape, axes), k, axis, token_axes, specs)
    grads, value = torch.func.grad_and_value(loss_of(lambda p, x: loop(p, x, k)))(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-10, atol=1e-10)


@few_or_many(routings(), st.sampled_from(sorted(PLANS)), few=2, many=40)
def test_any_routing_is_the_loop_over_experts(routing, plan):
    """Tokens that do not divide, experts without tokens, and one that all tokens choose."""
    check(routing, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@settings(max_examples=20)
@given(routings())
def test_any_routing_is_the_loop_over_experts_often(plan, routing):
    check(routing, plan)


def test_every_routing_of_a_few_tokens():
    """Each row is multiplied by its expert's number by the owner, and is back at its token."""
    factor = torch.arange(1.0, 5.0, dtype=torch.float64)[:, None]

    def multiplied(rows: torch.Tensor, own: torch.Tensor, parts: Any) -> torch.Tensor:
        return rows * F.pad(parts[0], (0, 0, 0, 1))[own]

    def layer(p, x, chosen):
        ones = torch.ones(4, 1, dtype=torch.float64)
        return dispatch(
            multiplied, resolve(None), x, chosen, ones, [p], axis="ep", token_axes=("ep",)
        )

    step = ftp.spmd(layer, ftp.simulated_mesh(2, "ep"), (P("ep"), P("ep"), P("ep")), P("ep"))
    x = torch.tensor([[3.0], [5.0], [7.0], [11.0]], dtype=torch.float64)
    for chosen in itertools.product(range(4), repeat=4):
        at = torch.tensor(chosen)
        assert torch.equal(step(factor, x, at[:, None]), x * factor[at])


def test_tokens_travel_and_weights_stay():
    """Each way rows × k × dim × itemsize × (n - 1) / n bytes: there, back, and the gradient of what
    came back; that of x is not asked for.
    """
    params, x = drawn(8, 12, None, 0)
    specs = {"up": P("dp"), "down": P("dp")}
    program = step_of(ftp.AbstractMesh((4,), ("dp",)), 2, "dp", ("dp",), specs).lower(params, x)
    rows = [c for c in program.collectives if c.op == "all_to_all" and c.worst_nbytes is not None]
    assert [c.wire_nbytes for c in rows] == [3 * 2 * DIM * 8 * 3 // 4] * 3
    assert {c.worst_nbytes for c in rows} == {4 * 3 * 2 * DIM * 8}
    others = [c for c in program.collectives if c.worst_nbytes is None]
    assert max(math.prod(c.global_shape) for c in others) < 8 * DIM * HIDDEN


def test_a_stated_capacity_raises_and_drops_nothing():
    params, x = drawn(6, 8, 0, 0)
    step = step_of(
        ftp.simulated_mesh(2, "dp"),
        1,
        "dp",
        ("dp",),
        {"up": P("dp"), "down": P("dp")},
        capacity=1.5,
    )
    with pytest.raises(ftp.errors.InputError, match="would receive 8 rows, more than bound=6"):
        step(params, x)


def test_experts_that_the_axis_does_not_divide():
    """The last of three ranks owns one expert of seven, and none of two."""
    for count in (7, 2):
        check((count, 5, 2, None, 0), "3 ranks")


# Models of transformers.


def check_model(name: str, implementation: str, plan: str) -> None:
    pytest.importorskip("transformers")
    off, program, ours = expert_program(name, implementation, plan)
    assert off < 1e-6  # routers and norms of transformers compute in float32
    axis = "ep" if plan == "ep" else "dp"
    assert ours and all(spec.entries[0] == axis for spec, _ in ours.values())
    kinds = Counter(c.op for c in program.collectives if c.worst_nbytes is not None)
    assert kinds["all_to_all"] >= 4
    shapes = {tuple(shape) for _, shape in ours.values() if len(shape) == 3}
    assert not {shape[1:] for shape in shapes} & {c.global_shape[1:] for c in program.collectives}


@pytest.mark.parametrize(
    ("name", "implementation", "plan"),
    [
        pytest.param("GptOss", "grouped_mm", "dp × tp", marks=pytest.mark.slow),
        ("Qwen3Moe", "eager", "ep"),
    ],
)
def test_a_model_of_transformers(name, implementation, plan):
    check_model(name, implementation, plan)


@pytest.mark.slow
def test_the_page_has_the_bytes_of_a_run():
    page = (Path(__file__).resolve().parents[2] / "docs" / "experts.md").read_text()
    pytest.importorskip("transformers")
    assert expert_table.row("GptOss", "dp × tp") in page
    assert expert_table.row("DeepseekV3", "ep") in page


@pytest.mark.slow
def test_the_page_has_the_bytes_of_all_runs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "experts.md").read_text()
    pytest.importorskip("transformers")
    assert expert_table.table() in page


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("plan", ["ep", "dp × tp"])
def test_models_of_transformers(name, implementation, plan):
    check_model(name, implementation, plan)


def test_what_a_plan_does_not_name_is_cut_by_its_layers_beside_the_expert_axis():
    """transformers' plan of gpt-oss names its embedding and head alone."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_local_experts=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    specs, _ = ftp.from_hf(model, expert_axis="dp")
    assert specs["model.layers.0.self_attn.q_proj.weight"] == P(ftp.units("tp", 8))
    assert specs["model.layers.0.mlp.experts.down_proj"] == P("dp", "tp", None)
    assert specs["model.layers.0.mlp.experts.down_proj_bias"] == P("dp", None)
    assert "cut: 99% of the parameters" in str(specs)


def test_what_from_hf_refuses():
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ftp.errors.SpecError, match="shards nothing without expert_axis"):
        ftp.from_hf(linear, axis=None)
    with pytest.raises(ftp.errors.SpecError, match="has no module of experts"):
        ftp.from_hf(linear, axis=None, expert_axis="ep")
    with pytest.raises(ftp.errors.SpecError, match="token_axes must name it too"):
        ftp.from_hf(linear, expert_axis="ep", token_axes=("dp",))
    with pytest.raises(ftp.errors.SpecError, match="need expert_axis="):
        ftp.from_hf(linear, expert_capacity=2.0)


def test_experts_called_otherwise_are_refused():
    class Other(torch.nn.Module):
        num_experts, _is_expert_parallel = 2, False

        def __init__(self):
            super().__init__()
            self.up = torch.nn.Parameter(torch.ones(2, 3, 3))

        def forward(self, rows, weights, chosen):
            return rows

    model = torch.nn.Sequential(Other())
    model[0].forward = lambda rows: Other.forward(model[0], rows, rows, rows)
    _, constraints = ftp.from_hf(model, axis=None, expert_axis="dp")
    fn, params = ftp.functionalize(model, constraints=constraints)
    step = ftp.shard(lambda p, x: fn(p, x).sum(), ftp.simulated_mesh(2, "dp"), P())
    with pytest.raises(ftp.errors.InputError, match=r"Other is called with torch\.float32"):
        step(params, torch.ones(4, 3))


def test_the_page_runs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "experts.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    exec(compile(code, "docs/experts.md", "exec"), {})


def test_the_page_quotes_what_was_measured():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "experts.md").read_text()
    for name, kind in (("experts", "gloo"), ("experts_in_memory", "`FTP_SHM=1`")):
        rows = json.loads((root / f"benchmarks/results/{name}.json").read_text())["rows"]
        assert len(rows) == 3
        for row in rows:
            form, wall, of_wall, cpu, of_cpu, sent, held = row.values()
            by_hand = [f"{r[1]:.2f} ({r[0]:.2f} to {r[2]:.2f})" for r in (of_wall, of_cpu)]
            said = f"| {kind} | {form} | {wall:.3f} | {by_hand[0]} | {cpu:.3f} | {by_hand[1]} |"
            assert f"{said} {sent:.0f} | {held:.0f} |" in page
