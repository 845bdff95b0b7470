"""ProgramCache: the programs that a step used last, found by the arguments that they serve."""

import linecache
import warnings
from typing import Any

import torch
from torch.fx import graph_module

from ftp.api.arguments import Arguments
from ftp.api.planned import Planned
from ftp.sharding.mesh import Mesh
from ftp.torch_internals.fake_tensors import FakeTensorMode

MANY = 10  # programs of one step, at which it warns of the arguments that change
_PAD = "Pad tensors to one shape, or to a few (buckets)."
_AS_TENSOR = "Give numbers that change as tensors: torch.tensor(x)."
_MOST_FAKE = 10_000  # ops on shapes that torch remembers, a kilobyte each


class ProgramCache:
    """The programs that a step used last.

    Args:
        limit: the number of programs that are kept.

    Attributes:
        programs: by the key of the arguments that they serve.
        used: the programs by last use, the latest at the end; each with the numbers of the source
            texts that torch keeps of its modules.
        expects_many: whether many programs are expected, so that nothing is warned of.
    """

    def __init__(self, limit: int):
        self.programs: dict[tuple[Any, ...], Planned] = {}
        self.used: dict[Planned, range] = {}
        self.expects_many = False
        self._limit, self._count = limit, 0

    def alike(self, call: Arguments, mesh: Mesh) -> Planned | None:
        """A program that was made for other arguments and serves these too."""
        for known in self.programs.values():
            if call.is_like(known.key, known.shapes, known.program.leaf_specs, mesh):
                return known
        return None

    def use(self, planned: Planned) -> Planned | None:
        """Mark a program as used. Drops the least recently used one where there are too many, and
        returns it.
        """
        self.used[planned] = self.used.pop(planned, range(0))
        if len(self.used) <= self._limit:
            return None
        return self.drop(next(iter(self.used)))

    def drop(self, planned: Planned) -> Planned:
        sources = self.used.pop(planned, range(0))
        self.programs = {key: kept for key, kept in self.programs.items() if kept is not planned}
        _drop_sources(sources)
        return planned

    def count(self, planned: Planned, first_source: int, call: Arguments) -> None:
        """Record a program that was just made and used; warns when it is one of many.

        Args:
            first_source: number of torch's first source text of its modules.
        """
        self.used[planned] = range(first_source, graph_module._loader.next_id)
        if planned.program.is_of_many_sizes:
            return
        self._count += 1
        if self._count == MANY and not self.expects_many:
            warnings.warn(self._describe_changes(call), stacklevel=3)  # the step's caller

    def _describe_changes(self, call: Arguments) -> str:
        """The warning that names the leaves which change between calls, and what to do."""
        alike = [planned for planned in self.used if planned.key[0] == call.key[0]]
        changes, advice = [], dict[str, None]()
        for i, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
            seen = [*dict.fromkeys(planned.describe_leaf(i) for planned in alike)]
            if len(seen) > 1:
                shown = seen if len(seen) < 4 else [*seen[:2], "...", seen[-1]]
                changes.append(f"{name} was {', '.join(shown)}")
                advice[_PAD if isinstance(leaf, torch.Tensor) else _AS_TENSOR] = None
        if len(alike) < len(self.used):
            changes.append("the tree of the arguments, torch.autocast or the default dtype changed")
        more = f"; and {len(changes) - 4} more" if len(changes) > 4 else ""
        return (
            f"The step has planned {self._count} programs, as its arguments change:"
            f" {'; '.join(changes[:4])}{more}."
            f" Each costs as much as a first call. {' '.join(advice)}".rstrip()
            + f" The step keeps the {self._limit} programs used last (programs={self._limit})."
        )


def next_source() -> int:
    """The number of the next source text that torch keeps of an fx module."""
    return graph_module._loader.next_id


def _drop_sources(numbers: range) -> None:
    """Drop torch's caches for a dropped program: source texts of its modules, fake results of its
    ops.
    """
    if len(FakeTensorMode.cache) > _MOST_FAKE:
        FakeTensorMode.cache_clear()
    for number in numbers:
        key = f"<eval_with_key>.{number}"
        graph_module._loader.eval_cache.pop(key, None)
        linecache.cache.pop(key, None)
