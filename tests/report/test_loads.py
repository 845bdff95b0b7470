"""Rows per rank and expert of a given batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropless import FORMS, drawn, routed

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


def test_a_program_that_sends_no_such_rows():
    lowered = ftp.lower(
        lambda x: x.sum(), ftp.AbstractMesh((2,), ("dp",)), P("dp"), torch.ones(4), out_specs=P()
    )
    assert lowered.loads(torch.ones(4)) == ()
