"""A slice from a start that is a value: values and gradients of plain torch, on any mesh."""

import pytest
import torch
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import InputError, TraceError

X = torch.linspace(-2, 3, 42, dtype=torch.float64).sin().reshape(6, 7)
W = torch.linspace(-1, 2, 49, dtype=torch.float64).cos().reshape(7, 7)


def _loss(w: Tensor, x: Tensor, start: Tensor) -> Tensor:
    y = x @ w
    part = y.narrow(1, start, 3) * torch.narrow(x, dim=1, start=start - 7, length=3)
    return part.square().sum() + y.narrow(0, start + 1, 2).exp().mean()


@pytest.mark.parametrize("mesh", [((3,), ("tp",)), ((2, 2), ("dp", "tp"))], ids=["tp3", "dp2×tp2"])
@pytest.mark.parametrize("start", [0, 3])
def test_a_start_that_is_a_value(mesh: tuple[tuple, tuple], start: int):
    at = torch.tensor(start)
    w = W.clone().requires_grad_()
    expected = _loss(w, X, at)
    (gradient,) = torch.autograd.grad(expected, w)
    batch_specs = (P("dp"), P()) if "dp" in mesh[1] else P()
    step = ftp.shard(
        _loss, ftp.simulated_mesh(*mesh), P(None, "tp"), batch_specs=batch_specs, certify=True
    )
    value, grad = step(W, X, at)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", [P(), P("tp")])
@pytest.mark.parametrize("start", [5, -8])
def test_a_start_out_of_range_is_an_error(start: int, spec: P):
    """Of the lookup, or of the check where a rank leaves out what it does not hold."""

    def loss(w: Tensor, x: Tensor, start: Tensor) -> Tensor:
        return w.narrow(0, start, 3).sum() + x.sum()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), spec, check_inputs=True)
    assert len(step.lower(W, X, torch.tensor(4)).assumptions) == 1
    step(W, X, torch.tensor(-7))
    text = r"narrow\(\) takes 3 elements .* of the dim's 7|out of DATA bounds|out of range"
    with pytest.raises((InputError, RuntimeError, IndexError), match=text):
        step(W, X, torch.tensor(start))


def _written(w: Tensor, x: Tensor, start: Tensor) -> Tensor:
    cache = x.clone()
    cache.narrow(0, start, 2).copy_(w[:2])
    return cache.sum()


def _written_view(w: Tensor, x: Tensor, start: Tensor) -> Tensor:
    cache = x @ w
    cache.narrow(0, start, 2)[:, 1].mul_(2)
    return cache.sum()


def _written_below(w: Tensor, x: Tensor, start: Tensor) -> Tensor:
    cache = x @ w
    part = cache.narrow(0, start, 2)
    cache[1] = 0
    return part.sum()


@pytest.mark.parametrize("program", [_written, _written_view, _written_below])
def test_a_write_to_the_view_is_refused(program):
    step = ftp.shard(program, ftp.simulated_mesh((2,), ("tp",)), P())
    with pytest.raises(TraceError, match="gives a copy here, where torch gives a view"):
        step(W, X, torch.tensor(1))


def test_a_write_before_is_no_write_to_the_view():
    def loss(w: Tensor, x: Tensor, start: Tensor) -> Tensor:
        cache = x @ w
        cache[1] = 0
        return cache.narrow(0, start, 2).sin().add_(1).sum()

    value, _ = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P())(W, X, torch.tensor(1))
    torch.testing.assert_close(value, loss(W, X, torch.tensor(1)))


def _at_places(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    y = x @ w
    y[at[0], 1:] = x[at[1], 1:] * 2
    y[:, at[2]] += y[..., at[0]].exp()
    return (
        y[at[1]].square().sum()
        + y[torch.tensor([0, 2]), at[0]].sum()
        + y[None, :, at[1]].sin().sum()
    )


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")])
def test_an_index_in_a_tensor(spec: P):
    at = torch.tensor([3, -2, 0])
    w = W.clone().requires_grad_()
    expected = _at_places(w, X, at)
    (gradient,) = torch.autograd.grad(expected, w)
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    step = ftp.shard(_at_places, mesh, spec, batch_specs=(P("dp"), P()), certify=True)
    value, grad = step(W, X, at)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad, gradient, rtol=1e-10, atol=1e-12)
