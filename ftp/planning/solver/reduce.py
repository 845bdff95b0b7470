"""Cost networks, and their reduction by arc consistency, dominance and folded variables."""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ftp.dataclass import dataclass


class Infeasible(Exception):
    """No assignment has a finite cost; ``variable`` has no value left."""

    def __init__(self, variable: int):
        super().__init__(
            f"no assignment has a finite cost: variable {variable} is left without a value"
        )
        self.variable = variable


@dataclass(frozen=True)
class _Fold:
    """A folded variable: its best value for each choice of its neighbours, by positions among their
    values at the time.
    """

    variable: int
    scope: tuple[tuple[int, np.ndarray], ...]
    best: np.ndarray


# Networks of repeated layers, and of a search, repeat variables with their tables: a variable's
# reductions are cached by the content of its tables, if these have at most ``SMALL`` costs.
KNOWN = 8192
SMALL = 512


class Network:
    """A network that is reduced in place, and how to undo each step. Tables are never written to.

    ``tables[v][u]`` has shape (values of v, values of u), ``tables[u][v]`` is its transpose; a
    folded variable is not in ``tables``. ``values[v]`` are the original indices of the values left,
    ascending.
    """

    def __init__(
        self,
        domains: Sequence[int],
        unary: Sequence[np.ndarray],
        pairs: Mapping[tuple[int, int], np.ndarray],
        max_table: int,
    ):
        self.max_table = max_table
        self.largest = 0
        self.unary = [np.asarray(u, dtype=np.float64) for u in unary]
        self.values = [np.arange(n) for n in domains]
        self.tables: dict[int, dict[int, np.ndarray]] = {v: {} for v in range(len(domains))}
        are_costs = _are_costs([*self.unary, *pairs.values()])
        for v, n in enumerate(domains):
            if self.unary[v].shape != (n,) or not (are_costs or _are_costs([self.unary[v]])):
                raise ValueError(
                    f"unary[{v}] needs shape {(n,)} without NaN or -inf, is {self.unary[v]}"
                )
        for (i, j), table in pairs.items():
            table = np.asarray(table, dtype=np.float64)
            is_of_both = i < j and table.shape == (domains[i], domains[j])
            if not is_of_both or not (are_costs or _are_costs([table])):
                raise ValueError(
                    f"pairs[{i}, {j}] needs i < j and shape {(domains[i], domains[j])} without NaN"
                    f" or -inf, is {table}"
                )
            self.tables[i][j], self.tables[j][i] = table, table.T
        self.folds: list[_Fold] = []
        # (variable, value, the value that is never worse)
        self.replaced: list[tuple[int, int, int]] = []
        self._queue: list[int] = []  # degree * variables + variable
        self._queued = [False] * len(domains)
        for v in self.tables:
            self._touch(v)

    def reduce(self) -> None:
        """Arc consistency, dominance and folding until nothing changes; fewest neighbours first,
        so that a hub waits for its spokes.
        """
        while self._queue:
            v = heapq.heappop(self._queue) % len(self._queued)
            self._queued[v] = False
            if v in self.tables:
                self._prune(v)
                near = self.tables[v]
                if (
                    len(near) <= 2
                    and math.prod(len(self.values[u]) for u in near) * len(self.values[v])
                    <= self.max_table
                ):
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
            heapq.heappush(self._queue, len(self.tables[v]) * len(self._queued) + v)

    def _join(self, v: int, u: int, table: np.ndarray | None) -> None:
        if table is None:
            del self.tables[v][u], self.tables[u][v]
        else:
            self.tables[v][u], self.tables[u][v] = table, table.T
        self._touch(u)

    def _prune(self, v: int) -> None:
        if len(self.unary[v]) == 1 and self.unary[v][0] < np.inf:
            self._inline(v)
            return
        near = list(self.tables[v])
        found = _of_content(_pruned, self.unary[v], [self.tables[v][u] for u in near])
        for u, split in zip(near, found.splits, strict=True):
            if split is not None:
                self.unary[u] = self.unary[u] + split
                self._join(v, u, None)
        self.unary[v] = found.unary
        if found.replaced:
            values = self.values[v].tolist()
            self.replaced += [(v, values[a], values[b]) for a, b in found.replaced]
        if found.mask is not None:
            self.keep(v, found.mask)  # which queues v again

    def _inline(self, v: int) -> None:
        """Add the only value's costs to the neighbours'."""
        for u, table in list(self.tables[v].items()):
            self.unary[u] = self.unary[u] + table[0]
            self._join(v, u, None)

    def _fold(self, v: int) -> None:
        near = tuple(self.tables[v])
        tables = [self.tables[v][u] for u in near]
        best, message, size = _of_content(_minimum, self.unary[v], tables)
        self.largest = max(self.largest, size)
        self.folds.append(_Fold(v, tuple((u, self.values[u]) for u in near), self.values[v][best]))
        for u in near:
            self._join(v, u, None)
        del self.tables[v]
        if len(near) == 1:
            self.unary[near[0]] = self.unary[near[0]] + message
        elif len(near) == 2:
            present = self.tables[near[0]].get(near[1])
            self._join(near[0], near[1], message if present is None else present + message)


