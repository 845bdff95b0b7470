"""Steps with ``rng=True``: any function may draw, the same numbers on any mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftp
from ftp import P, random
from ftp.errors import InputError

MESHES = [((1,), ("dp",)), ((3,), ("dp",)), ((2, 2), ("dp", "tp"))]


def loss(params, x, y):
    """Augmentation, a diffusion step's noise, dropout, and a value drawn from a distribution."""
    x = x + 0.1 * torch.randn_like(x)
    t = torch.randint(0, 10, (x.shape[0], 1))
    hidden = F.dropout(x @ params["up"], 0.3, training=True) * (t + 1)
    noise = torch.distributions.Normal(0.0, 1.0).sample(hidden.shape).to(hidden.dtype)
    return ((hidden + noise).tanh() @ params["down"] - y).square().mean()


def gradients(mesh, key):
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"up": (4, 6), "down": (6, 2)}.items()
    }
    x, y = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (4, 2))
    specs = {"up": P(None, "tp"), "down": P("tp")} if "tp" in mesh[1] else P()
    step = ftp.shard(loss, ftp.simulated_mesh(*mesh), specs, batch_specs=P("dp"), rng=True)
    return step(params, x, y, key)


def test_a_loss_draws_the_same_numbers_on_any_mesh():
    value, grads = gradients(MESHES[0], random.key(1))
    for mesh in MESHES[1:]:
        other, others = gradients(mesh, random.key(1))
        torch.testing.assert_close(other, value, rtol=1e-12, atol=0)
        torch.testing.assert_close(others, grads, rtol=1e-11, atol=1e-13)
    assert float(gradients(MESHES[0], random.key(2))[0]) != float(value)


def test_models_take_keys_from_the_function_around_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    fn, params = ftp.functionalize(model)

    def loss(params, x):
        return (fn(params, x) - fn(params, x)).abs().max(), torch.rand(())

    x, key = torch.ones(6, 4, dtype=torch.float64), random.key(3)
    one, many = (
        ftp.spmd(loss, ftp.simulated_mesh((n,), ("dp",)), (P(), P("dp")), P(), rng=True)
        for n in (1, 3)
    )
    values = one(params, x, key)
    torch.testing.assert_close(many(params, x, key), values, rtol=1e-12, atol=1e-15)
    assert float(values[0].detach()) > 1e-6  # the two calls drop other elements
    quiet, params = ftp.functionalize(model.eval())
    step = ftp.spmd(lambda p, x: quiet(p, x).sum(), one.mesh, (P(), P()), P(), rng=True)
    torch.testing.assert_close(step(params, x, key), model(x).sum().detach(), rtol=1e-12, atol=0)


def test_errors_of_keys():
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P("dp"), rng=True)
    x, y = torch.ones(2, 4), torch.ones(2, 2)
    params = {"up": torch.ones(4, 6), "down": torch.ones(6, 2)}
    with pytest.raises(InputError, match="missing a required argument: 'rng'"):
        step(params, x, y)
    with pytest.raises(InputError, match="last argument, as rng=True, takes a key"):
        step(params, x, y, torch.ones(2))


def test_arguments_that_may_be_left_out():
    def noise(x, scale=2.0):
        return (x + torch.rand_like(x)) * scale

    mesh, key = ftp.simulated_mesh((2,), ("dp",)), ftp.random.key(1)
    step = ftp.spmd(noise, mesh, P("dp"), P("dp"), rng=True)
    with_scale = ftp.spmd(noise, mesh, (P("dp"), P()), P("dp"), rng=True)
    x = torch.zeros(5)
    assert torch.equal(step(x, key), with_scale(x, torch.tensor(2.0), key))
    with pytest.raises(ftp.FtpError, match="rng"):
        with_scale(x, torch.tensor(2.0))
