"""Packs and shared units on gloo processes: placed and taken off, each rank's part, and a step
as on one device.
"""

import pytest
import torch
import torch.distributed as dist
from launch import launch

import ftp
from ftp import P, units

pytestmark = pytest.mark.dist
SPECS = {
    "equal": P(units("tp", 2, pack=2)),
    "mixed": P(units("tp", 2, pack=(8, 4))),
    "shared": P(units("tp", 3)),
}
SIZES = {"equal": 12, "mixed": 12, "shared": 6}


def _loss(p, x):
    return sum(((w @ x.T).tanh() * (1 + i)).sum() for i, w in enumerate(p.values()))


def _on_a_rank():
    torch.manual_seed(0)
    mesh = ftp.make_mesh((4,), ("tp",), device_type="cpu")
    full = {name: torch.randn(size, 3, dtype=torch.float64) for name, size in SIZES.items()}
    x = torch.randn(2, 3, dtype=torch.float64)
    expected = torch.func.grad(_loss)(full, x)
    placed = ftp.device_put(full, mesh, SPECS)
    back = ftp.device_get(placed, mesh, SPECS)
    sliced = all(
        torch.equal(full[n][ftp.local_slice(mesh, SPECS[n], full[n].shape)], placed[n])
        for n in full
    )
    fresh = ftp.device_get(
        placed["mixed"].clone(), mesh, SPECS["mixed"]
    )  # its global size is in its spec
    loss, grads = ftp.shard(_loss, mesh, SPECS)(placed, x)
    grads = ftp.device_get(grads, mesh, SPECS)
    rows = {name: tuple(p.shape) for name, p in placed.items()}
    dist.barrier()
    dist.destroy_process_group()
    return (
        rows,
        sliced,
        torch.equal(fresh, full["mixed"]),
        all(torch.equal(back[n], full[n]) for n in full),
        max(float((grads[n] - expected[n]).abs().max()) for n in full),
        float((loss - _loss(full, x)).abs()),
    )


def test_packs_and_shared_units_on_processes():
    ranks = launch(_on_a_rank, 4)
    assert [r.error for r in ranks] == [None] * 4
    for i, r in enumerate(ranks):
        rows, sliced, fresh, back, worst, off = r.value
        assert rows == {"equal": (4, 3) if i < 3 else (0, 3), "mixed": (4, 3), "shared": (3, 3)}
        assert sliced and fresh and back and worst < 1e-12 and off < 1e-12
