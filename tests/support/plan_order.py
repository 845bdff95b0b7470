"""Plans of a few models on unequal links, their estimated and their measured seconds.

    PYTHONPATH=tests/support python tests/support/plan_order.py

writes tests/results/plan_order.json. Four ranks on a mesh of two axes, of which one has a slow
link; the transport is `throttled`. Each turn runs every plan of a model once.
"""

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import models
import torch
import torch.distributed as dist
from launch import launch
from throttled import throttled

import ftp
from ftp import P
from ftp.sharding.mesh import resolve

RESULTS = Path(__file__).parent.parent / "results" / "plan_order.json"
FAST, SLOW = (
    ftp.Link(latency=1e-3, bandwidth=2e7, hidden=0.0),
    ftp.Link(latency=4e-3, bandwidth=2e6, hidden=0.0),
)
LINKS = {"slow dp": {"dp": SLOW, "tp": FAST}, "slow tp": {"dp": FAST, "tp": SLOW}}
CONFIGS: dict[str, models.Config] = {
    "llama": models.LlamaConfig(vocab=256, dim=64, layers=2, heads=4, hidden=192),
    "mlp": models.MLPConfig(dim=96, hidden=256, layers=3, classes=16),
    "cnn": models.CNNConfig(channels=24, blocks=2, size=16),
}
TURNS, MARGIN = 4, 1.25

Row = dict[str, Any]


def plans(cfg: models.Config) -> dict[str, tuple[Mapping[str, P], P, Mapping[str, Any]]]:
    """By name: specs of the parameters, of the batch, and options."""
    cuts, both = models.cuts(cfg), P(("dp", "tp"))
    whole = {"**": P()}
    found: dict[str, tuple[Mapping[str, P], P, Mapping[str, Any]]] = {
        "dp over both": (whole, both, {}),
        "dp over both, no buckets": (whole, both, {"bucket": False}),
        "dp over both, bfloat16 sums": (whole, both, {"reduce_dtype": torch.bfloat16}),
        "ZeRO over dp": (models.specs(cuts, zero="dp"), both, {}),
        "ZeRO over tp": (models.specs(cuts, zero="tp"), both, {}),
        "TP over tp": (models.specs(cuts, tp="tp"), P("dp"), {}),
        "TP over dp": (models.specs(cuts, tp="dp"), P("tp"), {}),
        "TP over tp, ZeRO over dp": (models.specs(cuts, tp="tp", zero="dp"), P("dp"), {}),
        "TP over dp, ZeRO over tp": (models.specs(cuts, tp="dp", zero="tp"), P("tp"), {}),
    }
    if isinstance(cfg, models.LlamaConfig):
        found["SP over tp"] = (models.specs(cuts, tp="tp"), P("dp"), {"sp": "tp"})
        found["SP over dp"] = (models.specs(cuts, tp="dp"), P("tp"), {"sp": "dp"})
    return found


def measure(model: str, link: str, turns: int = TURNS, names: Sequence[str] = ()) -> list[Row]:
    """On each of four processes: every plan of a model on these links, or those of these names."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = ftp.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
    links = LINKS[link]
    hardware = ftp.Hardware.cpu(links)
    cfg = CONFIGS[model]
    made: list[tuple[Row, Callable[[], Any]]] = []
    for name, (patterns, of_batch, given) in plans(cfg).items():
        if names and name not in names:
            continue
        options = dict(given)
        axis = options.pop("sp", None)
        other = "dp" if axis == "tp" else "tp"
        constraints = models.sequence_parallel(tp=axis, dp=other) if axis else None
        fn, params = ftp.functionalize(models.build(cfg), constraints=constraints)
        if isinstance(cfg, models.LlamaConfig | models.GPT2Config):
            batch = models.lm_batch(cfg, 8, 32)
        else:
            batch = models.class_batch(cfg, 16)
        specs = ftp.plan(params, patterns)
        step = ftp.shard(
            models.loss(cfg, fn),
            mesh,
            specs,
            batch_specs=of_batch,
            data_axes=of_batch.axes,
            hardware=hardware,
            **options,
        )
        params = ftp.device_put(params, mesh, specs)
        batch = ftp.device_put(batch, mesh, of_batch)
        lowered = step.lower(params, batch)
        issued: dict[str, list[int]] = {}
        for c in lowered.collectives:
            issued.setdefault(" × ".join(c.axes), []).append(c.wire_nbytes)
        row = {"model": model, "links": link, "plan": name, "estimated": float(lowered.cost())}
        row |= {"collectives": issued, "seconds": []}
        made.append((row, lambda step=step, params=params, batch=batch: step(params, batch)))
    with throttled(resolve(mesh), links) as log:
        for turn in range(turns + 1):
            for row, run in made:
                log.clear()
                dist.barrier()
                began = perf_counter()
                run()
                took = torch.tensor(perf_counter() - began, dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if turn:
                    row["seconds"].append(float(took))
                    row["sent"] = {axes: list(sizes) for axes, sizes in log.items()}
    dist.barrier()
    ftp.destroy_process_group()
    return [row for row, _ in made]


def measured(model: str, link: str, turns: int = TURNS, names: Sequence[str] = ()) -> list[Row]:
    """`measure` on four processes; the rows of the first."""
    env = {"FTP_SHM": "1"}
    ranks = launch(measure, 4, model, link, turns, names, timeout=500, env=env)
    assert all(r.exit == 0 for r in ranks), [r.error or r.stderr[-2000:] for r in ranks]
    return ranks[0].value


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """In their estimated order each plan, and the first that is estimated to take ``MARGIN`` times
    as long.
    """
    order = sorted(rows, key=lambda row: row["estimated"])
    slower = [[b for b in order if b["estimated"] >= MARGIN * a["estimated"]] for a in order]
    return [(one, others[0]) for one, others in zip(order, slower, strict=True) if others]


def in_order(pair: tuple[Row, Row]) -> bool:
    """Whether the first plan's quickest turn was quicker than the second's: what other work on the
    machine adds is not the plan's.
    """
    return min(pair[0]["seconds"]) < min(pair[1]["seconds"])


def main() -> None:
    rows: list[Row] = []
    found: list[tuple[Row, Row]] = []
    for model, link in itertools.product(CONFIGS, LINKS):
        here = measured(model, link)
        rows += here
        found += pairs(here)
        for row in here:
            print(model, link, row["plan"], row["estimated"], min(row["seconds"]), flush=True)
    table = [
        {
            **{key: row[key] for key in ("model", "links", "plan")},
            "estimated": round(row["estimated"], 5),
            "measured": round(min(row["seconds"]), 5),
            "sent": {axes: sum(sizes) for axes, sizes in row["sent"].items()},
        }
        for row in rows
    ]
    kept = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "pairs": len(found),
        "in order": sum(map(in_order, found)),
        "out of order": [
            [one["model"], one["links"], one["plan"], two["plan"]]
            for one, two in found
            if not in_order((one, two))
        ],
        "plans": table,
    }
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    print({k: v for k, v in kept.items() if k != "plans"})


if __name__ == "__main__":
    main()
