"""How far planning one mesh axis after another is from planning two axes together.

    python benchmarks/fold_gap.py [--json] [--graphs 60] [--limit 60]

Both are priced by one model of two axes. An op takes its seconds on one device, divided by the
ranks of each axis that cuts it (times ``REPLICATED_MATMUL`` for each axis on which a matmul is
left whole that could be cut). A reshard on one axis takes ``collective_seconds`` of the bytes that
the other axis leaves at that point: a value that the other axis cuts is cheaper to reshard. The
nanoseconds that break ties are left out.

- *fold*: ``make_plan`` for both orders of the axes; the program that comes out is priced by the
  model.
- *joint*: an integer program. Per op a binary for each pair of strategies (one an axis, as
  ``network.strategies`` lists them). Per value a graph of states (pairs of layouts) whose edges are
  reshards on one axis; every use draws a unit of flow from the state that the op gives to a state
  that the user's strategy takes, and an edge is paid once however many uses flow through it. Flow
  and payment are continuous: "exact" says that payments came out whole, otherwise the number is a
  lower bound. Placement constraints are those of ``prices.py``.

What is compared: programs in which no op has one factor within reach of both axes, so that nested
cuts of one dim, whose meaning depends on the order of the axes, do not occur. Random graphs are
built so: dims have names, and an axis cuts names of its own.

A fold may break rule D where the joint program cannot: see "breaks D" in README.md. Such graphs are
counted apart.
"""

import json
import math
import random
import statistics
import sys
import time

import numpy as np
import torch
from record import command_line, options, run_case, save, show
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

import ftp
import ftp.planning.prepare
from ftp.planning import cost_network as network
from ftp.planning import planner
from ftp.planning.cost import Hardware, Link, collective_seconds, op_seconds
from ftp.planning.graph import Reshard, Value
from ftp.planning.prices import PAD_LATENCIES, REPLICATED_MATMUL
from ftp.planning.strategies import GATHERED
from ftp.rules.op_kinds import VIEWS, is_matmul
from ftp.sharding.layout import PARTIAL, Layout, R, nominal

JOINED = Layout(
    "P", op="joined"
)  # no pending sum by itself: zero-padded, or contributed by one rank, to join one
HARDWARE = Hardware(
    link=Link(latency=1e-7)
)  # so low that it is the same for both axes (see planner._latency)


class Stop(Exception):
    """Carries what ``make_plan`` was called with."""


def captured(step, args):
    """The graph, specs and other arguments that ``step`` gives to the planner, before anything
    is planned.
    """

    def stop(graph, axes, specs, **options):
        raise Stop(graph, axes, specs, options)

    return _with_planner(stop, lambda: _stopped(step, args))


def _stopped(step, args):
    try:
        step.lower(*args)
    except Stop as found:
        return found.args
    raise AssertionError("nothing was planned")


def _with_planner(replacement, run):
    original = ftp.planning.prepare.make_plan
    ftp.planning.prepare.make_plan = replacement
    try:
        return run()
    finally:
        ftp.planning.prepare.make_plan = original


