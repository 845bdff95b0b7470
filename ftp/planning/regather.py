"""Gather parameters again for the backward pass."""

from collections.abc import Collection

import torch

from ftp.planning.graph import BATCH, Graph, Node, Rewrite, Value, unchanged, with_operands
from ftp.planning.graph_passes import live
from ftp.planning.narrowest_point import widening
from ftp.rules.op_kinds import VIEWS

RECOMPUTED = VIEWS | {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
}  # cheap ops, repeated on a parameter that is gathered again; ops that widen it are repeated too


def gather_again(graph: Graph) -> Rewrite:
    """The graph in which forward and backward each gather the parameters that they read
    (``reshard_after_forward``).
    """
    if not any(map(_is_gather, graph.nodes)):
        return unchanged(graph)
    now: dict[Node, Node] = {}
    made: dict[tuple[Node, int], Node] = {}
    nodes: list[Node] = []
    values = {Value(n, i) for n in graph.nodes for i in range(len(n.results))}
    cheap = {node for node in widening(graph, values) if not node.rule.whole}

    def again(value: Value, phase: int) -> Value:
        node = value.node
        if not _is_regatherable(node, cheap):
            return Value(now[node], value.index)
        if (node, phase) not in made:
            operands = [again(v, phase) for v in node.operands]
            name = f"{node.name}_again" if phase == 1 else f"{node.name}_again_{phase}"
            copy = node.copy()
            copy.name, copy.phase = name, phase
            copy.replace_operands(operands)
            made[node, phase] = copy
            nodes.append(copy)
        return Value(made[node, phase], value.index)

    gathered: dict[Node, bool] = {}
    for node in graph.nodes:
        gathered[node] = _is_gather(node) or (
            _is_regatherable(node, cheap) and any(gathered[v.node] for v in node.operands)
        )
        operands = [
            again(v, node.phase)
            if v.node.phase < node.phase and gathered[v.node]
            else Value(now[v.node], v.index)
            for v in node.operands
        ]
        now[node] = with_operands(node, operands)
        nodes.append(now[node])
    return live(Graph(nodes, [Value(now[v.node], v.index) for v in graph.outputs])), now


def _is_gather(node: Node) -> bool:
    """Whether a node gathers a parameter."""
    return node.kind == "reshard" and node.target.op == "all_gather" and not node.depends & BATCH


def _is_regatherable(node: Node, cheap: Collection[Node]) -> bool:
    if node.depends & BATCH or node.kind == "input":
        return False
    return node.kind == "reshard" or node in cheap or node.target in RECOMPUTED
