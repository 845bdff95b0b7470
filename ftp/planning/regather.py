"""Gather parameters again for the backward pass."""

from collections.abc import Collection
from dataclasses import replace

import torch

from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.planning.graph_passes import live
from ftp.planning.narrowest_point import widening
from ftp.rules.op_kinds import VIEWS

RECOMPUTED = VIEWS | {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
}  # cheap, as are ops that widen it: repeated on a parameter that is gathered again


def gather_again(graph: Graph) -> Graph:
    """The graph in which forward and backward each gather the parameters that they read
    (``reshard_after_forward``).
    """
    made: dict[tuple[Node, int], Node] = {}
    nodes: list[Node] = []
    values = {Value(n, i) for n in graph.nodes for i in range(len(n.results))}
    cheap = {node for node in widening(graph, values) if not node.rule.whole}

    def again(value: Value, phase: int) -> Value:
        node = value.node
        if not _is_regatherable(node, cheap):
            return value
        if (node, phase) not in made:
            operands = [again(v, phase) for v in node.operands]
            name = f"{node.name}_again" if phase == 1 else f"{node.name}_again_{phase}"
            copy = replace(
                node, name=name, phase=phase, sizes=dict(node.sizes), cuts=list(node.cuts)
            )
            copy.replace_operands(operands)
            made[node, phase] = copy
            nodes.append(copy)
        return Value(made[node, phase], value.index)

    gathered: dict[Node, bool] = {}
    for node in graph.nodes:
        is_gather = (
            node.kind == "move" and node.target.op == "all_gather" and not node.depends & BATCH
        )
        gathered[node] = is_gather or (
            _is_regatherable(node, cheap) and any(gathered[v.node] for v in node.operands)
        )
        node.replace_operands(
            [
                again(v, node.phase) if v.node.phase < node.phase and gathered[v.node] else v
                for v in node.operands
            ]
        )
        nodes.append(node)
    return live(Graph(nodes, graph.outputs))


def _is_regatherable(node: Node, cheap: Collection[Node]) -> bool:
    if node.depends & BATCH or node.kind == "input":
        return False
    return node.kind == "move" or node in cheap or node.target in RECOMPUTED
