"""One mesh axis' choices as a cost network: a strategy per op, a set of copies per value, moves and
rules of conduct as prices.

One variable per op (its strategy; all its results follow) and one per value (what its users find:
its home layout, a gathered, reduced or re-cut copy). The pair (op, value) prices the moves, once
for all users; the pair (value, user) is 0 or forbidden.
"""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from ftp.planning.cost import collective_seconds, op_seconds
from ftp.planning.exemptions import exemptions
from ftp.planning.graph import BATCH, Move, Node, Value
from ftp.planning.problem import AxisPlan, NotAlike, Problem
from ftp.planning.reachable_cuts import Cut, factor_of
from ftp.planning.solver.minimize import min_marginals, minimize
from ftp.planning.solver.reduce import Infeasible
from ftp.planning.strategies import GATHERED, PASS_ON, Strategy, passes_gathered, strategies
from ftp.rules.op_kinds import VIEWS, is_product
from ftp.sharding.layout import PARTIAL, Layout, R, nominal

MOVE_OF_VIEW = 1e-10  # ties move what is not a view of it
REPLICATED_PRODUCT = 1e4  # times its time, for a product on batch data that could be cut
# The price of a shard as a term of a pending sum, beside a gather's: padding must not stand in for
# a gather.
PAD_LATENCIES = 3
TOO_NARROW = (
    2.0  # times a sum's price in the dtype to which it is widened, where it is reduced before
)
VIOLATION = 1e3  # seconds for each rule of conduct broken, where no plan keeps them all


def solve(problem: Problem) -> AxisPlan:
    """The cheapest plan that keeps the rules of conduct; where there is none, the cheapest with
    a price on each violation.
    """
    try:
        return _Network(problem, math.inf).solve()
    except Infeasible:
        plan = _Network(problem, VIOLATION).solve()
        plan.kept_rules = False
        return plan


def layout_costs(problem: Problem, value: Value) -> list[tuple[Layout, float | None]]:
    """Per layout that a value could have on the axis what the cheapest plan with it costs,
    exactly; None where there is no such plan.
    """
    for violation in (math.inf, VIOLATION):
        network = _Network(problem, violation)
        tables = network.tables()
        found = min_marginals(*tables.network, tables.of_node[value.node])
        if any(found):
            break
    costs: dict[Layout, float | None] = {}
    for strategy, solution in zip(network.options[value.node], found, strict=True):
        layout = strategy.results[value.index]
        layout = R if layout.kind == "R" else layout
        known = costs.get(layout)
        if solution is not None and (known is None or solution.cost < known):
            costs[layout] = solution.cost
        costs.setdefault(layout, None)
    return list(costs.items())


class _Tables(NamedTuple):
    """The cost network as numbers, and which of its variables stand for what."""

    network: tuple[list[int], list[np.ndarray], dict[tuple[int, int], np.ndarray]]
    of_node: dict[Node, int]
    of_value: dict[Value, int]
    entries: dict[Value, list[tuple[Layout, ...]]]


