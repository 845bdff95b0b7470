"""Recomputed blocks on gloo processes equal one device: they set attributes outside of themselves,
and differentiate by torch.autograd.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor, nn

import ftp
from ftp import P

pytestmark = pytest.mark.dist


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0].cos()


class Block(nn.Module):
    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(6, 6).double(), shared

    def forward(self, x: Tensor) -> Tensor:
        y = Sine.apply(self.linear(x)) * self.shared.factor
        self.shared.seen.append(y.square().mean())
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = SimpleNamespace(seen=[], factor=1)
        self.blocks = nn.ModuleList(Block(self.shared) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.shared.seen.clear()
        for i, block in enumerate(self.blocks, 1):
            self.shared.factor = i
            x = block(x)
        loss = x.square().sum() + torch.stack(self.shared.seen).sin().sum()
        self.shared.seen.clear()
        self.shared.factor = 1
        return loss


def _error() -> float:
    mesh = ftp.make_mesh((int(os.environ["WORLD_SIZE"]),), ("tp",), device_type="cpu")
    model, x = Model(), torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    due = torch.autograd.grad(model(x), list(model.parameters()))
    fn, full = ftp.functionalize(model, remat={"blocks.*": "nothing"})
    specs = ftp.plan(full, {"**.weight": P("tp"), "**.bias": P()})
    _, grads = ftp.shard(fn, mesh, specs)(ftp.device_put(full, mesh, specs), x)
    grads = ftp.device_get(grads, mesh, specs)
    dist.barrier()
    dist.destroy_process_group()
    return max(float((grads[k] - g).abs().max()) for k, g in zip(full, due, strict=True))


def test_blocks_equal_one_device():
    ranks = launch(_error, 2)
    assert [r.exit for r in ranks] == [0, 0], [r.error or r.stderr[-2000:] for r in ranks]
    assert max(r.value for r in ranks) < 1e-12
