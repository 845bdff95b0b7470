"""Narrowest point of a chain of casts, scales and views: a value is resharded there, before it is
widened.
"""

import functools
import math
from collections.abc import Collection

from ftp.ops.stack import STACK
from ftp.planning.graph import Graph, Node, Value
from ftp.rules.op_kinds import is_matmul
from ftp.rules.own import RULES
from ftp.sharding.layout import estimated


def widening(graph: Graph, can_be_cut: Collection[Value]) -> set[Node]:
    """Ops that widen values: the result has more bytes than the narrowest values that it is
    computed from, and no more elements. Examples: casts to a wider dtype, scales, tables of codes
    and the ops between them; not an embedding, whose rows have more elements than the ids.

    Args:
        can_be_cut: the values that the axis may cut; others are whole on every rank and need no
            reshard.

    >>> import torch
    >>> from ftp.planning.prepare import prepare
    >>> from ftp.sharding.pytree import flatten
    >>> from ftp.tracing.trace import trace
    >>> def dequantize(codes, scale):
    ...     return codes.to(torch.bfloat16).float() * scale
    >>> leaves, tree = flatten((torch.ones(4, 4, dtype=torch.int8), torch.ones(4, 1)))
    >>> gm = trace(dequantize, leaves, tree, "cpu", names=["codes", "scale"]).gm
    >>> graph = prepare(gm, ["codes", "scale"], [True, True]).graph
    >>> found = widening(graph, {Value(node) for node in graph.nodes})
    >>> [node for node in graph.nodes if node in found]
    [_to_copy, _to_copy_1, mul]
    """
    sources: dict[Value, frozenset[Value]] = {}  # the narrowest values that it is computed from
    found: set[Node] = set()
    size = functools.cache(Value.nbytes)
    none = frozenset[Value]()
    for node in graph.nodes:
        results = node.values
        for value in results:
            sources[value] = frozenset((value,)) if value in can_be_cut else none
        # An op whose rule was found by trial may be a matmul too. A folded graph has fewer of a
        # stack's slices: the stack would seem to widen them.
        is_known = node.kind == "op" and node.target in RULES
        if not is_known or is_matmul(node.target) or node.target is STACK:
            continue
        read = [source for value in node.operands if (source := sources[value])]
        if not read:
            continue
        before = none.union(*read)
        width = sum(map(size, before))
        after = sum(size(value) for value in results if value in can_be_cut)
        if width < after:
            cut = [value for value in node.operands if value in can_be_cut]
            if _elements(results) <= _elements(cut):
                found.add(node)
        if width <= after and len(results) == 1:
            sources[results[0]] = before
    users = graph.users
    for node in reversed(graph.nodes):
        value = Value(node)
        passes = node.kind == "op" and sources[value] and value not in sources[value]
        if passes and any(user in found for user, _ in users.get(value, ())):
            found.add(node)
    return found


def _elements(values: Collection[Value]) -> int:
    return sum(math.prod(map(estimated, value.shape)) for value in values)
