"""Plan one mesh axis after another, each over the local shapes that the axes before leave."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import NamedTuple

from ftp.dataclass import dataclass
from ftp.errors import PlanningError
from ftp.planning.axis_hardware import hardware_of
from ftp.planning.cost import Hardware
from ftp.planning.cost_network import solve
from ftp.planning.fixed_layouts import Reaches, fixed
from ftp.planning.graph import Graph, Node, Rewrite, in_turn
from ftp.planning.graph_passes import gather_again, keep_collectives
from ftp.planning.insert_reshards import insert_reshards, output_layouts, spec_of_cuts
from ftp.planning.known_passes import KnownPasses
from ftp.planning.layers.repeats import Folded, Ties
from ftp.planning.plan import FixedLayouts, Plan
from ftp.planning.problem import AxisPlan, NotAlike, Problem, Watch
from ftp.planning.reachable_cuts import Reach
from ftp.planning.repeated_elements import repeat_each
from ftp.planning.solver.reduce import Infeasible
from ftp.planning.windowed import Blocked, in_windows
from ftp.rules.decompositions.heads import OF_HEADS, shares_keys
from ftp.sharding.layout import Layout

Decompose = Callable[..., Rewrite]  # see `ftp.planning.from_fx.decompose`


@dataclass(frozen=True)
class PlanFor:
    """What programs are planned for.

    Attributes:
        axes: the mesh's axes, {name: size}.
        data_axes: the axes on which parameters are resharded and activations are not.
        reshard_after_forward: gather a parameter again for the backward pass instead of keeping the
            gathered copy.
        decompose: replaces nodes by primitives where an axis may cut a factor that they keep whole.
        known: results of passes that plans of one program share.
        windows: whether ops along a cut dim may become ops on windows.
        moves: whether the cut of a dim that an op needs whole may move to another dim.
    """

    axes: Mapping[str, int]
    data_axes: Sequence[str]
    hardware: Hardware
    reshard_after_forward: bool = True
    decompose: Decompose | None = None
    known: KnownPasses = field(default_factory=KnownPasses)
    windows: bool = True
    moves: bool = True


@dataclass(frozen=True)
class Progress:
    """A graph between two passes, with the facts about its nodes.

    Attributes:
        batch: inputs whose shards fix those of activations on a data axis.
        copy_of: per node of the original graph, the node of ``graph`` that stands for it.
        folded: the fold, if the graph has layers left out.
    """

    graph: Graph
    specs: FixedLayouts
    batch: Sequence[Node]
    copy_of: Mapping[Node, Node]
    folded: Folded | None = None

    @classmethod
    def of(
        cls, graph: Graph, specs: FixedLayouts, batch: Sequence[Node], folded: Folded | None = None
    ) -> "Progress":
        return cls(graph, specs, batch, {node: node for node in graph.nodes}, folded)

    def after(self, rewrite: Rewrite) -> "Progress":
        """The program after a pass."""
        graph, copies = rewrite
        if graph is self.graph:
            return self
        folded = self.folded and self.folded.on(copies)
        batch = [copies[node] for node in self.batch]
        return Progress(graph, self.specs.on(copies), batch, in_turn(self.copy_of, copies), folded)

    def ties(self) -> Ties | None:
        """The tied layers; None where there are none, or they differ by now (`NotAlike`)."""
        if self.folded is None:
            return None
        ties = self.folded.ties(self.graph)
        if ties is None:
            raise NotAlike
        return ties


def plan_axes(
    program: Progress,
    order: Sequence[str],
    to: PlanFor,
    ways: Mapping[str, bool] | None = None,
    watch: Watch | None = None,
) -> tuple[Plan, Progress]:
    """Plan one axis after another; returns the plan and its program.

    Args:
        ways: by axis, whether attention that can be a ring over it is one.
        watch: called with each axis' problem before it is solved.

    Raises:
        NotAlike: tied layers differ.
    """
    if to.decompose is not None:
        program = _on_primitives(program, order, to, to.decompose)
    plan = Plan(program.graph, {name: to.axes[name] for name in order})
    outputs = program.graph.outputs
    open_cuts: list[list[tuple[str, Layout]]] = [[] for _ in outputs]
    for at, name in enumerate(order):
        if to.axes[name] == 1:
            continue
        step = _plan_axis(program, name, order[:at], to, (ways or {}).get(name), watch)
        plan.solutions[name], plan.kept_rules[name] = step.plan.solution, step.plan.kept_rules
        for cuts, layout in zip(open_cuts, step.outputs, strict=True):
            cuts.append((name, layout))
        program = program.after(step.rewrite)
    program = program.after(program.graph.copied())  # passes from here on rename and rewire nodes
    program = program.after(keep_collectives(program.graph))
    if to.reshard_after_forward:
        program = program.after(gather_again(program.graph))
    plan.graph = program.graph
    plan.out_specs = [
        spec if spec is not None else spec_of_cuts(cuts, value.meta.ndim)
        for spec, cuts, value in zip(program.specs.outputs, open_cuts, outputs, strict=True)
    ]
    return plan, program


class _PlannedAxis(NamedTuple):
    """An axis' plan, the layout in which each output is returned, and the graph after the axis."""

    plan: AxisPlan
    outputs: list[Layout]
    rewrite: Rewrite


