"""The part of docs/models.md on public programs; results in JSON.

python tests/support/programs_table.py [MESH] [PROGRAM ...]   run what has no result yet, or these
"""

import json
import sys
import time
import warnings
from pathlib import Path

import torch

RESULTS = Path(__file__).parent.parent / "results" / "programs.json"
EQUAL = "equal"
SECONDS = 160  # after which no other program is begun


def read() -> dict[str, dict[str, str]]:
    """Per program what came of each mesh."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(results: dict[str, dict[str, str]]) -> None:
    from tests.plans.test_public_programs import MESHES, PROGRAMS

    kept = {
        name: {mesh: results[name][mesh] for mesh in MESHES if mesh in results[name]}
        for name in PROGRAMS
        if name in results
    }
    RESULTS.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n")


def outcome(name: str, mesh: str) -> str:
    from tests.plans.test_public_programs import check

    try:
        check(name, mesh)
    except AssertionError as error:
        return f"wrong: {error}"
    except Exception as error:  # whatever a library raises is a result here
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
    return EQUAL


def table() -> str:
    """The section of the page."""
    from tests.plans.test_public_programs import MESHES

    results = read()
    lines = [["program", *MESHES], ["---"] * (1 + len(MESHES))]
    for name, found in results.items():
        cells = [found.get(mesh, "not run") for mesh in MESHES]
        lines.append([name, *(cell.split(":")[0] for cell in cells)])
    why = {f"{name}: {cell}" for name, found in results.items() for cell in found.values()}
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "".join(
        f"\n{line}\n" for line in sorted(why) if not line.endswith(f": {EQUAL}")
    )


def main(meshes: list[str], names: list[str]) -> None:
    from tests.plans.test_public_programs import MESHES, PROGRAMS

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.monotonic()
    for mesh in meshes or MESHES:
        for name in names or PROGRAMS:
            results = read()
            is_due = names or mesh not in results.get(name, {})
            if is_due and time.monotonic() - started < SECONDS:
                results.setdefault(name, {})[mesh] = outcome(name, mesh)
                print(name, mesh, results[name][mesh], flush=True)
                write(results)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(sys.argv[1:2], sys.argv[2:])
