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


def _in_full(w: Tensor, x: Tensor) -> Tensor:
    y = (x @ w).float()
    with torch.autocast("cpu", enabled=False):
        return (y @ w).tanh().square().sum()


def _by_vmap(w: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        per_rank = ftp.local(lambda w, x: (x @ w).tanh() @ w, None, (P(), P("tp")), P("tp"))
        return torch.vmap(lambda x: per_rank(w, x))(x[None]).square().sum()


@pytest.mark.parametrize("fn", [_in_full, _by_vmap])
def test_where_a_function_turns_autocast_off_its_program_does_not_cast(fn):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    w, x = torch.randn(4, 4), torch.randn(4, 4)
    step = ftp.spmd(fn, mesh, (P(), P("tp")), P())
    with ftp.use_mesh(mesh):
        for context in (CASTS, nullcontext, CASTS):
            with context():
                value, due = step(w, x), fn(w, x)
                assert torch.is_autocast_enabled("cpu") == (context is CASTS)
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, due, rtol=1e-6, atol=0)


def test_autocast_of_another_type_of_device_is_left_on():
    step = ftp.spmd(lambda x: x * 2, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    torch.set_autocast_enabled("xpu", True)
    try:
        found = step(torch.ones(2))
        assert torch.is_autocast_enabled("xpu")
    finally:
        torch.set_autocast_enabled("xpu", False)
    torch.testing.assert_close(found, torch.full((2,), 2.0))


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
