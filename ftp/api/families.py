"""Programs for calls that differ in the sizes of dynamic dims alone: traced with symbolic sizes,
planned once for all sizes of which trace and plan ask the same.

A family has traces, mostly one: several where the function asks for a size. A trace has plans: one
for sizes that a mesh axis divides, one for others. A plan has rank graphs (`RankPrograms`).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftp.api.dynamic_shapes import Dynamic
from ftp.dynamic_int import NotDivisible, Sizes, Symbol
from ftp.runtime.program import Program
from ftp.runtime.sized_program import RankPrograms, SizedProgram
from ftp.sharding.arguments import Shape
from ftp.sharding.mesh import Mesh
from ftp.tensors.placement import placement_of
from ftp.tracing.trace import Traced

MOST_TRACES = 4  # of one family, before its sizes are traced one by one
_GENERIC = 5  # a size at which little that code asks of sizes is so by chance


class NotDynamic(Exception):
    """Why a program cannot be made for many sizes."""


@dataclass
class FamilyPlan:
    """One plan, and what it was first made as.

    Attributes:
        planned: the step's record of it at one size.
    """

    dynamic: Dynamic
    ranks: RankPrograms
    planned: Any = None

    @classmethod
    def of(
        cls, dynamic: Dynamic, values: Sequence[int], make: Callable[[Sizes], Program]
    ) -> "FamilyPlan":
        """The plan for sizes such as ``values``; of those that a mesh axis divides in formulas of
        the quotient.
        """
        multiple = 1
        while True:
            sizes = sizes_for(dynamic, values, multiple)
            sizes.prefers_multiples = True
            try:
                program = make(sizes)
            except NotDivisible as asked:
                multiple = math.lcm(multiple, asked.n)
                continue
            sizes.prefers_multiples = False
            return cls(dynamic, RankPrograms(program))

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


@dataclass
class Family:
    """The programs of calls that differ in dynamic sizes alone.

    Attributes:
        why_not: why sizes are traced and planned one by one; "" where they are not.
    """

    dynamic: Dynamic
    traces: list[FamilyTrace] = field(default_factory=list)
    why_not: str = ""

    def find(self, values: Sequence[int]) -> FamilyPlan | None:
        """The plan that serves these sizes."""
        trace = self.trace_for(values)
        return trace and next((p for p in trace.plans if p.holds(values)), None)

    def trace_for(self, values: Sequence[int]) -> FamilyTrace | None:
        """The trace that serves these sizes."""
        return next((t for t in self.traces if t.sizes.conditions.holds(values)), None)

    def add(self, trace: FamilyTrace) -> FamilyTrace:
        """Keep a trace.

        Raises:
            NotDynamic: where the function asks for too much.
        """
        if len(self.traces) == MOST_TRACES:
            symbolic = trace.traced.symbolic
            assert symbolic is not None
            raise NotDynamic(f"the function asks for it: {symbolic.described()}")
        self.traces.append(trace)
        return trace

    def give_up(self, why: str) -> None:
        """Plan sizes one by one from now on, and say why."""
        self.why_not = why
        names = ", ".join(r.name for r in self.dynamic.ranges)
        warnings.warn(
            f"dynamic_shapes: every size of {names} is traced and planned for itself: {why}",
            stacklevel=6,
        )


def reason(error: Exception) -> str:
    """Why a program could not be made for many sizes."""
    return str(error) if isinstance(error, NotDynamic) else f"{type(error).__name__}: {error}"


def symbolic_of(sizes: Sizes) -> Any:
    """The sizes as torch's symbolic ints. Imported where they are used: sympy takes long."""
    from ftp.tracing.symbolic import symbolic_of

    return symbolic_of(sizes)


def sizes_for(dynamic: Dynamic, values: Sequence[int], multiple: int = 1) -> Sizes:
    """Sizes to trace or plan with, all of them multiples of ``multiple``."""
    return Sizes(
        [
            Symbol(
                r.name,
                value,
                -(-r.low // multiple),
                r.high if math.isinf(r.high) else int(r.high) // multiple,
                multiple,
            )
            for r, value in zip(dynamic.ranges, values, strict=True)
        ]
    )


def sizes_to_trace(
    family: Family, shapes: Sequence[Shape | None], values: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Sizes to trace with: such as no other dim has, then those of the call."""
    taken = {size for shape in shapes for size in shape or ()} - set(values)
    generic = []
    for limit, value in zip(family.dynamic.ranges, values, strict=True):
        start = max(_GENERIC, limit.low, value)
        fitting = (s for s in range(start, start + 2 * len(taken) + 2) if s not in taken)
        found = next(fitting)
        generic.append(found if found <= limit.high else value)
        taken.add(found)
    yield tuple(generic)
    if tuple(generic) != values:
        yield values


def shapes_with(
    dynamic: Dynamic, shapes: Sequence[Shape | None], sizes: Sizes
) -> list[Shape | None]:
    """Global shapes with formulas for the dynamic dims."""
    return shapes_at(dynamic, shapes, sizes.symbols)


def shapes_at(
    dynamic: Dynamic, shapes: Sequence[Shape | None], values: Sequence[int]
) -> list[Shape | None]:
    """Global shapes with these sizes of the dynamic dims."""
    of = dict(zip((r.name for r in dynamic.ranges), values, strict=True))
    found = list(shapes)
    for leaf, dims in dynamic.dims.items():
        shape = list(shapes[leaf] or ())
        for dim, name in dims.items():
            shape[dim] = of[name]
        found[leaf] = tuple(shape)
    return found


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
