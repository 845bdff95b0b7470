"""Recomputed blocks: the values and gradients of plain torch, fewer bytes at the peak, and no
more collectives than the policy asks for.
"""

from collections import Counter, deque
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from plan_reshards import unbucketed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ftp
from ftp import P

LAYERS, DIM, HIDDEN, ROWS = 8, 16, 64, 256


def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Two sublayers, each with a product whose result Megatron's cut reduces; the second's input
    needs the first's.
    """
    x = x + F.gelu(x @ p["up1"]) @ p["down1"]
    return x + torch.sin(1.5 * F.gelu(x @ p["up2"])) @ p["down2"]


def loss_of(policy: Any):
    run = block if policy is None else ftp.remat(block, policy)

    def loss(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = run(p, x)
        return x.square().mean()

    return loss


def inputs() -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "up1": (DIM, HIDDEN),
        "down1": (HIDDEN, DIM),
        "up2": (DIM, HIDDEN),
        "down2": (HIDDEN, DIM),
    }
    params = [
        {k: torch.randn(s, generator=generator, dtype=torch.float64) / 8 for k, s in shapes.items()}
        for _ in range(LAYERS)
    ]
    return params, torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)


MEGATRON = [{"up1": P(None, "n"), "down1": P("n"), "up2": P(None, "n"), "down2": P("n")}] * LAYERS
PLANS: dict[str, tuple[Any, P]] = {
    "tp": (MEGATRON, P()),
    "dp": (P(), P("n")),
    "zero": (P("n"), P("n")),
}
POLICIES: dict[str, Any] = {
    "nothing": "nothing",
    "products": "products",
    "collectives": "collectives",
    "gelu": lambda op: op is torch.ops.aten.gelu.default,
}


def lowered(plan: str, policy: Any, **options: Any) -> ftp.Lowered:
    specs, batch = PLANS[plan]
    params, x = inputs()
    return ftp.shard(
        loss_of(policy), ftp.simulated_mesh((2,), ("n",)), specs, batch_specs=batch, **options
    ).lower(params, x)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("plan", "policy"),
    [
        (plan, policy)
        for plan in PLANS
        for policy in POLICIES
        if plan == "tp" or policy == "nothing"
    ],
)
def test_values_gradients_and_peak(plan: str, policy: str):
    specs, batch = PLANS[plan]
    params, x = inputs()
    step = ftp.shard(
        loss_of(POLICIES[policy]), ftp.simulated_mesh((2,), ("n",)), specs, batch_specs=batch
    )
    loss, grads = step(params, x)
    expected, value = torch.func.grad_and_value(loss_of(None))(params, x)
    torch.testing.assert_close(loss, value, rtol=1e-13, atol=0)
    torch.testing.assert_close(grads, expected, rtol=1e-11, atol=1e-14)
    kept, peak = lowered(plan, None).memory, step.lower(params, x).memory
    # A layer keeps five activations of (rows, hidden), half of each on a rank, and some of (rows,
    # dim). What is left of them: one layer's, what the policy keeps, and the layers' inputs.
    activation = ROWS * HIDDEN * 8 // 2
    assert (
        kept - peak
        >= {"nothing": 4, "collectives": 4, "products": 2.5, "gelu": 2.5}[policy]
        * activation
        * LAYERS
    )


def test_collectives_by_policy():
    """The second sublayer's input comes of an all-reduce: repeated for each block, or kept."""
    counts = {
        policy: Counter(c.op for c in unbucketed(lowered("tp", POLICIES[policy])).collectives)
        for policy in POLICIES
    }
    plain = Counter(c.op for c in unbucketed(lowered("tp", None)).collectives)
    assert plain == counts["collectives"] == counts["products"]
    assert counts["nothing"] - plain == Counter(all_reduce=LAYERS)


def test_parameters_are_gathered_as_without():
    """Once for each pass; the very first is in no gradient, but in the recomputation."""
    plain, repeated = (
        Counter(c.op for c in unbucketed(lowered("zero", policy)).collectives)
        for policy in (None, "nothing")
    )
    assert plain["all_gather"] == 8 * LAYERS - 1
    assert repeated - plain == Counter(all_gather=1) and plain - repeated == Counter()
    held = Counter(
        c.op
        for c in unbucketed(lowered("zero", "nothing", reshard_after_forward=False)).collectives
    )
    assert held["all_gather"] == 4 * LAYERS


