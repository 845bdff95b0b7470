"""Seconds of a train step, sharded by ftp and by its peers: two gloo ranks on this machine, one
thread each, float32, AdamW included.

    python benchmarks/speed.py [--json] [--workloads W1 W2 W3] [--rounds 7] [--peers ...] [--eager]
    [--jax-python PYTHON]

Every peer runs in processes of its own that stay while the peers take turns, a few steps each;
medians and quartiles are over all steps, ratios over the turns, each against the anchor's in the
same round. With ``--at-once`` fewer peers share the machine's memory, the anchor in each set. A
peer's first losses are compared with those of one device in float64. "of floor" is a peer's time
over that of the floor (``peers/floor.py``), which takes turns with them. A peer that cannot run, or
whose first steps take longer than ``--limit`` seconds, is listed with the reason. On a quiet
machine of two cores the whole takes about twenty minutes.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support"), str(ROOT / "benchmarks")]

from peers import worker, workloads  # noqa: E402
from picture import draw  # noqa: E402
from record import measured_at, results, save, show, write_table  # noqa: E402

RANKS = 2
FIRST = 3  # losses that are compared
TOLERANCE = {"W1": 1e-5, "W2": 1e-4, "W3": 1e-4}  # relative: three steps in float32 beside float64


class Team:
    """The processes of one peer on one workload, by the code of a checkout."""

    def __init__(
        self, peer: str, workload: str, folder: str, jax_python: str, checkout: Path = ROOT
    ):
        self.name = peer
        ranks = 1 if peer in worker.ALONE else RANKS
        python, file = (
            (jax_python, "jax_worker.py") if peer in worker.JAX else (sys.executable, "worker.py")
        )
        script = str(checkout / "benchmarks/peers" / file)
        paths = [str(checkout / part) for part in ("", "tests/support", "tests", "benchmarks")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        stem = f"{folder}/{peer.replace(' ', '_')}"
        env |= {
            "TORCHINDUCTOR_CACHE_DIR": f"{stem}.cache",
            "FTP_CACHE": f"{stem}.ftp",
        }  # nothing is found compiled or measured
        spec: dict[str, Any] = {
            "peer": peer,
            "workload": workload,
            "ranks": ranks,
            "meet": f"{stem}.meet",
        }
        if peer in worker.JAX:
            work = workloads.WORKLOADS[workload]
            np.savez(f"{stem}.npz", **workloads.as_arrays(work))
            sizes = (
                None
                if work.cfg is None
                else {"heads": work.cfg.heads, "dim": work.cfg.dim, "layers": work.cfg.layers}
            )
            spec |= {"data": f"{stem}.npz", "sizes": sizes, "port": free_port()}
        self.log = open(f"{stem}.log", "w+")  # noqa: SIM115
        self.processes = [
            subprocess.Popen(
                [python, script, json.dumps({**spec, "rank": rank})],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
            )
            for rank in range(ranks)
        ]

    def ask(self, limit: float, **question: Any) -> list[dict[str, Any]]:
        """Each rank's answer, within ``limit`` seconds."""
        late = threading.Timer(limit, self._kill)
        late.start()
        try:
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
            answers = []
            for process in self.processes:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError("ended")
                answers.append(json.loads(line))
        except (RuntimeError, OSError):
            self.log.seek(0)
            said = " ".join(self.log.read().strip().splitlines()[-3:])[-400:]
            raise RuntimeError(
                f"no answer within {limit:g} s" if late.finished.is_set() else said
            ) from None
        finally:
            late.cancel()
        return answers

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        self._kill()
        for process in self.processes:
            process.wait()
        self.log.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def measure(
    workload: str,
    peers: list[str],
    rounds: int,
    steps: int,
    anchor: str,
    limit: float,
    jax_python: str,
) -> list[dict[str, Any]]:
    """A row per peer; the peers take turns, ``steps`` steps each time."""
    work = workloads.WORKLOADS[workload]
    expected = workloads.reference(work, FIRST)
    rows: dict[str, dict[str, Any]] = {peer: {"peer": peer} for peer in peers}
    seconds: dict[str, list[list[float]]] = {peer: [] for peer in peers}
    cpu: dict[str, list[float]] = {peer: [] for peer in peers}
    teams: dict[str, Team] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for peer in peers:  # one after another: first steps do not disturb each other
                try:
                    began = time.perf_counter()
                    teams[peer] = Team(peer, workload, folder, jax_python)
                    answer = teams[peer].ask(limit, first=FIRST)[0]
                    teams[peer].ask(limit, run=max(2, steps // 4))
                    print(
                        f"{workload} {peer}: ready after {time.perf_counter() - began:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
                except (RuntimeError, OSError) as e:
                    rows[peer]["failed"] = str(e)
                    print(f"{workload} {peer}: {e}", file=sys.stderr, flush=True)
                    if peer in teams:
                        teams.pop(peer).close()
                    continue
                rows[peer] |= {
                    key: answer[key] for key in ("first", "collectives", "kinds", "bytes")
                }
                if peer == worker.FLOOR:
                    continue
                off = max(
                    abs(a - b) / abs(b) for a, b in zip(answer["losses"], expected, strict=True)
                )
                rows[peer] |= {"losses agree": off < TOLERANCE[workload], "loss off by": off}
            for at in range(rounds):
                turn = (
                    list(teams)[at % max(1, len(teams)) :] + list(teams)[: at % max(1, len(teams))]
                )
                for peer in turn:
                    answers = teams[peer].ask(limit, run=steps)
                    seconds[peer].append(answers[0]["seconds"])
                    cpu[peer].append(statistics.fmean(a["cpu"] for a in answers))
                    rows[peer]["peak_mib"] = max(a["peak_mib"] or 0.0 for a in answers)
                print(".", end="", file=sys.stderr, flush=True)
        finally:
            for team in teams.values():
                team.close()
    for peer in teams:
        every = [s for turn in seconds[peer] for s in turn]
        low, middle, high = statistics.quantiles(every, n=4)
        rows[peer] |= {
            "ms": 1e3 * middle,
            "quartiles": [round(1e3 * low, 3), round(1e3 * high, 3)],
            "least": 1e3 * min(every),
        }
        rows[peer] |= {"cpu ms": 1e3 * statistics.median(cpu[peer])}
        medians = {name: [statistics.median(turn) for turn in seconds[name]] for name in teams}
        for name, column in ((anchor, "ratio"), (worker.FLOOR, "of floor")):
            if name in teams:
                shares = [a / b for a, b in zip(medians[peer], medians[name], strict=True)]
                rows[peer][column] = statistics.median(shares)
        if anchor in teams:
            rows[peer]["least ratio"] = rows[peer]["least"] / (
                1e3 * min(s for turn in seconds[anchor] for s in turn)
            )
    return list(rows.values())


COLUMNS = (
    "peer",
    "ratio",
    "of floor",
    "ms",
    "quartiles",
    "least",
    "least ratio",
    "cpu ms",
    "first",
    "peak_mib",
    "collectives",
    "bytes",
)
COLUMNS += ("losses agree", "failed")

PAGE = {
    "ratio": "ratio",
    "of floor": "of floor",
    "ms": "ms",
    "quartiles": "quartiles, ms",
    "least": "least, ms",
    "cpu ms": "CPU ms a rank",
    "first": "first step, s",
    "peak_mib": "peak MiB",
    "collectives": "collectives",
    "bytes": "bytes",
}  # columns of docs/speed.md
PAIRS = {
    "ftp, of Megatron by hand, eager": ("ftp", "Megatron"),
    "ftp, of DTensor": ("ftp", "DTensor"),
    "ftp compiled, of P4": ("ftp compiled", "P4"),
    "ftp compiled, of Megatron compiled per module": ("ftp compiled", "Megatron compiled"),
    "ftp compiled, of DTensor compiled": ("ftp compiled", "DTensor compiled"),
    "ftp compiled, of JAX over gloo": ("ftp compiled", "JAX over gloo"),
    "ftp compiled in memory, of P4": ("ftp compiled in memory", "P4"),
    "ftp compiled in memory, of JAX in one process": ("ftp compiled in memory", "JAX"),
}


def page(found: Mapping[str, Any]) -> list[str]:
    """The tables of docs/speed.md."""
    machine, done = found["machine"], [w for w in workloads.WORKLOADS if found.get(w)]
    lines = [f"Measured on {machine['cores']} cores of {machine['cpu']}."]
    for name in done:
        at = found["measured"][name]
        lines += [
            "",
            f"{name} on {at['date']} at {at['revision']}, relative to {found['anchor']} (medians of"
            f" {found['rounds']} rounds; quartiles over all steps):",
            "",
            f"| | {' | '.join(PAGE.values())} |",
            f"|{'---|' * (len(PAGE) + 1)}",
        ]
        lines += [
            f"| {row['peer']} | {' | '.join(_text(row.get(column)) for column in PAGE)} |"
            for row in found[name]
        ]
    ratios = {name: {row["peer"]: row.get("ratio") for row in found[name]} for name in done}
    lines += ["", f"| | {' | '.join(done)} |", f"|{'---|' * (len(done) + 1)}"]
    for text, (one, other) in PAIRS.items():
        pairs = [(ratios[name].get(one), ratios[name].get(other)) for name in done]
        shares = [f"{a / b:.2f}" if a and b else "" for a, b in pairs]
        lines.append(f"| {text} | {' | '.join(shares)} |")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(f"{x:.3g}" if x < 100 else f"{x:.0f}" for x in value)
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return "" if value is None else f"{value:,}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*worker.PEERS, *worker.JAX]
    parser.add_argument(
        "--json",
        action="store_true",
        help="write benchmarks/results/speed.json, and the tables and the picture of docs/speed.md;"
        " workloads that were not run keep their figures",
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=workloads.WORKLOADS, default=list(workloads.WORKLOADS)
    )
    parser.add_argument("--peers", nargs="+", choices=every, default=every)
    parser.add_argument(
        "--eager", action="store_true", help="only peers that compile nothing, relative to Megatron"
    )
    parser.add_argument(
        "--anchor", choices=every, default="P4", help="the peer that ratios refer to"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="about how long a turn takes on a quiet machine of two cores",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=6,
        help="peers whose processes live at a time, beside the anchor and the floor",
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds that a peer may take for one answer"
    )
    parser.add_argument(
        "--jax-python", default=sys.executable, help="a Python that has jax; by default this one"
    )
    args = parser.parse_args()
    if args.eager:
        args.peers, args.anchor = (
            [
                peer
                for peer in args.peers
                if "compiled" not in peer and peer not in ("P4", *worker.JAX)
            ],
            "Megatron",
        )
    tables = {}
    for name in args.workloads:
        per_turn = max(2, int(args.seconds / {"W1": 0.001, "W2": 0.12, "W3": 0.6}[name]))
        always = [peer for peer in {args.anchor: 0, worker.FLOOR: 0} if peer in args.peers]
        others = [peer for peer in args.peers if peer not in always]
        sets = [others[i : i + args.at_once] for i in range(0, len(others), args.at_once)] or [[]]
        rows: list[dict[str, Any]] = []
        for chosen in sets:
            found = measure(
                name,
                [*always, *chosen],
                args.rounds,
                per_turn,
                args.anchor,
                args.limit,
                args.jax_python,
            )
            rows += [row for row in found if row["peer"] not in always or not rows]
        tables[name] = rows
        print(
            f"\n{name}: the least number of collectives is {workloads.WORKLOADS[name].collectives}"
        )
        show(rows, COLUMNS)
        if args.json:
            known = {k: results("speed").get(k) for k in (*workloads.WORKLOADS, "measured")}
            measured = (known.pop("measured") or {}) | {name: measured_at()}
            known |= {"measured": measured, **tables}
            save("speed", {"ranks": RANKS, "rounds": args.rounds, "anchor": args.anchor, **known})
            draw("speed")
            write_table("speed.md", "speed.py", page(results("speed")))


if __name__ == "__main__":
    main()
