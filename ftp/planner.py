"""Graph and specs to a plan: the cost network of one mesh axis after another, each over the shapes that the axes before left.

Decisions depend on global shapes and mesh sizes only, so that every rank reaches the same plan.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ftp.collection import collection_paused
from ftp.constrain import Pin
from ftp.cost import DEFAULT, VIEWS, Hardware, is_product
from ftp.eliminate import Infeasible, Solution
from ftp.errors import PlanningError
from ftp.graph import BATCH, FactorCut, Graph, Move, Node, Value, keep_collectives, live
from ftp.layout import Layout, R, Size, cut_extent, cut_shape, cut_size, div, is_even, mul, nominal, prod, shard
from ftp.network import AxisPlan, NotAlike, Problem, Strategy, is_at_rest, solve
from ftp.notation import Dim
from ftp.rank_program import factor
from ftp.reach import Cut, Reach, layout_of, reach
from ftp.registry import BoundRule
from ftp.repeats import Ties, fold, unfold
from ftp.spec import PartitionSpec, Units, is_factored

RECOMPUTED = VIEWS | {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}  # cheap enough to repeat on a regathered parameter


@dataclass(frozen=True)
class Specs:
    """What is fixed: a spec per input node, a pin per constraint node, and a spec per output (None: left open)."""

    inputs: Mapping[Node, PartitionSpec]
    constraints: Mapping[Node, Pin]
    outputs: Sequence[PartitionSpec | None]


@dataclass
class Plan:
    """A program with its moves, cut over every axis of the mesh.

    Attributes:
        axes: {name: size} in the order in which they were folded.
        solutions: per axis, what elimination found: cost in seconds, bound, largest table.
        kept_rules: per axis, whether a plan exists that keeps all rules of conduct.
        out_specs: per output.
        alike: how many repeated layers were planned as one (0: none); optima and bounds are then over plans that treat them alike.
        entries, exits: inputs that are gathered and outputs that are sliced beside the plan, and the specs that they have outside.
    """

    graph: Graph
    axes: dict[str, int]
    solutions: dict[str, Solution] = field(default_factory=dict)
    kept_rules: dict[str, bool] = field(default_factory=dict)
    out_specs: list[PartitionSpec] = field(default_factory=list)
    entries: dict[Node, PartitionSpec] = field(default_factory=dict)
    exits: dict[int, PartitionSpec] = field(default_factory=dict)
    alike: int = 0

    @property
    def cost(self) -> float:
        """Seconds of all axes' networks together."""
        return sum(s.cost for s in self.solutions.values())


Decompose = Callable[[Graph, Iterable[Node]], Graph]
Watch = Callable[[Problem], None]


def make_plan(
    graph: Graph,
    axes: Mapping[str, int],
    specs: Specs,
    *,
    batch_inputs: Iterable[Node] = (),
    data_axes: Sequence[str] = (),
    reshard_after_forward: bool = True,
    hardware: Hardware = DEFAULT,
    decompose: Decompose | None = None,
    watch: Watch | None = None,
) -> Plan:
    """Plan ``graph`` for a mesh of ``axes`` {name: size}.

    Args:
        batch_inputs: inputs whose cuts make an axis' activations stay in place (rule C1).
        data_axes: the axes on which parameters move rather than activations.
        reshard_after_forward: gather a parameter again for the backward pass instead of keeping the gathered copy.
        decompose: replaces nodes by primitives, where a factor that they keep whole is within reach.
        watch: sees each axis' problem before it is solved.

    Raises:
        PlanningError: where no program meets the specs.
    """
    with collection_paused():
        return _make_plan(graph, axes, specs, list(batch_inputs), data_axes, reshard_after_forward, hardware, decompose, watch)


def _make_plan(
    graph: Graph,
    axes: Mapping[str, int],
    specs: Specs,
    batch: Sequence[Node],
    data_axes: Sequence[str],
    reshard_after_forward: bool,
    hardware: Hardware,
    decompose: Decompose | None,
    watch: Watch | None,
) -> Plan:
    given = specs
    order, specs = _axis_order(graph, axes, given)
    args = order, axes, data_axes, reshard_after_forward, hardware, decompose
    # Who watches is to see the problems of the whole graph.
    if watch is None and specs is given and (plan := _plan_folded(graph, specs, batch, *args)) is not None:
        return plan
    plan = _plan_axes(graph, specs, batch, *args, watch=watch)
    assert plan is not None
    return _as_given(plan, given, specs)


