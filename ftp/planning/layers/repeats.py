"""Fold repeated layers: plan a graph without most of them, and record how to put them back.

Of a run of equal layers a few are kept, at each end of the run; one of them stands for those left
out. `unfold` copies its plan to them. Where layers alternate, as of local and global attention, the
layers of a period are one layer of the fold.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftp.dataclass import dataclass
from ftp.ops.stack import UNSTACK
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.known_passes import KnownPasses
from ftp.planning.layers.labels import (
    FEWEST,
    Layers,
    constants_labelled,
    decisions,
    describe_layer,
    is_stack_of,
    kinds,
    label,
    numbered,
    repeated_run,
    stack_shift,
)
from ftp.rules.rule import BoundRule

# Layers kept at each end of a run: one next to the layers that differ, which may be planned
# otherwise, and one that is planned like those left out.
KEPT = 2
FEWEST_PERIODS = 3  # equal periods in a row that are folded; one is kept at each end


@dataclass(frozen=True)
class Gap:
    """The layers that a folded graph leaves out: ``count`` layers from number ``start`` on. The
    folded graph numbers the layers after the gap anew.
    """

    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.end

    def to_folded(self, layer: int) -> int:
        """The number in the folded graph of a layer of the whole graph that is not left out."""
        return layer if layer < self.start else layer - self.count

    def to_whole(self, layer: int) -> int:
        """The number in the whole graph of a layer of the folded graph."""
        return layer if layer < self.start else layer + self.count


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
        earlier = self.twins.get(value.node)
        return value if earlier is None else Value(earlier, value.index)

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
        graph: copies of the nodes of all other layers.
        origin: per node of ``graph``, as rewritten by passes so far, its node in the whole graph.
        kept: indices of the whole graph's outputs that ``graph`` returns.
        left_out: number of layers that are left out; they follow layer ``stands_for``, which is
            planned for them.
        labels: the layers of its inputs.
        slices: number of slices of its stacks, if layers are slices; else 0.
        whole, layers: the graph before the fold, and its layers.
        period: number of the model's layers that are one layer here.
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
    period: int = 1

    @property
    def gap(self) -> Gap:
        return Gap(self.stands_for + 1, self.left_out)

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


def fold(
    graph: Graph,
    facts: Callable[[Node], Any],
    out_facts: Sequence[Any],
    known: KnownPasses | None = None,
    kept: int = KEPT,
) -> Folded | None:
    """The graph with most of a run of equal layers left out; None where there is no such run.

    Args:
        facts: properties that must be equal in equal nodes and that the graph does not hold, such
            as an input's spec.
        out_facts: the same, per output.
        known: gives the fold that leaves out the same layers, if there is one.
        kept: layers kept at each end of the run.
    """
    labels = numbered({node: node.name for node in graph.inputs})
    slices = Counter(len(node.results) for node in graph.nodes if node.target is UNSTACK)
    given = graph, facts, _out_facts(graph, out_facts)
    found = None
    if labels and (named := max(labels.values()) + 1) >= FEWEST:
        # A stack of one tensor of each layer, as of gradients that an optimizer sends to owners, is
        # split into layers too.
        cut = named if named in slices else 0
        found = _fold(*given, constants_labelled(graph, labels), cut, kept)
    if found is None and slices and max(slices) >= FEWEST:
        found = _fold(*given, {}, max(slices), kept)
    if found is None or known is None:
        return found
    of = found
    key = (of.gap, of.slices, bool(of.labels), of.period)
    return known.once(graph, "fold", *key, make=lambda: of)


def _out_facts(graph: Graph, out_facts: Sequence[Any]) -> dict[Node, list[Any]]:
    returned: dict[Node, list[Any]] = {}
    for value, fact in zip(graph.outputs, out_facts, strict=True):
        returned.setdefault(value.node, []).append((value.index, fact))
    return returned


def _fold(
    graph: Graph,
    facts: Callable[[Node], Any],
    returned: Mapping[Node, list[Any]],
    labels: dict[Node, int],
    slices: int,
    kept: int,
) -> Folded | None:
    layers = label(graph, labels, slices)
    if any(node in layers.stacks for node in returned):
        return None
    found = kinds(layers, lambda node: (facts(node), returned.get(node)))
    run = _longest_run(found, layers)
    gone = 0 if run is None else run[1] + 1 - run[0] - 2 * KEPT
    start, period = (0, 1) if slices else _best_period(found, gone)
    if period > 1:
        grouped = {n: r if r < start else start + (r - start) // period for n, r in labels.items()}
        of_groups = label(graph, grouped, 0)
        same = kinds(of_groups, lambda node: (facts(node), returned.get(node)))
        first, count = repeated_run(same, 1)
        if count >= FEWEST_PERIODS:
            run_of_groups = first, first + count - 1
            if folded := _without(graph, of_groups, grouped, 0, run_of_groups, 1):
                return replace(folded, period=period)
    return None if run is None else _without(graph, layers, labels, slices, run, kept)


def _best_period(found: Sequence[int], gone: int) -> tuple[int, int]:
    """The first layer and the length of the periods whose fold leaves out most layers: (0, 1) where
    none leaves out more than ``gone``. The periods at both ends have other neighbours, and differ.
    """
    best = 0, 1
    for period in range(2, len(found) // (FEWEST_PERIODS + 2) + 1):
        start, count = repeated_run(found, period)
        if count >= FEWEST_PERIODS + 2 and (count - 4) * period > gone:
            best, gone = (start, period), (count - 4) * period
    return best


def _without(
    graph: Graph,
    layers: Layers,
    labels: Mapping[Node, int],
    slices: int,
    run: tuple[int, int],
    kept_layers: int,
) -> Folded | None:
    """The graph without the layers of a run but those kept; None if others read them."""
    first, last = run
    gap = Gap(first + kept_layers, last + 1 - first - 2 * kept_layers)
    if not _reads_neighbours_only(graph, layers, gap, (first, last)):
        return None
    copies = _copies_outside(gap, graph, layers, slices)
    kept = [i for i, v in enumerate(graph.outputs) if layers.of.get(v.node, -1) not in gap]
    outputs = [graph.outputs[i] for i in kept]
    return Folded(
        Graph(list(copies.values()), [Value(copies[v.node], v.index) for v in outputs]),
        {copy: node for node, copy in copies.items()},
        kept,
        gap.count,
        gap.start - 1,
        {copies[node]: gap.to_folded(r) for node, r in labels.items() if r not in gap},
        slices and slices - gap.count,
        graph,
        layers,
    )


def _copies_outside(gap: Gap, graph: Graph, layers: Layers, slices: int) -> dict[Node, Node]:
    """The folded graph's copy of each node that is not left out. Stacks lose the slices of the
    layers in the gap.
    """
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        here = layers.of.get(node)
        if here is not None and here in gap:
            continue
        copy = copies[node] = node.copy()
        if node in layers.stacks:
            copy.results = node.results[: len(node.results) - gap.count]
            copy.rule = _with_slices(node.rule, slices - gap.count)
        elif is_stack_of(node, slices):
            shift = stack_shift(node, layers, gap.start - 1)
            kept = [v for i, v in enumerate(node.operands) if i + shift not in gap]
            copy.args, copy.operands = (kept,), tuple(kept)
            copy.rule = _with_slices(node.rule, slices - gap.count)
        copy.replace_operands([_operand(v, here, gap, layers, copies) for v in copy.operands])
    return copies


def _operand(
    value: Value, here: int | None, gap: Gap, layers: Layers, copies: Mapping[Node, Node]
) -> Value:
    """What a node of layer ``here`` reads in the folded graph in place of ``value``: the equal
    value of the layer at the same distance.
    """
    there = layers.of_value(value)
    if there is None:
        return Value(copies[value.node], value.index)
    target = gap.to_folded(there) if here is None else gap.to_folded(here) + there - here
    if value.node in layers.stacks:
        return Value(copies[value.node], target)
    if here is None or here == there:
        return Value(copies[value.node], value.index)
    equal = layers.nodes[gap.to_whole(target)][layers.at[value.node]]
    return Value(copies[equal], value.index)


def _with_slices(rule: BoundRule, n: int) -> BoundRule:
    """The rule of an op that stacks, or takes a stack apart, for ``n`` slices."""
    if len(rule.results) > 1:
        return replace(rule, results=rule.results[:n], pending=rule.pending[:n])
    return replace(rule, operands=rule.operands[:n])


def _longest_run(found: Sequence[int], layers: Layers) -> tuple[int, int] | None:
    """The first and the last layer of the run of equal layers whose fold leaves out most nodes;
    None without a run that is long enough.
    """
    best, most, start = None, 0, 0
    for r in range(len(found)):
        if r + 1 == len(found) or found[r] != found[r + 1]:
            gone = (r - start + 1 - 2 * KEPT) * len(layers.nodes[start])
            if r - start + 1 >= FEWEST and gone > most:
                best, most = (start, r), gone
            start = r + 1
    return best


def _reads_neighbours_only(graph: Graph, layers: Layers, gap: Gap, run: tuple[int, int]) -> bool:
    """Whether the layers of a run read and are read by adjacent layers and shared nodes only."""
    first, last = run
    slices = len(layers.nodes) if layers.stacks else 0
    for node in graph.nodes:
        here = layers.of.get(node)
        if is_stack_of(node, slices):
            if not _stacks_equal_values(node, layers, gap):
                return False
            continue
        for value in node.operands:
            there = layers.of_value(value)
            if there is None or here == there:
                continue
            if here is None:
                if first <= there <= last:
                    return False
            elif abs(there - here) > 1 and max(here, there) >= first and min(here, there) <= last:
                return False
    return True


def _stacks_equal_values(stack: Node, layers: Layers, gap: Gap) -> bool:
    """Whether a stack takes from each layer in and next to the gap the same value."""
    shift = stack_shift(stack, layers, gap.start - 1)
    one = stack.operands[gap.start - 1 - shift]
    for layer in range(gap.start - 1, min(gap.end + 1, len(layers.nodes) + shift)):
        value = stack.operands[layer - shift]
        if layers.of.get(value.node) != layer or value.index != one.index:
            return False
        if layers.at.get(value.node) != layers.at.get(one.node):
            return False
    return True
