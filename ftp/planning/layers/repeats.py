"""Fold repeated layers: make a graph with most of them left out, which is planned, and record how
to put them back.

A few layers of a run of equal layers are kept; one of them counts for those left out.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftp.ops.stack import UNSTACK
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.layers.labels import (
    FEWEST,
    Layers,
    alike,
    decisions,
    describe_layer,
    is_stack_of,
    label,
    numbered,
    stack_shift,
)
from ftp.rules.rule import BoundRule

# Layers kept at each end of a run: one beside the layers that differ, and one that is planned like
# those left out.
KEPT = 2


@dataclass(frozen=True)
class Ties:
    """Two adjacent layers that stand for a run of them: they share every decision.

    Attributes:
        twins: per node of the later layer, its twin in the earlier one.
        layers: the layer of each node.
        earlier: the number of the earlier layer.
        left_out: the number of layers between the two in the whole graph.
    """

    twins: Mapping[Node, Node]
    layers: Layers
    earlier: int
    left_out: int

    def twin(self, value: Value) -> Value:
        """The value of the earlier layer that shares its decision, or itself."""
        if value.node in self.layers.stacks:
            return Value(value.node, self.earlier) if value.index == self.earlier + 1 else value
        return Value(self.twins.get(value.node, value.node), value.index)

    def weight(self, node: Node) -> int:
        """The number of nodes of the whole graph that a node stands for."""
        return self.left_out + 1 if self.layers.of.get(node) == self.earlier else 1

    def weight_of(self, value: Value) -> int:
        return self.left_out + 1 if self.layers.of_value(value) == self.earlier else 1

    def weight_between(self, value: Value, user: Node) -> int:
        """The number of uses in the whole graph that a use stands for: a use across the two layers
        stands for those between all layers that are left out.
        """
        here, there = self.layers.of.get(user), self.layers.of_value(value)
        tied = (self.earlier, self.earlier + 1)
        if here is None:
            return self.weight_of(value)
        if here not in tied:
            return 1
        if there is None or there == here:
            return self.weight(user)
        return self.left_out + 1 if there in tied else 1


@dataclass
class Folded:
    """A graph with layers left out, and the facts to put them back.

    Attributes:
        graph: copies of the nodes that are left.
        origin: per node of ``graph``, as rewritten by passes so far, its node in the whole graph.
        kept: indices of the whole graph's outputs that ``graph`` returns.
        left_out: number of layers that are left out, after layer ``stands_for``.
        labels: the layers of its inputs.
        slices: number of slices of its stacks, if layers are slices; else 0.
    """

    graph: Graph
    origin: dict[Node, Node]
    kept: list[int]
    left_out: int
    stands_for: int
    labels: dict[Node, int]
    slices: int
    whole: Graph
    layers: Layers

    def on(self, copies: Mapping[Node, Node]) -> "Folded":
        """The same for the rewritten graph."""
        origin = {copies[node]: of for node, of in self.origin.items() if node in copies}
        labels = {copies[node]: layer for node, layer in self.labels.items()}
        return replace(self, origin=origin, labels=labels)

    def ties(self, graph: Graph) -> Ties | None:
        """The tied layers of a partly planned graph; None where the two layers differ by now."""
        layers = label(graph, self.labels, self.slices)
        t = self.stands_for
        if describe_layer(t, layers, decisions) != describe_layer(t + 1, layers, decisions):
            return None
        twins = dict(zip(layers.nodes[t + 1], layers.nodes[t], strict=True))
        return Ties(twins, layers, t, self.left_out)


def fold(graph: Graph, facts: Callable[[Node], Any], out_facts: Sequence[Any]) -> Folded | None:
    """The graph with most of a run of equal layers left out; None where there is no such run.

    Args:
        facts: properties of a node that matter beside its place in the graph, such as an input's
            spec.
        out_facts: the same, per output.
    """
    labels = numbered({node: node.name for node in graph.inputs})
    slices = Counter(len(node.results) for node in graph.nodes if node.target is UNSTACK)
    found = None
    if labels and (named := max(labels.values()) + 1) >= FEWEST:
        # A stack of one tensor of each layer, as of gradients that an optimizer sends to owners, is
        # split into layers too.
        found = _fold(graph, labels, named if named in slices else 0, facts, out_facts)
    if found is None and slices and max(slices) >= FEWEST:
        found = _fold(graph, {}, max(slices), facts, out_facts)
    return found


def _fold(
    graph: Graph,
    labels: dict[Node, int],
    slices: int,
    facts: Callable[[Node], Any],
    out_facts: Sequence[Any],
) -> Folded | None:
    layers = label(graph, labels, slices)
    returned: dict[Node, list[Any]] = {}
    for value, fact in zip(graph.outputs, out_facts, strict=True):
        if value.node in layers.stacks:
            return None
        returned.setdefault(value.node, []).append((value.index, fact))
    same = alike(layers, lambda node: (facts(node), returned.get(node)))
    run = _largest(same, layers)
    if run is None:
        return None
    first, last = run
    start, end = first + KEPT, last + 1 - KEPT  # the layers to leave out
    if not _is_local(graph, layers, start, end):
        return None
    gone = end - start
    copies: dict[Node, Node] = {}

    def moved(user: Node, value: Value) -> Value:
        here, there = layers.of.get(user), layers.of_value(value)
        if there is None:
            return Value(copies[value.node], value.index)
        if here is None:
            target = there if there < start else there - gone
        else:
            target = (
                (here if here < start else here - gone) + there - here
            )  # in the folded graph's numbers
        if value.node in layers.stacks:
            return Value(copies[value.node], target)
        is_near = here is None or here == there
        old = (
            value.node
            if is_near
            else layers.nodes[target if target < start else target + gone][layers.at[value.node]]
        )
        return Value(copies[old], value.index)

    for node in graph.nodes:
        if not start <= layers.of.get(node, -1) < end:
            copy = copies[node] = node.copy()
            if node in layers.stacks:
                copy.results, copy.rule = (
                    _shortened(node.results, gone),
                    _with_slices(node.rule, slices - gone),
                )
            elif is_stack_of(node, slices):
                shift = stack_shift(node, layers, start - 1)
                kept = [v for i, v in enumerate(node.operands) if not start <= i + shift < end]
                copy.args, copy.operands, copy.rule = (
                    (kept,),
                    tuple(kept),
                    _with_slices(node.rule, slices - gone),
                )
            copy.replace_operands([moved(node, v) for v in copy.operands])
    kept = [i for i, v in enumerate(graph.outputs) if not start <= layers.of.get(v.node, -1) < end]
    small = Graph(
        list(copies.values()),
        [Value(copies[graph.outputs[i].node], graph.outputs[i].index) for i in kept],
    )
    inputs = {
        copies[node]: (r if r < start else r - gone)
        for node, r in labels.items()
        if not start <= r < end
    }
    origin = {copy: node for node, copy in copies.items()}
    return Folded(
        small, origin, kept, gone, start - 1, inputs, slices and slices - gone, graph, layers
    )


def _shortened(results: Sequence[Any], by: int) -> tuple[Any, ...]:
    return tuple(results[: len(results) - by])


def _with_slices(rule: BoundRule, n: int) -> BoundRule:
    """The rule of an op that stacks, or takes a stack apart, for ``n`` slices."""
    if len(rule.results) > 1:
        return replace(rule, results=rule.results[:n], pending=rule.pending[:n])
    return replace(rule, operands=rule.operands[:n])


def _largest(same: Sequence[bool], layers: Layers) -> tuple[int, int] | None:
    """The first and the last layer of the run of equal layers whose fold leaves out most nodes;
    None without a run that is long enough.
    """
    best, most, start = None, 0, 0
    for r in range(len(same) + 1):
        if r == len(same) or not same[r]:
            gone = (r - start + 1 - 2 * KEPT) * len(layers.nodes[start])
            if r - start + 1 >= FEWEST and gone > most:
                best, most = (start, r), gone
            start = r + 1
    return best


def _is_local(graph: Graph, layers: Layers, start: int, end: int) -> bool:
    """Whether the layers that are left out, and those beside them, use and are used by adjacent
    layers and shared nodes only.
    """
    slices = len(layers.nodes) if layers.stacks else 0
    for node in graph.nodes:
        here = layers.of.get(node)
        if is_stack_of(node, slices):
            shift = stack_shift(node, layers, start - 1)
            one = node.operands[start - 1 - shift]
            for layer in range(start - 1, min(end + 1, slices + shift)):
                value = node.operands[layer - shift]
                if (layers.of.get(value.node), layers.at.get(value.node), value.index) != (
                    layer,
                    layers.at.get(one.node),
                    one.index,
                ):
                    return False
            continue
        for value in node.operands:
            there = layers.of_value(value)
            if there is None or here == there:
                continue
            if here is None:
                if start - KEPT <= there < end + KEPT:
                    return False
            elif (
                abs(there - here) > 1
                and max(here, there) >= start - KEPT
                and min(here, there) < end + KEPT
            ):
                return False
    return True
