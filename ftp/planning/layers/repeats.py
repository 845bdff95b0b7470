"""Fold repeated layers: a graph with most of them left out, to plan, and the facts to put them
back.

The inputs' names say which layer they belong to (``layers.3.attn.wq``), or their places in a stack
(``ftp.scan``); every other node belongs to the last layer that it is computed from, in a backward
pass to the first one. What layers far apart read, such as a global norm, belongs to none. Two
layers are equal where all of their nodes are, in order, each operand coming from an equally distant
layer. Of a run of equal layers a few are kept; one of them counts for those left out.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftp.functional.remat import Region
from ftp.ops.stack import STACK, UNSTACK
from ftp.planning.graph import Graph, Node, Value
from ftp.rules.rule import BoundRule

FEWEST = 6  # equal layers in a row that are worth folding
# Of them at each end: one beside the layers that differ, and one that is planned as those left out
# are.
KEPT = 2

# A number after a word: layers.3, layers[3], layers']['3; of nn.Sequential after the tree itself:
# params['3
_INDEX = re.compile(r"(\w+)(?:\.|'\]\[|\[['\"]?|\"\]\[)(\d+)(?=\W|$)")

_Layer = list[Any]


@dataclass
class Layers:
    """The nodes of each layer, in order; a node of no layer is shared. Each slice of one of the
    ``stacks`` belongs to a layer.
    """

    of: dict[Node, int]
    at: dict[Node, int]  # its place in the layer
    nodes: list[list[Node]]
    stacks: set[Node]

    def of_value(self, value: Value) -> int | None:
        return value.index if value.node in self.stacks else self.of.get(value.node)


@dataclass(frozen=True)
class Ties:
    """Two adjacent layers that stand for a run of them: they share every decision.

    Attributes:
        twins: per node of the later layer, that of the earlier.
        layers: what is in which.
        earlier: the number of the earlier layer.
        left_out: how many layers are between them in the whole graph.
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
        """How many nodes of the whole graph a node stands for."""
        return self.left_out + 1 if self.layers.of.get(node) == self.earlier else 1

    def weight_of(self, value: Value) -> int:
        return self.left_out + 1 if self.layers.of_value(value) == self.earlier else 1

    def weight_between(self, value: Value, user: Node) -> int:
        """How many uses of the whole graph one stands for; those across the two layers stand for
        those between all that are left out.
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
        origin: per copy, or what stands for it by now, its node in the whole graph.
        kept: the outputs of the whole graph that it returns.
        left_out: how many layers it lacks, after ``stands_for``.
        labels: the layers of its inputs.
        slices: the number of slices of its stacks, where layers are slices; else 0.
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
        """The same of the graph rewritten."""
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


def label(graph: Graph, of_inputs: Mapping[Node, int], slices: int) -> Layers:
    """Each node's layer."""
    users: dict[Node, int] = {}
    for node in graph.nodes:
        for value in node.operands:
            users[value.node] = users.get(value.node, 0) + 1
    shared: set[Node] = set()
    _labelled(graph, of_inputs, slices, users, shared)
    return _labelled(graph, of_inputs, slices, users, shared)


def _labelled(
    graph: Graph,
    of_inputs: Mapping[Node, int],
    slices: int,
    users: Mapping[Node, int],
    shared: set[Node],
) -> Layers:
    """Each node's layer. Of operands from layers far apart, the one with most users becomes
    ``shared``.
    """
    stacks = {
        node
        for node in graph.nodes
        if slices and node.target is UNSTACK and len(node.results) == slices
    }
    found = Layers({}, {}, [[] for _ in range(slices or max(of_inputs.values()) + 1)], stacks)
    for node in graph.nodes:
        if node.kind == "input":
            layer = of_inputs.get(node)
        elif node in stacks or node in shared or (slices and node.target is STACK):
            layer = None
        else:
            layer = _layer_of(node, found, users, shared)
        if layer is not None:
            found.of[node], found.at[node] = layer, len(found.nodes[layer])
            found.nodes[layer].append(node)
    return found


def _layer_of(
    node: Node, layers: Layers, users: Mapping[Node, int], shared: set[Node]
) -> int | None:
    read = {
        v.node: layer
        for v in node.operands
        if (layer := layers.of_value(v)) is not None and v.node not in shared
    }
    while read and max(read.values()) - min(read.values()) > 1:
        most = max(read, key=lambda n: users[n])
        if most.kind == "input" or users[most] <= FEWEST - 2:
            return None
        shared.add(most)
        del read[most]
    return None if not read else min(read.values()) if node.phase % 2 else max(read.values())


def numbered(names: Mapping[Node, str]) -> dict[Node, int]:
    """The layer of each input that has one: the number in its path after the word that has most
    of them.
    """
    _, found = _word_and_numbers(names)
    order = {number: i for i, number in enumerate(sorted(set(found.values())))}
    return {node: order[number] for node, number in found.items()}


def _word_and_numbers(names: Mapping[Node, str]) -> tuple[str, dict[Node, int]]:
    found: dict[str, dict[Node, int]] = {}
    for node, name in names.items():
        seen = set()
        for match in _INDEX.finditer(name):
            if match[1] not in seen:
                seen.add(match[1])
                found.setdefault(match[1], {})[node] = int(match[2])
    best = max(found, key=lambda word: (len(set(found[word].values())), word), default="")
    return best, found.get(best, {})


