"""Records of the collectives that an op issues itself: a ring, or an exchange of halos."""

import math
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from ftp.ops.rings import RINGS
from ftp.ops.windows import HALO_EXCHANGE
from ftp.partitioning.collectives import Collective
from ftp.planning.graph import Node
from ftp.sharding.layout import size_at


def record_sends(
    last: fx.Node, node: Node, coordinate: Mapping[str, int], starts: Mapping[fx.Node, int]
) -> None:
    """Attach to each node after ``last`` in a rank's graph that sends the record of what it sends.

    Args:
        starts: the rank's offsets.
    """
    at = last._next
    while at.op != "root":
        if at.target in RINGS:
            _record_ring(at, node, coordinate, starts)
        elif at.target is HALO_EXCHANGE:
            _record_halos(at, node, coordinate)
        at = at._next


def _record_halos(made: fx.Node, node: Node, coordinate: Mapping[str, int]) -> None:
    """Of the rank that sends or receives most: those at the ends have fewer neighbours."""
    ((whole, _),), (x,), exchange = node.rule.together, node.operands, node.rule.exchange
    assert exchange is not None
    (axis,) = (cut.axis for cut in node.cuts if cut.factor == whole)
    shape = [size_at(s, coordinate) for s in node.operand_shape(0)]
    dim = node.rule.operands[0].index((whole,))
    sent = exchange.most * math.prod([*shape[:dim], *shape[dim + 1 :]]) * x.meta.dtype.itemsize
    made.meta["collective"] = Collective(
        "halo_exchange",
        (axis,),
        tuple(shape),
        x.meta.dtype,
        sent,
        x.meta.shape,
        sent,
        node.source,
        node.name,
    )
    made.meta["axis"] = axis


def _record_ring(
    made: fx.Node, node: Node, coordinate: Mapping[str, int], starts: Mapping[fx.Node, int]
) -> None:
    target: Any = made.target
    op = RINGS[target]
    slot = op.at + 1  # of the keys; the values are next
    cut = {c.axis for c in node.cuts if c.factor == node.rule.ring[0][1]}
    axes = tuple(axis for axis in coordinate if axis in cut)
    shapes = [[size_at(s, coordinate) for s in node.operand_shape(i)] for i in (slot, slot + 1)]
    dtype = node.operands[slot].meta.dtype
    of_key = sum(batch * heads * dim for batch, heads, _, dim in shapes) * dtype.itemsize
    given: Any = map_arg(tuple(made.args), lambda x: starts.get(x, x))
    sent, received = op.needs(given).traffic()
    made.meta["collective"] = Collective(
        "ring",
        axes,
        tuple(shapes[0]),
        dtype,
        max(sent, received) * of_key,
        node.operands[slot].meta.shape,
        sent * of_key,
        node.source,
        node.name,
    )
    made.meta["axis"] = " × ".join(axes)
