"""Programs of functions that read sizes as Python numbers: each size is recorded, and sizes whose
recordings differ only in numbers share plans.
"""

from dataclasses import field, replace
from typing import TYPE_CHECKING

from ftp.api.dynamic_shapes import Dynamic, Range
from ftp.dataclass import dataclass
from ftp.tracing.alike import Alike, RecordedOps, are_alike

if TYPE_CHECKING:
    from ftp.api.families import FamilyPlan, FamilyTrace

_SAMPLES = 3  # recordings from which formulas are made
MOST_PLANS = 8  # of one trace
_MOST = 4  # groups of recordings that are alike


@dataclass
class AlikeSizes:
    """Sizes whose recordings are alike, and the traces that serve them.

    Attributes:
        dynamic: the dynamic dims; the ranges are those of their sizes and of the unknown numbers.
        is_closed: whether sizes that no plan serves yet are planned one by one.
    """

    alike: Alike
    dynamic: Dynamic
    traces: "list[FamilyTrace]" = field(default_factory=list)
    is_closed: bool = False

    def trace_for(self, values: tuple[int, ...]) -> "FamilyTrace | None":
        """The trace that serves these sizes and numbers."""
        return next((t for t in self.traces if t.sizes.conditions.holds(values)), None)

    def plan_for(self, values: tuple[int, ...]) -> "FamilyPlan | None":
        """The plan that serves these sizes and numbers."""
        trace = self.trace_for(values)
        return trace and trace.plan_for(values)


@dataclass
class NumbersRead:
    """The recordings of one function, and those that were found to be alike."""

    groups: list[AlikeSizes] = field(default_factory=list)
    _samples: list[tuple[tuple[int, ...], RecordedOps]] = field(default_factory=list)

    def known(
        self, values: tuple[int, ...], recording: RecordedOps
    ) -> tuple[AlikeSizes, tuple[int, ...]] | None:
        """The group that serves recordings like this one, with the sizes and the recording's
        numbers.
        """
        for group in self.groups:
            found = group.alike.numbers(values, recording)
            if found is not None:
                return group, (*values, *found)
        return None

    def find(
        self, values: tuple[int, ...], recording: RecordedOps, dynamic: Dynamic
    ) -> tuple[AlikeSizes, tuple[int, ...]] | None:
        """The group of a recording at these sizes, with the sizes and the recording's numbers; None
        if there are too few recordings like it.
        """
        if (known := self.known(values, recording)) is not None:
            return known
        self._samples = [*self._samples[1 - 2 * _SAMPLES :], (values, recording)]
        samples = [(at, r) for at, r in self._samples if are_alike(r, recording)]
        if len(samples) < _SAMPLES or len(self.groups) == _MOST:
            return None
        alike = Alike(samples)
        found = alike.numbers(values, recording)
        if found is None:
            return None
        names = [Range(f"number {i + 1}", 0, float("inf")) for i in range(len(found))]
        group = AlikeSizes(alike, replace(dynamic, ranges=(*dynamic.ranges, *names)))
        self.groups.append(group)
        return group, (*values, *found)
