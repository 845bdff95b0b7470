"""Shapes of a rank's graph, followed op by op."""

import torch
from torch import fx

from ftp.runtime.local_shapes import local_shapes


def test_tensors_by_position_and_by_name_keep_their_places():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    product = graph.call_function(torch.ops.aten.mm.default, (x,), {"mat2": y})
    graph.output(product)
    inputs = [((2, 3), torch.float64), ((3, 4), torch.float64)]
    (found,) = local_shapes(graph, inputs, [], "cpu").values[product]
    assert (found.shape, found.stride) == ((2, 4), (4, 1))
