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
