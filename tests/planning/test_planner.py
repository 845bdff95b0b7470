"""The planner against an integer program that shares none of its search, and on programs that
are wide.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

import ftp
from ftp import P
from ftp.errors import PlanningError
from ftp.planning import cost_network as network
from ftp.planning import planner
from ftp.planning.attention_ways import cost_of
from ftp.planning.prepare import plan_prepared, prepare
from ftp.sharding.layout import PARTIAL, R
from ftp.sharding.pytree import flatten
from ftp.tracing.gradient import grad_and_value
from ftp.tracing.trace import trace


class IntegerProgram:
    """Binary ``x[op, strategy]``; continuous ``y[value, home -> copy]``, at most the strategies
    with that home.

    Each need of a consumer's strategy is at most what its home and the copies that satisfy it add
    up to. What is forbidden has no variable.
    """

    def __init__(self, net: network._CostNetwork):
        self.net, self.costs, self.rows, self.n = net, [], [], 0
        self.integral: list[int] = []
        self.x = {
            node: [self.variable(c, 1) for c in net.prices.of_op(node)]
            for node in net.problem.graph.nodes
        }
        self.y = {}
        for node in net.problem.graph.nodes:
            self.row(dict.fromkeys(self.x[node], 1.0), 1.0, 1.0)
            for index in range(len(node.results)):
                self.copies(network.Value(node, index))
        for node in net.problem.graph.nodes:
            for slot, value in enumerate(node.operands):
                for s, x in zip(net.options[node], self.x[node], strict=True):
                    self.need(
                        value,
                        {x: 1.0},
                        lambda have, n=node, s=s, i=slot: net.prices.of_use(n, s, i, (have,)),
                    )
        for value, layouts in net.required.items():
            for layout in layouts:
                self.need(
                    value,
                    1.0,
                    lambda have, layout=layout: 0.0 if _meets(have, layout) else math.inf,
                )

    def variable(self, cost: float, integral: int) -> int | None:
        if not math.isfinite(cost):
            return None
        self.costs.append(cost)
        self.integral.append(integral)
        return len(self.costs) - 1

    def row(self, coefficients: dict, low: float, high: float) -> None:
        self.rows.append(({v: c for v, c in coefficients.items() if v is not None}, low, high))

    def copies(self, value) -> None:
        net = self.net
        nbytes = net.prices.nbytes(value)
        homes: dict = {}
        for s, x in zip(net.options[value.node], self.x[value.node], strict=True):
            homes.setdefault(s.results[value.index], []).append(x)
        wanted = {
            s.operands[slot] for user, slot in net.users.get(value, ()) for s in net.options[user]
        }
        wanted |= {layout for layout in net.required.get(value, ()) if layout is not None} | {R}
        self.y[value] = [
            (home, {x: 1.0 for x in xs if x is not None}) for home, xs in homes.items()
        ]
        for home, xs in homes.items():
            for copy in sorted((wanted - {PARTIAL, network.GATHERED}) | {R}, key=repr):
                if copy == home or home.kind == "R":
                    continue
                gathered = copy == R and home.kind == "S"
                y = self.variable(
                    net.prices.of_reshard(
                        value, home, network.GATHERED if gathered else copy, nbytes
                    ),
                    0,
                )
                if y is not None:
                    self.row({y: 1.0, **dict.fromkeys(xs, -1.0)}, -np.inf, 0.0)
                    self.y[value].append((network.GATHERED if gathered else copy, {y: 1.0}))

    def need(self, value, wants, price) -> None:
        """``wants <= what satisfies it``; a satisfaction that costs is paid by a variable of its
        own.
        """
        left: dict = {}
        for have, amount in self.y[value]:
            cost = price(have)
            if not math.isfinite(cost):
                continue
            if cost == 0.0:
                for v, c in amount.items():
                    left[v] = left.get(v, 0.0) - c
            else:
                z = self.variable(cost, 0)
                left[z] = -1.0
                self.row({z: 1.0, **{v: -c for v, c in amount.items()}}, -np.inf, 0.0)
        if isinstance(wants, dict):
            for v, c in wants.items():
                left[v] = left.get(v, 0.0) + c
            self.row(left, -np.inf, 0.0)
        else:
            self.row(left, -np.inf, -wants)

    def solve(self) -> float:
        data = [
            (i, v, c)
            for i, (coefficients, _, _) in enumerate(self.rows)
            for v, c in coefficients.items()
        ]
        rows, columns, values = zip(*data, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self.rows), len(self.costs)))
        scale = max(self.costs) or 1.0
        result = milp(
            np.array(self.costs) / scale,
            integrality=self.integral,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(
                matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
            ),
            options={"time_limit": 60, "mip_rel_gap": 0},
        )
        assert result.success, result.message
        return result.fun * scale


def _meets(have, layout) -> bool:
    if layout is None:
        return have.kind != "P"
    return have.kind == "R" or (layout.kind == "S" and have == layout)


def check_optimal(monkeypatch, build) -> int:
    """Every axis' network of the program that ``build`` lowers is solved to the integer
    program's cost; the number compared.
    """
    compared = []
    solve = network.solve

    def both(problem):
        try:
            oracle = IntegerProgram(network._CostNetwork(problem)).solve()
        except AssertionError:
            oracle = None
        plan = solve(problem)
        if oracle is not None and plan.kept_rules:
            assert plan.solution.optimal
            assert plan.solution.cost == pytest.approx(oracle, rel=1e-6, abs=1e-12)
            compared.append(plan.solution.largest_table)
        return plan

    with monkeypatch.context() as patch:
        patch.setattr("ftp.planning.axis_by_axis.solve", both)
        build()
    return len(compared)


CASES = [
    pytest.param({"tp": "tp"}, ("tp",), P(), id="tp"),
    pytest.param({"zero": "dp"}, ("dp",), P("dp"), id="zero"),
    pytest.param(
        {"tp": "tp", "zero": "dp", "order": "tp zero"}, ("dp", "tp"), P("dp"), id="zero x tp"
    ),
]


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(("cut", "axes", "batch_specs"), CASES)
@pytest.mark.parametrize(
    "cfg",
    [models.MLPConfig(), models.CNNConfig(blocks=1), models.LlamaConfig(layers=1)],
    ids=["mlp", "cnn", "llama"],
)
def test_plan_costs_what_the_integer_program_costs(monkeypatch, cfg, cut, axes, batch_specs):
    fn, params = ftp.functionalize(models.build(cfg))
    batch = models.lm_batch(cfg) if isinstance(cfg, models.LlamaConfig) else models.class_batch(cfg)
    specs = ftp.plan(params, models.specs(models.cuts(cfg), **cut))
    step = ftp.shard(
        models.loss(cfg, fn),
        ftp.AbstractMesh((2,) * len(axes), axes),
        specs,
        batch_specs=batch_specs,
    )
    networks = len(axes), math.factorial(len(axes)) * len(axes)  # small ones in every order
    assert check_optimal(monkeypatch, lambda: step.lower(params, batch)) in networks


FAST, SLOW = ftp.Link(1e-6, 4.5e11), ftp.Link(2e-5, 5e9)


@pytest.mark.parametrize("slow", ["dp", "tp"])
def test_each_axis_is_priced_by_its_own_link(monkeypatch, slow):
    """The integer program of each axis. What dp moves, which is planned first, is priced by its own
    link in the network of tp too.
    """
    cfg = models.MLPConfig(dim=16, hidden=32, layers=1, classes=8)
    fn, params = ftp.functionalize(models.build(cfg))
    specs = ftp.plan(params, models.specs(models.cuts(cfg), tp="tp", zero="dp", order="tp zero"))
    links = {axis: SLOW if axis == slow else FAST for axis in ("dp", "tp")}
    seen = {}

    def lowered(**given):
        mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
        return ftp.shard(
            models.loss(cfg, fn),
            mesh,
            specs,
            batch_specs=P("dp"),
            hardware=ftp.Hardware(**given),
            bucket=False,
            reshard_after_forward=False,  # gathers again after it is planned
        ).lower(params, models.class_batch(cfg))

    with monkeypatch.context() as patch:
        solve = network.solve
        patch.setattr(
            "ftp.planning.axis_by_axis.solve",
            lambda problem: seen.setdefault(problem.axis, problem.hardware.link) and solve(problem),
        )
        found = lowered(links=links)
    costs = found.plan.solutions
    assert {axis: link.bandwidth for axis, link in seen.items()} == {
        axis: link.bandwidth for axis, link in links.items()
    }
    assert check_optimal(monkeypatch, lambda: lowered(links=links)) == 2 * 2  # in both orders
    alone = {axis: lowered(link=link).plan.solutions[axis].cost for axis, link in links.items()}
    assert costs["dp"].cost == pytest.approx(alone["dp"], rel=1e-12)
    sent = sum(c.wire_nbytes for c in found.collectives if c.axes == ("dp",))
    later = sent / links["dp"].bandwidth - sent / links["tp"].bandwidth
    assert costs["tp"].cost == pytest.approx(alone["tp"] + later, rel=1e-12)


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_specs_cost_what_the_integer_program_costs(monkeypatch, data):
    cfg = models.MLPConfig(layers=1)
    fn, params = ftp.functionalize(models.build(cfg))
    entry = st.sampled_from([None, "a"])
    specs = {}
    for name, leaf in params.items():
        at = data.draw(st.sampled_from([None, *range(leaf.ndim)]))
        specs[name] = P(*["a" if d == at else None for d in range(leaf.ndim)])
    batch_specs = P(data.draw(entry))
    step = ftp.shard(
        models.loss(cfg, fn), ftp.AbstractMesh((2,), ("a",)), specs, batch_specs=batch_specs
    )
    check_optimal(monkeypatch, lambda: step.lower(params, models.class_batch(cfg)))


def gru(steps: int, width: int):
    """An unrolled gated recurrent unit with its recurrent weights as parameters."""

    def loss(params, x):
        h = x.new_zeros(x.shape[1], width)
        for t in range(steps):
            gates = x[t] @ params["w"] + h @ params["u"]
            z, r, n = gates.chunk(3, dim=1)
            h = (1 - torch.sigmoid(z)) * torch.tanh(n * torch.sigmoid(r)) + torch.sigmoid(z) * h
        return h.sum()

    params = {
        "w": torch.empty(width, 3 * width, device="meta"),
        "u": torch.empty(width, 3 * width, device="meta"),
    }
    return loss, params


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("spec", [P("tp", None), P(None, "tp")])
def test_wide_programs_are_planned_with_their_gap_known(spec):
    loss, params = gru(40, 12)
    step = ftp.shard(loss, ftp.AbstractMesh((4,), ("tp",)), {"w": P(), "u": spec})
    solution = step.lower(params, torch.empty(40, 8, 12, device="meta")).plan.solutions["tp"]
    assert solution.bound <= solution.cost * (1 + 1e-9)
    assert solution.optimal == (solution.bound >= solution.cost * (1 - 1e-9))


def fingerprint() -> str:
    """Of the program of one layer, cut over two axes."""
    cfg = models.LlamaConfig(layers=1)
    fn, params = ftp.functionalize(models.build(cfg, device="meta"))
    of_params = ftp.plan(params, models.specs(models.cuts(cfg), tp="tp", zero="dp"))
    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    step = ftp.shard(models.lm_loss(fn), mesh, of_params, batch_specs=P("dp"))
    return step.lower(params, models.lm_batch(cfg))._program.fingerprint


@pytest.mark.slow
def test_plans_do_not_depend_on_string_hashes():
    """Of this process, whose seed of hashes is drawn, and of one with a seed of its own."""
    program = "import sys; sys.path[:0] = sys.argv[1:]; import test_planner as t"
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{program}; print(t.fingerprint())",
            str(Path(__file__).parent),
            *sys.path,
        ],
        env={
            "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert found == fingerprint()


def test_another_order_without_a_plan_refuses_nothing(monkeypatch):
    ways, asked = planner.chosen_ways, []

    def first_alone(made, hardware):
        asked.append(made)
        if len(asked) > 1:
            raise PlanningError("no plan in this order")
        return ways(made, hardware)

    monkeypatch.setattr(planner, "chosen_ways", first_alone)
    mesh = ftp.AbstractMesh((2, 2), ("a", "b"))
    ftp.spmd(lambda x: x.tanh(), mesh, P("a", "b"), P()).lower(torch.empty(4, 4, device="meta"))
    assert len(asked) == 2


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_the_best_order_of_axes_is_kept(order):
    """``b`` first, a gathered value serves both results; ``a`` first, it was gathered twice."""
    sizes = {"a": 2, "b": 4, "c": 2}
    mesh = ftp.AbstractMesh(tuple(sizes[axis] for axis in order), order, device_type="cuda")

    def fn(x):
        y = x.tanh()
        return y, y.tanh()

    step = ftp.spmd(fn, mesh, (P("a"),), (P(), P(None, "b")), data_axes=())
    lowered = step.lower(torch.empty(1024, 256, device="meta"))
    assert [(c.op, c.axes, c.nbytes) for c in lowered.collectives] == [
        ("all_gather", ("a",), 1024 * 256 * 4)
    ]


def test_the_best_of_six_orders_is_kept_for_a_step():
    """Three matmuls: in the order of the mesh alone, one mesh's plan took 19 % longer."""
    shapes = {"a": (64, 128), "b": (128, 256), "c": (256, 64)}
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    specs = {"a": P("k", ("j", "i")), "b": P("k", "j"), "c": P(("i", "k"))}

    def loss(p, x):
        return (torch.tanh(torch.tanh(x @ p["a"]) @ p["b"]) @ p["c"]).square().mean()

    def seconds(order):
        mesh = ftp.AbstractMesh((2, 2, 2), order)
        step = ftp.shard(loss, mesh, specs, batch_specs=P("j"), hardware="h100")
        lowered = step.lower(params, torch.empty(64, 64, device="meta"))
        return cost_of(lowered.plan, ftp.Hardware.h100()).seconds

    found = [seconds(order) for order in itertools.permutations("ijk")]
    assert max(found) <= min(found) * (1 + planner.WORTH)


