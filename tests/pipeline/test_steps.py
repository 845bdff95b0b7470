"""Pipelined steps equal ``optim.accumulate`` on one device, on every mesh and schedule."""

import copy
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from few_or_many import few_or_many
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.api.options import check_pipeline
from ftp.errors import (
    CertificateError,
    InputError,
    MeshError,
    ReportError,
    ScheduleError,
    SpecError,
)
from ftp.pipeline import check
from ftp.pipeline.subgraphs import Stages
from ftp.runtime.compile import compiled, eager
from ftp.runtime.options import Options
from ftp.sharding.mesh import resolve
from tests.support.staged_models import Model, plan_of


def tensor_parallel(name: str) -> P:
    return {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp"), "emb": P("tp")}.get(name, P())


def zero_with_tp(name: str) -> P:
    return {
        "emb": P(("dp", "tp")),
        "up": P("dp", "tp"),
        "down": P("tp", "dp"),
        "bias": P(("tp", "dp")),
        "norm": P("dp"),
        "head": P("dp"),
        "scale": P(),
    }[name]


def compare(model, shape, axes, spec_of, batch_spec, pipe, rows) -> Any:
    mesh, params = ftp.simulated_mesh(shape, axes), model.params()
    specs = pipe.place(params, plan_of(params, spec_of), mesh)
    step = ftp.shard(model.loss, mesh, specs, batch_specs=batch_spec, pipeline=pipe, certify=True)
    loss, grads = step(params, *model.batch(rows))
    due_loss, due = model.on_one_device(pipe.microbatches, rows)
    torch.testing.assert_close(loss, due_loss, rtol=1e-12, atol=1e-12)
    assert optree.tree_structure(grads) == optree.tree_structure(due)
    for a, b in zip(optree.tree_leaves(grads), optree.tree_leaves(due), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return step.lower(params, *model.batch(rows))


@st.composite
def cases(draw):
    ranks = draw(st.integers(2, 4))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    chunks = draw(st.integers(1, 2)) if schedule in ("gpipe", "interleaved") else 1
    microbatches = draw(st.integers(1, 4))
    if schedule == "interleaved":
        microbatches = ranks * draw(st.integers(1, 2))
    model = Model(
        ranks * chunks + draw(st.integers(0, 2)), *(draw(st.booleans()) for _ in range(3))
    )
    return model, ranks, ftp.Pipeline("pp", microbatches, schedule, chunks=chunks)


OTHER_AXES = {
    "pp": ((), (), lambda name: P(), P()),
    "pp × dp": ((2,), ("dp",), lambda name: P(), P("dp")),
    "pp × tp": ((2,), ("tp",), tensor_parallel, P()),
    "pp × ZeRO-3 × tp": ((2, 2), ("dp", "tp"), zero_with_tp, P("dp")),
}


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("name", ["pp", "pp × tp"])
@few_or_many(case=cases(), few=2, many=40)
def test_equals_one_device(name, case):
    run_case(name, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_AXES)
@given(case=cases())
@settings(max_examples=25)
def test_equals_one_device_often(name, case):
    run_case(name, case)


def run_case(name, case):
    model, ranks, pipe = case
    shape, axes, spec_of, batch_spec = OTHER_AXES[name]
    rows = 2 * pipe.microbatches
    compare(model, (ranks, *shape), ("pp", *axes), spec_of, batch_spec, pipe, rows)


@st.composite
def inside_stages(draw):
    """Attention with the sequence cut, or experts on ranks of their own, uneven ones too."""
    is_sequence = draw(st.booleans())
    layers = 2 * draw(st.integers(1, 2)) + draw(st.integers(0, 1))
    experts = 0 if is_sequence else draw(st.integers(2, 4))
    model = Model(layers, draw(st.booleans()), attends=is_sequence, experts=experts)
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]))
    return model, ftp.Pipeline("pp", draw(st.integers(1, 3)), schedule)


@pytest.mark.slow
@given(case=inside_stages())
@settings(max_examples=2)
def test_sequence_and_experts_inside_stages(case):
    run_inside(case)


