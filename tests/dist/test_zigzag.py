"""Zigzags on gloo processes: placed and taken off, read and saved, and a step as on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch.nn import functional as F

import ftp
from ftp import P, zigzag

pytestmark = pytest.mark.dist
CUT = P(None, None, zigzag("cp"))


def _attend(q: Any, k: Any, v: Any, grad: Any) -> Any:
    run = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    out, vjp = torch.func.vjp(run, q, k, v)
    return out, *vjp(grad)


def _on_a_rank(folder: str) -> Any:
    torch.manual_seed(0)
    mesh = ftp.make_mesh((3,), ("cp",), device_type="cpu")
    full = [torch.randn(1, 2, 11, 4, dtype=torch.float64) for _ in range(4)]
    placed = ftp.device_put(full, mesh, CUT)
    held = ftp.local_slice(mesh, CUT, full[0].shape)
    made = ftp.spmd(_attend, mesh, (CUT,) * 4, (CUT,) * 4)(*placed)
    back = ftp.device_get(made, mesh, CUT)
    plain = ftp.reshard(placed[0], mesh, CUT, P("cp"))
    ftp.save(folder, {"q": placed[0]}, mesh, CUT)
    loaded = ftp.load(folder, {"q": plain}, mesh, P(None, "cp"))
    again = ftp.device_get(loaded, mesh, P(None, "cp"))["q"]
    found = (
        tuple(placed[0].shape),
        torch.equal(full[0][held], placed[0]),
        torch.equal(ftp.device_get(plain, mesh, P("cp")), full[0]),
        torch.equal(again, full[0]),
        max(float((a - b).abs().max()) for a, b in zip(back, _attend(*full), strict=True)),
    )
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_zigzags_on_processes(tmp_path: Path):
    ranks = launch(_on_a_rank, 3, str(tmp_path / "saved"))
    assert [r.error for r in ranks] == [None] * 3
    for i, rank in enumerate(ranks):
        shape, sliced, moved, read, worst = rank.value
        # Of 11 in six chunks of two the last has one, and rank 0 holds it with the first.
        assert shape == (1, 2, (3, 4, 4)[i], 4)
        assert sliced and moved and read and worst < 1e-10
