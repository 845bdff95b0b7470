"""The comparison of a rank's nodes with the form that is expected of an op."""

import pytest
import torch
from torch import fx

from ftp.certification.op_matching import Matcher

aten = torch.ops.aten


def reshaped(shape: list[int], target=aten.reshape.default) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), shape))


@pytest.mark.parametrize(
    ("expected", "given", "is_same"),
    [
        ([1, 4, 3], [1, 4, 3], True),
        ([1, 4, 3], [1, -1, 3], True),
        ([1, 4, 3], [-1, 4, 3], True),
        ([12], [-1], True),
        ([1, 4, 3], [1, -1, 4], False),
        ([1, 4, 3], [2, -1, 3], False),
        ([1, 4, 3], [-1, 3], False),
        ([1, 4, 3], [1, 4, 3, -1], False),
        ([1, 4, 3], [-1, -1, 3], False),
        ([0, 4, 3], [0, -1, 3], False),  # of no elements: any size would do
        ([0, 4], [-1, 4], True),
    ],
)
def test_one_size_of_a_reshape_may_be_left_to_torch(expected, given, is_same):
    for target in (aten.reshape.default, aten.view.default):
        found = Matcher({}, {}).is_same(reshaped(expected, target), reshaped(given, target), {}, {})
        assert found == is_same


def test_only_a_reshape_leaves_a_size():
    graph = fx.Graph()
    x = graph.placeholder("x")
    summed = [graph.call_function(aten.sum.dim_IntList, (x, dims)) for dims in ([1], [-1])]
    assert not Matcher({}, {}).is_same(*summed, {}, {})
