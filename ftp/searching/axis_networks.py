"""The cost networks of a search, one for each mesh axis: built over open layouts, and solved."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from ftp.dataclass import dataclass
from ftp.paused_gc import collection_paused
from ftp.planning.axis_hardware import hardware_of
from ftp.planning.cost import Hardware, collective_seconds, op_seconds
from ftp.planning.cost_network import PricedNetwork
from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.planning.insert_reshards import insert_reshards
from ftp.planning.layers.labels import label
from ftp.planning.problem import AxisPlan, BytePrices, Open, Problem
from ftp.rules.op_kinds import VIEWS
from ftp.searching.open_axis import open_axis
from ftp.searching.opened import Opened
from ftp.sharding.layout import Layout, R, bytes_of, nominal
from ftp.sharding.spec import PartitionSpec, Units, Zigzag

Choice = Mapping[str, Mapping[str, Layout | None]]
"""The layout by axis and pattern of parameters; None: whole."""
TIE = 1e-18  # seconds per byte: of plans that take equally long, the one that holds least


@dataclass(frozen=True)
class Price:
    """The price of memory in seconds per byte: in full for parameters, times ``share`` for
    gradients, times ``1 - share`` for tensors kept for the backward pass.

    A rank's peak is at least its parameters and gradients (at the end), and at least its parameters
    and the tensors kept for the backward pass; so it is at least any mean of both.
    """

    seconds: float
    share: float = 1.0

    def of_bytes(self, least: float = TIE) -> BytePrices:
        """The prices of a network's bytes, ``least`` at least."""
        seconds = max(self.seconds, least)
        return BytePrices(seconds * (1 + self.share), seconds * (1 - self.share))


@dataclass
class Solved:
    """The solved networks: specs by pattern and by axis, the plan of each axis, and the program
    with its reshards.
    """

    patterns: dict[str, PartitionSpec]
    choice: dict[str, dict[str, Layout | None]]
    axes: dict[str, AxisPlan]
    latencies: dict[str, float]
    net: Opened


def solve_axes(
    net: Opened,
    axes: Mapping[str, int],
    order: Sequence[str],
    data_axes: Sequence[str],
    hardware: Hardware,
    price: Price,
    forced: Choice | None = None,
    is_bare: bool = False,
) -> Solved:
    """Solve the network of each axis: the spec of each pattern, and each axis' plan.

    Args:
        order: the axes, in the order in which they are folded.
        forced: per axis, the layouts of patterns that are not open there.

    Raises:
        NotAlike: repeated layers to which an axis gave different layouts. Infeasible: no program
            meets the forced layouts.
    """
    entries: dict[str, list[tuple[str | Units, ...]]] = {
        net.patterns[n]: [()] * n.results[0].ndim for n in net.params
    }
    choice: dict[str, dict[str, Layout | None]] = {}
    found: dict[str, AxisPlan] = {}
    latencies: dict[str, float] = {}
    with collection_paused():
        for at, axis in enumerate(order):
            step = axis_step(net, axis, order[:at], axes, data_axes, hardware, forced, is_bare)
            latencies[axis] = step.network.problem.hardware.link.latency
            chosen = found[axis] = step.network.solve(
                price.of_bytes(0.0) if is_bare else price.of_bytes()
            )
            choice[axis] = {}
            for pattern, node in {net.patterns[node]: node for node in net.params}.items():
                layout = chosen.strategies[node].results[0]
                choice[axis][pattern] = layout if layout.kind == "S" else None
                if layout.kind == "S":
                    entries[pattern][layout.dim] += (entry_of(axis, layout),)
            net = step.after(chosen)
    return Solved(
        {pattern: PartitionSpec(*[e or None for e in dims]) for pattern, dims in entries.items()},
        choice,
        found,
        latencies,
        net,
    )


@dataclass
class AxisStep:
    """One axis of a program: its network, and the programs after its plans."""

    net: Opened
    network: PricedNetwork
    _after: dict[tuple[int, ...], Opened] = field(default_factory=dict)

    def after(self, plan: AxisPlan) -> Opened:
        """The program after a plan of this network."""
        key = tuple(plan.solution.choice)
        if key not in self._after:
            net, of = self.net, {n: plan.strategies[n].results[0] for n in self.net.params}
            outputs = [
                of[net.mirrors[i]] if i in net.mirrors else R for i in range(len(net.graph.outputs))
            ]
            self._after[key] = net.after(insert_reshards(net.graph, plan, outputs))
        return self._after[key]


