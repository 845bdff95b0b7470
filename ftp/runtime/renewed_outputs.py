"""Outputs that share memory with an argument or another output."""

import torch

from ftp.passes.aliasing import families, gives_view
from ftp.planning.graph import Graph, Value

# Results that hold an element several times.
_SPREAD = (torch.ops.aten.expand.default, torch.ops.aten.unfold.default)


def renewed(graph: Graph, donated: set[str]) -> tuple[tuple[int, str], ...]:
    """The outputs that are views of an argument or of another output, and how each is copied:
    writing to one must not change the other.
    """
    found: list[tuple[int, str]] = []
    taken: set[Value] = set()
    for i, value in enumerate(graph.outputs):
        is_spread = False
        while (base := _base(value)) is not value:
            is_spread |= value.node.target in _SPREAD
            value = base
        if (
            value in taken
            or is_spread
            or (value.node.kind == "input" and value.node.name not in donated)
        ):
            found.append((i, "dense" if is_spread else "clone"))
        elif value.node.kind == "input":
            found.append((i, "detach"))
        taken.add(value)
    return tuple(found)


def _base(value: Value) -> Value:
    """The operand whose memory a value views; the value itself if its op allocates memory."""
    node = value.node
    if node.kind in ("constrain", "reshard"):
        return node.operands[0]
    if node.kind == "local":  # per-rank code, whose results may be its operands or each other
        code = node.target.gm.graph
        root, results = families(code), code.output_node().args[0]
        owner = root[results[value.index]]
        operands = [n for n in code.nodes if n.op == "placeholder"][: len(node.operands)]
        if owner in operands:
            return node.operands[operands.index(owner)]
        first = next(k for k, result in enumerate(results) if root[result] is owner)
        return value if first == value.index else Value(node, first)
    return node.operands[0] if node.operands and gives_view(node.target) else value