class Joint:
    """The integer program of one program over two axes."""

    def __init__(self, step, args):
        graph, axes, specs, options = captured(step, args)
        self.names, self.n = tuple(axes), tuple(axes.values())
        batch, data = list(options["batch_inputs"]), options["data_axes"]
        program = planner._decompose_on_demand(
            planner._Progress.of(graph, specs, batch), self.names, axes, data, options["decompose"]
        )
        graph = self.graph = program.graph
        self.nets = []
        for name in self.names:
            problem = planner._problem(program, name, (), axes, name in data, HARDWARE)
            self.nets.append(network._CostNetwork(problem, math.inf))
        self.link = self.nets[0].problem.hardware.link
        self.could_be_cut = [
            {n.name for n in graph.nodes if any(s.cut for s in net.options[n])} for net in self.nets
        ]
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def is_nested(self) -> bool:
        """Whether some op has a factor that both axes may cut."""
        a, b = (net.problem.reach.cuts for net in self.nets)
        return any({cut[0] for cut in a[n]} & {cut[0] for cut in b.get(n, ())} for n in a)

    def op_price(self, node, is_cut, is_pending) -> float:
        """Seconds of an op of the original graph that is cut, or passes a pending sum on, on
        each axis.
        """
        seconds = op_seconds(
            node.target,
            node.rule,
            {f: nominal(s) for f, s in node.rule.sizes.items()},
            node.results,
            HARDWARE,
        )
        for i in (0, 1):
            if is_cut[i]:
                seconds /= self.n[i]
            elif (
                not is_pending[i]
                and node.name in self.could_be_cut[i]
                and is_matmul(node.target)
                and node.depends
            ):
                seconds *= REPLICATED_MATMUL
        return seconds

    def fold(self, plan) -> tuple[float, int]:
        """Seconds of a folded plan in this model, and how many of its ops break rule D across a
        reshard of another axis.
        """
        seconds, breaks = 0.0, 0
        for node in plan.graph.nodes:
            if node.kind == "op":
                is_cut = [any(cut.axis == name for cut in node.cuts) for name in self.names]
                pending = {axis for found in node.pending.values() for axis, _ in found}
                is_pending = [name in pending for name in self.names]
                seconds += self.op_price(node, is_cut, is_pending)
                for name, c, p, could in zip(
                    self.names, is_cut, is_pending, self.could_be_cut, strict=True
                ):
                    if not c and not p and node.name in could and node.target not in VIEWS:
                        breaks += any(
                            _is_gathered_before_a_reshard(v.node, name) for v in node.operands
                        )
            elif node.kind == "reshard":
                reshard = node.target
                nbytes = math.prod(map(nominal, reshard.shape)) * node.results[0].dtype.itemsize
                for cut in node.cuts:
                    nbytes /= plan.axes[cut.axis]
                seconds += self.reshard_price(reshard.op, nbytes, reshard.n)
        return seconds, breaks

    def reshard_price(self, op: str, nbytes: float, n: int) -> float:
        if op == "pad":
            return PAD_LATENCIES * self.link.latency + collective_seconds(
                "all_gather", nbytes, n, self.link
            )
        return collective_seconds(op, nbytes, n, self.link)

    def solve(self, limit: float) -> tuple[float, bool]:
        """The cost, and whether payments came out whole."""
        graph, nets = self.graph, self.nets
        self.x = {}
        for node in graph.nodes:
            mine = {}
            for s in nets[0].options[node]:
                for t in nets[1].options[node]:
                    cost = 0.0
                    if node.kind == "op":
                        cost = self.op_price(
                            node, (s.cut, t.cut), (s.pending is not None, t.pending is not None)
                        )
                    mine[s, t] = self.variable(cost, 1)
            self.x[node] = mine
            self.row(dict.fromkeys(mine.values(), 1.0), 1.0, 1.0)
        for node in graph.nodes:
            for index in range(len(node.results)):
                self.value(Value(node, index))
        data = [
            (i, v, c)
            for i, (coefficients, _, _) in enumerate(self.rows)
            for v, c in coefficients.items()
        ]
        at, columns, values = zip(*data, strict=True)
        matrix = csr_array((values, (at, columns)), shape=(len(self.rows), len(self.costs)))
        # HiGHS has absolute tolerances: the median of what costs is brought to about one.
        scale = statistics.median([c for c in self.costs if c > 0] or [1.0])
        result = milp(
            np.array(self.costs) / scale,
            integrality=self.integral,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(
                matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
            ),
            options={"time_limit": limit, "mip_rel_gap": 1e-6},
        )
        if result.x is None or not result.success:
            raise RuntimeError(f"HiGHS: {result.message}")
        paid = result.x[[i for i, c in enumerate(self.costs) if c > 0]]
        return result.fun * scale, bool((np.abs(paid - paid.round()) < 1e-4).all())

    def variable(self, cost: float, integral: int = 0) -> int:
        self.costs.append(cost)
        self.integral.append(integral)
        return len(self.costs) - 1

    def row(self, coefficients: dict[int, float], low: float, high: float) -> None:
        self.rows.append((coefficients, low, high))

    def value(self, value: Value) -> None:
        """Reshards of a value, and a unit of flow for each of its uses."""
        uses = self.nets[0].users.get(value, [])
        outputs = list(
            zip(
                self.nets[0].required.get(value, ()),
                self.nets[1].required.get(value, ()),
                strict=True,
            )
        )
        if not uses and not outputs:
            return
        homes: dict[tuple[Layout, Layout], list[int]] = {}
        for (s, t), x in self.x[value.node].items():
            homes.setdefault((s.results[value.index], t.results[value.index]), []).append(x)
        layouts = [self.layouts(i, value) for i in (0, 1)]
        states = [(a, b) for a in layouts[0] for b in layouts[1]]
        edges = [
            (p, q, self.variable(cost))
            for p in states
            for q, cost in self.reshards(value, p, layouts)
            if math.isfinite(cost)
        ]
        paid = {y: {y: 1.0} for _, _, y in edges}
        for user, slot in uses:
            sinks = [
                ({x: 1.0}, (s, t), (s.operands[slot], t.operands[slot]))
                for (s, t), x in self.x[user].items()
            ]
            self.flow(
                homes,
                states,
                edges,
                paid,
                [
                    (amount, self.accepted(user, pair, need, layouts))
                    for amount, pair, need in sinks
                ],
            )
        for need in outputs:
            self.flow(
                homes,
                states,
                edges,
                paid,
                [({}, [_accepts_output(layouts[i], need[i]) for i in (0, 1)])],
            )

    def layouts(self, i: int, value: Value) -> list[Layout]:
        net = self.nets[i]
        homes = {s.results[value.index] for s in net.options[value.node]}
        needs = {
            s.operands[slot] for user, slot in net.users.get(value, ()) for s in net.options[user]
        }
        found = (
            homes
            | {need for need in needs if need.kind == "S"}
            | {need for need in net.required.get(value, ()) if need is not None}
        )
        assert not any(home.kind == "P" and home != PARTIAL for home in homes), "a pending maximum"
        found.add(R)
        if any(layout.kind == "S" for layout in found):
            found.add(GATHERED)
        if PARTIAL in needs:
            found.add(JOINED)
        return sorted(found, key=repr)

    def reshards(self, value: Value, state, layouts):
        """The states one reshard away, and what it costs."""
        for i in (0, 1):
            here, other = state[i], state[1 - i]
            if other == JOINED and i == 0:
                continue  # on the first axis first: a join moves no bytes on the other
            nbytes = self.nets[i].prices.nbytes(value) / (self.n[1 - i] if other.kind == "S" else 1)
            for there in layouts[i]:
                cost = self.step_price(i, value, here, there, nbytes)
                if cost is not None:
                    yield ((there, other) if i == 0 else (other, there)), cost

    def step_price(
        self, i: int, value: Value, here: Layout, there: Layout, nbytes: float
    ) -> float | None:
        if here in (there, JOINED) or there == PARTIAL:
            return None
        if there == JOINED:
            return {"R": 0.0, "S": self.reshard_price("pad", nbytes, self.n[i]), "P": None}[
                here.kind
            ]
        if here.kind == "R":
            return 0.0 if there.kind == "S" else None
        if there == (GATHERED if here.kind == "P" else R):
            return None
        if here.kind == "S" and not self.nets[i].prices.may_reshard(value, here):
            return None
        return self.reshard_price(Reshard("", self.n[i], here, there, ()).op, nbytes, self.n[i])

    def accepted(self, user, pair, need, layouts):
        """Per axis the layouts in which an operand serves a strategy."""
        return [
            [
                have
                for have in layouts[i]
                if _serves(have, need[i], pair[i], self.could_be_cut[i], user)
            ]
            for i in (0, 1)
        ]

    def flow(self, homes, states, edges, paid, sinks) -> None:
        """A unit from where the value is to where it is wanted; ``sinks``: (amount, accepted
        layouts), an empty amount being one.
        """
        balance: dict[tuple[Layout, Layout], dict[int, float]] = {state: {} for state in states}
        for home, xs in homes.items():
            for x in xs:
                balance[home][x] = balance[home].get(x, 0.0) + 1.0
        for p, q, y in edges:
            f = self.variable(0.0)
            balance[p][f] = -1.0
            balance[q][f] = 1.0
            self.row({f: 1.0, y: -1.0}, -np.inf, 0.0)
        for amount, (first, second) in sinks:
            drawn = {self.variable(0.0): (a, b) for a in first for b in second}
            for g, state in drawn.items():
                balance[state][g] = -1.0
            total = dict.fromkeys(drawn, 1.0)
            if amount:
                self.row({**total, **{x: -c for x, c in amount.items()}}, 0.0, 0.0)
            else:
                self.row(total, 1.0, 1.0)
        for coefficients in balance.values():
            if coefficients:
                self.row(coefficients, 0.0, 0.0)


