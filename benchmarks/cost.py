"""Seconds of a step as a report estimates them on this machine's calibrated rates, beside seconds measured.

W1 is the toy MLP 10-32-5 on 20 rows, W2 a Llama-style decoder of 4 layers on 4 × 128 tokens; each on one rank, and cut as Megatron does
over two gloo processes. Calibration and run take turns, as the machine may be busy. One rank is measured in seconds of its processor,
which others that run beside it do not change much; two in seconds of the clock, of which the least is taken: ranks that wait use none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, specs  # pyright: ignore[reportMissingImports]
from record import ROOT, save, show
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.compile import eager
from ftp.tree import flatten

TURNS, SECONDS = 5, 0.5


def w1() -> tuple[Any, Any, Any, Any]:
    fn, params = ftp.functionalize(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)))

    def loss_fn(params, x, y):
        return F.mse_loss(fn(params, x), y)

    return loss_fn, params, {"0.*": P("tp"), "2.weight": P(None, "tp")}, (torch.randn(20, 10), torch.randn(20, 5))


def w2() -> tuple[Any, Any, Any, Any]:
    cfg = LlamaConfig(vocab=4096, dim=256, layers=4, heads=8, hidden=704)
    fn, params = ftp.functionalize(build(cfg))
    return lm_loss(fn), params, specs(cuts(cfg), tp="tp"), (lm_batch(cfg, 4, 128),)


def measure(name: str) -> dict[str, Any]:
    loss_fn, params, patterns, batch = {"W1": w1, "W2": w2}[name]()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = ftp.make_mesh((world,), ("tp",)) if world > 1 else ftp.simulated_mesh((1,), ("tp",))
    placed = ftp.device_put(params, mesh, ftp.plan(params, patterns))
    lowered = ftp.shard(loss_fn, mesh, ftp.plan(params, patterns)).lower(placed, *batch)
    ordered = [leaf for leaf in flatten((placed, *batch))[0] if isinstance(leaf, torch.Tensor)]
    given = [*ordered, *lowered._local_offsets]
    run = eager(lowered.graph.graph, given, ())
    predicted, measured, parts = [], [], {}
    for _ in range(TURNS):
        hardware = ftp.calibrate(mesh if world > 1 else None, dtypes=[torch.float32])
        cost = lowered.cost(hardware)
        predicted.append(float(cost))
        parts = {"computing": cost.computing, "waiting": cost.waiting}
        measured.append(_seconds(lambda: run(given), world))
    p, m = statistics.median(predicted), statistics.median(measured)
    spread = [min(measured), max(measured)]
    return {"workload": name, "ranks": world, "predicted": p, "measured": m, "ratio": p / m, "spread": spread, **parts}


def _seconds(run: Any, world: int) -> float:
    run()
    count = torch.tensor([0])
    began = time.perf_counter()
    run()
    count[0] = max(3, min(500, int(SECONDS / (time.perf_counter() - began))))
    if world > 1:
        dist.broadcast(count, 0)
    times = []
    clock = time.perf_counter if world > 1 else time.process_time
    for _ in range(int(count)):
        began = clock()
        run()
        times.append(clock() - began)
    return min(times) if world > 1 else statistics.median(times)


def case(name: str, ranks: int) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, __file__, "--case", name], env=env, capture_output=True, text=True, timeout=300)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(rows[0]) if rows else {"workload": name, "ranks": ranks, "failed": done.stderr.strip()[-200:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case")
    options = parser.parse_args()
    if options.case:
        torch.set_num_threads(1)
        row = measure(options.case)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(row), flush=True)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return
    rows = [case(name, ranks) for name in ("W1", "W2") for ranks in (1, 2)]
    show(rows, ["workload", "ranks", "predicted", "measured", "ratio", "computing", "waiting"])
    if options.json:
        save("cost", {"rows": rows})


if __name__ == "__main__":
    main()
