"""Which torch ftp runs on: the range of the package, and an error at import that names what a torch
lacks.
"""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import own_process  # type: ignore[import-not-found]
import pytest
from few_or_many import slow_after

from ftp.torch_internals import support

ROOT = Path(__file__).parents[1]
NAMES = ROOT / "ftp" / "torch_internals" / "support.py"


def imported(change: str, then: str = "") -> str:
    """The last line of an ``import ftp`` on a torch that is changed before."""
    program = f"import torch\n{change}\nimport ftp\n{then}"
    found = own_process.run(program)
    return (found.stdout + found.stderr).strip().splitlines()[-1]


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("release", slow_after(2, ["2.12.1", "2.16.0a0+git0", "2.16.0", "3.0.0"]))
def test_another_release_is_an_error_at_import(release: str):
    assert imported(f"torch.__version__ = {release!r}") == (
        f"ImportError: ftp runs on torch 2.13 to 2.15; this is torch {release}."
        " Install one with: pip install 'torch>=2.13,<2.16'"
    )


@pytest.mark.parametrize(
    "release", slow_after(1, ["2.15.1.dev3", "2.13.0+cpu", "2.14.1+cu130", "2.15.0"])
)
def test_a_release_in_the_range_is_imported(release: str):
    assert imported(f"torch.__version__ = {release!r}", "print('done')") == "done"


def test_a_missing_name_is_an_error_at_import_that_names_it():
    change = "del torch._C._functorch.maybe_get_level, torch._standard_gamma"
    assert re.fullmatch(
        r"ImportError: torch \S+ lacks what ftp uses: torch\._standard_gamma,"
        r" torch\._C\._functorch\.maybe_get_level\.",
        imported(change),
    )


def test_a_missing_name_of_a_module_loaded_later_is_named_at_first_use():
    change = "import sys; sys.modules['torch._inductor.codecache'] = None"
    assert re.fullmatch(
        r"ImportError: ftp\.shard cannot be loaded\. torch \S+ lacks what ftp uses:"
        r" .*torch\._inductor\.codecache.*",
        imported(change + "; sys.modules['ftp.api.shard'] = None", "ftp.shard"),
    )


def test_a_public_name_that_cannot_be_loaded_is_no_missing_attribute():
    change = "torch.ops.aten.geqrf = object()"
    assert imported(change, "hasattr(ftp, 'rule')").startswith(
        "ImportError: ftp.rule cannot be loaded. torch 2."
    )


def test_the_range_is_that_of_the_package():
    oldest, below = (".".join(map(str, r)) for r in (support.OLDEST, support.BELOW))
    assert f'"torch>={oldest},<{below}"' in (ROOT / "pyproject.toml").read_text()


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """``a.b.c``, of attributes of a name; empty for others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def used(tree: ast.Module) -> set[str]:
    """The private names of torch that a file uses, with the modules that hold them."""
    found, modules = set(), {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
            modules |= {a.asname: a.name for a in node.names if a.asname and a.name[:6] == "torch."}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            if first in modules and rest.split(".")[0] != "ops":
                found.add(f"{modules[first]}.{rest}")
    return {name for name in found if is_private(name)}


@cache
def trees() -> dict[Path, ast.Module]:
    files = [path for path in (ROOT / "ftp").rglob("*.py") if path != NAMES]
    return {path: ast.parse(path.read_text()) for path in files}


@cache
def used_by_file() -> dict[Path, set[str]]:
    return {path: used(tree) for path, tree in trees().items()}


def test_names_are_found_through_other_names_of_their_modules():
    source = "from torch.distributed import distributed_c10d as c10d\nc10d._get_default_store()"
    assert used(ast.parse(source)) == {"torch.distributed.distributed_c10d._get_default_store"}


def defined_names(tree: ast.Module) -> set[str]:
    """The functions, classes, variables, attributes and arguments of a file, and its texts, such as
    names of slots.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_every_private_attribute_in_use_is_listed():
    """An object's class is not known here: an attribute that ftp defines nowhere is torch's, or the
    standard library's.
    """
    own = set().union(*map(defined_names, trees().values()))
    in_use = {
        node.attr
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and not re.fullmatch(r"aten|prims|torch\.ops\.\w+", ast.unparse(node.value))
    }
    listed = " ".join([*support.NEEDED, *support.NEEDED.values(), *support.ATTRIBUTES])
    lacking = in_use - own - set(re.findall(r"\w+", listed)) - {"_getframe"}
    assert not lacking, f"add to ftp/torch_internals/support.py: {lacking}"
    assert {a.rpartition(".")[2] for a in support.ATTRIBUTES} <= in_use


def is_module(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


# Of modules of inductor, which are imported here as ftp imports them.
IMPORTED = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@IMPORTED
def test_every_private_name_in_use_is_checked():
    needed = set()
    for module, names in support.NEEDED.items():
        needed |= {f"{module}.{name}" for name in names.split()} or {module}
    in_use = set().union(*used_by_file().values())
    # torch._ops, as in torch._ops.OpOverload; of a class, as in TransformType.Grad, the class.
    in_use = {
        name
        for name in in_use
        if not any(other.startswith(f"{name}.") for other in needed)
        and not any(name.startswith(f"{other}.") for other in needed if not is_module(other))
    }
    in_use = {name for name in in_use if name in needed or not is_module(name)}
    assert in_use <= needed, f"add to NEEDED in ftp/torch_internals/support.py: {in_use - needed}"


@IMPORTED
def test_every_checked_name_is_in_use():
    text = "\n".join(p.read_text() for p in (ROOT / "ftp").rglob("*.py") if p != NAMES)
    words = set(re.findall(r"\w+", text))
    needed = {
        name.split(".")[-1]
        for module, names in support.NEEDED.items()
        for name in names.split() or [module]
    }
    assert needed <= words, f"no longer used: {needed - words}"
    assert support.missing(load=True) == []


@IMPORTED
def test_private_names_of_several_files_are_behind_torch_internals():
    files: dict[str, list[str]] = {}
    for path, names in used_by_file().items():
        if "torch_internals" not in path.parts:
            for name in names:
                files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    shared = {name: at for name, at in files.items() if len(at) > 1 and not is_module(name)}
    # Importing inductor's configuration is what each of its two users defers.
    assert set(shared) <= {"torch._inductor.config.patch"}, shared
