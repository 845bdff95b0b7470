"""Reasons of layouts, costs of other ones against plans made with them, and differences of
programs.
"""

import pytest
import torch
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, specs

import ftp
from ftp import P

MESH = ftp.AbstractMesh((4,), ("tp",))
PARAMS = {"up": torch.empty(64, 256), "down": torch.empty(256, 64)}
MEGATRON = {"up": P(None, "tp"), "down": P("tp")}


def loss(params, x):
    return (torch.relu(x @ params["up"]) @ params["down"]).square().mean()


def lower(given=MEGATRON) -> ftp.Lowered:
    return ftp.shard(loss, MESH, given).lower(PARAMS, torch.empty(32, 64))


def test_the_chain_leads_to_the_parameter():
    why = lower().why("%mm_1")
    assert why.chain[0].startswith("over tp: because of params['down'] P('tp'")
    assert why.layout == "f32[32, 64] {sum over tp}" and "mm" in str(why)
    assert lower().why("x").chain == ("replicated: no cut of an input or constraint reaches it",)


def test_other_specs_of_a_parameter_cost_what_plans_with_them_cost():
    lowered = lower()
    why = lowered.why("up")
    assert {a.layout for a in why.alternatives} == {"P(None, 'tp')", "P()", "P('tp')"}
    for alternative in why.alternatives:
        spec = {"P(None, 'tp')": P(None, "tp"), "P()": P(), "P('tp')": P("tp")}[alternative.layout]
        planned = lower({**MEGATRON, "up": spec})
        assert alternative.seconds == pytest.approx(planned.plan.cost, rel=1e-12)
        assert (
            alternative.wire_nbytes == planned.collectives.wire_nbytes
            and alternative.memory == planned.memory
        )
        assert alternative.chosen == (spec == P(None, "tp"))
    assert [a.layout for a in why.alternatives if a.chosen] == ["P(None, 'tp')"]


def test_other_layouts_of_a_value_are_no_cheaper_than_the_one_it_has():
    lowered = lower()
    why = lowered.why("relu")
    (chosen,) = [a for a in why.alternatives if a.chosen]
    assert (
        chosen.layout == "cut on dim 1"
        and chosen.delta == 0
        and chosen.seconds == lowered.plan.solutions["tp"].cost
    )
    others = [a for a in why.alternatives if not a.chosen]
    assert others and all(a.delta is None or a.delta >= 0 for a in others)
    assert any(a.layout == "whole" for a in others)


def test_a_name_that_is_not_there_is_an_error_with_the_nearest():
    with pytest.raises(ftp.errors.ReportError, match=r"no value 'mm_9'; the nearest are .*mm_"):
        lower().why("mm_9")


def test_the_difference_of_specs_is_in_collectives_bytes_memory_and_time():
    cfg = LlamaConfig(layers=1)
    fn, params = ftp.functionalize(build(cfg))
    mesh = ftp.AbstractMesh((4,), ("x",))
    plain = ftp.shard(lm_loss(fn), mesh, P(), batch_specs=P("x")).lower(params, lm_batch(cfg))
    zero = ftp.shard(
        lm_loss(fn), mesh, ftp.plan(params, specs(cuts(cfg), zero="x")), batch_specs=P("x")
    ).lower(params, lm_batch(cfg))
    there, back = plain.diff(zero), zero.diff(plain)
    assert there.specs["params['emb.weight']"] == ("P()", "P('x', None)")
    assert sum(n for (op, *_), n in there.added.items() if op == "all_gather") > 0
    assert (
        there.added == back.removed
        and there.wire_nbytes == -back.wire_nbytes
        and there.memory == -back.memory
    )
    assert there.memory == zero.memory - plain.memory and there.seconds == pytest.approx(
        zero.cost() - plain.cost()
    )
    assert "bytes sent per rank: " in str(there) and bool(there)
    assert not plain.diff(plain)