def test_products_are_repeated_once_where_nothing_is_kept():
    def products(policy: Any) -> int:
        return sum(
            n.kind == "op" and n.target is torch.ops.aten.mm.default
            for n in lowered("dp", policy).plan.graph.nodes
        )

    assert products(None) == products("products")
    assert products("nothing") == products(None) + 3 * LAYERS


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.hessian, torch.func.jacrev, torch.func.jacfwd]
)
def test_transforms(transform: Any):
    x = torch.randn(3, 2, dtype=torch.float64)
    fn = lambda x: (x.sin() * x).sum() ** 2  # noqa: E731
    torch.testing.assert_close(transform(ftp.remat(fn))(x), transform(fn)(x))
    torch.testing.assert_close(
        torch.vmap(transform(ftp.remat(fn)))(x), torch.vmap(transform(fn))(x)
    )


def test_nested_and_other_leaves():
    inner = ftp.remat(lambda w, x: torch.tanh(x @ w))
    outer = ftp.remat(
        lambda p, x, *, power: (inner(p["w"], x) ** power, x.argmax(), None, "static")
    )
    w, x = torch.randn(2, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    out = outer({"w": w}, x, power=3)
    assert torch.equal(out[1], x.argmax()) and out[2:] == (None, "static")
    found = torch.func.grad(lambda w: outer({"w": w}, x, power=3)[0].sum())(w)
    torch.testing.assert_close(found, torch.func.grad(lambda w: (torch.tanh(x @ w) ** 3).sum())(w))
    torch.testing.assert_close(ftp.remat(lambda x: x)(x), x)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, torch.func.jacfwd])
def test_a_block_of_blocks(transform: Any):
    """The inner block takes a value that the outer one makes."""
    inner = ftp.remat(lambda w, x: torch.tanh(x @ w))
    body = lambda inner, w, x: inner(w, (inner(w, x * 2) * w).sin()).sum()  # noqa: E731
    w, x = torch.randn(2, 2, 2, dtype=torch.float64)
    expected = transform(lambda w: body(lambda w, x: torch.tanh(x @ w), w, w * x))(w)
    torch.testing.assert_close(
        transform(lambda w: ftp.remat(lambda w, x: body(inner, w, x))(w, w * x))(w), expected
    )


def test_plain_autograd_keeps_the_arguments_alone():
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = ftp.remat(lambda w: torch.tanh(torch.tanh(w @ w) @ w.T[:, 1:]))(w)
    assert [k.data_ptr() for k in kept] == [w.data_ptr()]
    y.sum().backward()
    torch.testing.assert_close(
        w.grad,
        torch.func.grad(lambda w: torch.tanh(torch.tanh(w @ w) @ w.T[:, 1:]).sum())(w.detach()),
    )


def test_captured_tensors_have_gradients():
    """Of variables, lists, dicts and attributes, in a view too; others are refused."""
    w, x = torch.randn(2, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)

    def loss(again: Any, w: torch.Tensor) -> torch.Tensor:
        captured, held, factors = w * 2, {"w": [w.sin()]}, Factors()
        factors.factor = w.sum()
        block = again(lambda x: (x @ captured).sin() @ held["w"][0].T * factors.factor)
        return (block(block(x)) * held["w"][0]).sum()

    plain, rematted = partial(loss, lambda f: f), partial(loss, ftp.remat)
    for transform in TRANSFORMS.values():
        found = transform(rematted, w)
        torch.testing.assert_close(found, transform(plain, w), rtol=1e-12, atol=1e-12)
    leaf = w.clone().requires_grad_()
    (found,) = torch.autograd.grad(rematted(leaf), leaf)
    torch.testing.assert_close(found, torch.func.grad(plain)(w), rtol=1e-12, atol=1e-12)

    def hidden(w: torch.Tensor) -> torch.Tensor:
        values = iter([w * 2] * 2)
        return ftp.remat(lambda x: x @ next(values))(x).sum()

    with pytest.raises(
        ftp.FtpError, match=r"uses a tensor of shape \(2, 2\) at .*Pass it as an arg"
    ):
        torch.func.grad(hidden)(w)


