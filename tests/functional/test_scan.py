"""``scan``: what a loop over layers computes, gradients included, on one device and cut; and
planned as one layer is.
"""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import strategies as st
from models import LlamaBlock, LlamaConfig
from plan_reshards import unbucketed
from torch.fx.experimental.proxy_tensor import make_fx

import ftp
from ftp import P
from ftp.errors import InputError
from ftp.planning.layers import repeats

CFG = LlamaConfig(dim=16, heads=4, kv_heads=2, hidden=20)  # 20 does not divide by 3
CUTS = {"attn.w[qkv].weight": 0, "attn.wo.weight": 1, "mlp.w[13].weight": 0, "mlp.w2.weight": 1}
MESHES = [(2,), (3,), (2, 2), (2, 3)]


def decoder(
    layers: int, cfg: LlamaConfig = CFG
) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    blocks = [LlamaBlock(cfg).double() for _ in range(layers)]
    fn, _ = ftp.functionalize(blocks[0])
    stacked: Any = torch.func.stack_module_state(blocks)[0]
    params = {name: p.detach() for name, p in stacked.items()}
    return fn, params, torch.randn(5, 6, cfg.dim, dtype=torch.float64)


def specs_of(params: dict[str, torch.Tensor], tp: str | None, zero: str | None) -> Any:
    patterns = {
        path: P(None, *[tp if d == dim else zero for d in range(2)]) for path, dim in CUTS.items()
    }
    return ftp.plan(params, patterns)


def looped(fn: Any, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i in range(len(next(iter(params.values())))):
        x = fn({name: p[i] for name, p in params.items()}, x)
    return x.square().mean()


def equal(found: Any, expected: Any) -> None:
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-13)


@few_or_many(
    st.sampled_from(MESHES),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "nothing", "collectives"]),
    st.integers(1, 3),
    few=2,
    many=60,
)
def test_equals_one_device(
    shape: tuple[int, ...], is_zero: bool, cuts_batch: bool, remat: str | None, layers: int
):
    fn, params, x = decoder(layers)
    mesh = ftp.simulated_mesh(shape, ("tp", "dp")[: len(shape)])
    has_dp = len(shape) > 1
    rows = P("dp") if has_dp and cuts_batch else P()
    specs = specs_of(params, "tp", "dp" if has_dp and is_zero else None)

    def loss(params, x):
        return ftp.scan(fn, params, x, remat=remat).square().mean()

    step = ftp.shard(
        loss, mesh, specs, batch_specs=rows, data_axes=("dp",) if has_dp else (), certify=True
    )
    found_loss, found = step(params, x)
    grads, expected = torch.func.grad_and_value(lambda p: looped(fn, p, x))(params)
    torch.testing.assert_close(found_loss, expected, rtol=1e-12, atol=0)
    equal(found, grads)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning"
)  # of forward-mode formulas in torch itself
def test_unsharded_under_every_transform():
    def fn(layer, x):
        return x + torch.tanh(x @ layer["up"]) @ layer["down"]

    params = {
        name: torch.randn(3, *shape, dtype=torch.float64)
        for name, shape in {"up": (4, 6), "down": (6, 4)}.items()
    }
    x = torch.randn(5, 4, dtype=torch.float64)

    def scanned(params, x):
        return ftp.scan(fn, params, x).square().mean()

    def plain(params, x):
        return looped(fn, params, x)

    traced = make_fx(torch.func.grad(scanned))(params, x)
    assert any(n.target is torch.ops.ftp.unstack.default for n in traced.graph.nodes)
    expected = torch.func.grad(plain)(params, x)
    equal(torch.func.grad(scanned)(params, x), expected)
    equal(traced(params, x), expected)
    for transform in (
        lambda f: torch.func.vmap(torch.func.grad(f), (None, 0))(params, x[:, None]),
        lambda f: torch.func.vmap(torch.func.grad(f), (dict.fromkeys(params, 1), None))(
            {k: p[:, None] for k, p in params.items()}, x
        ),
        lambda f: {"": torch.func.jvp(lambda x: f(params, x), (x,), (torch.ones_like(x),))[1]},
    ):
        want = transform(plain)
        equal(transform(scanned), want)
        equal(make_fx(partial(transform, scanned))()(), want)


def test_outputs_and_keys_for_each_layer():
    """Each layer drops out by a key of its own; what every layer gives comes back stacked, on a
    mesh as on one device.
    """
    fn, params, x = decoder(3)
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))

    def block(layer, x):
        params, key = layer
        x = ftp.random.dropout(key, fn(params, x), 0.5)
        return x, {"mean": x.mean(), "x": x}

    def run(params, keys, x):
        return ftp.scan(block, (params, keys), x, has_outputs=True)

    keys = ftp.random.split(ftp.random.key(1), 3)
    specs = specs_of(params, "tp", None)
    last, outputs = ftp.spmd(run, mesh, (specs, P(), P("dp")), certify=True)(params, keys, x)
    want, means = x, []
    for i in range(3):
        want = ftp.random.dropout(keys[i], fn({k: p[i] for k, p in params.items()}, want), 0.5)
        means.append(want.mean())
    torch.testing.assert_close(last, want)
    torch.testing.assert_close(outputs["mean"], torch.stack(means))
    torch.testing.assert_close(outputs["x"][-1], want)


