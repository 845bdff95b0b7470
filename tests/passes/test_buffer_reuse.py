"""Fake values of a rank's graph: those of torch's fake tensors, found without loading DTensor."""

import copy

import pytest
import torch
from own_process import check  # type: ignore[import-not-found]
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ftp.passes.buffer_reuse import with_values

X = torch.randn(4, 1, 6)


@pytest.mark.parametrize(
    "x",
    [X, X.transpose(0, 2), X[1:3], X[..., 2:5], X[:, :, ::2], X.expand(4, 3, 6), X[:0], X[0, :0]],
)
def test_contiguous(x: torch.Tensor):
    graph = fx.Graph()
    first = graph.call_function(torch.ops.aten.contiguous.default, (graph.placeholder("x"),))
    graph.output(graph.call_function(torch.ops.aten.neg.default, (first,)))
    found, expected = (copy.deepcopy(fx.GraphModule({}, graph)) for _ in range(2))
    with_values(found, [x])
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(expected, mode).propagate_dont_convert_inputs(mode.from_tensor(x))
    for a, b in zip(found.graph.nodes, expected.graph.nodes, strict=True):
        if a.op != "output":
            u, v = a.meta["val"], b.meta["val"]
            assert (u.shape, u.stride(), u.dtype, u.device) == (
                v.shape, v.stride(), v.dtype, v.device,
            )  # fmt: skip
    shares = []
    for module in (found, expected):
        given, made, *_ = (node.meta.get("val") for node in module.graph.nodes)
        shares.append(given.untyped_storage()._cdata == made.untyped_storage()._cdata)
    assert shares[0] == shares[1] == x.is_contiguous()


A_COPY = """
import sys, torch, ftp
from torch import fx
from ftp.passes.buffer_reuse import with_values
ftp.spmd
aten = torch.ops.aten
graph = fx.Graph()
part = graph.call_function(aten.slice.Tensor, (graph.placeholder("x"), 1, 0, 3))
graph.output(graph.call_function(aten.contiguous.default, (part,)))
made = with_values(fx.GraphModule({}, graph), [torch.ones(2, 4)])
print([n.meta["val"].stride() for n in made.graph.nodes if n.op == "call_function"])
print("torch.distributed.tensor" in sys.modules)
"""


def test_a_copy_of_a_slice_loads_no_dtensor():
    check(A_COPY, ["[(4, 1), (3, 1)]", "False"])
