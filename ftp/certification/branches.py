"""Branches of ``torch.cond`` in a rank's graph: prove that skipping the branch not taken changes
nothing.

A graph holds the nodes of both branches, and choices between their results; the checker checks it
as it stands. A run skips the branch that the predicate does not take. That changes no result if
only a choice reads a branch's values, each in its own branch. All ranks skip the same collectives
if their branches have the same collectives and their predicates are equal, which the check of each
choice's operands proves.
"""

from collections.abc import Iterator

from torch import fx

from ftp.ops.choose import CHOOSE, BranchPath


def branch_of(node: fx.Node) -> BranchPath:
    return tuple((int(number), bool(side)) for number, side in node.meta.get("branch", ()))


def leaks(graph: fx.Graph) -> Iterator[str]:
    """Messages for values that are read where their branch may not have run, and for branches of
    which it is not known whether they run.
    """
    predicates: dict[int, fx.Node] = {}
    around: dict[int, BranchPath] = {}
    for node in graph.nodes:
        number = node.args[3] if node.target is CHOOSE else -1
        if number < 0:
            continue
        first = predicates.setdefault(number, node.args[0])
        of = branch_of(node)
        is_same = around.setdefault(number, of) == of
        if first is not node.args[0] or not is_same:
            yield f"{node.name} chooses by another predicate than the cond's other choices"
    for node in graph.nodes:
        branch = branch_of(node)
        for depth, (number, _) in enumerate(branch):
            if around.get(number) != branch[:depth]:
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
