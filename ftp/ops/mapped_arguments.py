"""The arguments of a graph's node, with other values in place of its operands."""

from collections.abc import Callable
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
