"""Prices of single ops and collectives, against torch's own counter and the bytes that are sent."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import ftp
from ftp import P
from ftp.planning.prepare import prepare
from ftp.rules.op_kinds import CONVOLUTIONS, multiplications
from ftp.sharding.pytree import flatten
from ftp.tracing.trace import trace

CONVOLVED = {
    "plain": lambda x, w: F.conv2d(x, w, padding=1),
    "strided": lambda x, w: F.conv2d(x, w, stride=2, padding=2),
    "grouped": lambda x, w: F.conv2d(x, w[:, :3], groups=2, dilation=2),
    "transposed": lambda x, w: F.conv_transpose2d(x, w, stride=3, padding=1),
    "one dim": lambda x, w: F.conv1d(x.flatten(2), w.flatten(2), stride=4),
}


@pytest.mark.parametrize("name", CONVOLVED)
@pytest.mark.parametrize("wanted", [(0, 1), (1,)], ids=["both", "weight"])
def test_convolutions_are_priced_by_what_they_multiply(name, wanted):
    """Torch's counter counts the forward one; each gradient takes as much."""

    def grads(x, w):
        return torch.func.grad(lambda *given: CONVOLVED[name](*given).square().sum(), wanted)(x, w)

    given = torch.ones(2, 6, 9, 9), torch.ones(6, 6, 3, 3)
    with FlopCounterMode(display=False) as forward:
        CONVOLVED[name](*given)
    leaves, tree = flatten(given)
    traced = trace(grads, leaves, tree, "cpu", names=["x", "w"])
    nodes = prepare(traced.gm, ["x", "w"], [False, True]).graph.nodes
    found = [
        2 * multiplications(n.target, n.sizes, [len(dims) > 0 for dims in n.rule.results])
        for n in nodes
        if n.target in CONVOLUTIONS
    ]
    one = forward.get_total_flops()
    assert found == [one, one * len(wanted)]


@pytest.mark.parametrize(
    ("fn", "spec", "out", "op"),
    [
        (lambda x: x.sum(0), P("a"), P(), "all_reduce"),
        (lambda x: x.sum(0), P("a"), P("a"), "reduce_scatter"),
        (lambda x: x * 2, P("a"), P(), "all_gather"),
        (lambda x: x * 2, P("a"), P(None, "a"), "all_to_all"),
    ],
)
def test_a_collective_takes_as_long_as_what_it_sends(fn, spec, out, op):
    link = ftp.Link(latency=1e-6, bandwidth=1e9)
    step = ftp.spmd(fn, ftp.AbstractMesh((4,), ("a",)), spec, out)
    lowered = step.lower(torch.empty(64, 96, device="meta"))
    (record,) = lowered.collectives
    (timed,) = lowered.cost(ftp.Hardware.h100(links={"a": link})).collectives
    assert record.op == op
    assert timed.seconds == pytest.approx(1e-6 + record.wire_nbytes / 1e9, rel=1e-9)