def _as_given(plan: Plan, given: Specs, planned: Specs) -> Plan:
    """The plan with what it does where a spec could not be planned for."""
    plan.entries = {node: spec for node, spec in given.inputs.items() if spec != planned.inputs[node]}
    plan.exits = {i: spec for i, spec in enumerate(given.outputs) if spec is not None and spec != planned.outputs[i]}
    plan.out_specs = [found if spec is None else spec for spec, found in zip(given.outputs, plan.out_specs, strict=True)]
    return plan


def plan_few(
    graph: Graph,
    axes: Mapping[str, int],
    specs: Specs,
    *,
    ties: Callable[[Graph], Ties | None] | None = None,
    batch_inputs: Iterable[Node] = (),
    data_axes: Sequence[str] = (),
    decompose: Decompose | None = None,
) -> Plan | None:
    """``make_plan`` of a graph whose repeated layers are left out already and stay so; None where they come out different."""
    with collection_paused():
        order, fitting = _axis_order(graph, axes, specs)
        plan = _plan_axes(graph, fitting, list(batch_inputs), order, axes, data_axes, True, DEFAULT, decompose, ties=ties)
        return plan and _as_given(plan, specs, fitting)


def _plan_folded(graph: Graph, specs: Specs, batch: Sequence[Node], *args: Any) -> Plan | None:
    """The plan of a graph whose layers repeat, from that of one with fewer of them; None where they do not, or come out different."""
    is_batch = set(batch)
    folded = fold(graph, lambda node: (specs.inputs.get(node), node in is_batch, specs.constraints.get(node)), specs.outputs)
    if folded is None:
        return None
    few = Specs(
        {copy: specs.inputs[node] for copy, node in folded.origin.items() if node in specs.inputs},
        {copy: specs.constraints[node] for copy, node in folded.origin.items() if node in specs.constraints},
        [specs.outputs[i] for i in folded.kept],
    )
    plan = _plan_axes(folded.graph, few, [copy for copy, node in folded.origin.items() if node in is_batch], *args, ties=folded.ties)
    found = unfold(folded, plan.graph) if plan else None
    if plan is None or found is None:
        return None
    plan.graph, like = found
    plan.out_specs = [plan.out_specs[i] for i in like]
    plan.alike = folded.left_out + 2
    return plan


def _plan_axes(
    graph: Graph,
    specs: Specs,
    batch: Sequence[Node],
    order: Sequence[str],
    axes: Mapping[str, int],
    data_axes: Sequence[str],
    reshard_after_forward: bool,
    hardware: Hardware,
    decompose: Decompose | None,
    *,
    ties: Callable[[Graph], Ties | None] | None = None,
    watch: Watch | None = None,
) -> Plan | None:
    """The plan, one axis after another; None where layers that are to be decided alike are not alike."""
    if decompose is not None:
        graph = _decompose_on_demand(graph, order, axes, specs, batch, data_axes, decompose)
    plan = Plan(graph, {name: axes[name] for name in order})
    open_cuts: list[list[tuple[str, Layout]]] = [[] for _ in graph.outputs]
    for at, name in enumerate(order):
        if axes[name] == 1:
            continue
        tied = ties(plan.graph) if ties else None
        if ties and tied is None:
            return None
        problem = _problem(plan.graph, name, order[:at], axes, specs, batch, name in data_axes, hardware, tied)
        try:
            if watch is not None:
                watch(problem)
            chosen = solve(problem)
        except NotAlike:
            return None
        except Infeasible:
            raise PlanningError(
                f"No program meets the specs on mesh axis {name!r}, not even one that moves everything."
                " This is a fault of ftp: please report it, with the function and the specs."
            ) from None
        plan.solutions[name], plan.kept_rules[name] = chosen.solution, chosen.kept_rules
        for cuts, layout in zip(open_cuts, _output_layouts(plan.graph, chosen, problem.outputs), strict=True):
            cuts.append((name, layout))
        plan.graph = apply(plan.graph, chosen, problem.outputs)
    plan.graph = keep_collectives(plan.graph)
    if reshard_after_forward:
        plan.graph = gather_again(plan.graph)
    plan.out_specs = [
        spec if spec is not None else _spec_of(cuts, value.meta.ndim)
        for spec, cuts, value in zip(specs.outputs, open_cuts, graph.outputs, strict=True)
    ]
    return plan


