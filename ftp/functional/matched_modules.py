"""The modules of a model that the patterns of ``constraints``, ``taps`` and ``remat`` match."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from ftp.dataclass import dataclass
from ftp.errors import SpecError, raise_all
from ftp.sharding.patterns import match_patterns


@dataclass(frozen=True, eq=False)
class MatchedModule:
    """A module, with the pattern that matched its path.

    Attributes:
        done, does: what the pattern's value does to the module, in messages.
        instead: what to name in place of a module that is not called.
    """

    pattern: str
    path: str
    module: nn.Module

    done: ClassVar[str]
    does: ClassVar[str]
    instead: ClassVar[str] = "the module around it"

    @property
    def where(self) -> str:
        kind = type(self.module).__name__
        return f"module {self.path!r} ({kind}), {self.done} by {self.pattern!r}"


def matched_modules(
    model: nn.Module, patterns: Mapping[str, Any], check: Callable[[str, Any], str | None]
) -> list[tuple[str, str, nn.Module, Any]]:
    """The matched modules, as ``(pattern, path, module, the pattern's value)``."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    answers = [
        tuple(tuple(path.split(".")) if path else () for path in of_module)
        for of_module in paths.values()
    ]
    names = [f"module {of_module[0]!r}" for of_module in paths.values()]
    failures: list[str] = []
    found = match_patterns(patterns, answers, names, "the modules", failures, check)
    raise_all(SpecError, failures)
    return [
        (match[0], of_module[0], module, match[1])
        for (module, of_module), match in zip(paths.items(), found, strict=True)
        if match
    ]
