"""Programs whose graphs are not narrow: recurrences, an encoder-decoder under context parallelism,
random graphs with long-range operands.

    python benchmarks/wide.py [--json] [--only gru] [--limit 120]

Each case is a fresh process on one thread; one row a mesh axis. "seconds" is the time that
``network.solve`` takes on the axis, "lower" the time of the whole ``step.lower``, tracing included.
"gap" is (cost - bound) / cost, zero where the plan is optimal.
"""

import random
import sys
import time

from record import command_line, options, run_case, save, show

CASES = {
    **{
        f"gru {steps} steps, {name}": {"kind": "gru", "steps": steps, **cuts}
        for steps in (20, 40)
        for name, cuts in {
            "u rows": {"u": ["tp", None]},
            "u columns": {"u": [None, "tp"]},
            "u rows, batch": {"u": ["tp", None], "batch": 1},
            "u columns, batch": {"u": [None, "tp"], "batch": 1},
            "u and w columns, batch": {"u": [None, "tp"], "w": [None, "tp"], "batch": 1},
            "u rows, time": {"u": ["tp", None], "batch": 0},
        }.items()
    },
    **{
        f"t5 {layers}+{layers} layers, {name}": {"kind": "t5", "layers": layers, "weights": weights}
        for layers in (2, 6)
        for name, weights in {"cp": False, "cp and weights": True}.items()
    },
    **{
        f"random {ops} ops, seed {seed}": {"kind": "random", "ops": ops, "seed": seed}
        for ops in (200, 500)
        for seed in (0, 1)
    },
}


def gru(case: dict):
    """An unrolled gated recurrent unit over a (time, batch, width) input."""
    import torch

    import ftp

    width, steps = 1024, case["steps"]

    def loss(params, x):
        h = x.new_zeros(x.shape[1], width)
        for t in range(steps):
            z, r, n = (x[t] @ params["w"] + h @ params["u"]).chunk(3, dim=1)
            h = (1 - torch.sigmoid(z)) * torch.tanh(n * torch.sigmoid(r)) + torch.sigmoid(z) * h
        return h.sum()

    params = {name: torch.empty(width, 3 * width, device="meta") for name in ("w", "u")}
    axes = {"dp": 2, "tp": 4} if "batch" in case else {"tp": 4}
    batch_specs = ftp.P(*[None] * case["batch"], "dp") if "batch" in case else ftp.P()
    mesh = ftp.AbstractMesh(tuple(axes.values()), tuple(axes), device_type="cuda")
    step = ftp.shard(
        loss,
        mesh,
        {"w": ftp.P(*case.get("w", [])), "u": ftp.P(*case["u"])},
        batch_specs=batch_specs,
    )
    return step, (params, torch.empty(steps, 64, width, device="meta"))


def t5(case: dict):
    """An encoder-decoder with relative biases, cross attention and one embedding at three
    places; tokens cut on their sequence dim.
    """
    import torch
    from models import RMSNorm
    from torch import nn
    from torch.nn import functional as F

    import ftp

    vocab, dim, heads, hidden, seq = 32128, 1024, 16, 4096, 2048

    class Bias(nn.Module):
        """The bias of a head for a distance, by logarithmic buckets."""

        def __init__(self, causal: bool):
            super().__init__()
            self.causal, self.table = causal, nn.Embedding(32, heads)

        def forward(self, x):
            at = torch.arange(x.shape[1], device=x.device)
            distance = at[None, :] - at[:, None]
            far = (distance.abs().float().clamp(min=1).log() * 2).long().clamp(max=15)
            bias = self.table(far + 16 * (distance > 0)).permute(2, 0, 1)
            return bias.masked_fill(distance > 0, -1e9) if self.causal else bias

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

        def forward(self, x, memory, bias=None):
            q, k, v = (
                w(t).unflatten(-1, (heads, -1)).transpose(1, 2)
                for w, t in ((self.q, x), (self.k, memory), (self.v, memory))
            )
            scores = q @ k.transpose(-1, -2)
            out = torch.softmax(scores if bias is None else scores + bias, dim=-1) @ v
            return self.o(out.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self, crosses: bool):
            super().__init__()
            self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(3))
            self.attn, self.cross = Attention(), Attention() if crosses else None
            self.up, self.down = (
                nn.Linear(dim, hidden, bias=False),
                nn.Linear(hidden, dim, bias=False),
            )

        def forward(self, x, bias, memory=None):
            y = self.norms[0](x)
            x = x + self.attn(y, y, bias)
            if self.cross is not None:
                x = x + self.cross(self.norms[1](x), memory)
            return x + self.down(F.relu(self.up(self.norms[2](x))))

    class T5(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim)
            self.biases = nn.ModuleList(Bias(causal) for causal in (False, True))
            self.encoder = nn.ModuleList(Block(False) for _ in range(case["layers"]))
            self.decoder = nn.ModuleList(Block(True) for _ in range(case["layers"]))

        def forward(self, source, target):
            memory, x = self.emb(source), self.emb(target)
            bias = self.biases[0](memory)
            for block in self.encoder:
                memory = block(memory, bias)
            bias = self.biases[1](x)
            for block in self.decoder:
                x = block(x, bias, memory)
            return F.linear(x, self.emb.weight)

    with torch.device("meta"):
        model = T5()
    fn, params = ftp.functionalize(model)

    def loss(params, batch):
        source, target, labels = batch
        return F.cross_entropy(fn(params, source, target).flatten(0, 1), labels.flatten())

    specs = {name: ftp.P("cp") if case["weights"] else ftp.P() for name in params}
    step = ftp.shard(
        loss,
        ftp.AbstractMesh((4,), ("cp",), device_type="cuda"),
        specs,
        batch_specs=ftp.P(None, "cp"),
    )
    return step, (
        params,
        tuple(torch.empty(8, seq, dtype=torch.int64, device="meta") for _ in range(3)),
    )


