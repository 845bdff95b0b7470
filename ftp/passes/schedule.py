"""Order a rank's graph: start collectives early, wait for them late, and compute outputs in
between.
"""

import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from ftp.ops.ancestors import ancestors
from ftp.ops.fused_optimizer import UPDATES, written
from ftp.passes.aliasing import ALL_REDUCE, REDUCE_SCATTER, WAIT, is_view
from ftp.passes.branch_order import branches, conds
from ftp.passes.buffer_reuse import in_place
from ftp.passes.copy_elimination import put_in_order
from ftp.rules.op_kinds import is_matmul

aten = torch.ops.aten


def schedule_in(graph: fx.Graph) -> None:
    """Put the nodes of a graph that the caller owns in an order that hides communication;
    collectives keep their order, equal on every rank.

    A node is placed where it is first needed: before the collective that needs it, collectives
    being in their order, or before an output. Outputs that depend on earlier collectives only are
    placed between the start of a collective and the first use of its result. In a train step these
    are the matmuls for the weights' gradients and the weights' updates; a gradient's memory is free
    after the update. A term of a bucket of sums keeps its place among collectives, so that what it
    is computed from, such as a layer's activations, does not wait for the bucket's last term.

    A gather of parameters depends on no computation. It starts after all nodes that stand before it
    in the graph and read gathered parameters, so that a rank holds no more gathered parameters than
    in the graph's own order.

    The nodes of a cond and its choices stand together, and keep their place among collectives. An
    output that replaces an input comes after the input's other uses, so that it may be written to
    the input's memory.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    found = branches(graph)
    units = list(conds(found).values())
    units += [[n] for n in nodes if "collective" in n.meta and not found.get(n)]
    units.sort(key=lambda unit: position[unit[0]])
    number = {node: i for i, unit in enumerate(units) for node in unit}
    latest = _latest_collective(nodes, number)
    readers = sorted(
        _readers(node for node in nodes if node.meta.get("is_ahead")), key=position.__getitem__
    )
    due = {
        node: {node, *_done(_readers(_overwritten(node)))}
        for node in dict.fromkeys(graph.output_node().all_input_nodes)
    }
    final = {node: max(latest[one] for one in together) for node, together in due.items()}
    starts = [position[unit[0]] for unit in units]
    passed = {node: bisect_left(starts, position[node]) for node in nodes}  # collectives before it
    early = sorted({*_early_terms(nodes, passed)} - {*found}, key=position.__getitem__)
    for term in (*_bucketed_terms(nodes), *early):
        if term not in due:
            due[term], final[term] = {term}, passed[term] - 1
    pending = sorted(due, key=lambda node: (final[node], position[node]))
    order: dict[fx.Node, None] = {}

    def missing(wanted: Iterable[fx.Node]) -> list[fx.Node]:
        found = [node for node in ancestors(wanted, stop=order) if node not in order]
        return sorted(found, key=position.__getitem__)

    def emit(wanted: Iterable[fx.Node]) -> None:
        order.update(dict.fromkeys(missing(wanted)))

    emit(node for node in nodes if node.op == "placeholder")
    at = read = term = 0
    for i, unit in enumerate(units):
        is_ahead = unit[0].meta.get("is_ahead")
        if is_ahead:
            until = read
            while until < len(readers) and position[readers[until]] < position[unit[0]]:
                until += 1
            emit(readers[read:until])
            read = until
        needed = missing(x for node in unit for x in node.all_input_nodes if number.get(x) != i)
        while needed and term < len(early) and position[early[term]] < position[needed[0]]:
            computed = missing([early[term]])
            if any(is_matmul(node.target) for node in computed):
                order.update(dict.fromkeys(computed))
            term += 1
        emit(needed)
        emit(unit)
        # Nodes placed since an earlier collective's start were placed for this one; a gather of
        # parameters needs none.
        while not is_ahead and at < len(pending) and final[pending[at]] < i:
            emit(due[pending[at]])
            at += 1
    for node in pending[at:]:
        emit(due[node])
    emit(nodes)  # the output is the last
    put_in_order(order)


def _latest_collective(nodes: Iterable[fx.Node], number: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Per node the number of the last collective that it depends on, itself included; -1 for
    none.
    """
    latest: dict[fx.Node, int] = {}
    for node in nodes:
        found = number.get(node, -1)
        for operand in node.all_input_nodes:
            if latest[operand] > found:
                found = latest[operand]
        latest[node] = found
    return latest


def _bucketed_terms(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The terms of sums that are issued as one: what the bucket's ``cat`` reads views of."""
    sums = [node for node in nodes if node.target in (ALL_REDUCE, REDUCE_SCATTER)]
    sums = [node for node in sums if "collective" in node.meta and node.meta["collective"].members]
    rows = [_viewed(node.args[0]) for node in sums]  # type: ignore[arg-type]
    packed = [row.args[0] for row in rows if row.target is aten.cat.default]
    return [_viewed(term) for terms in packed for term in terms]  # type: ignore[union-attr]


def _early_terms(nodes: Iterable[fx.Node], passed: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """What is computed for a sum alone that has another term after a later collective."""
    for node in nodes:
        if node.target is aten.add.Tensor:
            terms = node.all_input_nodes
            last = max(passed[term] for term in terms)
            yield from (term for term in terms if passed[term] < last and len(term.users) == 1)


def _viewed(node: fx.Node) -> fx.Node:
    while node.all_input_nodes and (is_view(node) or node.target is aten.reshape.default):
        node = node.all_input_nodes[0]
    return node


def _readers(values: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that read some values, collectives included."""
    found, stack = set(), list(values)
    while stack:
        for user in stack.pop().users:
            if is_view(user):
                stack.append(user)
            elif user.op != "output":
                found.add(user)
    return found


def _done(readers: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes after which ``readers`` no longer read their operands: for a collective its wait,
    for another op itself.
    """
    found = set(readers)
    for node in [node for node in found if node.target is not ALL_REDUCE]:
        found.update(user for user in node.users if user.target is WAIT)
    return found


def _overwritten(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory a chain of elementwise ops that ends with ``node``, or an
    optimizer's kernel, may write to.
    """
    while in_place(node) is not None and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    update = node.args[0] if node.target is operator.getitem else None
    if isinstance(update, fx.Node) and update.target in UPDATES:
        operands = written(update.args[0])  # type: ignore[arg-type]
        return [operand for operand in operands if operand.op == "placeholder"]
    return [node] if node.op == "placeholder" else []
