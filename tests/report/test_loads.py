"""Rows per rank and expert of a given batch; memory and cost by expected and worst load."""

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropless import FORMS, drawn, loop, routed

import ftp
from ftp import P


@pytest.mark.parametrize(("shape", "count"), [((2, 2), 4), ((3,), 7)])
def test_loads_are_what_the_router_chose(shape: tuple[int, ...], count: int):
    axes = ("dp", "ep")[-len(shape) :]
    n, groups = shape[-1], 1 if len(shape) == 1 else shape[0]
    params, x = drawn(count, 12, 0, 3)
    layer = ftp.plans.send_tokens(
        lambda p, x: FORMS["torchtitan_form"](p, x, 2), "ep", token_axes=axes
    )
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    step = ftp.shard(
        lambda p, x: layer(p, x).square().sum(),
        ftp.AbstractMesh(shape, axes),
        specs,
        batch_specs=P(axes),
    )
    lowered = step.lower(params, x)
    (load,) = lowered.loads(params, x)
    own = -(-count // n)
    expected: list[Any] = []
    for tokens in x.chunk(groups):
        per_expert = F.one_hot(routed(params, tokens, 2)[1].flatten(), count).sum(0)
        expected += F.pad(per_expert, (0, own * n - count)).view(n, own).tolist()
    assert [list(e) for e in load.experts] == expected
    assert load.rows == tuple(map(sum, expected))
    assert load.equal == 12 * 2 / (n * groups) and load.most == max(load.rows) / load.equal
    assert load.room == 12 * 2 // groups
    assert f"ep=0: {load.rows[0]}, by expert {expected[0][0]} " in str(lowered.loads(params, x))
    assert "dropless.py" in load.source


def test_loads_of_layers_are_named_by_their_experts():
    """Two layers of one line of code, the later of which routes by what the first makes."""
    one, x = drawn(4, 12, None, 3)
    params = {
        f"layers.{i}.{name}": value.roll(i, -1) for i in (0, 1) for name, value in one.items()
    }

    def of_layer(p: Any, i: int) -> Any:
        return {name: p[f"layers.{i}.{name}"] for name in one}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1):
            layer = ftp.plans.send_tokens(lambda p, x: FORMS["torchtitan_form"](p, x, 2), "ep")
            x = x + layer(of_layer(p, i), x)
        return x.square().sum()

    specs = ftp.plan(params, {"layers.*.up": P("ep"), "layers.*.down": P("ep")})
    step = ftp.shard(loss, ftp.AbstractMesh((2,), ("ep",)), specs, batch_specs=P("ep"))
    loads = step.lower(params, x).loads(params, x)
    for i, load in enumerate(loads):
        chosen = routed(of_layer(params, i), x, 2)[1].flatten()
        assert sum(load.experts, ()) == tuple(F.one_hot(chosen, 4).sum(0).tolist())
        assert load.parameter == f"params['layers.{i}.up']" and load.parameter in str(load)
        x = x + loop(of_layer(params, i), x, 2)
    assert len(loads) == 2


def test_memory_and_cost_of_equal_loads_are_those_of_room_for_no_more():
    params, x = drawn(4, 24, None, 0)
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}

    def lowered(capacity: float | None) -> Any:
        layer = ftp.plans.send_tokens(
            lambda p, x: FORMS["torchtitan_form"](p, x, 2), "ep", capacity=capacity
        )
        loss = lambda p, x: layer(p, x).square().sum()  # noqa: E731
        mesh = ftp.AbstractMesh((3,), ("ep",))
        return ftp.shard(loss, mesh, specs, batch_specs=P("ep")).lower(params, x)

    any_load, equal = lowered(None), lowered(1.0)
    assert any_load.memory.expected == equal.memory == equal.memory.expected
    assert any_load.memory.expected.activations == equal.memory.activations
    assert any_load.memory > any_load.memory.expected
    restored = pickle.loads(pickle.dumps(any_load.memory))
    assert (restored, restored.expected) == (any_load.memory, equal.memory)
    assert "if ranks exchange equally many rows" in any_load.memory.report()
    assert float(any_load.cost()) == pytest.approx(float(equal.cost()), rel=1e-12)
    assert any_load.cost().flops == equal.cost().flops
    assert any_load.cost().worst > any_load.cost() and equal.cost().worst == equal.cost()
    rows = [c for c in any_load.collectives if c.worst_nbytes is not None]
    assert {c.shape[0] for c in rows} == {8 * 2}  # received by a rank with equal loads
    assert {c.worst_nbytes for c in rows} == {3 * 16 * x.shape[1] * 8}  # and at most


def test_a_program_that_sends_no_such_rows():
    lowered = ftp.lower(
        lambda x: x.sum(), ftp.AbstractMesh((2,), ("dp",)), P("dp"), torch.ones(4), out_specs=P()
    )
    assert lowered.loads(torch.ones(4)) == ()