@pytest.mark.slow
@given(case=inside_stages())
@settings(max_examples=25)
def test_sequence_and_experts_inside_stages_often(case):
    run_inside(case)


def run_inside(case):
    model, pipe = case
    axis = "ep" if model.experts else "cp"
    spec_of = lambda name: P("ep") if name == "experts" else P()  # noqa: E731
    rows = P() if model.experts else P(None, "cp")
    compare(model, (2, 2), ("pp", axis), spec_of, rows, pipe, 2 * pipe.microbatches)


def test_zero_and_tensor_parallelism_inside_stages():
    pipe = ftp.Pipeline("pp", 2)
    lowered = compare(
        Model(3, tied=True), (2, 2, 2), ("dp", "pp", "tp"), zero_with_tp, P("dp"), pipe, 4
    )
    # One activation goes on and one gradient comes back a microbatch; the tied table once each way.
    sent = [c.global_shape for c in lowered.collectives_of(0) if c.op == "send"]
    back = [c.global_shape for c in lowered.collectives_of(1) if c.op == "send"]
    assert sent == [(2, 5, 8)] * 2 + [(11, 8)] and back == [(2, 5, 8)] * 2 + [(11, 8)]


def test_a_skipping_value_is_passed_along_and_said():
    model = Model(4, skips=True)
    lowered = compare(model, (4,), ("pp",), lambda name: P(), P(), ftp.Pipeline("pp", 2), 4)
    assert "is passed along to stage 3" in str(lowered)
    assert [len(lowered.messages(k, "F")) for k in range(4)] == [2, 2, 2, 0]


def test_a_users_own_schedule():
    pipe = ftp.Pipeline("pp", 3)
    lists = pipe.actions(2)
    lists[0] = [a for a in lists[0] if a.kind == "F"] + [a for a in lists[0] if a.kind == "B"]
    own = ftp.Pipeline("pp", 3, lists)
    compare(Model(2), (2,), ("pp",), lambda name: P(), P(), own, 3)


def test_a_users_own_schedule_of_chunks():
    """Two stages a rank of uneven layers, and the backward passes of one of them in halves."""
    lists = ftp.Pipeline("pp", 2, "interleaved", chunks=2).actions(2)
    lists[1] = [
        action
        for a in lists[1]
        for action in ([a] if a.kind == "F" else [a._replace(kind="I"), a._replace(kind="W")])
    ]
    own = ftp.Pipeline("pp", 2, lists, chunks=2)
    lowered = compare(Model(5, tied=True), (2,), ("pp",), lambda name: P(), P(), own, 4)
    assert [sorted(stage) for stage in lowered.stages] == [["B", "F"], ["F", "I", "W"]] * 2


