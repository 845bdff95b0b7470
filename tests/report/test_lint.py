"""What a report finds odd, what strict=True refuses, and that the plans that everyone uses are
neither.
"""

import pytest
import torch
from dropless import FORMS, drawn
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, sequence_parallel, specs

import ftp
from ftp import P

MESH = ftp.AbstractMesh((4,), ("tp",))
PLANS = {
    "dp": ({}, P("dp"), None),
    "tp": ({"tp": "tp"}, P(), None),
    "sp": ({"tp": "tp"}, P(), sequence_parallel()),
    "cp": ({}, P(None, "dp"), None),
    "zero": ({"zero": "dp"}, P("dp"), None),
    "zero × tp": ({"tp": "tp", "zero": "dp"}, P("dp"), None),
    "zero × sp": ({"tp": "tp", "zero": "dp"}, P("dp"), sequence_parallel(dp="dp")),
}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("plan", PLANS)
def test_the_plans_that_everyone_uses_are_strict(plan: str):
    cut, batch, pins = PLANS[plan]
    cfg = LlamaConfig(
        vocab=32_768, dim=1024, layers=2, heads=8, hidden=2816
    )  # large enough for warnings
    fn, params = ftp.functionalize(build(cfg, device="meta"), constraints=pins)
    mesh = ftp.AbstractMesh((4, 4), ("dp", "tp"))
    step = ftp.shard(
        lm_loss(fn), mesh, ftp.plan(params, specs(cuts(cfg), **cut)), batch_specs=batch, strict=True
    )
    lowered = step.lower(params, lm_batch(cfg, 8, 256))
    assert not [f for f in lowered.lint if f.severity == "warning"]
    assert "warning:" not in str(lowered)


def two_layers(params, x):
    return (torch.relu(x @ params["up"]) @ params["down"]).square().mean()


def lower(params, specs, x, *, fn=two_layers, strict=False, mesh=MESH, batch=P()) -> ftp.Lowered:
    return ftp.shard(fn, mesh, specs, batch_specs=batch, strict=strict).lower(params, x)


def weights(hidden: int = 4096):
    return {
        "up": torch.empty(1024, hidden, device="meta"),
        "down": torch.empty(hidden, 1024, device="meta"),
    }


def refused(*args, **options) -> str:
    with pytest.raises(ftp.errors.PlanningError, match="strict=True") as e:
        lower(*args, strict=True, **options)
    return str(e.value)


def test_a_large_parameter_on_every_rank():
    params = {**weights(), "extra": torch.empty(2048, 1024, device="meta")}

    def fn(params, x):
        return two_layers(params, x) + (x @ params["extra"].t()).mean()

    given = {"up": P(None, "tp"), "down": P("tp"), "extra": P()}
    (finding,) = [
        f
        for f in lower(params, given, torch.empty(64, 1024), fn=fn).lint
        if f.severity == "warning"
    ]
    assert (finding.kind, finding.where, finding.nbytes) == (
        "replicated",
        "params['extra']",
        8 << 20,
    )
    assert (
        "8.00 MiB, 20% of all parameters" in finding.text
        and "P('tp') would cut it in 4." in finding.text
    )
    assert finding.text in refused(params, given, torch.empty(64, 1024), fn=fn)
    lower(params, {**given, "extra": P("tp")}, torch.empty(64, 1024), fn=fn, strict=True)


def test_uneven_shards_say_what_they_waste_and_what_would_divide():
    specs = {"up": P(None, "tp"), "down": P("tp")}
    lint = lower(weights(4097), specs, torch.empty(64, 1024)).lint
    assert {f.severity for f in lint} == {"note"}
    (up,) = [
        f for f in lower(weights(9), specs, torch.empty(64, 1024)).lint if f.where == "params['up']"
    ]
    assert (
        "has 9 in dim 1 for 4 ranks: the largest shard has 3, so that 25.0% of its memory and time"
        in up.text
    )
    assert "8 or 12 would divide" in up.text
    mesh = ftp.AbstractMesh((1000,), ("tp",))
    assert any(
        "has 4097 in dim 1 for 1000 ranks" in f.text
        for f in lower(weights(4097), specs, torch.empty(64, 1024), mesh=mesh).lint
    )