def with_captures(remats, w, x, keys):
    """A block that captures a key, a mask and a number, computed from arguments without a
    gradient.
    """
    key, mask, most = keys[0], x.detach() > 0, x.detach().amax() * 2

    def block(w, h):
        draws = ftp.random.dropout(key, torch.sin(h @ w), 0.5)
        return torch.where(mask, draws, most * h)

    if remats:
        block = ftp.remat(block)
    if remats == 2:
        inner = block
        block = ftp.remat(lambda w, h: inner(w, h))
    return block(w, block(w, x)).square().sum()


TRANSFORMS = {
    "grad": lambda f, w: torch.func.grad(f)(w),
    "vmap of grad": lambda f, w: torch.func.vmap(torch.func.grad(f))(torch.stack([w, w.cos()])),
    "grad of vmap": lambda f, w: torch.func.grad(
        lambda w: torch.func.vmap(f)(torch.stack([w, w.cos()])).sum()
    )(w),
    "grad of grad": lambda f, w: torch.func.grad(lambda w: torch.func.grad(f)(w).sin().sum())(w),
}


def pulled(f: Any, w: torch.Tensor) -> torch.Tensor:
    out, pull = torch.func.vjp(f, w)
    return pull(torch.ones_like(out))[0].sin() * w + pull(out)[0]


def pulled_twice(f: Any, w: torch.Tensor) -> torch.Tensor:
    out, pull = torch.func.vjp(f, w)
    return torch.func.vjp(lambda t: pull(t)[0], torch.ones_like(out))[1](w)[0].sum() * w


