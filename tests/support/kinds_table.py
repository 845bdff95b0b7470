"""The part of docs/models.md on plans of ``ftp.from_hf``: how much of each kind of model is cut,
and on which meshes it equals one device; results in JSON.

python tests/support/kinds_table.py [MESH] [KIND ...]   run what has no result yet, or these again
"""

import json
import sys
import time
import warnings
from pathlib import Path

import torch
from model_kinds import KINDS, model_of

import ftp

RESULTS = Path(__file__).parent.parent / "results" / "kinds.json"
EQUAL = "equal"


def read() -> dict[str, dict[str, str]]:
    """Per kind of model its shares, under "cut", and what came of each mesh."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(results: dict[str, dict[str, str]]) -> None:
    kept = {kind: dict(sorted(results[kind].items())) for kind in KINDS if kind in results}
    RESULTS.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n")


def outcome(kind: str, mesh: str) -> str:
    from tests.plans.test_model_kinds import check

    try:
        check(kind, mesh)
    except AssertionError as error:
        return f"wrong: {error}"
    except Exception as error:  # whatever a library raises is a result here
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
    return EQUAL


def shares(kind: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ftp.from_hf(model_of(kind))[0].note.removeprefix("cut: ")


def table() -> str:
    """The section of the page."""
    from tests.plans.test_model_kinds import MESHES

    results = read()
    lines = [["model", "cut on `tp`", *MESHES], ["---"] * (2 + len(MESHES))]
    why = set()
    for kind, found in results.items():
        cells = [found.get(mesh, "not run") for mesh in MESHES]
        lines.append([kind, found["cut"], *(cell.split(":")[0] for cell in cells)])
        why |= {f"{kind}: {cell}" for cell in cells if ":" in cell}
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "".join(
        f"\n{line}\n" for line in sorted(why)
    )


def main(meshes: list[str], kinds: list[str]) -> None:
    from tests.plans.test_model_kinds import MESHES

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for mesh in meshes or MESHES:
        for kind in kinds or KINDS:
            results = read()
            if kinds or mesh not in results.get(kind, {}):
                started = time.process_time()
                found = results.setdefault(kind, {})
                found["cut"] = shares(kind)
                found[mesh] = outcome(kind, mesh)
                print(kind, mesh, found[mesh], f"{time.process_time() - started:.1f} s", flush=True)
                write(results)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(sys.argv[1:2], sys.argv[2:])
