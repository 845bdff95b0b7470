"""What the benchmarks share: cases in processes of their own, tables, and results with the
machine that they were measured on.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def command_line(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes: ``--json``, which writes ``results/<name>.json``,
    and ``--case``, which `run_case` gives.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help=f"write benchmarks/results/{name}.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser


def options(parser: argparse.ArgumentParser, measure: Callable[[Any], Any]) -> argparse.Namespace:
    """The options given; a process of `run_case` prints what ``measure`` finds of its case, and
    ends.
    """
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(json.loads(given.case))))
        raise SystemExit
    return given


def run_case(script: str, case: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """What ``script --case`` prints for the case, from a fresh process on one thread; ``{"failed":
    why}`` if late or on an error.

    Args:
        limit: seconds.
    """
    command = [sys.executable, script, "--case", json.dumps(case)]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit:g} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def on_processes(script: str, ranks: int) -> Any:
    """What the first rank of ``script --rank`` prints as JSON, from ``ranks`` processes of one
    group.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    of_all = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, script, "--rank"],
            env={**environment(), **of_all, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(ranks)
    ]
    printed = [rank.communicate()[0] for rank in started]
    if any(rank.returncode for rank in started):
        raise SystemExit("a rank failed")
    return json.loads(printed[0].splitlines()[-1])


def rows_of_ranks(
    script: str,
    doc: str | None,
    name: str,
    ranks: int,
    on_ranks: Callable[[], list[dict[str, Any]]],
    columns: Sequence[str],
    shown: Callable[[Any], Any] = lambda cell: cell,
) -> None:
    """A benchmark whose rows ``on_ranks`` finds on ``ranks`` processes of one group: run the
    processes, show the rows and, with ``--json``, write them.

    Args:
        shown: of a cell what the table shows.
    """
    parser = command_line(doc, name)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rows = on_ranks()
        if os.environ["RANK"] == "0":
            print(json.dumps(rows))
        return
    rows = on_processes(script, ranks)
    show([{column: shown(cell) for column, cell in row.items()} for row in rows], columns)
    if given.json:
        is_in_memory = os.environ.get("FTP_SHM") == "1"
        save(f"{name}_in_memory" if is_in_memory else name, {"rows": rows})


def environment() -> dict[str, str]:
    """That of a case's process: one thread, and ftp and the tests' models on its path."""
    paths = [str(ROOT), str(ROOT / "tests/support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as an aligned table."""
    text = [[_cell(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *text, strict=True)]
    for line in [list(columns), *text]:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def save(name: str, tables: Mapping[str, Any]) -> None:
    """Write ``results/<name>.json``: the tables, the date, the revision and the machine."""
    head = {**measured_at(), "machine": _machine(), "torch": version("torch")}
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**head, **tables}, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT)}")


def results(name: str) -> dict[str, Any]:
    """What ``results/<name>.json`` holds; empty where there is none."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_table(page: str, script: str, lines: Sequence[str]) -> None:
    """Put a Markdown table into a page of docs, between the two marks that name the script."""
    path, mark = ROOT / "docs" / page, f"<!-- {script} -->"
    before, _, after = path.read_text().split(mark + "\n")
    path.write_text("\n".join([before + mark, *lines, mark, after]))


def measured_at() -> dict[str, str]:
    """Today, and the revision."""
    return {"date": time.strftime("%Y-%m-%d"), "revision": _revision()}


def _revision() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu
        )
    except OSError:
        pass
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {"cpu": cpu, "cores": os.cpu_count(), "load": load, "python": platform.python_version()}
