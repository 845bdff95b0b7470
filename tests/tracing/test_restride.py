"""as_strided of all of a tensor is permutations and a reshape; of a part, of a flat tensor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.sharding.pytree import flatten
from ftp.tracing.restride import memory_order
from ftp.tracing.trace import trace

AS_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def traced(fn, *args):
    leaves, tree = flatten(args)
    return trace(fn, leaves, tree, "cpu", names=[f"x{i}" for i in range(len(leaves))]).gm


def is_left(gm):
    return any(node.target in AS_STRIDED for node in gm.graph.nodes)


@st.composite
def dense(draw):
    """A permuted contiguous tensor's shape and strides, and another such layout of as many
    elements.
    """

    def layout(sizes):
        order = draw(st.permutations(range(len(sizes))))
        strides, step = [0] * len(sizes), 1
        for d in reversed(order):
            strides[d], step = step, step * sizes[d]
        return sizes, strides

    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return layout(sizes), layout(draw(st.permutations(sizes)))


@settings(max_examples=30)
@given(dense())
def test_reading_and_writing_all_of_a_tensor(drawn):
    (size, stride), (other, strides) = drawn
    x = torch.arange(math.prod(size), dtype=torch.float64).as_strided(size, stride)
    src = torch.randn(other, dtype=torch.float64)
    read = traced(lambda x: x.as_strided(other, strides), x)
    assert memory_order(size, stride) is not None
    # The tracer's own tensors are contiguous, so that is what is read.
    whole = x.contiguous()
    assert not is_left(read)
    torch.testing.assert_close(read(whole)[0], whole.as_strided(other, strides), rtol=0, atol=0)
    write = traced(lambda x, src: x.as_strided_scatter(src, other, strides), x, src)
    assert not is_left(write)
    due = whole.as_strided_scatter(src, other, strides)
    torch.testing.assert_close(write(whole, src)[0], due, rtol=0, atol=0)


def test_windows_and_parts_stay():
    x = torch.randn(6)
    assert is_left(traced(lambda x: x.as_strided((4, 3), (1, 1)), x))
    assert is_left(traced(lambda x: x.as_strided((3,), (2,)), x))
    assert is_left(traced(lambda x: x.as_strided((2, 2), (1, 2), 1), x))
    assert memory_order((2, 3), (0, 1)) is None


def _of_a_part(w, x):
    """Of a slice, beyond its end; of a transposed value; a write."""
    y = x @ w
    z = y.t().sin()
    z.as_strided((2, 2), (3, 1), 1).mul_(2)
    return y[1:, 1:3].as_strided((2, 3), (3, 1)), y.t().cos().as_strided((2, 2), (3, 1), 1), z


@pytest.mark.filterwarnings("ignore:aten.as_strided:ftp.errors.ReplicationWarning")
def test_a_part_of_memory_is_that_of_one_device():
    w, x = torch.randn(5, 6, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    step = ftp.spmd(_of_a_part, ftp.simulated_mesh((2,), ("a",)), (P(None, "a"), P("a")), P())
    for found, expected in zip(step(w, x), _of_a_part(w, x), strict=True):
        torch.testing.assert_close(found, expected)
