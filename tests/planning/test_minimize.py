"""The minimum of a cost network is brute force's and the integer program's; a wide one has an
answer and a bound.
"""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from few_or_many import slow_after
from hypothesis import given, settings
from hypothesis import strategies as st

from ftp.planning.solver.bounds import Sweeps, feasible
from ftp.planning.solver.minimize import MAX_TABLE, Solution, min_marginals, minimize
from ftp.planning.solver.reduce import Infeasible

Network = tuple[list[int], list[np.ndarray], dict[tuple[int, int], np.ndarray]]


@st.composite
def networks(draw: st.DrawFn, most: int = 7, values: int = 4) -> Network:
    """Small networks with integer costs, so that ties happen, and forbidden values and pairs."""
    costs = st.sampled_from([0.0, 0.0, 1.0, 2.0, -1.0, 5.0, np.inf])
    domains = draw(st.lists(st.integers(1, values), min_size=1, max_size=most))
    unary = [np.array(draw(st.lists(costs, min_size=n, max_size=n))) for n in domains]
    edges = [edge for edge in itertools.combinations(range(len(domains)), 2) if draw(st.booleans())]
    tables = {
        (i, j): draw(
            st.lists(costs, min_size=domains[i] * domains[j], max_size=domains[i] * domains[j])
        )
        for i, j in edges
    }
    return (
        domains,
        unary,
        {(i, j): np.array(t).reshape(domains[i], domains[j]) for (i, j), t in tables.items()},
    )


def random_network(
    seed: int, n: int, values: tuple[int, int], edges: list[tuple[int, int]], forbidden: float
) -> Network:
    rng = np.random.default_rng(seed)
    domains = [int(k) for k in rng.integers(*values, size=n, endpoint=True)]
    pairs = {(i, j): rng.random((domains[i], domains[j])) for i, j in edges}
    for table in pairs.values():
        table[rng.random(table.shape) < forbidden] = np.inf
    return domains, [rng.random(k) for k in domains], pairs


def grid(rows: int, columns: int) -> list[tuple[int, int]]:
    at = lambda r, c: r * columns + c  # noqa: E731
    down = [(at(r, c), at(r + 1, c)) for r in range(rows - 1) for c in range(columns)]
    return down + [(at(r, c), at(r, c + 1)) for r in range(rows) for c in range(columns - 1)]