DERIVATIVES = {
    "vjp": pulled,
    "vjp of vjp": pulled_twice,
    "jvp": lambda f, w: torch.func.jvp(f, (w,), (w.sin(),))[1].sum() * w,
    "jacrev": lambda f, w: torch.func.jacrev(f)(w).sum((0, 1)),
    "linearize": lambda f, w: torch.func.linearize(f, w)[1](w.sin()).sum() * w,
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's linearize
@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_block_that_takes_derivatives(name: str):
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def loss(again: Any, w: torch.Tensor) -> torch.Tensor:
        block = again(lambda h: DERIVATIVES[name](lambda v: torch.tanh(x @ v), h))
        return (block(w) * w + block(w.sin())).sum()

    plain, rematted = partial(loss, lambda f: f), partial(loss, ftp.remat)
    torch.testing.assert_close(rematted(w), plain(w), rtol=1e-12, atol=1e-12)
    leaf = w.clone().requires_grad_()
    found, expected = (torch.autograd.grad(f(leaf), leaf) for f in (rematted, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if name == "linearize":  # torch's is wrong within its transforms
        return
    for transform in TRANSFORMS.values():
        found, expected = (transform(f, w) for f in (rematted, plain))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    value, grad = ftp.shard(rematted, ftp.simulated_mesh((2,), ("x",)), P("x"))(w)
    torch.testing.assert_close(value, plain(w), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.func.grad(plain)(w), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "remats"),
    [*((name, 1) for name in TRANSFORMS), ("grad", 2), ("vmap of grad", 2)],
)
def test_captured_tensors_without_a_gradient(name, remats):
    transform = TRANSFORMS[name]
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    keys = ftp.random.split(ftp.random.key(1), 2)
    found = transform(lambda w: with_captures(remats, w, x, keys), w)
    expected = transform(lambda w: with_captures(0, w, x, keys), w)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_captured_tensors_of_arguments_in_a_sharded_program():
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    keys = ftp.random.split(ftp.random.key(1), 2)
    value, grads = torch.func.grad_and_value(lambda w: with_captures(0, w, x, keys))(w)[::-1]
    for axes, specs in (((2,), P("x")), ((3,), P(None, "x"))):
        step = ftp.shard(
            lambda w, x, keys: with_captures(2, w, x, keys),
            ftp.simulated_mesh(axes, ("x",)),
            specs,
            batch_specs=(P("x"), P()),
            certify=True,
        )
        torch.testing.assert_close(step(w, x, keys), (value, grads), rtol=1e-12, atol=1e-12)


def experts(params, x):
    """Rows by expert, and a write at a mask: a trace replaces both, as it has no values."""
    chosen = (x @ params["router"]).argmax(-1)
    out = torch.zeros_like(x)
    for e in range(3):
        (rows,) = torch.where(chosen == e)
        out = out.index_add(0, rows, torch.tanh(x[rows] @ params["experts"][e]))
    out = out.clone()
    out[x > 1] = 0.5
    return out


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    "recomputed",
    [
        ftp.remat,
        lambda block: partial(checkpoint, block, use_reentrant=False),
    ],
    ids=["remat", "checkpoint"],
)
def test_a_block_is_traced_as_it_is_outside_of_one(recomputed):
    params = {"router": torch.randn(4, 3).double(), "experts": torch.randn(3, 4, 4).double()}
    x = torch.randn(6, 4).double()
    expected = torch.func.grad_and_value(lambda p, x: experts(p, x).square().sum())(params, x)
    for specs in ({"router": P(), "experts": P("x")}, {"router": P(None, "x"), "experts": P()}):
        step = ftp.shard(
            lambda p, x: recomputed(experts)(p, x).square().sum(),
            ftp.simulated_mesh((2,), ("x",)),
            specs,
            batch_specs=P("x"),
            certify=True,
        )
        torch.testing.assert_close(step(params, x), expected[::-1], rtol=1e-12, atol=1e-12)


def test_captured_tensors_with_a_tangent():
    x = torch.linspace(0.5, 2, 3, dtype=torch.float64)

    def loss(again, w):
        scale = w.sum()
        return again(lambda x: (x * scale).sin())(x).sum()

    plain, rematted = partial(loss, lambda f: f), partial(loss, ftp.remat)
    torch.testing.assert_close(
        torch.func.jvp(rematted, (x,), (x,)), torch.func.jvp(plain, (x,), (x,))
    )
    torch.testing.assert_close(torch.func.hessian(rematted)(x), torch.func.hessian(plain)(x))

    def shifts(w, n):  # numbers have no tangents
        steps = n + 1
        return ftp.remat(lambda w: (w * steps).sin())(w).sum()

    n = torch.arange(3)
    torch.testing.assert_close(
        torch.func.hessian(shifts)(x, n), torch.func.hessian(lambda w: (w * (n + 1)).sin().sum())(x)
    )


def test_unknown_policy():
    with pytest.raises(
        ftp.FtpError,
        match="policy is 'dots'; it must be one of 'nothing', 'products', 'collectives'",
    ):
        ftp.remat(block, "dots")


class Layer(nn.Module):
    """Two sublayers with all that a block may have: dropout, a tied norm, buffers that it
    updates, a keyword, several results.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.dropout, self.batch_norm = nn.Dropout(0.1), nn.BatchNorm1d(HIDDEN)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, *, scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen = self.seen + 1
        hidden = self.batch_norm(F.gelu(self.up(self.norm(x))))
        return x + self.dropout(self.down(self.dropout(hidden))) * scale, hidden.argmax()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x, _ = layer(x, scale=0.5)
        return x


@pytest.mark.parametrize(
    "patterns",
    [{"layers.*": "collectives"}, {"**.up": "nothing", "layers.1": "products"}, {"": "nothing"}],
    ids=str,
)
def test_modules_by_path(patterns: dict[str, Any]):
    """The numbers, masks and new buffers of a model that keeps everything, on one device and
    cut.
    """
    torch.manual_seed(0)
    model, x, key = Layers().double(), inputs()[1], ftp.random.key(2)

    def step_of(remat: Any) -> Any:
        fn, params, buffers = ftp.functionalize(model, buffers=True, remat=remat)

        def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
            out, buffers = fn(params, buffers, x, rng=key)
            return out.square().mean(), buffers

        return torch.func.grad_and_value(loss, has_aux=True), params, buffers

    plain, params, buffers = step_of(None)
    expected = plain(params, buffers, x)
    again = step_of(patterns)[0]
    torch.testing.assert_close(again(params, buffers, x), expected, rtol=1e-11, atol=1e-14)
    specs = (
        ftp.plan(params, {"layers.*.up.*": P("n"), "layers.*.down.weight": P(None, "n")}),
        P(),
        P(),
    )
    torch.testing.assert_close(
        ftp.spmd(again, ftp.simulated_mesh((2,), ("n",)), specs)(params, buffers, x),
        expected,
        rtol=1e-11,
        atol=1e-14,
    )
    assert model.layers[0].seen == 0 and expected[1][1]["layers.0.seen"] == 2


@pytest.mark.parametrize("policy", ["nothing", "collectives"])
def test_peak_and_collectives_of_modules(policy: str):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up1, self.down1 = (
                nn.Linear(DIM, HIDDEN, bias=False),
                nn.Linear(HIDDEN, DIM, bias=False),
            )
            self.up2, self.down2 = (
                nn.Linear(DIM, HIDDEN, bias=False),
                nn.Linear(HIDDEN, DIM, bias=False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.down1(F.gelu(self.up1(x)))
            return x + self.down2(torch.sin(1.5 * F.gelu(self.up2(x))))

    model, x = nn.Sequential(*(Block() for _ in range(LAYERS))).double(), inputs()[1]

    def lowered_with(remat: Any) -> ftp.Lowered:
        fn, params = ftp.functionalize(model, remat=remat)
        specs = ftp.plan(params, {"**.up*.weight": P("n"), "**.down*.weight": P(None, "n")})
        return ftp.shard(
            lambda p, x: fn(p, x).square().mean(), ftp.simulated_mesh((2,), ("n",)), specs
        ).lower(params, x)

    kept, found = lowered_with(None), lowered_with({"*": policy})
    assert kept.memory - found.memory >= 4 * ROWS * HIDDEN * 8 // 2 * LAYERS
    assert len(unbucketed(found).collectives) - len(unbucketed(kept).collectives) == (
        LAYERS if policy == "nothing" else 0
    )


def test_a_model_of_torch_by_path():
    """Attention and dropout of torch's own layers, beside its own autograd."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2, enable_nested_tensor=False
    ).double()
    x, mask = (
        torch.randn(2, 5, 8, dtype=torch.float64),
        nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
    )
    fn, params = ftp.functionalize(model, remat={"layers.*": "nothing"})
    grads = torch.func.grad(lambda p: fn(p, x, mask=mask).square().mean())(params)
    model(x, mask=mask).square().mean().backward()
    torch.testing.assert_close(
        grads, {path: p.grad for path, p in model.named_parameters()}, rtol=1e-11, atol=1e-14
    )


