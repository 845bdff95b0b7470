"""Exact minimum of a cost network by variable elimination; knows no tensors.

A cost network has variables with a few values each, a cost per value and a cost per pair of values of neighbouring variables;
infinity forbids. The minimum over all assignments is found in three stages:

1. *Reduce* until nothing changes: drop values without support (arc consistency) and values that another value is never worse
   than (dominance), fold variables with at most two neighbours into those.
2. *Eliminate* what is left, component by component: bucket elimination (Dechter 1999) along the cheapest of several greedy orders.
3. Where a table would be too large, *bound*: TRW-S (Kolmogorov 2006) gives a lower bound for the component and for each value,
   a search with elimination conditioned on a cutset (Bidyuk and Dechter 2004) an upper one; values whose lower bound is above
   the upper one go, and the component returns to stage 1. What resists is left with its gap.

Everything is deterministic: no clock, no hash order, ties keep the lower index. Effort is counted in table entries.
"""

import os
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_WORK = 400  # times max_table: entries of all tables together that an exact elimination may form
_ROUNDS = int(os.environ.get("ROUNDS","12"))  # of sweeps, search and pruning for a component that is too wide
import os
RESTRICT=eval(os.environ.get('RESTRICT','{}'))
LIM=int(float(os.environ.get("LIM","1e8")))
ROT=os.environ.get("ROT","f")
DBG='DBG' in os.environ
_TURNS=int(os.environ.get('TURNS','2'))
_SWEEPS = int(os.environ.get('SWEEPS','100'))  # of TRW-S in a round
_ROUNDING = 1e-9  # relative; a gap below it counts as none


class Infeasible(Exception):
    """No assignment has a finite cost; ``variable`` is one that was left without a value."""

    def __init__(self, variable: int):
        super().__init__(f"no assignment has a finite cost: variable {variable} is left without a value")
        self.variable = variable


@dataclass(frozen=True)
class Solution:
    """What ``minimize`` found: ``choice[i]`` is the index of variable i's value, ``largest_table`` counts entries."""

    choice: list[int]
    cost: float
    bound: float
    optimal: bool
    largest_table: int


def minimize(
    domains: Sequence[int],
    unary: Sequence[np.ndarray],
    pairs: Mapping[tuple[int, int], np.ndarray],
    *,
    max_table: int = 1_000_000,
) -> Solution:
    """The cheapest assignment of a network with ``domains[i]`` values for variable i.

    Args:
        unary: per variable its values' costs, shape (domains[i],).
        pairs: costs of shape (domains[i], domains[j]) for i < j; infinity forbids.
        max_table: entries of the largest table to form; where that does not do, the result may have ``bound < cost``.

    >>> solution = minimize([2, 2], [np.array([0.0, 1.0]), np.array([0.0, 0.5])], {(0, 1): np.array([[np.inf, 3.0], [0.0, 0.0]])})
    >>> solution.choice, solution.cost, solution.optimal
    ([1, 0], 1.0, True)
    """
    net = _Network(domains, unary, pairs, max_table)
    net.reduce()
    choice: dict[int, int] = {}
    gap = 0.0
    messages: dict[tuple[int, int], np.ndarray] = {}
    todo = [(part, _ROUNDS) for part in reversed(net.components(net.tables))]
    while todo:
        part, rounds = todo.pop()
        plan = _best_order(net, part)
        if plan is not None:
            net.largest = max(net.largest, plan.largest)
            value, at = _eliminate(plan.order, {v: net.unary[v] for v in part}, net.tables)
            if value == math.inf:
                raise Infeasible(part[0])
            choice.update((v, int(net.values[v][a])) for v, a in at.items())
            continue
        incumbent = {v: choice[v] for v in part if v in choice}
        left, lower = _tighten(net, part, incumbent, messages, rounds)
        choice.update(incumbent)
        if left < 0:
            gap += lower
        else:
            todo += [(sub, left) for sub in reversed(net.components(v for v in part if v in net.tables))]
    for v, values, scope, scope_values, best in reversed(net.folds):
        at = tuple(int(np.searchsorted(mine, choice[u])) for u, mine in zip(scope, scope_values, strict=True))
        choice[v] = int(values[best[at]])
    result = [choice[v] for v in range(len(domains))]
    cost = math.fsum([u[x] for u, x in zip(unary, result, strict=True)] + [t[result[i], result[j]] for (i, j), t in pairs.items()])
    return Solution(result, cost, cost - gap, gap == 0.0, net.largest)


