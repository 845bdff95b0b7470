"""The hardware that one mesh axis is planned for."""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import replace

from ftp.planning.cost import Hardware
from ftp.planning.graph import BATCH, Graph, Value
from ftp.planning.layers.repeats import Ties
from ftp.rules.op_kinds import is_matmul

SMALL_LATENCY = 0.1  # as a share of the seconds to send the program's median activation


def hardware_of(
    graph: Graph,
    hardware: Hardware,
    axis: str,
    planned: Collection[str],
    axes: Mapping[str, int],
    ties: Ties | None,
) -> Hardware:
    """The hardware with the axis' link and the latency to plan with. Its memory is multiplied by
    the sizes of the axes planned later, which may cut what a rank holds.

    Args:
        planned: the axes before.
        axes: sizes of all axes.
    """
    links = {name: hardware.link_of((name,)) for name in axes}  # of reshards over other axes
    hardware = replace(hardware, link=links[axis], links=links)
    latency = _planned_latency(graph, hardware, ties)
    later = math.prod(n for name, n in axes.items() if name != axis and name not in planned)
    link = replace(hardware.link, latency=latency)
    return replace(hardware, link=link, capacity=hardware.capacity * later)


def _planned_latency(graph: Graph, hardware: Hardware, ties: Ties | None) -> float:
    """The latency to plan with, in seconds.

    On a toy model's small tensors the link's own latency would outweigh everything else, and the
    plan would differ from that of the large model that the toy stands for.
    """
    sizes = [
        Value(node).nbytes()
        for node in graph.nodes
        if node.kind == "op" and node.depends & BATCH and is_matmul(node.target)
        for _ in range(ties.weight(node) if ties else 1)
    ]
    return (
        min(
            hardware.link.latency,
            SMALL_LATENCY * statistics.median(sizes) / hardware.link.bandwidth,
        )
        if sizes
        else hardware.link.latency
    )
