"""Pipelined steps beside those of torch.distributed.pipelining: one model, two gloo processes, both
in one run, step about step; seconds and memory of each rank.

    python benchmarks/pipelines.py [--json]

Then what it takes to report Llama-3.1-405B's gradient on 1024 ranks, (pp 8, dp 16, tp 8), and a
train step of it with clipping and AdamW.

Seconds are medians over rounds, of the clock and of the processor; ratios are medians of the ratios
of a round. Memory is the most that the allocator hands out during a step, beside parameters and
batch.
"""

import os
import statistics
import time
import warnings
from typing import Any

import torch
from record import command_line, options, run_case, save, show
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

LAYERS, DIM, LENGTH, ROWS, MICROBATCHES = 8, 256, 64, 32, 8
ROUNDS = 9
# Ours, and torch's: class, stages of a rank.
CASES = {
    "gpipe": ("gpipe", 1, "ScheduleGPipe"),
    "1f1b": ("1f1b", 1, "Schedule1F1B"),
    "interleaved": ("interleaved", 2, "ScheduleInterleaved1F1B"),
    "zero bubble": ("zero_bubble", 1, "ScheduleInterleavedZeroBubble"),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def ours(schedule, chunks, model, x, y):
    import ftp
    from ftp import P

    fn, params = ftp.functionalize(model)
    mesh = ftp.make_mesh((2,), ("pp",), device_type="cpu")
    pipe = ftp.Pipeline("pp", MICROBATCHES, schedule, chunks=chunks)
    specs = pipe.place(params, P(), mesh)

    def loss_fn(params, x, y):
        return F.mse_loss(fn(params, x), y)

    step = ftp.shard(loss_fn, mesh, specs, pipeline=pipe)
    params = ftp.device_put(params, mesh, specs)
    batch = ftp.device_put((x, y), mesh, P())

    def run():
        loss, grads = step(params, *batch)
        return loss, grads

    return run


def theirs(name, chunks, model, x, y, rank):
    each = LAYERS // (2 * chunks)
    numbers = [rank + 2 * chunk for chunk in range(chunks)]
    stages = [
        pipelining.PipelineStage(
            Model(list(model.layers)[k * each : (k + 1) * each]), k, 2 * chunks, torch.device("cpu")
        )
        for k in numbers
    ]
    kind, several = getattr(pipelining, name), name.startswith("ScheduleInterleaved")
    schedule = kind(stages if several else stages[0], MICROBATCHES, loss_fn=F.mse_loss)

    def run():
        for stage in stages:
            stage.submod.zero_grad()
        losses: list = []
        given = {"target": y, "losses": losses} if 2 * chunks - 1 in numbers else {}
        schedule.step(*((x,) if rank == 0 else ()), **given)
        return torch.stack(losses).mean() if losses else None

    return run


def peak(run):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        out = run()
    del out
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()  # type: ignore[attr-defined]
            most = max(most, live)
    return most


def job(case):
    import ftp

    warnings.simplefilter("ignore")
    schedule, chunks, name = CASES[case]
    ftp.init_process_group()
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = Model([Block() for _ in range(LAYERS)])
    x, y = torch.randn(2, ROWS, LENGTH, DIM)
    runs = {
        "ours": ours(schedule, chunks, model, x, y),
        "torch": theirs(name, chunks, model, x, y, rank),
    }
    losses = {}
    for key, run in runs.items():
        for _ in range(3):
            out = run()
        losses[key] = float(out[0] if key == "ours" else out) if out is not None else None
    clock = {key: [] for key in runs}
    cpu = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            torch.distributed.barrier()
            begin, used = time.perf_counter(), time.process_time()
            run()
            cpu[key].append(time.process_time() - used)
            torch.distributed.barrier()
            clock[key].append(time.perf_counter() - begin)
    memory = {key: peak(run) for key, run in runs.items()}
    ftp.destroy_process_group()
    return losses, clock, cpu, memory


def of_405b(trains):
    """The report of a step of 126 layers, on a mesh of no processes: its gradient, or with clipping
    and AdamW.
    """
    import models  # pyright: ignore[reportMissingImports]
    from scale import LLAMA

    import ftp
    from ftp import P

    cfg = models.LlamaConfig(layers=126, **LLAMA)
    fn, params = ftp.functionalize(models.build(cfg, dtype=torch.bfloat16, device="meta"))
    mesh = ftp.AbstractMesh((8, 16, 8), ("pp", "dp", "tp"), device_type="cuda")
    pipe = ftp.Pipeline("pp", microbatches=32)
    specs = pipe.place(params, ftp.plan(params, models.specs(models.cuts(cfg), tp="tp")), mesh)
    batch = tuple(torch.empty(512, 8192, dtype=torch.int64, device="meta") for _ in range(2))
    loss_fn, state = models.lm_loss(fn), ()
    step: Any = ftp.shard(loss_fn, mesh, specs, batch_specs=P("dp"), pipeline=pipe)
    if trains:
        opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-4)
        state = (opt.init(params),)

        def train_step(params, state, batch):
            grad_fn = ftp.optim.accumulate(torch.func.grad_and_value(loss_fn), pipe.microbatches)
            grads, loss = grad_fn(params, batch)
            grads, norm = ftp.optim.clip_by_global_norm(grads, 1.0)
            return *opt.update(grads, state, params), loss, norm

        in_specs = (specs, opt.specs(params, specs), P("dp"))
        step = ftp.spmd(train_step, mesh, in_specs, pipeline=pipe)
    begin, used = time.perf_counter(), time.process_time()
    lowered: Any = step.lower(params, *state, batch)
    text = str(lowered)
    return {
        "seconds": round(time.perf_counter() - begin, 1),
        "processor seconds": round(time.process_time() - used, 1),
        "bubble": round(lowered.bubble, 4),
        "ideal bubble": round(lowered.ideal_bubble, 4),
        "GiB by rank": [round(n / 2**30, 1) for n in lowered.memory_by_rank],
        "report": text.splitlines(),
    }