class _Network:
    """What is left of the network, reduced in place, and how to undo each step. Tables are never written to.

    ``tables[v][u]`` has shape (values of v, values of u), ``tables[u][v]`` is its transpose; a folded variable is not in ``tables``.
    ``values[v]`` are the original indices of the values left, ascending.
    """

    def __init__(self, domains: Sequence[int], unary: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray], max_table: int):
        self.max_table = max_table
        self.largest = 0
        self.unary = [np.asarray(u, dtype=np.float64) for u in unary]
        self.values = [np.arange(n) for n in domains]
        self.tables: dict[int, dict[int, np.ndarray]] = {v: {} for v in range(len(domains))}
        for v, n in enumerate(domains):
            if self.unary[v].shape != (n,) or not (self.unary[v] > -np.inf).all():
                raise ValueError(f"unary[{v}] needs shape {(n,)} without NaN or -inf, is {self.unary[v]}")
        for (i, j), table in pairs.items():
            table = np.asarray(table, dtype=np.float64)
            if not i < j or table.shape != (domains[i], domains[j]) or not (table > -np.inf).all():
                raise ValueError(f"pairs[{i}, {j}] needs i < j and shape {(domains[i], domains[j])} without NaN or -inf, is {table}")
            self.tables[i][j], self.tables[j][i] = table, table.T
        self.folds: list[tuple[int, np.ndarray, tuple[int, ...], list[np.ndarray], np.ndarray]] = []
        self.replaced: list[tuple[int, int, int]] = []
        self._queue: list[tuple[int, int]] = []
        self._queued = [False] * len(domains)
        for v in self.tables:
            self._touch(v)

    def reduce(self) -> None:
        """Arc consistency, dominance and folding until nothing changes; fewest neighbours first, so that a hub waits for its spokes."""
        while self._queue:
            _, v = heapq.heappop(self._queue)
            self._queued[v] = False
            if v in self.tables:
                self._prune(v)
                near = self.tables[v]
                if len(near) <= 2 and math.prod(len(self.values[u]) for u in near) * len(self.values[v]) <= self.max_table:
                    self._fold(v)

    def keep(self, v: int, mask: np.ndarray) -> None:
        """Leave variable v the values of the mask."""
        if mask.all():
            return
        if not mask.any():
            raise Infeasible(v)
        self.values[v], self.unary[v] = self.values[v][mask], self.unary[v][mask]
        for u, table in self.tables[v].items():
            self.tables[v][u] = table = table[mask]
            self.tables[u][v] = table.T
            self._touch(u)
        self._touch(v)

    def components(self, variables: Iterable[int]) -> list[list[int]]:
        """The connected components among the variables left, each ascending, by lowest variable."""
        seen: set[int] = set()
        found = []
        for root in variables:
            if root in seen:
                continue
            seen.add(root)
            part = [root]
            for v in part:
                fresh = [u for u in self.tables[v] if u not in seen]
                seen.update(fresh)
                part += fresh
            found.append(part)
        return found

    def _touch(self, v: int) -> None:
        if not self._queued[v]:
            self._queued[v] = True
            heapq.heappush(self._queue, (len(self.tables[v]), v))

    def _join(self, v: int, u: int, table: np.ndarray | None) -> None:
        if table is None:
            del self.tables[v][u], self.tables[u][v]
        else:
            self.tables[v][u], self.tables[u][v] = table, table.T
        self._touch(u)

    def _prune(self, v: int) -> None:
        worse = np.zeros((len(self.unary[v]), len(self.unary[v])))
        mask = np.ones(len(worse), dtype=bool)
        for u, table in list(self.tables[v].items()):
            facts = _facts(table.tobytes(), table.shape)
            if facts.split is not None:
                self.unary[v], self.unary[u] = self.unary[v] + facts.split[0], self.unary[u] + facts.split[1]
                self._join(v, u, None)
            elif facts.dead is not None:
                mask &= ~facts.dead
            else:
                worse += facts.worse
        cost = self.unary[v]
        mask &= cost < np.inf
        if len(cost) == 1 or not mask.all():
            return self.keep(v, mask)  # which queues v again
        worse += cost - cost[:, None]
        covers = worse <= 0  # [a, b]: b is never worse than a; for a == b it is true
        if np.count_nonzero(covers) == len(cost):
            return
        alive = np.ones(len(cost), dtype=bool)
        for a in reversed(range(len(cost))):
            better = [b for b in np.flatnonzero(covers[a] & alive) if b < a or b > a and not covers[b, a]]
            if better:
                alive[a] = False
                self.replaced.append((v, int(self.values[v][a]), int(self.values[v][better[0]])))
        self.keep(v, alive)

    def _fold(self, v: int) -> None:
        near = tuple(self.tables[v])
        joint = self.unary[v].reshape(-1, *[1] * len(near))
        for axis, u in enumerate(near):
            joint = joint + self.tables[v][u].reshape(len(joint), *[-1 if axis == a else 1 for a in range(len(near))])
        self.largest = max(self.largest, joint.size)
        self.folds.append((v, self.values[v], near, [self.values[u] for u in near], joint.argmin(0)))
        message = joint.min(0)
        for u in near:
            self._join(v, u, None)
        del self.tables[v]
        if len(near) == 1:
            self.unary[near[0]] = self.unary[near[0]] + message
        elif len(near) == 2:
            present = self.tables[near[0]].get(near[1])
            self._join(near[0], near[1], message if present is None else present + message)


