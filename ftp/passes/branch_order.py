"""The branch of a ``torch.cond`` that each node of a rank's graph belongs to."""

from collections.abc import Iterator, Mapping

from torch import fx

from ftp.ops.choose import CHOOSE, BranchPath, common, number_of, read_in
from ftp.passes.copy_elimination import copied


def branches(graph: fx.Graph) -> dict[fx.Node, BranchPath]:
    """The branch of each node; empty for a graph without conds that run one branch only.

    A node made by a pass belongs to the innermost branch that holds all of its users, or without
    users to the innermost branch of its operands.
    """
    choices = graph.find_nodes(op="call_function", target=CHOOSE)
    if not any(number_of(node.target, node.args) >= 0 for node in choices):
        return {}
    found: dict[fx.Node, BranchPath] = {}
    late: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            found[node] = ()
        elif "branch" in node.meta:
            found[node] = node.meta["branch"]
        elif node.users:
            found[node] = common(at for user in node.users for at in _reads(found, user, node))
        else:
            found[node] = ()
            late.append(node)
    for node in reversed(late):
        found[node] = max((found[x] for x in node.all_input_nodes), key=len, default=())
    return found


def _reads(
    found: Mapping[fx.Node, BranchPath], user: fx.Node, value: fx.Node
) -> Iterator[BranchPath]:
    """The branches in which a node reads a value."""
    operands = enumerate(user.args) if user.target is CHOOSE else ((0, value),)
    for slot, x in operands:
        if x is value:
            yield read_in(user.target, user.args, found[user], slot)


def predicates_of(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Per node of a branch the predicates that decide whether it runs."""
    choices = graph.find_nodes(op="call_function", target=CHOOSE)
    deciding = {number_of(node.target, node.args): node.args[:1] for node in choices}
    return {
        node: [x for number, _ in path if number >= 0 for x in deciding[number]]
        for node, path in branches(graph).items()
        if path
    }


def mark(graph: fx.Graph) -> fx.Graph:
    """The graph with each node's branch recorded on it; the same graph where there are none."""
    found = branches(graph)
    if not found:
        return graph
    new, env = copied(graph)
    for node, branch in found.items():
        env[node].meta["branch"] = branch
    return new


def conds(found: Mapping[fx.Node, BranchPath]) -> dict[int, list[fx.Node]]:
    """Per outermost cond, its nodes in graph order, then its choices."""
    nodes: dict[int, list[fx.Node]] = {}
    choices: dict[int, list[fx.Node]] = {}
    for node, branch in sorted(found.items(), key=lambda item: item[0]):
        if branch:
            nodes.setdefault(branch[0][0], []).append(node)
        elif (number := number_of(node.target, node.args)) >= 0:
            choices.setdefault(number, []).append(node)
    return {number: [*nodes.get(number, ()), *made] for number, made in choices.items()}
