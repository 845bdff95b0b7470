"""Shapes that reports assume for a rank's program: the shapes of the busiest rank (with a causal
mask and plain chunks the last rank computes most), and the shapes at equal loads (where ranks
exchange rows whose number depends on values).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from ftp.ops.ancestors import ancestors
from ftp.report.flops import flops_of
from ftp.runtime.local_shapes import LocalShapes, known_numbers


def on_busiest(
    graph: fx.Graph, shapes: LocalShapes, offsets: Iterable[Sequence[int]]
) -> LocalShapes:
    """The shapes, with the offsets of the rank that computes most.

    Args:
        offsets: per rank, the ints that the graph takes after its tensors.
    """
    numbers = shapes.numbers
    read_by = {user for number in numbers for user in number.users}
    ops = [
        node
        for node in graph.nodes
        if node in read_by and node in shapes.values and flops_of(node, shapes)
    ]
    if not ops:
        return shapes
    given = [node for node in numbers if node.op == "placeholder"]
    needed = ancestors(x for node in ops for x in node.all_input_nodes if x in numbers)
    at = [i for i, node in enumerate(given) if node in needed]
    ranks = {tuple(of_rank[i] for i in at): of_rank for of_rank in offsets}
    known = (dict(zip(given, of_rank, strict=False)) for of_rank in ranks.values())
    each = [replace(shapes, numbers=known_numbers(numbers, at), calls={}) for at in known]
    return max(each, key=lambda held: sum(flops_of(node, held) for node in ops), default=shapes)


def with_equal_loads(graph: fx.Graph, shapes: LocalShapes) -> LocalShapes:
    """``shapes`` with the number of rows that arrive if all ranks get equally many, in place of the
    most that may arrive; unchanged if no number of rows is a value.
    """
    arrived = {node: node.meta["arrived"] for node in graph.nodes if "arrived" in node.meta}
    if not arrived:
        return shapes
    shares = {
        held.storage: share for node, (_, share) in arrived.items() for held in shapes.values[node]
    }
    values = {}
    for node, several in shapes.values.items():
        dim, share = arrived.get(node, (None, 1))
        values[node] = tuple(
            held._replace(
                shape=tuple(int(s * share) if d == dim else s for d, s in enumerate(held.shape)),
                storage_nbytes=int(held.storage_nbytes * shares.get(held.storage, 1)),
            )
            for held in several
        )
    return replace(shapes, values=values, calls={})