@dataclass(frozen=True)
class _Facts:
    """Of one table: rows ``f`` and columns ``g`` if it is f(a) + g(b); rows that are infinite; and how much worse row b can be than row a."""

    split: tuple[np.ndarray, np.ndarray] | None
    dead: np.ndarray | None
    worse: np.ndarray


@lru_cache(maxsize=8192)  # repeated layers repeat their tables
def _facts(data: bytes, shape: tuple[int, int]) -> _Facts:
    table = np.frombuffer(data).reshape(shape)
    if shape[0] == 1 or shape[1] == 1:
        f, g = (np.zeros(1), table[0]) if shape[0] == 1 else (table[:, 0], np.zeros(1))
        return _Facts((f, g), None, table)
    low = table.min(axis=1)
    if low.max() == np.inf:
        return _Facts(None, low == np.inf, table)
    if table.max() < np.inf:
        f, g = table[:, 0], table[0] - table[0, 0]
        if np.abs(table - f[:, None] - g).max() <= 1e-15 * np.abs(table).max():
            return _Facts((f, g), None, table)
    with np.errstate(invalid="ignore"):  # inf - inf says nothing, and fmax skips its NaN
        return _Facts(None, None, np.stack([np.fmax.reduce(row - table, axis=1) for row in table], axis=1))


@dataclass(frozen=True)
class _Order:
    """An elimination order, the variables to fix beforehand, and the entries of the largest and of all tables."""

    order: list[int]
    cutset: list[int]
    largest: int
    work: int


_Near = dict[int, set[int]]


def _fill(near: _Near, size: Sequence[int], v: int) -> tuple[float, ...]:
    ns = sorted(near[v])
    if len(ns) > 24:
        return (math.inf, len(ns))
    return (sum(size[a] * size[b] for n, a in enumerate(ns) for b in ns[n + 1 :] if b not in near[a]), _weight(near, size, v)[0])


def _weight(near: _Near, size: Sequence[int], v: int) -> tuple[float, ...]:
    return (math.prod(size[u] for u in near[v]) * size[v] if len(near[v]) <= 64 else math.inf, len(near[v]))


def _degree(near: _Near, size: Sequence[int], v: int) -> tuple[float, ...]:
    return (len(near[v]), *_weight(near, size, v))


def _best_order(net: _Network, part: list[int]) -> _Order | None:
    """The order with the smallest largest table, or None if none fits."""
    best = None
    for score in (_fill, _weight, _degree):
        plan = _order(net, part, score, net.max_table)
        if plan and plan.work <= _WORK * net.max_table and (best is None or (plan.largest, plan.work) < (best.largest, best.work)):
            best = plan
        if best and best.work <= 1000 * len(part):  # searching on would cost more
            break
    return best


