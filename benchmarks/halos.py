"""Convolutions cut along the height of their images, loss and gradients: ftp's halo exchange beside
one written by hand, and beside images that are gathered, on two gloo processes.

    python benchmarks/halos.py [--json]
    FTP_SHM=1 python benchmarks/halos.py [--json]    # ftp's collectives in shared memory

All forms run in turn in the same processes. Seconds are medians over the rounds, of the slower
rank; bytes are those that a rank sends. ``--json`` writes the table of docs/halos.md too.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import record
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P

LAYERS, CHANNELS, BATCH, SIZE = 6, 32, 2, 128
ROUNDS, RANKS = 9, 2
COLUMNS = ("form", "seconds", "CPU seconds", "MiB sent")
Run = Callable[[], tuple[Tensor, ...]]


def loss_of(params: list[Tensor], x: Tensor, convolve: Any) -> Tensor:
    for weight in params:
        x = convolve(x, weight).relu()
    return x.square().mean()


def on_one_device(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


class Halo(torch.autograd.Function):
    """A rank's rows with one row of its neighbour, or of zeros, above and below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rank = dist.get_rank()
        theirs = _swapped(x[:, :, -1 if rank == 0 else 0])
        out = F.pad(x, (0, 0, 1, 1))
        out[:, :, -1 if rank == 0 else 0] = theirs
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        rank = dist.get_rank()
        theirs = _swapped(grad[:, :, -1 if rank == 0 else 0])
        out = grad[:, :, 1:-1].contiguous()
        out[:, :, -1 if rank == 0 else 0] += theirs
        return out


def _swapped(row: Tensor) -> Tensor:
    row, other = row.contiguous(), 1 - dist.get_rank()
    got = torch.empty_like(row)
    ops = [dist.P2POp(dist.isend, row, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def by_hand(params: list[Tensor], x: Tensor) -> Run:
    held = [p.clone().requires_grad_() for p in params]

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(Halo.apply(x), weight, padding=(0, 1))  # type: ignore[arg-type]

    def run() -> tuple[Tensor, ...]:
        loss = loss_of(held, x, convolve) / RANKS
        found = [loss.detach(), *torch.autograd.grad(loss, held)]
        flat = torch.cat([f.reshape(-1) for f in found])
        dist.all_reduce(flat)
        parts = flat.split([f.numel() for f in found])
        return tuple(p.view_as(f) for p, f in zip(parts, found, strict=True))

    return run


def by_ftp(mesh: Any, spec: P, params: list[Tensor], x: Tensor) -> tuple[Run, int]:
    """A step on the rows that each rank holds, and the bytes that a rank sends."""
    step = ftp.shard(
        lambda params, x: loss_of(params, x, on_one_device), mesh, P(), batch_specs=spec
    )
    given = ftp.device_put(x, mesh, spec)

    def run() -> tuple[Tensor, ...]:
        loss, grads = step(params, given)
        return loss, *grads

    return run, step.lower(params, given).collectives.wire_nbytes


def on_whole_images(mesh: Any, params: list[Tensor], x: Tensor) -> tuple[Run, int]:
    """Each rank's rows gathered before the convolutions, which every rank computes."""
    cut = P(None, None, "h")

    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        return loss_of(params, ftp.constrain(x, P()), on_one_device)

    step = ftp.shard(loss, mesh, P(), batch_specs=cut)
    given = ftp.device_put(x, mesh, cut)

    def run() -> tuple[Tensor, ...]:
        value, grads = step(params, given)
        return value, *grads

    return run, step.lower(params, given).collectives.wire_nbytes


def on_ranks() -> list[dict[str, Any]]:
    """The rows, equal on all ranks."""
    mesh = ftp.make_mesh((RANKS,), ("h",), device_type="cpu")
    torch.manual_seed(0)
    params = [torch.randn(CHANNELS, CHANNELS, 3, 3) * 0.1 for _ in range(LAYERS)]
    x = torch.randn(BATCH, CHANNELS, SIZE, SIZE)
    mine = x.chunk(RANKS, 2)[dist.get_rank()].contiguous()
    ours, of_ours = by_ftp(mesh, P(None, None, "h"), params, x)
    gathered, of_gathered = on_whole_images(mesh, params, x)
    row = BATCH * CHANNELS * SIZE * 4
    grads = sum(p.numel() for p in params) * 4 + 4
    # The gradient of the images is not asked for: the first layer sends forward only.
    sent = (2 * LAYERS - 1) * row + 2 * grads * (RANKS - 1) // RANKS
    forms: dict[str, tuple[Run, int]] = {
        "halos, ftp": (ours, of_ours),
        "halos, by hand": (by_hand(params, mine), sent),
        "whole images, ftp": (gathered, of_gathered),
    }
    right = [f.clone() for f in forms["halos, by hand"][0]()]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for at in range(ROUNDS + 1):
        for name, (run, _) in forms.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            made = run()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if at:
                seconds[name].append(took)
            else:  # the first round warms up, and shows that all compute the same
                for one, other in zip(made, right, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    rows = []
    for name, (_, sent) in forms.items():
        found = [statistics.median(of) for of in zip(*seconds[name], strict=True)]
        worst = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        rows.append(dict(zip(COLUMNS, (name, *worst.tolist(), sent / 2**20), strict=True)))
    dist.destroy_process_group()
    return rows


def write_page() -> None:
    """The table of docs/halos.md, from the results over gloo and in memory."""
    names = {"gloo": "halos", "memory": "halos_in_memory"}
    found = {where: record.results(name).get("rows") for where, name in names.items()}
    found = {where: rows for where, rows in found.items() if rows}
    heads = ("form", *(f"seconds, {w}" for w in found), *(f"CPU, {w}" for w in found), "MiB sent")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for i, row in enumerate(next(iter(found.values()))):
        cells = (
            row["form"],
            *(f"{rows[i][kind]:.3f}" for kind in COLUMNS[1:3] for rows in found.values()),
            f"{row['MiB sent']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    record.write_table("halos.md", "benchmarks/halos.py", lines)


def main() -> None:
    record.rows_of_ranks(__file__, __doc__, "halos", RANKS, on_ranks, COLUMNS)
    if "--json" in sys.argv and "--rank" not in sys.argv:
        write_page()


if __name__ == "__main__":
    main()
