"""Layers that repeat: a graph with most of them left out, to plan, and the plan with them put back.

The inputs' names say which layer they belong to (``layers.3.attn.wq``), or their places in a stack (``ftp.scan``); every other node
belongs to the last layer that it is computed from, in a backward pass to the first one. What layers far apart read, such as a global
norm, belongs to none. Two layers are alike where all of their nodes are, in order and down to the layers beside them that each operand
comes from. Of a run of alike layers a few are kept, one of which counts for those that are left out.
"""

import heapq
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftp.graph import Graph, Node, Value
from ftp.recompute import Region
from ftp.registry import BoundRule
from ftp.stacked import STACK, UNSTACK

FEWEST = 6  # alike layers in a row that are worth it
KEPT = 2  # of them at each end: one beside the layers that differ, and one that is planned as those left out are

_INDEX = re.compile(r"(\w+)(?:\.|'\]\[|\[|\"\]\[)(\d+)(?=\W|$)")

_Layer = list[Any]


@dataclass
class Layers:
    """The nodes of each layer, in order; what belongs to none is shared. Of the ``stacks`` each slice belongs to a layer."""

    of: dict[Node, int]
    at: dict[Node, int]  # its place in the layer
    nodes: list[list[Node]]
    stacks: set[Node]

    def of_value(self, value: Value) -> int | None:
        return value.index if value.node in self.stacks else self.of.get(value.node)


@dataclass(frozen=True)
class Ties:
    """Two layers beside each other that stand for a run of them: what is decided for one is decided for all.

    Attributes:
        twins: of each node of the later layer the one of the earlier.
        layers: what is in which.
        earlier: the number of the earlier layer.
        left_out: how many layers are between them in the whole graph.
    """

    twins: Mapping[Node, Node]
    layers: Layers
    earlier: int
    left_out: int

    def twin(self, value: Value) -> Value:
        """The value of the earlier layer that is decided with it, or itself."""
        if value.node in self.layers.stacks:
            return Value(value.node, self.earlier) if value.index == self.earlier + 1 else value
        return Value(self.twins.get(value.node, value.node), value.index)

    def weight(self, node: Node) -> int:
        """How many nodes of the whole graph it stands for."""
        return self.left_out + 1 if self.layers.of.get(node) == self.earlier else 1

    def weight_of(self, value: Value) -> int:
        return self.left_out + 1 if self.layers.of_value(value) == self.earlier else 1

    def weight_between(self, value: Value, user: Node) -> int:
        """How many uses of the whole graph one stands for; those across the two layers stand for those between all that are left out."""
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
    """A graph without some layers, and what is needed to put them back.

    Attributes:
        graph: copies of the nodes that are left.
        origin: of each of them the node of the whole graph.
        kept: the outputs of the whole graph that it returns.
        left_out: how many layers it lacks, after ``stands_for``.
        labels: the layers of its inputs.
        slices: how many slices its stacks have, where layers are those; else 0.
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

    def ties(self, graph: Graph) -> Ties | None:
        """What is to be decided alike in a graph on its way to a plan; None where the two layers are not alike any more."""
        layers = label(graph, self.labels, self.slices)
        t = self.stands_for
        if _describe(t, layers, _decided) != _describe(t + 1, layers, _decided):
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


def _labelled(graph: Graph, of_inputs: Mapping[Node, int], slices: int, users: Mapping[Node, int], shared: set[Node]) -> Layers:
    """Each node's layer; of operands from layers far apart the one that most read is ``shared`` from then on."""
    stacks = {node for node in graph.nodes if slices and node.target is UNSTACK and len(node.results) == slices}
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


def _layer_of(node: Node, layers: Layers, users: Mapping[Node, int], shared: set[Node]) -> int | None:
    read = {v.node: layer for v in node.operands if (layer := layers.of_value(v)) is not None and v.node not in shared}
    while read and max(read.values()) - min(read.values()) > 1:
        most = max(read, key=lambda n: users[n])
        if most.kind == "input" or users[most] <= FEWEST - 2:
            return None
        shared.add(most)
        del read[most]
    return None if not read else min(read.values()) if node.phase % 2 else max(read.values())


def numbered(names: Mapping[Node, str]) -> dict[Node, int]:
    """The layer of each input that has one: the number in its path after the word that has most of them."""
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
    """What the layer of each node is called that belongs to one, such as ``layers.3``; slices of stacks are ``layer 3``."""
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
    return {node: called[layer] for node, layer in of.items() if (layer, _computed(node).source) not in beside}


