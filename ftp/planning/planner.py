"""Graph and specs to a plan: one cost network per mesh axis, each over the local shapes that the
axes before leave (``axis_by_axis``). Orders of the axes and ways of attention are compared, and of
equal layers a few are planned for all.

Decisions depend on global shapes and mesh sizes only, so that every rank reaches the same plan.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ftp.errors import PlanningError
from ftp.paused_gc import collection_paused
from ftp.planning.attention_ways import Ways, chosen_ways, cost_of
from ftp.planning.axis_by_axis import Decompose, PlanFor, Progress, plan_axes
from ftp.planning.axis_order import axis_orders
from ftp.planning.branches import placed
from ftp.planning.cost import DEFAULT, Hardware
from ftp.planning.graph import Graph, Node
from ftp.planning.known_passes import KnownPasses
from ftp.planning.layers.repeats import Folded, fold
from ftp.planning.layers.unfold import unfold
from ftp.planning.plan import FixedLayouts, Plan
from ftp.planning.problem import NotAlike, Watch
from ftp.planning.reachable_cuts import shared_factor
from ftp.planning.windowed import fits
from ftp.rules.op_kinds import VIEWS
from ftp.rules.windows import OVERLAYS, WINDOWED

FEW_NODES = 128  # at most, to plan in every order of the axes
FEW_IN_ALL = 320  # at most, over all orders but the first
WORTH = 0.01  # share of a plan's seconds that another order than the first must save


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
    known: KnownPasses | None = None,
) -> Plan:
    """Plan ``graph``, which stays as it is, for a mesh of ``axes`` {name: size}.

    Args:
        batch_inputs: inputs whose shards fix those of activations on a data axis (placement
            constraint C1).
        data_axes, reshard_after_forward, decompose: as of `PlanFor`.
        hardware: gives the prices; each axis has those of its own link.
        watch: called with each axis' problem before it is solved.
        known: of plans of the same graph with the same arguments but ``specs``.

    Raises:
        PlanningError: where no program meets the specs.
    """
    known = known or KnownPasses()
    make = partial(_make_plan, graph, specs, list(batch_inputs))
    with collection_paused():
        to = PlanFor(axes, data_axes, hardware, reshard_after_forward, decompose, known)
        to, plan = _with_moves_or_without(make, to)
        assert plan is not None
        return plan if watch is None else make(to, watch)


def _with_moves_or_without(
    make: Callable[[PlanFor], Plan | None], to: PlanFor
) -> tuple[PlanFor, Plan | None]:
    """The best of three plans, and what it is for: with ops on windows and cuts that move to other
    dims, where it is faster than without and keeps as many placement constraints; with windows
    alone, where it keeps more of them; without both. The first two are made only where the last
    breaks a constraint or gathers for an op that may do without.
    """
    plain = replace(to, windows=False, moves=False)
    plan = make(plain)
    if plan is None:
        return plain, None
    kept, seconds = sum(plan.kept_rules.values()), cost_of(plan, to.hardware).seconds
    breaks = kept < len(plan.kept_rules)
    for moves, is_tried in zip((True, False), _gathers_needlessly(plan), strict=True):
        its = replace(plain, windows=True, moves=moves)
        found = make(its) if is_tried or breaks else None
        if found is None:
            continue
        more = sum(found.kept_rules.values()) - kept
        is_faster = cost_of(found, to.hardware).seconds < seconds
        if (more >= 0 and is_faster) or (more > 0 and not moves):
            return its, found
    return plain, plan


def _gathers_needlessly(plan: Plan) -> tuple[bool, bool]:
    """Whether ops that need a dim whole read a gathered one, where the cut may move to another dim;
    and whether ops do that have windows.
    """
    moves = windows = False
    for node in plan.graph.nodes:
        for slot, value in enumerate(node.operands):
            at = value.node
            while at.kind == "op" and at.target in VIEWS:
                at = at.operands[0].node
            if at.kind != "reshard" or at.target.src.kind != "S" or at.target.dst.kind == "S":
                continue
            n, dims = at.target.n, node.rule.operands[slot]
            if node.target in WINDOWED and (node.target in OVERLAYS or not slot):
                windows = windows or any(fits(node, n, dim) for dim in range(len(dims)))
            whole = [f for dim in dims for f in dim if f in node.rule.whole]
            moves = moves or (bool(whole) and shared_factor(node, whole, n) is not None)
    return moves, windows


def _make_plan(
    graph: Graph,
    given: FixedLayouts,
    batch: Sequence[Node],
    to: PlanFor,
    watch: Watch | None = None,
) -> Plan:
    orders, specs = axis_orders(graph, to.axes, given)
    whole = Progress.of(graph, specs, batch)
    few = _folded(whole, to.known) if specs is given else None

    def made(order: Sequence[str], ways: Ways, watch: Watch | None = None) -> Plan:
        # ``watch`` gets the problems of the whole graph.
        if few is not None and watch is None:
            plan = _plan_unfolded(few, order, to, ways)
            if plan is not None:
                return plan
        plan, program = plan_axes(whole, order, to, ways, watch)
        program = program.after(placed(program.graph))
        plan.graph = program.graph
        return _as_given(plan, given, program)

    order, (ways, plan) = _in_best_order(
        graph, orders, lambda order: chosen_ways(partial(made, order), to.hardware), to.hardware
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
    count = len(graph.nodes)
    if count > FEW_NODES or count * (len(orders) - 1) > FEW_IN_ALL or plan.alike:
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


def _as_given(plan: Plan, given: FixedLayouts, program: Progress) -> Plan:
    """The plan with the given specs. Inputs and outputs that were planned with other specs become
    entries and exits.
    """
    given, planned = given.on(program.copy_of), program.specs
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
    known: KnownPasses | None = None,
    order: Sequence[str] | None = None,
) -> Plan | None:
    """``make_plan`` of ``graph`` without the layers that ``folded`` leaves out; None if the tied
    layers get different plans.

    Args:
        order: plan the axes in this order alone.
    """
    to = PlanFor(axes, data_axes, hardware, decompose=decompose, known=known or KnownPasses())
    with collection_paused():
        orders, fitting = axis_orders(graph, axes, specs)
        if order in orders:
            orders = [order]
        start = Progress.of(graph, fitting, list(batch_inputs))
        if folded is not None:
            start, specs = _of_few(start, folded), _few_specs(specs, folded)

        def make(to: PlanFor) -> Plan | None:
            def made(order: Sequence[str], ways: Ways) -> Plan:
                plan, program = plan_axes(start, order, to, ways)
                return _as_given(plan, specs, program)

            def in_order(order: Sequence[str]) -> tuple[Ways, Plan]:
                return chosen_ways(partial(made, order), hardware)

            try:
                if folded is not None:
                    return in_order(orders[0])[1]
                return _in_best_order(graph, orders, in_order, hardware)[1][1]
            except NotAlike:
                return None

        return _with_moves_or_without(make, to)[1]


def _folded(whole: Progress, known: KnownPasses) -> Progress | None:
    """The program without most of its repeated layers; None if no layers repeat."""
    specs, is_batch = whole.specs, set(whole.batch)
    folded = fold(
        whole.graph,
        lambda node: (specs.inputs.get(node), node in is_batch, specs.constraints.get(node)),
        specs.outputs,
        known,
    )
    return None if folded is None else _of_few(whole, folded)


def _of_few(whole: Progress, folded: Folded) -> Progress:
    """The program without the layers that a fold leaves out."""
    is_batch = set(whole.batch)
    batch = [copy for copy, node in folded.origin.items() if node in is_batch]
    return Progress.of(folded.graph, _few_specs(whole.specs, folded), batch, folded)


def _few_specs(specs: FixedLayouts, folded: Folded) -> FixedLayouts:
    few = folded.origin.items()
    return FixedLayouts(
        {copy: specs.inputs[node] for copy, node in few if node in specs.inputs},
        {copy: specs.constraints[node] for copy, node in few if node in specs.constraints},
        [specs.outputs[i] for i in folded.kept],
    )


def _plan_unfolded(few: Progress, order: Sequence[str], to: PlanFor, ways: Ways) -> Plan | None:
    """The plan of all layers by a plan of few; None if the tied layers get different plans."""
    try:
        plan, program = plan_axes(few, order, to, ways)
    except NotAlike:
        return None
    assert program.folded is not None
    found = unfold(program.folded, program.graph)
    if found is None:
        return None
    graph, like = found
    plan.graph, _ = placed(graph)
    plan.out_specs = [plan.out_specs[i] for i in like]
    plan.alike = (program.folded.left_out + 2) * program.folded.period
    return plan
