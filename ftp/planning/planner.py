"""Graph and specs to a plan: one cost network per mesh axis, each over the local shapes that the
axes before leave.

Decisions depend on global shapes and mesh sizes only, so that every rank reaches the same plan.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ftp.errors import PlanningError
from ftp.paused_gc import collection_paused
from ftp.planning.attention_ways import Ways, chosen_ways, cost_of
from ftp.planning.axis_hardware import hardware_of
from ftp.planning.axis_order import axis_orders
from ftp.planning.branches import placed
from ftp.planning.cost import DEFAULT, Hardware
from ftp.planning.cost_network import solve
from ftp.planning.fixed_layouts import fixed, reaches_of
from ftp.planning.graph import Graph, Node, Rewrite, in_turn
from ftp.planning.graph_passes import gather_again, keep_collectives
from ftp.planning.insert_reshards import insert_reshards, output_layouts, spec_of_cuts
from ftp.planning.layers.repeats import Folded, Ties, fold
from ftp.planning.layers.unfold import unfold
from ftp.planning.plan import FixedLayouts, Plan
from ftp.planning.problem import NotAlike, Problem
from ftp.planning.reachable_cuts import seeds_of_parts
from ftp.planning.repeated_elements import repeat_each
from ftp.planning.solver.reduce import Infeasible
from ftp.rules.decompositions.heads import OF_HEADS, shares_keys
from ftp.sharding.layout import Layout

FEW_NODES = 128  # at most, over all orders of the axes but the first, to plan in every order
WORTH = 0.01  # share of a plan's seconds that another order than the first must save

Decompose = Callable[..., Rewrite]  # see `ftp.planning.from_fx.decompose`
Watch = Callable[[Problem], None]


@dataclass(frozen=True)
class _Progress:
    """A graph between two passes, with the facts about its nodes.

    Attributes:
        batch: inputs whose shards fix those of activations on a data axis.
        folded: the fold, if the graph has layers left out.
        now: for each node of the original graph its node in ``graph``.
    """

    graph: Graph
    specs: FixedLayouts
    batch: Sequence[Node]
    now: Mapping[Node, Node]
    folded: Folded | None = None

    @classmethod
    def of(
        cls, graph: Graph, specs: FixedLayouts, batch: Sequence[Node], folded: Folded | None = None
    ) -> "_Progress":
        return cls(graph, specs, batch, {node: node for node in graph.nodes}, folded)

    def after(self, rewrite: Rewrite) -> "_Progress":
        """The program after a pass."""
        graph, copies = rewrite
        if graph is self.graph:
            return self
        folded = self.folded and self.folded.on(copies)
        batch = [copies[node] for node in self.batch]
        return _Progress(graph, self.specs.on(copies), batch, in_turn(self.now, copies), folded)

    def ties(self) -> Ties | None:
        """The tied layers; None where there are none, or they differ by now (`NotAlike`)."""
        if self.folded is None:
            return None
        ties = self.folded.ties(self.graph)
        if ties is None:
            raise NotAlike
        return ties


def make_plan(
    graph: Graph,
    axes: Mapping[str, int],
    specs: FixedLayouts,
    *,
    batch_inputs: Iterable[Node] = (),
    data_axes: Sequence[str] = (),
    reshard_after_forward: bool = True,
    hardware: Hardware = DEFAULT,
    decompose: Decompose | None = None,
    watch: Watch | None = None,
) -> Plan:
    """Plan ``graph``, which stays as it is, for a mesh of ``axes`` {name: size}.

    Args:
        batch_inputs: inputs whose shards fix those of activations on a data axis (placement
            constraint C1).
        data_axes: the axes on which parameters are resharded and activations are not.
        reshard_after_forward: gather a parameter again for the backward pass instead of keeping the
            gathered copy.
        decompose: replaces nodes by primitives where an axis may cut a factor that they keep whole.
        hardware: gives the prices; each axis has those of its own link.
        watch: called with each axis' problem before it is solved.

    Raises:
        PlanningError: where no program meets the specs.
    """
    with collection_paused():
        return _make_plan(
            graph,
            axes,
            specs,
            list(batch_inputs),
            data_axes,
            reshard_after_forward,
            hardware,
            decompose,
            watch,
        )


def _make_plan(
    graph: Graph,
    axes: Mapping[str, int],
    specs: FixedLayouts,
    batch: Sequence[Node],
    data_axes: Sequence[str],
    reshard_after_forward: bool,
    hardware: Hardware,
    decompose: Decompose | None,
    watch: Watch | None,
) -> Plan:
    given = specs
    orders, specs = axis_orders(graph, axes, given)
    args = axes, data_axes, reshard_after_forward, hardware, decompose

    def made(order: Sequence[str], ways: Ways, watch: Watch | None = None) -> Plan:
        # ``watch`` gets the problems of the whole graph, so layers are not folded.
        if (
            watch is None
            and specs is given
            and (plan := _plan_folded(graph, specs, batch, order, *args, ways)) is not None
        ):
            plan.graph, _ = placed(plan.graph)
            return plan
        start = _Progress.of(graph, specs, batch)
        plan, program = _plan_axes(start, order, *args, ways, watch=watch)
        program = program.after(placed(program.graph))
        plan.graph = program.graph
        return _as_given(plan, given, program)

    order, (ways, plan) = _in_best_order(
        graph, orders, lambda order: chosen_ways(partial(made, order), hardware), hardware
    )
    return plan if watch is None else made(order, ways, watch)


def _in_best_order(
    graph: Graph,
    orders: Sequence[Sequence[str]],
    made: Callable[[Sequence[str]], tuple[Ways, Plan]],
    hardware: Hardware,
) -> tuple[Sequence[str], tuple[Ways, Plan]]:
    """The order of the axes in which the plan takes least time, and that plan; the first order for
    graphs that are not small, or whose layers repeat.

    The axes planned first do not know what the others will cut: a value may be gathered twice.
    """
    best, (ways, plan) = orders[0], made(orders[0])
    if len(graph.nodes) * (len(orders) - 1) > FEW_NODES or plan.alike:
        return best, (ways, plan)
    least = cost_of(plan, hardware).seconds
    for order in orders[1:]:
        try:
            its_ways, found = made(order)
        except PlanningError:  # the first order has a plan
            continue
        seconds = cost_of(found, hardware).seconds
        if seconds < (1 - WORTH) * least and found.kept_rules == plan.kept_rules:
            least, best, ways, plan = seconds, order, its_ways, found
    return best, (ways, plan)


def _as_given(plan: Plan, given: FixedLayouts, program: _Progress) -> Plan:
    """The plan with the given specs. Inputs and outputs that were planned with other specs become
    entries and exits.
    """
    given, planned = given.on(program.now), program.specs
    plan.entries = {
        node: spec for node, spec in given.inputs.items() if spec != planned.inputs[node]
    }
    plan.exits = {
        i: spec
        for i, spec in enumerate(given.outputs)
        if spec is not None and spec != planned.outputs[i]
    }
    plan.out_specs = [
        found if spec is None else spec
        for spec, found in zip(given.outputs, plan.out_specs, strict=True)
    ]
    return plan


def plan_few(
    graph: Graph,
    axes: Mapping[str, int],
    specs: FixedLayouts,
    *,
    folded: Folded | None = None,
    batch_inputs: Iterable[Node] = (),
    data_axes: Sequence[str] = (),
    hardware: Hardware = DEFAULT,
    decompose: Decompose | None = None,
) -> Plan | None:
    """``make_plan`` of a graph that is folded already (``folded``), without unfolding; None if the
    tied layers get different plans.
    """
    with collection_paused():
        orders, fitting = axis_orders(graph, axes, specs)
        args = axes, data_axes, True, hardware, decompose

        def made(order: Sequence[str], ways: Ways) -> Plan:
            start = _Progress.of(graph, fitting, list(batch_inputs), folded)
            plan, program = _plan_axes(start, order, *args, ways)
            return _as_given(plan, specs, program)

        def in_order(order: Sequence[str]) -> tuple[Ways, Plan]:
            return chosen_ways(partial(made, order), hardware)

        try:
            if folded is not None:
                return in_order(orders[0])[1]
            return _in_best_order(graph, orders, in_order, hardware)[1][1]
        except NotAlike:
            return None


def _plan_folded(
    graph: Graph, specs: FixedLayouts, batch: Sequence[Node], *args: Any
) -> Plan | None:
    """The plan of a graph with repeated layers by a plan of the folded graph; None if no layers
    repeat or the tied layers get different plans.
    """
    is_batch = set(batch)
    folded = fold(
        graph,
        lambda node: (specs.inputs.get(node), node in is_batch, specs.constraints.get(node)),
        specs.outputs,
    )
    if folded is None:
        return None
    few = FixedLayouts(
        {copy: specs.inputs[node] for copy, node in folded.origin.items() if node in specs.inputs},
        {
            copy: specs.constraints[node]
            for copy, node in folded.origin.items()
            if node in specs.constraints
        },
        [specs.outputs[i] for i in folded.kept],
    )
    few_batch = [copy for copy, node in folded.origin.items() if node in is_batch]
    try:
        plan, program = _plan_axes(_Progress.of(folded.graph, few, few_batch, folded), *args)
    except NotAlike:
        return None
    assert program.folded is not None
    found = unfold(program.folded, program.graph)
    if found is None:
        return None
    plan.graph, like = found
    plan.out_specs = [plan.out_specs[i] for i in like]
    plan.alike = folded.left_out + 2
    return plan


def _plan_axes(
    program: _Progress,
    order: Sequence[str],
    axes: Mapping[str, int],
    data_axes: Sequence[str],
    reshard_after_forward: bool,
    hardware: Hardware,
    decompose: Decompose | None,
    ways: Ways | None = None,
    *,
    watch: Watch | None = None,
) -> tuple[Plan, _Progress]:
    """Plan one axis after another; returns the plan and its program.

    Args:
        ways: by axis, whether attention that can be a ring over it is one.

    Raises:
        NotAlike: tied layers differ.
    """
    if decompose is not None:
        program = _decompose_on_demand(program, order, axes, data_axes, decompose)
    plan = Plan(program.graph, {name: axes[name] for name in order})
    outputs = program.graph.outputs
    open_cuts: list[list[tuple[str, Layout]]] = [[] for _ in outputs]
    for at, name in enumerate(order):
        if axes[name] == 1:
            continue
        problem = _problem(program, name, order[:at], axes, name in data_axes, hardware)
        problem.by_ring = (ways or {}).get(name)
        try:
            if watch is not None:
                watch(problem)
            chosen = solve(problem)
        except Infeasible:
            raise PlanningError(
                f"No program meets the specs on mesh axis {name!r}, not even one that reshards"
                " everything."
                " This is a fault of ftp: please report it, with the function and the specs."
            ) from None
        plan.solutions[name], plan.kept_rules[name] = chosen.solution, chosen.kept_rules
        for cuts, layout in zip(
            open_cuts, output_layouts(program.graph, chosen, problem.outputs), strict=True
        ):
            cuts.append((name, layout))
        program = program.after(insert_reshards(program.graph, chosen, problem.outputs))
    program = program.after(keep_collectives(program.graph))
    if reshard_after_forward:
        program = program.after(gather_again(program.graph))
    plan.graph = program.graph
    plan.out_specs = [
        spec if spec is not None else spec_of_cuts(cuts, value.meta.ndim)
        for spec, cuts, value in zip(program.specs.outputs, open_cuts, outputs, strict=True)
    ]
    return plan, program


def _problem(
    program: _Progress,
    name: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    is_data: bool,
    hardware: Hardware,
) -> Problem:
    graph, specs, ties = program.graph, program.specs, program.ties()
    batch = program.batch
    pinned, outputs = fixed(graph, name, folded, axes, specs)
    reaches = reaches_of(graph, name, folded, axes, specs, batch if is_data else ())
    from_batch = reaches.from_batch()
    within = seeds_of_parts(from_batch)
    hardware = hardware_of(graph, hardware, name, folded, axes, ties)
    return Problem(
        graph,
        name,
        axes[name],
        hardware,
        reaches.from_specs(within),
        pinned,
        outputs,
        is_data,
        from_batch,
        ties,
        axes=axes,
        parts=reaches.of_parts(within),
    )


def _decompose_on_demand(
    program: _Progress,
    order: Sequence[str],
    axes: Mapping[str, int],
    data_axes: Sequence[str],
    decompose: Decompose,
) -> _Progress:
    """Replace ops by primitives where an axis may cut a factor that they keep whole, and views that
    repeat elements by ops where it may cut them in more parts than there are elements.

    On a data axis only the batch's cuts count: activations keep them.
    """
    while True:
        blocked: dict[Node, None] = {}
        across: dict[Node, None] = {}
        for at, name in enumerate(order):
            if axes[name] == 1:
                continue
            batch = program.batch if name in data_axes else ()
            reaches = reaches_of(program.graph, name, order[:at], axes, program.specs, batch)
            found = [reaches.from_batch() if name in data_axes else reaches.from_specs()]
            if name in data_axes:
                found.append(reaches.of_parts(seeds_of_parts(found[0])))
            for node in (n for one in found for n in one.blocked):
                if node.kind == "op" and node.rule.decompose:
                    blocked[node] = None
            across.update(found[0].across)
        smaller = program.after(repeat_each(program.graph, across))
        if smaller is program:
            shared = [
                n for n in across if shares_keys(n.target, [v.meta.shape for v in n.operands])
            ]
            smaller = program.after(decompose(program.graph, shared, table=OF_HEADS))
        if smaller is program and blocked:
            smaller = program.after(decompose(program.graph, blocked))
        if smaller is program:
            return program
        program = smaller
