"""Choose gather or ring, per axis, for the keys and values of attention whose queries are cut. Axes
are planned one after another, but the cost of a gather over one axis depends on the other axes, so
every combination is planned and whole plans are compared by time and memory.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ftp.planning.attention_prices import computed_share, ring_costs
from ftp.planning.cost import Hardware, collective_seconds, exchange_seconds, op_seconds
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.plan import Plan
from ftp.planning.prices import PAD_LATENCIES
from ftp.sharding.layout import estimated

# Of plans at most this much slower than the fastest, as a share of attention's own seconds, take
# the one that holds the fewest bytes.
NEAR = 1 / 12
MOST_AXES = 3  # with more axes, combinations are not compared

Ways = Mapping[str, bool]  # per axis, whether attention runs as a ring over it where it can


class PlanCost(NamedTuple):
    """The cost of a whole plan to a rank.

    Attributes:
        seconds: sum over all ops and reshards, without overlap.
        attention: the part of ``seconds`` that attention computes.
        moves: the part of ``seconds`` of reshards and of exchanges of halos.
        held: bytes of the keys and values that attention reads.
    """

    seconds: float
    attention: float
    moves: float
    held: int


def chosen_ways(make: Callable[[Ways], Plan], hardware: Hardware) -> tuple[Ways, Plan]:
    """The best ways, and the plan with them; ``{}`` where no axis cuts queries."""
    first = make({})
    axes = _axes(first.graph)
    if not 0 < len(axes) <= MOST_AXES:
        return {}, first
    found: list[tuple[Ways, Plan, PlanCost]] = [({}, first, cost_of(first, hardware))]
    for is_ring in itertools.product((True, False), repeat=len(axes)):
        ways = dict(zip(axes, is_ring, strict=True))
        if len(axes) == 1 and not (all(is_ring) and _may_hold_less(*found[0][1:], hardware)):
            continue  # the first plan has the fastest way
        plan = make(ways)
        if plan.kept_rules == first.kept_rules:
            found.append((ways, plan, cost_of(plan, hardware)))
    fastest = min((cost for *_, cost in found), key=lambda cost: cost.seconds)
    limit = fastest.seconds + NEAR * fastest.attention
    near = [one for one in found if one[2].seconds <= limit]
    ways, plan, _ = min(near, key=lambda one: (one[2].held, one[2].seconds))
    return ways, plan


def _axes(graph: Graph) -> list[str]:
    """The axes that share a cut of some op's queries with another axis; if there are none, an axis
    that cuts only queries.
    """
    cut = [axes_of_queries(node) for node, _ in _rings(graph)]
    together = {axis: None for axes in cut if len(axes) > 1 for axis in axes}
    return list(together or dict.fromkeys(axes[0] for axes in cut if axes))


def _may_hold_less(plan: Plan, cost: PlanCost, hardware: Hardware) -> bool:
    """Whether a plan whose attention gathers keys over one axis might be near with rings in place
    of gathers: at least a step to each other rank takes their time.
    """
    steps = [
        plan.axes[axis] - 1
        for node, keys in _rings(plan.graph)
        for axis in axes_of_queries(node)
        if all(cut.factor != keys for cut in node.cuts)
    ]
    least = hardware.ring_step * sum(steps)
    return bool(steps) and least <= NEAR * cost.attention + cost.moves


def axes_of_queries(node: Node) -> list[str]:
    """The axes that cut the queries of an op that can be a ring."""
    ((rows, _),) = node.rule.ring
    return [cut.axis for cut in node.cuts if cut.factor == rows]


def _rings(graph: Graph) -> Iterator[tuple[Node, str]]:
    """The ops that can be rings, with the factors of their keys."""
    for node in graph.nodes:
        for _, keys in node.rule.ring if node.kind == "op" else ():
            yield node, keys


def cost_of(plan: Plan, hardware: Hardware) -> PlanCost:
    """The cost of a plan over all axes, at the sizes that a rank holds."""
    seconds = attention = moves = 0.0
    for node in plan.graph.nodes:
        if node.kind == "reshard":
            moves += _of_reshard(node, hardware)
        elif node.kind == "op":
            sizes = {f: estimated(s) for f, s in node.sizes.items()}
            sizes |= {f: estimated(node.rule.sizes[f]) for _, f in node.rule.ring}
            alone = op_seconds(node.target, node.rule, sizes, node.results, hardware)
            if node.rule.ring:
                alone *= computed_share(node, None, 1, plan.axes)
                attention += alone
                alone = _with_ring(node, alone, plan.axes, hardware)
            seconds += alone
            moves += _of_exchange(node, hardware)
    read = {
        value: value.nbytes()
        for node, keys in _rings(plan.graph)
        for value, dims in zip(node.operands, node.rule.operands, strict=True)
        if any(keys in dim for dim in dims)
    }
    return PlanCost(seconds + moves, attention, moves, sum(read.values()))


def _of_reshard(node: Node, hardware: Hardware) -> float:
    op, n = node.target.op, node.target.n
    sizes = node.operands[0].nbytes(), Value(node).nbytes()
    size = n * sizes[0] if op == "all_to_all" else max(sizes)
    link = hardware.link_of(node.target.axes)
    if op == "pad":
        return PAD_LATENCIES * link.latency + collective_seconds("all_gather", size, n, link)
    return collective_seconds(op, size, n, link)


def _of_exchange(node: Node, hardware: Hardware) -> float:
    """Seconds of an exchange of halos; none where no axis cuts the dim."""
    if (exchange := node.rule.exchange) is None:
        return 0.0
    ((whole, _),), (x,) = node.rule.together, node.operands
    (dims,) = node.rule.operands
    each = x.nbytes() / max(estimated(x.shape[dims.index((whole,))]), 1)
    axes = [cut.axis for cut in node.cuts if cut.factor == whole]
    return sum(exchange_seconds(exchange, each, hardware.link_of((axis,))) for axis in axes)


def _with_ring(node: Node, computed: float, axes: Mapping[str, int], hardware: Hardware) -> float:
    """Seconds of ring attention over all axes that cut the keys; ``computed`` of them are work."""
    ((_, keys),) = node.rule.ring
    travel = held_up = issued = 0.0
    length = max(estimated(node.sizes[keys]), 1)
    tensors = zip(node.operands, node.rule.operands, strict=True)
    of_key = sum(v.nbytes() for v, dims in tensors if (keys,) in dims) / length
    for axis, sent, steps in ring_costs(node, axes):
        link = hardware.link_of((axis,))
        seconds = collective_seconds("ring", sent * of_key, axes[axis], link)
        seconds += max(steps - 1, 0) * link.latency
        travel += seconds
        held_up += (1 - link.hidden) * seconds
        issued += steps * hardware.ring_step
    return max(computed + held_up, travel) + issued
