"""Unfold a plan: copy the plan of one layer to all equal layers."""

from collections.abc import Callable, Mapping, Sequence

from ftp.functional.remat import Region
from ftp.planning.graph import Graph, Node, Value
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
    where layers came out different.

    Args:
        planned: the folded graph, with its reshards and cuts; its nodes become the whole graph's.
    """
    layers = label(planned, folded.labels, folded.slices)
    t, gone = folded.stands_for, folded.left_out
    if describe_layer(t, layers, decisions) != describe_layer(t + 1, layers, decisions):
        return None
    stamp = _Stamp(folded, planned, layers)
    made = [stamp.layer(step) for step in range(gone)]

    def placed(value: Value, user: int) -> Value:
        """The value that a node or an output of layer ``user`` (in the whole graph's numbers) takes
        in place of ``value``, the operand in the layer that it copies.
        """
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
            node.replace_operands(
                [placed(v, here if here <= t else here + gone) for v in node.operands]
            )
        elif is_stack_of(node, folded.slices):
            last = t - stack_shift(folded.origin[node], folded.layers, t)
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
            node.pending |= {
                i: node.pending[t] for i in range(t + 1, t + 1 + gone) if t in node.pending
            }
    return stamp.assembled(made, placed)


class _Stamp:
    """Copies of the layer that stands for those left out."""

    def __init__(self, folded: Folded, planned: Graph, layers: Layers):
        self.folded, self.planned, self.layers = folded, planned, layers
        self.number = {node: i for i, node in enumerate(folded.whole.nodes)}
        self.order: dict[Node, tuple[int, int]] = {}
        self.anchors = self._anchors()

    def _anchors(self) -> dict[Node, tuple[Node | None, int]]:
        """Per node, an original node near it, the next one or the last of its layer, and the number
        of places that the node stands after it (negative: before it).
        """
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
            is_behind = (
                before[0]
                and layers.get(node) == layers.get(before[0])
                and after[0]
                and layers.get(node) != layers.get(after[0])
            )
            found[node] = before if is_behind or after[0] is None else after
            anchor, seq = before if after[0] is None else after
            self.order[node] = (
                0 if anchor is None else self.number[self.folded.origin[anchor]],
                seq,
            )
        return found

    def _counterpart(self, node: Node, step: int) -> Node:
        """The node of left-out layer number ``step`` that corresponds to ``node``."""
        layer = self.layers.of.get(node)
        origin = self.folded.origin[node]
        whole = self.folded.layers
        return origin if layer is None else whole.nodes[layer + 1 + step][whole.at[origin]]

    def layer(self, step: int) -> dict[Node, Node]:
        """The copy of each node of layer ``stands_for`` in left-out layer number ``step``. Operands
        of a copy are still the original's.
        """
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
                self.order[copy] = (
                    self.number[
                        self._counterpart(anchor, step) if is_near else self.folded.origin[anchor]
                    ],
                    seq,
                )
        return copies

    def assembled(
        self, made: Sequence[Mapping[Node, Node]], placed: Callable[[Value, int], Value]
    ) -> tuple[Graph, list[int]] | None:
        """The whole graph: all outputs in their places, and the nodes in an order in which they can
        run, close to the original order.
        """
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
                at, layer = place[i], whole.of_value(value)
            else:
                nth = seen[value] = seen.get(value, -1) + 1
                layer = whole.of[value.node]
                at = templates[whole.at[value.node], value.index][nth]
                if self.layers.of_value(self.planned.outputs[at]) is None:
                    return None
            returned = self.planned.outputs[at]
            # A primitive of a decomposed op may belong to the next layer: ``placed`` finds it.
            outputs.append(returned if layer is None else placed(returned, layer))
            like.append(at)
        nodes = [*self.planned.nodes, *(copy for copies in made for copy in copies.values())]
        return Graph(_sorted(nodes, self.order), outputs), like


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


def _sorted(nodes: Sequence[Node], order: Mapping[Node, tuple[int, int]]) -> list[Node]:
    """The nodes in the given order, with each node after its operands: an operand that the order
    has later is placed just before its first user. So a parameter is gathered where it is used.
    """
    done: dict[Node, None] = {}
    for node in sorted(nodes, key=order.__getitem__):
        waiting = [node]
        while waiting:
            missing = [v.node for v in waiting[-1].operands if v.node not in done]
            if missing:
                waiting += reversed(missing)
            else:
                done[waiting.pop()] = None
    return list(done)