def _beside_layers(of: Mapping[Node, int], labels: Mapping[Node, int]) -> set[tuple[int, str]]:
    """Lines before the first layer or after the last one that read what a layer gives, such as the head's: (layer, line).

    They are lines of no other layer, and read no parameter of this one. Backward ops have the lines of their forward ops.
    """
    layers: dict[str, set[int]] = {}
    reading: set[tuple[int, str]] = set()
    for node, layer in of.items():
        if node.kind == "op":
            layers.setdefault(node.source, set()).add(layer)
            if any(_computed(value.node) in labels for value in node.operands):
                reading.add((layer, node.source))
    ends, is_one = {0, max(labels.values())}, {line for line, found in layers.items() if len(found) == 1}
    if len(is_one) == len(layers):  # each layer is written out
        return set()
    return {(layer, line) for line in is_one for layer in layers[line] & ends} - reading


def _computed(node: Node) -> Node:
    """The node whose value this one is, moved or not."""
    while node.kind in ("move", "constrain"):
        node = node.operands[0].node
    return node


def alike(layers: Layers, facts: Callable[[Node], Any]) -> list[bool]:
    """Per layer whether the next one is like it."""
    described: list[_Layer] = [_describe(r, layers, facts) for r in range(len(layers.nodes))]
    return [described[r] == described[r + 1] for r in range(len(described) - 1)]


def _describe(layer: int, layers: Layers, facts: Callable[[Node], Any]) -> _Layer:
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
        found.append((node.kind, node.target, refer(node.args), refer(dict(node.kwargs)), node.results, node.phase, region, facts(node)))
    return found


def fold(graph: Graph, facts: Callable[[Node], Any], out_facts: Sequence[Any]) -> Folded | None:
    """The graph with most of a run of alike layers left out; None where there is no such run.

    Args:
        facts: of a node all that its place in the graph does not say, such as the spec of an input.
        out_facts: the same, per output.
    """
    labels = numbered({node: node.name for node in graph.inputs})
    slices = Counter(len(node.results) for node in graph.nodes if node.target is UNSTACK)
    found = None
    if labels and max(labels.values()) + 1 >= FEWEST:
        found = _fold(graph, labels, 0, facts, out_facts)
    if found is None and slices and max(slices) >= FEWEST:
        found = _fold(graph, {}, max(slices), facts, out_facts)
    return found


def _fold(graph: Graph, labels: dict[Node, int], slices: int, facts: Callable[[Node], Any], out_facts: Sequence[Any]) -> Folded | None:
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
            target = (here if here < start else here - gone) + there - here  # as the folded graph counts
        if value.node in layers.stacks:
            return Value(copies[value.node], target)
        is_near = here is None or here == there
        old = value.node if is_near else layers.nodes[target if target < start else target + gone][layers.at[value.node]]
        return Value(copies[old], value.index)

    for node in graph.nodes:
        if not start <= layers.of.get(node, -1) < end:
            copy = copies[node] = node.copy()
            if node in layers.stacks:
                copy.results, copy.rule = _shortened(node.results, gone), _with_slices(node.rule, slices - gone)
            elif _is_stack_of(node, slices):
                shift = _shift(node, layers, start - 1)
                kept = [v for i, v in enumerate(node.operands) if not start <= i + shift < end]
                copy.args, copy.operands, copy.rule = (kept,), tuple(kept), _with_slices(node.rule, slices - gone)
            copy.replace_operands([moved(node, v) for v in copy.operands])
    kept = [i for i, v in enumerate(graph.outputs) if not start <= layers.of.get(v.node, -1) < end]
    small = Graph(list(copies.values()), [Value(copies[graph.outputs[i].node], graph.outputs[i].index) for i in kept])
    inputs = {copies[node]: (r if r < start else r - gone) for node, r in labels.items() if not start <= r < end}
    origin = {copy: node for node, copy in copies.items()}
    return Folded(small, origin, kept, gone, start - 1, inputs, slices and slices - gone, graph, layers)


def _is_stack_of(node: Node, slices: int) -> bool:
    return bool(slices) and node.target is STACK and len(node.operands) == slices


