"""Values read as Python numbers on processes: the first rank's hold, and a rank that fails with one
is an error on all, after which the step goes on.
"""

import os
import warnings

import pytest
import torch
from launch import launch

import ftp
from ftp import P
from ftp.errors import FtpError, ReadWarning

pytestmark = pytest.mark.dist
SIZES = [(1, 2), (1, 2), (2, 2), (1, 1), (2, 1)]  # of rank 0 and of rank 1


def _sizes():
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore", ReadWarning)
    ftp.init_process_group(device_type="cpu")
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")

    def fn(w, k):
        n = int(k.sum())
        if rank and n == 6:
            raise ValueError("a rank's own")
        return (w[:n] * int((w > 0).sum())).sum()

    step = ftp.spmd(fn, mesh, (P("tp"), P()), P())
    w = torch.arange(12.0)
    held, found = ftp.device_put(w, mesh, P("tp")), []
    with warnings.catch_warnings():
        if rank:
            warnings.simplefilter("error", ReadWarning)
        for warned in (True, False):
            with pytest.raises(ReadWarning if rank else FtpError) if warned else _nothing():
                found.append(float(step(held, torch.tensor([3, 0]))))
            warnings.simplefilter("ignore", ReadWarning)
    with pytest.raises(ValueError if rank else FtpError, match="a rank's own"):
        step(held, torch.tensor([3, 3]))
    for sizes in SIZES:
        found.append(float(step(held, torch.tensor([sizes[rank], 3]))))
    return found, [33.0, *(11.0 * sum(range(first + 3)) for first, _ in SIZES)]


def _nothing():
    return warnings.catch_warnings()


def test_values_on_processes():
    for rank in launch(_sizes, 2, timeout=60):
        assert rank.error is None, rank.error
        found, due = rank.value
        assert found == due


def _many():
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore", ReadWarning)
    ftp.init_process_group(device_type="cpu")
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")

    def fn(w, x, limit):
        y, steps = x @ w, 0
        while y.detach().abs().sum() > limit[0] / 10:
            y = y * (0.9 - 0.1 * y.square().mean().sigmoid())
            steps += 1
            if rank and steps == 25:
                raise ValueError("a rank's own")
        return y.square().sum() * (1 + steps) + int(y.detach().sum() * 10)

    step = ftp.shard(fn, mesh, P(None, "tp"), batch_specs=(P("tp"), P()))
    w = torch.linspace(-1, 2, 16, dtype=torch.float64).sin().reshape(4, 4)
    x = torch.linspace(-2, 3, 24, dtype=torch.float64).cos().reshape(6, 4)
    held = ftp.device_put(w, mesh, P(None, "tp"))
    found, due = [], []
    # The limits of the two ranks: those of the first hold.
    for limits in [(80, 80), (20, 80), (80, 20), (10, 20), (20, 20), (1, 80)]:
        own = torch.tensor([limits[rank]])
        batch = ftp.device_put(x, mesh, P("tp"))
        if limits[0] == 1:
            with pytest.raises(ValueError if rank else FtpError, match="a rank's own"):
                step(held, batch, own)
            continue
        value, grad = step(held, batch, own)
        grad = ftp.device_get(grad, mesh, P(None, "tp"))
        found.append((float(value), grad))
        leaf = w.clone().requires_grad_()
        y, steps = x @ leaf, 0
        while y.detach().abs().sum() > limits[0] / 10:
            y, steps = y * (0.9 - 0.1 * y.square().mean().sigmoid()), steps + 1
        loss = y.square().sum() * (1 + steps) + int(y.detach().sum() * 10)
        due.append((float(loss), torch.autograd.grad(loss, leaf)[0]))
    return found, due


def test_many_values_on_processes():
    for rank in launch(_many, 2, timeout=60):
        assert rank.error is None, rank.error
        found, due = rank.value
        assert len(found) == 5
        torch.testing.assert_close(found, due, rtol=1e-9, atol=1e-9)
