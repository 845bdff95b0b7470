"""Exact minimum of a cost network by variable elimination; knows no tensors.

A cost network has variables with a few values each, a cost per value and a cost per pair of values of neighbouring variables;
infinity forbids. The minimum over all assignments is found in three stages:

1. *Reduce* until nothing changes: drop values without support (arc consistency) and values than which another is never worse
   (dominance), fold variables with at most two neighbours into those.
2. *Eliminate* what is left, component by component: bucket elimination (Dechter 1999) along the best of several greedy orders.
3. Where a table would be too large, *bound* (``bounds.py``): TRW-S and mini-buckets (Dechter and Rish 2003) give a lower bound, repeated
   elimination of all but a cutset (Bidyuk and Dechter 2004) an upper one. Values that cost more than the upper bound go, and the
   component returns to stage 1. What resists is left with its gap.

Everything is deterministic: no clock, no hash order, ties keep the lower index. Effort is counted in rounds and table entries.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ftp.bounds import Sweeps, Tables, Unary, feasible

EXACT_WORK = 400  # times max_table: entries that an exact elimination may form in all
SEARCH_WORK = 200_000_000  # entries that one elimination for bounds may form in all
ROUNDS = 8  # of bounds, for a component that is too wide
SWEEPS = 60  # of TRW-S in a round
CUTSETS = 6  # tried in a round
ROUNDING = 1e-9  # relative; a gap below it counts as none


class Infeasible(Exception):
    """No assignment has a finite cost; ``variable`` is one that is left without a value."""

    def __init__(self, variable: int):
        super().__init__(f"no assignment has a finite cost: variable {variable} is left without a value")
        self.variable = variable


@dataclass(frozen=True)
class Solution:
    """The assignment found: ``choice[i]`` is the index of variable i's value, ``largest_table`` the entries of the largest table formed."""

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

    Raises ``Infeasible`` if every assignment costs infinity.
    """
    net = _Network(domains, unary, pairs, max_table)
    net.reduce()
    choice: dict[int, int] = {}
    gap = 0.0
    todo = [(part, ROUNDS, _Known({}, {})) for part in reversed(net.components(net.tables))]
    while todo:
        part, rounds, known = todo.pop()
        plan = _best_order(net, part)
        if plan is not None:
            value, at, largest = _eliminate(plan.order, net.unary, net.tables)
            if value == math.inf:
                raise Infeasible(part[0])
            net.largest = max(net.largest, largest)
            choice.update(net.original(at))
            continue
        rounds, left, known = _tighten(net, part, rounds, known)
        if rounds:
            todo += [(sub, rounds, known) for sub in reversed(net.components(v for v in part if v in net.tables))]
        else:
            gap += left
            choice.update(known.choice)
    for fold in reversed(net.folds):
        at = tuple(int(np.searchsorted(values, choice[u])) for u, values in fold.scope)
        choice[fold.variable] = int(fold.best[at])
    result = [choice[v] for v in range(len(domains))]
    cost = math.fsum([u[x] for u, x in zip(unary, result, strict=True)] + [t[result[i], result[j]] for (i, j), t in pairs.items()])
    return Solution(result, cost, cost - gap, gap == 0.0, net.largest)


def min_marginals(
    domains: Sequence[int],
    unary: Sequence[np.ndarray],
    pairs: Mapping[tuple[int, int], np.ndarray],
    variable: int,
    *,
    max_table: int = 1_000_000,
) -> list[Solution | None]:
    """Per value of the variable the cheapest assignment with that value, None where there is none: what any other choice would cost.

    >>> network = [2, 2], [np.array([0.0, 1.0]), np.array([0.0, 0.5])], {(0, 1): np.array([[np.inf, 3.0], [0.0, 0.0]])}
    >>> [solution.cost for solution in min_marginals(*network, 0) if solution]
    [3.5, 1.0]
    """
    found: list[Solution | None] = []
    for value in range(domains[variable]):
        fixed = np.full(domains[variable], np.inf)
        fixed[value] = unary[variable][value]
        try:
            found.append(minimize(domains, [*unary[:variable], fixed, *unary[variable + 1 :]], pairs, max_table=max_table))
        except Infeasible:
            found.append(None)
    return found


@dataclass(frozen=True)
class _Fold:
    """A variable's best value, by the positions of its neighbours' choices among the values that they had then."""

    variable: int
    scope: tuple[tuple[int, np.ndarray], ...]
    best: np.ndarray


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
        self.folds: list[_Fold] = []
        self.replaced: list[tuple[int, int, int]] = []  # (variable, value, the value that is never worse)
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

    def original(self, at: Mapping[int, int]) -> dict[int, int]:
        """Indices of values from positions among those left."""
        return {v: int(self.values[v][a]) for v, a in at.items()}

    def components(self, variables: Iterable[int]) -> list[list[int]]:
        """The connected components of the variables, each breadth first."""
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
            self.keep(v, mask)  # which queues v again
            return
        worse += cost - cost[:, None]
        covers = worse <= 0  # [a, b]: b is never worse than a; for a == b it is true
        if np.count_nonzero(covers) == len(cost):
            return
        alive = np.ones(len(cost), dtype=bool)
        for a in reversed(range(len(cost))):
            better = [b for b in np.flatnonzero(covers[a] & alive) if b < a or (b > a and not covers[b, a])]
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
        self.folds.append(_Fold(v, tuple((u, self.values[u]) for u in near), self.values[v][joint.argmin(0)]))
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
    """Of one table: f and g if it is f(row) + g(column); the rows that are infinite; at [a, b], by how much row b can be worse than a."""

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
        return _Facts(None, None, np.fmax.reduce(table - table[:, None], axis=2))


@dataclass(frozen=True)
class _Order:
    """An elimination order, the cutset of variables to fix beforehand, and the entries of the largest and of all tables."""

    order: list[int]
    cutset: list[int]
    largest: int
    work: int


_Near = dict[int, set[int]]


def _fill(near: _Near, size: Mapping[int, int], v: int) -> tuple[float, ...]:
    ns = sorted(near[v])
    if len(ns) > 24:  # too wide to count, and to eliminate
        return (math.inf, len(ns))
    fill = sum(size[a] * size[b] for n, a in enumerate(ns) for b in ns[n + 1 :] if b not in near[a])
    return (fill, *_weight(near, size, v))


def _weight(near: _Near, size: Mapping[int, int], v: int) -> tuple[float, ...]:
    return (math.prod(size[u] for u in near[v]) * size[v] if len(near[v]) <= 64 else math.inf, len(near[v]))


def _best_order(net: _Network, part: list[int]) -> _Order | None:
    """The order with the smallest largest table, or None if none fits."""
    place = {v: n for n, v in enumerate(part)}
    best = None
    for score in (_fill, _weight, lambda near, size, v: (-place[v],)):  # the last against the breadth-first search, for ladders
        plan = _order(net, part, score, net.max_table)
        if plan and plan.work <= EXACT_WORK * net.max_table and (best is None or (plan.largest, plan.work) < (best.largest, best.work)):
            best = plan
        if best and best.work <= 1000 * len(part):  # to try another order costs more
            break
    return best


def _order(
    net: _Network, part: list[int], score: Callable[..., tuple[float, ...]], limit: int, fixed: dict[int, int] | None = None
) -> _Order | None:
    """A greedy order by lowest score. Where a table would pass the limit: None, or a variable joins the cutset, least ``fixed`` first."""
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
        entries = size[v] * math.prod(size[u] for u in near[v])
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
    return _Order(order, cutset, largest, work)


_Factor = tuple[tuple[int, ...], np.ndarray]  # variables by their place in the order, and a table over them


def _eliminate(order: list[int], unary: Unary, tables: Tables, limit: float = math.inf) -> tuple[float, dict[int, int], int]:
    """The minimum over the variables of the order, where it is (positions among their values), and the entries of the largest table.

    Where a table would pass the limit, the tables of a variable are minimised in groups (mini-buckets): the number is then a lower bound,
    the assignment a guess.
    """
    place = {v: n for n, v in enumerate(order)}
    buckets: dict[int, list[_Factor]] = {v: [((v,), unary[v])] for v in order}
    for v in order:
        buckets[v] += [((v, u), table) for u, table in tables[v].items() if place.get(u, -1) > place[v]]
    steps: list[tuple[int, list[_Factor], bool]] = []
    minimum, largest = 0.0, 0
    for v in order:
        groups: list[tuple[set[int], list[_Factor]]] = []
        for us, table in sorted(buckets.pop(v), key=lambda factor: -factor[1].size):
            for scope, factors in groups:
                if math.prod(len(unary[u]) for u in scope.union(us)) <= limit:
                    scope.update(us)
                    factors.append((us, table))
                    break
            else:
                groups.append((set(us), [(us, table)]))
        for scope, factors in groups:
            us = tuple(sorted(scope, key=place.__getitem__))
            joint = np.zeros(1)
            for own, table in reversed(factors):
                joint = joint + table.reshape([len(unary[u]) if u in own else 1 for u in us])
            largest = max(largest, joint.size)
            if len(us) > 1:
                buckets[us[1]].append((us[1:], joint.min(0)))
            else:
                minimum += float(joint.min())
            if len(groups) == 1:
                factors = [(us, joint.argmin(0).astype(np.min_scalar_type(len(joint))))]
            steps.append((v, factors, len(groups) == 1))
    at: dict[int, int] = {}
    guess: dict[int, np.ndarray] = {}
    for v, factors, exact in reversed(steps):
        found = [table[(..., *(at[u] for u in us[1:]))] for us, table in factors]
        if exact:
            at[v] = int(found[0])
        else:
            guess[v] = sum(found, start=guess.get(v, np.zeros(len(unary[v]))))
            at[v] = int(guess[v].argmin())
    return minimum, at, largest


@dataclass(frozen=True)
class _Known:
    """Of a component, by original value: the best assignment so far and the messages of the last sweeps."""

    choice: dict[int, int]
    messages: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]  # the receiver's values then, and the message


def _tighten(net: _Network, part: list[int], rounds: int, known: _Known) -> tuple[int, float, _Known]:
    """Bounds for a component too wide to eliminate, until values are dropped or little is gained: rounds left (then 0), gap, best."""
    at = {v: int(np.searchsorted(net.values[v], known.choice[v])) for v in part} if known.choice else {}
    warm = {(v, u): known.messages[v, u] for v in part for u in net.tables[v] if (v, u) in known.messages}
    sweeps = Sweeps(net.unary, net.tables, part, {e: m[np.searchsorted(values, net.values[e[1]])] for e, (values, m) in warm.items()})
    limit = min(net.max_table, max(20_000, SEARCH_WORK // len(part)))
    fixed = dict.fromkeys(part, 0)
    lower, gap = -math.inf, math.inf
    while True:
        for _ in range(SWEEPS):
            sweeps.sweep()
        for turn in range(CUTSETS):
            plan = _order(net, part, _weight, limit, fixed)
            assert plan is not None
            if turn == 0:
                unary, tables = sweeps.shares()
                value, guess, largest = _eliminate(plan.order + plan.cutset, unary, tables, limit)
                net.largest = max(net.largest, largest)
                lower = max(lower, sweeps.bound, value)
                if not at:
                    start = feasible(net.unary, net.tables, part, sweeps.messages())
                    if isinstance(start, int):
                        raise Infeasible(start)
                    at = start
                if _cost(net, part, guess) < _cost(net, part, at):
                    at = guess
            _improve(net, plan, at)
            for v in plan.cutset:
                fixed[v] += 1
        upper = _cost(net, part, at)
        before, gap = gap, max(upper - lower, 0.0)
        rounding = ROUNDING * (abs(upper) + abs(lower))
        rounds -= 1 if gap < 0.98 * before else 2  # a round that gains little counts twice
        known = _Known(net.original(at), {(v, u): (net.values[u], m.copy()) for (v, u), m in sweeps.messages().items()})
        if gap <= rounding:
            return 0, 0.0, known
        if rounds <= 0:
            return 0, gap, known
        masks = [floor[: len(net.values[v])] <= upper + rounding for v, floor in zip(part, sweeps.floor, strict=True)]
        if not all(mask.all() for mask in masks):
            seen = len(net.replaced)
            for v, mask in zip(part, masks, strict=True):
                net.keep(v, mask)
            net.reduce()
            for v, old, new in net.replaced[seen:]:
                if known.choice.get(v) == old:
                    known.choice[v] = new
            return rounds, gap, known


def _cost(net: _Network, part: list[int], at: Mapping[int, int]) -> float:
    pairs = [table[at[v], at[u]] for v in part for u, table in net.tables[v].items() if v < u]
    return math.fsum([net.unary[v][at[v]] for v in part] + pairs)


def _improve(net: _Network, plan: _Order, at: dict[int, int]) -> None:
    """Improves the assignment in place: the best with the cutset as it is."""
    unary = {v: net.unary[v] for v in plan.order}
    for u in plan.cutset:
        for v, table in net.tables[u].items():
            if v in unary:
                unary[v] = unary[v] + table[at[u]]
    _, best, largest = _eliminate(plan.order, unary, net.tables)
    net.largest = max(net.largest, largest)
    at.update(best)
