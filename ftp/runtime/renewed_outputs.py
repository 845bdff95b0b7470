"""Outputs that share memory with an argument or another output."""

import torch

from ftp.planning.graph import Graph, Value
from ftp.rules.op_kinds import VIEWS


def renewed(graph: Graph, donated: set[str]) -> tuple[tuple[int, str], ...]:
    """The outputs that are views of an argument or of another output, and how each is copied:
    writing to one must not change the other.
    """
    found: list[tuple[int, str]] = []
    taken: set[Value] = set()
    for i, value in enumerate(graph.outputs):
        is_spread = False
        while value.node.operands and (
            value.node.kind in ("constrain", "reshard") or value.node.target in VIEWS
        ):
            is_spread |= value.node.target is torch.ops.aten.expand.default
            value = value.node.operands[0]
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