def test_uneven_shards_that_waste_much_are_refused():
    wide = {
        "up": torch.empty(524288, 41, device="meta"),
        "down": torch.empty(41, 524288, device="meta"),
    }
    text = refused(
        wide,
        {"up": P(None, "tp"), "down": P("tp")},
        torch.empty(4, 524288),
        mesh=ftp.AbstractMesh((40,), ("tp",)),
    )
    assert "params['up'] has 41 in dim 1 for 40 ranks" in text and "40 or 80 would divide" in text


def test_specs_that_shard_nothing():
    one = ftp.AbstractMesh((1,), ("tp",))
    lint = lower(
        weights(), {"up": P(None, "tp"), "down": P("tp")}, torch.empty(64, 1024), mesh=one
    ).lint
    assert [(f.kind, f.severity) for f in lint] == [("shards nothing", "note")] * 2
    thin = {"up": torch.empty(1024, 1, device="meta"), "down": torch.empty(1, 1024, device="meta")}
    assert "cuts dim 1 of size 1: one rank holds all of it" in refused(
        thin, {"up": P(None, "tp"), "down": P("tp")}, torch.empty(64, 1024)
    )


def test_inputs_that_disagree_need_a_constraint_and_the_one_printed_will_do():
    column = {"up": P(None, "tp"), "down": P(None, "tp")}
    x = torch.empty(512, 1024)
    text = refused(weights(), column, x)
    assert "(aten.mm.default)" in text and "cut by params['up'] P(None, 'tp')" in text
    assert "Say what you mean: x = ftp.constrain(x, P())" in text
    assert (
        "is an activation of shape (512, 4096) that is gathered whole over 'tp', 8.00 MiB" in text
    )

    def constrained(params, x):
        hidden = ftp.constrain(torch.relu(x @ params["up"]), P())
        return (hidden @ params["down"]).square().mean()

    assert not [
        f for f in lower(weights(), column, x, fn=constrained).lint if f.kind == "disagreement"
    ]


def test_a_small_activation_that_nobody_asked_to_gather_is_refused_and_the_constraint_asks():
    """256 KiB, which only a note tells of otherwise."""
    params, x = {"up": torch.empty(1024, 64, device="meta")}, torch.empty(1024, 1024)

    def fn(params, x):
        return (x @ params["up"]).cumsum(-1).square().mean()

    def asked(params, x):
        return ftp.constrain(x @ params["up"], P()).cumsum(-1).square().mean()

    specs = {"up": P(None, "tp")}
    (note,) = lower(params, specs, x, fn=fn).lint
    assert (note.kind, note.severity, note.nbytes) == ("gathered", "note", 256 << 10)
    assert note.text in refused(params, specs, x, fn=fn)
    assert "all_gather" in [
        c.op for c in lower(params, specs, x, fn=asked, strict=True).collectives
    ]


def test_a_large_activation_that_a_constraint_or_an_output_asks_for_is_strict():
    params, x = {"up": torch.empty(1024, 4096, device="meta")}, torch.empty(512, 1024)

    def fn(params, x):
        return ftp.constrain(torch.relu(x @ params["up"]), P()).cumsum(-1).square().mean()

    lowered = lower(params, {"up": P(None, "tp")}, x, fn=fn, strict=True)
    assert [c.nbytes for c in lowered.collectives if c.op == "all_gather"] == [8 << 20]
    step = ftp.spmd(torch.mm, MESH, (P(), P(None, "tp")), P(), strict=True, data_axes=())
    assert [c.op for c in step.lower(x, params["up"]).collectives] == ["all_gather"]


def test_layers_that_repeat_are_one_finding():
    params = {f"layers.{i}": weights() for i in range(3)}

    def fn(params, x):
        for layer in params.values():
            x = torch.relu(x @ layer["up"]) @ layer["down"]
        return x.mean()

    lint = lower(
        params,
        {"layers.0": P(None, "tp"), "layers.1": P(None, "tp"), "layers.2": P(None, "tp")},
        torch.empty(512, 1024),
        fn=fn,
    ).lint
    assert max(f.count for f in lint) >= 3 and len(lint) < 9


