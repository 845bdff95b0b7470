"""Sums over two axes of which one has a slower link, as between hosts: reduce-scatter inside,
all-reduce across, gather inside, so that the slow link carries one rank's part.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from ftp.partitioning.collectives import Collective
from ftp.passes.aliasing import ALL_REDUCE, WAIT
from ftp.passes.copy_elimination import copied
from ftp.planning.cost import Hardware, collective_seconds
from ftp.planning.graph import Graph, Node, Value
from ftp.sharding.layout import estimated

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Span:
    """Two all-reduces of one value, by the names of the plan's reshards: the first's result is the
    second's operand.
    """

    first: str
    second: str
    inside: str
    across: str


def spans(graph: Graph, hardware: Hardware, without: Collection[str] = ()) -> tuple[Span, ...]:
    """The pairs of all-reduces to run in three steps: those whose value divides into equal parts,
    and for which three steps cost less than two all-reduces or one over both axes. Decided from the
    plan, so that ranks agree.
    """
    if not hardware.links:
        return ()
    uses: dict[Value, int] = {}
    for value in (*(v for node in graph.nodes for v in node.operands), *graph.outputs):
        uses[value] = uses.get(value, 0) + 1
    found: list[Span] = []
    taken = set(without)
    for second in graph.nodes:
        first = second.operands[0].node if second.kind == "reshard" else None
        if first is None or not (_is_sum(first) and _is_sum(second)) or uses[Value(first)] > 1:
            continue
        shape = first.shape()
        if first.name in taken or second.name in taken or not all(type(d) is int for d in shape):
            continue
        reshards = sorted(
            (first.target, second.target), key=lambda m: -hardware.link_of([m.axis]).bandwidth
        )
        inside, across = reshards
        near, far = (hardware.link_of([m.axis]) for m in reshards)
        count = math.prod(map(estimated, shape))
        if not count or count % inside.n:
            continue
        nbytes = count * first.results[0].dtype.itemsize
        steps = (
            collective_seconds("reduce_scatter", nbytes, inside.n, near)
            + collective_seconds("all_reduce", nbytes / inside.n, across.n, far)
            + collective_seconds("all_gather", nbytes, inside.n, near)
        )
        one_by_one = sum(
            collective_seconds("all_reduce", nbytes, m.n, link)
            for m, link in ((inside, near), (across, far))
        )
        at_once = collective_seconds("all_reduce", nbytes, inside.n * across.n, far)
        if steps < min(one_by_one, at_once):
            found.append(Span(first.name, second.name, inside.axis, across.axis))
            taken |= {first.name, second.name}
    return tuple(found)


def _is_sum(node: Node) -> bool:
    if node.kind != "reshard" or node.target.op != "all_reduce":
        return False
    return node.target.src.op == "sum" and len(node.target.axes) == 1


def span_hosts(graph: fx.Graph, found: Collection[Span], axes: Mapping[str, int]) -> fx.Graph:
    """The graph with each pair of all-reduces in three steps.

    Args:
        axes: the mesh's, with their sizes.
    """
    new, _ = copied(graph)
    issued = {n.meta.get("origin"): n for n in new.nodes if n.target is ALL_REDUCE}
    for span in found:
        first, second = issued[span.first], issued[span.second]
        (before,) = first.users
        (wait,) = second.users
        of = {node.meta["collective"].axes[0]: node for node in (first, second)}
        with new.inserting_before(wait):
            out = _in_steps(new, first.args[0], of[span.inside], of[span.across], axes)
        wait.replace_all_uses_with(out)
        for node in (wait, second, before, first):
            new.erase_node(node)
    return new


def _in_steps(
    graph: fx.Graph, x: object, inside: fx.Node, across: fx.Node, axes: Mapping[str, int]
) -> fx.Node:
    emit = graph.call_function
    record: Collective = inside.meta["collective"]
    n = axes[record.axes[0]]
    count = math.prod(record.shape)
    part = count // n

    def issue(
        like: fx.Node, target: object, op: str, x: fx.Node, *args: object, size: int
    ) -> fx.Node:
        made = emit(target, (x, *args, like.args[-1]))  # type: ignore[arg-type]
        made.meta.update(like.meta)
        old: Collective = like.meta["collective"]
        nbytes = size * old.dtype.itemsize
        wire = nbytes * (n - 1) // n
        if op == "all_reduce":
            wire = 2 * nbytes * (axes[old.axes[0]] - 1) // axes[old.axes[0]]
        made.meta["collective"] = replace(
            old, op=op, shape=(size,), nbytes=nbytes, wire_nbytes=wire
        )
        return emit(WAIT, (made,))

    x = emit(aten.reshape.default, (x, [count]))  # type: ignore[arg-type]
    scatter, gather = c10d.reduce_scatter_tensor.default, c10d.all_gather_into_tensor.default
    x = issue(inside, scatter, "reduce_scatter", x, "sum", n, size=count)
    x = issue(across, ALL_REDUCE, "all_reduce", x, "sum", size=part)
    x = issue(inside, gather, "all_gather", x, n, size=count)
    return emit(aten.reshape.default, (x, list(record.shape)))
