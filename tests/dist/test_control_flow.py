"""A cond on gloo processes equals one device: ranks take the same branch, call after call."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist


def _loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    def deep(x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.amax() > 1, lambda x: x @ p["one"], lambda x: x.sin() @ p["other"], (x,))
        return torch.tanh(y @ p["one"])

    return torch.cond(x.sum() > 0, deep, lambda x: (x @ p["other"]).cos(), (x,)).square().sum()


def _plainly(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        y = x @ p["one"] if x.amax() > 1 else x.sin() @ p["other"]
        return torch.tanh(y @ p["one"]).square().sum()
    return (x @ p["other"]).cos().square().sum()


def _branches(compile: bool) -> tuple[float, set[Any]]:
    n = int(os.environ["WORLD_SIZE"])
    mesh = ftp.make_mesh((n,), ("tp",), device_type="cpu")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    full, x = {"one": draw(7, 7), "other": draw(7, 7)}, draw(5, 7).abs()
    specs, cut = {"one": P("tp"), "other": P(None, "tp")}, P(None, "tp")
    step = ftp.shard(_loss, mesh, specs, batch_specs=cut, compile=compile, certify=True)
    params = ftp.device_put(full, mesh, specs)
    worst = 0.0
    for scale in (1.0, -1.0, 0.1, -0.1, 1.0):
        loss, grads = step(params, ftp.device_put(x * scale, mesh, cut))
        right, value = torch.func.grad_and_value(_plainly)(full, x * scale)
        grads = ftp.device_get(grads, mesh, specs)
        errors = [(grads[k] - right[k]).abs().max() for k in full]
        worst = max(worst, float((loss - value).abs()), *map(float, errors))
    nodes = step.lower(params, ftp.device_put(x, mesh, cut)).graph.graph.nodes
    inside = {node.meta["branch"] for node in nodes if "collective" in node.meta}
    dist.barrier()
    dist.destroy_process_group()
    return worst, inside


def _check(ranks: Any) -> None:
    assert [r.exit for r in ranks] == [0] * len(ranks), [r.error or r.stderr[-2000:] for r in ranks]
    for rank in ranks:
        worst, inside = rank.value
        assert worst < 1e-10
        assert any(inside)  # of the collectives some are issued in a branch


def test_branches_equal_one_device():
    _check(launch(_branches, 3, False))


@pytest.mark.slow
def test_compiled_branches_equal_one_device():
    _check(launch(_branches, 2, True, timeout=300))
