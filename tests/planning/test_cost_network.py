"""Tables that equal nodes of a cost network share, against tables that are all computed."""

import pytest
import torch

from ftp import P
from ftp.planning.cost_network import _CostNetwork
from ftp.planning.prepare import plan_prepared, prepare
from ftp.sharding.pytree import flatten
from ftp.tracing.trace import trace


def statistics(w, v, x):
    """An update (of no activation) and a scale as of batch norm, by equal products."""
    mean = x.square().mean(0)
    update = v * mean
    return x * (w * mean), update


def sums(p, a, b, c, d, q, s, t, u, v):
    """Sums of matmuls to a batch's shard and to a parameter's."""
    return q + s @ a, ((p + t @ b) + u @ c) + v @ d


CASES = {
    "statistics": (
        statistics,
        {"dp": 4},
        [((8,), P("dp"))] * 2,
        [((16, 8), P("dp"))],
    ),
    "sums": (
        sums,
        {"tp": 4},
        [((64, 64), P("tp")), *[((16, 64), P("tp"))] * 4],
        [((64, 64), P("tp")), *[((64, 16), P(None, "tp"))] * 4],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nodes_share_prices_only_where_the_same_placement_constraints_bind(name, monkeypatch):
    fn, axes, state, batch = CASES[name]
    leaves, tree = flatten(tuple(torch.ones(shape) for shape, _ in (*state, *batch)))
    names = list(fn.__code__.co_varnames[: len(leaves)])
    gm = trace(fn, leaves, tree, "cpu", names=names).gm
    prepared = prepare(gm, names, [True] * len(state) + [False] * len(batch))
    specs = [spec for _, spec in (*state, *batch)]

    def reshards():
        plan = plan_prepared(prepared, axes, specs, [specs[len(state)], P()], data_axes=("dp",))
        found = [node.name for node in plan.graph.nodes if node.kind == "reshard"]
        return found, {axis: of.cost for axis, of in plan.solutions.items()}

    shared = reshards()
    monkeypatch.setattr(_CostNetwork, "once", lambda self, key, make: make())
    assert shared == reshards()