def _shift(node: Node, layers: Layers, layer: int) -> int:
    """How far the slices of a stack are from the layers that compute them: a bias' gradient belongs to the layer behind it."""
    found = {v.node: layers.of.get(v.node) for v in node.operands}
    return next((d for d in (0, 1, -1) if 0 <= layer - d < len(node.operands) and found[node.operands[layer - d].node] == layer), 0)


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
    """Whether layers that are left out, and those beside them, use and are used by what is next to them alone."""
    slices = len(layers.nodes) if layers.stacks else 0
    for node in graph.nodes:
        here = layers.of.get(node)
        if _is_stack_of(node, slices):
            shift = _shift(node, layers, start - 1)
            one = node.operands[start - 1 - shift]
            for layer in range(start - 1, min(end + 1, slices + shift)):
                value = node.operands[layer - shift]
                if (layers.of.get(value.node), layers.at.get(value.node), value.index) != (layer, layers.at.get(one.node), one.index):
                    return False
            continue
        for value in node.operands:
            there = layers.of_value(value)
            if there is None or here == there:
                continue
            if here is None:
                if start - KEPT <= there < end + KEPT:
                    return False
            elif abs(there - here) > 1 and max(here, there) >= start - KEPT and min(here, there) < end + KEPT:
                return False
    return True


def unfold(folded: Folded, planned: Graph) -> tuple[Graph, list[int]] | None:
    """The plan of the whole graph, and per output the output of the folded graph that it is like; None where layers came out different.

    Args:
        planned: the folded graph, with the moves and cuts that were decided.
    """
    layers = label(planned, folded.labels, folded.slices)
    t, gone = folded.stands_for, folded.left_out
    if _describe(t, layers, _decided) != _describe(t + 1, layers, _decided):
        return None
    stamp = _Stamp(folded, planned, layers)
    made = [stamp.layer(step) for step in range(gone)]

    def placed(value: Value, user: int) -> Value:
        """What a node of layer ``user``, as the whole graph counts, takes in place of ``value``, which layer t or another is given."""
        there = layers.of_value(value)
        if there is None:
            return value
        at = user - t - 1
        if 0 <= at < gone:
            there = user + there - t
        else:
            there += user - (user if user <= t else user - gone)
        if value.node in layers.stacks:
            return Value(value.node, there)
        if not t < there <= t + gone:
            near = there if there <= t else there - gone
            same = near == layers.of[value.node]
            return value if same else Value(layers.nodes[near][layers.at[value.node]], value.index)
        return Value(made[there - t - 1][layers.nodes[t][layers.at[value.node]]], value.index)

    for step, copies in enumerate(made):
        for node, copy in copies.items():
            copy.replace_operands([placed(v, t + 1 + step) for v in node.operands])
    for node in planned.nodes:
        here = layers.of.get(node)
        if here is not None:
            node.replace_operands([placed(v, here if here <= t else here + gone) for v in node.operands])
        elif _is_stack_of(node, folded.slices):
            last = t - _shift(folded.origin[node], folded.layers, t)
            like = node.operands[last]
            if layers.of.get(like.node) != t:
                return None
            between = [Value(copies[like.node], like.index) for copies in made]
            node.operands = (*node.operands[: last + 1], *between, *node.operands[last + 1 :])
            node.args, node.rule = (list(node.operands),), folded.origin[node].rule
        elif node in layers.stacks:
            whole = folded.origin[node]
            node.results, node.rule = whole.results, whole.rule
            node.pending = {i if i <= t else i + gone: p for i, p in node.pending.items()}
            node.pending |= {i: node.pending[t] for i in range(t + 1, t + 1 + gone) if t in node.pending}
    return stamp.assembled(made)


def _decided(node: Node) -> Any:
    return (tuple(node.sizes.items()), tuple(node.cuts), tuple((i, tuple(p)) for i, p in node.pending.items()))


