"""Seconds of a step as a report estimates them on this machine's calibrated rates, beside seconds
measured.

    python benchmarks/cost.py [--json] [--workloads W1 W2 ...] [--ranks 1 2] [--modes eager compiled
    memory] [--turns 5]

Whole train steps, with torch's fused AdamW, each called as a user calls it: W1 to W3 of `speed.py`,
cut as Megatron does, and programs that the estimate was not made with. One rank, or two gloo
processes; ``memory`` sends collectives through shared memory. Calibration and steps take turns, as
a machine changes; medians are over the turns, of medians. One rank is measured in seconds of its
processor, which others that run beside it do not change much; two in seconds of the clock, so they
want a quiet machine. ``--json`` puts the rows in place of those of the same names in
benchmarks/results/cost.json.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import models  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from peers.workloads import RATE, WORKLOADS, batch, loss_of, module
from record import ROOT, save, show

import ftp
from ftp import P

SECONDS = 1.0  # of steps in a turn
TOY = {"net1.*": P("tp"), "net2.weight": P(None, "tp")}
LLAMA = models.LlamaConfig(vocab=2048, dim=384, layers=3, heads=6, hidden=1024)
CNN = models.CNNConfig(channels=32, blocks=3, size=32)
Made = tuple[
    Callable[..., Any], dict[str, Any], dict[str, P], P, Any
]  # loss of (params, batch), parameters, patterns, batch's spec, batch


def workload(name: str) -> Made:
    work = WORKLOADS[name]
    fn, params = ftp.functionalize(module(work))
    patterns = TOY if work.cfg is None else models.specs(models.cuts(work.cfg), tp="tp")
    return lambda p, b: loss_of(work)(fn(p, b[0]), b[1]), params, patterns, P(), batch(work, 0)


def zero() -> Made:
    fn, params = ftp.functionalize(models.build(LLAMA))
    return (
        models.lm_loss(fn),
        params,
        models.specs(models.cuts(LLAMA), zero="tp"),
        P("tp"),
        models.lm_batch(LLAMA, 4, 128),
    )


def sequence_parallel() -> Made:
    fn, params = ftp.functionalize(models.build(LLAMA), constraints=models.sequence_parallel())
    return (
        models.lm_loss(fn),
        params,
        models.specs(models.cuts(LLAMA), tp="tp"),
        P(),
        models.lm_batch(LLAMA, 4, 128),
    )


def convolutions() -> Made:
    fn, params = ftp.functionalize(models.build(CNN))
    return models.class_loss(fn), params, {"**": P()}, P("tp"), models.class_batch(CNN, 32)


def dropout() -> Made:
    """The model of examples/train_gpt.py, data parallel."""
    found = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert found is not None and found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    fn, params = ftp.functionalize(example.GPT(256, 4, 8, 128, 0.1))
    key = ftp.random.key(0)

    def loss_fn(p: Any, b: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(fn(p, b[0], rng=key).flatten(0, 1), b[1].flatten())

    tokens = torch.randint(256, (8, 128), generator=torch.Generator().manual_seed(0))
    return loss_fn, params, {"**": P()}, P("tp"), (tokens, tokens.roll(-1, 1))


MADE: dict[str, Callable[[], Made]] = {
    **{name: lambda name=name: workload(name) for name in WORKLOADS},
    "ZeRO-3": zero,
    "sequence parallel": sequence_parallel,
    "CNN": convolutions,
    "dropout": dropout,
}
UNSEEN = ("ZeRO-3", "sequence parallel", "CNN", "dropout")


def measure(name: str, mode: str, turns: int) -> dict[str, Any]:
    world = int(os.environ["WORLD_SIZE"])
    mesh = ftp.make_mesh((world,), ("tp",))
    torch.manual_seed(0)  # ranks draw equal parameters
    loss_fn, params, patterns, of_batch, data = MADE[name]()
    specs = ftp.plan(params, patterns)
    optimizer = ftp.optim.from_torch(torch.optim.AdamW, lr=RATE, fused=True)

    def train_step(params, state, batch):
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
        return *optimizer.update(grads, state, params), loss

    of_state = optimizer.specs(params, specs)
    of_data = tuple(of_batch for _ in data)
    given, made = (specs, of_state, of_data), (specs, of_state, P())
    step = ftp.spmd(
        train_step,
        mesh,
        given,
        made,
        donate=(0, 1),
        bucket=True,
        compile=mode == "compiled",
        data_axes=of_batch.axes,
    )
    state = ftp.device_put(optimizer.init(params), mesh, of_state)
    params, data = ftp.device_put(params, mesh, specs), ftp.device_put(data, mesh, of_data)
    lowered = step.lower(params, state, data)
    params, state, _ = step(params, state, data)

    def run() -> None:
        nonlocal params, state
        params, state, loss = step(params, state, data)
        float(loss)

    predicted, measured, parts = [], [], {}
    for _ in range(turns):
        cost = lowered.cost(ftp.calibrate(mesh, dtypes=[torch.float32]))
        predicted.append(float(cost))
        parts = {"computing": cost.computing, "waiting": cost.waiting}
        measured.append(seconds_of(run, world))
    p, m = statistics.median(predicted), statistics.median(measured)
    row = {
        "workload": name,
        "ranks": world,
        "mode": mode,
        "predicted": p,
        "measured": m,
        "ratio": p / m,
    }
    return {
        **row,
        "of predicted": [min(predicted), max(predicted)],
        "of measured": [min(measured), max(measured)],
        **parts,
    }


def seconds_of(run: Callable[[], None], world: int) -> float:
    """The median of a turn's steps."""
    run()
    began = time.perf_counter()
    run()
    count = torch.tensor([max(3, min(500, int(SECONDS / (time.perf_counter() - began))))])
    dist.broadcast(count, 0)
    times = []
    clock = time.perf_counter if world > 1 else time.process_time
    for _ in range(int(count)):
        began = clock()
        run()
        times.append(clock() - began)
    return statistics.median(times)


