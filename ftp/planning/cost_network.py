"""The cost network of one mesh axis: variables, and tables of seconds, which `minimize` solves.

- A variable per op: its strategy, which fixes the layouts of its operands and results.
- A variable per value: its copies, the layouts in which users read it.
- A table per pair (op, value): the seconds of the reshards that make the copies, for all users.
- A table per pair (value, user): 0 if a copy has the layout that the user needs, else infinity.
"""

import math
from collections.abc import Callable
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from ftp.planning.graph import BATCH, Node, Value
from ftp.planning.narrowest_point import widening
from ftp.planning.network_tables import Tables
from ftp.planning.prices import Prices, is_at_rest
from ftp.planning.problem import AxisPlan, BytePrices, NotAlike, Problem
from ftp.planning.reachable_cuts import Cut, factor_of, is_cut_again
from ftp.planning.solver.minimize import Solution, min_marginals, minimize
from ftp.planning.solver.reduce import Infeasible
from ftp.planning.strategies import GATHERED, Strategy, passes_gathered, strategies
from ftp.rules.op_kinds import VIEWS
from ftp.sharding.layout import PARTIAL, Layout, R

VIOLATION = 1e3  # seconds for each violation, if no plan keeps all placement constraints


def solve(problem: Problem) -> AxisPlan:
    """The cheapest plan; it breaks placement constraints only if no plan keeps them all."""
    return PricedNetwork(problem).solve(BytePrices())


