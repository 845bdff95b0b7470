"""Programs for calls that differ only in the sizes of dynamic dims: traced with symbolic sizes,
planned once for all sizes that give the same answers to the conditions of trace and plan.

A family has traces, mostly one: several where the function asks for a size. A trace has plans: one
for sizes that a mesh axis divides, one for others. A plan has rank graphs (`RankPrograms`).
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any

from ftp.api.arguments import Arguments
from ftp.api.dynamic_shapes import Dynamic
from ftp.api.numbers_read import NumbersRead
from ftp.dataclass import dataclass
from ftp.dynamic_int import Sizes, in_multiples, symbol
from ftp.errors import CertificateError
from ftp.runtime.program import Program
from ftp.runtime.sized_program import RankPrograms, SizedProgram
from ftp.sharding.arguments import Shape
from ftp.sharding.mesh import Mesh
from ftp.tensors.placement import placement_of
from ftp.tracing.symbolic_builtins import NumbersMade
from ftp.tracing.trace import Traced

MOST_TRACES = 4  # of one family, before its sizes are traced one by one
SERVED = 4  # sizes that earn a family one trace more
_GENERIC = 5  # a size that few conditions in code single out


class NotDynamic(Exception):
    """Why a program cannot be made for many sizes.

    Attributes:
        is_for_now: another one can, once the family's traces serve more sizes.
    """

    def __init__(self, why: str, is_for_now: bool = False):
        super().__init__(why)
        self.is_for_now = is_for_now


@dataclass
class FamilyPlan:
    """One plan.

    Attributes:
        planned: the step's `Planned` of its first size.
    """

    dynamic: Dynamic
    ranks: RankPrograms
    planned: Any = None

    @classmethod
    def of(
        cls,
        dynamic: Dynamic,
        values: Sequence[int],
        traced: Traced,
        make: Callable[[Sizes], Program],
    ) -> "FamilyPlan":
        """The plan of a trace for sizes such as ``values``. A size that a mesh axis must divide is
        written as a multiple of the axis' size, so that shards have formulas too.
        """
        assert traced.symbolic is not None
        of_trace = traced.symbolic.sizes
        own = {s.name: s.multiple for s in of_trace.given}

        def made(sizes: Sizes) -> Program:
            sizes.ask_again(of_trace.conditions)  # where the trace is of multiples, so is the plan
            return make(sizes)

        program = in_multiples(lambda found: sizes_for(dynamic, values, own | {**found}), made)
        return cls(dynamic, RankPrograms(program, traced.symbolic))

    def program(self, values: tuple[int, ...]) -> SizedProgram:
        return SizedProgram.of(self.ranks, values)

    def holds(self, values: Sequence[int]) -> bool:
        return self.ranks.sizes.conditions.holds(values)


@dataclass
class FamilyTrace:
    """One trace, and its plans."""

    traced: Traced
    sizes: Sizes
    plans: list[FamilyPlan] = field(default_factory=list)

    def plan_for(self, values: Sequence[int]) -> FamilyPlan | None:
        """The plan that serves these sizes."""
        return next((plan for plan in self.plans if plan.holds(values)), None)


@dataclass(frozen=True)
class ShapeCounts:
    """How the sizes of a step's dynamic dims were served so far.

    Attributes:
        traces, plans: the number of traces and of plans that serve many sizes.
        one_by_one: reasons why sizes are traced and planned, or compiled, one by one; empty if
            none are.
    """

    traces: int
    plans: int
    one_by_one: tuple[str, ...] = ()


def counts(families: Iterable["Family"]) -> ShapeCounts:
    known = list(families)
    traces = [trace for family in known for trace in family.all_traces()]
    reasons = [family.why_not for family in known]
    reasons += [plan.ranks.why_not for trace in traces for plan in trace.plans]
    return ShapeCounts(
        len(traces),
        sum(len(trace.plans) for trace in traces),
        tuple(dict.fromkeys(filter(None, reasons))),
    )


@dataclass
class Family:
    """The programs of calls that differ only in dynamic sizes.

    Attributes:
        alone: the number of traces for many sizes that turned out to serve one.
        served: the number of sizes that plans made at other sizes have served.
        why_not: why sizes are traced and planned one by one; "" if they are not.
        is_full: the reason is the number of traces.
        numbers_read: the recordings of sizes that are traced one by one; alike ones share plans.
    """

    dynamic: Dynamic
    traces: list[FamilyTrace] = field(default_factory=list)
    alone: int = 0
    served: int = 0
    why_not: str = ""
    is_full: bool = False
    numbers_read: NumbersRead = field(default_factory=NumbersRead)
    numbers: NumbersMade = field(default_factory=NumbersMade)

    def find(self, values: Sequence[int]) -> FamilyPlan | None:
        """The plan that serves these sizes."""
        trace = self.trace_for(values)
        return trace and trace.plan_for(values)

    def trace_for(self, values: Sequence[int]) -> FamilyTrace | None:
        """The trace that serves these sizes."""
        return next((t for t in self.traces if t.sizes.conditions.holds(values)), None)

    @property
    def is_outgrown(self) -> bool:
        """Whether a program is of a table that a later trace has replaced."""
        plans = (plan for trace in self.all_traces() for plan in trace.plans)
        return any(plan.planned.is_outgrown for plan in plans)

    def makes_traces(self) -> bool:
        """Whether sizes that no plan serves are traced with others."""
        return not self.why_not or (self.is_full and len(self.traces) < self._most())

    def _most(self) -> int:
        return MOST_TRACES + self.served // SERVED

    def all_traces(self) -> list[FamilyTrace]:
        groups = self.numbers_read.groups
        return [*self.traces, *(trace for group in groups for trace in group.traces)]

    def add(self, trace: FamilyTrace) -> None:
        """Keep a trace, unless its conditions allow one size only, as of ``if x.shape[1] == 4``.

        Raises:
            NotDynamic: there are too many traces, or one size only is all that the function takes.
        """
        pins = trace.sizes.conditions.pins()
        self.alone += pins
        is_full = len(self.traces) >= self._most()
        if is_full or (pins and self.alone > len(self.traces)):
            symbolic = trace.traced.symbolic
            assert symbolic is not None
            asked = symbolic.described() or "; ".join(trace.sizes.conditions)
            raise NotDynamic(f"the function asks for sizes: {asked}.", is_full and not pins)
        if not pins:
            self.traces.append(trace)

    def give_up(self, error: Exception) -> None:
        """Plan sizes that no plan serves yet one by one from now on. Warn if the user named the
        dims, or if a certificate was refused.
        """
        is_new, self.why_not = not self.why_not, reason(error)
        self.is_full = isinstance(error, NotDynamic) and error.is_for_now
        if isinstance(error, CertificateError):
            warn_of_refused(self.dynamic, error)
        elif is_new and not self.dynamic.is_seen:
            plans = any(trace.plans for trace in self.traces)
            new = " for which there is no plan yet" if plans else ""
            warnings.warn(
                f"dynamic_shapes: every size of {_named(self.dynamic)}{new} is traced and planned"
                f" for itself: {self.why_not}",
                stacklevel=6,
            )


def warn_of_refused(dynamic: Dynamic, error: CertificateError) -> None:
    """Warn that the certificate of a program of many sizes was refused at one size."""
    warnings.warn(
        f"certify: a program of many sizes of {_named(dynamic)} is refused at these sizes, which"
        f" are planned for themselves. That is a fault of ftp: please report it: {reason(error)}",
        stacklevel=6,
    )


def _named(dynamic: Dynamic) -> str:
    return ", ".join(r.name for r in dynamic.ranges)


def reason(error: Exception) -> str:
    """Why a program could not be made for many sizes."""
    return str(error) if isinstance(error, NotDynamic) else f"{type(error).__name__}: {error}"


def sizes_for(
    dynamic: Dynamic, values: Sequence[int], multiples: Mapping[str, int] = MappingProxyType({})
) -> Sizes:
    """Sizes to trace or plan with, those of ``multiples`` as multiples."""
    return Sizes(
        [
            symbol(r.name, value, r.low, r.high, multiples.get(r.name, 1))
            for r, value in zip(dynamic.ranges, values, strict=True)
        ]
    )


def sizes_to_trace(
    family: Family, shapes: Sequence[Shape | None], values: tuple[int, ...], ranks: int
) -> Iterator[tuple[int, ...]]:
    """Sizes to try a trace with: first sizes that no other dim has, then those of the call. The
    ``ranks`` divide the first ones where they divide those of the call: per-rank code asks for it.
    """
    taken = {size for shape in shapes for size in shape or ()} - set(values)
    generic = []
    for limit, value in zip(family.dynamic.ranges, values, strict=True):
        start = max(_GENERIC, limit.low, value)
        alike = start + (value - start) % ranks
        for first, step in (alike, ranks), (start, 1):
            found = next(s for s in itertools.count(first, step) if s not in taken)
            if found <= limit.high:
                break
        generic.append(found if found <= limit.high else value)
        taken.add(found)
    is_short = min(values) <= 1 and family.trace_for(generic) is None
    if not family.traces or is_short:
        yield tuple(generic)
    if (family.traces or tuple(generic) != values) and min(values) > 1:
        yield values


def shapes_with(
    dynamic: Dynamic, shapes: Sequence[Shape | None], sizes: Sizes
) -> list[Shape | None]:
    """Global shapes with formulas for the dynamic dims."""
    formulas: Any = sizes.symbols
    return shapes_at(dynamic, shapes, formulas)


def shapes_at(
    dynamic: Dynamic, shapes: Sequence[Shape | None], values: Sequence[int]
) -> list[Shape | None]:
    """Global shapes with these sizes of the dynamic dims."""
    of = dict(zip((r.name for r in dynamic.ranges), values, strict=True))
    found = list(shapes)
    for leaf, dims in dynamic.dims.items():
        shape = list(shapes[leaf] or ())
        for dim, size in dims.items():
            shape[dim] = size.at(of[size.name])
        found[leaf] = tuple(shape)
    return found


def is_like(family: Family, call: Arguments, dynamic: Dynamic, mesh: Mesh) -> bool:
    """Whether a family's programs serve these arguments at other sizes; see `Arguments.is_like`."""
    if not family.traces or not family.traces[0].plans or family.dynamic != dynamic:
        return False
    known = family.traces[0].plans[0].planned
    if call.key[0] != known.key[0]:
        return False
    sized = sizes_of(call.leaves, dynamic, family, mesh)
    if sized is None:
        return False
    key, shapes = list(known.key), list(known.shapes)
    for leaf in dynamic.dims:
        key[1 + leaf] = (call.leaves[leaf].shape, *known.key[1 + leaf][1:])
        old, new = known.shapes[leaf] or (), sized[leaf] or ()
        if len(old) != len(new) or any(
            a != b and d not in dynamic.dims[leaf]
            for d, (a, b) in enumerate(zip(old, new, strict=True))
        ):
            return False
        shapes[leaf] = new
    return call.is_like(tuple(key), shapes, known.program.leaf_specs, mesh)


def sizes_of(
    leaves: Sequence[Any], dynamic: Dynamic, family: Family, mesh: Mesh
) -> list[Shape | None] | None:
    """The global shapes of leaves with dynamic dims; None where this rank cannot tell them from
    its shards.
    """
    specs = family.traces[0].plans[0].ranks.program.leaf_specs if family.traces[0].plans else None
    if specs is None:
        return None
    found: list[Shape | None] = [None] * len(leaves)
    for leaf, dims in dynamic.dims.items():
        known = placement_of(leaves[leaf])
        if known is not None:
            found[leaf] = known.shape
            continue
        spec = specs[leaf]
        if mesh.kind == "process" and any(d < len(spec) and spec.cuts(d) for d in dims):
            return None
        found[leaf] = tuple(leaves[leaf].shape)
    return found
