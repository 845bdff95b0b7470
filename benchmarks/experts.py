"""A dropless layer of experts, forward and backward, whose tokens travel to the ranks that own
their experts: ftp.plans.send_tokens beside a dispatcher written by hand, on two gloo processes.

    python benchmarks/experts.py [--json]
    FTP_SHM=1 python benchmarks/experts.py [--json]    # ftp's collectives in shared memory

All forms run in turn in the same processes. Seconds are medians over the rounds, of the slower
rank; "of by hand" is the median over rounds of a form's time over that of the form by hand in the
same round, with its quartiles, for the seconds and for the CPU seconds of both ranks. Bytes are
those of rows that a rank sends in a step; memory is the allocator's peak beside the inputs, on the
rank that needs most. The dispatcher by hand does what torchtitan's does: counts by an all-to-all,
splits on the host, rows by ``all_to_all_single``, sorted by expert where they arrive.
"""

import time
from collections.abc import Callable
from typing import Any

import record
import torch
import torch.distributed as dist
from attention import held
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P

ROUNDS, RANKS = 80, 2
EXPERTS, CHOSEN, DIM, HIDDEN, TOKENS = 8, 2, 256, 512, 2048  # tokens of both ranks
COLUMNS = ("form", "seconds", "of by hand", "CPU seconds", "CPU of by hand", "MiB sent", "MiB held")
QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
Run = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def routed(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row's token, in the order of experts, its weight, and the rows of each expert."""
    weights, chosen = (x @ p["router"]).softmax(-1).topk(CHOSEN, -1)
    order = chosen.flatten().argsort(stable=True)
    counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
    return order // CHOSEN, weights.flatten()[order], counts, order


def swiglu(p: dict[str, Tensor], rows: Tensor, offs: Tensor) -> Tensor:
    gate = F.silu(F.grouped_mm(rows, p["gate"], offs=offs))
    return F.grouped_mm(gate * F.grouped_mm(rows, p["up"], offs=offs), p["down"], offs=offs)


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The layer as it is written for one device."""
    token, weight, counts, _ = routed(p, x)
    made = swiglu(p, x[token], counts.cumsum(0).to(torch.int32))
    return torch.zeros_like(x).index_add(0, token, made * weight[:, None])


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.splits = received, sent
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        received, sent = ctx.splits
        return Exchange.apply(grad, sent, received), None, None


def by_hand(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients on one rank, which owns some of the experts."""
    p = {name: w.detach().requires_grad_() for name, w in p.items()}
    token, weight, counts, _ = routed(p, x)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = (c.view(RANKS, -1).sum(1).tolist() for c in (counts, arriving))
    rows: Any = Exchange.apply(x[token], received, sent)
    own = torch.arange(EXPERTS // RANKS).repeat(RANKS).repeat_interleave(arriving)
    order = own.argsort(stable=True)
    offs = arriving.view(RANKS, -1).sum(0).cumsum(0).to(torch.int32)
    made = swiglu(p, rows[order], offs)[order.argsort()]
    back: Any = Exchange.apply(made, sent, received)
    out = torch.zeros_like(x).index_add(0, token, back * weight[:, None])
    loss = out.square().sum() / (TOKENS * DIM)
    grads = dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))
    loss = loss.detach()
    dist.all_reduce(loss)
    dist.all_reduce(grads["router"])
    return loss, grads


def on_ranks() -> list[dict[str, Any]]:
    """The rows of the table, equal on all ranks."""
    mesh = ftp.make_mesh((RANKS,), ("ep",), device_type="cpu")
    torch.manual_seed(0)
    shapes = {"gate": (DIM, HIDDEN), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
    full = {name: torch.randn(EXPERTS, *s) * s[0] ** -0.5 for name, s in shapes.items()}
    full["router"] = torch.randn(DIM, EXPERTS)
    specs = {**dict.fromkeys(shapes, P("ep")), "router": P()}
    params = ftp.device_put(full, mesh, specs)
    tokens = torch.randn(TOKENS, DIM)
    x = ftp.device_put(tokens, mesh, P("ep"))
    plain = {name: p.clone() for name, p in params.items()}, x.clone()

    def by_ftp(capacity: float | None) -> tuple[Run, float]:
        moe = ftp.plans.send_tokens(layer, "ep", capacity=capacity)
        step = ftp.shard(lambda p, x: moe(p, x).square().mean(), mesh, specs, batch_specs=P("ep"))
        collectives = step.lower(params, x).collectives
        return step, sum(c.wire_nbytes for c in collectives if c.worst_nbytes is not None)

    rows_nbytes = (TOKENS // RANKS) * CHOSEN * DIM * 4 * (RANKS - 1) / RANKS
    forms: dict[str, tuple[Run, Any, float]] = {
        "ftp": (by_ftp(None)[0], (params, x), by_ftp(None)[1]),
        "ftp, capacity 1.25": (by_ftp(1.25)[0], (params, x), by_ftp(1.25)[1]),
        "by hand": (by_hand, plain, 3 * rows_nbytes),
    }
    right_loss, right = by_hand(*plain)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for at in range(ROUNDS + 1):
        for name, (run, args, _) in forms.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss, grads = run(*args)
            took = time.perf_counter() - wall, time.process_time() - cpu
            if at:
                seconds[name].append(took)
            else:  # the first round warms up, and shows that all compute the same
                torch.testing.assert_close(loss, right_loss, rtol=1e-4, atol=1e-6)
                for path, grad in right.items():
                    torch.testing.assert_close(grads[path], grad, rtol=1e-3, atol=1e-6)
            del loss, grads
    taken = {name: _of_ranks(torch.tensor(times)) for name, times in seconds.items()}
    rows = []
    for name, (run, args, sent) in forms.items():
        most = torch.tensor(held(run, args))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        wall, cpu = taken[name].median(0).values.tolist()
        ratios = (taken[name] / taken["by hand"]).quantile(QUARTILES, 0).T.tolist()
        given = name, wall, ratios[0], cpu, ratios[1], sent / 2**20, float(most) / 2**20
        rows.append(dict(zip(COLUMNS, given, strict=True)))
    dist.destroy_process_group()
    return rows


def _of_ranks(times: Tensor) -> Tensor:
    """Per round the seconds of the slower rank, and the mean CPU seconds of a rank."""
    wall, cpu = times.to(torch.float64).unbind(1)
    wall, cpu = wall.clone(), cpu.clone()
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return torch.stack([wall, cpu / RANKS], 1)


def _shown(cell: Any) -> Any:
    return " ".join(f"{v:.2f}" for v in cell) if isinstance(cell, list) else cell


def main() -> None:
    record.rows_of_ranks(__file__, __doc__, "experts", RANKS, on_ranks, COLUMNS, _shown)


if __name__ == "__main__":
    main()