class PricedNetwork:
    """The cost network of a problem: built once, solved at any prices of bytes.

    If no plan keeps all placement constraints, each violation has a price.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self._violation = math.inf
        self._plans: dict[BytePrices, AxisPlan] = {}

    def solve(self, prices: BytePrices) -> AxisPlan:
        """The cheapest plan."""
        if prices not in self._plans:
            solution, (network, tables) = self._minimum(prices), self._built
            plan = self._plans[prices] = network.plan(solution, tables)
            plan.kept_rules = self._violation == math.inf
        return self._plans[prices]

    def open_costs(self, prices: BytePrices) -> dict[Node, dict[Layout, float]]:
        """The cost of the cheapest plan with each layout of each group of open inputs, keyed by the
        group's first node. A layout without a plan has no entry.
        """
        best, opened = self._minimum(prices), self.problem.open
        network, tables = self._built
        costs: dict[Node, dict[Layout, float]] = {}
        for first in dict.fromkeys(opened.groups.values()) if opened else ():
            at = tables.of_node[first]
            found = costs[first] = {}
            for index, strategy in enumerate(network.options[first]):
                layout = strategy.results[0]
                solution: Solution | None = best
                if index != best.choice[at]:
                    (solution,) = min_marginals(*tables.at(prices), at, values=[index])
                if solution is not None:
                    layout = R if layout.kind == "R" else layout
                    found[layout] = min(solution.cost, found.get(layout, math.inf))
        return costs

    def _minimum(self, prices: BytePrices) -> Solution:
        try:
            return minimize(*self._built[1].at(prices))
        except Infeasible:
            if self._violation != math.inf:
                raise
        self._violation = VIOLATION
        network, _ = self._built
        network.price_violations(VIOLATION)
        self._built = network, network.tables()
        return minimize(*self._built[1].at(prices))

    @cached_property
    def _built(self) -> tuple["_CostNetwork", Tables]:
        network = _CostNetwork(self.problem)
        return network, network.tables()


def layout_costs(problem: Problem, value: Value) -> list[tuple[Layout, bool, float | None]]:
    """The cost of the cheapest plan with each layout of a value: (layout, whether its op runs as a
    ring, cost). The cost is None where no such plan exists.
    """
    network = _CostNetwork(problem)
    for violation in (math.inf, VIOLATION):
        network.price_violations(violation)
        tables = network.tables()
        found = min_marginals(*tables.at(BytePrices()), tables.of_node[value.node])
        if any(found):
            break
    costs: dict[tuple[Layout, bool], float | None] = {}
    for strategy, solution in zip(network.options[value.node], found, strict=True):
        key = form_of(strategy, value.index)
        known = costs.get(key)
        if solution is not None and (known is None or solution.cost < known):
            costs[key] = solution.cost
        costs.setdefault(key, None)
    return [(*key, cost) for key, cost in costs.items()]


def form_of(strategy: Strategy, index: int) -> tuple[Layout, bool]:
    """The layout of a result, and whether the op runs as a ring."""
    layout = strategy.results[index]
    return R if layout.kind == "R" else layout, strategy.ring_cut is not None


_PRICED = ("use", "reshards")  # tables that violations are in


class _CostNetwork:
    def __init__(self, problem: Problem):
        self.problem = problem
        graph = problem.graph
        self.users = graph.users
        self.required: dict[Value, list[Layout | None]] = {}
        for value, layout in zip(graph.outputs, problem.outputs, strict=True):
            self.required.setdefault(value, []).append(layout)
        self._cache: dict[tuple[Any, ...], Any] = {}
        self.options = self._strategies()
        self._tie()
        self.mirrored: dict[Value, list[Node]] = {}
        for place, node in problem.open.mirrors.items() if problem.open else ():
            self.mirrored.setdefault(graph.outputs[place], []).append(node)
        self.prices = Prices(problem, self.options, self.users, self.required)

    def price_violations(self, seconds: float) -> None:
        """Let each broken placement constraint cost ``seconds``; at first none may be broken."""
        self.prices.violation = seconds
        self._cache = {key: x for key, x in self._cache.items() if key[0] not in _PRICED}

    def _strategies(self) -> dict[Node, list[Strategy]]:
        """Each node's strategies. Equal nodes of repeated layers share one list, and the tables
        that ``once`` caches for it.
        """
        options: dict[Node, list[Strategy]] = {}
        may_pend: set[Value] = set()
        shared: dict[Any, list[Strategy]] = {}
        again = set(filter(is_cut_again, self.problem.reach.blocked))
        widens = widening(self.problem.graph, self.problem.reach.layouts)
        for node in self.problem.graph.nodes:
            cuts, pinned = self.problem.reach.cuts.get(node, ()), self.problem.pinned.get(node)
            rule = node.rule
            pending = tuple(v in may_pend for v in node.operands)
            kind = (
                node.kind,
                passes_gathered(node),
                node in widens,
                node in again,
                rule.operands,
                rule.results,
                rule.linear,
                tuple(tuple(p.items()) for p in rule.pending),
                rule.ring,
                rule.together,
            )
            rings = self.problem.reach.rings.get(node, ())
            if self.problem.open and node in self.problem.open.groups:
                cuts = self._open_cuts(node)
            fixed = self.problem.axis in node.own_axes
            sizes = tuple(node.sizes.items())
            key = (kind, sizes, tuple(cuts), pinned, pending, fixed, tuple(rings))
            if key not in shared:
                shared[key] = strategies(
                    node,
                    cuts,
                    self.problem.n,
                    pinned,
                    may_pend,
                    widens=node in widens,
                    is_cut_again=node in again,
                    is_fixed=fixed,
                    rings=rings,
                )
            found = options[node] = shared[key]
            if node in self.problem.forms:
                found = options[node] = list(filter(self.problem.forms[node], found))
            may_pend.update(
                value
                for value in node.values
                if any(s.results[value.index].kind == "P" for s in found)
            )
        return options

    def _open_cuts(self, node: Node) -> list[Cut]:
        """The cuts that every input of a group may have."""
        opened, n = self.problem.open, self.problem.n
        assert opened is not None
        own = opened.groups[node]
        members = [member for member, first in opened.groups.items() if first is own]
        found = []
        for layout in opened.cuts[node]:
            cut = factor_of(node.rule.results[0], node.sizes, layout, n)
            if cut is not None and all(cut in self.problem.reach.cuts.get(m, ()) for m in members):
                found.append(cut)
        return found

    def _tie(self) -> None:
        """Give the nodes of two tied layers one list of strategies, and their values one list of
        users.
        """
        self.twin_users: dict[Value, list[tuple[Node, int]]] = {}
        if (ties := self.problem.ties) is None:
            return
        for node, twin in ties.twins.items():
            if set(self.options[node]) != set(self.options[twin]):
                raise NotAlike
            self.options[node] = self.options[twin]
            for pair in zip(twin.values, node.values, strict=True):
                self._share_users(*pair)
        for stack in ties.layers.stacks:
            self._share_users(Value(stack, ties.earlier), Value(stack, ties.earlier + 1))

    def _share_users(self, a: Value, b: Value) -> None:
        users = [*self.users.get(a, ()), *self.users.get(b, ())]
        self.twin_users[a] = self.twin_users[b] = users

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The result of ``make``, cached by ``key``, which holds the ids of lists."""
        known = self._cache.get(key)
        if known is None:
            known = self._cache[key] = make()
        return known

    def plan(self, solution: Solution, tables: Tables) -> AxisPlan:
        at, copies = solution.choice, {}
        chosen = {node: self.options[node][at[i]] for node, i in tables.of_node.items()}
        for value, i in tables.of_value.items():
            home = chosen[value.node].results[value.index]
            copies[value] = tuple(c for c in tables.copies[value][at[i]] if c != home)
        return AxisPlan(self.problem.axis, self.problem.n, chosen, copies, solution)

    def tables(self) -> Tables:
        """The network's numbers."""
        built = _TableBuilder(self)
        for node in self.problem.graph.nodes:
            built.add(node)
        for value, nodes in self.mirrored.items():
            for node in nodes:
                built.add_mirror(value, node)
        return built.tables()

    def copies(self, value: Value) -> list[tuple[Layout, ...]]:
        """The sets of copies that users may read. A set does not list layouts that can be made from
        its members at no cost.
        """
        homes = list(dict.fromkeys(s.results[value.index] for s in self.options[value.node]))
        needs: list[Layout] = []
        for node, slot in self.twin_users.get(value) or self.users.get(value, ()):
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
        for node in self.mirrored.get(value, ()):
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


