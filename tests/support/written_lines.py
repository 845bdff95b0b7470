"""Programs as text, to write the lines into that an ``ExplicitError`` prints."""

import importlib.util
import itertools
import math
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ftp
from ftp import P
from ftp.sharding.spec import units

HEADER = "import ftp; from ftp import P, units\n"
_number = itertools.count()


@dataclass(frozen=True)
class Source:
    """A module's text, and the constraints of its model."""

    text: str
    constraints: dict[str, Any] = field(default_factory=dict)

    def load(self) -> ModuleType:
        """The module, from a file that no other text has had."""
        name = f"written_{next(_number)}"
        path = Path(tempfile.mkdtemp()) / f"{name}.py"
        path.write_text(HEADER + self.text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    def with_lines(self, missing: Iterable[Any]) -> "Source":
        """The source with the lines written where they say."""
        lines = (HEADER + self.text).split("\n")
        constraints = dict(self.constraints)
        for m in sorted(missing, key=lambda m: -m.first):
            if m.place == "in ftp.functionalize":
                given = eval(
                    m.line.removeprefix("constraints="), {"ftp": ftp, "P": P, "units": units}
                )
                assert not given.keys() & constraints.keys(), (m.line, constraints)
                constraints |= given
                continue
            assert m.place in ("after", "in place of"), m
            old = lines[m.first - 1 : m.last]
            indent = " " * (len(old[0]) - len(old[0].lstrip()))
            new = [indent + line for line in m.line.split("\n")]
            lines[m.first - 1 : m.last] = [*old, *new] if m.place == "after" else new
        return replace(self, text="\n".join(lines).removeprefix(HEADER), constraints=constraints)


def sent(lowered: ftp.Lowered) -> list[tuple[Any, ...]]:
    """What a program sends, without its order; of a value or a view of it is the same."""
    return sorted(
        (c.op, c.axes, c.shape, math.prod(c.global_shape), str(c.dtype), c.nbytes)
        for c in lowered.collectives
    )
