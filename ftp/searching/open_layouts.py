"""A traced loss whose parameters' layouts are open, and the axes' networks solved over it
(`search`).

Constraints are open too: the trace has marks where numbered modules (``layers.3``) return, which
fix nothing until a dim is cut there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from ftp.functional.module_constraints import outputs_through
from ftp.ops.constrain import CONSTRAIN, Pin, constrain, pin_from_str, pin_to_str
from ftp.paused_gc import collection_paused
from ftp.planning.axis_order import spec_layout
from ftp.planning.cost import Hardware, collective_seconds, op_seconds
from ftp.planning.cost_network import solve
from ftp.planning.from_fx import constraints, decompose
from ftp.planning.graph import BATCH, Graph, Node, Rewrite, Value, unchanged
from ftp.planning.insert_moves import apply
from ftp.planning.layers.repeats import Folded, Ties, fold
from ftp.planning.planner import planned_latency
from ftp.planning.prepare import prepare
from ftp.planning.problem import AxisPlan, NotAlike, Open, Problem
from ftp.planning.reachable_cuts import Reach, factor_of, layout_of, reach
from ftp.rules.op_kinds import VIEWS, is_matmul
from ftp.sharding.layout import Layout, R, is_even, nominal, shard
from ftp.sharding.mesh import Mesh, use_mesh
from ftp.sharding.pytree import flatten, leaf_names, leaf_paths
from ftp.sharding.spec import PartitionSpec, Units, Zigzag
from ftp.tracing.gradient import grad_and_value
from ftp.tracing.trace import Traced, trace

MARK = "@"  # begins the axis that a mark speaks of, which no mesh has; the module's pattern follows

Choice = Mapping[str, Mapping[str, Layout | None]]
"""Per axis and pattern of parameters the layout, None for whole."""

Along = Mapping[str, int]
"""Per axis the dim that it cuts of what the marked modules return."""


@dataclass(frozen=True)
class Price:
    """Seconds that a byte held is priced with: of parameters whole, of gradients by ``share``, of
    what backward passes need by the rest.

    A rank's peak is at least its parameters and gradients, which it has at the end, and at least
    its parameters and what it keeps for the backward pass, and so at least any mean of both.
    """

    seconds: float
    share: float = 1.0


@dataclass(frozen=True)
class Opened:
    """A traced loss and its gradient; ``mirrors`` are the outputs sharded as a parameter is,
    ``packs`` per axis and pattern the cuts of tensors packed along a dim, as those of q, k and v.
    """

    graph: Graph
    params: list[Node]
    patterns: dict[Node, str]
    batch: dict[Node, PartitionSpec]
    mirrors: dict[int, Node]
    folded: Folded | None
    packs: Mapping[tuple[str, str], Sequence[Layout]] = field(default_factory=dict)

    def constrained(self, along: Along) -> "Opened":
        """The same with its marks as constraints, where there is something ``along``."""
        if not along:
            return self
        graph, copies = self.graph.copied()
        for node in graph.nodes:
            if node.kind == "constrain" and _marked(pin_from_str(node.target)):
                node.target = pin_to_str(_pin(along, node.results[0].shape))
        return self.after((graph, copies))

    def after(self, rewrite: Rewrite) -> "Opened":
        """The program after a pass."""
        graph, copies = rewrite
        return Opened(
            graph,
            [copies[n] for n in self.params],
            {copies[n]: p for n, p in self.patterns.items()},
            {copies[n]: s for n, s in self.batch.items()},
            {i: copies[n] for i, n in self.mirrors.items()},
            self.folded and self.folded.on(copies),
            self.packs,
        )

    def marks(self) -> dict[str, tuple[int, ...]]:
        """Per pattern of marked modules the shape of what they return."""
        nodes = [node for node in self.graph.nodes if node.kind == "constrain"]
        return {
            pattern: n.results[0].shape
            for n in nodes
            if (pattern := _marked(pin_from_str(n.target)))
        }

    def members(self, pattern: str) -> list[Node]:
        return [node for node in self.params if self.patterns[node] == pattern]


def is_mark(pin: Pin) -> bool:
    return _marked(pin) is not None


def _marked(pin: Pin) -> str | None:
    return pin.axes[0].removeprefix(MARK) if pin.axes and pin.axes[0].startswith(MARK) else None


def _pin(along: Along, shape: Sequence[int]) -> Pin:
    return Pin(spec_along(along).at_rank(len(shape)), tuple(along))


def spec_along(along: Along) -> PartitionSpec:
    """
    >>> spec_along({"tp": 1})
    P(None, 'tp')
    """
    return PartitionSpec(
        *[
            tuple(a for a, d in along.items() if d == dim) or None
            for dim in range(max(along.values()) + 1)
        ]
    )


def is_markable(out: Tensor) -> bool:
    return out.ndim >= 3 and out.is_floating_point()


@contextmanager
def marking() -> Iterator[None]:
    """Within the block, mark outputs of a functionalized model's numbered modules: those that are
    batches of sequences.
    """

    def mark(path: str, out: Tensor) -> Tensor:
        return (
            constrain(out, PartitionSpec(), axes=MARK + pattern_of([path]))
            if is_markable(out)
            else out
        )

    with outputs_through(mark):
        yield


def with_marks(traced: Traced, along: Along) -> Traced:
    """The trace with its marks as constraints, or without them where there is nothing ``along``."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in traced.gm.graph.nodes:
        marked = node.target is CONSTRAIN and is_mark(pin_from_str(node.args[1]))
        if marked and not along:
            env[node] = env[node.args[0]]
            continue
        env[node] = graph.node_copy(node, env.__getitem__)
        if marked:
            env[node].args = (env[node.args[0]], pin_to_str(_pin(along, node.meta["val"].shape)))
    return replace(traced, gm=fx.GraphModule(traced.gm, graph))