def _order(
    net: _Network, part: list[int], score: Callable[..., tuple[float, ...]], limit: int, fixed: dict[int, int] | None = None, size=None
) -> _Order | None:
    """A greedy order by lowest score. Where a table would pass the limit: None, or with ``fixed`` a variable is fixed, those fixed least first."""
    size = size or {v: len(net.values[v]) for v in part}
    part = [v for v in part if size[v] > 1]
    near = {v: {u for u in net.tables[v] if size[u] > 1} for v in part}
    now = {v: score(near, size, v) for v in part}
    heap = [(now[v], v) for v in part]
    heapq.heapify(heap)
    order, cutset, largest, work = [], [], 0, 0
    while heap:
        key, v = heapq.heappop(heap)
        if v not in near or now[v] != key:
            continue
        entries = size[v] * math.prod(size[u] for u in near[v])
        touched = set(near[v])
        if entries > limit:
            if fixed is None:
                return None
            gone = min([v, *near[v]], key=lambda u: (fixed[u], -len(near[u]), u))
            touched = near[gone] | {v}
            cutset.append(gone)
        else:
            gone = v
            order.append(v)
            largest, work = max(largest, entries), work + entries
            for a in near[v]:
                new = near[v] - near[a]
                new.discard(a)
                for b in new:
                    touched |= near[a] & near[b]
                near[a] |= new
                for b in new:
                    near[b].add(a)
        for u in near.pop(gone):
            near[u].discard(gone)
        for u in touched - {gone}:
            fresh = score(near, size, u)
            if fresh != now[u] or u == v:
                now[u] = fresh
                heapq.heappush(heap, (fresh, u))
    return _Order(order, cutset, largest, work)


def _eliminate(
    order: list[int], unary: Mapping[int, np.ndarray], tables: Mapping[int, Mapping[int, np.ndarray]], limit: float = math.inf
) -> tuple[float, dict[int, int]]:
    """The minimum over the variables of the order, and where it is: positions among their values.

    Where a table would pass the limit, a variable is eliminated from groups of tables separately (mini-buckets, Dechter and Rish 2003):
    the number is then a lower bound, the assignment a guess by those bounds.
    """
    place = {v: n for n, v in enumerate(order)}
    buckets: dict[int, list[tuple[tuple[int, ...], np.ndarray]]] = {v: [] for v in order}
    for v in order:
        buckets[v] += [((v, u), table) for u, table in tables[v].items() if place.get(u, -1) > place[v]]
    steps = []
    minimum = 0.0
    for v in order:
        groups: list[tuple[set[int], list[tuple[tuple[int, ...], np.ndarray]]]] = [(set(), [((v,), unary[v])])]
        for us, table in sorted(buckets.pop(v), key=lambda item: -item[1].size):
            for group, factors in groups:
                if len(unary[v]) * math.prod(len(unary[u]) for u in group.union(us[1:])) <= limit:
                    group.update(us[1:])
                    factors.append((us, table))
                    break
            else:
                groups.append((set(us[1:]), [(us, table)]))
        for group, factors in groups:
            scope = tuple(sorted(group, key=place.__getitem__))
            joint = np.zeros(1)
            for us, table in reversed(factors):
                joint = joint + table.reshape([len(unary[u]) if u in us else 1 for u in (v, *scope)])
            if scope:
                buckets[scope[0]].append((scope, joint.min(0)))
            else:
                minimum += float(joint.min())
            if len(groups) == 1:
                factors = [((v, *scope), joint.argmin(0).astype(np.min_scalar_type(len(joint))))]
            steps.append((v, factors, len(groups) == 1))
    at: dict[int, int] = {}
    costs = {}
    for v, factors, exact in reversed(steps):
        if exact:
            (us, best), = factors
            at[v] = int(best[tuple(at[u] for u in us[1:])])
        else:
            costs[v] = costs.get(v, 0.0) + sum(table[(slice(None), *(at[u] for u in us[1:]))] for us, table in factors)
            at[v] = int(costs[v].argmin())
    return minimum, at