def test_wrong_patterns_of_modules():
    model = Layers()
    with pytest.raises(
        ftp.FtpError,
        match=r"'layers.\*.upp' matches no path of the modules; the nearest are 'layers.0.up'",
    ):
        ftp.functionalize(model, remat={"layers.*.upp": "nothing"})
    with pytest.raises(
        ftp.FtpError, match=r"remat\['layers.\*'\] is 'all'; it must be one of 'nothing'"
    ):
        ftp.functionalize(model, remat={"layers.*": "all"})
    fn, params = ftp.functionalize(model.eval(), remat={"layers": "nothing"})
    with pytest.raises(
        ftp.FtpError,
        match=r"'layers' \(ModuleList\), recomputed by 'layers', was not called, so it recomputes",
    ):
        fn(params, inputs()[1].float())


def test_autocast_holds_when_a_block_is_computed_again():
    """The gradient is taken after its context has ended."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    x = torch.randn(4, 8)

    def gradients(remat: Any) -> Any:
        fn, params = ftp.functionalize(model, remat=remat)

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = fn(params, x)
            return y.float().square().mean()

        mesh = ftp.simulated_mesh((2,), ("tp",))
        return ftp.shard(loss, mesh, P())(params, x), torch.func.grad(loss)(params, x)

    again, once = gradients({"1": "nothing"}), gradients(None)
    torch.testing.assert_close(again[0], once[0], rtol=0, atol=0)
    torch.testing.assert_close(again[1], once[1], rtol=1e-2, atol=1e-4)


FACTOR = {"of global": 0}


class Factors:
    def __init__(self):
        self.factor: float = 0
        self.listed, self.nested = [0], {"a": (deque([0]),)}


@pytest.mark.parametrize(
    "place", ["variable", "attribute", "list", "nested", "global", "method", "default"]
)
def test_a_block_of_a_loop_has_its_variables_as_they_were(place: str):
    def loss(again: Any, w: torch.Tensor) -> torch.Tensor:
        h, held, seen = w, Factors(), []
        reads = {
            "attribute": lambda: held.factor,
            "list": lambda: held.listed[0],
            "nested": lambda: held.nested["a"][0][0],
            "global": lambda: FACTOR["of global"],
            "method": partial(held.listed.__getitem__, 0),
            "default": lambda held=held: held.listed[0],
        }
        for i in range(3):
            held.factor = held.listed[0] = held.nested["a"][0][0] = FACTOR["of global"] = i
            reads["variable"] = lambda: i  # noqa: B023

            def scaled(z: torch.Tensor) -> torch.Tensor:
                seen.append(i)  # noqa: B023
                return z * (reads[place]() + 1)

            h = again(lambda h, w: scaled(h @ w).sin())(h, w)
        assert seen == [0, 1, 2]
        return h.sum()

    w = torch.randn(4, 4, dtype=torch.float64)
    wanted = torch.func.grad(partial(loss, lambda f: f))(w)
    torch.testing.assert_close(torch.func.grad(partial(loss, ftp.remat))(w), wanted)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.scale, self.options, self.mask = 1.0, {"factor": 1.0}, None
        self.shared = Factors()

    def forward(self, x):
        y = self.linear(x) * self.scale * self.options["factor"] * (self.shared.factor + 1)
        return y.sin() if self.mask is None else y.sin() * self.mask


class Setting(torch.nn.Module):
    """A model that sets attributes of a module before it calls it."""

    def __init__(self):
        super().__init__()
        self.block = Scaled()

    def forward(self, x):
        for factor in (1.0, 2.0):
            self.block.scale = self.block.options["factor"] = self.block.shared.factor = factor
            self.block.mask = (x > 0).to(x.dtype)
            x = self.block(x)
        self.block.scale = self.block.options["factor"] = 1.0
        self.block.shared.factor, self.block.mask = 0, None
        return x.sum()


def test_a_module_that_is_recomputed_has_the_attributes_that_its_model_sets():
    model, x = Setting(), torch.randn(3, 4, dtype=torch.float64)
    fn, params = ftp.functionalize(model, remat={"block": "nothing"})
    grads, value = torch.func.grad_and_value(fn)(params, x)
    expected = model(x)
    torch.testing.assert_close(value, expected)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(list(grads.values()), list(wanted))


class ByConfig(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.config = nn.Linear(2, 2), {"scales": [1.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + x).sin() * self.config["scales"][0]


def test_containers_of_a_block_of_many_modules_are_as_they_were():
    model, x = (
        nn.Sequential(nn.Sequential(*(ByConfig() for _ in range(60)))).double(),
        torch.ones(2),
    )

    def set_scales(value: float) -> None:
        for module in model.modules():
            if isinstance(module, ByConfig):
                module.config["scales"][0] = value

    fn, params = ftp.functionalize(model, remat={"0": "nothing"})
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    set_scales(1.1)
    y = fn(leaves, x.double()).sum()
    set_scales(5.0)
    found = torch.autograd.grad(y, list(leaves.values()))
    set_scales(1.1)
    expected = torch.autograd.grad(model(x.double()).sum(), list(model.parameters()))
    torch.testing.assert_close(list(found), list(expected))


class _Reversible(nn.Module):
    """RevIN: what one call takes away, another one adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 3, dtype=torch.float64))

    def forward(self, x: Tensor, way: str) -> Tensor:
        if way == "norm":
            self.mean, self.times = x.mean(0, keepdim=True), 2
            return (x - self.mean) * self.weight
        return x / self.weight + self.times * self.mean