class _Stamp:
    """Copies of the layer that stands for those left out."""

    def __init__(self, folded: Folded, planned: Graph, layers: Layers):
        self.folded, self.planned, self.layers = folded, planned, layers
        self.number = {node: i for i, node in enumerate(folded.whole.nodes)}
        self.order: dict[Node, tuple[int, int]] = {}
        self.anchors = self._anchors()

    def _anchors(self) -> dict[Node, tuple[Node | None, int]]:
        """Per node an original one and how many places it comes after (or, negative, before) it: the next, or the last of its own layer."""
        layers, nodes = self.layers.of, self.planned.nodes
        found: dict[Node, tuple[Node | None, int]] = {}
        following: list[tuple[Node | None, int]] = [(None, 0)] * len(nodes)
        after: tuple[Node | None, int] = None, 0
        for i in reversed(range(len(nodes))):
            after = (nodes[i], 0) if nodes[i] in self.folded.origin else (after[0], after[1] - 1)
            following[i] = after
        before: tuple[Node | None, int] = None, 0
        for node, after in zip(nodes, following, strict=True):
            before = (node, 0) if node in self.folded.origin else (before[0], before[1] + 1)
            is_behind = before[0] and layers.get(node) == layers.get(before[0]) and after[0] and layers.get(node) != layers.get(after[0])
            found[node] = before if is_behind or after[0] is None else after
            anchor, seq = before if after[0] is None else after
            self.order[node] = (0 if anchor is None else self.number[self.folded.origin[anchor]], seq)
        return found

    def _counterpart(self, node: Node, step: int) -> Node:
        """The node that is to the n-th layer left out what ``node`` is to layer t."""
        layer = self.layers.of.get(node)
        origin = self.folded.origin[node]
        whole = self.folded.layers
        return origin if layer is None else whole.nodes[layer + 1 + step][whole.at[origin]]

    def layer(self, step: int) -> dict[Node, Node]:
        """Of each node of layer t its copy in the n-th layer left out; operands are still those of layer t."""
        copies: dict[Node, Node] = {}
        names: dict[str, str] = {}
        regions: dict[Region, Region] = {}
        t = self.folded.stands_for
        for node in self.layers.nodes[t]:
            copy = node.copy()
            if node in self.folded.origin:
                there = self._counterpart(node, step)
                copy.name, copy.source, copy.region = there.name, there.source, there.region
                if node.region is not None and there.region is not None:
                    regions[node.region] = there.region
            else:
                copy.name, copy.cause = _renamed(node.name, names), _renamed(node.cause, names)
                copy.region = None if node.region is None else regions.get(node.region, node.region)
            names[node.name] = copy.name
            names[_flat(node.name)] = _flat(copy.name)
            copies[node] = copy
            anchor, seq = self.anchors[node]
            if anchor is None:
                self.order[copy] = self.order[node]
            else:
                is_near = abs(self.layers.of.get(anchor, t) - t) <= 1
                self.order[copy] = self.number[self._counterpart(anchor, step) if is_near else self.folded.origin[anchor]], seq
        return copies

    def assembled(self, made: Sequence[Mapping[Node, Node]]) -> tuple[Graph, list[int]] | None:
        """All outputs in their places; nodes in an order in which they can run, near that of the whole graph."""
        folded, t = self.folded, self.folded.stands_for
        whole = folded.layers
        place = {i: at for at, i in enumerate(folded.kept)}
        templates: dict[tuple[int, int], list[int]] = {}
        for i in folded.kept:
            value = folded.whole.outputs[i]
            if whole.of.get(value.node) == t:
                templates.setdefault((whole.at[value.node], value.index), []).append(place[i])
        seen: dict[Value, int] = {}
        outputs: list[Value] = []
        like: list[int] = []
        for i, value in enumerate(folded.whole.outputs):
            if i in place:
                outputs.append(self.planned.outputs[place[i]])
                like.append(place[i])
                continue
            nth = seen[value] = seen.get(value, -1) + 1
            at = templates[whole.at[value.node], value.index][nth]
            returned = self.planned.outputs[at]
            if self.layers.of.get(returned.node) != t:
                return None
            outputs.append(Value(made[whole.of[value.node] - t - 1][returned.node], returned.index))
            like.append(at)
        nodes = [*self.planned.nodes, *(copy for copies in made for copy in copies.values())]
        return Graph(_sorted(nodes, self.order), outputs), like


def _flat(name: str) -> str:
    return name.replace("[", "_").replace("]", "")


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """A name, or what a cause says, made from the longest known name that it starts with."""
    head = text
    while head not in names:
        cut = max(head.rfind(c) for c in "._ ")
        if cut <= 0:
            return text
        head = head[:cut]
    return names[head] + text[len(head) :]


def _sorted(nodes: Sequence[Node], order: Mapping[Node, tuple[int, int]]) -> list[Node]:
    missing: dict[Node, int] = {}
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        before = dict.fromkeys(v.node for v in node.operands)
        missing[node] = len(before)
        for other in before:
            users.setdefault(other, []).append(node)
    ready = [(*order[node], i, node) for i, node in enumerate(nodes) if not missing[node]]
    place = {node: (*order[node], i, node) for i, node in enumerate(nodes)}
    heapq.heapify(ready)
    done = []
    while ready:
        node = heapq.heappop(ready)[-1]
        done.append(node)
        for user in users.get(node, ()):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, place[user])
    assert len(done) == len(nodes)
    return done
