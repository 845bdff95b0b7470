"""Copies that nobody can tell from what they copy."""

import torch
from torch import fx

from ftp.passes.aliasing import is_view
from ftp.rules.local_op import RankGraph

CLONE = torch.ops.aten.clone.default


def drop_copies(graph: fx.Graph) -> fx.Graph:
    """Uses of a clone see what was cloned; a clone that gives an output its own memory stays, and
    one into another memory format.

    The graph changes no value in place, so that a value and its copy stay equal.
    """
    new, env = copied(graph)
    returned = {env[n] for n in _returned(graph)}
    for node in list(new.nodes):
        if (
            node.target is CLONE
            and node.kwargs.get("memory_format") in (None, torch.preserve_format)
            and node not in returned
        ):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            new.erase_node(node)
    return new


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and where its nodes went."""
    new, env = RankGraph(), {}
    for node in graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
    return new, env


def _returned(graph: fx.Graph) -> set[fx.Node]:
    """What the outputs may share memory with."""
    found: set[fx.Node] = set()
    stack = list(graph.output_node().all_input_nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if is_view(node):
                stack += node.all_input_nodes
    return found
