"""Matrix optimizers by owners: the bits of one device, and exactly what moves."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from few_or_many import slow_after
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import InputError
from ftp.ops import map_slices
from ftp.planning.layers import repeats
from ftp.report.timing import Cost

DP, BOTH, EP = (("dp",), (4,)), (("dp", "tp"), (2, 2)), (("dp", "ep"), (2, 2))
UP, DOWN = (12, 8), (8, 12)
# Mesh, spec, number and shape of the parameters; then what moves: op, axis, global shape, and bytes
# that a rank sends, all in bfloat16.
CASES: dict[str, tuple[Any, P, int, tuple[int, ...], list[tuple[Any, ...]]]] = {
    "eight on four": (
        DP,
        P("dp"),
        8,
        UP,
        [("all_to_all", "dp", (8, *UP), 288), ("all_to_all", "dp", (8, *UP), 288)],
    ),
    "five on four": (
        DP,
        P("dp"),
        5,
        UP,
        [("all_to_all", "dp", (5, *UP), 288), ("all_to_all", "dp", (5, *UP), 288)],
    ),
    "three on four": (
        DP,
        P(None, "dp"),
        3,
        DOWN,
        [("all_to_all", "dp", (3, *DOWN), 144), ("all_to_all", "dp", (3, *DOWN), 144)],
    ),
    "uneven rows": (
        DP,
        P("dp"),
        6,
        (7, 5),
        [("all_to_all", "dp", (6, 7, 5), 120), ("all_to_all", "dp", (6, 7, 5), 120)],
    ),
    "replicated": (DP, P(), 3, UP, [("all_gather", "dp", (3, *UP), 576)]),
    "tensor parallel": (
        BOTH,
        P("tp"),
        4,
        UP,
        [
            ("all_to_all", "tp", (4, *UP), 96),
            ("all_to_all", "tp", (4, *UP), 96),
            ("all_gather", "dp", (4, *UP), 192),
        ],
    ),
    "tensor parallel and ZeRO": (
        BOTH,
        P("tp", "dp"),
        5,
        UP,
        [("all_to_all", axis, (5, *UP), n) for axis, n in (("dp", 144), ("tp", 192))] * 2,
    ),
    "experts": (EP, P("ep"), 2, (4, 8, 6), [("all_gather", "dp", (8, 8, 6), 192)]),
    "experts and ZeRO": (
        EP,
        P("ep", "dp"),
        2,
        (4, 8, 6),
        [("all_to_all", "dp", (8, 8, 6), 96), ("all_to_all", "dp", (8, 8, 6), 96)],
    ),
    "experts on their ranks": ((("ep",), (2,)), P("ep"), 2, (4, 8, 6), []),
}


def updating(opt: ftp.optim.Optimizer, mesh: Any, spec: Any, **options: Any) -> ftp.Step:
    specs = (spec, spec, spec), (spec, spec)
    return ftp.spmd(lambda g, s, p: opt.update(g, s, p), mesh, *specs, **options)


def matrices(x: Tensor) -> list[Tensor]:
    """Each in memory of its own: with other alignment kernels may round otherwise."""
    return [m.clone() for m in x.reshape(-1, *x.shape[-2:])]


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("case", slow_after(5, CASES))
def test_muon_has_the_bits_of_torch_on_one_device(case: str):
    (names, sizes), spec, count, shape, moved = CASES[case]
    g = torch.Generator().manual_seed(0)
    params = {f"layers.{i}.w": torch.randn(shape, generator=g) for i in range(count)}
    all_grads = [
        {k: torch.randn(shape, generator=g) for k in params} for _ in range(2)
    ]  # fmt: skip
    opt = ftp.optim.from_torch(torch.optim.Muon, lr=0.02, owned=True)
    plain = [
        torch.nn.Parameter(m.clone()) for p in params.values() for m in matrices(p)
    ]  # fmt: skip
    reference = torch.optim.Muon(plain, lr=0.02)
    step = updating(opt, ftp.simulated_mesh(sizes, names), spec, strict=True, certify=True)
    state = opt.init(params)
    lowered = step.lower(params, state, params)
    found = [(c.op, *c.axes, c.global_shape, c.wire_nbytes) for c in lowered.collectives]
    assert Counter(found) == Counter(moved)
    assert all(c.dtype is torch.bfloat16 for c in lowered.collectives)

    # The first rank owns most.
    work, ranks = lowered.work, math.prod(sizes)
    assert work == 1.0
    assert lowered.cost().flops <= work.one_device * (1 / ranks + 1 / len(plain))

    whole = {k: (params[k], state[k]) for k in params}
    one = {k: v[0] for k, v in whole.items()}, {k: v[1] for k, v in whole.items()}
    cut = one
    for grads in all_grads:
        for leaf, grad in zip(plain, [m for k in params for m in matrices(grads[k])], strict=True):
            leaf.grad = grad
        reference.step()
        one = opt.update(grads, one[1], one[0])
        cut = step(grads, cut[1], cut[0])
    momenta = [reference.state[leaf]["momentum_buffer"] for leaf in plain]
    for new, new_state in (one, cut):
        assert all(map(torch.equal, [m for k in params for m in matrices(new[k])], plain))
        buffers = [m for k in params for m in matrices(new_state[k]["momentum_buffer"])]
        assert all(map(torch.equal, buffers, momenta))


def test_two_collectives_in_place_of_sixteen():
    """Newton-Schulz of 8 matrices on 4 ranks: half the bytes, and a quarter of the work. Buckets
    would issue the norms of all matrices together.
    """
    params = {f"layers.{i}.w": torch.empty(1024, 1024, device="meta") for i in range(8)}
    found = {}
    for owned in (False, True):
        opt = ftp.optim.from_torch(torch.optim.Muon, owned=owned)
        mesh = ftp.AbstractMesh((4,), ("dp",))
        step = updating(opt, mesh, P("dp"), hardware="h100", bucket=False)
        found[owned] = step.lower(params, opt.init(params), params)
    before, after = found[False], found[True]
    assert Counter(c.op for c in before.collectives) == {"all_gather": 8, "all_reduce": 8}
    assert Counter(c.op for c in after.collectives) == {"all_to_all": 2}
    sent = [sum(c.wire_nbytes for c in lowered.collectives) for lowered in (before, after)]
    assert sent == [12582960, 6291456]
    assert after.work == 1.0 and before.work == 3.6
    assert after.cost().flops == after.work.one_device / 4
    assert after.cost().communicating < before.cost().communicating / 5
    assert after.cost() < before.cost() / 5
    _is_what_code_by_hand_takes(after.cost(), ftp.Hardware.h100(), sent[1])


def _is_what_code_by_hand_takes(cost: Cost, h100: ftp.Hardware, sent: int) -> None:
    """The two collectives take their latencies and bytes. Every op takes as long as its issue, and
    there are as many as the 8 shards and the rank's 2 matrices need, and 4 for stacks.
    """
    assert cost.communicating == pytest.approx(2 * h100.link.latency + sent / h100.link.bandwidth)
    issued = [op for op in cost.ops if op.seconds]
    assert all(op.seconds == h100.overhead for op in issued)
    of_shards = {"lerp": 2, "_to_copy": 1, "mul": 1, "add_": 1}
    of_matrices = {"linalg_vector_norm": 1, "clamp_": 1, "div": 1, "mm": 5, "addmm": 10}
    expected = Counter({op: 8 * n for op, n in of_shards.items()})
    expected += Counter({op: 2 * n for op, n in of_matrices.items()})
    expected += Counter({"stack": 2, "reshape": 2})
    assert Counter(op.op.removeprefix("aten.").partition(".")[0] for op in issued) == expected


def test_a_half_precision_momentum_that_torch_scales_in_place():
    """Without Nesterov torch orthogonalizes the momentum itself, and scales it in place."""
    g = torch.Generator().manual_seed(0)
    params = {k: torch.randn(6, 9, generator=g).bfloat16() for k in "abc"}
    opt = ftp.optim.from_torch(torch.optim.Muon, nesterov=False, owned=True)
    plain = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
    reference = torch.optim.Muon(plain.values(), nesterov=False)
    for leaf in plain.values():
        leaf.grad = leaf.detach().clone()
    reference.step()
    step = updating(opt, ftp.simulated_mesh((2,), ("dp",)), P("dp"))
    new, state = step(params, opt.init(params), params)
    for k, leaf in plain.items():
        assert torch.equal(new[k], leaf)
        assert torch.equal(state[k]["momentum_buffer"], reference.state[leaf]["momentum_buffer"])


def test_a_saved_program_holds_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    params = {k: torch.randn(6, 4) for k in "abc"}
    opt = ftp.optim.from_torch(torch.optim.Muon, owned=True)
    step = updating(opt, ftp.simulated_mesh((2,), ("dp",)), P("dp"))
    state = opt.init(params)
    step.lower(params, state, params).save(tmp_path / "step.ftp")
    expected = step(params, state, params)
    monkeypatch.setattr(map_slices, "_programs", {})  # as in another process
    loaded = ftp.load_program(tmp_path / "step.ftp", ftp.simulated_mesh((2,), ("dp",)))
    assert loaded.lowered.work == 1.0
    found = loaded(params, state, params)
    assert all(torch.equal(found[0][k], expected[0][k]) for k in params)


def lm(layers: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"q": (8, 8), "o": (8, 8), "up": (16, 8), "down": (8, 16)}
    params = {
        f"layers.{i}.{k}": torch.randn(s, generator=g, dtype=torch.float64) * 0.3
        for i in range(layers)
        for k, s in shapes.items()
    }
    return params | {"bias": torch.zeros(8, dtype=torch.float64)}


def loss_fn(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    for i in range(len(params) // 4):
        q, o, up, down = (params[f"layers.{i}.{k}"] for k in ("q", "o", "up", "down"))
        x = x + (x @ q.T).tanh() @ o.T
        x = x + (x @ up.T).relu() @ down.T
    return (x + params["bias"]).square().mean()


def training(micro: int = 1) -> tuple[Any, ftp.optim.Optimizer]:
    muon = ftp.optim.from_torch(
        torch.optim.Muon,
        lr=ftp.optim.schedules.linear(0.02, 4, start=0.1),
        groups={"layers.*.o": {"weight_decay": 0.0}},
        owned=True,
    )
    adam = ftp.optim.from_torch(torch.optim.AdamW)
    kinds = ("q", "o", "up", "down")
    opt = ftp.optim.by_path({**{f"layers.*.{k}": muon for k in kinds}, "bias": adam})

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads, loss = ftp.optim.accumulate(torch.func.grad_and_value(loss_fn), micro)(params, x)
        grads, norm = ftp.optim.clip_by_global_norm(grads, 0.5)
        params, state = opt.update(grads, state, params)
        return params, state, {"loss": loss, "norm": norm}

    return step, opt


MEGATRON = {
    "**": P(),
    "layers.*.q": P("tp"),
    "layers.*.up": P("tp"),
    "layers.*.o": P(None, "tp"),
    "layers.*.down": P(None, "tp"),
}


@pytest.mark.slow
def test_a_train_step_with_accumulation_and_clipping():
    fn, opt = training(micro=2)
    params, mesh = lm(2), ftp.simulated_mesh((2, 2), ("dp", "tp"))
    specs = ftp.plan(params, MEGATRON)
    step = ftp.spmd(fn, mesh, (specs, specs, P("dp")), (specs, specs, P()), certify=True)
    one = cut = params, opt.init(params)
    for seed in range(2):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).double()
        *one, expected = fn(*one, x)
        *cut, metrics = step(*cut, x)
        torch.testing.assert_close(metrics, expected, rtol=1e-6, atol=0)
        # Gradients' sums are in another order, which bfloat16 shows.
        torch.testing.assert_close(cut[0], one[0], rtol=0, atol=1e-4)
        assert ftp.specs_of(cut[1]) == opt.specs(params, specs)
    moved = step.lower(*cut, x).collectives
    # Each of four groups (q, o, up, down): to the owners and back over tp, to all over dp.
    owned = Counter((c.op, *c.axes) for c in moved if c.dtype is torch.bfloat16)
    assert owned == {("all_to_all", "tp"): 8, ("all_gather", "dp"): 4}


@pytest.mark.slow
def test_layers_are_planned_as_one(monkeypatch: pytest.MonkeyPatch):
    fn, opt = training()
    params = {k: p.to("meta") for k, p in lm(11).items()}
    specs = ftp.plan(params, MEGATRON)
    mesh = ftp.AbstractMesh((2,), ("tp",))
    found = []
    for fewest in (repeats.FEWEST, 99):
        monkeypatch.setattr(repeats, "FEWEST", fewest)
        step = ftp.spmd(fn, mesh, (specs, specs, P()), (specs, specs, P()))
        lowered = step.lower(params, opt.init(params), torch.empty(8, 8, device="meta").double())
        moved = Counter((c.op, c.axes, c.global_shape, c.dtype) for c in lowered.collectives)
        found.append((bool(lowered.plan.alike), moved))
    (folded, moved), (whole, expected) = found
    assert (folded, whole) == (True, False) and moved == expected


def whitened(x: Tensor, moment: Tensor, scale: Tensor, power: float) -> dict[str, Tensor]:
    moment = moment + x @ x.T
    values, vectors = torch.linalg.eigh(moment + torch.eye(x.shape[0], dtype=x.dtype))
    return {"x": scale * (vectors * values**power) @ vectors.T @ x, "moment": moment}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Any, ...]:
    sizes, names = draw(st.sampled_from([((2,), ("a",)), ((3,), ("a",)), ((2, 2), ("a", "b"))]))
    lead = draw(st.sampled_from([(), (), (1,), (3,), (4,), (2, 3)]))
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    count = draw(st.integers(1, 5))
    entries: list[list[str]] = [[] for _ in range(len(lead) + 2)]
    for name in draw(st.permutations(names)):
        at = draw(st.sampled_from([None, *range(len(entries))]))
        if at is not None:
            entries[at].append(name)
    spec = P(*(tuple(e) if e else None for e in entries))
    moment = draw(st.sampled_from([P(), spec, P("a")]))
    axes = draw(st.sampled_from([None, None, ("a",)]))
    return sizes, names, count, (*lead, rows, columns), spec, moment, axes


def check(program: tuple[Any, ...]) -> None:
    sizes, names, count, shape, spec, of_moment, axes = program
    g = torch.Generator().manual_seed(1)
    xs = {f"w{i}": torch.randn(shape, generator=g, dtype=torch.float64) for i in range(count)}
    moments = {
        k: torch.rand((*shape[:-1], shape[-2]), generator=g, dtype=torch.float64) for k in xs
    }
    moments = {k: m @ m.mT for k, m in moments.items()}

    def run(xs: Any, moments: Any, scale: Tensor) -> Any:
        return ftp.optim.by_owner(
            lambda x, given: whitened(x, given["moment"], scale, given["power"]),
            xs,
            {k: {"moment": m, "power": -0.25} for k, m in moments.items()},
            axes=axes,
        )

    mesh, scale = ftp.simulated_mesh(sizes, names), torch.tensor(0.5, dtype=torch.float64)
    step = ftp.spmd(run, mesh, (spec, of_moment, P()), P())
    expected, found = run(xs, moments, scale), step(xs, moments, scale)
    for k in xs:
        each = [
            whitened(x, m, scale, -0.25)
            for x, m in zip(matrices(xs[k]), matrices(moments[k]), strict=True)
        ]
        for name in ("x", "moment"):
            assert all(map(torch.equal, matrices(expected[k][name]), [e[name] for e in each]))
            assert torch.equal(found[k][name], expected[k][name])
    assert step.lower(xs, moments, scale).plan.solutions


@settings(max_examples=6)
@given(programs())
def test_any_function_of_a_matrix(program: tuple[Any, ...]):
    check(program)


@pytest.mark.slow
@settings(max_examples=80)
@given(programs())
def test_any_function_of_a_matrix_at_length(program: tuple[Any, ...]):
    check(program)


def test_static_values_that_are_equal_and_of_other_types():
    def fn(x: Tensor, factor: float) -> Tensor:
        return x * factor if isinstance(factor, bool) else -x / torch.tensor(factor)

    tree = {key: torch.ones(2, 3) for key in "abcd"}
    factors = dict(zip(tree, (True, 1.0, 0.0, -0.0), strict=True))

    def run(tree: dict[str, Tensor]) -> Any:
        return ftp.optim.by_owner(fn, tree, factors)

    found = ftp.spmd(run, ftp.simulated_mesh((2,), ("dp",)))(tree)
    assert [float(x[0, 0]) for x in found.values()] == [1.0, -1.0, -math.inf, math.inf]


def test_state_that_only_owners_need_stays_with_them():
    """Stacked layers: of the moments, cut over all ranks along the stack, nothing moves."""

    def run(grads: Tensor, moments: Tensor) -> Any:
        return ftp.optim.by_owner(
            lambda g, m: (g @ (m + g.T @ g), m + g.T @ g), {"w": grads}, {"w": moments}
        )

    owners, spec = P(("dp", "tp")), P(None, "dp")
    mesh, shapes = ftp.AbstractMesh((2, 2), ("dp", "tp")), ((8, 6, 4), (8, 4, 4))
    step = ftp.spmd(run, mesh, (spec, owners), (spec, owners))
    moved = step.lower(*map(torch.empty, shapes)).collectives
    assert all(c.global_shape == shapes[0] for c in moved)
    assert Counter(c.op for c in moved) == {"all_to_all": 2, "all_gather": 1}


def test_errors():
    opt, ones = ftp.optim.from_torch(torch.optim.Muon, owned=True), torch.ones(3, 2, 2)
    mesh = ftp.simulated_mesh((2,), ("dp",))

    def by_owner(fn: Any, *rest: Any, **options: Any) -> Any:
        return ftp.optim.by_owner(fn, {"a": ones}, *rest, **options)

    cases = (
        (lambda: ftp.optim.from_torch(torch.optim.AdamW, owned=True), "AdamW has owned=True"),
        (lambda: opt.init({"b": ones[0, 0]}), r"params\['b'\] is of shape \(2,\), no matrix"),
        (lambda: opt.update({"b": ones[0, 0]}, {"b": {}}, {"b": ones[0, 0]}), "no matrix"),
        (lambda: by_owner(3), "by_owner takes a function of a matrix, not 3"),
        (lambda: by_owner(lambda x: 3), "must return trees of tensors only"),
        (lambda: by_owner(lambda x, y: x, {"a": ones[0]}), r"does not begin with \(3,\)"),
        (lambda: by_owner(lambda x, y: x, {"b": ones}), "are trees of different structures"),
        (
            lambda: ftp.spmd(lambda x: by_owner(lambda y: y, axes=("pp",)), mesh, P())(ones),
            r"axes=\('pp',\), but the mesh has 'dp': no axis 'pp'",
        ),
        (
            lambda: ftp.spmd(lambda x: by_owner(lambda y: 3), mesh, P())(ones),
            "must return trees of tensors only",
        ),
    )
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


def test_each_matrix_takes_its_own_branch_of_a_cond():
    """Six on two ranks, of opposite signs in turn, by two functions."""

    def scaled(by: float) -> Any:
        return lambda m: torch.cond(m.sum() > 0, lambda m: m * by, lambda m: m - by, (m,))

    def both(tree: Any) -> Any:
        return ftp.optim.by_owner(scaled(2.0), tree), ftp.optim.by_owner(scaled(3.0), tree)

    tree = {name: torch.ones(2, 2) * (-1) ** i for i, name in enumerate("abcdef")}
    found = ftp.spmd(both, ftp.simulated_mesh((2,), ("tp",)), (P("tp"),))(tree)
    torch.testing.assert_close(found, both(tree), rtol=0, atol=0)
