"""The layouts that specs, constraints and per-rank code fix on one mesh axis, and the cuts that
other values may then have.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ftp.per_rank.program import factor
from ftp.planning.axis_order import spec_layout
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.plan import FixedLayouts
from ftp.planning.reachable_cuts import Cut, Reach, layout_of, reach
from ftp.sharding.layout import Layout, R


def fixed(
    graph: Graph, name: str, folded: Sequence[str], axes: Mapping[str, int], specs: FixedLayouts
) -> tuple[dict[Node, Layout], list[Layout | None]]:
    """The fixed layouts on one axis: of inputs and constraints, and of outputs (None: open)."""
    pinned = {
        node: spec_layout(spec, node.shape(), name, axes, folded) or R
        for node, spec in (
            *specs.inputs.items(),
            *((node, pin.spec) for node, pin in specs.constraints.items() if pin.holds(name)),
        )
    }
    pinned.update((node, R) for node in graph.inputs if node not in pinned)
    pinned.update(
        (node, R)
        for node in graph.nodes
        if name in node.rank_axes and name not in node.own_axes and node not in pinned
    )
    outputs = [
        None if spec is None else spec_layout(spec, value.shape, name, axes, folded) or R
        for spec, value in zip(specs.outputs, graph.outputs, strict=True)
    ]
    return pinned, outputs


class Reaches(NamedTuple):
    """Functions that compute what one axis may cut, as closures through the rules: of all fixed
    layouts and any given in addition; of the batch's layouts; of cuts within the batch's parts.
    """

    from_specs: Callable[..., Reach]
    from_batch: Callable[[], Reach]
    of_parts: Callable[[Sequence[tuple[Value, Layout]]], Reach]


def reaches_of(
    graph: Graph,
    name: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    specs: FixedLayouts,
    batch: Sequence[Node],
) -> Reaches:
    """The closures of axis ``name`` after the axes ``folded``; ``batch`` are its inputs."""
    pinned, outputs = fixed(graph, name, folded, axes, specs)
    n = axes[name]
    constrained = [
        (v, pinned[node])
        for node, pin in specs.constraints.items()
        if pin.holds(name)
        for v in (Value(node), node.operands[0])
    ]
    # Per-rank code fixes the layouts of its operands and results, as a constraint does.
    own: dict[Node, list[Cut]] = {
        node: [Cut(factor(name))] for node in graph.nodes if name in node.own_axes
    }
    for node, (cut,) in own.items():
        there = [
            (v, layout_of(dims, node.sizes, cut, n))
            for v, dims in zip(node.operands, node.rule.operands, strict=True)
        ]
        there += [
            (Value(node, i), layout_of(dims, node.sizes, cut, n))
            for i, dims in enumerate(node.rule.results)
        ]
        constrained += [(v, layout) for v, layout in there if layout.kind == "S"]

    def from_specs(more: Sequence[tuple[Value, Layout]] = ()) -> Reach:
        seeds = [*more]
        seeds += [(Value(node), layout) for node, layout in pinned.items()]
        seeds += [
            (value, layout)
            for value, layout in zip(graph.outputs, outputs, strict=True)
            if layout is not None
        ]
        found = reach(graph, name, n, seeds + constrained, pinned)
        found.cuts.update(own)
        return found

    def from_batch() -> Reach:
        # A constraint on a data axis fixes activations; the closure does not pass through it.
        return (
            reach(
                graph,
                name,
                n,
                [(Value(node), pinned[node]) for node in batch] + constrained,
                pinned,
            )
            if batch
            else Reach()
        )

    def of_parts(within: Sequence[tuple[Value, Layout]]) -> Reach:
        return reach(graph, name, n, within, pinned) if within else Reach()

    return Reaches(from_specs, from_batch, of_parts)