@pytest.mark.parametrize("by_inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_actions_equal_one_device(by_inductor, monkeypatch):
    """The actions of two ranks are compiled, with the sums of gradients and without."""
    model, pipe = Model(2, tied=True, scaled=True), ftp.Pipeline("pp", 2, "zero_bubble")
    mesh, params = ftp.simulated_mesh((2,), ("pp",)), model.params()
    made = []

    def noted(graph: Any, inputs: Any, donated: Any, choose: Any, **options: Any) -> Any:
        made.append(graph)
        if not by_inductor:
            return eager(graph, inputs, donated, host=options["host"])
        return compiled(graph, inputs, donated, choose, **options)

    monkeypatch.setattr("ftp.runtime.program.compiled", noted)
    specs = pipe.place(params, P(), mesh)
    step = ftp.shard(model.loss, mesh, specs, pipeline=pipe, compile=True)
    due = model.on_one_device(2, 4)
    for _ in range(2):
        torch.testing.assert_close(step(params, *model.batch(4)), due, rtol=1e-12, atol=1e-12)
    # Forward, I and W of two stages.
    assert len(made) >= 6


def test_batches_of_other_sizes_are_planned_anew():
    """Sizes are not made symbolic in stages, whose messages have fixed shapes."""
    model, pipe, mesh = Model(2), ftp.Pipeline("pp", 2), ftp.simulated_mesh((2,), ("pp",))
    params = model.params()
    step = ftp.shard(model.loss, mesh, pipe.place(params, P(), mesh), pipeline=pipe)
    for rows in (4, 2, 6, 8):
        due = model.on_one_device(2, rows)
        found = step(params, *model.batch(rows))
        torch.testing.assert_close(found, due, rtol=1e-12, atol=1e-12)


def test_aux_is_averaged_and_replicated():
    model, pipe = Model(2), ftp.Pipeline("pp", 2)
    mesh = ftp.simulated_mesh((2, 2), ("pp", "dp"))

    def loss_fn(params, tokens, targets):
        loss = model.loss(params, tokens, targets)
        return loss, {"twice": 2 * loss, "rows": params["emb"][tokens].mean((1, 2))}

    params, (tokens, targets) = model.params(), model.batch(8)
    specs = pipe.place(params, P(), mesh)
    step = ftp.shard(
        loss_fn, mesh, specs, batch_specs=P("dp"), has_aux=True, pipeline=pipe, certify=True
    )
    (loss, aux), _ = step(params, tokens, targets)
    torch.testing.assert_close(aux["twice"], 2 * loss)
    rows = params["emb"][tokens].mean((1, 2))
    torch.testing.assert_close(aux["rows"], (rows[::2] + rows[1::2]) / 2)
    assert ftp.specs_of(aux) == {"twice": P(), "rows": P()}


def test_inputs_may_be_aux_themselves():
    model, pipe = Model(2), ftp.Pipeline("pp", 2)
    mesh, constant = ftp.simulated_mesh((2, 2), ("pp", "tp")), torch.arange(3.0)

    def loss_fn(params, tokens, targets):
        aux = {"first": params["emb"], "last": params["head"], "again": params["head"]}
        return model.loss(params, tokens, targets), {**aux, "batch": targets, "constant": constant}

    params, batch = model.params(), model.batch(8)
    specs = pipe.place(params, plan_of(params, tensor_parallel), mesh)
    step = ftp.shard(loss_fn, mesh, specs, has_aux=True, pipeline=pipe, certify=True)
    (loss, aux), grads = step(params, *batch)
    torch.testing.assert_close((loss, grads), model.on_one_device(2, 8), rtol=1e-12, atol=1e-12)
    rows = batch[1].unflatten(0, (-1, 2)).double().mean(1)
    wanted = {"first": params["emb"], "last": params["head"], "again": params["head"]}
    wanted |= {"batch": rows, "constant": constant}
    torch.testing.assert_close(aux, wanted, rtol=0, atol=0, check_dtype=False)


def test_a_broken_step_is_not_certified(monkeypatch):
    """The check misses each message and each value of a subgraph, left out or exchanged."""
    model, mesh, pipe = Model(3, tied=True), ftp.AbstractMesh((3,), ("pp",)), ftp.Pipeline("pp", 2)
    params = model.params()
    seen: list[Any] = []
    monkeypatch.setattr("ftp.api.pipelined_step.check_stages", lambda *args: seen.append(args))
    step = ftp.shard(model.loss, mesh, pipe.place(params, P(), mesh), pipeline=pipe)
    step.lower(params, *model.batch(4))
    traced, n, batch, leaves, stages, actions = seen[0]
    check.check_stages(traced, n, batch, leaves, stages, actions)
    broken: list[tuple[Stages, Any]] = []

    def change(lists: Any = actions, **fields: Any) -> None:
        broken.append((replace(stages, **fields), lists))

    for name in ("forward", "backward"):
        sent = getattr(stages, name)
        for k in range(len(sent)):
            if sent[k]:
                change(**{name: (*sent[:k], (), *sent[k + 1 :])})
    for leaf, found in enumerate(stages.gradients):
        for k in found:
            less = {j: v for j, v in found.items() if j != k}
            for other in (less, {**found, k: stages.results[0][1]}):
                change(gradients=(*stages.gradients[:leaf], other, *stages.gradients[leaf + 1 :]))
    for key, subgraph in stages.subgraphs.items():
        change(subgraphs={k: p for k, p in stages.subgraphs.items() if k != key})
        twin = copy.deepcopy(subgraph.gm)
        node = next(x for x in twin.graph.nodes if x.op == "call_function" and x.all_input_nodes)
        node.args = (*node.args, 7)
        change(subgraphs={**stages.subgraphs, key: replace(subgraph, gm=twin)})
    for rank, own in enumerate(actions):
        for at in range(len(own)):
            changed = [*own[:at], *own[at + 1 :]]
            change([*actions[:rank], changed, *actions[rank + 1 :]])
    assert len(broken) > 50
    for mutant, lists in broken:
        with pytest.raises((CertificateError, KeyError)):
            check.check_stages(traced, n, batch, leaves, mutant, lists)


def test_report(tmp_path):
    model, mesh = Model(4), ftp.AbstractMesh((4, 2), ("pp", "dp"))
    params, batch = model.params(), model.batch(16)
    found: dict[str, Any] = {}
    for schedule in ("gpipe", "1f1b"):
        pipe = ftp.Pipeline("pp", 8, schedule)
        specs = pipe.place(params, P(), mesh)
        step = ftp.shard(model.loss, mesh, specs, batch_specs=P("dp"), pipeline=pipe)
        found[schedule] = step.lower(params, *batch)
    lowered = found["1f1b"]
    assert lowered.ideal_bubble == 3 / 11 and 0 < lowered.bubble < 1
    assert lowered.memory_by_rank[0] < found["gpipe"].memory_by_rank[0]
    pairs = [(k, k + 1) for k in range(3)] + [(k + 1, k) for k in range(3)]
    assert lowered.on_their_way == {(a, b): 4 - min(a, b) for a, b in pairs}
    assert "messages: at most 4 on their way" in str(lowered)
    assert "stage 0: 5 parameters" in str(lowered) and "at most 4 microbatches held" in str(lowered)
    lowered.timeline.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 4 * 16
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["planned"]


def test_errors(tmp_path, monkeypatch):
    model, mesh, pipe = Model(2), ftp.simulated_mesh((2, 2), ("pp", "dp")), ftp.Pipeline("pp", 4)
    params = model.params()
    specs = pipe.place(params, P(), mesh)
    step = ftp.shard(model.loss, mesh, specs, batch_specs=P("dp"), pipeline=pipe)
    with pytest.raises(
        InputError, match="of which a rank holds 2 rows, which do not divide into 4"
    ):
        step(params, *model.batch(4))
    drawn = lambda p, x, y, key: model.loss(p, x, y)  # noqa: E731
    of_key = ftp.shard(drawn, mesh, specs, batch_specs=(P("dp"), P("dp"), P()), pipeline=pipe)
    with pytest.raises(InputError, match=r"Of a random key give ftp\.random\.split\(key, 4\)"):
        of_key(params, *model.batch(8), ftp.random.key(0))
    scaled = lambda p, x, y, s: s.reshape(-1)[0] * model.loss(p, x, y)  # noqa: E731
    of_number = ftp.shard(scaled, mesh, specs, batch_specs=(P("dp"), P("dp"), P()), pipeline=pipe)
    rows, number = model.batch(8), torch.tensor(2.0, dtype=torch.float64)
    with pytest.raises(InputError, match=r"s is 0-d.* Give s\.expand\(4\) of spec P\(\)"):
        of_number(params, *rows, number)
    loss, _ = of_number(params, *rows, number.expand(4))
    torch.testing.assert_close(loss, 2 * model.on_one_device(4, 8)[0])
    with pytest.raises(ReportError, match="holds one graph of each rank; stages are several"):
        step.lower(params, *model.batch(8)).save(tmp_path / "staged.ftp")
    on_stages = ftp.shard(model.loss, mesh, specs, batch_specs=P("pp"), pipeline=pipe)
    with pytest.raises(SpecError, match="the ranks of 'pp' are stages"):
        on_stages(params, *model.batch(8))
    plain = ftp.shard(model.loss, mesh, P("pp"), pipeline=pipe)
    with pytest.raises(
        SpecError, match=r"Make the specs with pipeline.place\(params, specs, mesh\)"
    ):
        plain(params, *model.batch(8))
    options: list[dict[str, Any]] = [
        {"donate": (0,)},
        {"check_inputs": True},
    ]
    for option in options:
        with pytest.raises(InputError, match=r"exclude each other|does not go with stages"):
            ftp.shard(model.loss, mesh, specs, pipeline=pipe, **option)
    with pytest.raises(InputError, match=r"give an ftp\.Pipeline"):
        ftp.shard(model.loss, mesh, specs, pipeline="pp")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"Pass pipeline="):
        ftp.shard(model.loss, mesh, specs)
    on_gpus = replace(resolve(mesh), kind="process", device_type="cuda")
    for uses_nccl in (True, False):
        monkeypatch.setattr("ftp.api.options.uses_nccl", lambda mesh, found=uses_nccl: found)
        gloo = pytest.raises(MeshError, match="gloo, which sends no tensors of a GPU")
        with nullcontext() if uses_nccl else gloo:
            check_pipeline(pipe, on_gpus, Options(), specs)
    lists = ftp.Pipeline("pp", 1, [[ftp.Action("F", 0, 0)], []])
    with pytest.raises(ScheduleError, match="is missing"):
        ftp.shard(model.loss, mesh, specs, pipeline=lists)


