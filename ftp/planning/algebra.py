"""Rewrites of the planner's graph by laws of algebra: they save exchanges, and passes over large
tensors. Certificates know the laws too (`ftp.certification.value_numbering`).
"""

import operator
from typing import Any

import torch

from ftp.planning.graph import Graph, Node, Rewrite, Value, in_turn, rewired, unchanged
from ftp.planning.graph_passes import live
from ftp.rules.along_dim import scan_between_flips
from ftp.rules.bind import lookup
from ftp.rules.call import Call
from ftp.rules.decompositions.softmax import exponential_and_total
from ftp.rules.index import is_of_difference, is_sum_of_source

aten = torch.ops.aten


def simplified(graph: Graph) -> Rewrite:
    """The graph after all rewrites, without what they leave unused."""
    found = unchanged(graph)[1]
    targets = {node.target for node in graph.nodes}
    rewrites = (
        (aten.scatter_add.default, sum_of_scatter),
        (aten.log.default, exponential_again),
        (aten.scatter_add.default, scatter_onto_rest),
        (aten.gather.default, gather_before_difference),
    )  # by an op that it needs
    for target, rewrite in rewrites:
        if target in targets:
            graph, now = rewrite(graph)
            graph = live(graph)
            left = set(graph.nodes)
            found = in_turn(found, {old: new for old, new in now.items() if new in left})
    return graph, found


def sum_of_scatter(graph: Graph) -> Rewrite:
    """Replace ``zeros.scatter(dim, index, values).sum(dim)`` by ``values.sum(dim)``, so that a cut
    of the dim leaves no pending sum.
    """
    now: dict[Node, Node] = {}
    for old in graph.nodes:
        node = now[old] = rewired(old, now)
        if node.target is not aten.sum.dim_IntList or len(node.args) < 2:
            continue
        scatter = node.args[0].node
        if scatter.target is not aten.scatter_add.default or not is_zero(scatter.args[0].node):
            continue
        onto, dim, index, source = scatter.args
        if is_sum_of_source(
            (onto.meta.shape, dim, index.meta.shape, source.meta.shape), node.args[1]
        ):
            now[old] = _changed(node, node.target, source, *node.args[1:])
            now[old].kwargs = node.kwargs
    return Graph(list(now.values()), [Value(now[v.node], v.index) for v in graph.outputs]), now


def exponential_again(graph: Graph) -> Rewrite:
    """Replace the exponential of a log-softmax by ``e / e.sum(dim)``, of the ``e`` that the
    log-softmax computed: the gradient of a loss on a cut vocabulary has no exponential of its own.
    """
    now: dict[Node, Node] = {}
    for old in graph.nodes:
        node = now[old] = rewired(old, now)
        if node.target is not aten.exp.default:
            continue
        found = exponential_and_total(node.args[0], _maker, operator.eq)
        if found is not None and _is_beside(found[0].node, node):
            now[old] = _changed(node, aten.div.Tensor, *found)
    return Graph(list(now.values()), [Value(now[v.node], v.index) for v in graph.outputs]), now


def scatter_onto_rest(graph: Graph) -> Rewrite:
    """Replace ``zeros.scatter_add(dim, index, values) - p * row`` by ``(p * -row).scatter_add(dim,
    index, values)``, where nothing else uses the parts and ``row`` is smaller: in the gradient of a
    loss, neither zeros nor a difference of the size of the logits.
    """
    users, kept = graph.users, set(graph.outputs)
    now: dict[Node, Node] = {}
    nodes: list[Node] = []
    for old in graph.nodes:
        node = now[old] = rewired(old, now)
        parts = old.operands
        is_ours = old.target is aten.sub.Tensor and len(parts) == 2 and not old.kwargs
        if is_ours and all(len(users[part]) == 1 and part not in kept for part in parts):
            scatter, rest = (part.node for part in node.operands)
            if _is_scatter_less_product(node, scatter, rest):
                p, row = rest.args
                minus = _changed(rest, aten.neg.default, row, results=(row.meta,))
                minus.name = f"{node.name}.neg"
                product = _changed(rest, rest.target, p, Value(minus))
                nodes += [minus, product]
                node = now[old] = _changed(node, scatter.target, Value(product), *scatter.args[1:])
        nodes.append(node)
    return Graph(nodes, [Value(now[v.node], v.index) for v in graph.outputs]), now


