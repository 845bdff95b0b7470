"""DiLoCo: replicas that train by themselves and meet every few steps, on a mesh of replicas and
data ranks. Inner steps cross no replica; an outer step is two all-reduces.

    python examples/diloco.py                         # a simulated 2 x 2 mesh in this process
    torchrun --nproc-per-node=4 examples/diloco.py    # the same file on four processes

Prints the replicas' loss after every round, and what each kind of step moves over which axis.

Source: Douillard et al. (2023), DiLoCo: Distributed Low-Communication Training of Language Models.
"""

import argparse
import os
from collections import Counter
from functools import partial

import optree
import torch
import torch.nn.functional as F

import ftp
from ftp import P

OUTER_LR, MOMENTUM = 0.7, 0.9
tree_map = partial(optree.tree_map, namespace="ftp")


def loss_fn(params, x, y):
    hidden = torch.tanh(x @ params["up"] + params["bias"])
    return F.mse_loss(hidden @ params["down"], y)


def inner(opt):
    """A step of one replica, whose tensors have a leading dim of size one here."""

    def step(replica, x, y):
        params, state = tree_map(lambda t: t[0], replica)
        grads, loss = torch.func.grad_and_value(loss_fn)(params, x[0], y[0])
        params, state = opt.update(grads, state, params)
        return tree_map(lambda t: t[None], (params, state)), loss[None]

    return step


def outer(start, velocity, replica, loss):
    """Move the common start along the mean of what the replicas have learned, by Nesterov's
    momentum; replicas go on from there.
    """
    n = ftp.axis.axis_size("replica")
    learned = torch.cat([(start[name] - p[0]).flatten() for name, p in replica.items()])
    mean = ftp.axis.all_reduce(learned, "replica") / n
    loss = ftp.axis.all_reduce(loss[0], "replica") / n
    velocity = MOMENTUM * velocity + mean
    parts = (mean + MOMENTUM * velocity).split([p.numel() for p in replica.values()])
    new = {
        name: start[name] - OUTER_LR * part.view_as(start[name])
        for name, part in zip(replica, parts, strict=True)
    }
    return new, velocity, {name: p[None] for name, p in new.items()}, loss


def make_steps(mesh, opt):
    """The inner and the outer step."""
    own = P("replica")
    one = ftp.local(inner(opt), mesh, (own, own, own), (own, own), axes=("replica",))
    meet = ftp.local(outer, mesh, (P(), P(), own, own), (P(), P(), own, P()), axes=("replica",))
    data = P("replica", "dp")
    inner_step = ftp.spmd(one, mesh, (own, data, data), (own, own), data_axes=("dp",))
    return inner_step, ftp.spmd(meet, mesh, (P(), P(), own, own), (P(), P(), own, P()))


def start_of(replicas, opt, seed=0):
    """Parameters, the outer momentum, and the replicas: parameters and their optimizer's state."""
    torch.manual_seed(seed)
    shapes = {"bias": (16,), "down": (16, 3), "up": (5, 16)}
    params = {name: torch.randn(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    velocity = torch.zeros(sum(p.numel() for p in params.values()))
    stacked = tree_map(lambda t: torch.stack([t] * replicas), (params, opt.init(params)))
    return params, velocity, stacked


def batches(replicas, rounds, steps, rows, seed=1):
    """Data of each replica's own, ``(replicas, rows, features)``."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(5, 3, generator=generator)
    for _ in range(rounds * steps):
        x = torch.randn(replicas, rows, 5, generator=generator)
        yield x, torch.sin(x @ truth)


def train(mesh, replicas, opt, rounds, steps, rows):
    """The replicas' mean loss at the end of each round, the parameters, and both programs."""
    inner_step, outer_step = make_steps(mesh, opt)
    start, velocity, replica = start_of(replicas, opt)
    own, data = P("replica"), P("replica", "dp")
    start = ftp.device_put(start, mesh, P())
    velocity = ftp.device_put(velocity, mesh, P())
    replica = ftp.device_put(replica, mesh, own)
    feed, losses = batches(replicas, rounds, steps, rows), []
    for _ in range(rounds):
        for _ in range(steps):
            x, y = ftp.device_put(next(feed), mesh, data)
            replica, loss = inner_step(replica, x, y)
        params, state = replica
        start, velocity, params, mean = outer_step(start, velocity, params, loss)
        replica = (params, state)
        losses.append(float(mean))
    lowered = inner_step.lower(replica, x, y), outer_step.lower(start, velocity, params, loss)
    return losses, start, lowered


def crossings(lowered):
    """How many collectives a program issues over each axis; its certificate proves them."""
    ftp.certify(lowered)
    return dict(Counter(axis for c in lowered.collectives for axis in c.axes))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="inner steps of a round")
    parser.add_argument("--rows", type=int, default=8, help="rows of a replica's batch")
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args(argv)

    ranks = int(os.environ.get("WORLD_SIZE", 2 * args.replicas))
    shape = (args.replicas, ranks // args.replicas)
    mesh = ftp.make_mesh(shape, ("replica", "dp"), device_type="cpu")
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.02)
    losses, _, lowered = train(mesh, args.replicas, opt, args.rounds, args.steps, args.rows)
    if int(os.environ.get("RANK", 0)) == 0:
        for i, loss in enumerate(losses):
            print(f"round {i}: loss {loss:.5f}")
        for name, program in zip(("an inner step", "an outer step"), lowered, strict=True):
            print(f"{name} issues collectives over: {crossings(program)}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
