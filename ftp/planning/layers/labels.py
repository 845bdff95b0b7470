"""The layer of each node of a graph, and whether two layers are equal.

The layer of an input is the number in its name (``layers.3.attn.wq``, ``layer_3.wq``), or the
index of the slice of a stack (``ftp.scan``); a captured constant that one layer reads belongs to
it. Another node belongs to the last layer among its operands; in a backward pass, to the first. A
value that distant layers read, such as a global norm, belongs to no layer.
Two layers are equal if they have the same nodes in the same order, with operands from layers at the
same distance.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ftp.dataclass import dataclass
from ftp.functional.remat import Region
from ftp.ops.stack import STACK, UNSTACK
from ftp.planning.graph import Graph, Node, Value

FEWEST = 6  # equal layers in a row that are folded

# A word and a number: layers.3, layers[3], layers']['3; of nn.Sequential, the argument's name and a
# number: params['3
_INDEX = re.compile(r"(\w+)(?:\.|'\]\[|\[['\"]?|\"\]\[)(\d+)(?=\W|$)")
_IN_WORD = re.compile(r"([^\W\d]\w*?)(\d+)(?=\W|$)")  # layer_3, block3

_Layer = list[Any]
Named = TypeVar("Named")


@dataclass
class Layers:
    """The layers of a graph.

    Attributes:
        of: the layer of each node; layers share the nodes that it lacks.
        at: the position of each node in its layer.
        nodes: of each layer, in order.
        stacks: nodes whose results are slices, one for each layer.
    """

    of: dict[Node, int]
    at: dict[Node, int]
    nodes: list[list[Node]]
    stacks: set[Node]

    def of_value(self, value: Value) -> int | None:
        return value.index if value.node in self.stacks else self.of.get(value.node)


def label(graph: Graph, of_inputs: Mapping[Node, int], slices: int) -> Layers:
    """The layers of a graph.

    Args:
        of_inputs: the layer of each input that has one.
        slices: the number of slices of a stack; 0 if inputs have layers.
    """
    users = Counter(value.node for node in graph.nodes for value in node.operands)
    shared: set[Node] = set()
    found = _labelled(graph, of_inputs, slices, users, shared)
    return _labelled(graph, of_inputs, slices, users, shared) if shared else found


def _labelled(
    graph: Graph,
    of_inputs: Mapping[Node, int],
    slices: int,
    users: Mapping[Node, int],
    shared: set[Node],
) -> Layers:
    """The layers of a graph, given the ``shared`` nodes. If a node has operands from layers that
    are not adjacent, the operand with most users is added to these.
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
    while read:
        first, last = min(read.values()), max(read.values())
        if last - first <= 1:
            return first if node.phase % 2 else last
        most = max(read, key=lambda n: users[n])
        if most.kind == "input" or users[most] <= FEWEST - 2:
            return None
        shared.add(most)
        del read[most]
    return None


def numbered(names: Mapping[Node, str]) -> dict[Node, int]:
    """The layer of each input that has one, counted from 0: the order of the numbers that follow
    the prefix of `prefix_and_numbers` in the paths.
    """
    _, found = prefix_and_numbers(names)
    order = {number: i for i, number in enumerate(sorted(set(found.values())))}
    return {node: order[number] for node, number in found.items()}


def prefix_and_numbers(names: Mapping[Named, str]) -> tuple[str, dict[Named, int]]:
    """What most different numbers follow in the names, and the number in each name that has it: a
    word and a dot, or the start of a word where as many layers as are folded are called so.

    >>> prefix_and_numbers({0: "emb", 1: "layers.4.up", 2: "layers.5.up"})
    ('layers.', {1: 4, 2: 5})
    >>> prefix_and_numbers({i: f"layer_{i}" for i in range(6)})[0]
    'layer_'
    """
    word, numbers = _most_numbered(names, _INDEX)
    if len(set(numbers.values())) < FEWEST:
        start, others = _most_numbered(names, _IN_WORD)
        if len(set(others.values())) >= FEWEST:
            return start, others
    return f"{word}.", numbers


def _most_numbered(
    names: Mapping[Named, str], pattern: re.Pattern[str]
) -> tuple[str, dict[Named, int]]:
    found: dict[str, dict[Named, int]] = {}
    for node, name in names.items():
        seen = set()
        for match in pattern.finditer(name):
            if match[1] not in seen:
                seen.add(match[1])
                found.setdefault(match[1], {})[node] = int(match[2])
    best = max(found, key=lambda word: (len(set(found[word].values())), word), default="")
    return best, found.get(best, {})


