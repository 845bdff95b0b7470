"""Two revisions beside each other: seconds to plan, to report Llama-3.1-405B's train step, and of a
train step of W1 to W3 on two gloo ranks.

    git worktree add --detach ../before f0ea1ce
    python benchmarks/revisions.py ../before [--rounds 5] [--json]

Each checkout runs its own scripts, with the options that were best in its time, in turns; each
planning and each report is a fresh process on one thread, in seconds of the processor. A train step
is in seconds of the clock. Ratios are this checkout over the other, by round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import ROOT, save, show
from speed import Team

STEPS = {"W1": 200, "W2": 20, "W3": 4}  # in a turn
PLANNED = {
    f"{layers} layers": ("planning.py", {"layers": layers, "axes": {"rep": 2, "dp": 2, "tp": 4}})
    for layers in (2, 8, 32)
}
REPORTED = {"405B": ("scale.py", {"layers": 126})}
PARTS = ("trace", "make_plan", "partition", "memory", "cost", "total")


def run(checkout: Path, script: str, case: dict[str, Any]) -> dict[str, float]:
    """What a checkout's script prints for a case."""
    paths = os.pathsep.join(str(checkout / part) for part in ("", "tests/support", "tests"))
    done = subprocess.run(
        [sys.executable, str(checkout / "benchmarks" / script), "--case", json.dumps(case)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(cases: dict[str, Any], other: Path, rounds: int) -> list[dict[str, Any]]:
    """A row per case and part."""
    rows = []
    for name, (script, case) in cases.items():
        runs: list[tuple[dict[str, float], dict[str, float]]] = []
        for at in range(rounds):
            both = [other, ROOT] if at % 2 else [ROOT, other]
            found = {checkout: run(checkout, script, case) for checkout in both}
            runs.append((found[other], found[ROOT]))
        for part in PARTS:
            if all(part in before for before, _ in runs):
                rows.append(row(f"{name}, {part}", [(b[part], a[part]) for b, a in runs]))
                show(rows[-1:], ("what", "before", "after", "ratio"))
    return rows


def row(what: str, pairs: list[tuple[float, float]], scale: float = 1.0) -> dict[str, Any]:
    before, after = (statistics.median(column) * scale for column in zip(*pairs, strict=True))
    ratios = sorted(a / b for b, a in pairs)
    return {
        "what": what,
        "before": round(before, 3),
        "after": round(after, 3),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def steps(workload: str, peer: str, other: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of a train step; the two teams' processes take turns."""
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        teams = [
            Team(peer, workload, folder, sys.executable, checkout)
            for folder, checkout in ((before, other), (after, ROOT))
        ]
        try:
            for team in teams:
                team.ask(300.0, first=3)
                team.ask(300.0, run=max(2, STEPS[workload] // 4))
            pairs = []
            for at in range(rounds):
                turn = teams[::-1] if at % 2 else teams
                said = {team: team.ask(300.0, run=STEPS[workload])[0] for team in turn}
                pairs.append(tuple(statistics.median(said[team]["seconds"]) for team in teams))
        finally:
            for team in teams:
                team.close()
    return row(f"{workload}, {peer}, ms", pairs, 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a checkout of the other revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    other = args.other.resolve()
    rows = []
    for workload in STEPS:
        for peer in ("ftp", "ftp compiled"):
            rows.append(steps(workload, peer, other, 2 * args.rounds))
            show(rows[-1:], ("what", "before", "after", "ratio"))
    rows += in_turns(PLANNED, other, args.rounds)
    rows += in_turns(REPORTED, other, max(1, args.rounds // 2))
    if args.json:
        revision = subprocess.run(
            ["git", "describe", "--always"], cwd=other, capture_output=True, text=True, check=True
        ).stdout.strip()
        save("revisions", {"before": revision, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
