"""Bounds and a feasible assignment for a cost network that is too wide to eliminate; knows no
tensors.

The network is given as ``unary[v]``, costs of shape (values of v,), and ``tables[v][u]``, costs of
shape (values of v, values of u), with ``tables[u][v]`` the transpose. It is connected and arc
consistent: unary costs are finite, and no row of a table is all infinite.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ftp.dataclass import dataclass

Unary = Sequence[np.ndarray] | Mapping[int, np.ndarray]
PairTables = Mapping[int, Mapping[int, np.ndarray]]
EdgeMessages = Mapping[tuple[int, int], np.ndarray]


class Sweeps:
    """Sequential tree-reweighted message passing, TRW-S (Kolmogorov 2006), over the variables in
    the given order.

    The network is read as a sum of chains, each ascending in the order. A visit of a variable makes
    the chains through it agree on the costs of its values, and sends messages to later variables.
    Variables that send each other no messages are visited together.

    - ``bound``: the sum of the chains' minima, which a pass never lowers.
    - ``slack[n, a]``: the extra cost of value a of the n-th variable in the chains through it, at
      its last visit.
    - ``floor[n, a]``: a lower bound on every assignment with that value: at a visit the chains
      through the variable cost their minima plus the slack, and all minima add up to at least their
      sum after the pass before.
    """

    def __init__(self, unary: Unary, tables: PairTables, order: Sequence[int], warm: EdgeMessages):
        self.order, self._tables = list(order), tables
        self._place = {v: n for n, v in enumerate(order)}
        shape = len(self.order), max(len(unary[v]) for v in order)
        self._unary, self.slack, self.floor = (
            np.full(shape, np.inf),
            np.full(shape, np.inf),
            np.full(shape, -np.inf),
        )
        self.bound = -math.inf
        level = [0] * len(self.order)
        for n, v in enumerate(order):
            self._unary[n, : len(unary[v])] = unary[v]
            for u in tables[v]:
                if self._place[u] > n:
                    level[self._place[u]] = max(level[self._place[u]], level[n] + 1)
        self._row = {edge: row for row, edge in enumerate((v, u) for v in order for u in tables[v])}
        self._messages = np.zeros((len(self._row), shape[1]))
        for edge, message in warm.items():
            if edge in self._row:
                self._messages[self._row[edge], : len(message)] = message
        groups: list[list[int]] = [[] for _ in range(max(level) + 1)]
        for n, v in enumerate(order):
            groups[level[n]].append(v)
        self._passes = [self._visits(groups, 1), self._visits(groups[::-1], -1)]

    def sweep(self) -> None:
        """One pass up the order and one down."""
        for visits in self._passes:
            bound = 0.0
            for visit in visits:
                belief = self._unary[visit.nodes] + np.add.reduceat(
                    self._messages[visit.received], visit.starts, axis=0
                )
                low = belief.min(axis=1, keepdims=True)
                bound += float(low.sum())
                self.slack[visit.nodes] = belief = belief - low
                if len(visit.sent):
                    _, rows, columns = visit.tables.shape
                    rest = belief[visit.source] * visit.share - self._messages[visit.opposite]
                    message = (rest[:, :rows, None] + visit.tables).min(axis=1)
                    low = message.min(axis=1, keepdims=True)
                    bound += float(low.sum())
                    self._messages[visit.sent, :columns] = message - low
            if self.bound > -math.inf:
                self.floor = np.maximum(self.floor, self.bound + self.slack)
            self.bound = max(self.bound, bound)

    def messages(self) -> dict[tuple[int, int], np.ndarray]:
        """Per (sender, receiver), over the receiver's values."""
        return {
            (v, u): self._messages[row, : self._tables[v][u].shape[1]]
            for (v, u), row in self._row.items()
        }

    def shares(self) -> tuple[dict[int, np.ndarray], dict[int, dict[int, np.ndarray]]]:
        """An equivalent network whose tables have the costs of the last downward pass: their minima
        add up to the bound.
        """
        unary: dict[int, np.ndarray] = {}
        tables: dict[int, dict[int, np.ndarray]] = {v: {} for v in self.order}
        messages = self.messages()
        for n, v in enumerate(self.order):
            belief = self._unary[n, : next(iter(self._tables[v].values())).shape[0]] + sum(
                messages[u, v] for u in self._tables[v]
            )
            below = [u for u in self._tables[v] if self._place[u] < n]
            share = belief / max(len(below), len(self._tables[v]) - len(below))
            unary[v] = belief - share * len(below)
            for u in below:
                tables[v][u] = (
                    self._tables[v][u] + (share - messages[u, v])[:, None] - messages[v, u]
                )
                tables[u][v] = tables[v][u].T
        return unary, tables

    def _visits(self, groups: list[list[int]], sign: int) -> list["_Visit"]:
        visits = []
        for group in groups:
            degree = np.array([len(self._tables[v]) for v in group])
            edges = [(n, v, u) for n, v in enumerate(group) for u in self._tables[v]]
            ahead = [(n, v, u) for n, v, u in edges if (self._place[u] - self._place[v]) * sign > 0]
            source = np.array([n for n, _, _ in ahead], dtype=int)
            leaving = np.bincount(source, minlength=len(group))
            chains = np.maximum(leaving, degree - leaving)
            own = [self._tables[v][u] for _, v, u in ahead]
            tables = np.zeros(
                (
                    len(own),
                    max((t.shape[0] for t in own), default=0),
                    max((t.shape[1] for t in own), default=0),
                )
            )
            for padded, table in zip(tables, own, strict=True):
                padded[:] = table.max(
                    initial=-np.inf, where=table < np.inf
                )  # never below a row's minimum
                padded[: table.shape[0], : table.shape[1]] = table
            visits.append(
                _Visit(
                    nodes=np.array([self._place[v] for v in group]),
                    received=np.array([self._row[u, v] for _, v, u in edges]),
                    starts=np.cumsum(degree) - degree,
                    source=source,
                    share=1.0 / chains[source][:, None],
                    sent=np.array([self._row[v, u] for _, v, u in ahead], dtype=int),
                    opposite=np.array([self._row[u, v] for _, v, u in ahead], dtype=int),
                    tables=tables,
                )
            )
        return visits