def constants_labelled(graph: Graph, labels: Mapping[Node, int]) -> dict[Node, int]:
    """The layers of inputs, with those of captured constants: the layer that reads the constant, or
    what is computed from constants alone; the first of two adjacent ones.
    """
    if not any(node not in labels and not node.depends for node in graph.inputs):
        return dict(labels)
    of = label(graph, labels, 0).of
    readers: dict[Node, set[int | None]] = {}
    for node in reversed(graph.nodes):
        is_known = node in of or node.depends
        layers = {of.get(node)} if is_known else readers.get(node, {None})
        for value in node.operands:
            if value.node not in of and not value.node.depends:
                readers.setdefault(value.node, set()).update(layers)
    found = dict(labels)
    for node in graph.inputs:
        numbers = [layer for layer in readers.get(node, {None}) if layer is not None]
        if len(numbers) == len(readers.get(node, {None})) and max(numbers) - min(numbers) <= 1:
            found[node] = min(numbers)
    return found


def named_layers(graph: Graph) -> dict[Node, str]:
    """The name of each node's layer: ``layers.3``, or ``layer 3`` for a slice of a stack."""
    names = {node: node.name for node in graph.inputs}
    prefix, numbers = prefix_and_numbers(names)
    labels = numbered(names)
    slices = max((len(node.results) for node in graph.nodes if node.target is UNSTACK), default=0)
    if slices > len(set(numbers.values())):
        return {node: f"layer {layer}" for node, layer in label(graph, {}, slices).of.items()}
    if not labels:
        return {}
    called = {layer: f"{prefix}{numbers[node]}" for node, layer in labels.items()}
    of = label(graph, labels, 0).of
    beside = _beside_layers(of, labels)
    return {
        node: called[layer]
        for node, layer in of.items()
        if (layer, _computed(node).source) not in beside
    }


def _beside_layers(of: Mapping[Node, int], labels: Mapping[Node, int]) -> set[tuple[int, str]]:
    """Source lines outside of all layers whose nodes `label` gives to the first or last layer, such
    as the head's: (layer, line).

    Such a line occurs in no other layer, and reads no parameter of the layer. Backward ops have the
    lines of their forward ops.
    """
    layers: dict[str, set[int]] = {}
    reading: set[tuple[int, str]] = set()
    for node, layer in of.items():
        if node.kind == "op":
            layers.setdefault(node.source, set()).add(layer)
            if any(_computed(value.node) in labels for value in node.operands):
                reading.add((layer, node.source))
    ends = {0, max(labels.values())}
    of_one_layer = {line for line, found in layers.items() if len(found) == 1}
    if len(of_one_layer) == len(layers):  # each layer has its own source lines
        return set()
    return {(layer, line) for line in of_one_layer for layer in layers[line] & ends} - reading


def _computed(node: Node) -> Node:
    """The node that computed this value, before reshards and constraints."""
    while node.kind in ("reshard", "constrain"):
        node = node.operands[0].node
    return node


def kinds(layers: Layers, facts: Callable[[Node], Any]) -> list[int]:
    """For each layer the number of the first one that it equals."""
    described: list[_Layer] = []
    found: list[int] = []
    for r in range(len(layers.nodes)):
        described.append(describe_layer(r, layers, facts))
        firsts = reversed(dict.fromkeys(found))  # mostly it equals one that was met lately
        found.append(next((k for k in firsts if described[k] == described[r]), r))
    return found


def repeated_run(found: Sequence[int], period: int) -> tuple[int, int]:
    """The longest run of layers in which each equals the one ``period`` layers after it: its first
    layer, and the number of whole periods; of two as long the first.

    >>> repeated_run([0, 1, 2, 1, 2, 1, 2, 7], 2)  # 7 differs from all
    (1, 3)
    """
    best, length, start = 0, 0, 0
    for r in range(len(found) - period + 1):
        if r == len(found) - period or found[r] != found[r + period]:
            if r - start > length:
                best, length = start, r - start
            start = r + 1
    return best, (length + period) // period


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
                _refer(dict(node.kwargs), layer, layers) if node.kwargs else (),
                node.results,
                node.phase,
                region,
                node.branch,
                facts(node),
            )
        )
    return found


def _refer(tree: Any, layer: int, layers: Layers) -> Any:
    """Arguments of a layer's node, with each value described by its position relative to the
    layer.
    """
    if isinstance(tree, Value):
        if tree.node in layers.stacks:
            return ("slice", id(tree.node), tree.index - layer)
        there = layers.of.get(tree.node)
        if there is None:
            return ("shared", id(tree.node), tree.index)
        return ("layer", there - layer, layers.at[tree.node], tree.index)
    if isinstance(tree, (list, tuple)):
        return tuple([_refer(t, layer, layers) for t in tree])
    if isinstance(tree, dict):
        return tuple([(k, _refer(t, layer, layers)) for k, t in tree.items()])
    kind = type(tree)
    return (kind, tree) if kind in (int, bool, str) else (kind.__name__, repr(tree))


def is_stack_of(node: Node, slices: int) -> bool:
    return bool(slices) and node.target is STACK and len(node.operands) == slices


def stack_shift(node: Node, layers: Layers, layer: int) -> int:
    """The distance from a slice of a stack to the layer that computes it: 0, or 1 or -1 for a bias'
    gradient, which a neighbouring layer computes.
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
