"""The layer of each node of a graph, and whether two layers are equal.

An input's layer is in its name (``layers.3.attn.wq``), or is its index in a stack (``ftp.scan``).
Every other node belongs to the last layer that it is computed from, in a backward pass to the first
one. A value that distant layers read, such as a global norm, belongs to none. Two layers are equal
if their nodes are equal, in order, with operands from equally distant layers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ftp.functional.remat import Region
from ftp.ops.stack import STACK, UNSTACK
from ftp.planning.graph import Graph, Node, Value

FEWEST = 6  # least number of equal layers in a row that are folded

# A number after a word: layers.3, layers[3], layers']['3; for nn.Sequential after the argument's
# name: params['3
_INDEX = re.compile(r"(\w+)(?:\.|'\]\[|\[['\"]?|\"\]\[)(\d+)(?=\W|$)")

_Layer = list[Any]
Named = TypeVar("Named")


@dataclass
class Layers:
    """The nodes of each layer, in order; a node of no layer is shared. Each slice of a node in
    ``stacks`` belongs to a layer.
    """

    of: dict[Node, int]
    at: dict[Node, int]  # its place in the layer
    nodes: list[list[Node]]
    stacks: set[Node]

    def of_value(self, value: Value) -> int | None:
        return value.index if value.node in self.stacks else self.of.get(value.node)


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
    """Each node's layer. If a node's operands are from distant layers, the operand with most users
    becomes ``shared``.
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
    """The layer of each input that has one: the number in its path after the word that has the most
    numbers.
    """
    _, found = word_and_numbers(names)
    order = {number: i for i, number in enumerate(sorted(set(found.values())))}
    return {node: order[number] for node, number in found.items()}


def word_and_numbers(names: Mapping[Named, str]) -> tuple[str, dict[Named, int]]:
    """The word of a path that the most numbers follow, and the number of each name that has it.

    >>> word_and_numbers({0: "emb", 1: "layers.4.up", 2: "layers.5.up"})
    ('layers', {1: 4, 2: 5})
    """
    found: dict[str, dict[Named, int]] = {}
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
    word, numbers = word_and_numbers(names)
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
    """Source lines that are labelled as of the first or last layer but stand outside of it, such as
    the head's: (layer, line).

    No other layer has such a line, and the line reads no parameter of the layer. Backward ops have
    the lines of their forward ops.
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
    if len(is_one) == len(layers):  # each layer has its own source lines
        return set()
    return {(layer, line) for line in is_one for layer in layers[line] & ends} - reading


def _computed(node: Node) -> Node:
    """The node that computed this value, before reshards and constraints."""
    while node.kind in ("reshard", "constrain"):
        node = node.operands[0].node
    return node


def alike(layers: Layers, facts: Callable[[Node], Any]) -> list[bool]:
    """For each layer, whether it equals the next one."""
    described: list[_Layer] = [describe_layer(r, layers, facts) for r in range(len(layers.nodes))]
    return [described[r] == described[r + 1] for r in range(len(described) - 1)]


def describe_layer(layer: int, layers: Layers, facts: Callable[[Node], Any]) -> _Layer:
    regions: dict[Region, int] = {}
    found = []
    for node in layers.nodes[layer]:
        region = None if node.region is None else regions.setdefault(node.region, len(regions))
        found.append(
            (
                node.kind,
                node.target,
                _refer(node.args, layer, layers),
                _refer(dict(node.kwargs), layer, layers),
                node.results,
                node.phase,
                region,
                node.branch,
                facts(node),
            )
        )
    return found


def _refer(tree: Any, layer: int, layers: Layers) -> Any:
    """Arguments of a layer's node, with values named by their place relative to the layer."""
    if isinstance(tree, Value):
        if tree.node in layers.stacks:
            return ("slice", id(tree.node), tree.index - layer)
        there = layers.of.get(tree.node)
        if there is None:
            return ("shared", id(tree.node), tree.index)
        return ("layer", there - layer, layers.at[tree.node], tree.index)
    if isinstance(tree, list | tuple):
        return tuple([_refer(t, layer, layers) for t in tree])
    if isinstance(tree, dict):
        return tuple([(k, _refer(t, layer, layers)) for k, t in tree.items()])
    return tree if isinstance(tree, str) else (type(tree).__name__, repr(tree))


def is_stack_of(node: Node, slices: int) -> bool:
    return bool(slices) and node.target is STACK and len(node.operands) == slices


def stack_shift(node: Node, layers: Layers, layer: int) -> int:
    """The number of layers from a slice of a stack to the layer that computes it: 0, or 1 or -1 for
    a bias' gradient, which a neighbouring layer computes.
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


def decisions(node: Node) -> Any:
    return (
        tuple(node.sizes.items()),
        tuple(node.cuts),
        tuple((i, tuple(p)) for i, p in node.pending.items()),
    )
