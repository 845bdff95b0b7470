"""Settings of torch that are on when a step is called: each call has the program of its own."""

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P

MESH = ftp.simulated_mesh((2,), ("tp",))
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


@pytest.mark.slow
def test_a_lowered_program_compiled_under_autocast_does_not_cast():
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return ((x.sin() @ w).cos() @ w).softmax(-1)

    x, w, mesh = torch.randn(64, 128), torch.randn(128, 128), ftp.simulated_mesh((1,), ("tp",))
    step = ftp.spmd(fn, mesh, (P(), P()), P(), compile=True)
    lowered, due = step.lower(x, w), fn(x, w)
    with CASTS():
        compiled = lowered.compile()
    for run in (compiled, step):  # the code is kept for both
        value = run(x, w)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, due, rtol=1e-4, atol=1e-4)


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


def _six_times(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x.float().square().sum()


def _in_a_checkpoint(w: Tensor, x: Tensor) -> Tensor:
    x = torch.utils.checkpoint.checkpoint(_twice, w, torch.tanh(x @ w), use_reentrant=False)
    return torch.tanh(x @ w).float().square().sum()


def _twice(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ w) @ w)


def _without_gradient_first(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x @ w
    return (torch.tanh(torch.tanh(x @ w) @ w) * scale).float().square().sum()


@pytest.mark.parametrize("fn", [_six_times, _in_a_checkpoint, _without_gradient_first])
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("is_around", [False, True])
def test_gradients_of_a_weight_that_is_cast_once(fn: Any, caches: bool, is_around: bool):
    """They are summed in bfloat16, bit for bit as by torch; in float32 without its cache."""

    def cast() -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=caches)

    def inside(w: Tensor, x: Tensor) -> Tensor:
        with cast():
            return fn(w, x)

    w, x = torch.linspace(-2, 3, 256).sin().reshape(16, 16), torch.linspace(1, 4, 128).cos()
    x, leaf = x.reshape(8, 16), w.clone().requires_grad_()
    expected = inside(leaf, x)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    step = ftp.shard(fn if is_around else inside, MESH, P())
    for _ in range(2):
        with cast() if is_around else nullcontext():
            loss, grad = step(w, x)
        assert torch.equal(loss, expected.detach()) and torch.equal(grad, expected_grad)


def test_a_step_has_a_program_with_and_without_the_cache_of_casts():
    w, x = torch.linspace(-2, 3, 256).sin().reshape(16, 16), torch.linspace(1, 4, 128).cos()
    step, grads = ftp.shard(_six_times, MESH, P()), []
    for caches in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
            grads.append(step(w, x.reshape(8, 16))[1])
    assert torch.equal(grads[0], grads[2]) and not torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("runs_first", [False, True])
def test_the_cast_of_a_captured_weight_stays_in_its_trace(runs_first: bool):
    w, x = torch.linspace(-2, 3, 16).reshape(4, 4).requires_grad_(), torch.ones(2, 4)

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    step = ftp.spmd(fn, MESH, P(), P())
    with CASTS():
        if runs_first:
            fn(x)
        found = step(x)
        assert torch.equal(found, fn(x)) and not found.requires_grad
        (grad,) = torch.autograd.grad(fn(x).float().sum(), w)
        assert grad.any()
    with torch.no_grad():
        w.mul_(0.5)
    with CASTS():
        assert torch.equal(step(x), fn(x))


def _pixels(w: Tensor, x: Tensor) -> Tensor:
    q, k, v = ((x * row[:, None]).reshape(2, 2, 3, 5).transpose(2, 3) for row in w)
    return F.scaled_dot_product_attention(q, key=k, value=v).float().square().sum()


def _logits(w: Tensor, x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(w @ x[0], x[0, :3].sigmoid(), reduction="sum")


@pytest.mark.parametrize("fn", [_pixels, _logits])
def test_attention_and_losses_are_cast_as_one(fn):
    w, x = torch.randn(3, 6, requires_grad=True), torch.randn(2, 6, 5)

    def cast(w: Tensor, x: Tensor) -> Tensor:
        with CASTS():
            return fn(w, x)

    due = cast(w, x)
    value, grads = ftp.shard(cast, MESH, P())(w.detach(), x)
    torch.testing.assert_close(value, due.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, torch.autograd.grad(due, w)[0], rtol=1e-6, atol=0)
