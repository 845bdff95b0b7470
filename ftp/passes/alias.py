"""Which nodes of a rank's graph may share memory."""

import operator
from typing import Any

import torch
from torch import fx

WAIT = torch.ops._c10d_functional.wait_tensor.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # its schema does not say that it is a view


def is_view(node: fx.Node) -> bool:
    """Whether a node's result may share memory with an operand, as far as its schema tells."""
    if node.op != "call_function":
        return False
    target: Any = node.target
    if target in (operator.getitem, WAIT, UNSAFE_VIEW):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return any(r.alias_info is not None for r in target._schema.returns)


def families(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Per node the one that its memory comes from: its own, or through views that of its first operand.

    Of an op that is not known to aten the result counts as a view of every operand, so that these are one family.
    """
    root: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            node = root[node]
        return node

    for node in graph.nodes:
        root[node] = node
        if node.op == "call_function" and is_view(node):
            for operand in node.all_input_nodes[:1] if isinstance(node.target, torch._ops.OpOverload) else node.all_input_nodes:
                root[find(node)] = find(operand)
    return {node: find(node) for node in graph.nodes}
