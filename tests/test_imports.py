"""A file of the package imports only files above it in this order; rules import the registry and what it stands on."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "ftp"
ORDER = [
    "errors",
    "version",
    "collection",
    "native",
    "philox",
    "source",
    "launcher",
    "mesh",
    "spec",
    "slots",
    "tree",
    "constrain",
    "random",
    "draws",
    "recompute",
    "stacked",
    "scan",
    "recall",
    "axis",
    "pins",
    "placements",
    "gradient_hooks",
    "functional",
    "fused",
    "fixed_shapes",
    "notation",
    "layout",
    "registry",
    "localize",
    "holding",
    "rows",
    "writes",
    "matching",
    "movements",
    "certificate",
    "issued",
    "checker",
    "rules",
    "prover",
    "child",
    "trials",
    "decompositions",
    "discovery",
    "unfinished",
    "store",
    "neighbours",
    "agreement",
    "replicas",
    "indices",
    "placement",
    "expected",
    "arguments",
    "unchecked",
    "dtensor",
    "boxes",
    "shards",
    "transfer",
    "relocation",
    "tensor_files",
    "manifest",
    "folder_lock",
    "checkpoint",
    "restore",
    "refusals",
    "recorder",
    "functionalized",
    "safetensors_folder",
    "trace",
    "captured",
    "varying",
    "rank_program",
    "rank_gradient",
    "local",
    "cost",
    "graph",
    "repeats",
    "reach",
    "bounds",
    "eliminate",
    "network",
    "planner",
    "ingest",
    "collectives",
    "inline",
    "partition",
    "pipelined",
    "simulate",
    "passes",
    "shared_memory",
    "kernels",
    "pieces",
    "compile",
    "cuda_graph",
    "program",
    "calibration",
    "report",
    "executed",
    "lowered",
    "pictures",
    "numbering",
    "attest",
    "step",
    "divergence",
    "api",
    "opened",
    "depth",
    "found",
    "searching",
    "search",
    "init",
    "plans",
    "schedules",
    "optim",
    "exported",
    "testing",
    "reporting",
    "__init__",
    "__main__",
]
FOR_RULES = {"errors", "fixed_shapes", "fused", "philox", "notation", "registry", "localize", "stacked", "rules"}


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports at its top level or below."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ftp":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names if (PACKAGE / f"{alias.name}.py").exists()}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ftp.")}
    return found


def test_every_file_has_its_place():
    files = {p.stem for p in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert files == set(ORDER)


def test_imports_point_up():
    wrong = []
    for path in PACKAGE.glob("*.py"):
        allowed = set(ORDER[: ORDER.index(path.stem)])
        wrong += [f"{path.stem} imports {name}" for name in sorted(imported(path) - allowed)]
    for path in (PACKAGE / "rules").glob("*.py"):
        wrong += [f"rules/{path.stem} imports {name}" for name in sorted(imported(path) - FOR_RULES)]
    for package in ("plans", "report", "exported"):
        for path in (PACKAGE / package).glob("*.py"):
            allowed = set(ORDER[: ORDER.index(package) + 1])
            wrong += [f"{package}/{path.stem} imports {name}" for name in sorted(imported(path) - allowed)]
    assert not wrong, "\n".join(wrong)


def test_import_is_light():
    heavy = ["matplotlib", "rich", "tensorboard", "transformers", "safetensors", "scipy", "hypothesis", "torch._inductor", "torch._dynamo"]
    program = (
        f"import torch, sys; before = set(sys.modules); import ftp; print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert found.stdout.strip() == "[]"
