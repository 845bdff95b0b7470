"""Names of nodes: those that fx gives."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.graph import _Namespace

from ftp.rules.local_op import RankGraph
from ftp.torch_internals.graph_nodes import GraphNames

CANDIDATES = ("mul", "mul_1", "mul_2", "mul_1_1", "mul_01", "log2", "log2_1", "_1", "_", "__1")
CANDIDATES += ("sum", "sum_1", "class", "1", "a-b", "a-b_1", "", "x_", "x__2", "mul_٣")


@given(st.lists(st.sampled_from(CANDIDATES), max_size=12))
def test_the_names_are_those_of_fx(candidates: list[str]):
    mine, theirs = GraphNames(), _Namespace()
    for candidate in candidates:
        assert mine.create_name(candidate, None) == theirs.create_name(candidate, None)


def test_a_graph_is_that_of_fx():
    texts = []
    for graph in (RankGraph(), fx.Graph()):
        x = graph.placeholder("x")
        for _ in range(3):
            x = graph.call_function(torch.ops.aten.add.Tensor, (x, x), {"alpha": 2})
        graph.output((x,))
        add = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        texts.append((str(graph), len(graph.nodes), [node.name for node in add]))
    assert texts[0] == texts[1]