def pattern_of(path: Sequence[Any]) -> str:
    """A parameter's path with ``*`` in place of numbers."""
    return ".".join(
        "*" if part.isdigit() else part for element in path for part in str(element).split(".")
    )


def traced_loss(loss_fn: Any, params: Any, batch: Any, mesh: Mesh) -> Traced:
    """The marked trace of the loss and its gradient."""
    leaves, tree = flatten((params, *batch))
    names = [*leaf_names(params, "params"), *leaf_names(batch, "batch")]
    with use_mesh(mesh), marking():
        return trace(grad_and_value(loss_fn), leaves, tree, mesh.device_type, names=names)


def opened(
    traced: Traced,
    params: Any,
    batch: Any,
    batch_specs: Sequence[PartitionSpec],
    is_folded: bool = True,
) -> Opened:
    leaves, _ = flatten((params, *batch))
    names = [*leaf_names(params, "params"), *leaf_names(batch, "batch")]
    paths = leaf_paths(params)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    prepared = prepare(traced.gm, [names[i] for i in tensors], [i < len(paths) for i in tensors])
    graph, inputs = prepared.graph, dict(zip(tensors, prepared.arguments, strict=True))
    of_params = [inputs[i] for i in range(len(paths))]
    mirrors = dict(zip(traced.out_leaves[1:], of_params, strict=True))
    specs = {
        inputs[i]: spec
        for i, spec in zip(range(len(paths), len(leaves)), batch_specs, strict=True)
        if i in inputs
    }
    patterns = {node: pattern_of(path) for node, path in zip(of_params, paths, strict=True)}
    net = Opened(graph, of_params, patterns, specs, mirrors, None)
    returned = {out: patterns[node] for out, node in mirrors.items()}
    folded = fold(
        graph,
        lambda node: (specs.get(node), patterns.get(node)),
        [returned.get(i) for i in range(len(graph.outputs))],
    )
    if folded is None or not is_folded:
        return net
    few = {node: copy for copy, node in folded.origin.items() if node in specs or node in patterns}
    alike = {patterns[node]: copy for node, copy in few.items() if node in patterns}
    return Opened(
        folded.graph,
        [few[n] for n in of_params if n in few],
        {few[n]: p for n, p in patterns.items() if n in few},
        {few[n]: s for n, s in specs.items()},
        # The gradient of a parameter may count to the layer beside it: any parameter sharded
        # alike will do.
        {at: alike[patterns[mirrors[i]]] for at, i in enumerate(folded.kept) if i in mirrors},
        folded,
    )