class _TableBuilder:
    """Builds the tables of a network node by node.

    Nodes of two tied layers share variables, and so do the inputs of a group. The costs of a
    variable that stands for several layers are multiplied by their number.
    """

    def __init__(self, net: _CostNetwork):
        self.net, self.prices = net, net.prices
        self.ties = net.problem.ties
        self.twins = self.ties.twins if self.ties else {}
        self.groups = net.problem.open.groups if net.problem.open else {}
        self.domains: list[int] = []
        self.unary: list[np.ndarray] = []
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        self.held: dict[int, np.ndarray] = {}
        self.kept: dict[int, np.ndarray] = {}
        self.of_node: dict[Node, int] = {}  # keyed by the earlier twin, or the group's first input
        self.of_value: dict[Value, int] = {}
        self.copies: dict[Value, list[tuple[Layout, ...]]] = {}

    def add(self, node: Node) -> None:
        """Add the variables of a node and of its results, and the pairs with its operands."""
        weight = self.ties.weight(node) if self.ties else 1
        at = self._variable(self.of_node, self._owner(node), self._seconds_of(node), weight)
        if self.net.problem.open and node in self.net.problem.open.held:
            shares = np.array(self.prices.share_held(node))
            _add_to(self.held, at, self.net.problem.open.held[node] * weight * shares)
        for slot, value in enumerate(node.operands):
            self._add_use(node, at, slot, value)
        for index in range(len(node.results)):
            self._add_value(Value(node, index), at)

    def _seconds_of(self, node: Node) -> np.ndarray:
        """Seconds of a node's strategies; equal ops of other layers have equal ones."""
        if node.kind != "op" or node.rule.ring:  # a ring's depend on its operands too
            return np.array(self.prices.of_op(node))
        key = (
            "op",
            id(self.net.options[node]),
            node.target,
            node.results,
            tuple(node.sizes.items()),
            self.prices.is_of_activations(node),
            node.depends & BATCH,
            Value(node) in self.prices.free_to_reshard and not is_cut_again(node),
        )
        return self.net.once(key, lambda: np.array(self.prices.of_op(node)))

    def add_mirror(self, value: Value, node: Node) -> None:
        """Add the pair of an output and the open input whose layout the output has."""
        layouts = [s.results[0] for s in self.net.options[node]]
        table = [
            [0.0 if entry[0].kind == "R" or layout in entry else math.inf for layout in layouts]
            for entry in self.copies[value]
        ]
        owner = self.of_value[self._owner_of(value)]
        self._pair(owner, self.of_node[self.groups[node]], np.array(table), 1)

    def tables(self) -> Tables:
        of_node = {node: self.of_node[self._owner(node)] for node in self.net.problem.graph.nodes}
        of_value = {value: self.of_value[self._owner_of(value)] for value in self.copies}
        numbers = self.domains, self.unary, self.pairs, self.held, self.kept
        return Tables(*numbers, of_node, of_value, self.copies)

    def _owner(self, node: Node) -> Node:
        return self.groups.get(node) or self.twins.get(node, node)

    def _owner_of(self, value: Value) -> Value:
        return self.ties.twin(value) if self.ties else value

    def _variable(self, known: dict[Any, int], key: Any, costs: np.ndarray, weight: int) -> int:
        costs = costs * weight
        if key in known:
            self.unary[known[key]] = self.unary[known[key]] + costs
        else:
            known[key] = len(self.domains)
            self.domains.append(len(costs))
            self.unary.append(costs)
        return known[key]

    def _pair(self, i: int, j: int, table: np.ndarray, weight: int) -> None:
        table = table * weight if weight != 1 else table
        i, j, table = (i, j, table) if i < j else (j, i, table.T)
        self.pairs[i, j] = self.pairs[i, j] + table if (i, j) in self.pairs else table

    def _add_use(self, node: Node, at: int, slot: int, value: Value) -> None:
        mine, theirs = self.net.options[node], self.copies[value]
        key = (
            "use",
            id(mine),
            id(theirs),
            slot,
            node.kind,
            self.prices.nbytes(value),
            self.prices.reshard_facts(value),
            node in self.prices.of_sums,
        )
        table = self.net.once(
            key,
            lambda: np.array(
                [[self.prices.of_use(node, s, slot, entry) for s in mine] for entry in theirs]
            ),
        )
        weight = self.ties.weight_between(value, node) if self.ties else 1
        self._pair(self.of_value[self._owner_of(value)], at, table, weight)

    def _add_value(self, value: Value, at: int) -> None:
        net, prices = self.net, self.prices
        mine, required = net.options[value.node], tuple(net.required.get(value, ()))
        users = net.twin_users.get(value) or net.users.get(value, ())
        if not users and not required:
            return
        key = (
            "copies",
            id(mine),
            value.index,
            tuple([(id(net.options[user]), slot) for user, slot in users]),
            required,
            tuple(id(net.options[node]) for node in net.mirrored.get(value, ())),
        )
        found = self.copies[value] = net.once(key, lambda: net.copies(value))
        costs = net.once(
            ("output", id(found), required),
            lambda: np.array([prices.of_output(value, entry) for entry in found]),
        )
        weight = self.ties.weight_of(value) if self.ties else 1
        copies = self._variable(self.of_value, self._owner_of(value), costs, weight)
        if self.domains[copies] != len(found):
            raise NotAlike
        if net.problem.open and value in net.problem.open.kept:
            shares = np.array([prices.share_kept(entry) for entry in found])
            _add_to(self.kept, copies, net.problem.open.kept[value] * weight * shares)
        reshards = (
            "reshards",
            id(mine),
            value.index,
            id(found),
            prices.nbytes(value),
            self._may_pend(value) and prices.reduced_nbytes(value),
            value.node.target in VIEWS,
            prices.reshard_facts(value),
        )
        table = net.once(reshards, lambda: prices.of_reshards(value, found))
        self._pair(at, copies, table, weight)

    def _may_pend(self, value: Value) -> bool:
        """Whether a value may be a pending sum."""
        mine, index = self.net.options[value.node], value.index
        key = "pends", id(mine), index
        return self.net.once(key, lambda: any(s.results[index].kind == "P" for s in mine))


def _add_to(sums: dict[int, np.ndarray], variable: int, terms: np.ndarray) -> None:
    sums[variable] = sums[variable] + terms if variable in sums else terms
