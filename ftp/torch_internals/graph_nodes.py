"""Nodes of fx graphs and their names. Read at torch 2.13."""

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.graph import _Namespace


class GraphNames(_Namespace):
    """The names that fx gives, most without its regular expression, which takes as long as the
    rest of making a node.
    """

    def create_name(self, candidate: str, obj: object | None) -> str:
        """
        >>> names = GraphNames()
        >>> [names.create_name(name, None) for name in ("mul", "mul", "mul_5", "mul", "mul_5")]
        ['mul', 'mul_1', 'mul_5', 'mul_6', 'mul_7']
        """
        base, _, digits = candidate.rpartition("_")
        is_numbered, is_used = digits.isdecimal(), candidate in self._used_names
        if obj is not None or is_used is is_numbered:
            return super().create_name(candidate, obj)
        base = base if is_numbered else candidate
        if base not in self._base_count:  # it may be no name
            return super().create_name(candidate, obj)
        name, number = candidate, int(digits) if is_numbered else self._base_count[base]
        while name in self._used_names:
            number += 1
            name = f"{base}_{number}"
        self._used_names.add(name)
        self._base_count[base] = number
        return name


def new_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str,
    type_expr: Any = None,
) -> fx.Node:
    """``graph.create_node`` for arguments without symbolic numbers, which fx would search for: that
    takes half the time of making a node.

    Args:
        name: that the node gets if it is free.
    """
    names = graph._graph_namespace
    name = names.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, dict(kwargs) if kwargs else {}, type_expr)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def since(last: fx.Node | None, root: fx.Node) -> list[fx.Node]:
    """The nodes of a graph after ``last``, or all."""
    nodes = []
    node = root._prev
    while node is not last and node is not root:
        nodes.append(node)
        node = node._prev
    return nodes[::-1]
