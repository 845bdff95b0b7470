"""Cuts that move to another dim by an all-to-all, on gloo processes, as on one device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor

import ftp
from ftp import P

pytestmark = pytest.mark.dist
SLOW = ftp.Hardware(flops=1e6, memory=1e6, link=ftp.Link(latency=1e-12, bandwidth=1e6))


def _loss(w: Tensor, x: Tensor) -> Tensor:
    y = (x @ w).sort(1)[0] * torch.linspace(-1, 1, x.shape[1]).double()[:, None]
    return (torch.fft.fft(y @ w, dim=1).abs() + x).square().mean()


def _on_a_rank() -> Any:
    torch.manual_seed(0)
    x, w = torch.randn(4, 17, 5).double(), torch.randn(5, 5).double()
    mesh, cut = ftp.make_mesh((3,), ("s",), device_type="cpu"), P(None, "s")
    grad, loss = torch.func.grad_and_value(_loss)(w, x)
    worst, placed = 0.0, ftp.device_put(x, mesh, cut)
    step = ftp.shard(_loss, mesh, P(), batch_specs=cut, hardware=SLOW)
    for _ in range(2):
        found, of_w = step(w, placed)
        worst = max(worst, float((found - loss).abs()), float((of_w - grad).abs().max()))
    ops = {c.op for c in step.lower(w, placed).collectives}
    dist.barrier()
    dist.destroy_process_group()
    return worst, ops


@pytest.mark.parametrize("memory", ["1", "0"])
def test_moved_cuts_on_processes(memory: str, monkeypatch: pytest.MonkeyPatch):
    """Of 17 elements over three ranks, to 4 rows or 5 columns."""
    monkeypatch.setenv("FTP_SHM", memory)
    ranks = launch(_on_a_rank, 3)
    assert [r.error for r in ranks] == [None] * 3
    for rank in ranks:
        worst, ops = rank.value
        assert worst < 1e-10 and "all_to_all" in ops
