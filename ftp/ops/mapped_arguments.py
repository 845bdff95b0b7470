"""A graph's nodes with other values in place of their operands: one node, or node after node."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx
from torch.fx.node import map_arg


def mapped_arguments(
    node: fx.Node, value_of: Callable[[fx.Node], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's ``args`` and ``kwargs`` with ``value_of(operand)`` in place of each operand."""
    args: Any = map_arg(node.args, value_of)
    kwargs: Any = map_arg(dict(node.kwargs), value_of) if node.kwargs else {}
    return args, kwargs


def evaluated(
    graph: fx.Graph, inputs: Iterable[Any], call: Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
) -> list[Any]:
    """The values of a graph's outputs, from those of its placeholders. ``call(node, known)`` gives
    that of any other node, from those of the nodes before it.
    """
    known: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op != "output":
            known[node] = call(node, known)
    outputs: Any = graph.output_node().args[0]
    return [known[x] for x in outputs]
