"""Exact minimum of a cost network by variable elimination; knows no tensors.

A cost network has variables with a few values each, a cost per value and a cost per pair of values
of neighbouring variables; infinity forbids. The minimum over all assignments is found in three
stages:

1. *Reduce* until nothing changes: drop values without support (arc consistency) and values that
   another is never worse than (dominance), fold variables with at most two neighbours into them.
2. *Eliminate* what is left, component by component: bucket elimination (Dechter 1999) along the
   best of several greedy orders.
3. Where a table would be too large, *bound* (``bounds.py``): TRW-S and mini-buckets (Dechter and
   Rish 2003) give a lower bound, repeated elimination of all but a cutset (Bidyuk and Dechter 2004)
   an upper bound. Values that cost more than the upper bound are dropped, and the component returns
   to stage 1. A component that stays too large is returned with its gap.

The result is deterministic: no clock, no hash order; among equal costs the lower index wins. Effort
is limited in rounds and table entries.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ftp.dataclass import dataclass
from ftp.planning.solver.bounds import PairTables, Sweeps, Unary, feasible
from ftp.planning.solver.order import Order, best_order, elimination_order, table_size
from ftp.planning.solver.reduce import Infeasible, Network

MAX_TABLE = 4_000_000  # entries of a table, of 32 MB: eliminating it takes less time than bounds
SEARCH_WORK = 200_000_000  # table entries in all that one elimination for bounds may form
ROUNDS = 8  # of bounds, for a component that is too wide
SWEEPS = 60  # of TRW-S in a round
CUTSETS = 6  # tried in a round
ROUNDING = 1e-9  # relative; a gap below it counts as none


@dataclass(frozen=True)
class Solution:
    """The assignment found: ``choice[i]`` is the index of variable i's value, ``largest_table``
    the entries of the largest table formed.
    """

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
    max_table: int = MAX_TABLE,
) -> Solution:
    """The cheapest assignment of a network with ``domains[i]`` values for variable i.

    Args:
        unary: per variable its values' costs, shape (domains[i],).
        pairs: costs of shape (domains[i], domains[j]) for i < j; infinity forbids.
        max_table: most entries of a table; if a larger one is needed, the result may have
            ``bound < cost``.

    >>> unary = [np.array([0.0, 1.0]), np.array([0.0, 0.5])]
    >>> solution = minimize([2, 2], unary, {(0, 1): np.array([[np.inf, 3.0], [0.0, 0.0]])})
    >>> solution.choice, solution.cost, solution.optimal
    ([1, 0], 1.0, True)

    Raises ``Infeasible`` if every assignment costs infinity.
    """
    net = Network(domains, unary, pairs, max_table)
    net.reduce()
    choice: dict[int, int] = {}
    gap = 0.0
    todo = [(part, ROUNDS, _Known({}, {})) for part in reversed(net.components(net.tables))]
    while todo:
        part, rounds, known = todo.pop()
        plan = best_order(net, part)
        if plan is not None:
            value, at, largest = _eliminate(plan.order, net.unary, net.tables)
            if value == math.inf:
                raise Infeasible(part[0])
            net.largest = max(net.largest, largest)
            choice.update(net.original(at))
            continue
        rounds, left, known = _tighten(net, part, rounds, known)
        if rounds:
            todo += [
                (sub, rounds, known)
                for sub in reversed(net.components(v for v in part if v in net.tables))
            ]
        else:
            gap += left
            choice.update(known.choice)
    for fold in reversed(net.folds):
        at = tuple(int(values.searchsorted(choice[u])) for u, values in fold.scope)
        choice[fold.variable] = int(fold.best[at])
    result = [choice[v] for v in range(len(domains))]
    cost = math.fsum(
        [u[x] for u, x in zip(unary, result, strict=True)]
        + [t[result[i], result[j]] for (i, j), t in pairs.items()]
    )
    return Solution(result, cost, cost - gap, gap == 0.0, net.largest)


def min_marginals(
    domains: Sequence[int],
    unary: Sequence[np.ndarray],
    pairs: Mapping[tuple[int, int], np.ndarray],
    variable: int,
    *,
    values: Sequence[int] | None = None,
    max_table: int = MAX_TABLE,
) -> list[Solution | None]:
    """The cheapest assignment for each value of the variable, or for each of ``values``; None where
    there is none.

    >>> unary = [np.array([0.0, 1.0]), np.array([0.0, 0.5])]
    >>> network = [2, 2], unary, {(0, 1): np.array([[np.inf, 3.0], [0.0, 0.0]])}
    >>> [solution.cost for solution in min_marginals(*network, 0) if solution]
    [3.5, 1.0]
    """
    found: list[Solution | None] = []
    for value in range(domains[variable]) if values is None else values:
        fixed = np.full(domains[variable], np.inf)
        fixed[value] = unary[variable][value]
        try:
            found.append(
                minimize(
                    domains,
                    [*unary[:variable], fixed, *unary[variable + 1 :]],
                    pairs,
                    max_table=max_table,
                )
            )
        except Infeasible:
            found.append(None)
    return found


# Variables, in the order of elimination, and a table over them.
_Factor = tuple[tuple[int, ...], np.ndarray]


def _eliminate(
    order: list[int], unary: Unary, tables: PairTables, limit: float = math.inf
) -> tuple[float, dict[int, int], int]:
    """Minimize over the variables of the order: the minimum, the minimizing positions among their
    values, and the entries of the largest table.

    If a table would exceed the limit, the tables of a variable are minimised in groups
    (mini-buckets): the minimum is then a lower bound, the assignment a guess.
    """
    place = {v: n for n, v in enumerate(order)}
    buckets: dict[int, list[_Factor]] = {v: [((v,), unary[v])] for v in order}
    for v in order:
        buckets[v] += [
            ((v, u), table) for u, table in tables[v].items() if place.get(u, -1) > place[v]
        ]
    steps: list[tuple[int, list[_Factor], bool]] = []
    minimum, largest = 0.0, 0
    for v in order:
        groups: list[tuple[set[int], list[_Factor]]] = []
        for us, table in sorted(buckets.pop(v), key=lambda factor: -factor[1].size):
            for scope, factors in groups:
                is_exact = limit == math.inf
                if is_exact or math.prod(len(unary[u]) for u in scope.union(us)) <= limit:
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
    """The best assignment of a component so far, by original values, and the messages of the last
    sweeps.
    """

    choice: dict[int, int]
    # Per pair: the receiver's values when the message was sent, and the message.
    messages: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]


def _tighten(
    net: Network, part: list[int], rounds: int, known: _Known
) -> tuple[int, float, _Known]:
    """Compute bounds for a component too wide to eliminate, until values are dropped or a round
    gains little. Returns the rounds left (0 if little was gained), the gap, and the best known.
    """
    at: dict[int, int] = {}
    if known.choice:
        at = {v: int(np.searchsorted(net.values[v], known.choice[v])) for v in part}
    sweeps = _resumed_sweeps(net, part, known)
    limit = min(net.max_table, max(20_000, SEARCH_WORK // len(part)))
    fixed = dict.fromkeys(part, 0)
    lower, gap = -math.inf, math.inf
    while True:
        for _ in range(SWEEPS):
            sweeps.sweep()
        for turn in range(CUTSETS):
            plan = elimination_order(net, part, table_size, limit, fixed)
            assert plan is not None
            if turn == 0:
                bound, at = _bounded(net, part, plan, sweeps, limit, at)
                lower = max(lower, bound)
            _improve(net, plan, at)
            for v in plan.cutset:
                fixed[v] += 1
        upper = _cost(net, part, at)
        before, gap = gap, max(upper - lower, 0.0)
        rounding = ROUNDING * (abs(upper) + abs(lower))
        rounds -= 1 if gap < 0.98 * before else 2  # a round that gains little counts twice
        messages = sweeps.messages()
        known = _Known(
            net.original(at),
            {(v, u): (net.values[u], m.copy()) for (v, u), m in messages.items()},
        )
        if gap <= rounding:
            return 0, 0.0, known
        if rounds <= 0:
            return 0, gap, known
        if _drop_values(net, part, sweeps, upper + rounding, known):
            return rounds, gap, known


def _resumed_sweeps(net: Network, part: list[int], known: _Known) -> Sweeps:
    """Sweeps that start from the messages known before values were dropped."""
    edges = [(v, u) for v in part for u in net.tables[v] if (v, u) in known.messages]
    messages = {}
    for v, u in edges:
        values, message = known.messages[v, u]
        messages[v, u] = message[np.searchsorted(values, net.values[u])]
    return Sweeps(net.unary, net.tables, part, messages)


def _bounded(
    net: Network, part: list[int], plan: Order, sweeps: Sweeps, limit: int, at: dict[int, int]
) -> tuple[float, dict[int, int]]:
    """A lower bound of a component's cost by mini-buckets, and the better of ``at`` and the
    assignment that they guess.
    """
    unary, tables = sweeps.shares()
    value, guess, largest = _eliminate(plan.order + plan.cutset, unary, tables, limit)
    net.largest = max(net.largest, largest)
    if not at:
        start = feasible(net.unary, net.tables, part, sweeps.messages())
        if isinstance(start, int):
            raise Infeasible(start)
        at = start
    best = guess if _cost(net, part, guess) < _cost(net, part, at) else at
    return max(sweeps.bound, value), best


def _drop_values(
    net: Network, part: list[int], sweeps: Sweeps, upper: float, known: _Known
) -> bool:
    """Drop the values whose lower bound exceeds ``upper``; whether any is dropped. Values that the
    network replaces are replaced in ``known`` too.
    """
    masks = [
        floor[: len(net.values[v])] <= upper for v, floor in zip(part, sweeps.floor, strict=True)
    ]
    if all(mask.all() for mask in masks):
        return False
    seen = len(net.replaced)
    for v, mask in zip(part, masks, strict=True):
        net.keep(v, mask)
    net.reduce()
    for v, old, new in net.replaced[seen:]:
        if known.choice.get(v) == old:
            known.choice[v] = new
    return True


def _cost(net: Network, part: list[int], at: Mapping[int, int]) -> float:
    pairs = [table[at[v], at[u]] for v in part for u, table in net.tables[v].items() if v < u]
    return math.fsum([net.unary[v][at[v]] for v in part] + pairs)


def _improve(net: Network, plan: Order, at: dict[int, int]) -> None:
    """Improve the assignment in place: to the best one with the same values of the cutset."""
    unary = {v: net.unary[v] for v in plan.order}
    for u in plan.cutset:
        for v, table in net.tables[u].items():
            if v in unary:
                unary[v] = unary[v] + table[at[u]]
    _, best, largest = _eliminate(plan.order, unary, net.tables)
    net.largest = max(net.largest, largest)
    at.update(best)
