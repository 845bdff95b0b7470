"""Unfold a plan: copy one layer's plan to the equal layers that the folded graph leaves out."""

from collections.abc import Mapping
from typing import NamedTuple

from ftp.functional.remat import Region
from ftp.planning.graph import Graph, Node, Value, after_operands
from ftp.planning.layers.labels import (
    Layers,
    decisions,
    describe_layer,
    is_stack_of,
    label,
    stack_shift,
)
from ftp.planning.layers.repeats import Folded


def unfold(folded: Folded, planned: Graph) -> tuple[Graph, list[int]] | None:
    """The plan of the whole graph, and per output the folded graph's output that it copies; None
    if the two layers that stand for all were planned differently.

    Args:
        planned: the folded graph, with its reshards and cuts; its nodes become the whole graph's.
    """
    layers = label(planned, folded.labels, folded.slices)
    t = folded.stands_for
    if describe_layer(t, layers, decisions) != describe_layer(t + 1, layers, decisions):
        return None
    return _Unfolding(folded, planned, layers).whole()


class _Anchor(NamedTuple):
    """A node's place relative to an original node, one that planning did not add: ``distance``
    nodes after it, or before it where negative.
    """

    node: Node | None
    distance: int


class _Place(NamedTuple):
    """A node of the layer that stands for the left-out ones, and the places of its copies.

    Attributes:
        originals: per left-out layer the node of the whole graph; None for a node that planning
            added.
        numbers, distance: the copies' sort keys.
    """

    node: Node
    originals: list[Node] | None
    numbers: list[int]
    distance: int


