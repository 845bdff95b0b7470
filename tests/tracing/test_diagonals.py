"""Writes to diagonals move nothing, and write what torch writes."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ftp
from ftp import P
from ftp.tracing.replacements.diagonals import fill_diagonal_


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=2)
    | st.tuples(st.integers(0, 3), st.integers(3, 4)).map(lambda t: [t[0]] * t[1]),
    st.booleans(),
    st.booleans(),
)
def test_as_torch(shape: list[int], wrap: bool, is_turned: bool):
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    x = x.transpose(0, 1) if is_turned else x
    expected, given = (torch.empty_like(x).copy_(x) for _ in range(2))
    assert torch.equal(fill_diagonal_(given, -2.5, wrap), expected.fill_diagonal_(-2.5, wrap))


def _similar(w: Tensor, x: Tensor, wrap: bool = False) -> Tensor:
    scores = (x @ w).clone()
    scores.T.fill_diagonal_(0.5) if not wrap else scores.fill_diagonal_(0.5, wrap=True)
    return scores.square().mean()


@pytest.mark.parametrize(("rows", "wrap"), [(5, False), (8, True)])
def test_nothing_moves(rows: int, wrap: bool):
    w, x = (torch.linspace(-2, 3, 4 * n, dtype=torch.float64).sin() for n in (3, rows))
    w, x = w.view(4, 3), x.view(rows, 4)
    step = ftp.shard(
        partial(_similar, wrap=wrap), ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"), certify=True
    )
    found = step(w, x)
    expected = torch.func.grad_and_value(partial(_similar, wrap=wrap))(w, x)
    torch.testing.assert_close(found, expected[::-1], rtol=1e-12, atol=1e-14)
    step.lower(w, x).assert_collectives(all_reduce=1)  # the loss


def test_what_torch_refuses():
    with pytest.raises(RuntimeError, match="larger than 1"):
        fill_diagonal_(torch.ones(3), 1.0)
    with pytest.raises(RuntimeError, match="equal"):
        fill_diagonal_(torch.ones(3, 2, 3), 1.0)


@settings(max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 4)),
    dims=st.permutations([0, 1, 2]),
    offset=st.integers(-8, 8),
    cut=st.integers(0, 2),
    n=st.integers(2, 4),
    dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.int8, torch.bool]),
)
def test_diagonals_along_a_cut_dim(shape, dims, offset, cut, n, dtype):
    """Also of infinite elements and -0.0, whose sign stays."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[x > 1], x[x < -1] = torch.inf, -0.0
    x = x.to(dtype)
    a, b, _ = dims
    try:
        like = x.diagonal(offset, a, b)
    except RuntimeError:  # torch has none
        return

    def fn(x, y):
        return x.diagonal(offset, a, b), x.diagonal_scatter(y, offset, a, b)

    spec = P(*("s" if dim == cut else None for dim in range(3)))
    step = ftp.spmd(fn, ftp.simulated_mesh((n,), ("s",)), (spec, P()), certify=True)
    y = like.clone().fill_(1)
    for got, expected in zip(step(x, y), fn(x, y), strict=True):
        assert torch.equal(got, expected)
        assert torch.equal(got.double().signbit(), expected.double().signbit())


@pytest.mark.parametrize("spec", [P("s"), P(None, "s")])
def test_few_elements_of_a_cut_matrix_move(spec):
    """A redundancy loss by the diagonal of a matrix, as in Barlow Twins."""
    x = torch.randn(64, 64).double()

    def loss(x):
        return (x.diagonal() - 1).square().sum() + 0.1 * x.square().sum() - x.trace()

    step = ftp.shard(loss, ftp.simulated_mesh((4,), ("s",)), spec, certify=True)
    value, grad = step(x)
    expected, of_one = torch.func.grad_and_value(loss)(x)[::-1]
    torch.testing.assert_close((value, grad), (expected, of_one))
    assert sum(c.wire_nbytes for c in step.lower(x).collectives) <= 2 * 64 * 8 * 3 // 4 * 2 + 64
