"""as_strided of all of a tensor is permutations and a reshape; of a part or of windows, unfolds."""

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


@st.composite
def windows(draw):
    """A shape, strides of none or more elements, and where to start."""
    size = draw(st.lists(st.integers(1, 4), max_size=4))
    return size, [draw(st.integers(0, 4)) for _ in size], draw(st.integers(0, 3))


@settings(max_examples=30)
@given(windows())
def test_reading_windows_and_parts(drawn):
    size, stride, start = drawn
    x = torch.arange(64, dtype=torch.float64)
    read = traced(lambda x: x.as_strided(size, stride, start), x)
    assert not is_left(read)
    torch.testing.assert_close(read(x)[0], x.as_strided(size, stride, start), rtol=0, atol=0)


def test_an_empty_read():
    x = torch.randn(3, 4)
    read = traced(lambda x: x.as_strided((2, 0, 3), (9, 9, 1)), x)
    assert read(x)[0].shape == (2, 0, 3)
    assert memory_order((2, 3), (0, 1)) is None


@pytest.mark.parametrize("n", [2, 3])
def test_tensors_that_arrive_in_one_bucket(n):
    """A rank holds them one behind the other, so that the second starts behind the first."""

    def loss(p, x):
        q, k = ((x @ w).as_strided((4, 3, 4), (8, 2, 1)) for w in (p["q"], p["k"]))
        return (q * k.cos()).sum()

    def with_gradients(p):
        p = {name: w.clone().requires_grad_() for name, w in p.items()}
        total = loss(p, x)
        return total.detach(), dict(zip(p, torch.autograd.grad(total, [*p.values()]), strict=True))

    x = torch.randn(4, 5, dtype=torch.float64)
    params = {name: torch.randn(5, 8, dtype=torch.float64) for name in "qk"}
    step = ftp.shard(loss, ftp.simulated_mesh((n,), ("tp",)), P("tp"))
    torch.testing.assert_close(step(params, x), with_gradients(params))


def _of_a_part(w, x):
    """Of a slice, beyond its end; of a transposed value; a write."""
    y = x @ w
    z = y.t().sin()
    z.as_strided((2, 2), (3, 1), 1).mul_(2)
    return y[1:, 1:3].as_strided((2, 3), (3, 1)), y.t().cos().as_strided((2, 2), (3, 1), 1), z


@pytest.mark.filterwarnings("ignore:aten.as_strided_sc:ftp.errors.ReplicationWarning")
def test_a_part_of_memory_is_that_of_one_device():
    w, x = torch.randn(5, 6, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    step = ftp.spmd(_of_a_part, ftp.simulated_mesh((2,), ("a",)), (P(None, "a"), P("a")), P())
    for found, expected in zip(step(w, x), _of_a_part(w, x), strict=True):
        torch.testing.assert_close(found, expected)