class _Unfolding:
    """Puts copies of layer ``stands_for`` in the place of the layers that were left out.

    Attributes:
        order: per node, its sort key: the number of an original node in the whole graph, and the
            distance from it.
        copies: per left-out layer, the copy of each node of layer ``stands_for``.
    """

    def __init__(self, folded: Folded, planned: Graph, layers: Layers):
        self.folded, self.planned, self.layers, self.gap = folded, planned, layers, folded.gap
        self.number = {node: i for i, node in enumerate(folded.whole.nodes)}
        self.order: dict[Node, tuple[int, int]] = {}
        self.places = self._places()
        self.copies = [self._copied_layer(step) for step in range(self.gap.count)]

    def whole(self) -> tuple[Graph, list[int]] | None:
        for layer, copies in enumerate(self.copies, self.gap.start):
            for node, copy in copies.items():
                copy.replace_operands(
                    [
                        Value(copies[v.node], v.index)
                        if v.node in copies
                        else self._operand(v, layer)
                        for v in node.operands
                    ]
                )
        for node in self.planned.nodes:
            here = self.layers.of.get(node)
            if here is not None:
                layer = self.gap.to_whole(here)
                node.replace_operands([self._operand(v, layer) for v in node.operands])
            elif is_stack_of(node, self.folded.slices):
                if not self._restore_stack(node):
                    return None
            elif node in self.layers.stacks:
                self._restore_unstack(node)
        return self._assembled()

    def _operand(self, value: Value, user: int) -> Value:
        """What a node or an output of layer ``user`` of the whole graph takes in place of
        ``value``, which its counterpart in the planned graph takes.
        """
        there = self.layers.of_value(value)
        if there is None:
            return value
        counterpart = self.folded.stands_for if user in self.gap else self.gap.to_folded(user)
        there += user - counterpart
        if value.node in self.layers.stacks:
            return Value(value.node, there)
        place = self.layers.at[value.node]
        if there in self.gap:
            original = self.layers.nodes[self.folded.stands_for][place]
            return Value(self.copies[there - self.gap.start][original], value.index)
        near = self.gap.to_folded(there)
        is_own = near == self.layers.of[value.node]
        return value if is_own else Value(self.layers.nodes[near][place], value.index)

    def _restore_stack(self, node: Node) -> bool:
        """Give a stack the operands of the left-out layers; False if it does not stack layer
        ``stands_for``.
        """
        t, origin = self.folded.stands_for, self.folded.origin[node]
        last = t - stack_shift(origin, self.folded.layers, t)
        like = node.operands[last]
        if self.layers.of.get(like.node) != t:
            return False
        left_out = [Value(copies[like.node], like.index) for copies in self.copies]
        node.operands = (*node.operands[: last + 1], *left_out, *node.operands[last + 1 :])
        node.args, node.rule = (list(node.operands),), origin.rule
        return True

    def _restore_unstack(self, node: Node) -> None:
        """Give an op that takes a stack apart the results for the left-out layers."""
        t, origin = self.folded.stands_for, self.folded.origin[node]
        node.results, node.rule = origin.results, origin.rule
        node.pending = {self.gap.to_whole(i): p for i, p in node.pending.items()}
        if t in node.pending:
            node.pending |= dict.fromkeys(range(self.gap.start, self.gap.end), node.pending[t])

    def _anchors(self) -> dict[Node, _Anchor]:
        """Each node's anchor: the next original node, or the one before if that is the last
        original node of the node's layer. Fills ``order`` for the planned nodes.
        """
        layers, nodes = self.layers.of, self.planned.nodes
        anchors: dict[Node, _Anchor] = {}
        following = [_Anchor(None, 0)] * len(nodes)
        after = _Anchor(None, 0)
        for i in reversed(range(len(nodes))):
            is_original = nodes[i] in self.folded.origin
            after = _Anchor(nodes[i], 0) if is_original else _Anchor(after.node, after.distance - 1)
            following[i] = after
        before = _Anchor(None, 0)
        for node, after in zip(nodes, following, strict=True):
            is_original = node in self.folded.origin
            before = _Anchor(node, 0) if is_original else _Anchor(before.node, before.distance + 1)
            ends_layer = (
                before.node
                and layers.get(node) == layers.get(before.node)
                and after.node
                and layers.get(node) != layers.get(after.node)
            )
            anchors[node] = before if ends_layer or after.node is None else after
            anchor, distance = before if after.node is None else after
            number = 0 if anchor is None else self.number[self.folded.origin[anchor]]
            self.order[node] = number, distance
        return anchors

    def _places(self) -> list[_Place]:
        """Where the copies of the nodes of layer ``stands_for`` go."""
        t, anchors, places = self.folded.stands_for, self._anchors(), []
        for node in self.layers.nodes[t]:
            originals = self._counterparts(node) if node in self.folded.origin else None
            anchor, distance = anchors[node]
            if anchor is None:
                number, distance = self.order[node]
                numbers = [number] * self.gap.count
            elif abs(self.layers.of.get(anchor, t) - t) <= 1:
                numbers = [self.number[moved] for moved in self._counterparts(anchor)]
            else:
                numbers = [self.number[self.folded.origin[anchor]]] * self.gap.count
            places.append(_Place(node, originals, numbers, distance))
        return places

    def _counterparts(self, node: Node) -> list[Node]:
        """Per left-out layer, the whole graph's node that corresponds to an original ``node``: one
        layer on for the first, and so on.
        """
        origin, whole, count = self.folded.origin[node], self.folded.layers, self.gap.count
        layer = self.layers.of.get(node)
        if layer is None:
            return [origin] * count
        at = whole.at[origin]
        return [nodes[at] for nodes in whole.nodes[layer + 1 : layer + 1 + count]]

    def _copied_layer(self, step: int) -> dict[Node, Node]:
        """The copy of each node of layer ``stands_for`` in left-out layer number ``step``. Operands
        of a copy are still the original's.
        """
        copies: dict[Node, Node] = {}
        names: dict[str, str] = {}
        regions: dict[Region, Region] = {}
        for node, originals, numbers, distance in self.places:
            copy = node.copy()
            if originals is not None:
                there = originals[step]
                copy.name, copy.source, copy.region = there.name, there.source, there.region
                if node.region is not None and there.region is not None:
                    regions[node.region] = there.region
            else:
                copy.name, copy.cause = _renamed(node.name, names), _renamed(node.cause, names)
                copy.region = None if node.region is None else regions.get(node.region, node.region)
            names[node.name] = copy.name
            if "[" in node.name or "[" in copy.name:
                names[_flat(node.name)] = _flat(copy.name)
            copies[node] = copy
            self.order[copy] = numbers[step], distance
        return copies

    def _assembled(self) -> tuple[Graph, list[int]] | None:
        """The whole graph: all outputs in their places, and the nodes in an order in which they can
        run, close to the original order.
        """
        folded = self.folded
        whole = folded.layers
        place = {i: at for at, i in enumerate(folded.kept)}
        templates: dict[tuple[int, int], list[int]] = {}
        for i in folded.kept:
            value = folded.whole.outputs[i]
            if whole.of.get(value.node) == folded.stands_for:
                templates.setdefault((whole.at[value.node], value.index), []).append(place[i])
        seen: dict[Value, int] = {}
        outputs: list[Value] = []
        like: list[int] = []
        for i, value in enumerate(folded.whole.outputs):
            if i in place:
                at, layer = place[i], whole.of_value(value)
            else:
                nth = seen[value] = seen.get(value, -1) + 1
                layer = whole.of[value.node]
                at = templates[whole.at[value.node], value.index][nth]
                if self.layers.of_value(self.planned.outputs[at]) is None:
                    return None
            returned = self.planned.outputs[at]
            # A primitive of a decomposed op may belong to the next layer: `_operand` finds it.
            outputs.append(returned if layer is None else self._operand(returned, layer))
            like.append(at)
        nodes = [*self.planned.nodes, *(copy for c in self.copies for copy in c.values())]
        return Graph(after_operands(sorted(nodes, key=self.order.__getitem__)), outputs), like


def _flat(name: str) -> str:
    return name.replace("[", "_").replace("]", "")


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """A name or cause with the longest known name that it starts with replaced."""
    head = text
    while head not in names:
        cut = max(head.rfind(c) for c in "._ ")
        if cut <= 0:
            return text
        head = head[:cut]
    return names[head] + text[len(head) :]
