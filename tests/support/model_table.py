"""The table of models in docs/models.md: which equal one device, on which meshes; results in JSON.

python tests/support/model_table.py            run the rows without a result
python tests/support/model_table.py NAME ...   run the models whose name contains a NAME again
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import kinds_table
import programs_table
import torch
from real_models import MODULES, MORE, TRANSFORMERS, Case, transformer

import ftp

RESULTS = Path(__file__).parent.parent / "results" / "models.json"
DOCS = Path(__file__).parent.parent.parent / "docs" / "models.md"
EQUAL = "equal"
WITHOUT_SDPA = ("Gemma 2", "Bloom")  # transformers has no such form of these
MESHES = ("tp2", "tp3", "tp4", "dp2×tp2")
PLANS = (
    "The specs are those of `ftp.from_hf`: transformers' plan, or one built from the model's own"
    " layers. Each step is certified.\nZeRO-3 cuts every parameter on its first dim. `cut` is the"
    " share of the parameters, and of the matmuls' work, of these small\nmodels, in which norms and"
    " positions weigh more than in large ones. `tests/support/kinds_table.py` runs the rows.\n"
)
PROGRAMS = (
    "Programs that people run, in compact forms of our own (`tests/support/public_*.py`), in"
    " float64. Parameters are cut as Megatron does, or on\ntheir first dim; under ZeRO-3 all on"
    " their first dim. Each step is certified, and its loss and every gradient equal plain torch."
    "\n`tests/support/programs_table.py` runs the rows.\n"
)
Row = tuple[str, str, str]  # model, attention ("" for modules), mesh


def forms() -> list[tuple[str, str]]:
    """Models of transformers with their attention."""
    both = [(name, attention) for name in TRANSFORMERS | MORE for attention in ("eager", "sdpa")]
    return [
        (name, attention)
        for name, attention in both
        if attention == "eager" or name not in WITHOUT_SDPA
    ]


def rows() -> dict[Row, Callable[[], Case]]:
    """Every row with what makes its case."""
    found: dict[Row, Callable[[], Case]] = {}
    for mesh in MESHES:
        for name, attention in forms():
            found[name, attention, mesh] = lambda name=name, attention=attention: transformer(
                name, attention
            )
        for name, made in MODULES.items():
            found[name, "", mesh] = made
    return found


def outcome(make: Callable[[], Case], mesh: str) -> str:
    """``equal``, or the first line of what was raised."""
    from tests.plans.test_real_models import check

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case = make()
            check(case, mesh)
        except AssertionError as error:
            return f"wrong: {error}"
        except (ftp.FtpError, RuntimeError, ValueError) as error:
            return f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
    return EQUAL


def read() -> dict[Row, str]:
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return {(model, attention, mesh): found for model, attention, mesh, found in kept}


def write(results: dict[Row, str]) -> None:
    """The results, in the order of the table; rows of models that are no more are left out."""
    import transformers  # pyright: ignore[reportMissingImports]

    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    kept = [[*row, results[row]] for row in rows() if row in results]
    RESULTS.write_text(
        json.dumps({"versions": versions, "rows": kept}, indent=0, ensure_ascii=False) + "\n"
    )
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(document())


def document() -> str:
    """docs/models.md from the results."""
    kept = json.loads(RESULTS.read_text())
    results = read()
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    head = (
        "# Models\n\nAfter this page you know which models give the result of one device on which"
        " meshes. `equal`: on a simulated mesh the loss\nand every gradient differ from plain torch"
        " on one device by at most 1e-10 of the gradient, in float64. `refused`: an error\nsays"
        " why, below the table.\n\nThe models have random weights, two layers, numbers of heads"
        " that 3 does not divide, and a vocabulary of 37, sharded on\n`tp` in embedding and head."
        f" `tests/support/model_table.py` writes this page; this one with {versions}.\n"
    )
    parts = [
        ("transformers", forms()),
        ("torch.nn", [(name, "") for name in MODULES]),
    ]
    tables = "".join(f"\n## {title}\n\n{_table(models, results)}" for title, models in parts)
    plans = f"## Plans of ftp.from_hf\n\n{PLANS}\n{kinds_table.table()}"
    return f"{head}{tables}\n{plans}\n## Public programs\n\n{PROGRAMS}\n{programs_table.table()}"


def _table(models: list[tuple[str, str]], results: dict[Row, str]) -> str:
    with_attention = any(attention for _, attention in models)
    heads = ["model", *(["attention"] if with_attention else []), *MESHES]
    lines = [heads, ["---"] * len(heads)]
    for name, attention in models:
        cells = [results.get((name, attention, mesh), "not run") for mesh in MESHES]
        lines.append(
            [
                name,
                *([attention] if with_attention else []),
                *(cell.split(":")[0] for cell in cells),
            ]
        )
    why = {
        f"{name}: {found}"
        for (name, attention, _), found in results.items()
        if (name, attention) in models and found != EQUAL
    }
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "".join(
        f"\n{line}\n" for line in sorted(why)
    )


def missing(wanted: list[str]) -> Iterator[tuple[Row, Callable[[], Case]]]:
    results = read()
    for row, make in rows().items():
        if any(part in row[0] for part in wanted) if wanted else row not in results:
            yield row, make


def main(wanted: list[str]) -> None:
    results = read()
    torch.set_num_threads(1)
    for row, make in missing(wanted):
        started = time.perf_counter()
        results[row] = outcome(make, row[2])
        print(" | ".join(row), results[row], f"{time.perf_counter() - started:.1f} s", flush=True)
        write(results)


if __name__ == "__main__":
    main(sys.argv[1:])