def random_edges(seed: int, n: int, count: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    edges: dict[tuple[int, int], None] = {}
    while len(edges) < count:
        i, j = sorted(int(v) for v in rng.integers(n, size=2))
        if i < j:
            edges[i, j] = None
    return list(edges)


def recurrence(steps: int, width: int) -> list[tuple[int, int]]:
    """Each step a path, each variable tied to itself a step before, and a few to the first
    step's, as shared weights are.
    """
    edges = dict.fromkeys(grid(steps, width))
    edges.update({(w, s * width + w): None for s in range(2, steps) for w in range(0, width, 4)})
    return list(edges)


def cost_of(network: Network, choice: list[int]) -> float:
    _, unary, pairs = network
    return sum(u[x] for u, x in zip(unary, choice, strict=True)) + sum(
        t[choice[i], choice[j]] for (i, j), t in pairs.items()
    )


def brute_force(network: Network) -> float:
    return min(
        cost_of(network, list(choice)) for choice in itertools.product(*map(range, network[0]))
    )


def integer_program(network: Network) -> float:
    """Over the local polytope: binary x[v, a], y[i, j, a, b] >= 0 with the x as margins;
    forbidden ones are fixed to 0.
    """
    domains, unary, pairs = network
    start = np.cumsum([0, *domains])
    cost, rows, columns, signs, totals = list(np.concatenate(unary)), [], [], [], []

    def equation(terms: list[tuple[int, float]], total: float) -> None:
        for column, sign in terms:
            rows.append(len(totals))
            columns.append(column)
            signs.append(sign)
        totals.append(total)

    for v, n in enumerate(domains):
        equation([(start[v] + a, 1.0) for a in range(n)], 1.0)
    for (i, j), table in pairs.items():
        y = len(cost) + np.arange(table.size).reshape(table.shape)
        cost += list(table.ravel())
        for a in range(domains[i]):
            equation([(k, 1.0) for k in y[a]] + [(start[i] + a, -1.0)], 0.0)
        for b in range(domains[j]):
            equation([(k, 1.0) for k in y[:, b]] + [(start[j] + b, -1.0)], 0.0)
    costs = np.array(cost)
    matrix = scipy.sparse.csr_array((signs, (rows, columns)), shape=(len(totals), len(costs)))
    result = scipy.optimize.milp(
        np.where(np.isfinite(costs), costs, 0.0),
        integrality=np.arange(len(costs)) < start[-1],
        bounds=scipy.optimize.Bounds(np.zeros(len(costs)), np.isfinite(costs).astype(float)),
        constraints=scipy.optimize.LinearConstraint(matrix, totals, totals),
        options={"mip_rel_gap": 0.0},
    )
    return float(result.fun) if result.status == 0 else np.inf


def check(network: Network, solution: Solution) -> None:
    assert cost_of(network, solution.choice) == pytest.approx(solution.cost, rel=1e-12)
    assert solution.bound <= solution.cost < np.inf
    assert solution.optimal == (solution.bound == solution.cost)


@given(networks(), st.sampled_from([1, 8, 30, 1_000_000]))
def test_is_brute_force(network: Network, max_table: int) -> None:
    expected = brute_force(network)
    if expected == np.inf:
        with pytest.raises(Infeasible):
            minimize(*network, max_table=max_table)
        return
    solution = minimize(*network, max_table=max_table)
    check(network, solution)
    assert solution.bound <= expected + 1e-9 and expected <= solution.cost + 1e-9
    assert not solution.optimal or solution.cost == pytest.approx(expected, abs=1e-9)


@settings(max_examples=15)
@given(
    st.integers(0, 10_000),
    st.integers(8, 30),
    st.floats(1.0, 2.0),
    st.sampled_from([0.0, 0.2, 0.4]),
    st.sampled_from([50, 1_000_000]),
)
def test_is_the_integer_program(
    seed: int, n: int, density: float, forbidden: float, max_table: int
) -> None:
    network = random_network(seed, n, (2, 4), random_edges(seed, n, int(n * density)), forbidden)
    expected = integer_program(network)
    try:
        solution = minimize(*network, max_table=max_table)
    except Infeasible:
        assert expected == np.inf
        return
    check(network, solution)
    assert solution.bound <= expected + 1e-6 and expected <= solution.cost + 1e-6
    assert solution.optimal or max_table == 50


@given(networks(most=5))
def test_min_marginals(network: Network) -> None:
    domains, unary, pairs = network
    for v in range(len(domains)):
        for value, solution in enumerate(min_marginals(*network, v)):
            fixed = [
                np.where(np.arange(n) == value, u, np.inf) if w == v else u
                for w, (n, u) in enumerate(zip(domains, unary, strict=True))
            ]
            expected = brute_force((domains, fixed, pairs))
            assert (np.inf if solution is None else solution.cost) == pytest.approx(
                expected, abs=1e-9
            )


@given(
    st.integers(0, 10_000),
    st.integers(3, 6),
    st.sampled_from([0.0, 0.2]),
    st.permutations(range(6)),
)
def test_bounds_hold(seed: int, n: int, forbidden: float, shuffled: list[int]) -> None:
    edges = list(itertools.combinations(range(n), 2))
    domains, unary, pairs = network = random_network(seed, n, (2, 4), edges, forbidden)
    tables = {
        v: {j if i == v else i: t if i == v else t.T for (i, j), t in pairs.items() if v in (i, j)}
        for v in range(n)
    }
    if any(t.min(axis=1).max() == np.inf for near in tables.values() for t in near.values()):
        return  # not arc consistent
    order = [v for v in shuffled if v < n]
    sweeps = Sweeps(unary, tables, order, {})
    bounds = []
    for _ in range(5):
        sweeps.sweep()
        bounds.append(sweeps.bound)
    assert bounds == sorted(bounds) and bounds[-1] <= brute_force(network) + 1e-9
    shared, moved = sweeps.shares()
    choice = feasible(unary, tables, order, sweeps.messages())
    if isinstance(choice, int):
        assert brute_force(network) == np.inf
    else:
        chosen = [choice[v] for v in range(n)]
        same = cost_of(
            (domains, [shared[v] for v in range(n)], {(i, j): moved[i][j] for i, j in pairs}),
            chosen,
        )
        assert same == pytest.approx(cost_of(network, chosen)) and same < np.inf
    for v, floor in zip(order, sweeps.floor, strict=True):
        for value in range(domains[v]):
            fixed = [
                np.where(np.arange(len(u)) == value, u, np.inf) if w == v else u
                for w, u in enumerate(unary)
            ]
            assert floor[value] <= brute_force((domains, fixed, pairs)) + 1e-9


WIDE = {
    "random": lambda: random_network(0, 500, (4, 8), random_edges(0, 500, 750), 0.0),
    "denser": lambda: random_network(1, 200, (4, 8), random_edges(1, 200, 400), 0.2),
    "barely feasible": lambda: random_network(0, 200, (4, 8), random_edges(0, 200, 400), 0.44),
    "grid": lambda: random_network(2, 400, (5, 5), grid(20, 20), 0.1),
    "recurrence": lambda: random_network(3, 240, (3, 6), recurrence(20, 12), 0.1),
}


@pytest.mark.parametrize("name", slow_after(1, WIDE))
def test_wide_ones_have_an_answer(name: str) -> None:
    network = WIDE[name]()
    start = time.perf_counter()
    solution = minimize(*network)
    print(
        f"{name}: {time.perf_counter() - start:.1f} s, gap"
        f" {1 - solution.bound / solution.cost:.2%}, tables to {solution.largest_table:,}"
    )
    check(network, solution)
    assert solution.largest_table <= MAX_TABLE


@pytest.mark.parametrize("width", slow_after(1, [3, 6]))
def test_long_ones_are_exact(width: int) -> None:
    network = random_network(4, 1500, (3, 5), grid(1500 // width, width), 0.1)
    start = time.perf_counter()
    solution = minimize(*network)
    print(
        f"width {width}: {time.perf_counter() - start:.1f} s, tables to {solution.largest_table:,}"
    )
    check(network, solution)
    assert solution.optimal


def test_ties_keep_the_lower_value() -> None:
    free = np.zeros(3)
    assert minimize(
        [3, 3, 3], [free] * 3, {(0, 1): np.zeros((3, 3)), (0, 2): np.eye(3)}
    ).choice == [0, 0, 1]


def solutions() -> str:
    network = random_network(0, 40, (2, 5), random_edges(0, 40, 75), 0.1)
    return str([minimize(*network, max_table=m) for m in (500, 1000000)])


def test_hash_seed_does_not_matter() -> None:
    program = "import test_minimize as t; print(t.solutions())"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert "Solution" in found and found == solutions()


def test_ill_formed() -> None:
    with pytest.raises(ValueError, match=r"unary\[0\] needs shape \(2,\)"):
        minimize([2], [np.zeros(3)], {})
    with pytest.raises(ValueError, match=r"without NaN"):
        minimize([1], [np.array([np.nan])], {})
    with pytest.raises(ValueError, match=r"pairs\[1, 0\] needs i < j"):
        minimize([1, 1], [np.zeros(1)] * 2, {(1, 0): np.zeros((1, 1))})
    with pytest.raises(Infeasible, match="variable 0 is left without a value"):
        minimize([1], [np.array([np.inf])], {})
