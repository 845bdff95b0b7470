"""Whether a layer that asks for the number of its tokens computes the same for all of them as for
one rank's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ftp.tracing.trace import Traced


def differs(whole: Traced, count: int, part: Traced, own: int) -> str | None:
    """The line of the first op in which a layer's trace on ``count`` tokens differs from that on
    ``own`` by more than sizes; None if it does not.
    """
    nodes, others = list(whole.gm.graph.nodes), list(part.gm.graph.nodes)
    index = {node: i for each in (nodes, others) for i, node in enumerate(each)}
    for a, b in zip(nodes, others, strict=False):
        given, of_other = (list(_leaves((n.args, n.kwargs), index)) for n in (a, b))
        is_alike = a.target == b.target and len(given) == len(of_other)
        sizes, of_others = _sizes_at(a), _sizes_at(b)
        for x, y in zip(given, of_other, strict=False):
            is_size = type(x) is int and type(y) is int and x in sizes and y in of_others
            is_alike &= (type(x) is type(y) and x == y) or (
                is_size and x % count == y % own == 0 and x // count == y // own
            )
        if not is_alike:
            return a.meta.get("source") or b.meta.get("source") or "an unknown line"
    is_of_equal = len(nodes) == len(others) and all(
        x.shape != y.shape or _is_equal(x, y)
        for x, y in zip(whole.constants, part.constants, strict=True)
    )
    return None if is_of_equal else "its end"


def elements(traced: Traced) -> int:
    """The elements of all values of a program."""
    vals = (node.meta.get("val") for node in traced.gm.graph.nodes)
    return sum(x.numel() for val in vals for x in _leaves(val, {}) if isinstance(x, Tensor))


def _is_equal(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.device == y.device and not x.is_meta and torch.equal(x, y))


def _sizes_at(node: fx.Node) -> set[int]:
    vals = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    return {s for val in vals for x in _leaves(val, {}) if isinstance(x, Tensor) for s in x.shape}


def _leaves(tree: Any, index: dict[fx.Node, int]) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from _leaves(value, index)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value, index)
    else:
        yield f"node {index[tree]}" if isinstance(tree, fx.Node) else tree
