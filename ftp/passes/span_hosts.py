"""All-reduce over a fast and a slow axis (inside and between hosts) in three steps: reduce-scatter
inside, all-reduce across, gather inside. The slow link then carries one rank's part.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.partitioning.collectives import Collective, Member
from ftp.passes.aliasing import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from ftp.passes.bucket_collectives import MEMBER_BYTES, MemberNeeds, bucket_limit, sort_graph
from ftp.passes.copy_elimination import copied
from ftp.passes.prefetch_parameters import LOCAL_STEPS
from ftp.planning.branches import waits_for
from ftp.planning.cost import Hardware, collective_seconds
from ftp.planning.graph import Graph, Node, Value
from ftp.sharding.layout import estimated

aten = torch.ops.aten


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


def span_buckets(graph: Graph, found: Collection[Span]) -> tuple[tuple[Span, ...], ...]:
    """The pairs that take their three steps together, as in `choose_buckets`: those of one dtype
    over the same axes, of at most ``MEMBER_BYTES`` each, that do not need each other's results. A
    bucket is issued at the place of its last member, and ends before a collective that needs a
    member.
    """
    if not found:
        return ()
    span_of = {span.second: span for span in found}
    ends: dict[Node, int] = {}  # the second reshard of each pair, and its bytes
    of_kind: dict[tuple[object, ...], int] = {}
    for node in graph.nodes:
        if node.name in span_of:
            ends[node] = Value(node).nbytes()
            kind = _kind(node, span_of[node.name])
            of_kind[kind] = of_kind.get(kind, 0) + ends[node]
    needs = MemberNeeds()
    open_: dict[tuple[object, ...], list[Node]] = {}
    groups: list[list[Node]] = []
    waits = waits_for(graph)
    for node in graph.nodes:
        needs.follow(node, waits[node])
        is_sent = node.kind == "reshard" and node.target.op not in LOCAL_STEPS
        for kind, members in list(open_.items()):
            if node.own_axes or (is_sent and needs.any_of(node, members)):
                groups.append(open_.pop(kind))
        if node not in ends:
            continue
        needs.add(node)
        if ends[node] > MEMBER_BYTES:
            groups.append([node])
            continue
        kind = _kind(node, span_of[node.name])
        if kind in open_ and sum(map(ends.__getitem__, [*open_[kind], node])) > bucket_limit(
            of_kind[kind]
        ):
            groups.append(open_.pop(kind))
        open_.setdefault(kind, []).append(node)
    groups += open_.values()
    return tuple(tuple(span_of[node.name] for node in members) for members in groups)


def _kind(node: Node, span: Span) -> tuple[object, ...]:
    return span.inside, span.across, node.results[0].dtype


def span_hosts(
    graph: fx.Graph, found: Collection[Sequence[Span]], axes: Mapping[str, int]
) -> fx.Graph:
    """The graph with each bucket of pairs of all-reduces in three steps.

    Args:
        axes: the mesh's, with their sizes.
    """
    new, _ = copied(graph)
    issued = {n.meta.get("origin"): n for n in new.nodes if n.target is ALL_REDUCE}
    for members in found:
        pairs = [(issued[span.first], issued[span.second]) for span in members]
        waits = [next(iter(second.users)) for _, second in pairs]
        of = {node.meta["collective"].axes[0]: node for node in pairs[-1]}
        inside, across = of[members[-1].inside], of[members[-1].across]
        with new.inserting_before(waits[-1]):
            parts = _in_steps(new, [first for first, _ in pairs], inside, across, axes)
        for (first, second), wait, part in zip(pairs, waits, parts, strict=True):
            wait.replace_all_uses_with(part)
            (before,) = first.users
            for node in (wait, second, before, first):
                new.erase_node(node)
    sort_graph(new)
    return new


def _in_steps(
    graph: fx.Graph,
    firsts: Sequence[fx.Node],
    inside: fx.Node,
    across: fx.Node,
    axes: Mapping[str, int],
) -> list[fx.Node]:
    """The sums of the operands of some all-reduces, as one flat tensor."""
    emit = graph.call_function
    facts: list[Collective] = [first.meta["collective"] for first in firsts]
    n = axes[inside.meta["collective"].axes[0]]
    counts = [math.prod(fact.shape) for fact in facts]
    count, is_one = sum(counts), len(facts) == 1
    of_all = (sum(math.prod(fact.global_shape) for fact in facts),)
    global_shape = facts[0].global_shape if is_one else of_all

    def issue(
        like: fx.Node, target: object, op: str, x: fx.Node, *args: object, parts: int = 1
    ) -> fx.Node:
        made = emit(target, (x, *args, like.args[-1]))  # type: ignore[arg-type]
        made.meta.update(like.meta)
        old: Collective = like.meta["collective"]
        nbytes = count // parts * old.dtype.itemsize
        wire = nbytes * (n - 1) // n
        if op == "all_reduce":
            wire = 2 * nbytes * (axes[old.axes[0]] - 1) // axes[old.axes[0]]
        made.meta["collective"] = replace(
            old,
            op=op,
            shape=(count // parts,),
            nbytes=nbytes,
            wire_nbytes=wire,
            global_shape=global_shape,
            cause=facts[0].cause,
            members=tuple(
                Member(first.meta["origin"], fact.nbytes // parts, fact.cause)
                for first, fact in zip(firsts, facts, strict=True)
            ),
        )
        return emit(WAIT, (made,))

    # A rank's part of each member: the parts of all are contiguous.
    shapes = [[size] if is_one else [n, size // n] for size in counts]
    rows = [
        emit(aten.reshape.default, (first.args[0], shape))
        for first, shape in zip(firsts, shapes, strict=True)
    ]
    x = rows[0]
    if not is_one:
        x = emit(aten.reshape.default, (emit(aten.cat.default, (rows, 1)), [count]))
    x = issue(inside, REDUCE_SCATTER, "reduce_scatter", x, "sum", n)
    x = issue(across, ALL_REDUCE, "all_reduce", x, "sum", parts=n)
    x = issue(inside, ALL_GATHER, "all_gather", x, n)
    sums = [x]
    if not is_one:
        x = emit(aten.reshape.default, (x, [n, count // n]))
        split = emit(aten.split_with_sizes.default, (x, [size // n for size in counts], 1))
        sums = [emit(operator.getitem, (split, i)) for i in range(len(rows))]
    return [
        emit(aten.reshape.default, (one, list(fact.shape)))
        for one, fact in zip(sums, facts, strict=True)
    ]
