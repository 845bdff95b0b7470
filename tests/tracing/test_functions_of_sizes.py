"""Functions whose C++ asks for sizes: one plan for many."""

from collections.abc import Callable

import pytest
import torch
from torch.func import grad, vmap

import ftp
from ftp import P

FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "kron": lambda w, x: torch.kron(x, w),
    "kron of other dims": lambda w, x: torch.kron(w, x[:, 0]),
    "kron by rows": lambda w, x: vmap(lambda row: torch.kron(row, w))(x),
    "gradient of kron": lambda w, x: grad(lambda w: torch.kron(x, w).sin().sum())(w),
    "take_along_dim": lambda w, x: torch.take_along_dim(x @ w, x.argsort(0), 0),
    "take_along_dim of one": lambda w, x: torch.take_along_dim(x @ w, x.argmax(-1, True), -1),
    "take_along_dim of all": lambda w, x: torch.take_along_dim(x @ w, x.argmax()[None]),
    "take_along_dim of rows": lambda w, x: torch.take_along_dim(x, w[:1].argsort(-1), -1),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_sizes_have_one_trace(name):
    fn = FUNCTIONS[name]
    w = torch.randn(4, 4, dtype=torch.float64)
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), (P(), P("dp")))
    for n in (5, 6, 7, 9):
        x = torch.randn(n, 4, dtype=torch.float64)
        torch.testing.assert_close(step(w, x), fn(w, x), rtol=0, atol=1e-12)
    assert step.shapes.traces == 1


@pytest.mark.parametrize("wrong", [(2, torch.int64), (-3, torch.int64), (1, torch.int32)])
def test_what_torch_refuses_is_refused_at_many_sizes(wrong):
    dim, dtype = wrong
    step = ftp.spmd(
        lambda x: torch.take_along_dim(x, x.argsort(1).to(dtype), dim),
        ftp.simulated_mesh((2,), ("dp",)),
        P("dp"),
    )
    for n in (5, 6, 7):
        with pytest.raises((IndexError, ftp.FtpError), match=r"out of range|should be Long"):
            step(torch.randn(n, 4))