def test_the_page(capsys, tmp_path, monkeypatch):
    """docs/pipelines.md runs as it stands, in one scope."""
    page = (Path(__file__).resolve().parents[2] / "docs/pipelines.md").read_text()
    scope: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/pipelines.md", "exec"), scope)
    assert "stage 1: " in capsys.readouterr().out


def test_gradients_are_reduced_over_the_data_axis_once_a_step():
    """An action crosses it with a single number alone: how many targets count."""
    model, pipe = Model(layers=2), ftp.Pipeline("pp", microbatches=2)
    more = replace(pipe, microbatches=4)
    lowered, longer = (
        compare(model, (2, 2), ("pp", "dp"), lambda name: P(), P("dp"), p, 8) for p in (pipe, more)
    )
    for stage in lowered.stages:
        for x in stage.values():
            assert all(c.shape == () for c in x.collectives if "dp" in c.axes)
    assert sum(len(x.collectives) for stage in lowered.stages for x in stage.values()) == 1
    for rank in range(2):
        made, also = (
            [c for c in x.collectives_of(rank) if "dp" in c.axes and c.shape]
            for x in (lowered, longer)
        )
        assert [(c.op, c.shape) for c in made] == [(c.op, c.shape) for c in also]
        assert {c.op for c in made} == {"all_reduce"}


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_parameters_and_results_that_share_a_value(axis: str):
    """The gradients of ``a`` and ``b`` are equal; two results are one value, reduced twice."""

    def loss(params, x):
        for layer in params["layers"]:
            x = (x @ layer["w"] + layer["a"] + layer["b"]).tanh()
        mean = x.square().mean()
        return mean, (mean, x.mean())

    g = torch.Generator().manual_seed(0)
    shapes = {"w": (6, 6), "a": (6,), "b": (6,)}
    params = {
        "layers": [
            {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in shapes.items()}
            for _ in range(4)
        ]
    }
    x = torch.randn(8, 6, generator=g, dtype=torch.float64)
    own = {"w": P(None, "tp"), "a": P("tp"), "b": P()} if axis == "tp" else P()
    mesh, pipe = ftp.simulated_mesh((2, 2), ("pp", axis)), ftp.Pipeline("pp", microbatches=2)
    specs = pipe.place(params, {"layers": [own] * 4}, mesh)
    batch = P("dp") if axis == "dp" else P()
    step = ftp.shard(
        loss, mesh, specs, batch_specs=batch, pipeline=pipe, has_aux=True, certify=True
    )
    wanted = torch.func.grad_and_value(loss, has_aux=True)(params, x)[::-1]
    torch.testing.assert_close(step(params, x), wanted, rtol=1e-12, atol=1e-12)