def test_a_packed_weight_cut_across_its_parts_is_told_how_to_be_cut():
    """Also beside a batch that another axis cuts."""

    def fn(params, x):
        q, k, v = (x @ params["qkv"]).chunk(3, dim=-1)
        return ((q * k.tanh() * v) @ params["down"]).square().mean()

    params = {
        "qkv": torch.empty(256, 1536, device="meta"),
        "down": torch.empty(512, 256, device="meta"),
    }
    mesh = ftp.AbstractMesh((2, 4), ("dp", "tp"))

    def lint(qkv: P) -> str:
        step = ftp.shard(fn, mesh, {"qkv": qkv, "down": P("tp")}, batch_specs=P("dp"))
        return "\n".join(map(str, step.lower(params, torch.empty(1024, 256, device="meta")).lint))

    text = lint(P(None, "tp"))
    assert (
        "warning" in text
        and "an activation of shape (1024, 1536) that is gathered whole over 'tp', 3.00 MiB" in text
    )
    assert (
        "There dim 1 falls into 3 parts: units('tp', pack=3) in that spec cuts each of them,"
        " units('tp', 512) none." in text
    )
    assert "gathered" not in lint(P(None, ftp.units("tp", pack=3)))


def test_results_without_a_dim_are_no_parts_of_it():
    """A median's value and index have no dim 1, along which it is gathered."""

    def fn(params, x):
        return (x @ params["w"]).median(1).values.square().mean()

    mesh = ftp.AbstractMesh((2,), ("tp",))
    step = ftp.shard(fn, mesh, {"w": P(None, "tp")})
    lint = step.lower({"w": torch.empty(8, 6)}, torch.empty(4, 8)).lint
    assert any("gathered whole over 'tp'" in f.text for f in lint)
    assert not any("parts" in f.text for f in lint)


def test_what_per_rank_code_gathers_is_no_finding():
    def gathered(x):
        return ftp.axis.all_gather(x, "tp")

    def loss(params, x):
        whole = ftp.local(gathered, in_specs=P("tp"), out_specs=P())(x * params["w"])
        return whole.square().mean()

    step = ftp.shard(loss, MESH, {"w": P()}, batch_specs=P("tp"))
    lowered = step.lower({"w": torch.ones(8)}, torch.ones(16, 8))
    assert lowered.collectives[0].op == "all_gather" and not lowered.lint


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("capacity", [None, 1.5])
def test_room_for_rows_that_stays_empty_is_a_finding(compile: bool, capacity: float | None):
    """Eager runs compute the rows that arrive; compiled ones all that there is room for."""
    params, x = drawn(4, 32_768, None, 3)
    layer = ftp.plans.send_tokens(
        lambda p, x: FORMS["torchtitan_form"](p, x, 2), "ep", capacity=capacity
    )
    step = ftp.shard(
        lambda p, x: layer(p, x).square().sum(),
        ftp.AbstractMesh((4,), ("ep",)),
        {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")},
        batch_specs=P("ep"),
        compile=compile,
    )
    found = [f for f in step.lower(params, x).lint if f.kind == "empty rows"]
    if capacity or not compile:
        assert not found
        return
    (finding,) = found
    own, row = 32_768 * 2 // 4, x.shape[1] * x.element_size()
    assert finding.severity == "note" and finding.nbytes == 3 * own * row
    assert f"room for all {4 * own} rows that 4 ranks send" in finding.text
    assert f"bound= of all_to_all, leaves {own * 3 // 2} rows" in finding.text


def test_rows_that_are_read_together_take_the_room_in_eager_runs_too():
    def mixed(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return ftp.axis.all_to_all(x, "ep", send_counts=counts).cumsum(0)

    mesh, width = ftp.AbstractMesh((4,), ("ep",)), 16_384
    fn = ftp.local(mixed, mesh, P("ep"), P("ep"))
    given = torch.empty(4 * 8, width, device="meta"), torch.ones(16, dtype=torch.int64)
    lowered = ftp.lower(fn, mesh, (P("ep"), P("ep")), *given)
    (finding,) = [f for f in lowered.lint if f.kind == "empty rows"]
    assert finding.nbytes == 3 * 8 * width * 4 and "all 32 rows" in finding.text
