"""Elimination orders by weighted min-fill."""

import heapq
import math
from collections.abc import Callable, Mapping

from ftp.dataclass import dataclass
from ftp.planning.solver.reduce import Network

EXACT_WORK = 100  # times max_table: the most entries of all tables of an exact elimination


@dataclass(frozen=True)
class Order:
    """An elimination order, the cutset (variables to fix before), the entries of the largest table,
    and those of all tables.
    """

    order: list[int]
    cutset: list[int]
    largest: int
    work: int


Adjacent = dict[int, set[int]]


def fill_in(near: Adjacent, size: Mapping[int, int], v: int) -> tuple[float, ...]:
    ns = sorted(near[v])
    if len(ns) > 24:  # too wide to count, and to eliminate
        return (math.inf, len(ns))
    fill = sum(size[a] * size[b] for n, a in enumerate(ns) for b in ns[n + 1 :] if b not in near[a])
    return (fill, *table_size(near, size, v))


def table_size(near: Adjacent, size: Mapping[int, int], v: int) -> tuple[float, ...]:
    ns = near[v]
    entries = math.prod(map(size.__getitem__, ns)) * size[v] if len(ns) <= 64 else math.inf
    return entries, len(ns)


def best_order(net: Network, part: list[int]) -> Order | None:
    """The order with the smallest largest table, or None if none fits."""
    place = {v: n for n, v in enumerate(part)}
    best = None
    for score in (
        fill_in,
        table_size,
        lambda near, size, v: (-place[v],),
    ):  # the last order is the reverse of breadth-first search, for ladders
        plan = elimination_order(net, part, score, net.max_table)
        if (
            plan
            and plan.work <= EXACT_WORK * net.max_table
            and (best is None or (plan.largest, plan.work) < (best.largest, best.work))
        ):
            best = plan
        if best and best.work <= 1000 * len(part):  # trying another order costs more
            break
    return best


def elimination_order(
    net: Network,
    part: list[int],
    score: Callable[..., tuple[float, ...]],
    limit: int,
    fixed: dict[int, int] | None = None,
) -> Order | None:
    """A greedy order by lowest score. If a table would exceed the limit: None, or with ``fixed`` a
    variable joins the cutset, the least often fixed first.
    """
    near = {v: set(net.tables[v]) for v in part}
    size = {v: len(net.values[v]) for v in part}
    now = {v: score(near, size, v) for v in part}
    heap = [(now[v], v) for v in part]
    heapq.heapify(heap)
    order, cutset, largest, work = [], [], 0, 0
    while heap:
        key, v = heapq.heappop(heap)
        if v not in near or now[v] != key:
            continue
        entries = size[v] * math.prod(map(size.__getitem__, near[v]))
        gone, changed = v, set(near[v])
        if entries <= limit:
            order.append(v)
            largest, work = max(largest, entries), work + entries
            for a in near[v]:
                new = near[v] - near[a] - {a}
                for b in new:
                    changed |= near[a] & near[b]
                    near[b].add(a)
                near[a] |= new
        elif fixed is None:
            return None
        else:
            gone = min([v, *near[v]], key=lambda u: (fixed[u], -len(near[u]), u))
            changed = near[gone] | {v}
            now[v] = ()  # v is no longer in the heap
            cutset.append(gone)
        for u in near.pop(gone):
            near[u].discard(gone)
        for u in changed - {gone}:
            fresh = score(near, size, u)
            if fresh != now[u]:
                now[u] = fresh
                heapq.heappush(heap, (fresh, u))
    return Order(order, cutset, largest, work)
