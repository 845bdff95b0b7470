"""The shapes of a rank's program where ranks exchange equally many rows."""

from dataclasses import replace

from torch import fx

from ftp.runtime.local_shapes import LocalShapes


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
    return replace(shapes, values=values)