def _problem(
    graph: Graph,
    name: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    specs: Specs,
    batch: Sequence[Node],
    is_data: bool,
    hardware: Hardware,
    ties: Ties | None,
) -> Problem:
    pinned, outputs = _fixed(graph, name, folded, axes, specs)
    from_specs, from_batch = _reaches(graph, name, folded, axes, specs, batch if is_data else ())
    hardware = replace(hardware, link=replace(hardware.link, latency=planned_latency(graph, hardware, ties)))
    return Problem(graph, name, axes[name], hardware, from_specs(), pinned, outputs, is_data, from_batch(), ties)


def _fixed(
    graph: Graph, name: str, folded: Sequence[str], axes: Mapping[str, int], specs: Specs
) -> tuple[dict[Node, Layout], list[Layout | None]]:
    """The layouts on one axis of inputs and constraints, and of outputs (None: open)."""
    pinned = {
        node: spec_layout(spec, node.shape(), name, axes, folded) or R
        for node, spec in (*specs.inputs.items(), *((node, pin.spec) for node, pin in specs.constraints.items() if pin.holds(name)))
    }
    pinned.update((node, R) for node in graph.inputs if node not in pinned)
    outputs = [
        None if spec is None else spec_layout(spec, value.shape, name, axes, folded) or R
        for spec, value in zip(specs.outputs, graph.outputs, strict=True)
    ]
    return pinned, outputs


def _reaches(
    graph: Graph, name: str, folded: Sequence[str], axes: Mapping[str, int], specs: Specs, batch: Sequence[Node]
) -> tuple[Callable[[], Reach], Callable[[], Reach]]:
    """What one axis may cut, closed from all that is fixed, and from the ``batch`` inputs alone."""
    pinned, outputs = _fixed(graph, name, folded, axes, specs)
    n = axes[name]
    constrained = [(v, pinned[node]) for node, pin in specs.constraints.items() if pin.holds(name) for v in (Value(node), node.operands[0])]
    # Per-rank code says where its operands and results are, as a constraint does.
    own: dict[Node, list[Cut]] = {node: [(factor(name), 1, 1)] for node in graph.nodes if node.kind == "local"}
    for node, (cut,) in own.items():
        there = [(v, layout_of(dims, node.sizes, cut, n)) for v, dims in zip(node.operands, node.rule.operands, strict=True)]
        there += [(Value(node, i), layout_of(dims, node.sizes, cut, n)) for i, dims in enumerate(node.rule.results)]
        constrained += [(v, layout) for v, layout in there if layout.kind == "S"]

    def from_specs() -> Reach:
        seeds = [(Value(node), layout) for node, layout in pinned.items()]
        seeds += [(value, layout) for value, layout in zip(graph.outputs, outputs, strict=True) if layout is not None]
        found = reach(graph, n, seeds + constrained, pinned)
        found.cuts.update(own)
        return found

    def from_batch() -> Reach:
        # A constraint on a data axis says where activations stay, and the closure does not pass through it.
        return reach(graph, n, [(Value(node), pinned[node]) for node in batch] + constrained, pinned) if batch else Reach()

    return from_specs, from_batch


SMALL_LATENCY = 0.1  # of the time that the program's median activation takes on the link


def planned_latency(graph: Graph, hardware: Hardware, ties: Ties | None) -> float:
    """Seconds that a collective costs however small it is, as planned with.

    A toy's tensors are all latency; planned so, it would be all about counting collectives, unlike the model that it stands for.
    """
    sizes = [
        math.prod(map(nominal, Value(node).shape)) * node.results[0].dtype.itemsize
        for node in graph.nodes
        if node.kind == "op" and node.depends & BATCH and is_product(node.target)
        for _ in range(ties.weight(node) if ties else 1)
    ]
    return (
        min(hardware.link.latency, SMALL_LATENCY * statistics.median(sizes) / hardware.link.bandwidth) if sizes else hardware.link.latency
    )


