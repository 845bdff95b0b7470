"""Rows that arrived are computed in place of the room for them: as values, the same program."""

from typing import Any

import pytest
import torch
from dropless import FORMS, drawn, loop
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.passes.arrived_rows import only_arrived
from ftp.per_rank.dispatch import dispatch
from ftp.rules.local_op import as_module
from ftp.runtime.executed import in_order
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.program import join_parts, shard_of
from ftp.runtime.simulate import simulate
from ftp.sharding.mesh import resolve
from tests.plans.test_expert_axis import own_experts, routed

PLANS = {
    "ep": ((2,), ("ep",), "ep", ("ep",)),
    "3 ranks": ((3,), ("ep",), "ep", ("ep",)),
    "an axis of its own beside dp": ((2, 2), ("dp", "ep"), "ep", ("dp", "ep")),
}


def loss_of(layer: Any) -> Any:
    return lambda p, x: (layer(p, x.sin()) * torch.arange(x.numel()).view(x.shape)).sum()


def run_fitted(lowered: Any, leaves: list[torch.Tensor]) -> tuple[list[torch.Tensor], set[bool]]:
    """The simulated results after the pass, and whether exchanges return what arrives only."""
    program = lowered._program
    coordinates, axes = program.mesh.coordinates(), program.mesh.axes
    programs, inputs, fits = [], [], set()
    for coordinate in coordinates:
        local = program.local(coordinate)
        graph = in_order(program, local, coordinate).graph
        graph = only_arrived(graph, (ALL_TO_ALL_ROWS,))
        fits |= {n.args[4] for n in graph.nodes if n.target is ALL_TO_ALL_ROWS}
        programs.append(type(local)(as_module(graph), local.offsets, local.collectives))
        shards = [
            shard_of(x, spec, axes, coordinate)
            for x, spec in zip(leaves, program.in_specs, strict=True)
        ]
        inputs.append([*shards, *program.constants, *local.offsets_at(coordinate)])
    outputs = simulate(programs, inputs, groups_of(program.mesh))
    whole = [
        join_parts([rank[i] for rank in outputs], spec, shape, axes, coordinates)
        for i, (spec, shape) in enumerate(zip(program.out_specs, program.out_shapes, strict=True))
    ]
    return whole, fits


@st.composite
def routings(draw):
    favoured = draw(st.none() | st.integers(0, 5))
    count = draw(st.sampled_from((8, 7, 2)))
    tokens, k = draw(st.integers(1, 7)), draw(st.integers(1, 8))
    return count, tokens, k, favoured, draw(st.integers(0, 9))


def check(form: str, plan: str, routing: Any) -> None:
    count, tokens, k, favoured, seed = routing
    shape, axes, axis, token_axes = PLANS[plan]
    k, favoured = min(k, count), None if favoured is None else favoured % count
    params, x = drawn(count, tokens, favoured, seed)
    layer = ftp.plans.send_tokens(lambda p, x: FORMS[form](p, x, k), axis, token_axes=token_axes)
    specs = {"router": P(), "favour": P(), "up": P(axis), "down": P(axis)}
    mesh = ftp.AbstractMesh(shape, axes)
    step = ftp.shard(loss_of(layer), mesh, specs, batch_specs=P(token_axes))
    lowered = step.lower(params, x)
    names = sorted(params)
    found, fits = run_fitted(lowered, [*(params[name] for name in names), x])
    grads, value = torch.func.grad_and_value(loss_of(lambda p, x: loop(p, x, k)))(params, x)
    expected = [value, *(grads[name] for name in names)]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert fits == {True}


@settings(max_examples=3)
@given(st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(PLANS)), routings())
def test_any_routing_is_the_loop_over_experts(form, plan, routing):
    check(form, plan, routing)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(PLANS)), routings())
def test_any_routing_is_the_loop_over_experts_often(form, plan, routing):
    check(form, plan, routing)


def test_rows_that_are_counted_keep_their_room():
    """The experts look up whose each row is, for as many rows as there is room."""
    params, x = drawn(4, 6, None, 0)

    def layer(p, x):
        weights, chosen = routed(p, x, 2)
        parts, on = [p["up"], p["down"]], {"axis": "ep", "token_axes": ("ep",)}
        return dispatch(own_experts, resolve(None), x, chosen, weights, parts, **on)

    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    step = ftp.shard(loss_of(layer), ftp.AbstractMesh((2,), ("ep",)), specs, batch_specs=P("ep"))
    _, fits = run_fitted(step.lower(params, x), [*(params[name] for name in sorted(params)), x])
    assert fits == {False}