def test_shapes_of_tables_stay_small():
    cfg = models.LlamaConfig(layers=4)
    fn, params = ftp.functionalize(models.build(cfg, device="meta"))
    tables = []
    for layers, cut in itertools.product((1, 4), ({"tp": "tp"}, {"zero": "tp"})):
        cfg = models.LlamaConfig(layers=layers)
        fn, params = ftp.functionalize(models.build(cfg, device="meta"))
        specs = ftp.plan(params, models.specs(models.cuts(cfg), **cut))
        batch_specs = P("tp") if "zero" in cut else P()
        plan = (
            ftp.shard(
                models.lm_loss(fn), ftp.AbstractMesh((4,), ("tp",)), specs, batch_specs=batch_specs
            )
            .lower(params, models.lm_batch(cfg))
            .plan
        )
        tables.append(plan.solutions["tp"].largest_table)
    assert max(tables) <= 20_000, tables


def test_planning_leaves_its_graph_as_it_is():
    """One prepared program is planned twice, the same way."""

    def loss(params, x):
        return (x @ params["up"]).relu().mm(params["down"]).square().mean()

    params, names = {"down": torch.ones(8, 4), "up": torch.ones(4, 8)}, ["down", "up", "x"]
    leaves, tree = flatten((params, torch.ones(6, 4)))
    traced = trace(grad_and_value(loss), leaves, tree, "cpu", names=names)
    prepared = prepare(traced.gm, names, [True, True, False])
    specs = [P("tp"), P(("dp",), "tp"), P("dp")]

    def state(graph):
        return [
            (n.name, n.operands, dict(n.sizes), list(n.cuts), str(n.pending)) for n in graph.nodes
        ]

    before = state(prepared.graph)
    plans = [
        plan_prepared(prepared, {"dp": 2, "tp": 2}, specs, [P(), *specs[:2]]) for _ in range(2)
    ]
    assert state(prepared.graph) == before
    assert any(node.cuts for node in plans[0].graph.nodes)
    first, second = ([(n, c) for n, _, _, c, _ in state(plan.graph)] for plan in plans)
    assert first == second and plans[0].cost == plans[1].cost


def test_equal_parts_of_another_formula_are_resharded():
    """Two rows cut in 3 and taken twice are the parts of four rows cut in 3."""

    def program(x, at):
        return torch.where(at < 3, x, x.sin()) @ x

    mesh = ftp.simulated_mesh((2, 3), ("a", "b"))
    in_specs = P(("b", "a")), P(None, (ftp.units("a", 1), "b"))
    step = ftp.spmd(program, mesh, in_specs, P("b", ftp.units("a", 1)), certify=True)
    x, at = torch.randn(2, 2, 2, 2, dtype=torch.float64), torch.tensor([[1, 4], [3, 0]])
    torch.testing.assert_close(step(x, at), program(x, at))
