"""Steps with the buckets that a plan keeps beside the same steps with ``bucket=False``: estimated
and measured.

    python benchmarks/buckets.py [--json]

Losses and gradients of the programs of `cost.py` on two gloo processes (FTP_SHM=1: in shared
memory), planned for what `ftp.calibrate` measures first. Both steps take turns, the first of one
turn second in the next; times are medians of the turns' medians, in seconds of the clock, ratios
medians over the turns.
"""

import statistics
from typing import Any

import torch
import torch.distributed as dist
from cost import MADE, seconds_of
from record import rows_of_ranks

import ftp

TURNS = 7
PROGRAMS = ("W2", "ZeRO-3", "sequence parallel", "CNN", "dropout")


def on_ranks() -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = ftp.make_mesh((dist.get_world_size(),), ("tp",))
    hardware = ftp.calibrate(mesh, dtypes=[torch.float32])
    rows = [measured(name, mesh, hardware) for name in PROGRAMS]
    ftp.destroy_process_group()
    return rows


def measured(name: str, mesh: Any, hardware: ftp.Hardware) -> dict[str, Any]:
    torch.manual_seed(0)
    loss_fn, params, patterns, of_batch, data = MADE[name]()
    specs = ftp.plan(params, patterns)
    of_data = tuple(of_batch for _ in data)
    placed = ftp.device_put(params, mesh, specs), ftp.device_put(data, mesh, of_data)
    row: dict[str, Any] = {"program": name}
    runs = []
    for bucket in (True, False):
        step = ftp.shard(
            loss_fn,
            mesh,
            specs,
            batch_specs=(of_data,),
            data_axes=of_batch.axes,
            hardware=hardware,
            bucket=bucket,
        )
        lowered = step.lower(*placed)
        kind = "buckets" if bucket else "without"
        row[f"collectives, {kind}"] = len(lowered.collectives)
        row[f"estimated ms, {kind}"] = float(lowered.cost()) * 1e3
        runs.append(lambda step=step: float(step(*placed)[0]))
    turns: list[tuple[float, float]] = []
    for turn in range(TURNS):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        took = {i: seconds_of(runs[i], 2) for i in order}
        turns.append((took[0], took[1]))
    for kind, times in zip(("buckets", "without"), zip(*turns, strict=True), strict=True):
        row[f"ms, {kind}"] = statistics.median(times) * 1e3
    estimated = row["estimated ms, buckets"] / row["estimated ms, without"]
    ratios = [one / other for one, other in turns]
    return {**row, "estimated ratio": estimated, "ratio": statistics.median(ratios)}


def main() -> None:
    columns = ["program", "collectives, buckets", "collectives, without", "estimated ratio"]
    columns += ["ratio", "ms, buckets", "ms, without"]
    rows_of_ranks(__file__, __doc__, "buckets", 2, on_ranks, columns)


if __name__ == "__main__":
    main()
