"""The floor: half of the model's flops as large matmuls, then one all-reduce of the bytes that the
program by hand sends. A step on two ranks with these kernels and this link takes longer, unless it
computes while it sends.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from peers.workloads import Step, Workload, batch, loss_of, module

_WIDTH = 512  # of the matmuls


def build(work: Workload) -> Step:
    rows = round(_flops(work) / 2 / (2 * _WIDTH**2))
    a, b = torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    result, sent = torch.empty(_WIDTH, _WIDTH), torch.zeros(work.nbytes // 4)
    parts = [min(_WIDTH, rows - at) for at in range(0, rows, _WIDTH)]

    def step(data: Any) -> torch.Tensor:
        for part in parts:
            torch.mm(a[:part], b, out=result[:part])
        dist.all_reduce(sent)
        return sent[0]

    return step


def _flops(work: Workload) -> int:
    """Of the matmuls of a forward and a backward pass."""
    (x, y), model = batch(work, 0), module(work)
    with FlopCounterMode(display=False) as seen:
        loss_of(work)(model(x), y).backward()
    return seen.get_total_flops()
