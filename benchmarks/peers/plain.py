"""Plain torch on one device: eager, and each pass of autograd compiled."""

import torch

from peers.workloads import RATE, Step, Workload, loss_of, module


def build(work: Workload, *, compiled: bool) -> Step:
    model, loss_fn = module(work), loss_of(work)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def loss_of_batch(x, y):
        return loss_fn(model(x), y)

    forward = torch.compile(loss_of_batch) if compiled else loss_of_batch

    def step(batch):
        loss = forward(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
