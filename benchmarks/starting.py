"""Seconds from the end of ``import torch`` to the end of a train step's first call, on gloo ranks
of this machine, beside Megatron by hand: docs/starting.md.

    python benchmarks/starting.py [--json] [--ranks 2] [--heads N] [--rounds 5] [--before FOLDER]
        [--compile] [--peers "before again" "ftp again"]

Every start is in fresh processes, one thread each; the peers take turns. ``--before`` is another
checkout of ftp, to compare with. Megatron is left out where ranks do not divide its heads:
``--heads`` gives the decoder others. With ``--peers`` these and "ftp" are started, and ``--json``
keeps the rows of the others, with the revision that they are of. On a busy machine read processor
seconds.
"""

import argparse
import dataclasses
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = (
    "Megatron", "before", "before again", "ftp", "ftp again", "ftp from a file",
    "ftp from a file with its code",
)  # fmt: skip


def _start(case: dict[str, Any]) -> dict[str, Any]:
    """One rank's start: imports, model, first step."""
    import torch

    torch.set_num_threads(1)
    begun = time.perf_counter(), _processor_seconds()
    import torch.distributed as dist
    from peers import workloads

    work = _with_heads(workloads.WORKLOADS[case["workload"]], case["heads"])
    data = workloads.batch(work, 0)
    dist.init_process_group(
        "gloo", init_method=f"file://{case['meet']}", rank=case["rank"], world_size=case["ranks"]
    )
    met = time.perf_counter(), _processor_seconds()
    if case["peer"] == "Megatron":
        from peers import megatron

        loss = float(megatron.build(work, compiled=case["compile"])(data))
    else:
        loss = _ours(work, case, data)
    ended = time.perf_counter(), _processor_seconds()
    dist.destroy_process_group()
    made = {"loss": loss, "seconds": ended[0] - begun[0], "cpu": ended[1] - begun[1]}
    return {**made, "without meeting": ended[1] - met[1]}


def _with_heads(work: Any, heads: int) -> Any:
    """The workload with another number of heads; 0: its own."""
    return dataclasses.replace(
        work, cfg=dataclasses.replace(work.cfg, heads=heads or work.cfg.heads)
    )


def _processor_seconds() -> float:
    """Of this process and of those that it waited for, such as compilers."""
    return sum(os.times()[:4])


def _ours(work: Any, case: dict[str, Any], data: Any) -> float:
    from peers import ours
    from peers.workloads import module

    import ftp
    from ftp import P

    shape = (case["ranks"],)
    mesh = ftp.make_mesh(shape, ("tp",), device_type="cpu")
    params, specs, optimizer, train_step = ours.training(work, module(work))
    of_state = optimizer.specs(params, specs)
    # Revisions before the option was renamed and on by default.
    packs = {"pack": True} if "pack" in inspect.signature(ftp.spmd).parameters else {}

    def made(mesh: Any) -> Any:
        given = (specs, of_state, P())
        options = {"donate": (0, 1), "compile": case["compile"], **packs}
        return ftp.spmd(train_step, mesh, given, given, **options)

    params = ftp.device_put(params, mesh, specs)
    if case["peer"] == "save":
        lowered = made(mesh).lower(params, optimizer.init(params), data)
        compiled = lowered.compile()
        if not case["rank"]:
            lowered.save(case["file"])
            compiled.save(f"{case['file']} with code")
        return 0.0
    if case["peer"] == "ftp from a file with its code":
        step = ftp.load_program(f"{case['file']} with code", mesh, trust_code=True)
    else:
        is_from_file = case["peer"] == "ftp from a file"
        step = ftp.load_program(case["file"], mesh) if is_from_file else made(mesh)
    return float(step(params, optimizer.init(params), data)[2])


def start(peer: str, args: argparse.Namespace, folder: str, turn: int) -> list[dict[str, Any]]:
    """What each rank measured."""
    is_before = peer.startswith("before")
    root = Path(args.before) if is_before else ROOT
    paths = [str(root), str(ROOT / "tests/support"), str(ROOT / "benchmarks")]
    cache = tempfile.mkdtemp(dir=folder)
    if peer.endswith("again"):
        cache = f"{folder}/{'before' if is_before else 'now'}"
        Path(cache).mkdir(exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    env |= {"FTP_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has bytecode
    case = {
        "peer": peer,
        "workload": args.workload,
        "ranks": args.ranks,
        "heads": args.heads,
        "meet": f"{cache}/meet{turn}",
        "file": f"{folder}/step.ftp",
        "compile": args.compile,
    }
    command = [sys.executable, "-W", "ignore", __file__, "--case"]
    processes = [
        subprocess.Popen(
            [*command, json.dumps({**case, "rank": rank})],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(args.ranks)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{peer} failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workload", default="W2", choices=("W2", "W3"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(_start(json.loads(args.case))))
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from record import results, save, show

    sys.path.insert(0, str(ROOT / "tests/support"))
    from peers.workloads import WORKLOADS

    cfg = _with_heads(WORKLOADS[args.workload], args.heads).cfg
    no_before = dict.fromkeys(("before", "before again"), not args.before)
    left_out = {
        **no_before,
        "Megatron": cfg.heads % args.ranks,
        "ftp from a file with its code": not args.compile,
    }
    asked = {*args.peers, "ftp"}
    peers = [peer for peer in PEERS if peer in asked and not left_out.get(peer)]
    found: dict[str, list[list[dict[str, Any]]]] = {peer: [] for peer in peers}
    with tempfile.TemporaryDirectory() as folder:
        # The file, and what a second start finds in the cache.
        is_saved = any("file" in peer for peer in peers)
        for peer in (*["save"] * is_saved, *(peer for peer in peers if peer.endswith("again"))):
            start(peer, args, folder, -1)
        for turn in range(args.rounds):
            for peer in peers:
                found[peer].append(start(peer, args, folder, turn))
    rows = [_row(peer, turns, found["ftp"]) for peer, turns in found.items()]
    show(rows, list(rows[0]))
    if args.json:
        case = {"workload": args.workload, "ranks": args.ranks, "rounds": args.rounds}
        case |= {"heads": cfg.heads}
        compiled = "_compiled" if args.compile else ""
        name = f"starting_{args.ranks}{compiled}"
        before = results(name) if len(asked) < len(PEERS) else {}
        known = [{"of": before["revision"], **row} for row in before.get("starts", ())]
        of = {row["peer"]: row for row in [*known, *rows]}
        rows = [of[peer] for peer in PEERS if peer in of]
        save(name, {**case, "starts": rows})


def _row(peer: str, turns: list[list[dict[str, Any]]], ours: list[Any]) -> dict[str, Any]:
    cpu = [statistics.mean(rank["cpu"] for rank in ranks) for ranks in turns]
    own = [statistics.mean(rank["cpu"] for rank in ranks) for ranks in ours]
    low, _, high = statistics.quantiles(cpu, n=4) if len(cpu) > 1 else (cpu[0],) * 3
    return {
        "peer": peer,
        "CPU s a rank": round(statistics.median(cpu), 3),
        "quartiles": f"{low:.2f} to {high:.2f}",
        "of ftp": round(statistics.median(a / b for a, b in zip(cpu, own, strict=True)), 2),
        "wall s": round(statistics.median(max(r["seconds"] for r in t) for t in turns), 2),
        "loss": round(turns[0][0]["loss"], 4),
    }


if __name__ == "__main__":
    main()
