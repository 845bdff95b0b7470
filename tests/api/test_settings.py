"""Settings of torch that are on when a step is called: each call has the program of its own."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import ftp
from ftp import P

CASTS = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731


@contextmanager
def _default(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _update(w: Tensor, x: Tensor) -> Tensor:
    return w + (x @ x).element_size() + 10 * torch.zeros(2).element_size()


@pytest.mark.parametrize("other", [CASTS, lambda: _default(torch.float64)])
@pytest.mark.parametrize(("is_first", "is_local"), [(True, False), (False, False), (True, True)])
def test_each_setting_has_its_program(other, is_first, is_local):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    per_rank = ftp.local(_update, mesh, P(), P())
    step = ftp.spmd(per_rank if is_local else _update, mesh, P())
    x, found = torch.ones(4, 4), torch.zeros(4, 4)
    due, gained = found, set()
    contexts = [other, nullcontext] if is_first else [nullcontext, other]
    for context in [contexts[0]] * 4 + [contexts[1]] * 4 + contexts:
        with context():
            found, due = step(found, x), _update(before := due, x)
        gained.add(float((due - before).sum()))
        assert torch.equal(found, due)
    assert len(gained) == 2


def test_under_detect_anomaly():
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh().square().sum()

    w, x = torch.randn(4, 4), torch.randn(6, 4)
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P("dp"))
    grad, value = torch.func.grad_and_value(loss)(w, x)
    with torch.autograd.set_detect_anomaly(True):
        found, grads = step(w, x)
        assert torch.is_anomaly_enabled()
    torch.testing.assert_close((found, grads), (value, grad))
