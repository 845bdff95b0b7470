"""Apply an axis' plan to the graph: cuts on nodes, reshards as nodes."""

from collections.abc import Sequence

from ftp.planning.graph import BATCH, FactorCut, Graph, Node, Reshard, Rewrite, Value
from ftp.planning.graph_passes import live
from ftp.planning.prices import is_at_rest
from ftp.planning.problem import AxisPlan
from ftp.planning.reachable_cuts import Cut
from ftp.planning.strategies import Strategy
from ftp.rules.notation import Dim
from ftp.rules.rule import BoundRule
from ftp.sharding.layout import (
    Layout,
    R,
    Size,
    cut_extent,
    cut_size,
    div,
    is_even,
    mul,
    nominal,
    prod,
)
from ftp.sharding.spec import PartitionSpec, Units, zigzag


def insert_reshards(graph: Graph, plan: AxisPlan, outputs: Sequence[Layout | None]) -> Rewrite:
    """The graph with one axis folded: its reshards are nodes, its cuts are in the nodes' sizes.

    Args:
        outputs: the layout in which each output is returned; None: open.
    """
    emitter = _Emitter(plan)
    users = graph.users
    required: dict[Value, list[Layout]] = {}
    for value, layout in zip(graph.outputs, outputs, strict=True):
        if layout is not None:
            required.setdefault(value, []).append(layout)
    for node in graph.nodes:
        needs = plan.strategies[node].operands
        fresh = [
            emitter.obtain(value, need, node)
            for value, need in zip(node.operands, needs, strict=True)
        ]
        emitter.nodes.append(node)
        emitter.rewired[node] = fresh
        for value in node.values:
            for layout in required.get(value, ()):
                emitter.obtain(value, layout, None)
            if node.depends & BATCH:
                for user, slot in users.get(value, ()):
                    emitter.obtain(value, plan.strategies[user].operands[slot], user)
    final = [
        emitter.obtain(value, layout, None)
        for value, layout in zip(graph.outputs, output_layouts(graph, plan, outputs), strict=True)
    ]
    copies = {node: node.copy() for node in graph.nodes}

    def copied(value: Value) -> Value:
        return Value(copies[value.node], value.index) if value.node in copies else value

    for node in emitter.nodes:
        made = copies.get(node, node)
        made.replace_operands([copied(v) for v in emitter.rewired.get(node, node.operands)])
    shared: dict[tuple[int, Cut], tuple[FactorCut, dict[str, Size]]] = {}
    for node, made in copies.items():
        _cut(made, plan.strategies[node], plan.axis, plan.n, shared)
    nodes = [copies.get(node, node) for node in emitter.nodes]
    return live(Graph(nodes, [copied(value) for value in final])), copies


def output_layouts(graph: Graph, plan: AxisPlan, outputs: Sequence[Layout | None]) -> list[Layout]:
    """The layout in which each output is returned: the given one, or for an open output the first
    of its own and its copies' that a spec can express.
    """

    def of_open(value: Value) -> Layout:
        home = plan.strategies[value.node].results[value.index]
        return next(found for found in (home, *plan.copies.get(value, ())) if is_at_rest(found))

    return [layout or of_open(value) for value, layout in zip(graph.outputs, outputs, strict=True)]


def spec_of_cuts(cuts: Sequence[tuple[str, Layout]], ndim: int) -> PartitionSpec:
    entries: list[tuple[str | Units, ...]] = [()] * ndim
    for name, layout in cuts:
        if layout.kind == "S":
            assert layout.outer == layout.inner == 1, f"an open output is cut as {layout}"
            entries[layout.dim] += (zigzag(name) if layout.zigzag else name,)
    return PartitionSpec(*[e or None for e in entries])


def _cut(
    node: Node,
    strategy: Strategy,
    axis: str,
    n: int,
    shared: dict[tuple[int, Cut], tuple[FactorCut, dict[str, Size]]],
) -> None:
    """Note a node's cuts on it; nodes that share sizes still do: ``shared`` has those made."""
    for index, layout in enumerate(strategy.results):
        if layout.kind == "P":
            before = node.pending.get(index, [])
            node.pending = {**node.pending, index: [*before, (axis, layout.op)]}
    for cut in (strategy.cut, strategy.ring_cut, strategy.aligned_cut):
        if cut is None:
            continue
        key = id(node.sizes), cut
        if key not in shared:
            factor, outer, inner, is_zigzag = cut
            extent = div(node.sizes[factor], mul(outer, inner))
            assert extent is not None
            size = prod((outer, cut_size(extent, axis, n, is_zigzag), inner))
            made = FactorCut(axis, factor, outer, extent, inner, is_zigzag)
            shared[key] = made, {**node.sizes, factor: size}
        made, node.sizes = shared[key]
        node.cuts = [*node.cuts, made]


