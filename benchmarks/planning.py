"""Seconds to plan a Llama-style decoder beside the seconds to trace it: depths, meshes of one to
three axes, meshes of 2 to 4096 ranks.

    python benchmarks/planning.py [--json] [--repeats 3] [--layers 2 8 32]

Every measurement is a fresh process on one thread, warmed up on a small model; repeats are
interleaved and medians taken. Seconds are those of the processor (``time.process_time``), which a
busy machine disturbs less than the clock. "after" is everything but tracing: ingest, plan,
partition.
"""

import resource
import statistics
import sys
import time
from importlib import import_module

from picture import draw
from record import command_line, options, run_case, save, show

LLAMA = {
    "vocab": 128256,
    "dim": 4096,
    "heads": 32,
    "kv_heads": 8,
    "hidden": 14336,
}  # 8B; global batch of 4 sequences of 2048 a data rank
MESHES = {
    "tp": {"tp": 4},
    "fsdp x tp": {"dp": 2, "tp": 4},
    "dp x fsdp x tp": {"rep": 2, "dp": 2, "tp": 4},
}
TIMED = {  # a function of a module: column
    ("ftp.api.definition", "trace"): "trace",
    ("ftp.planning.prepare", "prepare"): "from_fx",
    ("ftp.planning.prepare", "plan_prepared"): "make_plan",
}
SIZES = [{"dp": 2}, {"dp": 2, "tp": 2}, *({"dp": dp, "tp": 8} for dp in (8, 64, 512))]


def measure(case: dict) -> dict:
    """One program lowered once."""
    import models
    import torch

    import ftp

    def lower(layers: int, shapes: dict, clock: dict) -> ftp.Lowered:
        cfg = models.LlamaConfig(layers=layers, **shapes)
        fn, params = ftp.functionalize(models.build(cfg, dtype=torch.bfloat16, device="meta"))
        axes = case["axes"]
        specs = ftp.plan(
            params,
            models.specs(
                models.cuts(cfg),
                tp="tp" if "tp" in axes else None,
                zero="dp" if "dp" in axes else None,
            ),
        )
        rows = tuple(a for a in ("rep", "dp") if a in axes)
        ranks = axes.get("rep", 1) * axes.get("dp", 1)
        batch = tuple(
            torch.empty(4 * ranks, 2048, dtype=torch.int64, device="meta") for _ in range(2)
        )
        mesh = ftp.AbstractMesh(tuple(axes.values()), tuple(axes), device_type="cuda")
        batch_specs = ftp.P(rows) if rows else ftp.P()
        step = ftp.shard(models.lm_loss(fn), mesh, specs, batch_specs=batch_specs)
        for (file, name), column in TIMED.items():
            module = import_module(file)
            setattr(module, name, _timed(getattr(module, name), column, clock))
        start = time.process_time(), time.perf_counter()
        lowered = step.lower(params, batch)
        at = time.process_time()
        len(lowered.collectives)
        end = time.process_time()
        clock |= {
            "partition": end - at,
            "total": end - start[0],
            "wall": time.perf_counter() - start[1],
        }
        return lowered

    lower(1, {}, {})
    clock: dict[str, float] = {}
    lowered = lower(case["layers"], LLAMA, clock)
    solutions = lowered.plan.solutions.values()
    return {
        **clock,
        "nodes": len(lowered.plan.graph.nodes),
        "collectives": len(lowered.collectives),
        "largest_table": max(s.largest_table for s in solutions),
        "optimal": all(s.optimal for s in solutions),
        "kept_rules": all(lowered.plan.kept_rules.values()),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _timed(fn, name, clock):
    def timed(*args, **kwargs):
        start = time.process_time()
        result = fn(*args, **kwargs)
        clock[name] = clock.get(name, 0.0) + time.process_time() - start
        return result

    return timed


def medians(cases: list[dict], repeats: int) -> list[dict]:
    """A row per case; the cases take turns."""
    runs: list[list[dict]] = [[] for _ in cases]
    for _ in range(repeats):
        for case, mine in zip(cases, runs, strict=True):
            mine.append(run_case(__file__, case, 300))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [_row(case, mine) for case, mine in zip(cases, runs, strict=True)]


def _row(case: dict, runs: list[dict]) -> dict:
    head = {
        "layers": case["layers"],
        "mesh": " x ".join(f"{a} {n}" for a, n in case["axes"].items()),
    }
    failed = [run["failed"] for run in runs if "failed" in run]
    if failed:
        return {**head, "failed": failed[0]}
    median = {
        key: statistics.median(run[key] for run in runs)
        for key in ("trace", "from_fx", "make_plan", "partition", "total", "wall", "peak_mib")
    }
    after = median["total"] - median["trace"]
    exact = {
        key: runs[0][key]
        for key in ("nodes", "collectives", "largest_table", "optimal", "kept_rules")
    }
    ratios = [run["total"] / run["trace"] - 1 for run in runs]
    return {
        **head,
        **{key: round(value, 3) for key, value in median.items()},
        "after": round(after, 3),
        "after/trace": round(statistics.median(ratios), 2),
        "spread": [round(min(ratios), 2), round(max(ratios), 2)],
        **exact,
    }


COLUMNS = (
    "layers",
    "mesh",
    "trace",
    "from_fx",
    "make_plan",
    "partition",
    "after",
    "after/trace",
    "spread",
)
COLUMNS += ("nodes", "collectives", "largest_table", "optimal", "kept_rules", "peak_mib", "failed")


def main() -> None:
    parser = command_line(__doc__, "planning")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    args = options(parser, measure)
    depths = [
        {"layers": layers, "axes": axes} for axes in MESHES.values() for layers in args.layers
    ]
    sizes = [{"layers": 2, "axes": axes} for axes in SIZES]
    rows = medians(depths + sizes, args.repeats)
    tables = {"depths": rows[: len(depths)], "sizes": rows[len(depths) :]}
    for table in tables.values():
        show(table, COLUMNS)
        print()
    if args.json:
        save("planning", {"repeats": args.repeats, "model": LLAMA, **tables})
        draw("planning")


if __name__ == "__main__":
    main()