def test_stages_of_equal_layers_run_one_program_whatever_the_order_of_their_names():
    """Layer 10 comes before layer 9 among the leaves."""
    params = {f"layers.{i}": torch.randn(8, 8, dtype=torch.float64) / 3 for i in range(15)}

    def loss_fn(params, x):
        for i in range(15):
            x = x + torch.tanh(x @ params[f"layers.{i}"])
        return x.square().mean()

    pipe = ftp.Pipeline("pp", microbatches=2)
    mesh, x = ftp.simulated_mesh((5,), ("pp",)), torch.randn(4, 8, dtype=torch.float64)
    step = ftp.shard(loss_fn, mesh, pipe.place(params, P(), mesh), batch_specs=P(), pipeline=pipe)
    lowered = step.lower(params, x)
    for kind in "FB":
        assert len({id(lowered.stages[k][kind]._program) for k in (1, 2, 3)}) == 1
    due = ftp.optim.accumulate(torch.func.grad_and_value(loss_fn), 2)(params, x)
    torch.testing.assert_close(step(params, x), due[::-1], rtol=1e-12, atol=1e-12)


def test_a_gradient_made_of_a_later_stage_s_activation_is_made_there():
    """The activation would be sent back for each microbatch; the sum is sent once a step."""
    g = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=g, dtype=torch.float64)
        for name, shape in {"a": (2, 8), "b": (8, 8)}.items()
    }
    x = torch.randn(4, 8, generator=g, dtype=torch.float64)

    def loss(p, x):
        return ((torch.sigmoid(x) + p["a"]) * torch.tanh(x @ p["b"])).sum()

    mesh, pipe = ftp.simulated_mesh((2,), ("pp",)), ftp.Pipeline("pp", 2, stages=[["a"], ["b"]])
    step = ftp.shard(
        loss, mesh, pipe.place(params, P(), mesh), batch_specs=P(), pipeline=pipe, certify=True
    )
    lowered: Any = step.lower(params, x)
    assert not lowered.messages(1, "B")
    due = ftp.optim.accumulate(torch.func.grad_and_value(loss), 2)(params, x)
    torch.testing.assert_close(step(params, x), due[::-1], rtol=1e-12, atol=1e-12)