@dataclass(frozen=True)
class _Visit:
    """Variables that are visited together: the rows of the messages that each receives (a
    variable's rows begin at its ``starts``), and the inputs of each message that they send.
    """

    nodes: np.ndarray
    received: np.ndarray
    starts: np.ndarray
    source: np.ndarray  # position in nodes
    share: np.ndarray  # of the sender's belief that belongs to one chain
    sent: np.ndarray
    opposite: np.ndarray
    tables: np.ndarray


def feasible(
    unary: Unary, tables: PairTables, order: Sequence[int], messages: EdgeMessages
) -> dict[int, int] | int:
    """Find an assignment of finite cost, as positions; if there is none, return a variable that has
    no value left.

    Depth-first search that keeps arcs consistent and tries first the value that is cheapest by the
    choices so far and the messages of open variables. Each restart puts the variables that lost all
    values first and doubles the limit of steps, so the search ends.
    """
    masks = {
        (v, u): [sum(1 << int(b) for b in np.flatnonzero(row)) for row in tables[v][u] < np.inf]
        for v in order
        for u in tables[v]
    }
    failures_at = dict.fromkeys(order, 0)
    patience = 100 + len(order)
    while True:
        ranked = sorted(order, key=lambda v: -failures_at[v])
        domain = {v: (1 << len(unary[v])) - 1 for v in order}
        trail: list[tuple[int, int]] = []
        decisions: list[tuple[int, int]] = []  # length of the trail before, value
        failures = 0
        while len(decisions) < len(ranked) and failures < patience:
            v = ranked[len(decisions)]
            cost = unary[v].copy()
            for u, table in tables[v].items():
                decided = domain[u] & (domain[u] - 1) == 0
                cost += table[:, domain[u].bit_length() - 1] if decided else messages[u, v]
            value = min((a for a in range(len(cost)) if domain[v] >> a & 1), key=cost.__getitem__)
            decisions.append((len(trail), value))
            empty = _restrict(v, 1 << value, domain, masks, tables, trail)
            while empty is not None:
                failures += 1
                failures_at[empty] += 1
                if not decisions:
                    return empty
                length, value = decisions.pop()
                while len(trail) > length:
                    u, domain[u] = trail.pop()
                v = ranked[len(decisions)]
                empty = _restrict(v, domain[v] & ~(1 << value), domain, masks, tables, trail)
        if len(decisions) == len(ranked):
            return {v: domain[v].bit_length() - 1 for v in order}
        patience *= 2


def _restrict(
    v: int,
    mask: int,
    domain: dict[int, int],
    masks: Mapping[tuple[int, int], list[int]],
    tables: PairTables,
    trail: list[tuple[int, int]],
) -> int | None:
    """Restrict variable v to the values of the mask, and the others to what is consistent with it.
    Return the variable that lost all its values, if any.
    """
    trail.append((v, domain[v]))
    domain[v] = mask
    stack = [v] if mask else []
    while stack:
        u = stack.pop()
        for w in tables[u]:
            left = sum(
                1 << a
                for a, allowed in enumerate(masks[w, u])
                if domain[w] >> a & 1 and allowed & domain[u]
            )
            if left != domain[w]:
                trail.append((w, domain[w]))
                domain[w] = left
                if not left:
                    return w
                stack.append(w)
    return None if mask else v