def on_primitives(net: Opened, axes: Mapping[str, int], data_axes: Sequence[str]) -> Opened:
    """The program with ops replaced by primitives wherever an axis may cut what they keep whole."""
    while True:
        blocked: dict[Node, None] = {}
        for at, axis in enumerate(axes):
            if axes[axis] > 1:
                found, from_batch, _, _ = _reaches(
                    net, axis, list(axes)[:at], axes, axis in data_axes, {}
                )
                reached = from_batch if axis in data_axes else found
                blocked.update(
                    dict.fromkeys(
                        node
                        for node in reached.blocked
                        if node.kind == "op" and node.rule.decompose
                    )
                )
        rewrite = decompose(net.graph, blocked) if blocked else unchanged(net.graph)
        if rewrite[0] is net.graph:
            return replace(net, packs=_packs(net, axes, data_axes))
        net = net.after(rewrite)


def open_layouts(net: Opened, pattern: str, n: int, is_data: bool) -> list[Layout]:
    """How an axis may cut the parameters of a pattern: dims that divide, in whole heads where they
    make heads; of a lone vector none.

    On a data axis shards are gathered whole before they are used, and the first dim will do. Heads
    that are fewer than ranks are none of a network's layouts (`shared_heads`).
    """
    members = net.members(pattern)
    ndim = members[0].results[0].ndim
    if any(m.results[0].ndim != ndim for m in members):
        return []
    even = [Layout("S", d) for d in range(ndim) if all(is_even(m.shape()[d], n) for m in members)]
    if is_data:
        return even[:1]
    if _is_scale(net, members[0]):
        return []
    users = net.graph.users()
    found = []
    for d in range(ndim):
        units = {unit_of(Value(m), Layout("S", d), n, users) for m in members}
        sizes = {m.shape()[d] for m in members}
        if units == {1}:
            found += [layout for layout in even if layout.dim == d]
        elif (
            len(units) == len(sizes) == 1
            and isinstance(size := sizes.pop(), int)
            and size // (unit := units.pop()) > n
        ):
            found.append(shard(d, 1, size // unit, unit, n))
    return found


def shared_heads(net: Opened, pattern: str, n: int) -> Layout | None:
    """The cut of a pattern in whole heads of which there are fewer than ranks: neighbours hold the
    same one, and the weight is gathered where it is used.
    """
    members = net.members(pattern)
    if any(m.results[0].ndim != members[0].results[0].ndim for m in members):
        return None
    users = net.graph.users()
    for d in range(members[0].results[0].ndim):
        heads = set()
        for m in members:
            unit, size = unit_of(Value(m), Layout("S", d), n, users), m.shape()[d]
            heads.add((unit, size // unit if isinstance(size, int) else 0))
        unit, count = heads.pop()
        if not heads and unit > 1 and 1 < count < n and n % count == 0:
            return Layout("S", d, 1, unit)
    return None


def unit_of(
    value: Value,
    layout: Layout,
    n: int,
    users: Mapping[Value, Sequence[tuple[Node, int]]],
    is_matmul_done: bool = False,
) -> int:
    """How many elements of a dim have to stay together: more than one where a parameter's
    matmul runs into a view without that cut.
    """
    for user, slot in users.get(value, ()):
        is_next = not is_matmul_done and is_matmul(user.target)
        if not is_next and user.target not in VIEWS and user.kind != "constrain":
            continue
        cut = factor_of(user.rule.operands[slot], user.sizes, layout, n)
        if cut is None:
            return math.prod(
                nominal(user.sizes[f]) for f in user.rule.operands[slot][layout.dim][1:]
            )
        there = layout_of(user.rule.results[0], user.sizes, cut, n)
        if (
            there.kind == "S"
            and (unit := unit_of(Value(user), there, n, users, is_matmul_done or is_next)) > 1
        ):
            return unit
    return 1


def _is_scale(net: Opened, node: Node) -> bool:
    """Whether a parameter is a vector that goes with no matrix, as that of a norm."""
    module = net.patterns[node].rpartition(".")[0]
    return node.results[0].ndim == 1 and not any(
        other.results[0].ndim > 1 and net.patterns[other].rpartition(".")[0] == module
        for other in net.params
    )


def _reaches(
    net: Opened,
    axis: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    is_data: bool,
    forced: Mapping[str, Layout | None],
) -> tuple[Reach, Reach, dict[Node, Layout], dict[Node, Sequence[Layout]]]:
    """What an axis may cut, what the batch alone reaches, the layouts that are fixed, and those
    that parameters may have.
    """
    n = axes[axis]
    pinned = {
        node: spec_layout(spec, node.shape(), axis, axes, folded) or R
        for node, spec in net.batch.items()
    }
    pinned |= {
        node: forced[net.patterns[node]] or R for node in net.params if net.patterns[node] in forced
    }
    for node, pin in constraints(net.graph).items():
        if pin.holds(axis):
            pinned[node] = spec_layout(pin.spec, node.shape(), axis, axes, folded) or R
    pinned |= {
        node: R for node in net.graph.inputs if node not in pinned and node not in net.patterns
    }
    constrained = [
        (v, pinned[node])
        for node in pinned
        if node.kind == "constrain"
        for v in (Value(node), node.operands[0])
    ]
    of_batch = [(Value(node), pinned[node]) for node in net.batch] + constrained
    fixed = [(Value(node), layout) for node, layout in pinned.items()]
    free = {node: net.patterns[node] for node in net.params if node not in pinned}
    cuts = {
        pattern: open_layouts(net, pattern, n, is_data) for pattern in dict.fromkeys(free.values())
    }
    found = reach(
        net.graph,
        axis,
        n,
        fixed + constrained + [(Value(node), c) for node, p in free.items() for c in cuts[p]],
        pinned,
    )
    if not is_data:
        # What norms scale, the features between blocks, stays whole: to cut it is a plan of another
        # kind, dearer in collectives.
        scales = [node for node in net.params if _is_scale(net, node) and node not in pinned]
        whole = reach(
            net.graph, axis, n, [(Value(node), Layout("S", 0)) for node in scales], pinned
        ).cuts
        found.cuts = {
            node: [cut for cut in cuts if cut not in whole.get(node, ())]
            for node, cuts in found.cuts.items()
        }
        # Several tensors packed along a dim are cut as their users are.
        for pattern in cuts:
            reached = found.layouts.get(Value(net.members(pattern)[0]), ())
            packs = [c for c in net.packs.get((axis, pattern), ()) if c in reached]
            cuts[pattern] = [*cuts[pattern], *packs]
    return (
        found,
        reach(net.graph, axis, n, of_batch, pinned) if is_data else Reach(),
        pinned,
        {node: cuts[p] for node, p in free.items()},
    )


def _packs(
    net: Opened, axes: Mapping[str, int], data_axes: Sequence[str]
) -> dict[tuple[str, str], list[Layout]]:
    """Per axis and pattern the packed cuts that views and matmuls ask for, no other axis having
    cut anything: an axis that cuts within another's shards reaches packs that no tensor has.
    """
    found: dict[tuple[str, str], list[Layout]] = {}
    for axis, n in axes.items():
        if n > 1 and axis not in data_axes:
            reached = _reaches(net, axis, (), axes, False, {})[0].layouts
            for pattern in dict.fromkeys(net.patterns.values()):
                member = net.members(pattern)[0]
                layouts = [c for c in reached.get(Value(member), ()) if is_packed(c, member, n)]
                if layouts:
                    found[axis, pattern] = layouts
    return found


def is_packed(layout: Layout, node: Node, n: int) -> bool:
    size = node.shape()[layout.dim]
    if not all(isinstance(x, int) for x in (size, layout.outer, layout.inner)) or layout.outer == 1:
        return False
    return size % (n * layout.outer * layout.inner) == 0  # type: ignore[operator]


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
    """Per pattern its spec, and what each axis' network found.

    Args:
        order: the axes to fold, one after the other.
        forced: per axis the layouts of patterns that are not open there.

    Raises:
        NotAlike: repeated layers that an axis left unlike. Infeasible: what is forced is met by no
            program.
    """
    entries: dict[str, list[tuple[str | Units, ...]]] = {
        net.patterns[n]: [()] * n.results[0].ndim for n in net.params
    }
    choice: dict[str, dict[str, Layout | None]] = {}
    found: dict[str, AxisPlan] = {}
    latencies: dict[str, float] = {}
    with collection_paused():
        for at, axis in enumerate(order):
            problem = axis_problem(
                net, axis, order[:at], axes, data_axes, hardware, price, forced, is_bare
            )
            latencies[axis] = problem.hardware.link.latency
            chosen = found[axis] = solve(problem)
            of = {node: chosen.strategies[node].results[0] for node in net.params}
            choice[axis] = {}
            for pattern, node in {net.patterns[node]: node for node in net.params}.items():
                layout = of[node]
                choice[axis][pattern] = layout if layout.kind == "S" else None
                if layout.kind == "S":
                    entries[pattern][layout.dim] += (entry_of(axis, layout),)
            outputs = [
                of[net.mirrors[i]] if i in net.mirrors else R for i in range(len(problem.outputs))
            ]
            net = net.after(apply(net.graph, chosen, outputs))
    return Solved(
        {pattern: PartitionSpec(*[e or None for e in dims]) for pattern, dims in entries.items()},
        choice,
        found,
        latencies,
        net,
    )


def axis_problem(
    net: Opened,
    axis: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    data_axes: Sequence[str],
    hardware: Hardware,
    price: Price,
    forced: Choice | None = None,
    is_bare: bool = False,
) -> Problem:
    """The network of one axis with layouts left open, after the axes that are ``folded``."""
    n, is_data = axes[axis], axis in data_axes
    given, from_batch, pinned, cuts = _reaches(
        net, axis, folded, axes, is_data, (forced or {}).get(axis, {})
    )
    first: dict[str, Node] = {}
    groups = {
        node: first.setdefault(net.patterns[node], node)
        for node in net.params
        if node not in pinned
    }
    outputs: list[Layout | None] = [R] * len(net.graph.outputs)
    for i, node in net.mirrors.items():
        outputs[i] = pinned.get(node)
    ties = ties_of(net)
    link = hardware.link_of((axis,))
    latency = planned_latency(net.graph, replace(hardware, link=link), ties)
    priced = replace(hardware, link=replace(link, latency=latency))
    of_state = price.seconds * (1 + price.share)
    held = {node: of_state * nbytes_of(Value(node)) for node in net.params}
    kept = {
        value: price.seconds * (1 - price.share) * nbytes
        for value, nbytes in kept_bytes(net.graph).items()
    }
    mirrors = {i: node for i, node in net.mirrors.items() if node in groups}
    opens = Open(groups, mirrors, held, kept, cuts, is_bare)
    return Problem(
        net.graph, axis, n, priced, given, pinned, outputs, is_data, from_batch, ties, opens
    )


def entry_of(axis: str, layout: Layout) -> str | Units:
    if layout.zigzag:
        return Zigzag(axis)
    return (
        axis
        if layout.outer == layout.inner == 1
        else Units(axis, nominal(layout.inner), nominal(layout.outer))
    )


def ties_of(net: Opened) -> Ties | None:
    ties = net.folded.ties(net.graph) if net.folded else None
    if net.folded and ties is None:
        raise NotAlike
    return ties


def nbytes_of(value: Value) -> int:
    """On a rank."""
    return math.prod(map(nominal, value.shape)) * value.meta.dtype.itemsize


def kept_bytes(graph: Graph) -> dict[Value, int]:
    """Bytes of batch data that forward passes keep for backward passes, by the value that owns the
    memory.
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
                and maker.kind in ("op", "move")
                and maker.depends & BATCH
            ):
                found[root] = nbytes_of(root)
        if node.operands and (node.target in VIEWS or node.kind == "constrain"):
            root = roots.get(node.operands[0], node.operands[0])
            roots.update({Value(node, i): root for i in range(len(node.results))})
    return found


def planned_seconds(solved: Solved, hardware: Hardware) -> float:
    """Seconds of all ops and moves of a program, one after the other, repeated layers counted as
    often as there are.
    """
    ties = ties_of(solved.net)
    total = 0.0
    for node in solved.net.graph.nodes:
        if node.kind == "op":
            sizes = {f: nominal(s) for f, s in node.sizes.items()}
            seconds = op_seconds(node.target, node.rule, sizes, node.results, hardware)
        elif node.kind == "move":
            nbytes = math.prod(map(nominal, node.target.shape)) * node.results[0].dtype.itemsize
            link = replace(
                hardware.link_of((node.target.axis,)), latency=solved.latencies[node.target.axis]
            )
            seconds = collective_seconds(node.target.op, nbytes, node.target.n, link)
        else:
            continue
        total += seconds * (ties.weight(node) if ties else 1)
    return total