def _is_gathered_before_a_reshard(node, axis: str) -> bool:
    """Whether a gather over ``axis`` and then a reshard of another axis lie before this node's
    result, with nothing but views between.
    """
    resharded = False
    while node.kind == "reshard" or (node.kind == "op" and node.target in VIEWS):
        if node.kind == "reshard":
            if node.target.axis == axis:
                return resharded and node.target.op == "all_gather"
            resharded = True
        node = node.operands[0].node
    return False


def _serves(have: Layout, need: Layout, strategy, could_be_cut, user) -> bool:
    if need == GATHERED:
        return have == GATHERED
    if need.kind == "S":
        return have == need
    if need.kind == "P":
        return have == PARTIAL or (
            have == JOINED and strategy.pending is not None and len(strategy.pending) > 1
        )
    idle = (
        user.kind == "op"
        and strategy.cut is None
        and strategy.pending is None
        and user.name in could_be_cut
    )
    return have == R or (have == GATHERED and not idle)  # rule D


def _accepts_output(layouts, need: Layout | None) -> list[Layout]:
    if need is None:
        return [have for have in layouts if have.kind != "P"]
    return [have for have in layouts if have == need or (need.kind == "R" and have.kind == "R")]


SIZES = (8, 16, 32)  # ops of the random graphs
NAMES = {"i": 512, "j": 1024, "k": 2048, "l": 256, "m": 1024, "n": 512}
APPLY = {
    "mm": torch.mm,
    "add": torch.add,
    "mul": torch.mul,
    "tanh": lambda a, _: torch.tanh(a),
    "t": lambda a, _: a.t(),
}
OWN = {"a": "ijk", "b": "lmn"}  # the names that an axis may cut