def measure(case):
    if case["schedule"].startswith("405B"):
        return of_405b(case["schedule"].endswith("step"))
    from launch import launch  # pyright: ignore[reportMissingImports]

    ranks = launch(job, 2, case["schedule"], timeout=280)
    for rank in ranks:
        if rank.error is not None:
            raise RuntimeError(rank.error)
    (losses, clock, _, first), (last_losses, _, _, last) = (rank.value for rank in ranks)
    cpu = {
        k: [sum(pair) for pair in zip(*(r.value[2][k] for r in ranks), strict=True)] for k in clock
    }
    assert abs(losses["ours"] - last_losses["torch"]) < 1e-4, (losses, last_losses)
    pairs = zip(clock["ours"], clock["torch"], strict=True)
    used = zip(cpu["ours"], cpu["torch"], strict=True)
    mib = 2**20
    return {
        "ours s": statistics.median(clock["ours"]),
        "torch s": statistics.median(clock["torch"]),
        "ratio": statistics.median(a / b for a, b in pairs),
        "cpu ratio": statistics.median(a / b for a, b in used),
        **{
            f"{key} MiB, rank {r}": round(own[key] / mib, 2)
            for r, own in enumerate((first, last))
            for key in ("ours", "torch")
        },
    }


COLUMNS = (
    "schedule",
    "ours s",
    "torch s",
    "ratio",
    "cpu ratio",
    "ours MiB, rank 0",
    "torch MiB, rank 0",
    "ours MiB, rank 1",
    "torch MiB, rank 1",
    "failed",
)


def main() -> None:
    parser = command_line(__doc__, "pipelines")
    parser.add_argument("--schedules", nargs="+", default=list(CASES))
    args = options(parser, measure)
    rows = []
    for schedule in args.schedules:
        rows.append({"schedule": schedule, **run_case(__file__, {"schedule": schedule}, 300)})
        show(rows[-1:], COLUMNS)
    large = {}
    for name in ("405B", "405B step"):
        large[name] = run_case(__file__, {"schedule": name}, 600)
        report = large[name].get("report", [large[name]])
        print(*report, f"{large[name].get('processor seconds')} processor s", sep="\n")
    if args.json:
        model = {
            "layers": LAYERS,
            "dim": DIM,
            "length": LENGTH,
            "rows": ROWS,
            "microbatches": MICROBATCHES,
        }
        save("pipelines", {"model": model, "rounds": ROUNDS, "steps": rows, **large})


if __name__ == "__main__":
    main()
