"""A train step on this machine's GPUs: beside plain torch on one, with and without a CUDA graph, on
ranks that share one, and over NCCL.

python benchmarks/gpu.py [--json]                            # a decoder of a billion parameters in
bfloat16 python benchmarks/gpu.py --peers "torch compiled" "ftp compiled"    # what is left out for
want of time, as each command has 580 s python benchmarks/gpu.py --model tiny --device cpu --peers
"torch" "ftp"

Times are of blocks of steps between two waits for the GPU. Peaks are of those steps alone; what
recordings keep counts as reserved. The first losses of all peers must agree. It exits with 1 where
a peer failed.

MFU counts the multiplications of products and attention as the program has them, over the device's
dense peak rate (`ftp.Hardware`). Gaps are the share of a step in which no kernel runs, from torch's
profiler; issuing is what a call takes before it returns. What the report says ("report ms", "report
GiB") is of the eager step, on the machine as `ftp.calibrate` finds it.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import record  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ftp
from ftp import P

MODELS: dict[str, tuple[dict[str, int], int, int]] = {
    "1b": (
        {"vocab": 32768, "dim": 2048, "layers": 20, "heads": 16, "hidden": 5632},
        4,
        2048,
    ),  # config, batch, tokens of a sequence
    "400m": ({"vocab": 32768, "dim": 2048, "layers": 6, "heads": 16, "hidden": 5632}, 4, 2048),
    "tiny": ({"vocab": 64, "dim": 32, "layers": 1, "heads": 2, "hidden": 48}, 2, 16),
}
# Of one process; the first compiled one of plain torch is what the others are compared with.
PEERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch compiled": {"compile": True},
    "torch reduce-overhead": {"compile": True, "mode": "reduce-overhead"},
    "ftp": {},
    "ftp graph": {"cuda_graph": True},
    "ftp compiled": {"compile": True},
    "ftp compiled graph": {"compile": True, "cuda_graph": True},
}
# Of several ranks that cut the weights, by Megatron's plan or with sequence parallelism.
RANKED: dict[str, dict[str, Any]] = {
    "ftp": {},
    "ftp compiled": {"compile": True},
    "ftp compiled graph": {"compile": True, "cuda_graph": True},
    "ftp compiled async": {"compile": True, "async_tp": True},
    "ftp compiled async graph": {"compile": True, "async_tp": True, "cuda_graph": True},
}
COLUMNS = [
    *(
        "peer",
        "ranks",
        "backend",
        "ms",
        "report ms",
        "over torch compiled",
        "MFU",
        "gaps",
        "issuing ms",
        "first s",
    ),
    *("peak GiB", "report GiB", "reserved GiB", "loss", "failed"),
]
LR = 1e-4
BLOCK = 5  # steps between two waits for the GPU
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float64}
# How far first losses may be apart, as a share of them: in bfloat16, in float64.
AGREE = {"cuda": 0.01, "cpu": 1e-9}
LONGEST = 300.0  # seconds for a case


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One peer's step: medians over blocks of steps, after those in which it is compiled and
    recorded.
    """
    device, (config, batch, seq) = case["device"], MODELS[case["model"]]
    dtype = DTYPES[device]
    began = time.perf_counter()
    data = _batches(config["vocab"], batch, seq)
    make = _of_torch if case["peer"].startswith("torch") else _of_ftp
    run, flops, report = make(case, config, dtype, data)
    losses = [float(run())]
    _wait(device)
    first = time.perf_counter() - began
    for _ in range(4):
        run()
    _wait(device)
    if device == "cuda":  # copies of the set-up are no part of a step's peak
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times, issuing = [], []
    for _ in range(max(1, case["steps"] // BLOCK)):
        start = time.perf_counter()
        for _ in range(BLOCK):
            run()
        issuing.append((time.perf_counter() - start) / BLOCK)
        _wait(device)
        times.append((time.perf_counter() - start) / BLOCK)
    seconds = statistics.median(times)
    rate = _rate(device, dtype)
    found = {
        "ms": seconds * 1e3,
        "MFU": flops / seconds / rate if flops and rate else None,
        "issuing ms": statistics.median(issuing) * 1e3,
        "first s": first,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "reserved GiB": torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else None,
        "loss": losses[0],
    }
    found["gaps"] = (
        _gaps(run, is_recorded="graph" in case["peer"] or "reduce" in case["peer"])
        if device == "cuda"
        else None
    )
    return {**found, **(report() if case["peer"] == "ftp" and case["ranks"] == 1 else {})}


def _batches(vocab: int, batch: int, seq: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, vocab, (batch, seq), generator=generator)
    return [(draw(), draw()) for _ in range(4)]


def _model(config: dict[str, int], dtype: torch.dtype, device: str) -> Any:
    import models  # type: ignore[import-not-found]

    return models.build(models.LlamaConfig(**config), dtype=dtype, device=device)


Peer = tuple[
    Callable[[], Any], float, Callable[[], dict[str, float]]
]  # a step, its multiplications, what a report says of it


def _of_torch(
    case: dict[str, Any], config: dict[str, int], dtype: torch.dtype, data: Sequence[Any]
) -> Peer:
    model = _model(config, dtype, case["device"])
    options = PEERS[case["peer"]]

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    forward = (
        torch.compile(loss_of, mode=options.get("mode")) if options.get("compile") else loss_of
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    placed = [tuple(x.to(case["device"]) for x in pair) for pair in data]
    turn = iter(range(1 << 60))

    def run() -> torch.Tensor:
        if options.get("mode"):
            torch.compiler.cudagraph_mark_step_begin()
        loss = forward(*placed[next(turn) % len(placed)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run, _flops(config, dtype, data), dict


def _train_step(fn: Any, opt: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            tokens, targets = batch
            return F.cross_entropy(fn(params, tokens).flatten(0, 1), targets.flatten())

        grads, loss = torch.func.grad_and_value(loss_fn)(params)
        params, state = opt.update(grads, state, params)
        return params, state, loss

    return step


def _of_ftp(
    case: dict[str, Any], config: dict[str, int], dtype: torch.dtype, data: Sequence[Any]
) -> Peer:
    import models  # type: ignore[import-not-found]

    options = {**(RANKED if case["ranks"] > 1 else PEERS)[case["peer"]]}
    mesh = ftp.make_mesh((case["ranks"],), ("tp",), device_type=case["device"])
    cfg: Any = models.LlamaConfig(**config)
    constraints = (
        models.sequence_parallel() if case.get("sequence") or options.get("async_tp") else None
    )
    model = _model(config, dtype, case["device"])
    fn, full = ftp.functionalize(model, constraints=constraints)
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=LR, fused=True)
    specs = ftp.plan(full, models.specs(models.cuts(cfg), tp="tp"))
    of_state = opt.specs(full, specs)
    params, state = (
        ftp.device_put(full, mesh, specs),
        ftp.device_put(opt.init(full), mesh, of_state),
    )
    del full
    for own in model.parameters():  # fn keeps the model, whose parameters no step reads
        own.data = own.data.new_empty(0)
    placed = [ftp.device_put(pair, mesh, P()) for pair in data]
    step = ftp.spmd(
        _train_step(fn, opt),
        mesh,
        (specs, of_state, P()),
        (specs, of_state, P()),
        donate=(0, 1),
        **options,
    )
    turn, held = iter(range(1 << 60)), [params, state]

    def run() -> torch.Tensor:
        held[0], held[1], loss = step(*held, placed[next(turn) % len(placed)])
        return loss

    def report() -> dict[str, float]:
        lowered = step.lower(*held, placed[0])
        seconds = 0.005 if case["model"] == "tiny" else 0.05
        hardware = ftp.calibrate(device_type=case["device"], dtypes=(dtype,), seconds=seconds)
        return {"report GiB": lowered.memory / 2**30, "report ms": lowered.cost(hardware) * 1e3}

    return run, _flops(config, dtype, data, case["ranks"]), report


def _flops(
    config: dict[str, int], dtype: torch.dtype, data: Sequence[Any], ranks: int = 1
) -> float:
    """Of a rank's step."""
    import models  # type: ignore[import-not-found]

    cfg: Any = models.LlamaConfig(**config)
    fn, params = ftp.functionalize(models.build(cfg, dtype=dtype, device="meta"))
    batch = tuple(x.to("meta") for x in data[0])
    mesh = ftp.AbstractMesh((ranks,), ("tp",), device_type="cuda")
    specs = ftp.plan(params, models.specs(models.cuts(cfg), tp="tp"))
    return ftp.shard(models.lm_loss(fn), mesh, specs).lower(params, batch).cost().flops


def _rate(device: str, dtype: torch.dtype) -> float | None:
    """The GPU's peak; None where it is not known."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name().lower()
    known = next(
        (
            make
            for key, make in (("h100", "h100"), ("h200", "h200"), ("b200", "b200"))
            if key in name
        ),
        None,
    )
    return getattr(ftp.Hardware, known)().flops_of(dtype) if known else None


def _gaps(run: Callable[[], Any], is_recorded: bool, steps: int = 3) -> float | None:
    """The share of the time from the first kernel's start to the last one's end in which none
    runs; None where that was not seen.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    events = profiler.events() or []
    share = idle_share(
        [(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"]
    )
    # A trace may leave out a graph's kernels and hold the copies around it.
    return None if is_recorded and share is not None and share > 0.5 else share


def idle_share(spans: Sequence[tuple[float, float]]) -> float | None:
    """
    >>> idle_share([(0, 1), (3, 4), (0.5, 2)])
    0.25
    """
    if not spans:
        return None
    spans = sorted(spans)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0]) if until > spans[0][0] else 0.0


def _is_near(row: dict[str, Any], said: str, measured: str, within: float) -> bool:
    a, b = row.get(said), row.get(measured)
    return a is None or b is None or abs(a - b) <= within * b


def missed(row: dict[str, Any]) -> list[str]:
    """What a row is held to and misses.

    >>> missed({"peer": "ftp compiled", "ms": 2.0, "over torch compiled": 1.1, "report ms": 2.6})
    ['at most 1.02 of torch compiled', "the report's time within 25 % of it"]
    """
    is_slow = row["peer"] == "ftp compiled" and row.get("over torch compiled", 0.0) > 1.02
    found = ["at most 1.02 of torch compiled"] if is_slow else []
    if not _is_near(row, "report GiB", "peak GiB", 0.10):
        found.append("the report's peak within 10 % of it")
    if not _is_near(row, "report ms", "ms", 0.25):
        found.append("the report's time within 25 % of it")
    return found


def disagreement(row: dict[str, Any], earlier: Sequence[dict[str, Any]], device: str) -> str:
    """How a row's first loss differs from that of the first row of its model; "" if it does not.

    >>> first = {"model": "1b", "peer": "torch", "loss": 10.0}
    >>> disagreement({"model": "1b", "loss": 10.5}, [first], "cuda")
    'its first loss is 10.5, that of torch 10'
    """
    first = next((r for r in earlier if r["model"] == row["model"] and "loss" in r), None)
    if (
        first is None
        or "loss" not in row
        or abs(row["loss"] - first["loss"]) <= AGREE[device] * abs(first["loss"])
    ):
        return ""
    return f"its first loss is {row['loss']:g}, that of {first['peer']} {first['loss']:g}"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def on_ranks(case: dict[str, Any]) -> dict[str, Any]:
    """`measure` on this process of a launched case; ranks over gloo may share a GPU."""
    if case["backend"] == "gloo":
        dist.init_process_group("gloo")
    found = measure(case)
    ftp.destroy_process_group()
    return found


def launched(case: dict[str, Any], limit: float) -> dict[str, Any]:
    """What the first of the case's ranks prints."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={case['ranks']}",
        __file__,
    ]
    try:
        done = subprocess.run(
            [*command, "--case", json.dumps(case)],
            env=record.environment(),
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        errors = [
            line for line in done.stderr.splitlines() if "Error: " in line
        ] or done.stderr.strip().splitlines()
        return {"failed": errors[0][:200] if errors else f"exit {done.returncode}"}
    return json.loads(lines[0])


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    common = {"model": args.model, "device": args.device, "steps": args.steps}
    found = [
        {"peer": peer, "ranks": 1, "backend": "", **common}
        for peer in PEERS
        if args.device == "cuda" or "graph" not in peer
    ]
    plain = [peer for peer in RANKED if "graph" not in peer and "async" not in peer]
    # Two ranks on one device: whether it works, rather than how fast; gloo copies through the host.
    found += [
        {"peer": peer, "ranks": 2, "backend": "gloo", **common, "model": "tiny"} for peer in plain
    ]
    for ranks in (n for n in (2, 4, 8) if args.device == "cuda" and n <= torch.cuda.device_count()):
        found += [
            {"peer": peer, "ranks": ranks, "backend": "nccl", "sequence": True, **common}
            for peer in RANKED
        ]
    return [case for case in found if not args.peers or case["peer"] in args.peers]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/gpu.json")
    parser.add_argument("--model", choices=list(MODELS), default="1b")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--peers", nargs="*", choices=sorted({*PEERS, *RANKED}), default=[])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--bars", action="store_true", help="exit with 1 where a row misses what it is held to"
    )
    parser.add_argument("--limit", type=float, default=580.0, help="seconds for all")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case = json.loads(args.case)
        found = on_ranks(case) if case["ranks"] > 1 else measure(case)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(found), flush=True)
        return
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + args.limit
    for case in cases(args):
        limit = min(LONGEST, until - time.monotonic())
        if limit < 1:
            found = {"failed": "no time was left for it: give it as --peers"}
        else:
            found = (
                launched(case, limit)
                if case["ranks"] > 1
                else record.run_case(__file__, case, limit)
            )
        row = {**{k: case[k] for k in ("peer", "ranks", "backend", "model")}, **found}
        if why := disagreement(row, rows, args.device):
            row["failed"] = why
        rows.append(row)
        base = next((r["ms"] for r in rows if r["peer"] == "torch compiled" and "ms" in r), None)
        if base and "ms" in found and case["ranks"] == 1:
            row["over torch compiled"] = found["ms"] / base
        print(json.dumps(row), flush=True)
    shown = [{k: "" if v is None else v for k, v in row.items()} for row in rows]
    record.show(shown, [c for c in COLUMNS if any(row.get(c, "") != "" for row in shown)])
    if args.json:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        record.save("gpu", {"model": args.model, "device": name, "rows": rows})
    misses = [
        f"{row['peer']} misses: {bar}" for row in rows if row["ranks"] == 1 for bar in missed(row)
    ]
    print(*misses, sep="\n", end="\n" if misses else "")
    if any(row.get("failed") for row in rows) or (args.bars and misses):
        sys.exit(1)


if __name__ == "__main__":
    main()
