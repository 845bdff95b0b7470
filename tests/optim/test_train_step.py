"""Whole train steps against one device over several steps, and their collectives: those of the
loss, and a number for the clip.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from few_or_many import slow_after
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, specs
from plan_reshards import unbucketed

import ftp
from ftp import P

CFG = LlamaConfig(vocab=64, layers=1)
TOKENS = (8, 20)
OPT = ftp.optim.from_torch(
    torch.optim.AdamW,
    lr=ftp.optim.schedules.linear(1e-2, 4, start=0.1),
    groups={"**.norm*.weight": {"weight_decay": 0.0}},
)
DP, BOTH = ("dp",), ("dp", "tp")
PLANS: dict[
    str, tuple[tuple[str, ...], dict[str, str], P, Any]
] = {  # axes, what cuts the weights, the batch, the state if otherwise
    "dp": (DP, {}, P("dp"), None),
    "tp": (("tp",), {"tp": "tp"}, P(), None),
    "cp": (("cp",), {}, P(None, "cp"), None),
    "zero-1": (DP, {}, P("dp"), P("dp")),
    "zero-3": (DP, {"zero": "dp"}, P("dp"), None),
    "zero-3×tp": (BOTH, {"tp": "tp", "zero": "dp"}, P("dp"), None),
}


def model() -> tuple[Any, dict[str, torch.Tensor]]:
    fn, params = ftp.functionalize(build(CFG, dtype=torch.float64))
    return lm_loss(fn), params


def train_step(loss_fn: Any, params: Any, state: Any, batch: Any, *, micro: int = 1) -> Any:
    grads, loss = ftp.optim.accumulate(torch.func.grad_and_value(loss_fn), micro)(params, batch)
    grads, norm = ftp.optim.clip_by_global_norm(grads, 0.5)
    params, state = OPT.update(grads, state, params)
    return params, state, {"loss": loss, "norm": norm}


def step_of(plan: str, fn: Any, params: Any, **options: Any) -> ftp.Step:
    axes, weights, batch, state = PLANS[plan]
    of_params = ftp.plan(params, specs(cuts(CFG), **weights))  # type: ignore[arg-type]
    of_state = of_params if state is None else state
    mesh = ftp.simulated_mesh((2,) * len(axes), axes)
    return ftp.spmd(fn, mesh, (of_params, of_state, batch), (of_params, of_state, P()), **options)


def kinds(collectives: Sequence[ftp.Collective]) -> Counter[str]:
    """Per op, but numbers apart, and small all-reduces of 1-d gradients with the reduce-scatters
    that they may stand for.
    """
    return Counter("number" if not c.global_shape else c.op for c in collectives)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_those_of_one_device(plan: str):
    loss_fn, params = model()
    fn = partial(train_step, loss_fn)
    step = step_of(plan, fn, params)
    alone = cut = (params, OPT.init(params))
    for i in range(3):
        batch = lm_batch(CFG, *TOKENS, seed=i)
        *alone, expected = fn(*alone, batch)
        *cut, metrics = step(*cut, batch)
        torch.testing.assert_close(metrics, expected, rtol=1e-11, atol=0)
    for name, value in alone[0].items():
        torch.testing.assert_close(cut[0][name], value, rtol=1e-9, atol=1e-12)
    for name, slots in alone[1].items():
        for slot, value in slots.items():
            torch.testing.assert_close(cut[1][name][slot], value, rtol=1e-9, atol=1e-12)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("plan", PLANS)
def test_without_out_specs_state_comes_back_as_it_went_in(plan: str):
    loss_fn, params = model()
    fn = partial(train_step, loss_fn)
    axes, weights, batch_specs, state = PLANS[plan]
    of_params = ftp.plan(params, specs(cuts(CFG), **weights))  # type: ignore[arg-type]
    of_state = OPT.specs(params, of_params if state is None else state)
    mesh = ftp.simulated_mesh((2,) * len(axes), axes)
    step = ftp.spmd(fn, mesh, (of_params, of_state, batch_specs))
    alone = cut = (params, OPT.init(params))
    for i in range(3):
        batch = lm_batch(CFG, *TOKENS, seed=i)
        *alone, expected = fn(*alone, batch)  # type: ignore[call-arg]
        *cut, metrics = step(*cut, batch)  # type: ignore[misc]
        torch.testing.assert_close(metrics, expected, rtol=1e-11, atol=0)
        assert (ftp.specs_of(cut[0]), ftp.specs_of(cut[1])) == (of_params, of_state)


def test_without_out_specs_arguments_that_are_alike_come_back_in_their_order():
    mesh, x = ftp.simulated_mesh((2,), ("dp",)), torch.ones(2)
    cut, whole = {"w": P("dp")}, {"w": P()}

    def found(fn: Any, *in_specs: Any) -> list[Any]:
        args = [{"w": torch.ones(2)} for _ in in_specs]
        return [*ftp.spmd(fn, mesh, (*in_specs, P())).lower(*args, x).out_specs]

    def twice(a: Any, b: Any, x: torch.Tensor) -> Any:
        return {"w": (a["w"] + x).sum() + b["w"]}, {"w": b["w"] * (a["w"] + x).sum()}

    assert found(twice, cut, whole) == [cut, whole]
    assert found(twice, whole, cut) == [whole, cut]
    assert found(lambda a, x: ({"w": a["w"].flip(0)}, [{"w": a["w"] * x}]), cut) == [cut, [cut]]
    assert found(lambda a, x: (a["w"].sum(), {"w": a["w"][:1]}), cut) == [P(), {"w": P()}]


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("plan", ["dp", "tp", "cp", "zero-3"])
def test_collectives_are_those_of_shard_and_the_clips(plan: str):
    loss_fn, params = model()
    axes, weights, batch_specs, _ = PLANS[plan]
    of_params = ftp.plan(params, specs(cuts(CFG), **weights))  # type: ignore[arg-type]
    mesh, batch = ftp.simulated_mesh((2,) * len(axes), axes), lm_batch(CFG, *TOKENS)
    of_loss = kinds(
        ftp.shard(loss_fn, mesh, of_params, batch_specs=batch_specs, bucket=False)
        .lower(params, batch)
        .collectives
    )
    step = step_of(plan, partial(train_step, loss_fn), params, bucket=False).lower(
        params, OPT.init(params), batch
    )
    found = kinds(step.collectives)
    assert found["number"] - of_loss["number"] == (1 if weights else 0)
    assert found["all_gather"] == of_loss["all_gather"]
    assert (
        found["all_reduce"] + found["reduce_scatter"]
        == of_loss["all_reduce"] + of_loss["reduce_scatter"]
    )
    assert step.plan.kept_rules[axes[0]]


def test_zero_1_reduces_gradients_to_shards_and_gathers_parameters():
    loss_fn, params = model()
    found = kinds(
        step_of("zero-1", partial(train_step, loss_fn), params, bucket=False)
        .lower(params, OPT.init(params), lm_batch(CFG, *TOKENS))
        .collectives
    )
    assert found["all_gather"] == found["all_reduce"] + found["reduce_scatter"] == len(params)
    assert found["reduce_scatter"] >= sum(p.ndim > 1 for p in params.values())


@pytest.mark.parametrize("plan", slow_after(1, ["zero-3", "dp", "tp"]))
def test_microbatches_reduce_gradients_once(plan: str):
    loss_fn, params = model()
    state, batch = OPT.init(params), lm_batch(CFG, *TOKENS)
    once, twice = (
        step_of(plan, partial(train_step, loss_fn, micro=n), params, reshard_after_forward=False)
        for n in (1, 2)
    )
    counts = [
        Counter(
            c.op
            for c in unbucketed(step.lower(params, state, batch)).collectives
            if c.global_shape in shapes(params)
        )
        for step in (once, twice)
    ]
    assert counts[0] == counts[1]
    assert counts[1].total() > 0 or plan == "tp"
    expected = train_step(loss_fn, params, state, batch)
    torch.testing.assert_close(twice(params, state, batch)[2], expected[2], rtol=1e-11, atol=0)
    large = lm_batch(CFG, 4 * TOKENS[0], TOKENS[1])  # activations outweigh summed gradients
    peaks = [int(step.lower(params, state, large).memory) for step in (once, twice)]
    assert peaks[1] < 0.65 * peaks[0]


def shapes(params: dict[str, torch.Tensor]) -> set[tuple[int, ...]]:
    return {tuple(s) for p in params.values() if p.ndim > 1 for s in (p.shape, p.shape[::-1])}


def test_rows_must_divide_into_microbatches():
    loss_fn, params = model()
    with pytest.raises(
        ftp.FtpError,
        match=r"batch\[0\]\[1\] has shape \(8, 20\): its first dim must divide into 3 microbatches",
    ):
        train_step(loss_fn, params, OPT.init(params), lm_batch(CFG, *TOKENS), micro=3)


def test_a_key_is_given_for_each_microbatch():
    """A key is cut as every other tensor; the errors say what to give."""

    def noisy(w: torch.Tensor, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (w * ftp.random.dropout(keys[0] if keys.ndim > 1 else keys, x, 0.5)).sum()

    def taken(n: int, key: torch.Tensor) -> Any:
        grad_fn = ftp.optim.accumulate(torch.func.grad_and_value(noisy), n)
        return grad_fn(torch.ones(()), torch.ones(4, 6), key)

    key = ftp.random.key(3)
    keys = ftp.random.split(key, 2)
    wanted = [ftp.random.dropout(k, torch.ones(2, 6), 0.5).sum() for k in keys]
    torch.testing.assert_close(taken(2, keys)[1], (wanted[0] + wanted[1]) / 2)
    with pytest.raises(ftp.FtpError, match=r"a microbatch of a key: .* and take keys\[0\]\."):
        taken(2, key)
    with pytest.raises(ftp.FtpError, match=r"give ftp.random.split\(key, 4\), and draw from keys"):
        taken(4, key)
    with pytest.raises(ftp.FtpError, match="Capture what is no batch"):
        taken(2, torch.tensor(1))


def halved(loss_fn: Any) -> Any:
    """Computes in bfloat16 and keeps float32 parameters."""
    return lambda params, batch: loss_fn(
        {k: p.bfloat16() for k, p in params.items()}, batch
    ).float()


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision(reduced: torch.dtype):
    """Parameters are gathered in the dtype in which they are used, gradients reduced in the one
    that the step casts to.
    """
    fn, params = ftp.functionalize(build(CFG))
    loss_fn = halved(lm_loss(fn))

    def grads_of(params: Any, batch: Any) -> Any:
        low = {k: p.bfloat16() for k, p in params.items()}
        grads = torch.func.grad(lm_loss(fn))(low, batch)
        return {k: g.to(reduced) for k, g in grads.items()}

    mesh, batch = ftp.simulated_mesh((2,), ("dp",)), lm_batch(CFG, *TOKENS)
    step = ftp.spmd(grads_of, mesh, (P("dp"), P("dp")), P("dp"))
    found = unbucketed(step.lower(params, batch)).collectives
    assert {c.dtype for c in found if c.op == "all_gather"} == {torch.bfloat16}
    assert {c.dtype for c in found if c.op == "reduce_scatter"} == {reduced}
    expected, grads = torch.func.grad(loss_fn)(params, batch), step(params, batch)
    for name, grad in grads.items():
        assert grad.dtype == reduced
        error = (grad.float() - expected[name]).norm() / expected[name].norm()
        assert error < 0.03, name


def test_muon_rounds_as_torch_does():
    """Its products are in bfloat16, where each is rounded once: beside a cut batch the steps are
    torch's own to the last bit.
    """
    generator = torch.Generator().manual_seed(0)
    params = {
        "up": torch.randn(6, 10, generator=generator),
        "down": torch.randn(10, 6, generator=generator),
    }
    grads = [
        {k: torch.randn(p.shape, generator=generator) for k, p in params.items()} for _ in range(20)
    ]
    opt = ftp.optim.from_torch(torch.optim.Muon, lr=0.02)
    leaves = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
    reference = torch.optim.Muon(leaves.values(), lr=0.02)
    step = ftp.spmd(
        lambda g, s, p: opt.update(g, s, p),
        ftp.simulated_mesh((2,), ("dp",)),
        (P(), P(), P()),
        (P(), P()),
    )
    state = opt.init(params)
    for given in grads:
        for k, leaf in leaves.items():
            leaf.grad = given[k]
        reference.step()
        params, state = step(given, state, params)
    assert all(torch.equal(params[k], leaf) for k, leaf in leaves.items())


# Of a matrix cut along its longer and its shorter dim: what an update moves.
UPDATES: dict[str, tuple[Any, dict[str, dict[str, int]]]] = {
    "Muon": (
        torch.optim.Muon,
        {"longer": {"number": 1, "all_reduce": 5}, "shorter": {"all_gather": 1}},
    ),
    "Adafactor": (
        torch.optim.Adafactor,
        {
            "longer": {"number": 2, "all_reduce": 2, "all_gather": 1},
            "shorter": {"number": 2, "all_reduce": 1, "all_gather": 1},
        },
    ),
}


@pytest.mark.parametrize("cut", ["longer", "shorter"])
@pytest.mark.parametrize("name", UPDATES)
def test_what_an_update_of_a_whole_matrix_moves(name: str, cut: str):
    cls, expected = UPDATES[name]
    opt = ftp.optim.from_torch(cls)
    params, spec = {"w": torch.ones(12, 8)}, {"longer": P("n"), "shorter": P(None, "n")}[cut]
    mesh, state = ftp.AbstractMesh((2,), ("n",)), opt.init(params)
    of_state = opt.specs(params, spec)
    found = ftp.lower(
        lambda g, s, p: opt.update(g, s, p),
        mesh,
        (spec, of_state, spec),
        params,
        state,
        params,
        out_specs=(spec, of_state),
    )
    assert kinds(unbucketed(found).collectives) == expected[cut]


HEADS, LENGTH = 4, 6


def decode(
    params: dict[str, torch.Tensor],
    cache: dict[str, torch.Tensor],
    token: torch.Tensor,
    at: torch.Tensor,
) -> Any:
    """One token of each row through one layer of attention; keys and values so far are state."""
    x = params["emb"][token]
    q, k, v = ((x @ params[name]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
    cache = {
        "k": cache["k"].index_copy(2, at.reshape(1), k),
        "v": cache["v"].index_copy(2, at.reshape(1), v),
    }
    mask = (torch.arange(LENGTH) <= at)[None, None, None]
    y = (
        torch.nn.functional.scaled_dot_product_attention(q, cache["k"], cache["v"], attn_mask=mask)
        .transpose(1, 2)
        .flatten(2)
    )
    return cache, (x + y @ params["o"]) @ params["head"]


def greedy(step: Any, params: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    cache = {name: torch.zeros(2, HEADS, LENGTH, 2, dtype=torch.float64) for name in "kv"}
    token = torch.tensor([[1], [5]])
    tokens, logits = [token], []
    for i in range(LENGTH - 1):
        cache, scores = step(params, cache, token, torch.tensor(i))
        token = scores.argmax(-1)
        tokens.append(token)
        logits.append(scores)
    return torch.cat(tokens, 1), torch.cat(logits, 1)


@pytest.mark.parametrize("cut", ["heads", "sequence", "batch"])
def test_generation_with_a_cache_is_one_program(cut: str):
    generator = torch.Generator().manual_seed(0)
    shapes = {"emb": (11, 8), "head": (8, 11)} | dict.fromkeys("qkvo", (8, 8))
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    of_cache = {"heads": P(None, "tp"), "sequence": P(None, None, "tp"), "batch": P("tp")}[cut]
    columns = P(None, "tp")
    megatron = {"emb": P(), "q": columns, "k": columns, "v": columns, "o": P("tp"), "head": columns}
    traces = []

    def traced(*args: Any) -> Any:
        traces.append(1)
        return decode(*args)

    specs = (megatron if cut == "heads" else P(), of_cache, P(), P())
    step = ftp.spmd(traced, ftp.simulated_mesh((2,), ("tp",)), specs, (of_cache, P()))
    tokens, logits = greedy(step, params)
    expected_tokens, expected = greedy(decode, params)
    assert torch.equal(tokens, expected_tokens) and len(traces) == 1
    cache = {name: torch.zeros(2, HEADS, LENGTH, 2, dtype=torch.float64) for name in "kv"}
    moved = unbucketed(
        step.lower(params, cache, torch.tensor([[1], [5]]), torch.tensor(0))
    ).collectives
    # The cache stays where it is: of one query a maximum, a sum and the result are reduced where
    # its keys are cut.
    gathered = {"all_gather": 1}  # the logits, or the tokens' rows of them
    assert (
        kinds(moved)
        == {
            "heads": {"all_reduce": 1} | gathered,
            "sequence": {"all_reduce": 3},
            "batch": gathered,
        }[cut]
    )
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-12)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.up, self.down = (
            torch.nn.LayerNorm(8),
            torch.nn.Linear(8, 16),
            torch.nn.Linear(16, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm1(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_pages_run():
    """docs/training.md, docs/random.md and what docs/faults.md says of NaN, in one scope each,
    on two axes.
    """

    def scope() -> dict[str, Any]:
        model, batch = Net(), torch.randn(8, 8)
        names = {
            "model": model,
            "batch": batch,
            "x": torch.randn(4, 4),
            "step": 3,
            "specs": P(),
            "Block": Block,
        }
        names |= {
            "mesh": ftp.simulated_mesh((2, 2), ("dp", "tp")),
            "torch": torch,
            "F": torch.nn.functional,
            "ftp": ftp,
            "P": P,
        }
        names["loss_fn"] = lambda params, batch: names["fn"](params, batch).square().mean()
        return names

    docs = Path(__file__).resolve().parents[2] / "docs"
    training, random, faults = (
        re.findall(r"```python\n(.*?)```", (docs / f"{page}.md").read_text(), re.S)
        for page in ("training", "random", "faults")
    )
    names = scope()
    exec(training[0], names)
    loss = names["metrics"]["loss"]
    for _ in range(3):
        names["params"], names["state"], names["metrics"] = names["step"](
            names["params"], names["state"], names["batch"]
        )
    assert names["metrics"]["loss"] < loss
    for code in training[1:]:
        exec(code, names)
    exec(random[0], scope())
    names = scope()
    names["fn"], names["params"] = ftp.functionalize(names["model"])
    names["opt"] = ftp.optim.from_torch(torch.optim.AdamW)
    names["opt_state"] = names["opt"].init(names["params"])
    before, names["batch"][0, 0] = names["params"], torch.nan
    exec(next(code for code in faults if "nonfinite" in code), names)
    assert names["nonfinite"] > 0 and all(
        torch.equal(names["params"][k], p) for k, p in before.items()
    )


@pytest.mark.parametrize("plan", ["dp", "tp", "zero-3×tp"])
def test_the_norm_is_one_number_an_axis_however_small_the_model(plan: str):
    """Sums of cut and of whole gradients stay pending to the end, where a latency planned for a
    toy is a fraction of a nanosecond too.
    """
    fn, params = ftp.functionalize(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    )
    megatron = ftp.plan(params, {"0.*": P("tp"), "2.weight": P(None, "tp")})
    both = {
        "0.weight": P("tp", "dp"),
        "0.bias": P(("tp", "dp")),
        "2.weight": P("dp", "tp"),
        "2.bias": P("dp"),
    }
    axes, batch, of = {
        "dp": (("dp",), P("dp"), P()),
        "tp": (("tp",), P(), megatron),
        "zero-3×tp": (("dp", "tp"), P("dp"), both),
    }[plan]

    def gradients(clips: bool, params: Any, x: torch.Tensor) -> Any:
        grads = torch.func.grad(lambda params: fn(params, x).square().mean())(params)
        return ftp.optim.clip_by_global_norm(grads, 1.0)[0] if clips else grads

    def numbers(clips: bool) -> Counter[tuple[str, ...]]:
        mesh = ftp.AbstractMesh((2,) * len(axes), axes)
        found = ftp.lower(
            partial(gradients, clips), mesh, (of, batch), params, torch.ones(8, 8), out_specs=of
        )
        return Counter(c.axes for c in unbucketed(found).collectives if not c.shape)

    assert numbers(True) - numbers(False) == Counter(
        {} if plan == "dp" else {(axis,): 1 for axis in axes}
    )


@pytest.mark.parametrize("size", [1, 2])
def test_the_norm_of_half_precision_is_computed_in_float32(size: int):
    """float16's squares overflow from 256 on, and bfloat16 counts by twos from 256 on."""
    large = {"w": torch.full((4,), 300.0, dtype=torch.float16)}
    many = {"w": torch.ones(100, 8, dtype=torch.bfloat16).unbind()}
    mesh = ftp.simulated_mesh((size,), ("tp",))
    for tree, expected in ((large, 600.0), (many, 800**0.5)):
        clip = ftp.spmd(lambda grads: ftp.optim.clip_by_global_norm(grads, 1.0), mesh, P("tp"))
        clipped, norm = clip(tree)
        leaves = torch.utils._pytree.tree_leaves(clipped)
        torch.testing.assert_close(norm, torch.tensor(expected))
        assert {x.dtype for x in leaves} == {torch.utils._pytree.tree_leaves(tree)[0].dtype}
        total = sum(float(x.double().square().sum()) for x in leaves)
        assert total**0.5 == pytest.approx(1.0, rel=1e-2)