def named_layers(graph: Graph) -> dict[Node, str]:
    """Per node of a layer its name: ``layers.3``, or ``layer 3`` for a slice of a stack."""
    names = {node: node.name for node in graph.inputs}
    word, numbers = _word_and_numbers(names)
    labels = numbered(names)
    slices = max((len(node.results) for node in graph.nodes if node.target is UNSTACK), default=0)
    if slices > len(set(numbers.values())):
        return {node: f"layer {layer}" for node, layer in label(graph, {}, slices).of.items()}
    if not labels:
        return {}
    called = {layer: f"{word}.{numbers[node]}" for node, layer in labels.items()}
    of = label(graph, labels, 0).of
    beside = _beside_layers(of, labels)
    return {
        node: called[layer]
        for node, layer in of.items()
        if (layer, _computed(node).source) not in beside
    }


def _beside_layers(of: Mapping[Node, int], labels: Mapping[Node, int]) -> set[tuple[int, str]]:
    """Source lines before the first layer or after the last that read a layer's result, such as the
    head's: (layer, line).

    They are lines of no other layer, and read no parameter of this one. Backward ops have the lines
    of their forward ops.
    """
    layers: dict[str, set[int]] = {}
    reading: set[tuple[int, str]] = set()
    for node, layer in of.items():
        if node.kind == "op":
            layers.setdefault(node.source, set()).add(layer)
            if any(_computed(value.node) in labels for value in node.operands):
                reading.add((layer, node.source))
    ends, is_one = (
        {0, max(labels.values())},
        {line for line, found in layers.items() if len(found) == 1},
    )
    if len(is_one) == len(layers):  # each layer is written out
        return set()
    return {(layer, line) for line in is_one for layer in layers[line] & ends} - reading


def _computed(node: Node) -> Node:
    """The node that computed this value, before reshards and constraints."""
    while node.kind in ("move", "constrain"):
        node = node.operands[0].node
    return node


def alike(layers: Layers, facts: Callable[[Node], Any]) -> list[bool]:
    """Per layer whether it equals the next one."""
    described: list[_Layer] = [describe_layer(r, layers, facts) for r in range(len(layers.nodes))]
    return [described[r] == described[r + 1] for r in range(len(described) - 1)]


def describe_layer(layer: int, layers: Layers, facts: Callable[[Node], Any]) -> _Layer:
    of, at = layers.of, layers.at
    regions: dict[Region, int] = {}

    def refer(tree: Any) -> Any:
        if isinstance(tree, Value):
            if tree.node in layers.stacks:
                return ("slice", id(tree.node), tree.index - layer)
            there = of.get(tree.node)
            if there is None:
                return ("shared", id(tree.node), tree.index)
            return ("layer", there - layer, at[tree.node], tree.index)
        if isinstance(tree, list | tuple):
            return tuple([refer(t) for t in tree])
        if isinstance(tree, dict):
            return tuple([(k, refer(t)) for k, t in tree.items()])
        return tree if isinstance(tree, str) else (type(tree).__name__, repr(tree))

    found = []
    for node in layers.nodes[layer]:
        region = None if node.region is None else regions.setdefault(node.region, len(regions))
        found.append(
            (
                node.kind,
                node.target,
                refer(node.args),
                refer(dict(node.kwargs)),
                node.results,
                node.phase,
                region,
                node.branch,
                facts(node),
            )
        )
    return found


def fold(graph: Graph, facts: Callable[[Node], Any], out_facts: Sequence[Any]) -> Folded | None:
    """The graph with most of a run of equal layers left out; None where there is no such run.

    Args:
        facts: what decides on a node beside its place in the graph, such as the spec of an input.
        out_facts: the same, per output.
    """
    labels = numbered({node: node.name for node in graph.inputs})
    slices = Counter(len(node.results) for node in graph.nodes if node.target is UNSTACK)
    found = None
    if labels and (named := max(labels.values()) + 1) >= FEWEST:
        # A stack of one tensor of each layer, as of what an optimizer brings to owners, is taken
        # apart into layers too.
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
    first, last = _longest(same)
    if last - first + 1 < FEWEST:
        return None
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
            )  # as the folded graph counts
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


def is_stack_of(node: Node, slices: int) -> bool:
    return bool(slices) and node.target is STACK and len(node.operands) == slices


def stack_shift(node: Node, layers: Layers, layer: int) -> int:
    """How far the slices of a stack are from the layers that compute them: a bias' gradient
    belongs to the layer behind it.
    """
    found = {v.node: layers.of.get(v.node) for v in node.operands}
    return next(
        (
            d
            for d in (0, 1, -1)
            if 0 <= layer - d < len(node.operands) and found[node.operands[layer - d].node] == layer
        ),
        0,
    )


def _shortened(results: Sequence[Any], by: int) -> tuple[Any, ...]:
    return tuple(results[: len(results) - by])


def _with_slices(rule: BoundRule, n: int) -> BoundRule:
    """The rule of a stack, or of what takes one apart, for fewer slices."""
    if len(rule.results) > 1:
        return replace(rule, results=rule.results[:n], pending=rule.pending[:n])
    return replace(rule, operands=rule.operands[:n])


def _longest(same: Sequence[bool]) -> tuple[int, int]:
    """The first and the last layer of the longest run."""
    best, start = (0, 0), 0
    for r in range(len(same) + 1):
        if r == len(same) or not same[r]:
            if r - start > best[1] - best[0]:
                best = (start, r)
            start = r + 1
    return best


def _is_local(graph: Graph, layers: Layers, start: int, end: int) -> bool:
    """Whether layers that are left out, and those beside them, use and are used by what is next
    to them alone.
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


def decisions(node: Node) -> Any:
    return (
        tuple(node.sizes.items()),
        tuple(node.cuts),
        tuple((i, tuple(p)) for i, p in node.pending.items()),
    )
