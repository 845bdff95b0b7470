"""Why a value has its layout, and the plan's cost with others; the difference of two programs."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftp.dataclass import dataclass
from ftp.planning.attention_ways import axes_of_queries, cost_of
from ftp.planning.cost import Hardware
from ftp.planning.cost_network import form_of, layout_costs
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.plan import Plan
from ftp.planning.problem import Problem
from ftp.report.causes import Origins, describe
from ftp.report.collectives import Collectives
from ftp.report.disagreement import with_axes, without_axis
from ftp.report.memory import in_bytes
from ftp.report.text import typed
from ftp.report.timing import in_seconds
from ftp.sharding.check_spec import check_spec
from ftp.sharding.layout import Layout
from ftp.sharding.spec import PartitionSpec

if TYPE_CHECKING:
    from ftp.report.lowered import Lowered


@dataclass(frozen=True)
class Alternative:
    """A layout of a value, and the cost of the whole plan with it.

    Attributes:
        layout: a spec for an input, or a value's layout on one axis.
        axis: the mesh axis of a value's layout; "" for a spec.
        seconds: the plan's cost by the planner's prices; None if no plan has this layout.
        delta: the extra cost over the chosen plan.
        wire_nbytes, memory: bytes that a rank sends, and its peak bytes, with this layout; known
            for specs and for attention's result, else None.
        chosen: whether the plan has this layout.
    """

    layout: str
    axis: str
    seconds: float | None
    delta: float | None
    wire_nbytes: int | None = None
    memory: int | None = None
    chosen: bool = False

    def __str__(self) -> str:
        mark = "*" if self.chosen else " "
        where = f" over {self.axis}" if self.axis else ""
        if self.seconds is None or self.delta is None:
            return f"{mark} {self.layout}{where}: no plan"
        more = f", {in_bytes(self.wire_nbytes)} sent" if self.wire_nbytes is not None else ""
        more += f", {in_bytes(self.memory)} at the peak" if self.memory is not None else ""
        sign = "+" if self.delta >= 0 else "-"
        return (
            f"{mark} {self.layout}{where}: {in_seconds(self.seconds)}"
            f" ({sign}{in_seconds(abs(self.delta))}){more}"
        )


@dataclass(frozen=True)
class Why:
    """The decisions behind a value's layout, back to the origins of its cuts, and the cost of other
    layouts.
    """

    name: str
    layout: str
    chain: tuple[str, ...]
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.layout}", *(f"  {line}" for line in self.chain)]
        if self.alternatives:
            lines += [
                "the whole plan with each layout (* is the chosen one):",
                *(f"  {a}" for a in self.alternatives),
            ]
        return "\n".join(lines)


def describe_layout(layout: Layout) -> str:
    """
    >>> describe_layout(Layout("S", 1))
    'cut on dim 1'
    """
    if layout.kind == "S":
        within = (
            ""
            if layout.outer == layout.inner == 1
            else f" within {layout.outer}, in units of {layout.inner}"
        )
        return f"cut on dim {layout.dim}{within}{' in zigzag' if layout.zigzag else ''}"
    return "whole" if layout.kind == "R" else f"a pending {layout.op}"


def neighbours(
    spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]
) -> list[PartitionSpec]:
    """``spec``, and the specs that differ from it in the dim that one mesh axis cuts.

    >>> neighbours(PartitionSpec("tp"), (4, 4), {"tp": 2})
    [P('tp'), P(), P(None, 'tp')]
    """
    found = [spec]
    for axis, n in axes.items():
        if n == 1:
            continue
        rest = without_axis(spec, axis)
        for other in (rest, *(with_axes(rest, dim, (axis,)) for dim in range(len(shape)))):
            if (
                other not in found
                and not check_spec(other, shape, dict(axes), "")
                and other != without_axis(spec, "")  # the spec itself, without trailing None
            ):
                found.append(other)
    return found


def chain_of(
    value: Value, found: Origins, specs: dict[Node, PartitionSpec], axes: Sequence[str]
) -> list[str]:
    """Per axis over which a value is cut or pending, the chain of values back to the input or
    constraint that caused it.
    """
    lines = []
    for axis in axes:
        origin = found.get((value, axis))
        if origin is None:
            continue
        lines.append(f"over {axis}: because of {describe(origin, specs)}")
        at, steps = value, 0
        while at.node is not origin and steps < 12:
            step = _line(at.node)
            following = next((v for v in at.node.operands if found.get((v, axis)) is origin), None)
            if following is None:
                break
            if step:
                lines.append(f"    {typed(at)} = {step}")
                steps += 1
            at = following
    return lines or ["replicated: no cut of an input or constraint reaches it"]


def _line(node: Node) -> str:
    operands = ", ".join(f"%{v.node.name}" for v in node.operands)
    if node.kind == "reshard":
        return f"{node.target.op} over {node.target.axis} of {operands}"
    source = f" at {node.source}" if node.source else ""
    return f"%{node.name}, {str(node.target).removeprefix('aten.')}({operands}){source}"


def find(graph: Graph, name: str) -> Value | None:
    """The value with a name of the printed program, or the parameter with a path."""
    wanted = name.removeprefix("%")
    for node in graph.nodes:
        if node.name == wanted:
            return Value(node)
    for node in graph.inputs:
        if node.name.endswith(f"['{wanted}']"):
            return Value(node)
    return None


@dataclass(frozen=True)
class Difference:
    """The differences of another program from this one. Numbers are per rank: the other program's
    minus this one's.

    Attributes:
        specs: per input with a different spec, the specs in this and in the other program.
        added, removed: collectives as (op, axes, shape, dtype), with their counts.
    """

    specs: Mapping[str, tuple[str, str]]
    added: Mapping[tuple[Any, ...], int]
    removed: Mapping[tuple[Any, ...], int]
    wire_nbytes: int
    memory: int
    seconds: float

    def __bool__(self) -> bool:
        return bool(self.specs or self.added or self.removed or self.wire_nbytes or self.memory)

    def __str__(self) -> str:
        lines = [f"{name}: {here} -> {there}" for name, (here, there) in self.specs.items()]
        for sign, kinds in (("-", self.removed), ("+", self.added)):
            lines += [
                f"{sign} {n} x {op} over {', '.join(axes)} of {dtype} {list(shape)}"
                for (op, axes, shape, dtype), n in kinds.items()
            ]
        lines.append(f"bytes sent per rank: {self.wire_nbytes:+,}")
        lines.append(f"memory per rank: {self.memory:+,} bytes")
        lines.append(
            "estimated time of a step:"
            f" {'+' if self.seconds >= 0 else '-'}{in_seconds(abs(self.seconds))}"
        )
        return "\n".join(lines)


def counts(collectives: Collectives) -> Counter[tuple[Any, ...]]:
    return Counter(
        (c.op, c.axes, c.shape, str(c.dtype).removeprefix("torch.")) for c in collectives
    )


def other_specs(
    node: Node,
    chosen: PartitionSpec,
    axes: Mapping[str, int],
    here: "Lowered",
    planned_with: Callable[[PartitionSpec], "Lowered"],
) -> list[Alternative]:
    """The specs of an input that differ in the dim that one axis cuts, cheapest plan first.

    Args:
        chosen, here: the input's spec, and the program with it.
    """
    found = []
    for spec in neighbours(chosen, node.results[0].shape, axes):
        there = here if spec == chosen else planned_with(spec)
        cost, sent = there.plan.cost, there.collectives.wire_nbytes
        extra, memory = cost - here.plan.cost, int(there.memory)
        found.append(Alternative(str(spec), "", cost, extra, sent, memory, spec == chosen))
    return sorted(found, key=lambda a: a.seconds or 0.0)


def other_layouts(
    value: Value, plan: Plan, hardware: Hardware, again: Callable[..., "Lowered"]
) -> list[Alternative]:
    """Every layout of a value on each axis, with the least cost of a plan that has it.

    Args:
        again: plans the program with other specs, and calls a function with each axis' problem.
    """
    found: list[Alternative] = []

    def measure(axis: str, layout: Layout, is_ring: bool) -> tuple[int, int, float]:
        def restrict(problem: Problem) -> None:
            if problem.axis == axis:
                _with_form(problem, value, layout, is_ring)

        planned = again({}, restrict)
        seconds = cost_of(planned.plan, hardware).seconds
        return planned.collectives.wire_nbytes, int(planned.memory), seconds

    def watch(problem: Problem) -> None:
        own, whole = plan.solutions[problem.axis].cost, cost_of(plan, hardware)
        found.extend(_layouts_on(problem, value, own, whole.seconds, measure))

    again({}, watch)
    return found


def _with_form(problem: Problem, value: Value, layout: Layout, is_ring: bool) -> None:
    """Allow only this layout of a value, by a ring or not."""
    for node in problem.graph.nodes:
        if node.name == value.node.name:
            problem.forms[node] = lambda s: form_of(s, value.index) == (layout, is_ring)


# Per-rank bytes sent and held by the plan in which a value has a layout on an axis, by a ring or
# not, and the seconds of the plan as a whole.
Measure = Callable[[str, Layout, bool], tuple[int, int, float]]


def _layouts_on(
    problem: Problem, value: Value, chosen_cost: float, whole: float, measure: Measure
) -> Iterator[Alternative]:
    """Every layout of a value on one axis, each with the least cost of a plan that has it. If the
    planner compared attention's forms by whole plans, the costs are those of whole plans.

    Args:
        chosen_cost, whole: the cost of the chosen plan, on this axis and in all.
        measure: called for each form of attention; forms differ in the bytes sent and held.
    """
    at = next((n for n in problem.graph.nodes if n.name == value.node.name), None)
    if at is None:
        return
    cuts = [cut for cut in value.node.cuts if cut.axis == problem.axis]
    is_joint = bool(at.rule.ring) and (
        len(axes_of_queries(value.node)) > 1 or problem.by_ring is not None
    )
    if is_joint:
        problem, chosen_cost = replace(problem, by_ring=None), whole
    for layout, is_ring, cost in layout_costs(problem, Value(at, value.index)):
        sent = memory = None
        if at.rule.ring and cost is not None:
            sent, memory, seconds = measure(problem.axis, layout, is_ring)
            cost = seconds if is_joint else cost
        delta = None if cost is None else cost - chosen_cost
        chosen = (
            is_ring == (len(cuts) > 1)
            and layout.kind == _kind_on(value, problem.axis)
            and delta is not None
            and abs(delta) <= 1e-9 * chosen_cost
        )
        how = describe_layout(layout) + (", by a ring" if is_ring else "")
        yield Alternative(how, problem.axis, cost, delta, sent, memory, chosen)


def _kind_on(value: Value, axis: str) -> str:
    if any(a == axis for a, _ in value.node.pending.get(value.index, ())):
        return "P"
    mine = {factor for dim in value.dims for factor in dim}
    return "S" if any(cut.axis == axis and cut.factor in mine for cut in value.node.cuts) else "R"
