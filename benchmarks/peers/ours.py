"""ftp: the single-device train step, the specs of Megatron, nothing else."""

import os
from collections.abc import Callable
from typing import Any

import models  # type: ignore[import-not-found]
import torch

import ftp
from ftp import P
from peers.workloads import RATE, Step, Workload, loss_of, module

TOY = {"net1.*": P("tp"), "net2.weight": P(None, "tp"), "net2.bias": P()}


def training(work: Workload, model: torch.nn.Module) -> tuple[Any, Any, Any, Callable[..., Any]]:
    """The model's parameters and their specs, the optimizer, and the train step."""
    fn, params = ftp.functionalize(model)
    loss_fn = loss_of(work)
    specs = ftp.plan(
        params, TOY if work.cfg is None else models.specs(models.cuts(work.cfg), tp="tp")
    )
    optimizer = ftp.optim.from_torch(torch.optim.AdamW, lr=RATE, fused=True)

    def train_step(params, state, batch):
        x, y = batch
        grads, loss = torch.func.grad_and_value(lambda p: loss_fn(fn(p, x), y))(params)
        params, state = optimizer.update(grads, state, params)
        return params, state, loss

    return params, specs, optimizer, train_step


def build(work: Workload, *, compiled: bool, memory: bool = False, bucket: bool = True) -> Step:
    os.environ["FTP_SHM"] = str(int(memory))
    mesh = ftp.make_mesh((torch.distributed.get_world_size(),), ("tp",), device_type="cpu")
    model = module(work)
    params, specs, optimizer, train_step = training(work, model)
    of_state = optimizer.specs(params, specs)
    run = ftp.spmd(
        train_step,
        mesh,
        (specs, of_state, P()),
        (specs, of_state, P()),
        donate=(0, 1),
        compile=compiled,
        bucket=bucket,
    )
    params = ftp.device_put(params, mesh, specs)
    model.to("meta")  # the whole weights are not needed any more
    state = optimizer.init(params)

    def step(batch):
        nonlocal params, state
        params, state, loss = run(params, state, batch)
        return loss

    return step
