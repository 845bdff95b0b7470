"""The two-layer MLP of PyTorch's tensor-parallel tutorial, column-wise then row-wise, against one
device.

    python examples/toy_mlp.py                         # a simulated 1 x 2 mesh in this process
    torchrun --nproc-per-node=2 examples/toy_mlp.py    # the same file on two processes

Prints the loss of every step, sharded and on one device, and fails if they differ. It computes in
float64: in float32 the two would differ by roundings, other ones on each machine.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P

SPECS = {
    "net1.weight": P("tp", None),  # (32, 10): each rank computes 32 / tp hidden units
    "net1.bias": P("tp"),
    "net2.weight": P(None, "tp"),  # (5, 32): a partial sum on each rank, then one all-reduce
    "net2.bias": P(),
}


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 32)
        self.net2 = nn.Linear(32, 5)

    def forward(self, x):
        return self.net2(F.relu(self.net1(x)))


def train(step, params, batch, steps, lr):
    """Losses of ``steps`` steps. AdamW is element-wise, so torch's own works on shards."""
    optimizer = torch.optim.AdamW(params.values(), lr=lr)
    losses = []
    for _ in range(steps):
        loss, grads = step(params, batch)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument(
        "--tp",
        type=int,
        default=int(os.environ.get("WORLD_SIZE", 2)),
        help="ranks (under torchrun: all of them)",
    )
    args = parser.parse_args(argv)

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(args.seed)
    fn, params = ftp.functionalize(ToyModel())
    batch = torch.rand(20, 10), torch.rand(20, 5)

    def loss_fn(params, batch):
        x, target = batch
        return (fn(params, x) - target).var()

    def single_device(params, batch):
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
        return loss, grads

    expected = train(
        single_device, {name: p.clone() for name, p in params.items()}, batch, args.steps, args.lr
    )

    mesh = ftp.make_mesh((1, args.tp), ("dp", "tp"), device_type="cpu")
    specs = ftp.plan(params, SPECS)
    step = ftp.shard(loss_fn, mesh, specs, batch_specs=P("dp"))
    params = ftp.device_put(params, mesh, specs)  # copies
    losses = train(step, params, ftp.device_put(batch, mesh, P("dp")), args.steps, args.lr)

    if int(os.environ.get("RANK", 0)) == 0:
        print(f"step   one device   dp 1, tp {args.tp}")
        for i, (one, sharded) in enumerate(zip(expected, losses, strict=True)):
            print(f"{i:4d}   {one:10.7f}   {sharded:10.7f}")
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
