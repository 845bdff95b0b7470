"""Findings of trials for a form of call, stored in the user's cache."""

import hashlib
import json
import os
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ftp.dataclass import dataclass
from ftp.errors import RuleError
from ftp.ops.native import cache_folder, read_own
from ftp.rules.notation import parse
from ftp.rules.rule import Rule
from ftp.torch_internals.op_types import OpOverload

FORMAT = 2  # version of the files and of what counts as proven; others are ignored


@dataclass(frozen=True)
class TrialFinding:
    """The finding of trials for one form of call.

    Attributes:
        rule: the text in factor notation; empty where no placement is proven.
        linear: groups of operands that may be pending sums together.
        cases: number of generated calls on which the rule was proven.
        reason: why there is no rule.
    """

    rule: str = ""
    linear: tuple[tuple[int, ...], ...] = ()
    cases: int = 0
    reason: str = ""

    @property
    def stated(self) -> Rule | None:
        return Rule(parse(self.rule), self.linear) if self.rule else None

    def line(self, op: OpOverload) -> str:
        """The line of code that states the rule."""
        linear = f", linear={[tuple(g) for g in self.linear]}" if self.linear else ""
        return f"ftp.rule(torch.ops.{op}, {self.rule!r}{linear})"


def cache_file(key: str) -> Path:
    return cache_folder("discovery") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def load(key: str) -> TrialFinding | None:
    """The cached finding, or None. A file that another user owns or that cannot be read is ignored
    with a warning.
    """
    path = cache_file(key)
    try:
        record = json.loads(read_own(path))
        if record["key"] != key:
            raise ValueError("it is of another call")
        found = finding_of(record["finding"])
        _ = found.stated
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RuleError) as error:
        warnings.warn(
            f"{path} is ignored: {type(error).__name__}: {error}. It is written anew.",
            stacklevel=2,
        )
        return None


def save(key: str, finding: TrialFinding) -> None:
    """Write to another name and rename, so that ranks with one folder never read half a file."""
    path = cache_file(key)
    with suppress(OSError):  # without the file the next run repeats the trial
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as f:
            json.dump({"key": key, "finding": asdict(finding)}, f, indent=1)
        try:
            os.replace(f.name, path)
        except OSError:
            os.unlink(f.name)


def cached_findings() -> dict[str, TrialFinding]:
    """Findings with a rule in this machine's cache for this version of torch, by op."""
    found = {}
    for path in sorted(cache_folder("discovery").glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError, RuleError):
            record = json.loads(read_own(path))
            number, op, _, version, *_ = json.loads(record["key"])
            finding = finding_of(record["finding"])
            if number == FORMAT and version == torch.__version__ and finding.stated is not None:
                found.setdefault(op, finding)
    return found


def finding_of(record: dict[str, Any]) -> TrialFinding:
    return TrialFinding(
        str(record["rule"]),
        tuple(tuple(map(int, g)) for g in record["linear"]),
        int(record["cases"]),
        str(record["reason"]),
    )