class _Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rev, self.inner = _Reversible(), nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rev((x * self.inner.bias).sin(), "norm")
        return (self.rev(self.inner(y), "denorm") * self.rev.mean).square().mean()


@pytest.mark.cases_by_default(4)
@pytest.mark.filterwarnings(
    "ignore:_Reversed changes attribute .rev.times:ftp.errors.StaleCaptureWarning"
)
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("paths", [["rev"], ["inner"], ["rev", "inner"]])
@pytest.mark.parametrize("axis", [None, "dp", "tp"])
def test_attributes_that_a_block_sets(has_run: bool, paths: list[str], axis: str | None):
    """They are those of this call, for other blocks and for what is none, with gradients."""
    model, x = _Reversed(), torch.linspace(-2, 3, 12, dtype=torch.float64).cos().view(4, 3)
    if has_run:
        model(x + 1)
    fn, params = ftp.functionalize(model, remat=dict.fromkeys(paths, "nothing"))
    loss = model(x)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    if axis is None:
        found, value = torch.func.grad_and_value(lambda p: fn(p, x))(params)
    else:
        batch = P("dp") if axis == "dp" else P()
        step = ftp.shard(fn, ftp.simulated_mesh((2,), (axis,)), P(axis), batch_specs=batch)
        value, found = step(params, x)
    torch.testing.assert_close(value, loss.detach(), rtol=1e-12, atol=0)
    for (path, _), due in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(found[path], due, rtol=1e-10, atol=1e-13)


