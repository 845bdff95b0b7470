"""Causal attention cut along the sequence, forward and backward: ftp's ring and gather beside a
ring and a gather written by hand, on gloo processes.

    python benchmarks/attention.py [--json]
    FTP_SHM=1 python benchmarks/attention.py [--json]    # ftp's collectives in shared memory

All forms run in turn in the same processes. Seconds are medians over the rounds, of the slower
rank; bytes are those that a rank sends at most; memory is the allocator's peak beside the inputs,
on the rank that needs most. The gather by hand is torch's context parallelism by all-gather as
torchtitan calls it, which does not run on a CPU itself: keys and values whole, a mask for the
queries. ``--json`` writes the table of docs/attention.md too, with what torch's
``context_parallel``, which does not run on a CPU, sends and holds by its code.
"""

import math
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

aten = torch.ops.aten
SHAPES = ((1, 4, 2048, 64), (1, 4, 8192, 64))  # batch, heads, tokens, dim
ROUNDS, RANKS = 5, 2
COLUMNS = ("tokens", "form", "seconds", "CPU seconds", "MiB sent", "MiB held")
Run = Callable[..., tuple[Tensor, ...]]


def by_ftp(hardware: ftp.Hardware, mesh: Any, shape: tuple[int, ...]) -> tuple[Run, int]:
    """A step, and the bytes that its report says a rank sends."""

    def both(grad: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        attend = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
        out, vjp = torch.func.vjp(attend, *batch)
        return out, *vjp(grad)

    cut = P(None, None, "cp")
    step = ftp.spmd(both, mesh, (cut, (cut,) * 3), (cut,) * 4, hardware=hardware)
    whole = torch.empty(shape, device="meta")
    collectives = step.lower(whole, (whole,) * 3).collectives
    return lambda q, k, v, grad: step(grad, (q, k, v)), collectives.wire_nbytes


def _exchange(x: Tensor, to: int, tag: int) -> tuple[Tensor, list[Any]]:
    """Send to one rank, receive from its opposite; two ranks are each other's."""
    got = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, to, tag=tag), dist.P2POp(dist.irecv, got, to, tag=tag)]
    return got, dist.batch_isend_irecv(ops)


