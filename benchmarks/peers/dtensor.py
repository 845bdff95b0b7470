"""DTensor: parallelize_module with the plan of PyTorch's tutorial (the MLP) or torchtitan's (the
decoders), and loss_parallel.
"""

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from peers.workloads import RATE, Step, Workload, loss_of, module

TOY = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
ROOT = {
    "emb": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
WHOLE = PrepareModuleInput(
    input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
)  # so that q, k and v share a gradient
BLOCK = {
    "attn": WHOLE,
    "mlp": WHOLE,
    **{name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.w1", "mlp.w3")},
    **{name: RowwiseParallel() for name in ("attn.wo", "mlp.w2")},
}


def build(work: Workload, *, compiled: bool) -> Step:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    model, loss_fn = module(work), loss_of(work)
    if work.cfg is None:
        parallelize_module(model, mesh, TOY)
    else:
        parallelize_module(model, mesh, ROOT)
        for layer in model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh, BLOCK)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in (cut, whole) if group], lr=RATE, fused=True
    )
    forward = torch.compile(model) if compiled else model
    parallel_loss = loss_parallel if work.cfg is not None else contextlib.nullcontext

    def step(batch):
        x, y = batch
        with parallel_loss():
            loss = loss_fn(
                forward(x),
                y
                if work.cfg is None
                else distribute_tensor(y, mesh, [Replicate()], src_data_rank=None),
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()

    return step
