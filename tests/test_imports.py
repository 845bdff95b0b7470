"""What each package may import, and that ``import ftp`` is light."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import own_process  # type: ignore[import-not-found]
import pytest

import ftp

PACKAGE = Path(__file__).parents[1] / "ftp"
GROUND = (  # may be imported by all
    "context dataclass dynamic_float dynamic_int errors paused_gc source torch_internals turns"
    " version"
)
ALLOWED = {
    "sharding": "",
    "distributed": "sharding",
    "ops": "sharding",
    "axis": "ops",
    "random": "ops sharding",
    "static": "ops",
    "rules": "ops",
    "tensors": "distributed sharding",
    "checkpoint": "distributed sharding tensors",
    "functional": "ops random sharding",
    "tracing": "axis functional ops rules sharding static",
    "optim": "axis ops sharding tensors tracing",
    "per_rank": "axis ops rules sharding tracing",
    "plans": "functional ops per_rank sharding",
    "certification": "ops per_rank rules tracing",
    "equivalence": "axis certification ops rules sharding",
    "planning": "functional ops per_rank rules sharding tracing",
    "pipeline": "ops rules sharding",
    "partitioning": "ops per_rank planning rules sharding",
    "passes": "ops partitioning planning rules sharding",
    "runtime": "distributed ops partitioning passes pipeline planning rules sharding tensors"
    " tracing",
    "program_files": "distributed ops partitioning per_rank planning rules runtime sharding tensors"
    " tracing",
    "report": "ops partitioning passes pipeline planning rules runtime sharding tensors",
    "explicit": "ops partitioning passes planning report rules runtime sharding tracing",
    "exported": "functional ops partitioning planning plans random runtime sharding tensors"
    " tracing",
    "api": "certification distributed explicit ops per_rank pipeline planning program_files random"
    " report rules runtime sharding tensors tracing",
    "searching": "api functional ops planning report rules runtime sharding tensors tracing",
    "testing": "api certification partitioning rules runtime sharding",
    "cli": "api functional plans report sharding",
    "__main__": "certification cli equivalence planning rules",
}


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> set[str]:
    """The packages, and files beside them, that a file imports, in its functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ftp":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ftp.")
            }
    return found


def test_every_package_has_its_row():
    ground = {*GROUND.split(), "__init__"}
    listed = {package_of(p) for p in PACKAGE.rglob("*.py")} - ground
    assert listed == set(ALLOWED)


@pytest.mark.parametrize("package", [*ALLOWED, *GROUND.split()])
def test_a_package_imports_what_its_row_says(package):
    allowed = {*GROUND.split(), *ALLOWED.get(package, "").split(), package}
    files = [p for p in PACKAGE.rglob("*.py") if package_of(p) == package]
    wrong = [
        f"{p.relative_to(PACKAGE)} imports {name}"
        for p in files
        for name in sorted(imported(p) - allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_rows_point_down():
    """Each row imports rows above it, so that there is no circle between packages."""
    above: set[str] = set()
    for package, allowed in ALLOWED.items():
        assert set(allowed.split()) <= above, package
        above.add(package)


def test_rows_name_what_is_imported():
    """A right that nobody uses is taken from the table."""
    for package, allowed in ALLOWED.items():
        used = set().union(
            *(imported(p) for p in PACKAGE.rglob("*.py") if package_of(p) == package)
        )
        assert set(allowed.split()) <= used, f"{package}: {set(allowed.split()) - used}"


def test_a_name_is_imported_from_the_file_that_defines_it():
    """So a reader who follows an import arrives. ``__all__`` lists what a file passes on."""
    sources = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path.read_text()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    froms = {
        module: [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        for module, source in sources.items()
    }
    passed_on = {
        f"{module}.{alias.asname or alias.name}"
        for module, found in froms.items()
        if "__all__" not in sources[module]
        for node in found
        if (node.module or "").startswith("ftp")
        for alias in node.names
    }
    wrong = [
        f"{module}:{node.lineno} imports {alias.name} from {node.module}, which imports it"
        for module, found in froms.items()
        for node in found
        for alias in node.names
        if f"{node.module}.{alias.name}" in passed_on
    ]
    assert not wrong, "\n".join(wrong)


def test_import_loads_nothing_but_torch_and_itself():
    program = (
        "import torch, sys; before = set(sys.modules); import ftp;"
        " print(sorted(set(sys.modules) - before))"
    )
    found = own_process.run(program)
    assert found.stdout.strip() == "['ftp', 'ftp.torch_internals', 'ftp.torch_internals.support']"


def test_loading_a_public_name_collects_no_garbage_of_all_that_is_loaded():
    program = (
        "import gc, torch, ftp; found = [];"
        " gc.callbacks.append(lambda phase, facts: found.append(facts['generation']));"
        " ftp.spmd; gc.callbacks.clear(); print(2 in found)"
    )
    found = own_process.run(program)
    assert found.stdout.strip() == "False"


def test_a_step_loads_what_it_is_asked_for():
    program = (
        "import sys, torch, ftp; mesh = ftp.simulated_mesh((2,), ('tp',));"
        " step = ftp.spmd(lambda x: x.sum(), mesh, ftp.P('tp'), ftp.P()); step(torch.ones(4));"
        " asked = ('certification', 'explicit', 'report');"
        " loaded = lambda: [name for name in asked if 'ftp.' + name in sys.modules];"
        " print(loaded()); step.lower(torch.ones(4)); print(loaded())"
    )
    found = own_process.run(program)
    assert found.stdout.splitlines() == ["[]", "['report']"]


EACH_ALONE = """
import os, sys, torch
from importlib import import_module
failed = []
for module in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            import_module(module)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(module)
print(failed)
"""


@pytest.mark.slow
def test_each_home_of_a_public_name_can_be_imported_first():
    """None relies on another one having defined an op or registered a rule."""
    homes = [*ftp._HOMES, *(f"ftp.{name}" for name in ftp._MODULES)]
    command = [sys.executable, "-c", EACH_ALONE, *homes]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert found.stdout.strip() == "[]", found.stderr


def test_per_rank_code_runs_on_whole_tensors_in_a_process_that_uses_nothing_else():
    program = (
        "import torch, ftp; mesh = ftp.simulated_mesh((2,), ('tp',));"
        " print(ftp.local(lambda x: 2 * x, mesh, ftp.P('tp'), ftp.P('tp'))(torch.ones(4)).tolist())"
    )
    found = own_process.run(program)
    assert found.stdout.strip() == "[2.0, 2.0, 2.0, 2.0]", found.stderr


def test_public_names_are_where_a_type_checker_looks_for_them():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in ast.walk(guarded)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {**ftp._HOME_OF, **dict.fromkeys(ftp._MODULES, "ftp")}
    assert typed == lazy
    assert set(typed) == set(ftp.__all__) <= set(dir(ftp))


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ftp' has no attribute 'shrad'"):
        _ = ftp.shrad