def case(name: str, ranks: int, mode: str, turns: int) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), str(ROOT / "benchmarks")])
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "FTP_SHM": str(int(mode == "memory")),
    }
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    asked = ["--case", name, "--modes", mode, "--turns", str(turns)]
    done = subprocess.run(
        [sys.executable, *launch, *asked], env=env, capture_output=True, text=True, timeout=300
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return (
        json.loads(rows[0])
        if rows
        else {"workload": name, "ranks": ranks, "mode": mode, "failed": done.stderr.strip()[-300:]}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workloads", nargs="+", choices=MADE, default=list(MADE))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--modes", nargs="+", choices=["eager", "compiled", "memory"], default=["eager"]
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        torch.set_num_threads(1)
        row = measure(options.case, options.modes[0], options.turns)
        if int(os.environ["RANK"]) == 0:
            print(json.dumps(row), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        return
    rows = []
    for name in options.workloads:
        for ranks in options.ranks:
            for mode in options.modes:
                rows.append(case(name, ranks, mode, options.turns))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    show(
        rows,
        [
            "workload",
            "ranks",
            "mode",
            "predicted",
            "measured",
            "ratio",
            "computing",
            "waiting",
            "failed",
        ],
    )
    if options.json:
        _merge(rows)


def _merge(rows: list[dict[str, Any]]) -> None:
    path = ROOT / "benchmarks" / "results" / "cost.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return list(MADE).index(row["workload"]), row.get("mode", ""), row["ranks"]

    merged = {
        key(row): row
        for row in [*known, *(row for row in rows if "failed" not in row)]
        if row.get("mode")
    }
    save("cost", {"rows": [merged[k] for k in sorted(merged)]})


if __name__ == "__main__":
    main()