def spec_layout(spec: PartitionSpec, shape: Sequence[Size], axis: str, axes: Mapping[str, int], folded: Sequence[str]) -> Layout | None:
    """The layout on ``axis`` of a value of local ``shape`` under ``spec``; None where a more major axis must be folded first."""
    for dim in range(len(spec)):
        outer, unit = 1, None
        cuts = spec.cuts(dim)
        for at, cut in enumerate(cuts):
            if cut.axis == axis:
                # A minor axis that is folded already has cut within this one's units: what is left is cut evenly, or did not fit before.
                unit = 1 if any(c.axis in folded for c in cuts[at + 1 :]) else cut.size
                outer *= _packs(cut)
                break
            if cut.axis not in folded:
                if _packs(cut) > 1 or (cut.size > 1 and div(shape[dim], outer * axes[cut.axis] * cut.size) is None):
                    return None
                outer *= axes[cut.axis]
        if unit is not None:
            extent = div(shape[dim], outer * unit)
            return None if extent is None else shard(dim, outer, extent, unit, axes[axis])
    return R


def _axis_order(graph: Graph, axes: Mapping[str, int], specs: Specs) -> tuple[list[str], Specs]:
    """The order of the axes, mesh order preferred, in which most specs are a cut of ``[outer, f, inner]``, and the specs to plan for.

    A dim that does not divide and is cut by the same axes in both orders fits no order twice, packs of several sizes and units that ranks
    share fit none. Such a dim is planned as whole: it is gathered where it comes in and sliced where it goes out.
    """
    shaped = [(spec, node.results[0].shape) for node, spec in specs.inputs.items()]
    shaped += [(pin.spec, node.results[0].shape) for node, pin in specs.constraints.items()]
    shaped += [(spec, value.meta.shape) for spec, value in zip(specs.outputs, graph.outputs, strict=True) if spec is not None]
    nested = [(spec, shape) for spec, shape in shaped if any(_is_nested(spec, d) for d in range(len(spec)))]
    orders = list(itertools.permutations(axes)) if len(axes) <= 4 else [tuple(axes)]
    misfits = [sum(not _fits(spec, shape, order, axes) for spec, shape in nested) for order in orders]
    order = orders[misfits.index(min(misfits))]
    if not min(misfits):
        return list(order), specs

    def fitting(spec: PartitionSpec, shape: Sequence[Size]) -> PartitionSpec:
        if _fits(spec, shape, order, axes):
            return spec
        return PartitionSpec(*[None if _is_nested(spec, d) else entry for d, entry in enumerate(spec)])

    return list(order), Specs(
        {node: fitting(spec, node.results[0].shape) for node, spec in specs.inputs.items()},
        {node: replace(pin, spec=fitting(pin.spec, node.results[0].shape)) for node, pin in specs.constraints.items()},
        [spec if spec is None else fitting(spec, v.meta.shape) for spec, v in zip(specs.outputs, graph.outputs, strict=True)],
    )


def _packs(cut: Units) -> int:
    return cut.pack if isinstance(cut.pack, int) else len(cut.pack)


def _is_nested(spec: PartitionSpec, dim: int) -> bool:
    return len(spec.cuts(dim)) > 1 or not all(cut.is_plain for cut in spec.cuts(dim))


def _fits(spec: PartitionSpec, shape: Sequence[Size], order: Sequence[str], axes: Mapping[str, int]) -> bool:
    if not all(isinstance(size, int) and is_factored(spec, dim, size, dict(axes)) for dim, size in enumerate(shape)):
        return False
    local = tuple(shape)
    for at, name in enumerate(order):
        layout = spec_layout(spec, local, name, axes, order[:at])
        if layout is None:
            return False
        local = cut_shape(local, layout, name, axes[name])
    return True


def _decompose_on_demand(
    graph: Graph,
    order: Sequence[str],
    axes: Mapping[str, int],
    specs: Specs,
    batch: Sequence[Node],
    data_axes: Sequence[str],
    decompose: Decompose,
) -> Graph:
    """Replace ops by primitives wherever an axis may cut a factor that they keep whole.

    On a data axis only what the batch cuts counts: there activations stay as the batch cuts them, whatever their parameters' layouts reach.
    """
    while True:
        blocked: dict[Node, None] = {}
        for at, name in enumerate(order):
            if axes[name] == 1:
                continue
            from_specs, from_batch = _reaches(graph, name, order[:at], axes, specs, batch if name in data_axes else ())
            found = from_batch() if name in data_axes else from_specs()
            blocked.update(dict.fromkeys(n for n in found.blocked if n.kind == "op" and n.rule.decompose))
        smaller = decompose(graph, blocked) if blocked else graph
        if smaller is graph:
            return graph
        graph = smaller


