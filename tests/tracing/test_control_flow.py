"""torch's operators of control flow in a step equal plain Python's on one device."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as torch_map
from torch.utils._python_dispatch import TorchDispatchMode

import ftp
from ftp import P
from ftp.api.certify import certify
from ftp.certification.certificate_file import load_certificate
from ftp.certification.checker import check as check_certificate
from ftp.errors import CertificateError, FtpError, TraceError

Params = dict[str, Tensor]
MESHES = {(2,): ("tp",), (3,): ("tp",), (2, 2): ("dp", "tp")}
SPECS = [P(None, "tp"), P("tp"), P()]


def inputs(rows: int, size: int, seed: int) -> tuple[Params, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return {"a": draw(size, size), "b": draw(size, size)}, draw(rows, size)


def on_one_device(fn: Callable[..., Tensor], p: Params, x: Tensor) -> tuple[Tensor, Params]:
    leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
    loss = fn(leaves, x)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    filled = [
        torch.zeros_like(v) if g is None else g for v, g in zip(p.values(), grads, strict=True)
    ]
    return loss.detach(), dict(zip(p, filled, strict=True))


def check(fn: Any, expected: Any, shape: tuple[int, ...], spec: Any, p: Params, x: Tensor) -> Any:
    mesh = ftp.simulated_mesh(shape, MESHES[shape])
    batch = P("dp" if len(shape) > 1 else "tp")
    step = ftp.shard(fn, mesh, {"a": spec, "b": spec}, batch_specs=batch, certify=True)
    loss, grads = step(p, x)
    right, slopes = on_one_device(expected, p, x)
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(grads, slopes, rtol=1e-12, atol=1e-10)
    return step


# Loops.


def by_scan(p: Params, x: Tensor) -> Tensor:
    def step(carry: Any, row: Any) -> Any:
        h = torch.tanh(carry["h"] @ p["a"] + row)
        return {"h": h}, (h.sum(), (h * h).clone())

    carry, (sums, squares) = scan(step, {"h": x[0]}, x)
    last, reverse = scan(
        lambda c, r: (torch.sin(c @ p["b"] + r), c * r), x[0], x.t(), dim=1, reverse=True
    )
    return (
        carry["h"].sum() + sums.sin().sum() + squares.mean() + last.sum() + (reverse**2).sum().sin()
    )


def scanned(p: Params, x: Tensor) -> Tensor:
    h, sums, squares = x[0], [], []
    for row in x:
        h = torch.tanh(h @ p["a"] + row)
        sums, squares = [*sums, h.sum()], [*squares, h * h]
    last, reverse = x[0], []
    for row in x.flip(0):
        reverse, last = [*reverse, last * row], torch.sin(last @ p["b"] + row)
    total = h.sum() + torch.stack(sums).sin().sum() + torch.stack(squares).mean() + last.sum()
    return total + (torch.stack(reverse) ** 2).sum().sin()


def by_map(p: Params, x: Tensor) -> Tensor:
    return torch_map(lambda row, w: torch.sin(row @ w) * row.amax(), x, p["a"]).square().sum()


def mapped(p: Params, x: Tensor) -> Tensor:
    return torch.stack([torch.sin(row @ p["a"]) * row.amax() for row in x]).square().sum()


def by_while_loop(p: Params, x: Tensor) -> Tensor:
    _, y = while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, torch.tanh(y @ p["a"]) * i), (torch.tensor(1), x)
    )
    _, y = while_loop(
        lambda i, y: i.sum() < 2, lambda i, y: (i + 1, torch.sin(y @ p["b"])), (torch.zeros(1), y)
    )
    count, state = while_loop(
        lambda i, s: 2 * i < x.shape[1], lambda i, s: (i + 1, {"y": s["y"] + i}), (0, {"y": y})
    )
    return state["y"].square().sum() + count


def looped(p: Params, x: Tensor) -> Tensor:
    for i in (1, 2):
        x = torch.tanh(x @ p["a"]) * i
    for _ in range(2):
        x = torch.sin(x @ p["b"])
    count = -(-x.shape[1] // 2)
    for i in range(count):
        x = x + i
    return x.square().sum() + count


def by_associative_scan(p: Params, x: Tensor) -> Tensor:
    def combine(one: Any, other: Any) -> Any:
        return one[0] * other[0], other[0] * one[1] + other[1]

    given = torch.sigmoid(x), x @ p["a"]
    return associative_scan(combine, given, 0, combine_mode="generic")[1].square().sum()


def accumulated(p: Params, x: Tensor) -> Tensor:
    state, total = torch.zeros_like(x[0]), 0.0
    for gate, value in zip(torch.sigmoid(x), x @ p["a"], strict=True):
        state = gate * state + value
        total = total + state.square().sum()
    return total  # type: ignore[return-value]


@torch.compiler.nested_compile_region
def region(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def by_regions(p: Params, x: Tensor) -> Tensor:
    return region(region(x, p["a"]), p["b"]).square().sum()


def plain_regions(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ p["a"]) @ p["b"]).square().sum()


LOOPS = [
    (by_scan, scanned),
    (by_map, mapped),
    (by_while_loop, looped),
    (by_associative_scan, accumulated),
    (by_regions, plain_regions),
]


@pytest.mark.parametrize(("fn", "expected"), LOOPS, ids=lambda fn: fn.__name__)
@few_or_many(data=st.data(), few=1, many=40)
def test_loops(fn, expected, data):
    shape = data.draw(st.sampled_from(list(MESHES)))
    spec = data.draw(st.sampled_from(SPECS))
    rows, size = data.draw(st.integers(3, 6)), data.draw(st.integers(2, 5))
    check(fn, expected, shape, spec, *inputs(rows, size, 0))


def test_the_steps_of_a_scan_are_planned_as_one_layer():
    def loss(p: Tensor, x: Tensor) -> Tensor:
        carry, _ = scan(lambda c, w: (torch.tanh(c @ w), c.sum()), x, p)
        return carry.sum()

    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(loss, mesh, P(None, None, "tp"))
    lowered = step.lower(torch.randn(12, 4, 4), torch.randn(3, 4))
    assert lowered.plan.alike > 5


def test_a_mapped_dim_stays_cut():
    mesh = ftp.simulated_mesh((2,), ("dp",))
    step = ftp.spmd(lambda x: torch_map(torch.sin, x), mesh, P("dp"), P("dp"))
    assert not step.lower(torch.randn(5, 3)).collectives


def test_a_mapped_function_that_vmap_refuses_is_called_slice_by_slice():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x / 2

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    def loss(p: Params, x: Tensor) -> Tensor:
        return torch_map(lambda row: Half.apply(row @ p["a"]), x).square().sum()

    def expected(p: Params, x: Tensor) -> Tensor:
        return (x @ p["a"] / 2).square().sum()

    check(loss, expected, (2,), P(None, "tp"), *inputs(3, 4, 0))


# Branches.


def branches(p: Params, x: Tensor) -> Tensor:
    y, d = torch.cond(
        x.sum() > 0,
        lambda x, d: (torch.tanh(x @ p["a"]), {"z": d["w"].sum(0)}),
        lambda x, d: ((x @ p["b"]).sin(), {"z": (d["w"] @ d["w"]).mean(0)}),
        (x, {"w": p["a"]}),
    )
    return y.square().mean() + d["z"].sin().sum()


def branched(p: Params, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return torch.tanh(x @ p["a"]).square().mean() + p["a"].sum(0).sin().sum()
    return (x @ p["b"]).sin().square().mean() + (p["a"] @ p["a"]).mean(0).sin().sum()


def nested(p: Params, x: Tensor) -> Tensor:
    def first(x: Tensor) -> Tensor:
        positive = (x @ p["a"]).sum() > 0
        return torch.cond(positive, lambda x: x @ p["a"], lambda x: x @ p["b"], (x,)).tanh()

    return torch.cond(x.mean() > 0, first, lambda x: x * p["a"].sum(), (x,)).square().sum()


def plainly_nested(p: Params, x: Tensor) -> Tensor:
    if x.mean() > 0:
        y = (x @ p["a"] if (x @ p["a"]).sum() > 0 else x @ p["b"]).tanh()
    else:
        y = x * p["a"].sum()
    return y.square().sum()


def without_finite_gradient(p: Params, x: Tensor) -> Tensor:
    s = (x @ p["a"]).square().sum()
    y = torch.cond(s > 1e9, lambda s: torch.log(s * 0), lambda s: s.sin(), (s,))
    return y + torch.cond(s < 0, lambda: p["b"].sum() / 0, lambda: p["b"].cos().sum())


def finite(p: Params, x: Tensor) -> Tensor:
    return (x @ p["a"]).square().sum().sin() + p["b"].cos().sum()


def second_derivative(p: Params, x: Tensor) -> Tensor:
    def energy(x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0,
            lambda x: torch.tanh(x @ p["a"]).sum(),
            lambda x: (x @ p["b"]).sin().sum(),
            (x,),
        )

    slope = torch.func.grad(energy)(x)
    along = torch.func.jvp(energy, (x,), (torch.ones_like(x),))[1]
    return slope.square().sum() + along


def plain_second_derivative(p: Params, x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    energy = torch.tanh(y @ p["a"]).sum() if x.sum() > 0 else (y @ p["b"]).sin().sum()
    (slope,) = torch.autograd.grad(energy, y, create_graph=True)
    return slope.square().sum() + slope.sum()


def of_each_row(p: Params, x: Tensor) -> Tensor:
    def of(row: Tensor) -> Tensor:
        y = torch.cond(
            row.sum() > 0, lambda r: torch.tanh(r @ p["a"]), lambda r: r @ p["b"], (row,)
        )
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,))

    return torch.vmap(of)(x).square().sum()


def of_rows(p: Params, x: Tensor) -> Tensor:
    rows = [torch.tanh(r @ p["a"]) if r.sum() > 0 else r @ p["b"] for r in x]
    y = torch.stack(rows)
    return (y.sin() if x.sum() > 0 else y.cos()).square().sum()


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class Cosine(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return -grad * ctx.saved_tensors[0].sin()


cosine = Cosine.apply


def by_functions(p: Params, x: Tensor) -> Tensor:
    """Of captured tensors; one by another name of its ``apply``."""

    def one(x: Tensor) -> Tensor:
        y = ftp.constrain(p["a"], P(None, "tp"))
        return x @ cosine(y) + ftp.scan(lambda w, x: x * w, p["b"], x.sum(0))

    return torch.cond(x.sum() > 0, one, lambda x: Cosine.apply(x @ p["b"]), (x,)).square().sum()


def by_functions_plainly(p: Params, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return (x @ p["a"].cos() + x.sum(0) * p["b"].prod(0)).square().sum()
    return (x @ p["b"]).cos().square().sum()


def by_autograd(p: Params, x: Tensor) -> Tensor:
    def one(x: Tensor) -> Tensor:
        y = x @ p["a"]
        return torch.cond(y.sum() > 0, lambda y: Sine.apply(y), lambda y: y.cos(), (y,))

    def other(x: Tensor) -> Tensor:
        return Sine.apply(x @ p["b"]) * 2  # type: ignore[operator]

    return torch.cond(x.sum() > 0, one, other, (x,)).square().sum()


def by_autograd_plainly(p: Params, x: Tensor) -> Tensor:
    y = x @ p["a"]
    chosen = (y.sin() if y.sum() > 0 else y.cos()) if x.sum() > 0 else (x @ p["b"]).sin() * 2
    return chosen.square().sum()


BRANCHES = [
    (branches, branched),
    (nested, plainly_nested),
    (without_finite_gradient, finite),
    (second_derivative, plain_second_derivative),
    (of_each_row, of_rows),
    (by_functions, by_functions_plainly),
    (by_autograd, by_autograd_plainly),
]


@pytest.mark.cases_by_default(3)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize(("fn", "expected"), BRANCHES, ids=lambda fn: fn.__name__)
@few_or_many(data=st.data(), few=1, many=40)
def test_branches(fn, expected, data):
    shape = data.draw(st.sampled_from(list(MESHES)))
    spec = data.draw(st.sampled_from(SPECS))
    rows, size = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 5))
    p, x = inputs(rows, size, data.draw(st.integers(0, 9)))
    step = check(fn, expected, shape, spec, p, x)
    right, slopes = on_one_device(expected, p, -x)
    loss, grads = step(p, -x)  # by the same program
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(grads, slopes, rtol=1e-12, atol=1e-10)


def test_a_predicate_that_is_known_takes_one_branch():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(
        lambda x: torch.cond(torch.tensor(3) > 2, torch.sin, lambda x: x @ x.t(), (x,)),
        mesh,
        P("tp"),
        P("tp"),
    )
    x = torch.randn(3, 3)
    torch.testing.assert_close(step(x), x.sin())
    assert [n.target for n in step.lower(x).graph.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.sin.default
    ]


def test_each_rank_has_its_own_predicate_in_per_rank_code():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    fn = ftp.local(
        lambda x: torch.cond(
            x.sum() > 0, lambda x: ftp.axis.all_reduce(x, "tp"), lambda x: x * 3, (x,)
        ),
        mesh,
        P("tp"),
        P("tp"),
    )
    x = torch.tensor([1.0, 2.0, -4.0, -8.0])
    found = ftp.spmd(fn, mesh, P("tp"), P("tp"), certify=True)(x)
    assert found.tolist() == [-3.0, -6.0, -12.0, -24.0]


# One branch runs.


class Calls(TorchDispatchMode):
    """The names of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def communicating(w: Tensor, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x @ w).erf(), lambda x: (x @ w @ w).expm1(), (x,))