def _plan_axis(
    program: Progress,
    name: str,
    folded: Sequence[str],
    to: PlanFor,
    by_ring: bool | None,
    watch: Watch | None,
) -> _PlannedAxis:
    """Plan one axis after the axes that are ``folded``.

    Args:
        by_ring: whether attention that can be a ring over the axis is one; None: the cheaper.
    """
    reaches = _reaches(program, name, folded, to)

    def solved() -> _PlannedAxis:
        problem = replace(_problem(program, reaches, folded, to), by_ring=by_ring)
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
        outputs = output_layouts(program.graph, chosen, problem.outputs)
        return _PlannedAxis(
            chosen, outputs, insert_reshards(program.graph, chosen, problem.outputs)
        )

    if watch is not None:
        return solved()
    facts = "axis", by_ring, bool(_moved(reaches, to).layouts), *folded, *reaches.facts
    return to.known.once(program.graph, *facts, make=solved)


def _problem(program: Progress, reaches: Reaches, folded: Sequence[str], to: PlanFor) -> Problem:
    graph, name, ties = program.graph, reaches.name, program.ties()
    moved = _moved(reaches, to)
    return Problem(
        graph,
        name,
        reaches.n,
        hardware_of(graph, to.hardware, name, folded, to.axes, ties),
        reaches.from_specs.with_cuts(moved),
        reaches.pinned,
        reaches.outputs,
        name in to.data_axes,
        reaches.from_batch,
        ties,
        axes=to.axes,
        parts=reaches.of_parts.with_cuts(moved),
    )


def _moved(reaches: Reaches, to: PlanFor) -> Reach:
    return reaches.moved if to.moves else Reach()


def _reaches(program: Progress, name: str, folded: Sequence[str], to: PlanFor) -> Reaches:
    """The cuts that an axis may make, after the axes that are ``folded``."""
    pinned, outputs = fixed(program.graph, name, folded, to.axes, program.specs)
    batch = program.batch if name in to.data_axes else ()
    found = Reaches(program.graph, name, to.axes[name], pinned, outputs, batch)
    return to.known.once(program.graph, "reaches", *found.facts, make=lambda: found)


def _on_primitives(
    program: Progress, order: Sequence[str], to: PlanFor, decompose: Decompose
) -> Progress:
    """Replace ops by primitives where an axis may cut a factor that they keep whole, and views that
    repeat elements by ops where it may cut them in more parts than there are elements.

    On a data axis only the batch's cuts count: activations keep them.
    """
    while True:
        blocked: dict[Node, None] = {}
        across: dict[Node, None] = {}
        by_ranks: dict[int, dict[Node, int | None]] = {}
        for at, name in enumerate(order):
            if to.axes[name] == 1:
                continue
            reaches = _reaches(program, name, order[:at], to)
            reaches = reaches.ahead if to.windows else reaches
            is_data = name in to.data_axes
            found = [reaches.from_batch, reaches.of_parts] if is_data else [reaches.from_specs]
            by_node = by_ranks.setdefault(to.axes[name], {})
            for one in found:
                blocked.update(dict.fromkeys(one.blocked))
                for node, dim in one.windows.items():
                    by_node[node] = dim if by_node.get(node) is None else by_node[node]
            across.update(found[0].across)
        blocked = {n: None for n in blocked if n.kind == "op" and n.rule.decompose}
        smaller = program.after(
            _known_rewrite(program.graph, blocked, across, by_ranks, to, decompose)
        )
        if smaller is program:
            return program
        program = smaller


def _known_rewrite(
    graph: Graph,
    blocked: Collection[Node],
    across: Collection[Node],
    by_ranks: Blocked,
    to: PlanFor,
    decompose: Decompose,
) -> Rewrite:
    """The graph with nodes replaced by primitives; where there are none, by ops on windows. Plans
    with windows and without share the graphs of primitives.
    """
    make = partial(_replaced, graph, blocked, across, decompose)
    rewrite = to.known.once(graph, "primitives", tuple(blocked), tuple(across), make=make)
    if rewrite[0] is not graph or not any(by_ranks.values()):
        return rewrite
    whole = ((n, node, dim) for n, of in by_ranks.items() for node, dim in of.items())
    make = partial(in_windows, graph, by_ranks, decompose)
    return to.known.once(graph, "windows", *whole, make=make)


def _replaced(
    graph: Graph, blocked: Collection[Node], across: Collection[Node], decompose: Decompose
) -> Rewrite:
    """The graph with the views of ``across`` that repeat elements replaced by ops; where there are
    none, with the ``blocked`` ops replaced by primitives; the same graph where there are none.
    """
    rewrite = repeat_each(graph, across)
    if rewrite[0] is graph:
        shared = [n for n in across if shares_keys(n.target, [v.meta.shape for v in n.operands])]
        rewrite = decompose(graph, by={n: OF_HEADS[n.target] for n in shared})
    return decompose(graph, blocked) if rewrite[0] is graph and blocked else rewrite