class _Network:
    def __init__(self, problem: Problem, violation: float):
        self.problem, self.violation = problem, violation
        graph = problem.graph
        self.users = graph.users()
        self.required: dict[Value, list[Layout | None]] = {}
        for value, layout in zip(graph.outputs, problem.outputs, strict=True):
            self.required.setdefault(value, []).append(layout)
        self._known: dict[tuple[Any, ...], Any] = {}
        self._sizes: dict[Value, int] = {}
        self._reduced: dict[Value, int] = {}
        self.options = self._strategies()
        self._tie()
        self._mirrored: dict[Value, list[Node]] = {}
        for place, node in problem.open.mirrors.items() if problem.open else ():
            self._mirrored.setdefault(graph.outputs[place], []).append(node)
        self.free_to_move, self.after_conflict = exemptions(problem, self.required)

    def _strategies(self) -> dict[Node, list[Strategy]]:
        """Repeated blocks share their lists, so that what is derived from a list is derived once
        (see ``_once``).
        """
        options: dict[Node, list[Strategy]] = {}
        may_pend: set[Value] = set()
        shared: dict[Any, list[Strategy]] = {}
        for node in self.problem.graph.nodes:
            cuts, pinned = self.problem.reach.cuts.get(node, ()), self.problem.pinned.get(node)
            rule = node.rule
            pending = tuple(v in may_pend for v in node.operands)
            kind = (
                node.kind,
                passes_gathered(node),
                rule.operands,
                rule.results,
                rule.linear,
                tuple(tuple(p.items()) for p in rule.pending),
            )
            if self.problem.open and node in self.problem.open.groups:
                cuts = self._open_cuts(node)
            key = (kind, tuple(node.sizes.items()), tuple(cuts), pinned, pending)
            if key not in shared:
                shared[key] = strategies(node, cuts, self.problem.n, pinned, may_pend)
            found = options[node] = shared[key]
            for index in range(len(node.results)):
                if any(s.results[index].kind == "P" for s in found):
                    may_pend.add(Value(node, index))
        return options

    def _open_cuts(self, node: Node) -> list[Cut]:
        """The cuts that all inputs of a group may have."""
        opened, n = self.problem.open, self.problem.n
        assert opened is not None
        members = [
            member for member, first in opened.groups.items() if first is opened.groups[node]
        ]
        found = []
        for layout in opened.cuts[node]:
            cut = factor_of(node.rule.results[0], node.sizes, layout, n)
            if cut is not None and all(cut in self.problem.reach.cuts.get(m, ()) for m in members):
                found.append(cut)
        return found

    def _tie(self) -> None:
        """Twins take their choices from one list."""
        self._twin_users: dict[Value, list[tuple[Node, int]]] = {}
        ties = self.problem.ties
        for node, twin in ties.twins.items() if ties else ():
            if set(self.options[node]) != set(self.options[twin]):
                raise NotAlike
            self.options[node] = self.options[twin]
            for index in range(len(node.results)):
                pair = Value(twin, index), Value(node, index)
                self._twin_users[pair[0]] = self._twin_users[pair[1]] = [
                    use for v in pair for use in self.users.get(v, ())
                ]
        for stack, first in [(stack, ties.earlier) for stack in ties.layers.stacks] if ties else ():
            pair = Value(stack, first), Value(stack, first + 1)
            self._twin_users[pair[0]] = self._twin_users[pair[1]] = [
                use for v in pair for use in self.users.get(v, ())
            ]

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = make()
        return known

    def solve(self) -> AxisPlan:
        tables = self.tables()
        solution = minimize(*tables.network)
        chosen = {
            node: self.options[node][solution.choice[i]] for node, i in tables.of_node.items()
        }
        copies = {}
        for value, i in tables.of_value.items():
            home = chosen[value.node].results[value.index]
            copies[value] = tuple(
                layout for layout in tables.entries[value][solution.choice[i]] if layout != home
            )
        return AxisPlan(self.problem.axis, self.problem.n, chosen, copies, solution)

    def tables(self) -> "_Tables":
        ties = self.problem.ties
        twins = ties.twins if ties else {}
        groups = self.problem.open.groups if self.problem.open else {}
        domains: list[int] = []
        unary: list[np.ndarray] = []
        pairs: dict[tuple[int, int], np.ndarray] = {}
        op_index: dict[Node, int] = {}  # by the earlier twin
        value_index: dict[Value, int] = {}
        entries: dict[Value, list[tuple[Layout, ...]]] = {}

        def variable(known: dict[Any, int], key: Any, costs: np.ndarray, weight: int) -> int:
            costs = costs * weight if weight != 1 else costs
            if key in known:
                unary[known[key]] = unary[known[key]] + costs
            else:
                known[key] = len(domains)
                domains.append(len(costs))
                unary.append(costs)
            return known[key]

        def between(i: int, j: int, table: np.ndarray, weight: int) -> None:
            table = table * weight if weight != 1 else table
            i, j, table = (i, j, table) if i < j else (j, i, table.T)
            pairs[i, j] = pairs[i, j] + table if (i, j) in pairs else table

        def owner_of(value: Value) -> Value:
            return ties.twin(value) if ties else value

        for node in self.problem.graph.nodes:
            mine, first = self.options[node], twins.get(node, node)
            weight = ties.weight(node) if ties else 1
            at = variable(
                op_index, groups.get(node, first), np.array(self._op_prices(node)), weight
            )
            for slot, value in enumerate(node.operands):
                theirs = entries[value]
                table = self._once(
                    (
                        "use",
                        id(mine),
                        id(theirs),
                        slot,
                        node.kind,
                        self._nbytes(value),
                        self.problem.open and self._movable(value),
                    ),
                    lambda n=node, v=value, i=slot: np.array(
                        [[self._use_price(n, s, i, e) for s in self.options[n]] for e in entries[v]]
                    ),
                )
                between(
                    value_index[owner_of(value)],
                    at,
                    table,
                    ties.weight_between(value, node) if ties else 1,
                )
            for index in range(len(node.results)):
                value = Value(node, index)
                owner, weight = owner_of(value), ties.weight_of(value) if ties else 1
                required = tuple(self.required.get(value, ()))
                users = self._twin_users.get(value) or self.users.get(value, ())
                if not users and not required:
                    continue
                mirrored = tuple(id(self.options[node]) for node in self._mirrored.get(value, ()))
                known = (
                    "entries",
                    id(mine),
                    index,
                    tuple([(id(self.options[user]), slot) for user, slot in users]),
                    required,
                    mirrored,
                )
                found = entries[value] = self._once(known, lambda v=value: self._entries(v))
                kept = self.problem.open.kept.get(value, 0.0) if self.problem.open else 0.0
                costs = self._once(
                    ("output", id(found), required, kept),
                    lambda v=value, k=kept: np.array(
                        [self._output_price(v, e) + self._kept_price(k, e) for e in entries[v]]
                    ),
                )
                mover = variable(value_index, owner, costs, weight)
                if domains[mover] != len(found):
                    raise NotAlike
                moves = (
                    "move",
                    id(mine),
                    index,
                    id(found),
                    self._nbytes(value),
                    self._reduced_nbytes(value),
                    node.target in VIEWS,
                    self._movable(value),
                )
                between(
                    at,
                    mover,
                    self._once(moves, lambda v=value: self._move_prices(v, entries[v])),
                    weight,
                )
        for value, nodes in self._mirrored.items():
            owner = value_index[owner_of(value)]
            for node in nodes:
                table = [
                    [_lies_as(s.results[0], entry) for s in self.options[node]]
                    for entry in entries[value]
                ]
                between(owner, op_index[groups[node]], np.array(table), 1)
        of_node = {
            node: op_index[groups.get(node, twins.get(node, node))]
            for node in self.problem.graph.nodes
        }
        of_value = {value: value_index[owner_of(value)] for value in entries}
        return _Tables((domains, unary, pairs), of_node, of_value, entries)

    def _nbytes(self, value: Value) -> int:
        if value not in self._sizes:
            self._sizes[value] = math.prod(map(nominal, value.shape)) * value.meta.dtype.itemsize
        return self._sizes[value]

    def _reduced_nbytes(self, value: Value) -> int:
        """What a pending sum counts as where it is reduced: no less than what it is about to be
        widened to, and summed as.
        """
        if value not in self._reduced:
            here, users = value.meta.dtype.itemsize, self.users.get(value, ())
            if value in self.required or not users:
                found = here
            else:
                found = max(here, min(self._width_for(node) for node, _ in users))
            self._reduced[value] = self._nbytes(value) * found // here if here else 0
        return self._reduced[value]

    def _width_for(self, user: Node) -> int:
        result = Value(user)
        if user.target in VIEWS and len(user.results) == 1:
            return (
                self._reduced_nbytes(result)
                * result.meta.dtype.itemsize
                // max(self._nbytes(result), 1)
            )
        return result.meta.dtype.itemsize if user.target is torch.ops.aten._to_copy.default else 0

    def _movable(self, value: Value) -> Any:
        """All that ``_may_move`` depends on, for a key."""
        if value in self.free_to_move:
            return True
        if not self.problem.is_data_axis or not value.node.depends & BATCH:
            return bool(value.node.depends & BATCH)
        return tuple(self.problem.batch_reach.layouts.get(value, ())), value in self.after_conflict

    def _op_prices(self, node: Node) -> list[float]:
        if node.kind == "move":
            nbytes = math.prod(map(nominal, node.target.shape)) * node.results[0].dtype.itemsize
            seconds = collective_seconds(
                node.target.op, nbytes, node.target.n, self.problem.hardware.link
            )
            return [seconds / self.problem.n if s.cut else seconds for s in self.options[node]]
        if node.kind != "op":
            held = self.problem.open.held.get(node, 0.0) if self.problem.open else 0.0
            return [held / self.problem.n if s.cut else held for s in self.options[node]]
        sizes = {f: nominal(s) for f, s in node.sizes.items()}
        seconds = op_seconds(node.target, node.rule, sizes, node.results, self.problem.hardware)
        could_be_cut = any(s.cut for s in self.options[node])
        prices = []
        for s in self.options[node]:
            price = seconds / self.problem.n if s.cut else seconds
            if self.problem.open and self.problem.open.is_bare:
                pass
            elif s.pending is not None:
                # Sums of single numbers, as of a norm, are reduced once, though a toy's latency may
                # be less than a nanosecond.
                is_number = all(math.prod(map(nominal, r.shape)) == 1 for r in node.results)
                price += (
                    min(PASS_ON, self.problem.hardware.link.latency / 100) if is_number else PASS_ON
                )
            elif (
                s.cut is None and could_be_cut and is_product(node.target) and node.depends & BATCH
            ):
                price *= REPLICATED_PRODUCT
            prices.append(price)
        return prices

    def _entries(self, value: Value) -> list[tuple[Layout, ...]]:
        """The sets of copies that users may find; what can be had for nothing from a member is
        not written out.
        """
        homes = list(dict.fromkeys(s.results[value.index] for s in self.options[value.node]))
        needs: list[Layout] = []
        for node, slot in self._twin_users.get(value) or self.users.get(value, ()):
            for s in self.options[node]:
                if s.operands[slot] not in needs:
                    needs.append(s.operands[slot])
        for layout in self.required.get(value, ()):
            wanted = (
                [h for h in homes if h.kind == "S" and is_at_rest(h)]
                if layout is None
                else [layout]
            )
            needs += [w for w in wanted if w not in needs]
        for node in self._mirrored.get(value, ()):
            needs += [s.results[0] for s in self.options[node] if s.results[0] not in needs]
        cuts = [layout for layout in needs if layout.kind == "S"]
        found: list[tuple[Layout, ...]] = [(R,)]
        if any(h.kind == "S" or h is GATHERED for h in homes):
            found.append((GATHERED,))
        found += [(cut,) for cut in cuts]
        found += list(combinations(cuts, 2)) if len(cuts) <= 4 else []
        if PARTIAL in needs:
            found.append((PARTIAL,))
            found += [(h,) for h in homes if h.kind == "S" and h not in cuts]
        return found

    def _move_prices(self, value: Value, entries: list[tuple[Layout, ...]]) -> np.ndarray:
        """Seconds from each strategy's result to each set of copies."""
        nbytes = self._nbytes(value)
        table = np.empty((len(self.options[value.node]), len(entries)))
        known: dict[Layout, list[float]] = {}
        for row, s in enumerate(self.options[value.node]):
            home = s.results[value.index]
            if home not in known:
                known[home] = [self._price(value, home, entry, nbytes) for entry in entries]
            table[row] = known[home]
        return table

    def _price(self, value: Value, home: Layout, entry: tuple[Layout, ...], nbytes: int) -> float:
        first = entry[0]
        if first is R:
            return (
                self._collective(value, home, R, nbytes)
                if home.kind == "P"
                else (0.0 if home == R else math.inf)
            )
        if first is GATHERED:
            if home == GATHERED:
                return 0.0
            return self._collective(value, home, GATHERED, nbytes) if home.kind == "S" else math.inf
        if first is PARTIAL:
            return 0.0 if home == PARTIAL else math.inf
        if home.kind == "R":
            return (
                0.0 if len(entry) == 1 else math.inf
            )  # a lone cut is as free, and users reach the other through R
        return sum(self._collective(value, home, cut, nbytes) for cut in entry if cut != home)

    def _collective(self, value: Value, src: Layout, dst: Layout, nbytes: int) -> float:
        if src.kind == "P" and src.op != "sum" and dst.kind == "S":
            return self._collective(value, src, R, nbytes)
        move = Move(self.problem.axis, self.problem.n, src, R if dst is GATHERED else dst, ())
        seconds = collective_seconds(move.op, nbytes, self.problem.n, self.problem.hardware.link)
        if self.problem.open and self.problem.open.is_bare:
            return seconds + (
                self.violation if src.kind == "S" and not self._may_move(value, src) else 0.0
            )
        if src.kind == "P" and self._reduced_nbytes(value) > nbytes:
            # Whoever widens a sum means it to be summed so; the wider sum must be the cheaper, with
            # the wider terms computed.
            wide = collective_seconds(
                move.op, self._reduced_nbytes(value), self.problem.n, self.problem.hardware.link
            )
            seconds = TOO_NARROW * wide
        if src.kind == "S" and not self._may_move(value, src):
            seconds += self.violation
        return seconds + (MOVE_OF_VIEW if value.node.target in VIEWS else 0.0)

    def _may_move(self, value: Value, home: Layout) -> bool:
        """Rules C1 and C2: on a data axis activations stay, on any other axis what is computed
        from parameters alone stays.
        """
        if value in self.free_to_move:
            return True
        if not self.problem.is_data_axis:
            return bool(value.node.depends & BATCH)
        return not value.node.depends & BATCH or (
            value in self.after_conflict
            and home not in self.problem.batch_reach.layouts.get(value, ())
        )

    def _use_price(
        self, node: Node, strategy: Strategy, slot: int, entry: tuple[Layout, ...]
    ) -> float:
        need = strategy.operands[slot]
        if need == GATHERED:
            return 0.0 if entry[0] == GATHERED else math.inf
        if need.kind == "S":
            return 0.0 if need in entry or entry[0].kind == "R" else math.inf
        if need.kind == "P":
            return self._join_price(node, strategy, slot, entry[0])
        if entry[0] is R:
            return 0.0
        if entry[0] is not GATHERED:
            return math.inf
        # Rule D: a gathered copy does not feed an op left replicated that could be cut.
        idle = (
            node.kind == "op"
            and strategy.cut is None
            and strategy.pending is None
            and any(s.cut for s in self.options[node])
        )
        return self.violation if idle else 0.0

    def _join_price(self, node: Node, strategy: Strategy, slot: int, have: Layout) -> float:
        """Seconds to be a term of a pending sum. Alone, a value that is none would become one
        only to be gathered by the reduction.
        """
        if have == PARTIAL:
            return 0.0
        if strategy.pending is None or len(strategy.pending) == 1:
            return math.inf
        if have.kind == "R":
            return 0.0
        if self.problem.open and not self._may_move(node.operands[slot], have):
            # Padded and reduced it would be gathered after all, and every such way is one more to
            # search.
            return self.violation
        nbytes = self._nbytes(node.operands[slot])
        return PAD_LATENCIES * self.problem.hardware.link.latency + collective_seconds(
            "all_gather", nbytes, self.problem.n, self.problem.hardware.link
        )

    def _kept_price(self, seconds: float, entry: tuple[Layout, ...]) -> float:
        """What is kept for the backward pass is what users find: a shard where all of them find
        one.
        """
        return seconds / self.problem.n if all(layout.kind == "S" for layout in entry) else seconds

    def _output_price(self, value: Value, entry: tuple[Layout, ...]) -> float:
        for layout in self.required.get(value, ()):
            if layout is None:
                if not any(map(is_at_rest, entry)):
                    return math.inf
            elif layout.kind == "S":
                if layout not in entry and entry[0].kind != "R":
                    return math.inf
            elif entry[0].kind != "R":
                return math.inf
        return 0.0


def _lies_as(layout: Layout, entry: tuple[Layout, ...]) -> float:
    """Seconds to return a value as ``layout`` where users find ``entry``: nothing, or infinity."""
    return 0.0 if entry[0].kind == "R" or layout in entry else math.inf


def is_at_rest(layout: Layout) -> bool:
    """Whether an output that is left open may be returned so: as a spec can say it, no pending
    sum and no strided cut.
    """
    return layout.kind == "R" or (layout.kind == "S" and layout.outer == layout.inner == 1)
