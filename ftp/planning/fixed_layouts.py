"""The layouts that specs, constraints and per-rank code fix on one mesh axis, and the cuts that
other values may then have.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ftp.per_rank.program import factor
from ftp.planning.axis_order import spec_layout
from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.planning.plan import FixedLayouts
from ftp.planning.reachable_cuts import (
    Cut,
    Reach,
    WindowOf,
    layout_of,
    reach,
    seeds_of_entries,
    seeds_of_moves,
    seeds_of_parts,
    seeds_of_stacks,
)
from ftp.planning.windowed import window_of
from ftp.rules.op_kinds import ONE_BY_ONE, is_matmul
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


class Reaches:
    """The cuts that one axis may make, as closures through the rules; each is computed when it is
    first asked for.

    Args:
        pinned, outputs: the layouts that are fixed on the axis.
        batch: on a data axis, the inputs whose cuts fix those of activations.
        window_of: as of `reach`.
    """

    def __init__(
        self,
        graph: Graph,
        name: str,
        n: int,
        pinned: Mapping[Node, Layout],
        outputs: Sequence[Layout | None],
        batch: Sequence[Node],
        window_of: WindowOf | None = None,
    ):
        self.graph, self.name, self.n = graph, name, n
        self.pinned, self.outputs, self.batch = pinned, outputs, batch
        self.window_of = window_of
        # Per-rank code fixes the layouts of its operands and results, as a constraint does.
        self._own = {node: [Cut(factor(name))] for node in graph.nodes if name in node.own_axes}

    @property
    def facts(self) -> tuple[Any, ...]:
        """What the closures over the graph depend on, for a cache key."""
        return self.name, bool(self.batch), tuple(self.pinned.items()), tuple(self.outputs)

    @cached_property
    def ahead(self) -> "Reaches":
        """The same, through ops that may be ops on windows: all of a chain are found at once."""
        fixed = self.pinned, self.outputs, self.batch
        return Reaches(self.graph, self.name, self.n, *fixed, window_of)

    @cached_property
    def from_specs(self) -> Reach:
        """The cuts that all fixed layouts lead to, those within the batch's parts, and those
        between the matrices of an update's stacks.
        """
        seeds = [*self._seeds_of_parts]
        if self.batch:
            seeds += seeds_of_stacks(self.graph, self.from_batch, self.n)
        seeds += [(Value(node), layout) for node, layout in self.pinned.items()]
        seeds += [
            (value, layout)
            for value, layout in zip(self.graph.outputs, self.outputs, strict=True)
            if layout is not None
        ]
        found = self._closed(seeds + self._constrained)
        found.cuts.update(self._own)
        return found

    @cached_property
    def from_batch(self) -> Reach:
        """The cuts that the batch's layouts lead to. A constraint on a data axis fixes activations;
        the closure does not pass through it.
        """
        if not self.batch:
            return Reach()
        of_batch = [(Value(node), self.pinned[node]) for node in self.batch]
        return self._closed(of_batch + self._constrained)

    @cached_property
    def of_parts(self) -> Reach:
        """The cuts within the batch's parts, or within entries of parameters."""
        return self._closed(self._seeds_of_parts) if self._seeds_of_parts else Reach()

    @cached_property
    def moved(self) -> Reach:
        """The cuts of other dims for ops that need a cut dim whole, up to the next matmul."""
        seeds = seeds_of_moves(self.from_batch if self.batch else self.from_specs)
        ends = {node: R for node in self.graph.nodes if is_matmul(node.target)} if seeds else {}
        return reach(self.graph, self.name, self.n, seeds, {**ends, **self.pinned})

    def _closed(self, seeds: Sequence[tuple[Value, Layout]]) -> Reach:
        return reach(self.graph, self.name, self.n, seeds, self.pinned, self.window_of)

    @cached_property
    def _seeds_of_parts(self) -> list[tuple[Value, Layout]]:
        if self.batch:
            return seeds_of_parts(self.from_batch)
        if not any(n.target in ONE_BY_ONE and not n.depends & BATCH for n in self.graph.nodes):
            return []
        given = [(Value(node), layout) for node, layout in self.pinned.items()]
        return seeds_of_entries(self._closed(given))

    @cached_property
    def _constrained(self) -> list[tuple[Value, Layout]]:
        found = [
            (value, layout)
            for node, layout in self.pinned.items()
            if node.kind == "constrain"
            for value in (Value(node), node.operands[0])
        ]
        for node, (cut,) in self._own.items():
            values = (*node.operands, *node.values)
            for value, dims in zip(values, node.rule.dims, strict=True):
                layout = layout_of(dims, node.sizes, cut, self.n)
                found += [(value, layout)] if layout.kind == "S" else []
        return found
