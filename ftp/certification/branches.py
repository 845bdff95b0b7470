"""Branches of ``torch.cond`` in a rank's graph: prove that skipping the branch not taken changes
nothing.

A graph holds the nodes of both branches and a choice between each pair of results; the checker
checks both branches. A run skips the branch that the predicate does not take. Skipping a branch
changes no result if only the cond's choices and the branch itself read the branch's values. All
ranks skip the same collectives if their branches have the same collectives and their predicates are
equal; the check of each choice's operands proves that predicates are equal.
"""

from collections.abc import Iterator

from torch import fx

from ftp.ops.choose import CHOOSE, BranchPath


def branch_of(node: fx.Node) -> BranchPath:
    return tuple((int(number), bool(side)) for number, side in node.meta.get("branch", ()))


def leaks(graph: fx.Graph) -> Iterator[str]:
    """Messages for values that are read where their branch may not have run, and for branches of a
    cond that has no choice.
    """
    conds: dict[int, tuple[fx.Node, BranchPath]] = {}  # number: its predicate and outer branch
    for node in graph.nodes:
        if node.target is CHOOSE and node.args[3] >= 0:
            cond = node.args[0], branch_of(node)
            if conds.setdefault(node.args[3], cond) != cond:
                yield f"{node.name} chooses by another predicate than the cond's other choices"
    for node in graph.nodes:
        branch = branch_of(node)
        for depth, (number, _) in enumerate(branch):
            if number not in conds or conds[number][1] != branch[:depth]:
                yield f"{node.name} is of a branch of cond {number}, which has no choice there"
                break
        for slot, value in _operands(node):
            at = branch
            if node.target is CHOOSE and slot and node.args[3] >= 0:
                at = (*branch, (node.args[3], slot == 1))
            of = branch_of(value)
            if at[: len(of)] != of:
                yield (
                    f"{node.name} reads {value.name}, which is computed in branch {of} alone, in"
                    f" branch {at}"
                )


def _operands(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    if node.target is CHOOSE:
        yield from ((i, x) for i, x in enumerate(node.args[:3]) if isinstance(x, fx.Node))
    else:
        yield from ((0, x) for x in node.all_input_nodes)
