"""Lookups in tables that a data axis cuts, such as a recommender's embeddings.

Either the table moves or the batch's rows do: every rank looks up the ids of all ranks in its part
of the table, and what it finds is summed into the batch's shards (rows are cut) or exchanged
(features are cut). Backward, the gradients of all rows come to the parts that they belong to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ftp.planning.algebra import is_zero
from ftp.planning.cost import collective_seconds
from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.planning.problem import Problem
from ftp.planning.reachable_cuts import factor_of
from ftp.rules.notation import Dims
from ftp.rules.op_kinds import LOOKUPS, LOOKUPS_BACKWARD, is_matmul

# Rows are moved if that takes at most this share of the time to move the table: they are waited
# for, while tables move beside other parameters.
WORTH = 0.5

UsersOf = Mapping[Value, Sequence[tuple[Node, int]]]


class Lookup(NamedTuple):
    """A lookup of rows of a parameter, or the sum of the gradients of such rows.

    Attributes:
        factors: those of the table that the ids do not have.
        of_rows: the factors of the rows.
    """

    node: Node
    is_forward: bool
    table: Value
    table_dims: Dims
    rows: Value
    ids: tuple[Value, ...]
    factors: frozenset[str]
    of_rows: frozenset[str]


class Movable(NamedTuple):
    """Lookups for which the batch's rows may be moved: the nodes, and the values that ids and
    gradients of rows are computed from.
    """

    forward: set[Node]
    operands: set[Value]


def movable(problem: Problem) -> Movable:
    """The lookups for which moving rows is worth it; none on axes that are no data axes."""
    found: list[Lookup] = []
    if problem.is_data_axis:
        every = map(lookup_of, problem.graph.nodes)
        found = [lookup for lookup in every if lookup is not None and _cuts(problem, lookup)]
    if not found:
        return Movable(set(), set())
    operands = _operands(found, problem.graph)
    worth = [lookup for lookup in found if _is_worth(problem, lookup, operands)]
    if len(worth) < len(found):
        operands = _operands(worth, problem.graph)
    return Movable({lookup.node for lookup in worth if lookup.is_forward}, operands)


def lookup_of(node: Node) -> Lookup | None:
    """The lookup that a node is, if it is one."""
    is_known = node.target in LOOKUPS or node.target in LOOKUPS_BACKWARD
    if node.kind != "op" or not is_known or not node.results[0].dtype.is_floating_point:
        return None
    operands = list(zip(node.operands, node.rule.operands, strict=True))
    result, is_forward = (Value(node), node.rule.results[0]), node.target in LOOKUPS
    others = [pair for pair in operands if pair[0].meta.dtype.is_floating_point]
    table, rows = (operands[0], result) if is_forward else (result, others[-1])
    ids = [pair for pair in operands if not pair[0].meta.dtype.is_floating_point]
    is_of_batch = any(value.node.depends & BATCH for value, _ in ids)
    others = [value for value, _ in others if value != rows[0] and not is_zero(value.node)]
    if not is_of_batch or any(value.node.depends & BATCH for value in others):
        return None
    of_ids = {factor for _, dims in ids for dim in dims for factor in dim}
    factors = frozenset(f for dim in table[1] for f in dim) - of_ids
    of_rows = frozenset(f for dim in rows[1] for f in dim)
    return Lookup(
        node, is_forward, *table, rows[0], tuple(value for value, _ in ids), factors, of_rows
    )


def is_of_lookup(reshard: Node, users: UsersOf) -> bool:
    """Whether a plan's reshard moves ids, rows or gradients of a lookup whose rows are moved.

    Rows come to the batch's shards: one that gathers them, for an op along the batch, is another.
    """
    near = [_after(reshard, users)]
    if reshard.target.op in ("reduce_scatter", "all_to_all"):
        near.append(_before(reshard))
    return any(
        _moves_rows(node, axis)
        for axis in reshard.target.axes
        for node in chain.from_iterable(near)
    )


def _moves_rows(node: Node, axis: str) -> bool:
    """Whether a node of a plan is a lookup of ids that are gathered over an axis, in a table that
    the axis cuts.
    """
    lookup = lookup_of(node)
    if lookup is None or not any(c.axis == axis and c.factor in lookup.factors for c in node.cuts):
        return False
    made = _reached([value.node for value in lookup.ids], _operands_of_ids, lambda node: False)
    return any(node.kind == "reshard" and axis in node.target.axes for node in made)


def _operands_of_ids(node: Node) -> list[Node]:
    return [v.node for v in node.operands if not v.meta.dtype.is_floating_point]


def _cuts(problem: Problem, lookup: Lookup) -> list[str]:
    """The factors of the table that the axis may cut."""
    layouts = problem.reach.layouts.get(lookup.table, ())
    sizes, n = lookup.node.sizes, problem.n
    cuts = [factor_of(lookup.table_dims, sizes, layout, n) for layout in layouts]
    return [cut.factor for cut in cuts if cut is not None and cut.factor in lookup.factors]


def _operands(lookups: Sequence[Lookup], graph: Graph) -> set[Value]:
    """The values of the batch that ids are computed from, and those that gradients of rows are and
    nothing else is.
    """
    found, outputs = set[Value](), set(graph.outputs)
    nodes = dict.fromkeys(lookup.node for lookup in lookups)
    for node in (todo := list(nodes)):
        for value in node.operands:
            if value in found or not value.node.depends & BATCH:
                continue
            if value.meta.dtype.is_floating_point:
                users = graph.users[value]
                if value in outputs or not all(user in nodes for user, _ in users):
                    continue
            found.add(value)
            if value.node not in nodes and _is_followed(value, found, graph.users):
                nodes[value.node] = None
                todo.append(value.node)
    return found


def _is_followed(value: Value, found: set[Value], users: UsersOf) -> bool:
    """Whether the operands of the op that computes a found value are looked at: ids are computed
    from ids, and of an op with several results all that are used are found.
    """
    is_of_ids = not value.meta.dtype.is_floating_point
    if is_of_ids and any(v.meta.dtype.is_floating_point for v in value.node.operands):
        return False
    return is_of_ids or all(v in found for v in value.node.values if v in users)


def _is_worth(problem: Problem, lookup: Lookup, operands: set[Value]) -> bool:
    """Whether moving rows takes at most `WORTH` of the time to move the table."""

    def seconds(op: str, size: int) -> float:
        return collective_seconds(op, size, problem.n, problem.hardware.link)

    to_table, to_rows = "all_gather", "reduce_scatter"
    forms = _sums_of(lookup.rows, problem.graph.users)
    if not lookup.is_forward:
        to_table, to_rows = to_rows, to_table
        forms = _sources_of(lookup.rows, operands)
    if lookup.of_rows.issuperset(_cuts(problem, lookup)):
        to_rows = "all_to_all"
    moved = seconds(to_rows, min(map(Value.nbytes, forms)))
    moved += sum(seconds("all_gather", v.nbytes()) for v in lookup.ids if v.node.depends & BATCH)
    # A table's gather shares its latency with other parameters'.
    table = seconds(to_table, lookup.table.nbytes()) - problem.hardware.link.latency
    return moved <= WORTH * table


def _sums_of(rows: Value, users: UsersOf) -> Iterator[Value]:
    """Rows, and what is computed from terms of them as it is from them, such as sums of bags."""
    yield rows
    while len(found := users.get(rows, ())) == 1:
        ((user, slot),) = found
        if (slot,) not in user.rule.linear or len(user.results) != 1 or is_matmul(user.target):
            return
        rows = Value(user)
        yield rows


def _sources_of(gradients: Value, operands: set[Value]) -> Iterator[Value]:
    """Gradients of rows, and what they are computed from, such as gradients of bags."""
    found: Value | None = gradients
    while found is not None:
        yield found
        read = (v for v in found.node.operands if v in operands)
        found = next((v for v in read if v.meta.dtype.is_floating_point), None)


def _before(reshard: Node) -> Iterator[Node]:
    """The nodes before a reshard, up to reshards over its axes; if it reduces no sum, which matmuls
    pass on, up to matmuls.
    """
    is_sum = reshard.target.src.kind == "P"
    return _reached(
        [value.node for value in reshard.operands],
        lambda node: [value.node for value in node.operands],
        lambda node: _is_over(node, reshard) or (not is_sum and is_matmul(node.target)),
    )


def _after(reshard: Node, users: UsersOf) -> Iterator[Node]:
    """The nodes after a reshard, up to matmuls and reshards over its axes; after one of floats, as
    of gradients, those of its phase.
    """
    is_of_floats = reshard.results[0].dtype.is_floating_point

    def near(node: Node) -> list[Node]:
        found = [user for value in node.values for user, _ in users.get(value, ())]
        return [user for user in found if user.phase == reshard.phase or not is_of_floats]

    return _reached(
        near(reshard), near, lambda node: _is_over(node, reshard) or is_matmul(node.target)
    )


def _is_over(node: Node, reshard: Node) -> bool:
    """Whether a node sends something over axes of a reshard."""
    if node.kind != "reshard" or node.target.op == "slice":
        return False
    return not set(node.target.axes).isdisjoint(reshard.target.axes)


def _reached(
    nodes: Sequence[Node], near: Callable[[Node], list[Node]], is_end: Callable[[Node], bool]
) -> Iterator[Node]:
    """The nodes, and those that ``near`` leads to, without ends."""
    todo = [node for node in dict.fromkeys(nodes) if not is_end(node)]
    found = set(todo)
    for node in todo:
        yield node
        further = [n for n in dict.fromkeys(near(node)) if n not in found and not is_end(n)]
        found.update(further)
        todo += further