def random_program(seed: int, ops: int):
    """A graph of matmuls, sums and pointwise ops over matrices with named dims; returns
    make_step(axes) and its arguments.
    """
    draw = random.Random(seed)
    inputs = []
    for _ in range(4):
        inputs.append("".join(draw.sample(sorted(NAMES), 2)))
    program: list[tuple] = []
    dims = list(inputs)
    while len(program) < ops:
        i, j = draw.randrange(len(dims)), draw.randrange(len(dims))
        a, b = dims[i], dims[j]
        kind = draw.choice(["mm", "mm", "mm", "add", "mul", "tanh", "t"])
        if kind == "mm":
            if a[1] != b[0] or a[0] == b[1]:
                continue
            dims.append(a[0] + b[1])
        elif kind in ("add", "mul"):
            if a != b or i == j:
                continue
            dims.append(a)
        elif kind == "t":
            if draw.random() < 0.5:
                continue
            dims.append(a[::-1])
        else:
            dims.append(a)
        program.append((kind, i, j))
    used = {v for kind, i, j in program for v in ((i, j) if kind in ("mm", "add", "mul") else (i,))}
    outputs = [v for v in range(len(dims)) if v not in used and v >= len(inputs)]

    def fn(state, values):
        values = list(values)
        for kind, i, j in program:
            values.append(APPLY[kind](values[i], values[j]))
        return tuple(values[v] for v in outputs)

    def spec(name: str) -> ftp.P:
        """Each axis cuts, mostly, a dim that it owns."""
        return ftp.P(
            *[
                next((a for a, own in OWN.items() if d in own and draw.random() < 0.7), None)
                for d in _one_each(name)
            ]
        )

    def _one_each(name: str):
        owners = [next(a for a, own in OWN.items() if d in own) for d in name]
        keep = draw.randrange(2) if owners[0] == owners[1] else None
        return [d if keep is None or keep == at else " " for at, d in enumerate(name)]

    in_specs, out_specs = [spec(name) for name in inputs], tuple(spec(dims[v]) for v in outputs)
    args = (
        torch.empty(1, device="meta"),
        [torch.empty(NAMES[d[0]], NAMES[d[1]], device="meta") for d in inputs],
    )
    return lambda mesh: ftp.spmd(fn, mesh, (ftp.P(), in_specs), out_specs, data_axes=()), args