def gather_before_difference(graph: Graph) -> Rewrite:
    """Replace ``(x - row).gather(dim, index)`` by ``x.gather(dim, index) - row``, where ``row`` has
    one element along ``dim`` and nothing else uses the difference.
    """
    users, kept = graph.users, set(graph.outputs)
    now: dict[Node, Node] = {}
    nodes: list[Node] = []
    for old in graph.nodes:
        node = now[old] = rewired(old, now)
        is_gather = old.target is aten.gather.default and not old.kwargs
        if is_gather and len(users[old.operands[0]]) == 1 and old.operands[0] not in kept:
            less, (dim, index) = node.args[0].node, node.args[1:3]
            if _is_less_row(less, dim, index) and _is_beside(less, node):
                x, row = less.args
                gathered = _changed(node, node.target, x, dim, index)
                gathered.name = f"{node.name}.gather"
                nodes.append(gathered)
                node = now[old] = _changed(node, less.target, Value(gathered), row)
        nodes.append(node)
    return Graph(nodes, [Value(now[v.node], v.index) for v in graph.outputs]), now


def reverse_scans(graph: Graph) -> Rewrite:
    """Replace ``scan(x.flip(dim)).flip(dim)`` by a scan from the other end; the same graph where
    there is none.
    """
    now: dict[Node, Node] = {}
    is_found = False
    for old in graph.nodes:
        node = now[old] = rewired(old, now)
        found = scan_between_flips(node, _maker, node.results[0].ndim)
        if found is not None and _is_beside(node.args[0].node.args[0].node, node):
            now[old], is_found = _changed(node, *found), True
    if not is_found:
        return unchanged(graph)
    made = live(Graph(list(now.values()), [Value(now[v.node], v.index) for v in graph.outputs]))
    left = set(made.nodes)
    return made, {old: new for old, new in now.items() if new in left}


def _is_less_row(less: Node, dim: int, index: Value) -> bool:
    if less.target is not aten.sub.Tensor or len(less.operands) < 2 or less.kwargs:
        return False
    x, row = (value.meta for value in less.operands)
    shapes = less.results[0].shape, x.shape, row.shape, index.meta.shape
    return is_of_difference(shapes, dim) and x.dtype == row.dtype


def _is_scatter_less_product(node: Node, scatter: Node, rest: Node) -> bool:
    if scatter.target is not aten.scatter_add.default or rest.target is not aten.mul.Tensor:
        return False
    if len(rest.operands) < 2 or not is_zero(scatter.args[0].node):
        return False
    (whole, row), metas = rest.operands, (scatter.results[0], rest.results[0], node.results[0])
    is_smaller = len(row.meta.shape) == len(whole.meta.shape) and row.meta.shape != whole.meta.shape
    alike = len({(m.dtype, tuple(m.shape)) for m in (*metas, whole.meta)}) == 1
    alike = alike and row.meta.dtype == whole.meta.dtype  # a mask has no negative
    return is_smaller and alike and _is_beside(scatter, node) and _is_beside(rest, node)


def _is_beside(node: Node, user: Node) -> bool:
    """Whether both are computed in one region and branch."""
    return node.region is user.region and node.branch == user.branch


def _changed(node: Node, target: Any, *args: Any, results: Any = None) -> Node:
    """The node with another call."""
    made = node.copy()
    made.results = results or node.results
    call = Call(
        target, tuple(x.meta if isinstance(x, Value) else x for x in args), {}, made.results
    )
    rule = lookup(call)
    assert rule is not None
    made.target, made.args, made.kwargs = target, args, {}
    made.operands = tuple(x for x in args if isinstance(x, Value))
    made.rule, made.sizes = rule, dict(rule.sizes)
    return made


def _maker(x: Any) -> Node | None:
    return x.node if isinstance(x, Value) else None


def is_zero(node: Node) -> bool:
    if node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default):
        return True
    return (
        node.target in (aten.full.default, aten.full_like.default, aten.new_full.default)
        and node.args[-1] == 0
    )