def apply(graph: Graph, plan: AxisPlan, outputs: Sequence[Layout | None]) -> Graph:
    """The graph with one axis folded in: its moves are nodes, its cuts are in the nodes' sizes."""
    emitter = _Emitter(graph, plan)
    users = graph.users()
    required: dict[Value, list[Layout]] = {}
    for value, layout in zip(graph.outputs, outputs, strict=True):
        if layout is not None:
            required.setdefault(value, []).append(layout)
    for node in graph.nodes:
        needs = plan.strategies[node].operands
        fresh = [emitter.obtain(value, need, node) for value, need in zip(node.operands, needs, strict=True)]
        emitter.nodes.append(node)
        emitter.rewired[node] = fresh
        for index in range(len(node.results)):
            value = Value(node, index)
            for layout in required.get(value, ()):
                emitter.obtain(value, layout, None)
            if node.depends & BATCH:
                for user, slot in users.get(value, ()):
                    emitter.obtain(value, plan.strategies[user].operands[slot], user)
    final = [
        emitter.obtain(value, layout or _at_rest(plan.strategies[value.node].results[value.index], plan.copies.get(value, ())), None)
        for value, layout in zip(graph.outputs, outputs, strict=True)
    ]
    for node, fresh in emitter.rewired.items():
        node.replace_operands(fresh)
    for node in graph.nodes:
        _cut(node, plan.strategies[node], plan.axis, plan.n)
    return live(Graph(emitter.nodes, final))


def _at_rest(home: Layout, copies: Sequence[Layout]) -> Layout:
    """The layout in which an output that is left open is returned."""
    return next(layout for layout in (home, *copies) if is_at_rest(layout))


def _output_layouts(graph: Graph, plan: AxisPlan, outputs: Sequence[Layout | None]) -> list[Layout]:
    return [
        layout or _at_rest(plan.strategies[value.node].results[value.index], plan.copies.get(value, ()))
        for value, layout in zip(graph.outputs, outputs, strict=True)
    ]


def _spec_of(cuts: Sequence[tuple[str, Layout]], ndim: int) -> PartitionSpec:
    entries: list[tuple[str, ...]] = [()] * ndim
    for name, layout in cuts:
        if layout.kind == "S":
            assert layout.outer == layout.inner == 1, f"an open output is cut as {layout}"
            entries[layout.dim] += (name,)
    return PartitionSpec(*[e or None for e in entries])


def _cut(node: Node, strategy: Strategy, axis: str, n: int) -> None:
    for index, layout in enumerate(strategy.results):
        if layout.kind == "P":
            node.pending.setdefault(index, []).append((axis, layout.op))
    if strategy.cut is None:
        return
    factor, outer, inner = strategy.cut
    extent = div(node.sizes[factor], mul(outer, inner))
    assert extent is not None
    node.cuts.append(FactorCut(axis, factor, outer, extent, inner))
    node.sizes[factor] = prod((outer, cut_size(extent, axis, n), inner))


class _Emitter:
    """Makes each copy of a value once."""

    def __init__(self, graph: Graph, plan: AxisPlan):
        self.plan = plan
        self.nodes: list[Node] = []
        self.rewired: dict[Node, list[Value]] = {}
        self.made: dict[tuple[Value, Layout], Value] = {}
        self.shapes = {Value(node, i): node.shape(i) for node in graph.nodes for i in range(len(node.results))}

    def obtain(self, value: Value, need: Layout, user: Node | None) -> Value:
        """``value`` in the layout ``need``, by the moves that the plan chose."""
        home = self.plan.strategies[value.node].results[value.index]
        need = R if need.kind == "R" else need
        if need == home or (need == R and home.kind == "R"):
            return value
        if (value, need) in self.made:
            return self.made[value, need]
        copies = self.plan.copies.get(value, ())
        source, at = value, home
        if (need.kind == "S" and need not in copies and any(c.kind == "R" for c in copies)) or (
            need.kind != "R" and home.kind == "P" and home.op != "sum"
        ):
            source, at = self.obtain(value, R, user), R
        moved = self._move(value, source, at, need, user)
        self.made[value, need] = moved
        return moved

    def _move(self, value: Value, source: Value, src: Layout, dst: Layout, user: Node | None) -> Value:
        move = Move(self.plan.axis, self.plan.n, R if src.kind == "R" else src, dst, self.shapes[value])
        rule, sizes = move_rule(move)
        cause = "an output" if user is None else f"{user.name} at {user.source}" if user.source else user.name
        name = f"{value!r}_{move.op}_{self.plan.axis}".replace("[", "_").replace("]", "")
        node = Node(
            name,
            "move",
            move,
            (source,),
            {},
            (value.meta,),
            rule,
            value.node.source,
            value.node.depends,
            user.phase if user else value.node.phase,
            value.node.region,
            cause,
        )
        node.sizes = sizes
        self.nodes.append(node)
        return Value(node)


