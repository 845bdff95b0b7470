"""The nodes of a graph that others are computed from."""

from collections.abc import Collection, Iterable

from torch import fx


def ancestors(nodes: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes and all their ancestors; of a node in ``stop`` the node alone."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += () if node in stop else node.all_input_nodes
    return found