def test_one_layer_is_moved_at_a_time():
    """ZeRO-3: a rank gathers and reduces each layer's parameters by themselves, and never holds
    the stack.
    """
    fn, params, _ = decoder(8)

    def loss(params, x):
        return ftp.scan(fn, params, x).square().mean()

    mesh = ftp.AbstractMesh((4,), ("dp",))
    specs = ftp.plan(params, {path: P(None, "dp") for path in params})
    lowered = ftp.shard(loss, mesh, specs, batch_specs=P("dp")).lower(
        params, torch.empty(8, 6, 16, dtype=torch.float64)
    )
    gathers = [c for c in unbucketed(lowered).collectives if c.op == "all_gather"]
    assert {c.op for c in unbucketed(lowered).collectives} == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    }
    assert max(c.nbytes for c in unbucketed(lowered).collectives) == max(
        p[0].nbytes for p in params.values()
    )
    # Twice, forward and backward, but for the last layer's, which is still there.
    assert len(params) * (2 * 8 - 1) <= len(gathers) <= len(params) * 2 * 8


@pytest.mark.slow
def test_layers_are_planned_as_one(monkeypatch: pytest.MonkeyPatch):
    """A train step with clipping: its global norm reads every layer, and every layer the norm."""
    cfg = LlamaConfig(dim=64, heads=4, hidden=96)
    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    x = torch.empty(8, 16, 64, dtype=torch.float64, device="meta")
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-3)

    def lowered(layers: int) -> ftp.Lowered:
        fn, params, _ = decoder(layers, cfg)
        specs = specs_of(params, "tp", "dp")

        def train_step(params, state, x):
            grads, loss = torch.func.grad_and_value(lambda p: ftp.scan(fn, p, x).square().mean())(
                params
            )
            grads, _ = ftp.optim.clip_by_global_norm(grads, 1.0)
            return *opt.update(grads, state, params), loss

        step = ftp.spmd(
            train_step, mesh, (specs, specs, P("dp")), (specs, specs, P()), donate=(0, 1)
        )
        return step.lower(params, opt.init(params), x)

    folded = lowered(9)
    assert folded.plan.alike > 2
    ftp.certify(folded)
    monkeypatch.setattr(repeats, "FEWEST", 10**9)
    whole = lowered(9)
    assert not whole.plan.alike
    assert folded.plan.cost == pytest.approx(whole.plan.cost, rel=1e-12)
    records = [
        Counter((c.op, c.axes, c.shape, c.dtype, c.source) for c in unbucketed(program).collectives)
        for program in (folded, whole)
    ]
    assert records[0] == records[1]
    assert folded.memory == whole.memory


def test_a_cut_of_the_layers_is_right():
    """Specs may cut the stacked dim too; slices are then gathered."""
    fn, params, x = decoder(3)
    mesh = ftp.simulated_mesh((2,), ("dp",))
    step = ftp.shard(
        lambda p, x: ftp.scan(fn, p, x).square().mean(),
        mesh,
        ftp.plan(params, {path: P("dp") for path in params}),
    )
    equal(step(params, x)[1], torch.func.grad(lambda p: looped(fn, p, x))(params))


def test_errors():
    w, x = torch.ones(3, 2, 2), torch.ones(2)
    with pytest.raises(
        InputError,
        match=r"of size 3 in stacked\['a'\] of shape \(3, 2, 2\), but other in stacked\['b'\] of"
        r" shape \(4, 2\)",
    ):
        ftp.scan(lambda p, x: x, {"a": w, "b": torch.ones(4, 2), "c": w}, x)
    with pytest.raises(
        InputError, match=r"stacked\['n'\] is 3, an int: it has no slices. Close over it."
    ):
        ftp.scan(lambda p, x: x, {"a": w, "n": 3}, x)
    with pytest.raises(InputError, match="0-d tensor"):
        ftp.scan(lambda p, x: x, torch.tensor(1.0), x)
    with pytest.raises(InputError, match="no tensors"):
        ftp.scan(lambda p, x: x, {}, x)
    with pytest.raises(InputError, match=r"takes x as float32\[2\] and gives float64\[2\]"):
        ftp.scan(lambda p, x: (p @ x).double(), w, x)
    with pytest.raises(InputError, match="takes x as one tensor and gives"):
        ftp.scan(lambda p, x: {"x": x}, w, x)
    with pytest.raises(InputError, match="must return a pair"):
        ftp.scan(lambda p, x: p @ x, w, x, has_outputs=True)
    with pytest.raises(InputError, match="remat is 'some'"):
        ftp.scan(lambda p, x: p @ x, w, x, remat="some")
    with pytest.raises(InputError, match="takes a function"):
        ftp.scan(3, w, x)  # type: ignore[arg-type]
    assert ftp.scan(lambda p, x: p @ x, w[:0], x) is x