def mlp(case: dict):
    """Forward and backward of one block; the batch cut on a, the hidden dim on b."""
    import models

    cfg = models.MLPConfig(dim=1024, hidden=4096, layers=1, classes=512)
    fn, params = ftp.functionalize(models.build(cfg, device="meta"))
    cuts = {k: (n, None if k.startswith("head") else d) for k, (n, d) in models.MLP_CUTS.items()}
    specs = ftp.plan(params, models.specs(cuts, tp="b"))
    batch = (
        torch.empty(2048, 1024, device="meta"),
        torch.empty(2048, dtype=torch.int64, device="meta"),
    )
    return lambda mesh: ftp.shard(
        models.class_loss(fn), mesh, specs, batch_specs=ftp.P("a"), reshard_after_forward=False
    ), (params, batch)


def decoder(case: dict):
    """Forward and backward of one block, the vocabulary whole; sequences cut on a (with ``zero``
    parameters too), heads and hidden on b.
    """
    import models

    cfg = models.LlamaConfig(vocab=1000, dim=1024, layers=1, heads=16, hidden=4096)
    fn, params = ftp.functionalize(models.build(cfg, device="meta"))
    cuts = {
        k: (n, None if k in ("emb.weight", "head.weight") else d)
        for k, (n, d) in models.LLAMA_CUTS.items()
    }
    specs = ftp.plan(params, models.specs(cuts, tp="b", zero="a" if case.get("zero") else None))
    batch = tuple(torch.empty(8, 1024, dtype=torch.int64, device="meta") for _ in range(2))
    return lambda mesh: ftp.shard(
        models.lm_loss(fn), mesh, specs, batch_specs=ftp.P("a"), reshard_after_forward=False
    ), (params, batch)


