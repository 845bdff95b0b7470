"""Prices of a plan's ops on a rank's shards, near those of ``lowered.cost``."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ftp.passes.prefetch_parameters import LOCAL_STEPS, collective_bytes, held_bytes
from ftp.planning.cost import Hardware, measured_seconds
from ftp.planning.graph import Node
from ftp.rules.op_kinds import (
    ATTENTION,
    CONVOLUTIONS,
    STACKS,
    VIEWS,
    is_matmul,
    multiplications,
)
from ftp.sharding.layout import estimated


def is_issued(node: Node) -> bool:
    return node.kind == "reshard" and node.target.op not in LOCAL_STEPS


class NodePrices:
    """Seconds of computation of a node, on a rank's shards; of a collective in a branch those that
    it takes by itself.
    """

    def __init__(self, hardware: Hardware):
        self._hardware = hardware
        self._known: dict[Any, float] = {}

    def __call__(self, node: Node) -> float:
        if node.kind in ("input", "constrain"):
            return 0.0
        if node.target in VIEWS or node.target in STACKS:
            return seconds_of_view(self._hardware)
        if node.kind == "reshard":
            if node.branch and node.target.op not in LOCAL_STEPS:
                link = self._hardware.link_of(node.target.axes)
                return measured_seconds(node.target.op, collective_bytes(node), node.target.n, link)
            if is_issued(node) or node.target.op in ("slice", "contribute"):
                return 0.0
            return self._hardware.issued(2 * held_bytes(node) / self._hardware.memory)
        dtype = node.results[0].dtype if node.results else torch.float32
        what = node.target if node.kind == "op" else node.name
        key = what, dtype, node.rule.dims, *node.sizes.values()
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._hardware.issued(self._work(node, dtype))
        return known

    def _work(self, node: Node, dtype: torch.dtype) -> float:
        sizes = {factor: estimated(size) for factor, size in node.sizes.items()}
        elements = sum(math.prod(sizes[f] for dim in dims for f in dim) for dims in node.rule.dims)
        moving = elements * dtype.itemsize / self._hardware.memory
        if node.kind != "op" or not is_matmul(node.target):
            return moving
        wanted = [len(dims) > 0 for dims in node.rule.results]
        operations = 2 * multiplications(node.target, sizes, wanted)
        reached = 1.0
        if node.target in ATTENTION:
            reached = self._hardware.attention
        elif node.target in CONVOLUTIONS:
            reached = self._hardware.convolution
        computing = operations / (reached * self._hardware.flops_of(dtype))
        return self._hardware.matmul(computing, moving)


def seconds_of_view(hardware: Hardware) -> float:
    """Seconds of a view: what it costs to issue it, where the device waits for that."""
    return 0.0 if hardware.hides_overhead else hardware.overhead


def left_out_of(nodes: Sequence[Node], prices: Sequence[float]) -> set[int]:
    """The nodes of the cheaper branch of each cond: `lowered.cost` runs the other one."""
    inside = [i for i, node in enumerate(nodes) if node.branch]
    sums: dict[tuple[int, bool], float] = {}
    for i in inside:
        for step in nodes[i].branch:
            sums[step] = sums.get(step, 0.0) + prices[i]

    def is_cheaper(number: int, side: bool) -> bool:
        mine, other = sums[number, side], sums.get((number, not side), 0.0)
        return mine < other or (mine == other and not side)

    return {i for i in inside if any(is_cheaper(*step) for step in nodes[i].branch)}