def plainly(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).erf() if x.sum() > 0 else (x @ w @ w).expm1()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_branch_that_is_not_taken_is_not_computed(n):
    mesh = ftp.simulated_mesh((n,), ("tp",))
    step = ftp.spmd(communicating, mesh, (P("tp"), P(None, "tp")), P())
    w, x = inputs(5, 6, 0)[0]["a"], inputs(5, 6, 0)[1]
    x = x * x.sum().sign()
    step(w, x)  # traced and planned
    for given_x, taken in ((x, "erf"), (-x, "expm1")):
        with Calls() as calls:
            found = step(w, given_x)
        torch.testing.assert_close(found, plainly(w, given_x))
        assert {c.removesuffix("_") for c in calls.names} & {"erf", "expm1"} == {taken}


def test_collectives_of_a_branch_are_issued_in_it():
    mesh = ftp.AbstractMesh((3,), ("tp",))
    step = ftp.spmd(communicating, mesh, (P("tp"), P(None, "tp")), P(), bucket=True)
    lowered = step.lower(torch.randn(6, 6), torch.randn(5, 6))
    issued = [n for n in lowered.graph.graph.nodes if "collective" in n.meta]
    inside = {n.meta["branch"] for n in issued if n.meta["branch"]}
    assert inside and all(number == 0 for ((number, _),) in inside)
    outside = [n.target for n in issued if not n.meta["branch"]]
    assert torch.ops._c10d_functional.all_reduce.default in outside  # of the predicate