def random_graph(case: dict):
    """Ops on square matrices whose operands are any values so far, all values without a use
    being summed into the result.
    """
    import torch

    import ftp

    size = 1024

    def fn(state, inputs):
        draw = random.Random(case["seed"])
        values, unused = list(inputs), set(range(len(inputs)))
        for _ in range(case["ops"]):
            i, j = draw.randrange(len(values)), draw.randrange(len(values))
            kind = draw.choice(["mm", "add", "mul", "tanh", "t"])
            a, b = values[i], values[j]
            match kind:
                case "mm":
                    values.append(a @ b)
                case "add":
                    values.append(a + b)
                case "mul":
                    values.append(a * b)
                case "tanh":
                    values.append(torch.tanh(a))
                case "t":
                    values.append(a.t())
            unused -= {i, j} if kind in ("mm", "add", "mul") else {i}
            unused.add(len(values) - 1)
        return [values[i] for i in sorted(unused)[-3:]], sum(
            values[i].sum() for i in sorted(unused)
        )

    inputs = [torch.empty(size, size, device="meta") for _ in range(4)]
    specs = [ftp.P("a"), ftp.P(None, "a"), ftp.P("a"), ftp.P()]
    step = ftp.spmd(
        fn, ftp.AbstractMesh((4,), ("a",), device_type="cuda"), (ftp.P(), specs), data_axes=()
    )
    return step, (torch.empty(1, device="meta"), inputs)


def measure(case: dict) -> dict:
    import ftp.planning.planner

    step, args = {"gru": gru, "t5": t5, "random": random_graph}[case["kind"]](case)
    seconds: list[float] = []
    solve = ftp.planning.planner.solve

    def timed(problem):
        start = time.perf_counter()
        try:
            return solve(problem)
        finally:
            seconds.append(time.perf_counter() - start)

    ftp.planning.planner.solve = timed
    start = time.perf_counter()
    lowered = step.lower(*args)
    total = time.perf_counter() - start
    rows = [
        {
            "axis": axis,
            "seconds": round(spent, 2),
            "cost": s.cost,
            "bound": s.bound,
            "gap": 0.0 if s.optimal else (s.cost - s.bound) / s.cost,
            "optimal": s.optimal,
            "largest_table": s.largest_table,
            "kept_rules": lowered.plan.kept_rules[axis],
        }
        for (axis, s), spent in zip(lowered.plan.solutions.items(), seconds, strict=True)
    ]
    return {"lower": round(total, 2), "nodes": len(lowered.plan.graph.nodes), "axes": rows}


COLUMNS = (
    "case",
    "axis",
    "seconds",
    "lower",
    "nodes",
    "cost",
    "bound",
    "gap",
    "optimal",
    "largest_table",
    "kept_rules",
    "failed",
)


def main() -> None:
    parser = command_line(__doc__, "wide")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--limit", type=float, default=120, help="seconds a case may take")
    args = options(parser, measure)
    rows = []
    for name, case in CASES.items():
        if args.only in name:
            found = run_case(__file__, case, args.limit)
            rest = {key: value for key, value in found.items() if key != "axes"}
            rows += [{"case": name, **rest, **axis} for axis in found.get("axes", [{}])]
            print(f"{name}: {found.get('failed') or found['lower']}", file=sys.stderr)
    show(rows, COLUMNS)
    if args.json:
        save("wide", {"limit": args.limit, "rows": rows})


if __name__ == "__main__":
    main()
