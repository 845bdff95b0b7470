"""Seconds of a step as a report estimates them on this machine's calibrated rates, beside seconds measured.

The workloads are the whole train steps of `speed.py`, W1 to W3, eager, with torch's fused AdamW: on one rank, and cut as Megatron does over
two gloo processes. Calibration and run take turns, as the machine may be busy. One rank is measured in seconds of its processor, which
others that run beside it do not change much; two in seconds of the clock, of which the least is taken: ranks that wait use none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import models  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from peers.workloads import RATE, WORKLOADS, batch, loss_of, module
from record import ROOT, save, show

import ftp
from ftp import P
from ftp.compile import eager
from ftp.tree import flatten

TURNS, SECONDS = 5, 0.5
TOY = {"net1.*": P("tp"), "net2.weight": P(None, "tp")}


def measure(name: str) -> dict[str, Any]:
    work = WORKLOADS[name]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = ftp.make_mesh((world,), ("tp",)) if world > 1 else ftp.simulated_mesh((1,), ("tp",))
    fn, params = ftp.functionalize(module(work))
    specs = ftp.plan(params, TOY if work.cfg is None else models.specs(models.cuts(work.cfg), tp="tp"))
    optimizer = ftp.optim.from_torch(torch.optim.AdamW, lr=RATE, fused=True)

    def train_step(params, state, batch):
        grads, loss = torch.func.grad_and_value(lambda p: loss_of(work)(fn(p, batch[0]), batch[1]))(params)
        return *optimizer.update(grads, state, params), loss

    of_state = optimizer.specs(params, specs)
    step = ftp.spmd(train_step, mesh, (specs, of_state, P()), (specs, of_state, P()), donate=(0, 1), pack=True)
    state = ftp.device_put(optimizer.init(params), mesh, of_state)
    params = ftp.device_put(params, mesh, specs)
    lowered = step.lower(params, state, batch(work, 0))
    given = [leaf for leaf in flatten((params, state, batch(work, 0)))[0] if isinstance(leaf, torch.Tensor)]
    given += lowered._local_offsets
    run = eager(lowered.graph.graph, given, range(len(given) - 2 - len(lowered._local_offsets)))
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
    rows = [case(name, ranks) for name in WORKLOADS for ranks in (1, 2)]
    show(rows, ["workload", "ranks", "predicted", "measured", "ratio", "computing", "waiting"])
    if options.json:
        save("cost", {"rows": rows})


if __name__ == "__main__":
    main()
