"""Results are written to views of a value that nothing reads later, and small readers go first: the
logits of a cut loss are held once.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import ftp
from ftp import P
from ftp.certification.purify import without_writes
from ftp.certification.unsound import Unsound
from ftp.passes.buffer_reuse import reuse_memory_in, with_values
from ftp.passes.copy_elimination import copied

aten = torch.ops.aten
VIEWS = [
    lambda x: x.reshape(2, 3, 8),
    lambda x: x.t(),
    lambda x: x.unsqueeze(0),
    lambda x: x.reshape(-1),
    lambda x: x.t().reshape(6, 8),  # which copies
    lambda x: x[:3],
    lambda x: x[:, 1:2].expand(6, 8),
    lambda x: x.detach(),
]
WRITERS = [
    lambda x: x.sigmoid(), lambda x: x * 2, lambda x: x - x.amax(-1, keepdim=True),
    lambda x: x.clamp(-1, 1),
]  # fmt: skip
READERS = [
    lambda x: x.flatten()[:2].sin(), lambda x: x.sum(), lambda x: x.amax(-1), lambda x: x.cos(),
    lambda x: x.flatten().gather(0, torch.arange(2)), lambda x: x.flatten()[3] * 2,
]  # fmt: skip


@st.composite
def programs(draw):
    """A function of a matrix that views, writes and reads its values in a drawn order."""
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from("vwr"), st.integers(0, 7), st.integers(0, 9)),
            min_size=4,
            max_size=14,
        )
    )

    def run(x):
        values, out = [x @ x.t()[:, :6] @ x[:6]], []
        for kind, which, of in steps:
            value = values[of % len(values)]
            if kind == "r":
                out.append(READERS[which % len(READERS)](value))
            elif kind == "w":
                values.append(WRITERS[which % len(WRITERS)](value))
            elif value.shape == (6, 8):
                values.append(VIEWS[which](value))
        return [*out, values[-1] + 1]

    return run


@settings(max_examples=30)
@given(programs(), st.booleans())
def test_values_are_those_without_writes(run, is_donated):
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    traced = make_fx(run)(x)
    graph, _ = copied(with_values(traced, [x]).graph)
    donated = (0,) if is_donated else ()
    reuse_memory_in(graph, donated)
    graph.lint()
    found = fx.GraphModule({}, graph)(x.clone())
    for value, wanted in zip(found, run(x), strict=True):
        assert torch.equal(value, wanted)
    without_writes(graph, donated)  # the certificate can follow it


def targets(program):
    x = torch.randn(6, 8, dtype=torch.float64)
    graph, _ = copied(with_values(make_fx(program)(x), [x]).graph)
    reuse_memory_in(graph)
    return [node.target for node in graph.nodes]


def test_what_reads_a_value_beside_it_runs_first_if_it_is_small():
    def program(x):
        y = (x * 2).reshape(48)
        z = y.exp()
        return y[:3].sin(), z.sum()

    found = targets(program)
    assert found.index(aten.sin.default) < found.index(aten.exp_.default)
    assert aten.exp.default in targets(lambda x: ((y := x * 2).exp().sum(), y.sin().sum()))
    assert aten.exp.default in targets(lambda x: ((z := (y := x * 2).exp()).sum(), y[:1] + z[:1]))


def test_what_needs_a_long_chain_is_not_moved():
    def program(x):
        y = (x * 2).reshape(48)
        z, s = y.exp(), x.sum()
        for _ in range(1100):
            s = -s
        return z.sum(), y[:3] * s

    assert aten.exp.default in targets(program)


def test_parts_are_not_written():
    assert aten.exp.default in targets(lambda x: (x * 2)[:3].exp())
    assert aten.exp.default in targets(lambda x: (x * 2)[:, :1].expand(6, 8).exp())


def test_a_result_that_was_written_to_a_view_is_no_view_for_autograd():
    """A view that is made under no_grad cannot be changed in place by what needs a gradient."""
    step = ftp.spmd(lambda x: (x @ x).reshape(16).exp(), ftp.make_mesh((1,), ("tp",)), P(), P())
    result = step(torch.eye(4))
    assert not result._is_view()
    assert aten.exp_.default in [n.target for n in step.lower(torch.eye(4)).executed.nodes]
    result.add_(torch.ones(16, requires_grad=True))


def test_logits_of_a_cut_loss_are_held_once():
    tokens, width, vocab = 256, 16, 4096

    def loss(weight, x, y):
        return torch.nn.functional.cross_entropy(x @ weight, y)

    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(loss, mesh, P(None, "tp"), certify=True)
    lowered = step.lower(
        torch.zeros(width, vocab), torch.zeros(tokens, width), torch.zeros(tokens).long()
    )
    logits = tokens * vocab // 2 * 4
    assert int(lowered.memory) < 1.3 * logits


@pytest.mark.parametrize(
    "view", [lambda g, x: g.call_function(aten.slice.Tensor, (x, 0, 0, 2)),
             lambda g, x: g.call_function(aten.expand.default, (x, [3])),
             lambda g, x: g.call_function(aten.view.dtype, (x, torch.int64))],
    ids=["slice", "expand", "dtype"],
)  # fmt: skip
def test_certificates_refuse_a_write_to_a_part(view):
    graph = fx.Graph()
    y = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
    graph.output((graph.call_function(aten.neg_.default, (view(graph, y),)),))
    with pytest.raises(Unsound, match="part or a view"):
        without_writes(graph, ())


@pytest.mark.parametrize("late", ["base", "other view"])
def test_certificates_refuse_to_read_another_view_after_a_write(late):
    graph = fx.Graph()
    y = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
    other = graph.call_function(aten.unsqueeze.default, (y, 0))
    view = graph.call_function(aten.view.default, (y, [-1]))
    written = graph.call_function(aten.exp_.default, (view,))
    graph.output(
        (written, graph.call_function(aten.cos.default, (y if late == "base" else other,)))
    )
    with pytest.raises(Unsound, match="has written"):
        without_writes(graph, ())
