"""Plans that share results of passes, against plans that share none."""

import gc
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.planning.known_passes import KnownPasses
from ftp.planning.prepare import plan_prepared, prepare
from ftp.sharding.pytree import flatten
from ftp.tracing.gradient import grad_and_value
from ftp.tracing.trace import trace

LAYERS = 7  # enough to be folded


def loss(params, x):
    for layer in params["layers"]:
        x = x + (x @ layer["up"]).softmax(-1) @ layer["down"]
    return x.square().mean()


def prepared():
    layers = [{"down": torch.ones(8, 4), "up": torch.ones(4, 8)} for _ in range(LAYERS)]
    leaves, tree = flatten(({"layers": layers}, torch.ones(6, 4)))
    names = [f"layers.{i}.{name}" for i in range(LAYERS) for name in ("down", "up")]
    traced = trace(grad_and_value(loss), leaves, tree, "cpu", names=[*names, "x"])
    return prepare(traced.gm, [*names, "x"], [True] * len(names) + [False])


PREPARED = prepared()
KNOWN = KnownPasses()
ENTRIES = st.sampled_from([None, "dp", "tp", ("dp", "tp"), ("tp", "dp")])
SPECS = st.tuples(ENTRIES, ENTRIES).filter(
    lambda entries: len(str(entries).split("dp")) < 3 and len(str(entries).split("tp")) < 3
)


def described(plan):
    """A plan without the names that its passes gave."""
    number = {node: i for i, node in enumerate(plan.graph.nodes)}
    nodes = [
        (
            n.kind,
            str(n.target),
            [(number[v.node], v.index) for v in n.operands],
            dict(n.sizes),
            list(n.cuts),
            n.phase,
        )
        for n in plan.graph.nodes
    ]
    return (
        nodes,
        [number[v.node] for v in plan.graph.outputs],
        plan.out_specs,
        plan.cost,
        plan.alike,
    )


@settings(max_examples=3, deadline=None)
@given(SPECS, SPECS, st.booleans())
def test_plans_that_share_passes_are_the_plans_without(down, up, is_odd_layer):
    specs = [P(*entries) for _ in range(LAYERS) for entries in (down, up)]
    if is_odd_layer:  # layers are not equal, and not folded
        specs[6] = P()
    specs.append(P("dp"))

    def plan(known):
        axes, returned = {"dp": 2, "tp": 2}, [P(), *specs[:-1]]
        return plan_prepared(PREPARED, axes, specs, returned, known=known)

    assert described(plan(KNOWN)) == described(plan(None))


def test_a_lowered_program_does_not_keep_the_passes_of_other_plans():
    mesh, x = ftp.AbstractMesh((2,), ("dp",)), torch.empty(4, device="meta")
    known = KnownPasses()
    lowered = ftp.spmd(torch.sum, mesh, P("dp"), P()).lower_traced(None, x, known=known)
    alive = weakref.ref(known)
    del known
    gc.collect()
    assert alive() is None
    assert [c.op for c in lowered.collectives] == ["all_reduce"]
