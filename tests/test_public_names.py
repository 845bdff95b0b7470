"""Every public name says what it is for, what it takes, what it raises, and shows an example."""

import inspect
import re
from types import ModuleType
from typing import Any

import pytest

import ftp

# What has no arguments of a caller's: made by ftp, or a family of errors.
RESULTS = {"Certificate", "Collective", "Divergence", "Found", "Lowered", "Saving", "Step"}
MODULES = {name for name in ftp.__all__ if isinstance(getattr(ftp, name), ModuleType)}
CALLED = sorted(set(ftp.__all__) - RESULTS - MODULES - {"FtpError", "__version__"})
# What these are is said by their annotation; ``mesh`` is that of ``ftp.use_mesh`` where it is None.
OBVIOUS = {"mesh", "model", "self", "args", "kwargs"}
# Cannot fail by what they are given: the mesh or the file system may, as their text says.
NEVER_RAISE = {"Action", "checkpoints", "Hardware", "Link", "PartitionSpec"}
# An example needs processes of a launcher.
NO_EXAMPLE = {"init_process_group"}


def doc_of(name: str) -> str:
    """The name's own docstring, not one that it inherits or that ``dataclass`` writes."""
    value: Any = getattr(ftp, name)
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    text = inspect.cleandoc(text or "")
    return "" if text.startswith(f"{getattr(value, '__name__', name)}(") else text


def arguments(name: str) -> list[str]:
    value = getattr(ftp, name)
    return [p for p in inspect.signature(value).parameters if p not in OBVIOUS]


def section(text: str, title: str) -> str:
    """A section of a docstring, such as ``Args``, without its title."""
    found = re.search(rf"^{title}:\n((?: +.*\n?|\n)+)", text, re.M)
    return found.group(1) if found else ""


@pytest.mark.parametrize("name", sorted(set(ftp.__all__) - {"__version__"}))
def test_purpose(name: str):
    first = doc_of(name).partition("\n\n")[0]
    assert first and first.rstrip()[-1] in ".:;", f"ftp.{name}: no sentence that says its purpose"


@pytest.mark.parametrize("name", sorted({*CALLED, *RESULTS} - NO_EXAMPLE))
def test_example(name: str):
    assert ">>>" in doc_of(name), f"ftp.{name} shows no example"


@pytest.mark.parametrize("name", CALLED)
def test_arguments(name: str):
    text = doc_of(name)
    listed = section(text, "Args") + section(text, "Attributes")
    prose = text.partition(">>>")[0]
    unnamed = [
        argument
        for argument in arguments(name)
        if not re.search(rf"^ *[\w, *]*\b{argument}\b[\w, *]*:", listed, re.M)
        and f"``{argument}``" not in prose
        and f"``{argument}=" not in prose
    ]
    # Some share the arguments of another name, and say so: "those of ``shard``".
    if shared := re.search(r"[Oo]ther arguments are (?:those of|as in) ``(\w+)``", text):
        unnamed = [argument for argument in unnamed if argument not in arguments(shared.group(1))]
    assert not unnamed, f"ftp.{name} does not say what it takes as {', '.join(unnamed)}"


@pytest.mark.parametrize("name", sorted(set(CALLED) - NEVER_RAISE))
def test_errors(name: str):
    assert section(doc_of(name), "Raises"), f"ftp.{name} does not say what it raises"


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_attributes(name: str):
    text = doc_of(name)
    fields = getattr(getattr(ftp, name), "__dataclass_fields__", {})
    unnamed = [f for f in fields if not f.startswith("_") and not re.search(rf"\b{f}\b", text)]
    assert not unnamed, f"ftp.{name} does not say what its {', '.join(unnamed)} is"
