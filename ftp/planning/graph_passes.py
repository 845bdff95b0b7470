"""Passes over the planner's graph: dead code, common subexpressions, dependencies, and gathering
parameters again for the backward pass.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from ftp.planning.graph import BATCH, Graph, Node, Rewrite, Value, rewired, unchanged, with_operands
from ftp.planning.narrowest_point import widening
from ftp.rules.op_kinds import VIEWS, is_matmul


def live(graph: Graph) -> Graph:
    """The graph without nodes that no output needs; inputs stay."""
    wanted = {v.node for v in graph.outputs}
    for node in reversed(graph.nodes):
        if node in wanted:
            for value in node.operands:
                wanted.add(value.node)
    return Graph([n for n in graph.nodes if n.kind == "input" or n in wanted], graph.outputs)


def merge_common(graph: Graph) -> Rewrite:
    """The graph with equal ops on equal operands computed once, except ops that a recomputed region
    repeats.
    """
    calls = _SeenCalls()
    now: dict[Node, Node] = {}
    left: dict[Node, Node] = {}
    firsts = first_of_equals(graph)
    for old in graph.nodes:
        node = now[old] = rewired(old, now)
        if node.kind == "op":
            original = firsts.get(old, old)
            if (
                node.region is not None
                and original.region is None
                and _is_seen(original, node)
                and node.region.keeps(node.target, is_matmul(node.target))
            ):
                first = now[original]
            else:
                first = calls.first(node)
            if first is not node:
                now[old] = first
                continue
        left[old] = node
    return Graph(list(left.values()), [Value(now[v.node], v.index) for v in graph.outputs]), left


class _SeenCalls:
    """The calls so far. Arguments are compared only where op, operands and region are equal."""

    def __init__(self):
        self._alone: dict[Any, Node] = {}
        self._first: dict[Any, Node] = {}

    def first(self, node: Node) -> Node:
        """The first node of an equal call, here or in a branch around; itself if there is none."""
        kind = node.target, node.operands, node.region
        other = self._alone.setdefault(kind, node)
        if other is node:
            return node
        self._first.setdefault((*kind, *_arguments(other), other.branch), other)
        call = *kind, *_arguments(node)
        for depth in range(len(node.branch)):
            if (found := self._first.get((*call, node.branch[:depth]))) is not None:
                return found
        return self._first.setdefault((*call, node.branch), node)


def _arguments(node: Node) -> tuple[Any, Any]:
    return _key(node.args), _key(dict(node.kwargs)) if node.kwargs else ()


def _is_seen(node: Node, user: Node) -> bool:
    """Whether ``user`` may read a node's results: those of another branch may not be computed."""
    return user.branch[: len(node.branch)] == node.branch


def first_of_equals(graph: Graph) -> dict[Node, Node]:
    """Per op or reshard, the first of equal value and layout; empty without recomputed regions."""
    if not any(node.region for node in graph.nodes):
        return {}
    first: dict[Any, Node] = {}
    found: dict[Node, Node] = {}

    def key(tree: Any) -> Any:
        if isinstance(tree, Value):
            return (id(found.get(tree.node, tree.node)), tree.index)
        if isinstance(tree, list | tuple):
            return tuple(map(key, tree))
        return {k: key(v) for k, v in tree.items()} if isinstance(tree, dict) else tree

    for node in graph.nodes:
        if node.kind != "input":
            known = (
                node.kind,
                node.target,
                _key(key(node.args)),
                _key(key(dict(node.kwargs))),
                tuple(node.cuts),
            )
            found[node] = first.setdefault(known, node)
    return found


def keep_collectives(graph: Graph) -> Rewrite:
    """The graph in which recomputed regions whose policy keeps collectives' results read those of
    the forward pass, and do not issue the collectives again.
    """
    firsts = first_of_equals(graph)
    kept = {
        node: first
        for node, first in firsts.items()
        if node.kind == "reshard"
        and node.region is not None
        and node.region.keeps_collectives
        and first.region is None
        and _is_seen(first, node)
        and node.depends & BATCH
    }
    if not kept:
        return unchanged(graph)
    now: dict[Node, Node] = {}
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        made[node] = rewired(node, now)
        now[node] = now[kept[node]] if node in kept else made[node]
    outputs = [Value(now[v.node], v.index) for v in graph.outputs]
    return live(Graph(list(made.values()), outputs)), made


def _key(tree: Any) -> Any:
    return key_of(tree, _identity)


def _identity(value: Value) -> tuple[int, int]:
    return id(value.node), value.index


def key_of(tree: Any, of_value: Callable[[Value], Any]) -> Any:
    """Arguments as a key of a dict, in which numbers of different kinds differ.

    Args:
        of_value: gives the key of a value.
    """
    kind = type(tree)
    if kind is Value:
        return of_value(tree)
    if kind is int or kind is str or kind is bool:
        return kind, tree
    if isinstance(tree, (list, tuple)):
        return tuple([key_of(t, of_value) for t in tree])
    if isinstance(tree, dict):
        return tuple([(k, key_of(v, of_value)) for k, v in tree.items()])
    return repr(tree) if isinstance(tree, _NAMED) else (kind.__name__, repr(tree))


_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def mark_dependencies(graph: Graph) -> None:
    """Set ``depends`` of all nodes of a graph that is being built."""
    for node in graph.nodes:
        for value in node.operands:
            node.depends |= value.node.depends


# Cheap ops, repeated on a parameter that is gathered again; ops that widen it are repeated too.
RECOMPUTED = VIEWS | {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}


def gather_again(graph: Graph) -> Rewrite:
    """The graph in which forward and backward each gather the parameters that they read
    (``reshard_after_forward``).
    """
    if not any(map(_is_gather, graph.nodes)):
        return unchanged(graph)
    now: dict[Node, Node] = {}
    made: dict[tuple[Node, int], Node] = {}
    nodes: list[Node] = []
    values = {value for n in graph.nodes for value in n.values}
    cheap = {node for node in widening(graph, values) if not node.rule.whole}

    def again(value: Value, phase: int) -> Value:
        node = value.node
        if not _is_regatherable(node, cheap):
            return Value(now[node], value.index)
        if (node, phase) not in made:
            operands = [again(v, phase) for v in node.operands]
            name = f"{node.name}_again" if phase == 1 else f"{node.name}_again_{phase}"
            copy = node.copy()
            copy.name, copy.phase = name, phase
            copy.replace_operands(operands)
            made[node, phase] = copy
            nodes.append(copy)
        return Value(made[node, phase], value.index)

    gathered: dict[Node, bool] = {}
    for node in graph.nodes:
        gathered[node] = _is_gather(node) or (
            _is_regatherable(node, cheap) and any(gathered[v.node] for v in node.operands)
        )
        operands = [
            again(v, node.phase)
            if v.node.phase < node.phase and gathered[v.node]
            else Value(now[v.node], v.index)
            for v in node.operands
        ]
        now[node] = with_operands(node, operands)
        nodes.append(now[node])
    return live(Graph(nodes, [Value(now[v.node], v.index) for v in graph.outputs])), now


def _is_gather(node: Node) -> bool:
    """Whether a node gathers a parameter."""
    return node.kind == "reshard" and node.target.op == "all_gather" and not node.depends & BATCH


def _is_regatherable(node: Node, cheap: Collection[Node]) -> bool:
    if node.depends & BATCH or node.kind == "input":
        return False
    return node.kind == "reshard" or node in cheap or node.target in RECOMPUTED
