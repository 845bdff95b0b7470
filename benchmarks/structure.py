"""Figures of the tree: ``python benchmarks/structure.py [CHECKOUT ...]`` prints a column for
each checkout.
"""

import argparse
import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path

LONG, WIDE, REPEATS = 450, 100, 5  # lines of a file, columns of a line, timed imports

OF_RUNNING = """
import json, time, torch
start = time.perf_counter()
import ftp
seconds = time.perf_counter() - start
import importlib
try:
    RULES = importlib.import_module("ftp.rules.own").RULES
except ModuleNotFoundError:  # a checkout whose package of rules registers them
    importlib.import_module("ftp.rules")
    RULES = importlib.import_module("ftp.rules.registry").RULES
# A rule of one line is a text or a call of a short form. A function of the op's own is registered
# by the decorator ``rule``; what another function registers counts only if that function
# is called for several ops.
makers = [e.__qualname__.split(".")[0] if callable(e) else "" for e in RULES.values()]
lines = [m == "" or m != "rule" and makers.count(m) > 1 for m in makers]
named = [getattr(ftp, n) for n in ftp.__all__ if n != "__version__"]
docs = [(n.__doc__ or "") for n in named]
print(json.dumps({
    "seconds": seconds, "rules": len(lines), "one line": sum(lines),
    "public names": len(ftp.__all__),
    "documented": sum(map(bool, docs)), "with an example": sum(">>>" in d for d in docs),
}))
"""


def modules(package: Path) -> dict[str, Path]:
    found = {
        ".".join(("ftp", *p.relative_to(package).with_suffix("").parts)): p
        for p in package.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def entry(module: str) -> str:
    """The file or package at the root of ``ftp`` that a module belongs to."""
    return module.split(".")[1] if "." in module else "ftp"


def arrows(package: Path) -> set[tuple[str, str]]:
    """Which entries of the root import which others."""
    known, found = modules(package), set()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [t if t in known else node.module for t in inner]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            found |= {(entry(name), entry(t)) for t in targets if t.split(".")[0] == "ftp"}
    return {(a, b) for a, b in found if a != b}


def figures(checkout: Path) -> dict[str, str]:
    """The figures of one checkout."""
    package = checkout / "ftp"
    files = {str(p.relative_to(package)): p.read_text().splitlines() for p in package.rglob("*.py")}
    largest = max(files, key=lambda name: len(files[name]))
    command = [sys.executable, "-c", OF_RUNNING]
    runs = [
        json.loads(
            subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout
        )
        for _ in range(REPEATS)
    ]
    run = runs[0]
    return {
        "entries at the root": str(sum(p.name != "__pycache__" for p in package.iterdir())),
        "imports between entries": str(len(arrows(package))),
        "files": str(len(files)),
        "lines": str(sum(map(len, files.values()))),
        f"files above {LONG} lines": str(sum(len(lines) > LONG for lines in files.values())),
        "largest file": f"{largest}, {len(files[largest])} lines",
        f"lines above {WIDE} columns": str(
            sum(len(x) > WIDE for lines in files.values() for x in lines)
        ),
        "lines of Rule and the registry": str(
            sum(len(files.get(f"rules/{name}.py", ())) for name in ("rule", "registry"))
        ),
        "import, ms over torch": f"{1000 * statistics.median(r['seconds'] for r in runs):.0f}",
        "ops whose rule is one line": f"{run['one line']} of {run['rules']}",
        "public names with a docstring": f"{run['documented']} of {run['public names']}",
        "public names with an example": str(run["with an example"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "checkouts", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]]
    )
    given = parser.parse_args().checkouts
    columns = [figures(checkout.resolve()) for checkout in given]
    print(
        f"| | {' | '.join(checkout.name or '.' for checkout in given)}"
        f" |\n|{'---|' * (len(given) + 1)}"
    )
    for row in columns[0]:
        print(f"| {row} | {' | '.join(column[row] for column in columns)} |")


if __name__ == "__main__":
    main()