SCORE={'w':_weight,'f':_fill}[os.environ.get('SCORE','f')]
def _tighten(
    net: _Network, part: list[int], choice: dict[int, int], messages: dict[tuple[int, int], np.ndarray], rounds: int
) -> tuple[int, float]:
    """Bounds for a component too wide to eliminate, until values of it can be dropped: (rounds left, 0.0).

    ``choice`` becomes the best assignment found. If nothing more can be dropped, that is the answer: (-1, gap).
    """
    at = {v: int(np.searchsorted(net.values[v], choice[v])) for v in part} if choice else None
    upper = _cost(net, part, at) if at else math.inf
    lower = -math.inf
    limit = min(net.max_table, max(20_000, LIM // len(part)))
    sweeps = _Sweeps(net, part, messages)
    fixed = dict.fromkeys(part, 0)
    while rounds > 0:
        rounds -= 1
        import time
        T=[time.time()]
        for _ in range(_SWEEPS):
            sweeps.sweep()
        T.append(time.time())
        for turn in range(_TURNS):
            keep = {v: np.arange(len(net.values[v])) for v in part}
            if turn in RESTRICT:
                q = np.quantile(sweeps.slack[np.isfinite(sweeps.slack)], RESTRICT[turn])
                for n,v in enumerate(part):
                    m = sweeps.slack[n,:len(net.values[v])] <= q
                    m[at[v]] = True
                    keep[v]=np.flatnonzero(m)
            plan = _order(net, part, SCORE, limit, fixed, {v: len(keep[v]) for v in part})
            assert plan is not None
            T.append(time.time())
            if turn == 0:
                unary, tables = sweeps.reparametrised()
                bound, guess = _eliminate(plan.order + plan.cutset, unary, tables, limit)
                lower = max(lower, bound, sweeps.bound)
                T.append(time.time())
                new=_cost(net, part, guess)
                dive=_dive(net,part,sweeps); dc=_cost(net,part,dive)
                if DBG: print('   guess', new, 'dive', dc)
                if new > dc: guess = dive
                T.append(time.time())
                if at is None or _cost(net, part, guess) < _cost(net, part, at):
                    at = guess
            for v in part:
                if len(keep[v]) == 1: plan.cutset.append(v)
            _improve(net, plan, at, fixed, keep)
            T.append(time.time())
        upper = _cost(net, part, at)
        net.largest = max(net.largest, limit)
        choice.update((v, int(net.values[v][a])) for v, a in at.items())
        slack = _ROUNDING * (abs(upper) + abs(lower))
        if DBG: print(len(part), rounds, upper, sweeps.bound, lower, sum(int((sweeps.floor[n, : len(net.values[v])] > upper+slack).sum()) for n, v in enumerate(part)), sum(len(net.values[v]) for v in part), [round(y-x,2) for x,y in zip(T,T[1:])])
        if upper - lower <= slack:
            return -1, 0.0
        masks = [sweeps.floor[n, : len(net.values[v])] <= upper + slack for n, v in enumerate(part)]
        if not all(mask.all() for mask in masks):
            sweeps.export(messages)
            seen = len(net.replaced)
            for v, mask in zip(part, masks, strict=True):
                net.keep(v, mask)
            net.reduce()
            for v, old, new in net.replaced[seen:]:
                if choice.get(v) == old:
                    choice[v] = new
            return rounds, 0.0
    return -1, upper - lower


def _cost(net: _Network, part: list[int], at: Mapping[int, int]) -> float:
    return math.fsum([net.unary[v][at[v]] for v in part] + [t[at[v], at[u]] for v in part for u, t in net.tables[v].items() if v < u])


def _improve(net: _Network, plan: _Order, at: dict[int, int], fixed: dict[int, int], keep) -> None:
    """Improves the assignment in place: optimises all but the cutset."""
    unary = {v: net.unary[v][keep[v]] for v in plan.order}
    for u in plan.cutset:
        fixed[u] += 1
        for v, table in net.tables[u].items():
            if v in unary:
                unary[v] = unary[v] + table[at[u],keep[v]]
    tables={v:{} for v in plan.order}
    for v in plan.order:
        for u,t in net.tables[v].items():
            if u in tables and v<u:
                tables[v][u]=t[keep[v]][:,keep[u]]; tables[u][v]=tables[v][u].T
    at.update((v, int(keep[v][a])) for v,a in _eliminate(plan.order, unary, tables)[1].items())


@dataclass(frozen=True)
class _Block:
    """Variables that one pass updates together, and the messages they send: positions in ``_Sweeps.messages`` and padded tables."""

    nodes: np.ndarray
    incoming: np.ndarray
    starts: np.ndarray
    source: np.ndarray  # position in nodes, per message sent
    weight: np.ndarray
    sent: np.ndarray
    back: np.ndarray
    tables: np.ndarray


class _Sweeps:
    """Sequential tree-reweighted message passing (Kolmogorov 2006) over a component, variables in ascending order.

    The network is read as a sum of chains, each ascending; a pass makes the chains through a variable agree on its values' costs.
    ``bound`` is the sum of the chains' minima, ``slack[n, a]`` how much dearer value a of variable ``part[n]`` makes its chains, and
    ``floor`` a lower bound on any assignment with that value: as a variable is visited, all its chains' minima given the value lie in
    its slack, and the others' minima are no lower than after the pass before.
    """

    def __init__(self, net: _Network, part: list[int], warm: Mapping[tuple[int, int], np.ndarray]):
        self.net, self.part = net, part
        self.place = place = {v: n for n, v in enumerate(part)}
        width = max(len(net.values[v]) for v in part)
        self.unary = np.full((len(part), width), np.inf)
        self.slack = np.full((len(part), width), np.inf)
        self.floor = np.full((len(part), width), -np.inf)
        self.bound = -math.inf
        self.edges: dict[tuple[int, int], int] = {}  # (from, to) -> row of messages
        level = [0] * len(part)
        for n, v in enumerate(part):
            self.unary[n, : len(net.values[v])] = net.unary[v]
            for u in sorted(net.tables[v]):
                self.edges[v, u] = len(self.edges)
                if place[u] > n:
                    level[place[u]] = max(level[place[u]], level[n] + 1)
        self.messages = np.zeros((len(self.edges), width))
        for (v, u), row in self.edges.items():
            if (v, u) in warm:
                self.messages[row, : len(net.values[u])] = warm[v, u][net.values[u]]
        groups: list[list[int]] = [[] for _ in range(max(level) + 1)]
        for n, v in enumerate(part):
            groups[level[n]].append(v)
        self.passes = [self._blocks(groups, place, 1), self._blocks(groups[::-1], place, -1)]

    def _blocks(self, groups: list[list[int]], place: dict[int, int], sign: int) -> list[_Block]:
        blocks = []
        for group in groups:
            edges = [(n, v, u) for n, v in enumerate(group) for u in sorted(self.net.tables[v])]
            counts = np.array([len(self.net.tables[v]) for v in group])
            onward = [(n, v, u) for n, v, u in edges if (place[u] - place[v]) * sign > 0]
            ahead = np.bincount([n for n, _, _ in onward], minlength=len(group))
            chains = np.maximum(ahead, counts - ahead)
            shape = [max((len(self.net.values[x]) for x in xs), default=1) for xs in (group, [u for _, _, u in onward])]
            tables = np.zeros((len(onward), *shape))
            for m, (_, v, u) in enumerate(onward):
                table = self.net.tables[v][u]
                tables[m] = table.max(initial=-np.inf, where=table < np.inf)  # padding that is never the minimum
                tables[m, : table.shape[0], : table.shape[1]] = table
            source = np.array([n for n, _, _ in onward], dtype=int)
            blocks.append(
                _Block(
                    nodes=np.array([place[v] for v in group]),
                    incoming=np.array([self.edges[u, v] for _, v, u in edges]),
                    starts=np.cumsum(counts) - counts,
                    source=source,
                    weight=1.0 / chains[source][:, None],
                    sent=np.array([self.edges[v, u] for _, v, u in onward], dtype=int),
                    back=np.array([self.edges[u, v] for _, v, u in onward], dtype=int),
                    tables=tables,
                )
            )
        return blocks

    def sweep(self) -> None:
        """One pass up and one down."""
        for blocks in self.passes:
            bound = 0.0
            for block in blocks:
                belief = self.unary[block.nodes] + np.add.reduceat(self.messages[block.incoming], block.starts, axis=0)
                low = belief.min(axis=1, keepdims=True)
                bound += float(low.sum())
                self.slack[block.nodes] = belief = belief - low
                if len(block.sent):
                    _, rows, columns = block.tables.shape
                    rest = (belief[block.source] * block.weight - self.messages[block.back])[:, :rows]
                    message = (rest[:, :, None] + block.tables).min(axis=1)
                    low = message.min(axis=1, keepdims=True)
                    bound += float(low.sum())
                    self.messages[block.sent, :columns] = message - low
            if self.bound > -math.inf:
                self.floor = np.maximum(self.floor, self.bound + self.slack)
            self.bound = max(self.bound, bound)

    def reparametrised(self):
        """The same costs, all shared out to the tables as the last pass left them: every table's minimum is reached for every value of its lower variable."""
        part = self.part
        unary, tables = {}, {v: {} for v in self.part}
        for n, v in enumerate(part):
            ks = len(self.net.values[v])
            belief = self.net.unary[v] + sum(self.messages[self.edges[u, v], :ks] for u in self.net.tables[v])
            down = [u for u in self.net.tables[v] if self.place[u] < self.place[v]]
            gamma = 1 / max(len(down), len(self.net.tables[v]) - len(down))
            unary[v] = belief * (1 - gamma * len(down))
            for u in down:
                ku = len(self.net.values[u])
                t = self.net.tables[v][u] + (gamma * belief - self.messages[self.edges[u, v], :ks])[:, None] - self.messages[self.edges[v, u], :ku]
                tables[v][u] = t; tables[u][v] = t.T
        return unary, tables

    def export(self, messages: dict[tuple[int, int], np.ndarray]) -> None:
        """Keeps the messages, by original value, for the network that pruning leaves."""
        for (v, u), row in self.edges.items():
            full = np.zeros(int(self.net.values[u][-1]) + 1)
            full[self.net.values[u]] = self.messages[row, : len(self.net.values[u])]
            messages[v, u] = full


def _dive(net: _Network, part: list[int], sweeps: _Sweeps) -> dict[int, int]:
    """A feasible assignment: depth-first, arcs kept consistent, the cheapest value first by its messages and the choices made so far.

    Restarts with the variables that lost all values in front and twice the patience, so it ends, with an assignment or ``Infeasible``.
    """
    support = {(v, u): _masks(net.tables[v][u] < np.inf) for v in part for u in net.tables[v]}
    weight = dict.fromkeys(part, 0)
    patience = 100 + len(part)
    while True:
        order = sorted(part, key=lambda v: -weight[v])
        domain = {v: (1 << len(net.values[v])) - 1 for v in part}
        trail: list[tuple[int, int]] = []
        decisions: list[tuple[int, int]] = []  # length of the trail before it, bit chosen
        failures = 0

        def assign(v: int, mask: int) -> int:
            """Restricts the domain of v and of all that follows; the variable that lost all values, or -1."""
            stack = [v]
            trail.append((v, domain[v]))
            domain[v] = mask
            if not mask:
                return v
            while stack:
                u = stack.pop()
                for w in net.tables[u]:
                    left = 0
                    for bit, allowed in enumerate(support[w, u]):
                        if domain[w] >> bit & 1 and allowed & domain[u]:
                            left |= 1 << bit
                    if left != domain[w]:
                        trail.append((w, domain[w]))
                        domain[w] = left
                        if not left:
                            return w
                        stack.append(w)
            return -1

        while len(decisions) < len(order) and failures < patience:
            v = order[len(decisions)]
            cost = net.unary[v].copy()
            for u, table in net.tables[v].items():
                known = domain[u] & (domain[u] - 1) == 0
                cost += table[:, domain[u].bit_length() - 1] if known else sweeps.messages[sweeps.edges[u, v], : len(cost)]
            bit = min((b for b in range(len(cost)) if domain[v] >> b & 1), key=lambda b: cost[b])
            decisions.append((len(trail), bit))
            lost = assign(v, 1 << bit)
            while lost >= 0:
                failures += 1
                weight[lost] += 1
                if not decisions:
                    raise Infeasible(lost)
                length, bit = decisions.pop()
                while len(trail) > length:
                    u, domain[u] = trail.pop()
                v = order[len(decisions)]
                lost = assign(v, domain[v] & ~(1 << bit))
        if len(decisions) == len(order):
            return {v: domain[v].bit_length() - 1 for v in part}
        patience *= 2


def _masks(allowed: np.ndarray) -> list[int]:
    return [sum(1 << int(b) for b in np.flatnonzero(row)) for row in allowed]
