"""Branches of ``torch.cond`` in the planner's graph: the branch of each reshard, and an order in
which the ops of a cond stand together.

Both branches are planned as if both ran. A value made in a branch is read in that branch, and by
the choice of its cond.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from ftp.ops.choose import BranchPath, common, number_of, read_in
from ftp.planning.graph import Graph, Node, Rewrite, Value, unchanged


def placed(graph: Graph) -> Rewrite:
    """The graph with each reshard in the innermost branch that reads it, and the nodes of each cond
    right before its first choice, those of the true branch first.
    """
    if not any(node.branch for node in graph.nodes):
        return unchanged(graph)
    graph, copies = graph.copied()
    reads: dict[Node, list[BranchPath]] = {value.node: [()] for value in graph.outputs}
    for node in reversed(graph.nodes):
        if node.kind == "reshard" and node in reads:
            node.branch = common(reads[node])
        for slot, value in enumerate(node.operands):
            reads.setdefault(value.node, []).append(
                read_in(node.target, node.args, node.branch, slot)
            )
    return Graph(_together(graph.nodes, 0), graph.outputs), copies


def waits_for(graph: Graph) -> Mapping[Node, Sequence[Value]]:
    """The values that each node waits for: its operands, and the predicates of its branches."""
    if not any(node.branch for node in graph.nodes):
        return {node: node.operands for node in graph.nodes}
    predicates = {number_of(node.target, node.args): node.operands[:1] for node in graph.nodes}
    return {
        node: [
            *node.operands,
            *(x for number, _ in node.branch if number >= 0 for x in predicates[number]),
        ]
        for node in graph.nodes
    }


def _together(nodes: Sequence[Node], depth: int) -> list[Node]:
    groups: dict[tuple[int, bool], list[Node]] = {}
    for node in nodes:
        if len(node.branch) > depth:
            groups.setdefault(node.branch[depth], []).append(node)
    here = {node for node in nodes if len(node.branch) <= depth}
    ordered: dict[Node, None] = {}
    done: set[int] = set()

    def place(node: Node) -> None:
        number = number_of(node.target, node.args)
        if number >= 0 and number not in done:
            done.add(number)
            sides = [groups.get((number, side), []) for side in (True, False)]
            for inner in chain(*sides):  # may read a reshard that comes after the first choice
                place_operands(inner)
            for side in sides:
                ordered.update(dict.fromkeys(_together(side, depth + 1)))
        place_operands(node)
        ordered[node] = None

    def place_operands(node: Node) -> None:
        for value in node.operands:
            if value.node in here and value.node not in ordered:
                place(value.node)

    for node in nodes:
        if node in here and node not in ordered:
            place(node)
    assert len(ordered) == len(nodes), "each branch has a choice"
    return list(ordered)
