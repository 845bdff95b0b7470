"""Issue gathers of parameters early, in bounded memory."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from ftp.planning.graph import PARAMETER, Graph, Node, Value, after_operands

LOCAL_STEPS = ("slice", "contribute", "pad")


def is_ahead(node: Node) -> bool:
    """Whether a node is communication that does not depend on the batch, nor on a branch."""
    if node.kind != "reshard" or node.depends != PARAMETER or node.branch:
        return False
    return node.target.op not in LOCAL_STEPS


def held_bytes(node: Node) -> int:
    """Bytes of a reshard's result on the rank that holds most."""
    return Value(node).nbytes()


def collective_bytes(node: Node) -> int:
    """Bytes of a reshard's buffer on the larger side, on the rank that holds most."""
    return held_bytes(node) * (node.target.n if node.target.op == "reduce_scatter" else 1)


def largest_gathered(graph: Graph) -> int:
    """Bytes of the largest parameter that a rank gathers; 0 if none."""
    return max((held_bytes(node) for node in graph.reshards.values() if is_ahead(node)), default=0)


def prefetch(graph: Graph, groups: Sequence[Sequence[str]] = (), limit: int | None = None) -> Graph:
    """The same nodes, with gathers of parameters as early as ``limit`` allows; the gathers of a
    bucket, one of ``groups``, stand together at the place of the first.

    In the plan each gather stands right before its first use. After this pass, when a gathered
    parameter is used, the next gathers have been issued, up to ``limit`` bytes together. So the
    program holds at most ``limit`` bytes more than without prefetching.

    Args:
        limit: bytes that a rank gathers ahead; default the size of the largest parameter that is
            gathered.
    """
    starts: dict[int, list[Node]] = {}
    for place, turn in turns(graph, groups, limit).items():
        starts.setdefault(turn, []).append(graph.nodes[place])
    wanted = [one for at, node in enumerate(graph.nodes) for one in (*starts.get(at, ()), node)]
    # An early gather may read an input that stands late, a constant: inputs keep their order.
    return Graph(after_operands([*graph.inputs, *wanted]), graph.outputs)


def turns(
    graph: Graph, groups: Sequence[Sequence[str]] = (), limit: int | None = None
) -> dict[int, int]:
    """By the place of each gather of a parameter, the place at which `prefetch` issues it."""
    limit = largest_gathered(graph) if limit is None else limit
    bucket_of = {name: tuple(group) for group in groups for name in group}
    units: dict[tuple[str, ...], list[int]] = {}
    for at, node in graph.reshards.items():
        if is_ahead(node):
            units.setdefault(bucket_of.get(node.name, (node.name,)), []).append(at)
    places = list(units.values())
    sizes = (sum(held_bytes(graph.nodes[at]) for at in members) for members in places)
    sums = [0, *accumulate(sizes)]
    found: dict[int, int] = {}
    for number, members in enumerate(places):
        # Where unit i is used, units i + 1 to ``number`` have been issued; i is the first for which
        # they fit the limit.
        i = bisect_left(sums, sums[number + 1] - limit) - 1
        found |= dict.fromkeys(members, places[max(i, 0)][0])
    return found