def certificate() -> Any:
    mesh = ftp.AbstractMesh((2,), ("tp",))
    step = ftp.spmd(communicating, mesh, (P("tp"), P(None, "tp")), P())
    return certify(step.lower(torch.randn(5, 5), torch.randn(5, 5)))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_comes_after_its_predicate(sign):
    """The predicate's sum is not packed with one that stands after the branch's collective."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x * x.cos().sum(), torch.sin, (x,))
        return y * x.square().sum() + w

    x = torch.arange(12.0, dtype=torch.float64).view(4, 3) * sign
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), certify=True)
    assert [c.op for c in step.lower(x, x).collectives] == ["all_reduce"] * 3
    torch.testing.assert_close(step(x, x), fn(x, x), rtol=1e-12, atol=0)


def test_a_certificate_survives_its_file(tmp_path):
    certificate().save(tmp_path / "program.json")
    check_certificate(load_certificate(tmp_path / "program.json"))


def _nodes(made: Any, rank: int, wanted: Callable[[Any], bool]) -> list[Any]:
    graph, _ = list(made.ranks.at.values())[rank]
    return [n for n in made.ranks.graphs[graph].nodes if wanted(n)]


def test_a_collective_of_another_branch_is_no_certificate():
    made = certificate()
    assert len(made.ranks.graphs) == 2
    node = _nodes(made, 1, lambda n: "collective" in n.meta and n.meta["branch"])[0]
    ((number, side),) = node.meta["branch"]
    for x in (node, *node.users):
        x.meta["branch"] = ((number, not side),)
    with pytest.raises(CertificateError, match=r"collective \d+ is .* in branch"):
        check_certificate(made)


def test_a_value_that_is_read_outside_of_its_branch_is_no_certificate():
    made = certificate()
    (node,) = _nodes(made, 0, lambda n: "expm1" in str(n.target))
    ((number, side),) = node.meta["branch"]
    node.meta["branch"] = ((number, not side),)
    with pytest.raises(CertificateError, match=r"is computed in branch .* alone, in branch"):
        check_certificate(made)


def test_choices_by_two_predicates_are_no_certificate():
    made = certificate()
    (node,) = _nodes(made, 0, lambda n: "choose" in str(n.target))
    with node.graph.inserting_before(node):
        twin = node.graph.call_function(torch.ops.aten.logical_not.default, (node.args[0],))
        other = node.graph.call_function(node.target, (twin, *node.args[1:]))
    other.meta.update(node.meta)
    with pytest.raises(CertificateError, match="by another predicate"):
        check_certificate(made)


def test_cost_and_memory_are_those_of_the_larger_branch():
    mesh = ftp.AbstractMesh((2,), ("tp",))

    def large(x: Tensor) -> Tensor:
        return (x.repeat(64, 1) @ x.t()).sin().sum(1, keepdim=True).expand(-1, 64)[:64] + x

    def small(x: Tensor) -> Tensor:
        return x + 1

    def reports(fn: Callable[..., Tensor]) -> tuple[float, int]:
        lowered = ftp.spmd(fn, mesh, P(), P()).lower(torch.randn(64, 64))
        return lowered.cost("h100"), int(lowered.memory)

    def either(one: Any, other: Any) -> Callable[..., Tensor]:
        return lambda x: torch.cond(x.sum() > 0, one, other, (x,))

    costs, peaks = zip(*(reports(f) for f in (large, small)), strict=True)
    assert max(costs) > 3 * min(costs) and max(peaks) > 3 * min(peaks)
    twice = reports(either(large, large))
    for found in (reports(either(large, small)), reports(either(small, large))):
        assert found == pytest.approx(twice)
    assert costs[0] < twice[0] < costs[0] + costs[1] + 5e-5
    assert peaks[0] <= twice[1] < 1.1 * peaks[0]


def test_an_update_is_skipped_where_gradients_are_not_finite():
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.1)

    def slopes(p: Params, x: Tensor) -> Params:
        return torch.func.grad(lambda p: ((x @ p["a"]).relu() @ p["b"]).square().mean())(p)

    def train(p: Params, s: Any, x: Tensor) -> Any:
        grads = slopes(p, x)
        finite = torch.stack([g.isfinite().all() for g in grads.values()]).all()
        return torch.cond(
            finite, lambda g, s, p: opt.update(g, s, p), lambda g, s, p: (p, s), (grads, s, p)
        )

    p, x = inputs(4, 6, 0)
    mesh, specs = ftp.simulated_mesh((2, 2), ("dp", "tp")), {"a": P("dp", "tp"), "b": P("tp", "dp")}
    of_state = opt.specs(p, specs)
    step = ftp.spmd(train, mesh, (specs, of_state, P("dp")), (specs, of_state), donate=(0, 1))
    placed = ftp.device_put(p, mesh, specs)
    state, right, right_state = opt.init(placed), p, opt.init(p)
    for scale in (1.0, float("inf"), 2.0):
        placed, state = step(placed, state, ftp.device_put(x * scale, mesh, P("dp")))
        if scale < 3:
            right, right_state = opt.update(slopes(right, x * scale), right_state, right)
        torch.testing.assert_close(placed, right)


def test_a_pipeline_may_cut_a_cond():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.cond(x.mean() > 0, lambda x: self.one(x).sin(), self.other, (x,))

    model = nn.Sequential(*(Block() for _ in range(4))).double()
    fn, params = ftp.functionalize(model)
    mesh = ftp.simulated_mesh((2,), ("pp",))
    pipe = ftp.Pipeline("pp", 2)
    specs = pipe.place(params, P(), mesh)
    step = ftp.shard(lambda p, x: fn(p, x).square().mean(), mesh, specs, pipeline=pipe)
    x = torch.randn(6, 4, dtype=torch.float64)
    loss, grads = step(params, x)
    right = torch.tensor(0.0, dtype=torch.float64)
    for y in (x[::2], x[1::2]):  # each microbatch has a predicate of its own
        for block in model:
            y = block.one(y).sin() if y.mean() > 0 else block.other(y)
        right = right + y.square().mean() / 2
    torch.testing.assert_close(loss, right.detach())
    right.backward()
    for name, value in model.named_parameters():
        slope = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(grads[name], slope)


def test_a_model_with_branches():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.cond(x.mean() > 0, lambda x: self.one(x).relu(), self.other, (x,))

    model = Gated().double()
    fn, params = ftp.functionalize(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    step = ftp.shard(
        lambda p, x: fn(p, x).square().sum(), ftp.simulated_mesh((2,), ("tp",)), P("tp")
    )
    for given_x in (x, -x):
        _, grads = step(params, given_x)
        y = model.one(given_x).relu() if given_x.mean() > 0 else model.other(given_x)
        y.square().sum().backward()
        for name, value in model.named_parameters():
            right = torch.zeros_like(value) if value.grad is None else value.grad
            torch.testing.assert_close(grads[name], right)
        model.zero_grad()


# What is refused.


def _writing(x: Tensor) -> Tensor:
    y = x * 2
    return torch.cond(x.sum() > 0, lambda y: y.add_(1), lambda y: y * 1, (y,))


def _drawing(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.nn.functional.dropout(x), torch.sin, (x,))


def _until(x: Tensor) -> Tensor:
    return while_loop(lambda x: x.sum() < 3, lambda x: (x + 1,), (x,))[0]


def _growing(x: Tensor) -> Tensor:
    _, y = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.cat([x, x])), (0, x))
    return y


REFUSED = {
    "two shapes": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x[:1], lambda x: x, (x,)),
        r"torch.cond's branches give float32\[1\] if true and float32\[4\] if false, as result 0",
    ),
    "two structures": (
        lambda x: torch.cond(x.sum() > 0, lambda x: (x, x), lambda x: x, (x,)),
        r"give results of two structures: \('\*', '\*'\) if true, one tensor if false",
    ),
    "writes": (_writing, "changes a tensor that was made outside of it, in place"),
    "draws": (_drawing, "draws random numbers at .* in a branch of torch.cond"),
    "checks": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x if (x > 0).all() else x + 1, torch.sin, (x,)),
        "needs a tensor's value",
    ),
    "runtime trip count": (_until, "has a condition, bool.., that depends on tensors' values"),
    "growing": (_growing, r"body takes int, float32\[4\] and gives int, float32\[8\]"),
}


told: dict[str, str] = {}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fn, text = REFUSED[name]
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(fn, mesh, P(), P(), rng=name == "draws")
    key = (ftp.random.key(0),) if name == "draws" else ()
    with pytest.raises(FtpError, match=text) as error:
        step(torch.ones(4), *key)
    assert re.search(r"test_control_flow\.py:\d+", str(error.value)), error.value
    told[name] = str(error.value)


PAGE = Path(__file__).resolve().parents[2] / "docs/control_flow.md"


def test_the_page():
    """Its programs run, and each error that it quotes is one of those above."""
    text = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
    for name in REFUSED.keys() - told.keys():
        test_refused(name)
    quoted = re.findall(r"\| \"(.+)\" \|", text.split("## What is refused")[1])
    assert len(quoted) == 6
    assert [q for q in quoted if not any(q in error for error in told.values())] == []


def test_a_block_of_remat_in_a_branch_captures_parameters():
    def loss(again, cond, w, x):
        factor = w.sin()
        block = again(lambda x: (x * w * factor).cos())
        return cond(x.sum() > 0, lambda x: block(block(x)), lambda x: block(x), (x,)).sum()

    mesh, w = ftp.simulated_mesh((2,), ("tp",)), torch.rand(4, dtype=torch.float64)
    step = ftp.shard(partial(loss, ftp.remat, torch.cond), mesh, P("tp"))
    plain = partial(loss, lambda f: f, lambda p, true, false, args: (true if p else false)(*args))
    for x in (torch.ones_like(w), -torch.ones_like(w)):
        value = plain(leaf := w.clone().requires_grad_(), x)
        expected = value.detach(), torch.autograd.grad(value, leaf)[0]
        torch.testing.assert_close(step(w, x), expected)


def test_branches_capture_a_tensor_that_has_values():
    """Ops on it alone are traced once, for both branches."""
    w, x = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ w.t(), lambda x: x.sin() @ w.t(), (x,))

    step = ftp.spmd(f, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P("tp"), certify=True)
    for given in (x, -x):
        torch.testing.assert_close(step(given), f(given))


def test_branches_of_another_dtype_are_refused_in_a_gradient_too():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(
        lambda w, x: torch.cond(x.sum() > 0, lambda w: w, lambda w: w.double(), (w,)).sum(),
        mesh,
        P(),
    )
    with pytest.raises(TraceError, match=r"float32.* if true and float64"):
        step(torch.ones(4), torch.ones(4))


def _fixed_point(p: Params, x: Tensor) -> Tensor:
    def body(i: Tensor, z: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return i + 1, torch.tanh(z @ p["a"] / 4 + x), z

    def goes_on(i: Tensor, z: Tensor, before: Tensor) -> Tensor:
        return (z - before).norm() > 0.3

    start = torch.tensor(0), torch.zeros_like(x), torch.ones_like(x)
    i, z, _ = ftp.static.while_loop(goes_on, body, start, max_steps=9)
    return (z @ p["b"]).square().mean() + i


@pytest.mark.parametrize(
    "shape", [(2,), *(pytest.param(s, marks=pytest.mark.slow) for s in ((3,), (2, 2)))]
)
def test_a_loop_that_ends_by_values(shape: tuple[int, ...]):
    """With its gradient; it ends after another number of iterations for other inputs."""
    trips = set()
    for seed in (1, 3):
        p, x = inputs(6, 4, seed)
        check(_fixed_point, _fixed_point, shape, P(None, "tp"), p, x / 2**seed)
        ran = _fixed_point({"a": p["a"], "b": torch.zeros_like(p["b"])}, x / 2**seed)
        trips.add(int(ran))
    assert len(trips) > 1 and max(trips) < 9


def test_a_loop_in_a_loop():
    def inner(h: Tensor) -> Tensor:
        loop = ftp.static.while_loop
        return loop(lambda h: h.norm() > 0.5, lambda h: 0.6 * h, (h,), max_steps=4)[0]

    def nested(p: Params, x: Tensor) -> Tensor:
        (z,) = ftp.static.while_loop(
            lambda z: z.norm() > 0.4, lambda z: 0.9 * inner(z.sin() @ p["a"]), (x,), max_steps=3
        )
        return (z @ p["b"]).square().mean()

    for scale in (0.1, 1):  # one iteration, and several
        p, x = inputs(6, 4, 1)
        check(nested, nested, (2,), P(None, "tp"), p, x * scale)


def test_a_loop_that_does_not_end_within_its_steps():
    def loop(x: Tensor) -> Tensor:
        (y,) = ftp.static.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, (x,), max_steps=2)
        return y

    x = torch.zeros(3)
    assert torch.equal(loop(x), x + 2)
    mesh = ftp.simulated_mesh(2, "dp")
    step = ftp.spmd(loop, mesh, P("dp"), check_inputs=True)
    assert torch.equal(step(x + 2), x + 3)
    with pytest.raises(ftp.errors.InputError, match="ends within 2 iterations"):
        step(x)
    with pytest.raises(ftp.errors.InputError, match="max_steps=None"):
        ftp.static.while_loop(lambda x: x, lambda x: x, (x,), max_steps=None)  # type: ignore


def test_branches_of_a_loop_have_its_variables_as_they_were_in_the_gradient_too():
    def run(cond: Callable[..., Tensor], p: Params, x: Tensor) -> Tensor:
        h, listed, held = x, [0], SimpleNamespace(n=0)
        for i, name in enumerate("ab"):
            listed[0] = held.n = i

            def scaled(z: Tensor) -> Tensor:
                return (z @ p[name] * (i + 1) * (listed[0] + 2)).roll(held.n)  # noqa: B023

            h = cond(h.sum() > 0, lambda z: scaled(z), lambda z: scaled(z).sin(), (h,))
        return h.square().mean()

    def by_hand(predicate: Tensor, if_true: Any, if_false: Any, operands: Any) -> Tensor:
        return (if_true if predicate else if_false)(*operands)

    p, x = inputs(6, 4, 0)
    value, grads = ftp.shard(
        lambda p, x: run(torch.cond, p, x), ftp.simulated_mesh((2,), ("tp",)), P(None, "tp")
    )(p, x)
    expected, wanted = on_one_device(lambda p, x: run(by_hand, p, x), p, x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grads, wanted)
