"""Shapes of a rank's graph, followed op by op."""

import pytest
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


def test_convolution_of_a_transposed_sequence_for_a_gpu():
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    turned = graph.call_function(torch.ops.aten.transpose.int, (x, 1, 2))
    given = (turned, weight, None, [1], [0], [1], False, [0], 8)
    made = graph.call_function(torch.ops.aten.convolution.default, given)
    back = (made, turned, weight, None, [1], [0], [1], False, [0], 8, [True, True, False])
    grads = graph.call_function(torch.ops.aten.convolution_backward.default, back)
    graph.output((made, grads))
    inputs = [((2, 16, 8), torch.bfloat16), ((8, 1, 3), torch.bfloat16)]
    found = local_shapes(graph, inputs, [], "cuda").values
    assert [t.shape for t in found[made]] == [(2, 8, 14)]
    assert [t.shape for t in found[grads][:2]] == [(2, 8, 16), (8, 1, 3)]


def test_bilinear_upsampling_for_a_gpu():
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.upsample_bilinear2d.default, (x, [8, 8], False))
    graph.output(made)
    found = local_shapes(graph, [((2, 3, 4, 4), torch.float32)], [], "cuda").values
    assert [t.shape for t in found[made]] == [(2, 3, 8, 8)]


def test_what_fails_on_all_devices_fails_for_a_gpu():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(
        graph.call_function(torch.ops.aten.im2col.default, (x, [9, 9], [1, 1], [0, 0], [1, 1]))
    )
    with pytest.raises(RuntimeError, match="Given an input with"):
        local_shapes(graph, [((2, 3, 4, 4), torch.float32)], [], "cuda")