class _Collecting(nn.Module):
    """Appends to a list of all layers, and assigns containers and values of other types."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 3, dtype=torch.float64))
        self.seen, self.kept, self.shape, self.factor = seen, {}, (1,), 1j

    def forward(self, x: Tensor) -> Tensor:
        if not self.kept:
            self.kept["mean"], self.stats = x.mean(0) * self.weight, [x.std(0), 2]
            self.shape, self.factor = x.shape, 2j
        else:
            x = x * self.kept["mean"] + self.stats[0] * self.stats[1]
            x = (x * self.factor).imag * self.shape[0]
        self.seen.append((x * self.weight).mean())
        return x.sin()


class _Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.a, self.b = _Collecting(self.seen), _Collecting(self.seen)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        self.a.kept, self.b.kept = {}, {}
        for layer in (self.a, self.b, self.a):
            x = layer(x)
        rest = torch.stack(self.seen).sin().sum() + self.b.kept["mean"].sum()
        return x.square().mean() + rest * self.b.shape[1]


@pytest.mark.filterwarnings("ignore:_Collected (changes|leaves):ftp.errors.StaleCaptureWarning")
@pytest.mark.parametrize("has_run", [False, True])
def test_containers_that_a_block_assigns_and_writes_to(has_run: bool):
    """They are those of this call, and one list where layers share one."""
    model, x = _Collected(), torch.linspace(-2, 3, 12, dtype=torch.float64).cos().view(4, 3)
    if has_run:
        model(x + 1)
    fn, params = ftp.functionalize(model, remat=dict.fromkeys("ab", "nothing"))
    loss = model(x)
    due = dict(zip(params, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    found = torch.func.grad_and_value(lambda p: fn(p, x))(params)
    torch.testing.assert_close(found, (due, loss.detach()), rtol=1e-12, atol=1e-13)
    step = ftp.shard(fn, ftp.simulated_mesh((3,), ("dp",)), P("dp"), batch_specs=P("dp"))
    torch.testing.assert_close(step(params, x)[::-1], found, rtol=1e-12, atol=1e-13)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 3, dtype=torch.float64))
        self.register_buffer("count", torch.ones(3, dtype=torch.float64))
        self.other_name = self.count

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return (x * self.other_name * self.weight).sum()


def test_a_buffer_of_a_block_with_another_name():
    x = torch.ones(2, 3, dtype=torch.float64)
    fn, params, buffers = ftp.functionalize(_Counting(), buffers=True, remat={"": "nothing"})
    out, new = fn(params, buffers, x)
    assert out == _Counting()(x) and torch.equal(new["count"], buffers["count"] + 1)


HOOKS: dict[str, Any] = {
    "forward": lambda m: m.register_forward_hook(lambda _, args, out: 2 * out),
    "forward with keywords": lambda m: m.register_forward_hook(
        lambda _, args, kwargs, out: 2 * out, with_kwargs=True
    ),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda _, args: 2 * args[0]),
    "backward": lambda m: m.register_full_backward_hook(lambda _, to, of: (2 * to[0],)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda _, of: (2 * of[0],)),
}


class _HooksItself(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.handle = nn.Linear(3, 3), kind, None

    def forward(self, x: Tensor) -> Tensor:
        if self.handle is None:
            self.handle = HOOKS[self.kind](self.inner)
        return self.inner(x.sin()).cos()


@pytest.mark.filterwarnings("ignore:'handle' of a model:ftp.errors.StaleCaptureWarning")
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_a_block_registers_acts_once(kind: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), _HooksItself(kind), _HooksItself(kind)).double()
    fn, params = ftp.functionalize(deepcopy(model), remat={"[12]": "nothing"})
    mesh = ftp.simulated_mesh((2,), ("dp",))
    step = ftp.shard(lambda p, x: fn(p, x).square().sum(), mesh, P(), batch_specs=P("dp"))
    for n in (4, 5):
        x = torch.linspace(-2, 2, 3 * n, dtype=torch.float64).view(n, 3)
        due = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        got = torch.autograd.grad(fn(leaves, x).square().sum(), list(leaves.values()))
        for found in (got, tuple(step(params, x)[1].values())):
            torch.testing.assert_close(found, due, rtol=1e-12, atol=1e-13)