def test_microbatches_that_decide_by_values():
    """Stages cut both ways of the loss, and microbatches go different ways."""
    g = torch.Generator().manual_seed(0)
    params = {name: torch.randn(6, 6, generator=g, dtype=torch.float64) / 2 for name in "abcd"}
    x = torch.linspace(0.2, 3, 8)[:, None] * torch.randn(8, 6, generator=g, dtype=torch.float64)

    def loss(p, x):
        h = x
        for name in "abcd":
            h = torch.tanh(h @ p[name])
        value = (h - x).square().mean()
        if value > 2:
            value = value * 3
        if h.abs().mean().item() > 0.4:
            value = value + h.abs().mean()
        return value

    values = [loss(params, x[i::4]) for i in range(4)]
    assert min(values) < 2 and max(values) > 6
    parts = [
        torch.autograd.grad(loss(own, x[i::4]), list(own.values()))
        for i in range(4)
        for own in [{k: v.clone().requires_grad_() for k, v in params.items()}]
    ]
    due = {k: sum(of) / 4 for k, *of in zip(params, *parts, strict=True)}
    mesh = ftp.simulated_mesh((2, 2), ("pp", "tp"))
    pipe = ftp.Pipeline("pp", 4, stages=[["a", "b"], ["c", "d"]])
    specs = pipe.place(params, dict.fromkeys(params, P(None, "tp")), mesh)
    step = ftp.shard(loss, mesh, specs, batch_specs=P(), pipeline=pipe, certify=True)
    value, grads = step(params, x)
    torch.testing.assert_close(value, sum(values) / 4, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, due, rtol=1e-12, atol=1e-12)