def axis_step(
    net: Opened,
    axis: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    data_axes: Sequence[str],
    hardware: Hardware,
    forced: Choice | None = None,
    is_bare: bool = False,
) -> AxisStep:
    """The step of one axis, after the axes that are ``folded``. It is built once: every price of
    memory has the same tables.
    """
    fixed = (forced or {}).get(axis, {})
    key = axis, tuple(folded), tuple(fixed.items()), repr(hardware), is_bare
    known = net.steps.get(key)
    if known is None:
        problem = _problem_of(net, axis, folded, axes, data_axes, hardware, fixed, is_bare)
        known = net.steps[key] = AxisStep(net, PricedNetwork(problem))
    return known


def _problem_of(
    net: Opened,
    axis: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    data_axes: Sequence[str],
    hardware: Hardware,
    forced: Mapping[str, Layout | None],
    is_bare: bool,
) -> Problem:
    """One axis' problem with layouts left open, after the axes that are ``folded``."""
    n, is_data = axes[axis], axis in data_axes
    opened = open_axis(net, axis, folded, axes, is_data, forced)
    pinned = opened.pinned
    first: dict[str, Node] = {}
    groups = {
        node: first.setdefault(net.patterns[node], node)
        for node in net.params
        if node not in pinned
    }
    outputs: list[Layout | None] = [R] * len(net.graph.outputs)
    for i, node in net.mirrors.items():
        outputs[i] = pinned.get(node)
    priced = hardware_of(net.graph, hardware, axis, folded, axes, net.ties)
    held = {node: Value(node).nbytes(nominal) for node in net.params}
    mirrors = {i: node for i, node in net.mirrors.items() if node in groups}
    return Problem(
        net.graph,
        axis,
        n,
        priced,
        opened.reach,
        pinned,
        outputs,
        is_data,
        opened.from_batch,
        net.ties,
        Open(groups, mirrors, held, kept_bytes(net.graph), opened.cuts, is_bare),
        axes,
    )


def entry_of(axis: str, layout: Layout) -> str | Units:
    if layout.zigzag:
        return Zigzag(axis)
    return (
        axis
        if layout.outer == layout.inner == 1
        else Units(axis, nominal(layout.inner), nominal(layout.outer))
    )


def kept_bytes(graph: Graph) -> dict[Value, int]:
    """Bytes of batch data that the forward pass keeps for the backward pass, by the value that owns
    the memory.
    """
    roots: dict[Value, Value] = {}
    found: dict[Value, int] = {}
    for node in graph.nodes:
        for value in node.operands:
            root = roots.get(value, value)
            maker = root.node
            if (
                node.phase > maker.phase
                and maker.phase % 2 == 0
                and maker.kind in ("op", "reshard")
                and maker.depends & BATCH
            ):
                found[root] = root.nbytes(nominal)
        if node.operands and (node.target in VIEWS or node.kind == "constrain"):
            root = roots.get(node.operands[0], node.operands[0])
            roots.update({Value(node, i): root for i in range(len(node.results))})
    return found


def planned_seconds(solved: Solved, hardware: Hardware) -> float:
    """Seconds of all ops and reshards of a program, one after the other; a layer that stands for
    several counts that often.
    """
    graph, folded, total = solved.net.graph, solved.net.folded, 0.0
    layer_of = label(graph, folded.labels, folded.slices).of if folded else {}
    for node in graph.nodes:
        if node.kind == "op":
            sizes = {f: nominal(s) for f, s in node.sizes.items()}
            seconds = op_seconds(node.target, node.rule, sizes, node.results, hardware)
        elif node.kind == "reshard":
            nbytes = bytes_of(node.target.shape, node.results[0].dtype, nominal)
            link = replace(
                hardware.link_of((node.target.axis,)), latency=solved.latencies[node.target.axis]
            )
            seconds = collective_seconds(node.target.op, nbytes, node.target.n, link)
        else:
            continue
        stands_for = folded.left_out if folded and layer_of.get(node) == folded.stands_for else 0
        total += seconds * (1 + stands_for)
    return total
