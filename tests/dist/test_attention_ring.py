"""Ring attention on processes: as on one device over gloo, in shared memory and compiled."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ftp
from ftp import P, zigzag
from ftp.ops import ring_pieces

pytestmark = pytest.mark.dist
# Computing takes so long that every transfer hides behind it.
SLOW = ftp.Hardware(flops=1e3, ring_step=0.0)


def _attend(q: Any, k: Any, v: Any, grad: Any) -> Any:
    run = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    out, vjp = torch.func.vjp(run, q, k, v)
    return out, *vjp(grad)


def _listed(q: Any, k: Any, v: Any, grad: Any) -> Any:
    sees = lambda b, h, q, k: (q >= k) & (q - k < 7)  # noqa: E731
    blocks = create_block_mask(sees, None, None, 13, 13, "cpu", BLOCK_SIZE=2)
    score = lambda s, b, h, q, k: s + (h + 1) * (k - q) / 8  # noqa: E731
    run = lambda *x: flex_attention(*x, score_mod=score, block_mask=blocks)  # noqa: E731
    out, vjp = torch.func.vjp(run, q, k, v)
    return out, *vjp(grad)


def _listed_whole(q: Any, k: Any, v: Any, grad: Any) -> Any:
    away = torch.arange(13) - torch.arange(13)[:, None]
    bias = torch.tensor([1.0, 2.0], dtype=q.dtype)[:, None, None] * away / 8
    bias = bias.masked_fill((away > 0) | (away <= -7), -torch.inf)
    run = lambda *x: F.scaled_dot_product_attention(*x, attn_mask=bias)  # noqa: E731
    out, vjp = torch.func.vjp(run, q, k, v)
    return out, *vjp(grad)


ON_THREE = [
    (_attend, _attend, "cp", False),
    (_attend, _attend, zigzag("cp"), False),
    (_attend, _attend, "cp", True),
    (_listed, _listed_whole, zigzag("cp"), False),
]
ON_TWO_BY_TWO = [
    (_attend, _attend, ("cp", "in"), False),
    (_listed, _listed_whole, ("in", zigzag("cp")), False),
]


def _on_a_rank(shape: tuple[int, ...], cases: Any) -> Any:
    ring_pieces.SHORTEST = 2
    torch.manual_seed(0)
    mesh = ftp.make_mesh(shape, ("cp", "in")[: len(shape)], device_type="cpu")
    full = [torch.randn(1, 2, 13, 4, dtype=torch.float64) for _ in range(4)]
    found = []
    for run, expected, entry, is_compiled in cases:
        cut, right = P(None, None, entry), expected(*full)
        step = ftp.spmd(run, mesh, (cut,) * 4, (cut,) * 4, hardware=SLOW, compile=is_compiled)
        placed = ftp.device_put(full, mesh, cut)
        assert [c.op for c in step.lower(*placed).collectives] == ["ring"] * 2
        for _ in range(2):
            back = ftp.device_get(step(*placed), mesh, cut)
        found.append(max(float((a - b).abs().max()) for a, b in zip(back, right, strict=True)))
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("env", [{}, pytest.param({"FTP_SHM": "1"}, marks=pytest.mark.slow)])
def test_on_processes(env: dict[str, str]):
    ranks = launch(_on_a_rank, 3, (3,), ON_THREE, env=env)
    assert [r.error for r in ranks] == [None] * 3, [r.stderr[-3000:] for r in ranks]
    assert all(worst < 1e-10 for rank in ranks for worst in rank.value)


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"FTP_SHM": "1"}])
def test_a_ring_over_two_axes_on_processes(env: dict[str, str]):
    """Over a group of both axes' ranks, also in another order than the mesh's."""
    ranks = launch(_on_a_rank, 4, (2, 2), ON_TWO_BY_TWO, env=env)
    assert [r.error for r in ranks] == [None] * 4, [r.stderr[-3000:] for r in ranks]
    assert all(worst < 1e-10 for rank in ranks for worst in rank.value)