class _Emitter:
    """Emits each copy of a value once."""

    def __init__(self, plan: AxisPlan):
        self.plan = plan
        self.nodes: list[Node] = []
        self.rewired: dict[Node, list[Value]] = {}
        self.made: dict[tuple[Value, Layout], Value] = {}

    def obtain(self, value: Value, need: Layout, user: Node | None) -> Value:
        """``value`` in the layout ``need``, by the reshards that the plan chose."""
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
        resharded = self._reshard(value, source, at, need, user)
        self.made[value, need] = resharded
        return resharded

    def _reshard(
        self, value: Value, source: Value, src: Layout, dst: Layout, user: Node | None
    ) -> Value:
        shape = value.shape
        if dst.kind == "S" and cut_extent(shape[dst.dim], dst) is None and user is not None:
            # Cuts over earlier axes gave the same parts by another formula: 4 rows cut in 3 are the
            # rows of 2 cut in 3, twice.
            shape = user.operand_shape(user.operands.index(value))
        reshard = Reshard(self.plan.axis, self.plan.n, R if src.kind == "R" else src, dst, shape)
        rule, sizes = reshard_rule(reshard)
        cause = "an output"
        if user is not None:
            cause = f"{user.name} at {user.source}" if user.source else user.name
        name = f"{value!r}_{reshard.op}_{self.plan.axis}".replace("[", "_").replace("]", "")
        node = Node(
            name,
            "reshard",
            reshard,
            (source,),
            {},
            (value.meta,),
            rule,
            value.node.source,
            value.node.depends,
            user.phase if user else value.node.phase,
            value.node.region,
            cause,
            rank_axes=value.node.rank_axes,
        )
        node.sizes = sizes
        self.nodes.append(node)
        return Value(node)


def reshard_rule(reshard: Reshard) -> tuple[BoundRule, dict[str, Size]]:
    """The rule of a reshard, for the axes folded after it: which factors they may cut.

    In ``[outer, f, inner]`` an even ``f`` is ``n`` chunks of ``g``, and ``g`` may be cut further.
    An uneven ``f`` stays whole, and so does a zigzag, whose chunks are not in order.
    """
    sizes: dict[str, Size] = {}
    whole: set[str] = set()
    operand: list[Dim] = [(f"~{d}",) for d in range(len(reshard.shape))]
    result = list(operand)
    sizes.update({f"~{d}": s for d, s in enumerate(reshard.shape)})
    same = reshard.src.kind == reshard.dst.kind == "S" and reshard.src.dim == reshard.dst.dim
    for layout, here, there in ((reshard.src, operand, result), (reshard.dst, result, operand)):
        if layout.kind != "S":
            continue
        d = layout.dim
        extent = cut_extent(reshard.shape[d], layout)
        assert extent is not None
        local = cut_size(extent, reshard.axis, reshard.n, layout.zigzag)
        if same:
            side = "x" if here is operand else "y"
            here[d] = (f"{side}o", f"{side}g", f"{side}i")
            of_side = {"o": layout.outer, "g": local, "i": layout.inner, "f": extent}
            sizes.update({f"{side}{letter}": size for letter, size in of_side.items()})
            whole |= {f"{side}o", f"{side}g", f"{side}i"}
        else:
            o, g, i, m, h = (f"{letter}{d}" for letter in "ogimh")
            sizes.update({o: layout.outer, g: local, i: layout.inner})
            here[d] = (o, g, i)
            if is_even(extent, reshard.n) and not layout.zigzag:
                sizes[m] = reshard.n
                whole.add(m)
                there[d] = (o, m, g, i)
            else:
                sizes[h] = extent
                whole |= {g, h}
                there[d] = (o, h, i)
        sizes.pop(f"~{d}", None)
    linear = () if reshard.src.kind == "P" and reshard.src.op != "sum" else ((0,),)
    nominal_sizes = {f: nominal(s) for f, s in sizes.items()}
    return BoundRule(
        (tuple(operand),),
        (tuple(result),),
        frozenset(whole),
        ({},),
        linear,
        nominal_sizes,
        local=None,
        decompose=False,
    ), sizes
