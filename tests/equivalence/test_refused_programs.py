"""Programs that read a tensor's data or draw random numbers: an error that says so, on the line."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ftp
from ftp import P
from ftp.errors import CertificateError, TraceError, Undecided
from tests.museum.proven import MESH, Reduce, randn

X, W = randn(4, 6), randn(6, 3)


def summed(x, w):
    y = x @ w
    dist.all_reduce(y)
    return y


def prove(program: Any, reference: Any = torch.matmul, *, grad: bool = False):
    specs = (P(None, "tp"), P("tp")), P()
    return ftp.equivalent(reference, program, MESH, *specs, X, W, grad=grad)


# Data.

READS: dict[str, Any] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "dlpack": lambda x: np.from_dlpack(x),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "index": lambda x: range(5)[x.sum().long()],
    "format": lambda x: f"{x.sum():.3f}",
    "tensor": lambda x: torch.tensor([x[0, 0], x[0, 1]]),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "in": lambda x: 0.5 in x,
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_read_of_data_is_an_error_that_says_so(name: str, grad: bool):
    def program(x, w):
        y = summed(x, w)
        READS[name](y.detach())
        return y

    with pytest.raises(TraceError, match=r"reads the value of a tensor.*depends on the data") as e:
        prove(program, grad=grad)
    assert f'"{name}": lambda x' in str(e.value)  # the line


def test_an_address_is_no_number():
    def program(x, w):
        y = summed(x, w)
        return y if y.data_ptr() % 2 else y + 1

    with pytest.raises(TraceError, match=r"y.data_ptr\(\) % 2(.|\n)*reads the address"):
        prove(program)


# Random numbers.


DRAWS: dict[str, Any] = {
    "rand": lambda y: y + torch.rand(4, 3),
    "of a generator": lambda y: y + torch.rand(4, 3, generator=torch.Generator()),
    "in place": lambda y: y + torch.empty_like(y).normal_(),
    "dropout": lambda y: F.dropout(y),
    "bernoulli": lambda y: y * torch.bernoulli(torch.full_like(y, 0.5)),
    "permutation": lambda y: y[torch.randperm(4)],
    "integers": lambda y: y + torch.randint(0, 9, (4, 3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_result_that_depends_on_a_draw_is_an_error_that_says_so(name: str):
    """The reference draws as the program does, and a proof would take its numbers for equal."""
    draw = DRAWS[name]
    state = torch.get_rng_state()
    with pytest.raises(TraceError, match=r"draws random numbers here.*as an argument") as e:
        prove(lambda x, w: draw(summed(x, w)), lambda x, w: draw(x @ w))
    assert f'"{name}": lambda y' in str(e.value)  # the line
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("number", [random.random, np.random.rand])
def test_numbers_of_pythons_generators(number: Any):
    with pytest.raises(TraceError, match="Rank 0 draws random numbers from the generator of"):
        prove(lambda x, w: summed(x, w) * number())


def test_draws_that_reach_no_result_are_none_of_it():
    def program(x, w):
        torch.nn.Linear(6, 3)  # its weights are drawn
        y = summed(x, w)
        return y + 0 * torch.rand(4, 3) + F.dropout(y, training=False) - y

    prove(program)

    def wrong(x, w):
        torch.nn.Linear(6, 3)
        return x @ w  # wrong

    with pytest.raises(CertificateError) as e:
        prove(wrong)
    assert "# wrong" in (e.value.line or "")


def test_the_line_is_that_of_the_draw_that_matters():
    def program(x, w):
        torch.nn.Linear(6, 3)
        y = summed(x, w)
        return y * torch.rand_like(y)  # this one

    with pytest.raises(TraceError, match="# this one"):
        prove(program)


def test_drawn_numbers_that_the_program_does_not_take():
    """Places beyond the last row: the draw is named among the ops of no proof."""
    with pytest.raises(Undecided) as e:
        prove(lambda x, w: summed(x, w)[torch.randint(90, 99, (4,))])
    assert "aten.randint" in str(e.value)


def test_dropout_in_attention():
    def attend(x, w):
        y = x @ w
        return F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.5)[0]

    with pytest.raises(TraceError, match=r"dropout_p=0.5(.|\n)*draws random numbers here"):
        ftp.equivalent(attend, attend, MESH, P(), P(), X, W)


def test_a_mask_that_is_passed():
    mask = (torch.rand(4, 3) > 0.5).double()
    given = (MESH, (P(None, "tp"), P("tp"), P()), P(), X, W, mask)
    ftp.equivalent(
        lambda x, w, mask: (x @ w) * mask,
        lambda x, w, mask: Reduce.apply(x @ w) * mask,
        *given,
        grad=True,
    )
