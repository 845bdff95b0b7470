"""All-reduces write to what they sum, where nothing reads it later."""

import pytest
import torch
from torch import fx

import ftp
from ftp import P
from ftp.passes.aliasing import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_, WAIT
from ftp.passes.buffer_reuse import reuse_memory_in, with_values
from ftp.rules.local_op import RankGraph
from ftp.runtime.failed_op import written_by
from ftp.runtime.gloo_calls import call_directly

aten = torch.ops.aten


@pytest.mark.parametrize("size", [4, 5, 1])
def test_products_are_summed_in_place(size: int):
    x, w = torch.randn(3, size).double(), torch.randn(size, 2).double()
    step = ftp.spmd(
        lambda x, w: x @ w,
        ftp.simulated_mesh((2,), ("tp",)),
        (P(None, "tp"), P("tp")),
        out_specs=P(),
        certify=True,
    )
    torch.testing.assert_close(step(x, w), x @ w)
    sums = [n for n in step.lower(x, w)._executed[0].nodes if n.target in (ALL_REDUCE, ALL_REDUCE_)]
    assert [n.target for n in sums] == [ALL_REDUCE_]


def _sum_of(kind: str) -> object:
    """The op that sums a product over ranks in a rank's graph, of which something else may be
    read.
    """
    graph = RankGraph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mul.Tensor, (x, 2))
    given = {"an input": x, "a view": graph.call_function(aten.t.default, (product,))}
    sent: list[fx.Node] = []
    if kind == "a value that is still sent":
        sent = [graph.call_function(ALL_GATHER, (product, 2, "0"))]
    total = graph.call_function(ALL_REDUCE, (given.get(kind, product), "sum", "0"))
    total.meta["collective"] = _Sum
    found = [graph.call_function(WAIT, (node,)) for node in (total, *sent)]
    if kind == "a value that is read later":
        found.append(graph.call_function(aten.add.Tensor, (product, 1)))
    graph.output(tuple(found))
    gm = with_values(fx.GraphModule({}, graph), [torch.empty(3, 2)])
    reuse_memory_in(gm.graph)
    (total,) = (n for n in gm.graph.nodes if "collective" in n.meta)
    return total.target


@pytest.mark.parametrize(
    "kind",
    ["an input", "a view", "a value that is still sent", "a value that is read later"],
)
def test_what_others_read_is_copied(kind: str):
    assert _sum_of("a value") is ALL_REDUCE_
    assert _sum_of(kind) is ALL_REDUCE


def test_a_failed_gather_has_written_to_no_donated_input():
    def graph(target, *args):
        graph = RankGraph()
        x = graph.placeholder("x")
        sent = graph.call_function(target, (x, *args))
        sent.meta |= {"direct": True, "collective": _Sum}
        arrived = graph.call_function(WAIT, (sent,))
        graph.output(graph.call_function(aten.mul_.Tensor, (arrived, 2)))
        call_directly(graph)
        return [node.name for node in written_by(list(graph.nodes)[:4]) if node.op == "placeholder"]

    assert graph(torch.ops.ftp.all_gather_over_gloo.default, 2, "0") == []
    assert graph(ALL_REDUCE, "sum", "0") == []
    assert graph(ALL_REDUCE_, "sum", "0") == ["x"]


class _Sum:
    dtype = torch.float32
