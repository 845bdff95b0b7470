"""Remove copies that are equal to their source until their last use."""

from collections.abc import Iterable

import torch
from torch import fx

from ftp.passes.aliasing import is_view
from ftp.rules.local_op import RankGraph

CLONE = torch.ops.aten.clone.default


def drop_copies(graph: fx.Graph) -> fx.Graph:
    """Replace clones by their sources, except a clone that gives an output its own memory or
    changes the memory format. The graph must have no writes in place.
    """
    new, env = RankGraph(), {}
    returned = _returned(graph)
    for node in graph.nodes:
        is_dropped = (
            node.target is CLONE
            and node.kwargs.get("memory_format") in (None, torch.preserve_format)
            and node not in returned
        )
        if is_dropped and "gives" in node.meta:
            is_dropped = _given_by(env[node.args[0]], node)
        env[node] = env[node.args[0]] if is_dropped else new.node_copy(node, env.__getitem__)
    return new


def _given_by(source: fx.Node, copy: fx.Node) -> bool:
    """Whether the source of a copy that is a result of per-rank code is of that code too, and can
    be noted as the result instead.
    """
    if source.meta.get("origin") != copy.meta.get("origin"):
        return False
    source.meta["gives"] = [*source.meta.get("gives", ()), *copy.meta["gives"]]
    return True


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and per node its copy."""
    new, env = RankGraph(), {}
    for node in graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
    return new, env


def put_in_order(order: Iterable[fx.Node]) -> None:
    """Put the nodes of a graph that the caller has copied, all of them, in another order."""
    before = None
    for node in order:
        if before is None:
            first = next(iter(node.graph.nodes))
            if first is not node:
                first.prepend(node)
        elif before.next is not node:
            before.append(node)
        before = node


def _returned(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the outputs may share memory with."""
    found: set[fx.Node] = set()
    stack = list(graph.output_node().all_input_nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if is_view(node):
                stack += node.all_input_nodes
    return found