def ring_by_hand(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Ring attention of two ranks in plain chunks: the second rank sees all keys."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    (far_k, a), (far_v, b) = _exchange(k, other, 0), _exchange(v, other, 1)
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out, weights = flash(q, k, v, 0.0, True)
    for work in (*a, *b):
        work.wait()
    if rank:
        part, of_part = flash(q, far_k, far_v, 0.0, False)
        both = torch.logaddexp(weights, of_part)
        out = out * (weights - both).exp().unsqueeze(-1)
        out += part * (of_part - both).exp().unsqueeze(-1)
        weights = both
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    (far_k, a), (far_v, b) = _exchange(k, other, 2), _exchange(v, other, 3)
    of_q, of_k, of_v = back(grad, q, k, v, out, weights, 0.0, True)
    for work in (*a, *b):
        work.wait()
    sent = [torch.zeros_like(k), torch.zeros_like(v)]
    if rank:
        more, *sent = back(grad, q, far_k, far_v, out, weights, 0.0, False)
        of_q = of_q + more
    (got_k, a), (got_v, b) = (_exchange(x.contiguous(), other, 4 + i) for i, x in enumerate(sent))
    for work in (*a, *b):
        work.wait()
    return out, of_q, of_k + got_k, of_v + got_v


def gather_by_hand(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Keys and values whole, and a mask; their gradients reduced and scattered."""
    rank, n = dist.get_rank(), dist.get_world_size()
    gathered = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        gathered.append(torch.cat(parts, 2))
    length = q.shape[2]
    at = torch.arange(length) + rank * length
    mask = at[:, None] >= torch.arange(n * length)
    attend = lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask)  # noqa: E731
    out, vjp = torch.func.vjp(attend, q, *gathered)
    of_q, *of_keys = vjp(grad)
    found = []
    for x in of_keys:
        whole = torch.cat([part.contiguous() for part in x.chunk(n, 2)])
        part = whole.new_empty(q.shape[0], *whole.shape[1:])
        dist.reduce_scatter_single(part, whole)
        found.append(part)
    return out, of_q, *found


def held(run: Run, given: list[Tensor]) -> int:
    """The allocator's peak beside the inputs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        made = run(*given)
    del made
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def on_ranks() -> list[dict[str, Any]]:
    """The rows, equal on all ranks."""
    mesh, rows = ftp.make_mesh((RANKS,), ("cp",), device_type="cpu"), []
    for shape in SHAPES:
        torch.manual_seed(0)
        full = [torch.randn(shape) for _ in range(4)]
        cut = P(None, None, "cp")
        given = ftp.device_put(full, mesh, cut)
        plain = [x.clone() for x in given]
        block = plain[0].numel() * 4
        ring, of_ring = by_ftp(ftp.Hardware(flops=1e3, ring_step=0.0), mesh, shape)
        gather, of_gather = by_ftp(ftp.Hardware(ring_step=1.0), mesh, shape)
        forms: dict[str, tuple[Run, list[Tensor], int]] = {
            "ring, ftp": (ring, given, of_ring),
            "ring, by hand": (ring_by_hand, plain, 6 * block),
            "gather, ftp": (gather, given, of_gather),
            "gather, by hand": (gather_by_hand, plain, 4 * block),
        }
        right = [x.clone() for x in gather_by_hand(*plain)]
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
        for at in range(ROUNDS + 1):
            for name, (run, args, _) in forms.items():
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                made = run(*args)
                took = time.perf_counter() - wall, time.process_time() - cpu
                if at:
                    seconds[name].append(took)
                else:  # the first round warms up, and shows that all compute the same
                    for one, other in zip(made, right, strict=True):
                        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
                del made
        for name, (run, args, sent) in forms.items():
            found = [*map(statistics.median, zip(*seconds[name], strict=True)), held(run, args)]
            worst = torch.tensor(found, dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            wall, cpu, most = worst.tolist()
            sizes = sent / 2**20, most / 2**20
            rows.append(dict(zip(COLUMNS, (shape[2], name, wall, cpu, *sizes), strict=True)))
    dist.destroy_process_group()
    return rows


def of_context_parallel(shape: tuple[int, ...]) -> tuple[float, float]:
    """MiB that a rank sends, and holds beside its inputs, in torch's ``context_parallel`` in single
    precision with its default options; the kernels' own buffers are left out.

    Source: torch 2.13, ``_templated_ring_attention_backward``. Keys and values are gathered in each
    pass, their gradients go around once. Held at a time: the result; the gathered keys and
    values and their copy; sums of three gradients; the last three; keys' gradients, sent and
    received.
    """
    block = math.prod(shape) * 4 / RANKS / 2**20
    sent = 2 * (RANKS - 1) * 2 + RANKS * 2
    held = 1 + 2 * RANKS + 2 + 3 + 3 + 2 + 2
    return sent * block, held * block


def write_page() -> None:
    """The table of docs/attention.md, from the results over gloo and in memory."""
    names = {"gloo": "attention", "memory": "attention_in_memory"}
    found = {where: record.results(name).get("rows") for where, name in names.items()}
    found = {where: rows for where, rows in found.items() if rows}
    heads = ("tokens", "form", *(f"CPU seconds, {w}" for w in found), "MiB sent", "MiB held")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for i, row in enumerate(next(iter(found.values()))):
        cells = (
            f"{row['tokens']:,}",
            row["form"],
            *(f"{rows[i]['CPU seconds']:.3f}" for rows in found.values()),
            f"{row['MiB sent']:.0f}",
            f"{row['MiB held']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
        if row["form"] == "gather, by hand":
            (shape,) = (x for x in SHAPES if x[2] == row["tokens"])
            sent, most = of_context_parallel(shape)
            name = "torch's `context_parallel`, by formulas"
            none = " | ".join("–" for _ in found)
            lines.append(f"| {row['tokens']:,} | {name} | {none} | {sent:.0f} | {most:.0f} |")
    record.write_table("attention.md", "benchmarks/attention.py", lines)


def main() -> None:
    record.rows_of_ranks(__file__, __doc__, "attention", RANKS, on_ranks, COLUMNS)
    if "--json" in sys.argv and "--rank" not in sys.argv:
        write_page()


if __name__ == "__main__":
    main()