def _are_costs(tables: Sequence[np.ndarray]) -> bool:
    """Whether no element is NaN or -inf."""
    return bool((np.concatenate([t.reshape(-1) for t in tables]) > -np.inf).all())


def _of_content(find: Any, unary: np.ndarray, tables: Sequence[np.ndarray]) -> Any:
    """``find`` of a variable's costs and tables, as bytes; cached if they are small."""
    data = [table.tobytes() for table in tables]
    if sum(map(len, data)) > unary.itemsize * SMALL:
        find = find.__wrapped__
    return find(unary.tobytes(), *data)


@dataclass(frozen=True)
class _Pruned:
    """A variable after arc consistency and dominance.

    Attributes:
        unary: its costs, with those of tables that are f(row) + g(column).
        splits: per table, g if it is such a table.
        mask: the values left; None if none is dropped.
        replaced: per value dropped by dominance, its position and that of a value never worse.
    """

    unary: np.ndarray
    splits: list[np.ndarray | None]
    mask: np.ndarray | None
    replaced: list[tuple[int, int]]


@lru_cache(maxsize=KNOWN)
def _pruned(unary: bytes, *tables: bytes) -> _Pruned:
    cost = np.frombuffer(unary)
    n = len(cost)
    worse = np.zeros((n, n))
    mask = np.ones(n, dtype=bool)
    splits: list[np.ndarray | None] = []
    for data in tables:
        facts = _facts(data, n)
        splits.append(None if facts.split is None else facts.split[1])
        if facts.split is not None:
            cost = cost + facts.split[0]
        elif facts.dead is not None:
            mask &= ~facts.dead
        else:
            worse += facts.worse
    mask &= cost < np.inf
    if n == 1 or not mask.all():
        return _Pruned(cost, splits, None if mask.all() else mask, [])
    worse += cost - cost[:, None]
    covers = worse <= 0  # [a, b]: b is never worse than a; for a == b it is true
    if np.count_nonzero(covers) == n:
        return _Pruned(cost, splits, None, [])
    alive = np.ones(n, dtype=bool)
    replaced = []
    for a in reversed(range(n)):
        better = [
            b for b in np.flatnonzero(covers[a] & alive) if b < a or (b > a and not covers[b, a])
        ]
        if better:
            alive[a] = False
            replaced.append((a, int(better[0])))
    return _Pruned(cost, splits, None if alive.all() else alive, replaced)


@lru_cache(maxsize=KNOWN)
def _minimum(unary: bytes, *tables: bytes) -> tuple[np.ndarray, np.ndarray, int]:
    """Minimize over a variable with at most two tables: its best value for each choice of its
    neighbours, the minimum, and the entries of the joint table.
    """
    joint = np.frombuffer(unary).reshape(-1, *[1] * len(tables))
    for axis, data in enumerate(tables):
        joint = joint + np.frombuffer(data).reshape(
            len(joint), *[-1 if axis == a else 1 for a in range(len(tables))]
        )
    return joint.argmin(0), joint.min(0), joint.size


@dataclass(frozen=True)
class _Facts:
    """Facts about one table. ``split``: f and g if the table is f(row) + g(column). ``dead``: the
    rows that are infinite. ``worse[a, b]``: the most by which row b exceeds row a.
    """

    split: tuple[np.ndarray, np.ndarray] | None
    dead: np.ndarray | None
    worse: np.ndarray


@lru_cache(maxsize=KNOWN)
def _facts(data: bytes, rows: int) -> _Facts:
    table = np.frombuffer(data).reshape(rows, -1)
    if rows == 1 or table.shape[1] == 1:
        f, g = (np.zeros(1), table[0]) if rows == 1 else (table[:, 0], np.zeros(1))
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
