"""Halo exchanges and scans on gloo processes, eager, compiled and over shared memory, as on one
device.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P

pytestmark = pytest.mark.dist


def _loss(w: Tensor, x: Tensor) -> Tensor:
    y = F.max_pool2d(F.conv2d(x, w, padding=1), 3, 2, 1)
    y = torch.roll(F.interpolate(y, scale_factor=2), 1, 2) - x
    y = torch.cat([y[:, :, :1], F.pad(y, (1, 0, 1, 1), mode="reflect")[:, :, :-3, 1:]], 2)
    return (y.cumsum(2) / 20 + y.flip(2)).square().mean() + y.cummax(2)[1].double().mean()


def _on_a_rank(compiles: bool) -> Any:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 20, 6).double(), torch.randn(3, 3, 3, 3).double()
    mesh, cut = ftp.make_mesh((3,), ("h",), device_type="cpu"), P(None, None, "h")
    grad, loss = torch.func.grad_and_value(_loss)(w, x)
    worst = 0.0
    placed = ftp.device_put(x, mesh, cut)
    step = ftp.shard(_loss, mesh, P(), batch_specs=cut, compile=compiles)
    for _ in range(2):
        found, of_w = step(w, placed)
        worst = max(worst, float((found - loss).abs()), float((of_w - grad).abs().max()))
    ops = {c.op for c in step.lower(w, placed).collectives}
    dist.barrier()
    dist.destroy_process_group()
    return worst, ops


@pytest.mark.parametrize(
    ("memory", "compiles"),
    [("1", False), ("0", False), pytest.param("1", True, marks=pytest.mark.slow)],
)
def test_halos_on_processes(memory: str, compiles: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FTP_SHM", memory)
    ranks = launch(_on_a_rank, 3, compiles)
    assert [r.error for r in ranks] == [None] * 3
    for rank in ranks:
        worst, ops = rank.value
        assert worst < 1e-12
        assert ops == {"halo_exchange", "all_reduce", "all_gather", "reduce_scatter"}