def measure(case: dict) -> dict:
    """Costs of both folds and of the joint program."""
    if case["kind"] == "random":
        make_step, args = random_program(case["seed"], case["ops"])
    else:
        make_step, args = {"mlp": mlp, "decoder": decoder}[case["kind"]](case)
    sizes = {"a": case.get("a", 2), "b": case.get("b", 4)}

    def step_of(names):
        return make_step(
            ftp.AbstractMesh(tuple(sizes[name] for name in names), tuple(names), device_type="cuda")
        )

    joint = Joint(step_of("ab"), args)
    if joint.is_nested():
        return {"skipped": "one factor is within reach of both axes"}
    row: dict = {"ops": sum(node.kind == "op" for node in joint.graph.nodes)}
    planner.FEW_NODES = -1  # each order is planned alone
    for order in ("ab", "ba"):
        plan = _with_planner(
            lambda *given, **options: planner.make_plan(*given, **options | {"hardware": HARDWARE}),
            lambda order=order: step_of(order).lower(*args).plan,
        )
        if not all(plan.kept_rules.values()):
            return {**row, "skipped": "no plan meets the placement constraints"}
        assert all(s.optimal for s in plan.solutions.values()) and "".join(plan.axes) == order
        row[order], row[f"breaks D {order}"] = joint.fold(plan)
    start = time.perf_counter()
    try:
        row["joint"], row["exact"] = joint.solve(case["limit"])
    except RuntimeError as e:
        return {**row, "skipped": str(e)}
    row["seconds"] = round(time.perf_counter() - start, 2)
    row["variables"] = len(joint.costs)
    for order in ("ab", "ba"):
        row[f"gap {order}"] = round(row[order] / row["joint"] - 1, 9)
    row["gap best"] = min(row["gap ab"], row["gap ba"])
    return row


COLUMNS = (
    "case",
    "ops",
    "joint",
    "ab",
    "ba",
    "gap ab",
    "gap ba",
    "gap best",
    "breaks D ab",
    "breaks D ba",
    "exact",
    "variables",
    "seconds",
)
COLUMNS += ("skipped", "failed")


def summary(rows: list[dict]) -> dict:
    """Gaps over the graphs compared; folds that break rule D, which the joint program keeps, do
    not count.
    """
    rows = [row for row in rows if "gap best" in row]
    kept = [row for row in rows if not row["breaks D ab"] and not row["breaks D ba"]]
    found: dict = {
        "graphs": len(rows),
        "joint exact": sum(row["exact"] for row in rows),
        "a fold breaks D": len(rows) - len(kept),
    }
    found["a fold is below the joint program"] = sum(
        min(row["gap ab"], row["gap ba"]) < -1e-6 for row in kept
    )
    for key in ("gap ab", "gap ba", "gap best") if kept else ():
        gaps = sorted(row[key] for row in kept)
        p90 = gaps[int(0.9 * (len(gaps) - 1))]
        found[key] = {
            "none": sum(g < 1e-6 for g in gaps),
            "mean": statistics.mean(gaps),
            "p90": p90,
            "largest": gaps[-1],
        }
    return found


def main() -> None:
    parser = command_line(__doc__, "fold_gap")
    parser.add_argument("--graphs", type=int, default=60, help="random graphs of each size")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one integer program")
    args = options(parser, measure)
    rows = []
    for ops in SIZES:
        for seed in range(args.graphs):
            case = {"kind": "random", "ops": ops, "seed": seed, "limit": args.limit}
            rows.append({"case": f"random {ops} ops, seed {seed}", **measure(case)})
            print(".", end="", file=sys.stderr, flush=True)
    models = {
        "mlp, dp x tp": {"kind": "mlp"},
        "decoder, dp x tp": {"kind": "decoder"},
        "decoder, zero x tp": {"kind": "decoder", "zero": True},
    }
    for name, case in models.items():
        rows.append(
            {"case": name, **run_case(__file__, {**case, "limit": args.limit}, 3 * args.limit)}
        )
    print(file=sys.stderr)
    show(rows, COLUMNS)
    summaries = {
        f"random {ops} ops": summary([r for r in rows if r["case"].startswith(f"random {ops} ")])
        for ops in SIZES
    }
    print(json.dumps(summaries, indent=1))
    if args.json:
        save(
            "fold_gap",
            {"mesh": {"a": 2, "b": 4}, "limit": args.limit, "summary": summaries, "rows": rows},
        )


if __name__ == "__main__":
    main()
