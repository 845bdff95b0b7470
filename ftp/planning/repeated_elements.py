"""Replace views that repeat elements, such as key heads shared by several query heads, by ops that
an axis may cut in more parts than there are elements (see `ftp.rules.decompositions.heads`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ftp.ops.repeat_each import REPEAT_EACH, SUM_EACH
from ftp.planning.graph import Graph, Node, Rewrite, Value, in_turn, unchanged
from ftp.planning.graph_passes import merge_common
from ftp.rules.bind import lookup
from ftp.rules.call import Call, Meta
from ftp.rules.decompositions.heads import merged_dim, repeated_dim
from ftp.rules.op_kinds import RESHAPES

aten = torch.ops.aten


def repeat_each(graph: Graph, across: Collection[Node]) -> Rewrite:
    """Replace views among ``across`` that repeat elements, and sums over the repeats, by
    ops of `ftp.rules.decompositions.heads`; the same graph if there are none.
    """
    if not any(_change(node, across) for node in graph.nodes):
        return unchanged(graph)
    graph, copies = graph.copied()
    across = {copies[node] for node in across}
    made = _Replacements()
    for node in graph.nodes:
        change = _change(node, across)
        node.replace_operands([made.now.get(v, v) for v in node.operands])
        if change is None:
            made.nodes.append(node)
        else:
            made.now[Value(node)] = change(made, node)
    left = set(made.nodes)
    copies = {old: node for old, node in copies.items() if node in left}
    outputs = [made.now.get(v, v) for v in graph.outputs]
    graph, merged = merge_common(Graph(made.nodes, outputs))
    return graph, in_turn(copies, merged)


class _Replacements:
    """The new nodes, and the new value of each value that has one."""

    def __init__(self):
        self.nodes: list[Node] = []
        self.now: dict[Value, Value] = {}

    def op(
        self, like: Node, target: Any, of: Value, args: Sequence[int], shape: Sequence[int]
    ) -> Value:
        """The value of an op on ``of``, of its dtype."""
        results = (Meta(tuple(shape), of.meta.dtype),)
        rule = lookup(Call(target, (of.meta, *args), {}, results))
        assert rule is not None, target
        word = target.__name__.partition(".")[0]
        fresh: Any = {"target": target, "args": (of, *args), "kwargs": {}, "results": results}
        node = replace(like, name=f"{like.name}.{word}", rule=rule, sizes={}, **fresh)
        self.nodes.append(node)
        return Value(node)

    def repeat(self, view: Node) -> Value:
        found = _repeated(view)
        assert found is not None, view
        few, dim = found
        shape, many = list(few.meta.shape), view.results[0].shape
        del shape[dim + 1]
        few = self.op(view, aten.squeeze.dim, few, (dim + 1,), shape)
        return self.op(view, REPEAT_EACH, few, (many[dim] // shape[dim], dim), many)

    def sum(self, total: Node) -> Value:
        apart, (dim,) = total.operands[0], total.args[1]
        shape = list(apart.meta.shape)
        times = shape.pop(dim)
        found = self.op(total, SUM_EACH, apart.node.operands[0], (times, dim - 1), shape)
        if total.results[0].ndim == len(shape):
            return found
        return self.op(total, aten.unsqueeze.default, found, (dim,), total.results[0].shape)


def _change(node: Node, across: Collection[Node]) -> Callable[[_Replacements, Node], Value] | None:
    if node in across and node.target in RESHAPES and _repeated(node) is not None:
        return _Replacements.repeat
    if node.target is aten.sum.dim_IntList and node.operands[0].node in across:
        return _Replacements.sum if _sums_repeated(node) else None
    return None


def _repeated(view: Node) -> tuple[Value, int] | None:
    """(value that a view repeats, index of the repeated dim, which a dim of size one follows)."""
    many = view.operands[0]
    if many.node.target is aten.clone.default:
        many = many.node.operands[0]
    if many.node.target is not aten.expand.default:
        return None
    few = many.node.operands[0]
    dim = repeated_dim(few.meta.shape, many.meta.shape, view.results[0].shape)
    return None if dim is None else (few, dim)


def _sums_repeated(total: Node) -> bool:
    view = total.operands[0].node
    if view.target not in RESHAPES or total.results[0].dtype != view.results[0].dtype:
        return False
    dim = merged_dim(view.results[0].shape, view.operands[0].meta.shape)
    return dim is not None and list(total.args[1]) == [dim + 1]
