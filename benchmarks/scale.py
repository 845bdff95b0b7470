"""A train step of Llama-3.1-405B shapes with AdamW, lowered for 1024 ranks, and its report: seconds
and memory by depth. With ``--ranks``: 16 layers of Llama 3 8B, loss and gradients, with report and
certificate, by the number of ranks.

    python benchmarks/scale.py [--json] [--layers 8 32 126]
    python benchmarks/scale.py --ranks [--json]

Every measurement is a fresh process on one thread. Seconds are those of the processor; "wall" is
the clock's.
"""

import math
import resource
import time

from record import command_line, options, run_case, save, show

LLAMA = {"vocab": 128256, "dim": 16384, "heads": 128, "kv_heads": 8, "hidden": 53248}
MESH = {"dp": 8, "fsdp": 16, "tp": 8}
SMALL = {"vocab": 128256, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}
MESHES = ((2, 8, 8, 8), (4, 32, 16, 8), (8, 128, 16, 8))


def measure(case: dict) -> dict:
    import models  # pyright: ignore[reportMissingImports]
    import torch

    import ftp
    import ftp.api.definition
    import ftp.planning.prepare
    from ftp import P

    def step_of(layers: int):
        cfg = models.LlamaConfig(layers=layers, **LLAMA)
        fn, params = ftp.functionalize(models.build(cfg, dtype=torch.bfloat16, device="meta"))
        specs = ftp.plan(params, models.specs(models.cuts(cfg), tp="tp", zero="fsdp"))
        opt, loss_fn = ftp.optim.from_torch(torch.optim.AdamW, lr=3e-4), models.lm_loss(fn)

        def train_step(params, state, batch):
            grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
            return *opt.update(grads, state, params), loss

        mesh = ftp.AbstractMesh(tuple(MESH.values()), tuple(MESH), device_type="cuda")
        batch = tuple(torch.empty(256, 8192, dtype=torch.int64, device="meta") for _ in range(2))
        rows = P(("dp", "fsdp"))
        step = ftp.spmd(train_step, mesh, (specs, specs, rows), (specs, specs, P()), donate=(0, 1))
        return step, (params, opt.init(params), batch)

    step, args = step_of(1)
    step.lower(*args)
    step, args = step_of(case["layers"])
    clock: dict[str, float] = {}
    for module, name, column in (
        (ftp.api.definition, "trace", "trace"),
        (ftp.planning.prepare, "plan_prepared", "make_plan"),
    ):
        setattr(module, name, _timed(getattr(module, name), column, clock))
    start, wall = time.process_time(), time.perf_counter()
    lowered = step.lower(*args)
    clock["lower"] = time.process_time() - start
    for name, read in (
        ("partition", lambda: lowered.collectives),
        ("memory", lambda: lowered.memory),
    ):
        clock[name] = _seconds(read)
    clock["cost"], clock["print"] = _seconds(lowered.cost), _seconds(lambda: str(lowered))
    clock["total"], clock["wall"] = time.process_time() - start, time.perf_counter() - wall
    clock = {key: round(value, 3) for key, value in clock.items()}
    per_layer = round((clock["trace"] + clock["make_plan"]) / case["layers"], 3)
    counts = {
        "nodes": len(lowered.plan.graph.nodes),
        "collectives": len(lowered.collectives),
        "alike": lowered.plan.alike,
    }
    return {**clock, "a layer": per_layer, "peak GiB": _peak(), **counts}


def measure_ranks(shape: list[int]) -> dict:
    import models  # pyright: ignore[reportMissingImports]
    import torch

    import ftp
    from ftp import P

    cfg = models.LlamaConfig(layers=16, **SMALL)
    fn, params = ftp.functionalize(models.build(cfg, dtype=torch.bfloat16, device="meta"))
    specs = ftp.plan(params, models.specs(models.cuts(cfg), tp="tp", zero="fsdp"))
    mesh = ftp.AbstractMesh(tuple(shape), ("pod", "dp", "fsdp", "tp"), device_type="cuda")
    batch = tuple(
        torch.empty(math.prod(shape[:3]), 8192, dtype=torch.int64, device="meta") for _ in range(2)
    )
    rows = P(("pod", "dp", "fsdp"))
    step = ftp.shard(models.lm_loss(fn), mesh, specs, batch_specs=rows)
    found, clock = [], {}
    clock["lower"] = _seconds(lambda: found.append(step.lower(params, batch)))
    (lowered,) = found
    clock["report"] = _seconds(lambda: (str(lowered), lowered.cost(), lowered.memory))
    before = _peak()
    clock["certificate"] = _seconds(lambda: ftp.certify(lowered))
    clock = {key: round(value, 2) for key, value in clock.items()}
    return {**clock, "GiB before it": before, "peak GiB": _peak()}


def _peak() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def _seconds(read) -> float:
    start = time.process_time()
    read()
    return time.process_time() - start


def _timed(fn, name, clock):
    def timed(*args, **kwargs):
        start = time.process_time()
        result = fn(*args, **kwargs)
        clock[name] = time.process_time() - start
        return result

    return timed


COLUMNS = (
    "layers",
    "trace",
    "make_plan",
    "lower",
    "partition",
    "memory",
    "cost",
    "print",
    "total",
    "wall",
    "a layer",
    "peak GiB",
)
COLUMNS += ("nodes", "collectives", "alike", "failed")

# Before calls were recorded from memory and layers planned once, on the same machine: processor
# seconds.
BEFORE = [{"layers": 8, "trace": 2.5, "make_plan": 2.06, "lower": 4.71, "total": 5.24}]
# Before certificates stated positions as sums, on another machine: seconds and peak.
RANKS_BEFORE = [
    {"ranks": 1024, "certificate": 4.4, "peak GiB": 1.4},
    {"ranks": 16384, "certificate": 44, "peak GiB": 14.9},
]


def main() -> None:
    parser = command_line(__doc__, "scale")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 126])
    parser.add_argument("--ranks", action="store_true", help="by ranks; writes scale_ranks.json")
    args = options(parser, lambda c: measure_ranks(c["mesh"]) if "mesh" in c else measure(c))
    if args.ranks:
        meshes = [{"mesh": list(shape)} for shape in MESHES]
        rows = [{"ranks": math.prod(m["mesh"]), **m, **run_case(__file__, m, 600)} for m in meshes]
        show(rows, tuple(rows[0]))
        if args.json:
            save("scale_ranks", {"model": SMALL, "layers": 16, "before": RANKS_BEFORE, "now": rows})
        return
    rows = [{"layers": n, **run_case(__file__, {"layers": n}, 600)} for n in args.layers]
    show(rows, COLUMNS)
    if args.json:
        save("scale", {"model": LLAMA, "mesh": MESH, "before": BEFORE, "now": rows})


if __name__ == "__main__":
    main()
