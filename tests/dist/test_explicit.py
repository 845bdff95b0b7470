"""Explicit mode on gloo processes: the written program runs; the other is refused on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch

import ftp
from ftp import P
from ftp.errors import ExplicitError

pytestmark = pytest.mark.dist
SPECS = {"in": P(), "up": P(None, "tp"), "down": P("tp", None)}


def _silent(params: Any, x: Any) -> Any:
    h = torch.tanh(x @ params["in"])
    y = torch.relu(h @ params["up"])
    z = y @ params["down"]
    return z.square().mean()


def _written(params: Any, x: Any) -> Any:
    h = torch.tanh(x @ params["in"])
    h = ftp.constrain(h, P("dp", None))
    y = torch.relu(h @ params["up"])
    z = y @ params["down"]
    z = ftp.constrain(z, P("dp", None))
    return z.square().mean()


def _values() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"in": (8, 8), "up": (8, 6), "down": (6, 8)}
    params = {k: torch.randn(shape, dtype=torch.float64) for k, shape in shapes.items()}
    return params, torch.randn(5, 8, dtype=torch.float64)


def _on_a_rank() -> Any:
    mesh = ftp.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
    params, x = _values()
    placed, batch = ftp.device_put(params, mesh, SPECS), ftp.device_put(x, mesh, P("dp"))
    try:
        ftp.shard(_silent, mesh, SPECS, batch_specs=P("dp"), explicit=True)(placed, batch)
        lines = None
    except ExplicitError as e:
        lines = [m.line for m in e.missing]
    step = ftp.shard(_written, mesh, SPECS, batch_specs=P("dp"), explicit=True, certify=True)
    loss, grads = step(placed, batch)
    found = lines, float(loss), ftp.device_get(grads, mesh, SPECS)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_explicit_mode_on_processes():
    params, x = _values()
    want, value = torch.func.grad_and_value(_silent)(params, x)
    for rank in launch(_on_a_rank, 4):
        assert rank.exit == 0, rank.stderr
        lines, loss, grads = rank.value
        assert lines == [
            'h = ftp.constrain(h, P("dp", None))',
            'z = ftp.constrain(z, P("dp", None))',
        ]
        assert abs(loss - float(value)) <= 1e-12 * abs(float(value))
        torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-12)