def move_rule(move: Move) -> tuple[BoundRule, dict[str, Size]]:
    """Factors of a move for the axes that are folded after it: what other axes may cut while this one moves the value.

    In ``[outer, f, inner]`` an even ``f`` is ``n`` chunks of ``g``, and ``g`` may be cut further; an uneven one stays whole.
    """
    sizes: dict[str, Size] = {}
    whole: set[str] = set()
    operand: list[Dim] = [(f"~{d}",) for d in range(len(move.shape))]
    result = list(operand)
    sizes.update({f"~{d}": s for d, s in enumerate(move.shape)})
    same = move.src.kind == move.dst.kind == "S" and move.src.dim == move.dst.dim
    for layout, here, there in ((move.src, operand, result), (move.dst, result, operand)):
        if layout.kind != "S":
            continue
        d = layout.dim
        extent = cut_extent(move.shape[d], layout)
        assert extent is not None
        local = cut_size(extent, move.axis, move.n)
        if same:
            side = "x" if here is operand else "y"
            here[d] = (f"{side}o", f"{side}g", f"{side}i")
            sizes.update({f"{side}o": layout.outer, f"{side}g": local, f"{side}i": layout.inner, f"{side}f": extent})
            whole |= {f"{side}o", f"{side}g", f"{side}i"}
        else:
            o, g, i, m, h = (f"{letter}{d}" for letter in "ogimh")
            sizes.update({o: layout.outer, g: local, i: layout.inner})
            here[d] = (o, g, i)
            if is_even(extent, move.n):
                sizes[m] = move.n
                whole.add(m)
                there[d] = (o, m, g, i)
            else:
                sizes[h] = extent
                whole |= {g, h}
                there[d] = (o, h, i)
        sizes.pop(f"~{d}", None)
    linear = () if move.src.kind == "P" and move.src.op != "sum" else ((0,),)
    nominal_sizes = {f: nominal(s) for f, s in sizes.items()}
    return BoundRule((tuple(operand),), (tuple(result),), frozenset(whole), ({},), linear, nominal_sizes, None, False), sizes


def gather_again(graph: Graph) -> Graph:
    """The graph in which each pass, forward or backward, gathers parameters anew (``reshard_after_forward``)."""
    made: dict[tuple[Node, int], Node] = {}
    nodes: list[Node] = []

    def again(value: Value, phase: int) -> Value:
        node = value.node
        if not _is_regatherable(node):
            return value
        if (node, phase) not in made:
            operands = [again(v, phase) for v in node.operands]
            name = f"{node.name}_again" if phase == 1 else f"{node.name}_again_{phase}"
            copy = replace(node, name=name, phase=phase, sizes=dict(node.sizes), cuts=list(node.cuts))
            copy.replace_operands(operands)
            made[node, phase] = copy
            nodes.append(copy)
        return Value(made[node, phase], value.index)

    gathered: dict[Node, bool] = {}
    for node in graph.nodes:
        is_gather = node.kind == "move" and node.target.op == "all_gather" and not node.depends & BATCH
        gathered[node] = is_gather or (_is_regatherable(node) and any(gathered[v.node] for v in node.operands))
        node.replace_operands([again(v, node.phase) if v.node.phase < node.phase and gathered[v.node] else v for v in node.operands])
        nodes.append(node)
    return live(Graph(nodes, graph.outputs))


def _is_regatherable(node: Node) -> bool:
    if node.depends & BATCH or node.kind == "input":
        return False
    return node.kind == "move" or (node.kind == "op" and node.target in RECOMPUTED)
