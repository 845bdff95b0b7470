"""All-reduces that write to their operand, as certificates read them."""

from collections.abc import Callable

import pytest
import torch
from torch import fx

from ftp.certification.purify import without_writes
from ftp.certification.unsound import Unsound
from ftp.passes.aliasing import ALL_REDUCE, ALL_REDUCE_, WAIT
from ftp.rules.local_op import RankGraph

aten = torch.ops.aten
Then = Callable[[fx.Graph, fx.Node], fx.Node | None]


def _summed(before: Then, after: Then, *, donated: bool | None = None) -> fx.Graph:
    """The pure graph of a sum in place with a node before the wait and one after it; of an input,
    ``donated`` or not, or of a product.
    """
    graph = RankGraph()
    x = graph.placeholder("x")
    given = graph.call_function(aten.mul.Tensor, (x, 2)) if donated is None else x
    sent = graph.call_function(ALL_REDUCE_, (given, "sum", "tp"))
    first = before(graph, given)
    arrived = graph.call_function(WAIT, (sent,))
    last = after(graph, given)
    graph.output(tuple(node for node in (arrived, first, last) if node is not None))
    return without_writes(graph, {0} if donated else set())


def _nothing(graph: fx.Graph, x: fx.Node) -> None:
    return None


def _reads(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.add.Tensor, (x, 1))


def _writes(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.mul_.Tensor, (x, 3))


@pytest.mark.parametrize("donated", [None, True])
def test_what_is_read_after_the_wait_is_the_sum(donated: bool | None):
    pure = _summed(_nothing, _reads, donated=donated)
    (sent,) = pure.find_nodes(op="call_function", target=ALL_REDUCE)
    (wait,) = sent.users
    (read,) = pure.find_nodes(op="call_function", target=aten.add.Tensor)
    assert wait.target is WAIT
    assert read.args[0] is wait


def test_what_is_read_before_the_wait_has_not_arrived():
    pure = _summed(_reads, _nothing)
    (read,) = pure.find_nodes(op="call_function", target=aten.add.Tensor)
    assert read.args[0].target is ALL_REDUCE, "which the checker refuses"


def test_writes_before_the_wait_are_refused_and_later_ones_are_not():
    with pytest.raises(Unsound, match="still sends"):
        _summed(_writes, _nothing)
    pure = _summed(_nothing, _writes)
    (product,) = (n for n in pure.nodes if n.target is aten.mul.Tensor and n.args[1] == 3)
    assert product.args[0].target is WAIT


def test_an_input_that_is_not_donated_is_not_summed_in_place():
    with pytest.raises(Unsound, match="not donated"):
        _summed(_nothing, _nothing, donated=False)
