"""The tensors of a program as a tree of their paths, in HTML; equal layers are shown once."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from html import escape
from typing import Any

import torch

from ftp.dataclass import dataclass
from ftp.report.memory import in_bytes
from ftp.report.names import dtype_name
from ftp.report.shard_grid import as_html
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.spec import PartitionSpec

MOST_RANKS = 256  # of a mesh whose shards are drawn
_KEYS = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]|\.(\w+)")


@dataclass(frozen=True)
class ShownLeaf:
    """A tensor of the arguments: its name in messages, spec, global shape and bytes of an
    element.
    """

    name: str
    spec: PartitionSpec
    shape: tuple[int, ...]
    itemsize: int
    dtype: str

    @classmethod
    def of(
        cls, name: str, spec: PartitionSpec, shape: Sequence[int], dtype: torch.dtype
    ) -> "ShownLeaf":
        return cls(name, spec, tuple(shape), dtype.itemsize, dtype_name(dtype))

    def nbytes(self, axes: Mapping[str, int]) -> int:
        """On the first rank."""
        return math.prod(local_shape(self.spec, self.shape, dict(axes))) * self.itemsize

    @property
    def typed(self) -> str:
        """Dtype, global shape and the axes that cut each dim.

        >>> ShownLeaf("x", PartitionSpec(None, "tp"), (4, 6), 4, "f32").typed
        'f32[4, 6@tp]'
        """
        cuts = [
            ",".join(cut.axis for cut in self.spec.cuts(dim)) if dim < len(self.spec) else ""
            for dim in range(len(self.shape))
        ]
        dims = [f"{n}@{c}" if c else str(n) for n, c in zip(self.shape, cuts, strict=True)]
        return f"{self.dtype}[{', '.join(dims)}]"


@dataclass
class Branch:
    """The tensors below one part of a path. ``alike`` names the equal siblings that are not shown
    beside it.
    """

    leaves: dict[str, ShownLeaf] = field(default_factory=dict)
    branches: dict[str, "Branch"] = field(default_factory=dict)
    alike: list[str] = field(default_factory=list)

    def kind(self) -> tuple[object, ...]:
        """Equal for branches whose leaves have the same names, shapes and specs."""
        mine = tuple((name, leaf.typed, str(leaf.spec)) for name, leaf in self.leaves.items())
        return mine, tuple((name, branch.kind()) for name, branch in self.branches.items())

    def totals(self, axes: Mapping[str, int]) -> tuple[int, int, int]:
        """Tensors, bytes of a rank and bytes in all."""
        found: list[Any] = [
            (1, leaf.nbytes(axes), math.prod(leaf.shape) * leaf.itemsize)
            for leaf in self.leaves.values()
        ]
        for branch in self.branches.values():
            times = max(1, len(branch.alike))
            found.append(tuple(times * n for n in branch.totals(axes)))
        count, of_rank, in_all = map(sum, zip(*found, strict=True)) if found else (0, 0, 0)
        return count, of_rank, in_all


def path(name: str) -> tuple[str, ...]:
    """The parts of a name: the argument, then keys, split at the dots of module paths.

    >>> path("params['layers.0.up']"), path("batch[1]")
    (('params', 'layers', '0', 'up'), ('batch', '1'))
    """
    head = re.split(r"[\[.]", name, maxsplit=1)[0]
    parts = [head]
    for key, index, attribute in _KEYS.findall(name[len(head) :]):
        parts += [part for part in key.split(".") if part] or [index or attribute]
    return tuple(parts)


def outline(leaves: Sequence[ShownLeaf], axes: Mapping[str, int]) -> str:
    """Nested collapsible lists; every argument starts open."""
    root = Branch()
    for leaf in leaves:
        *above, last = path(leaf.name)
        at = root
        for part in above:
            at = at.branches.setdefault(part, Branch())
        while last in at.leaves:  # equal names
            last += " "
        at.leaves[last] = leaf
    _merge(root)
    alone = _table(root.leaves, axes) if root.leaves else ""
    return alone + "".join(
        _branch(name, branch, axes, opened=True) for name, branch in root.branches.items()
    )


def _merge(branch: Branch) -> None:
    """Keep one of the numbered branches that are equal."""
    firsts: dict[object, Branch] = {}
    for name, child in list(branch.branches.items()):
        _merge(child)
        if not name.isdigit():
            continue
        first = firsts.setdefault(child.kind(), child)
        first.alike.append(name)
        if first is not child:
            del branch.branches[name]


def _branch(part: str, branch: Branch, axes: Mapping[str, int], opened: bool = False) -> str:
    name = _label(part, branch)
    while not opened and not branch.leaves and len(branch.branches) == 1 and len(branch.alike) < 2:
        ((part, branch),) = branch.branches.items()
        name += f".{_label(part, branch)}"
    count, held, total = branch.totals(axes)
    times = f" each, {len(branch.alike)} equal" if len(branch.alike) > 1 else ""
    share = f" ({held / total:.0%} of {in_bytes(total)})" if total else ""
    head = (
        f"<code>{escape(name)}</code> <small>{count} tensor{'s' if count != 1 else ''},"
        f" {in_bytes(held)} a rank{share}{times}</small>"
    )
    below = "".join(_branch(part, child, axes) for part, child in branch.branches.items())
    table = _table(branch.leaves, axes) if branch.leaves else ""
    return f"<details{' open' if opened else ''}><summary>{head}</summary>{below}{table}</details>"


def _label(part: str, branch: Branch) -> str:
    return _numbers([int(n) for n in branch.alike]) if len(branch.alike) > 1 else part


def _table(leaves: Mapping[str, ShownLeaf], axes: Mapping[str, int]) -> str:
    few = math.prod(axes.values()) <= MOST_RANKS
    rows = []
    for name, leaf in leaves.items():
        cells = [
            f"<code>{escape(text)}</code>" for text in (name.rstrip(), leaf.typed, str(leaf.spec))
        ]
        holders = as_html(leaf.spec, leaf.shape, axes) if few else "too many ranks"
        cells += [
            in_bytes(leaf.nbytes(axes)),
            f"<details><summary>who holds what</summary>{holders}</details>",
        ]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        "<table><tr><th>name</th><th>global shape</th><th>spec</th><th>bytes a"
        f" rank</th><th></th></tr>{''.join(rows)}</table>"
    )


def _numbers(numbers: Sequence[int]) -> str:
    """
    >>> _numbers([0, 1, 2, 3, 7])
    '0 to 3, 7'
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
