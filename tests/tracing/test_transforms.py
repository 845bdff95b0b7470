"""torch.func's transforms inside a program: a grid of transform × model × mesh against one
device.
"""

import itertools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from few_or_many import slow_unless
from torch import Tensor
from torch._functorch import eager_transforms
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ftp
from ftp import P

Params = dict[str, Tensor]


def mlp(params: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def norm_mlp(params: Params, x: Tensor) -> Tensor:
    return F.layer_norm(mlp(params, F.layer_norm(x, (x.shape[-1],))), (3,))


MODELS: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "mlp": mlp,
    "norms": norm_mlp,
    "remat": ftp.remat(mlp),
}
MESHES: dict[str, tuple[tuple[str, ...], Params | dict[str, P], P]] = {
    "dp": (("dp",), {"up": P(), "bias": P(), "down": P()}, P("dp")),
    "tp": (("tp",), {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp")}, P()),
    "dp×tp": (("dp", "tp"), {"up": P("dp", "tp"), "bias": P("tp"), "down": P("tp")}, P("dp")),
}


def inputs(models: int | None = None) -> tuple[Params, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (4, 6), "bias": (6,), "down": (6, 3)}
    lead = () if models is None else (models,)
    return {
        k: torch.randn(*lead, *s, generator=generator, dtype=torch.float64)
        for k, s in shapes.items()
    }, torch.randn(5, 4, generator=generator, dtype=torch.float64)


Model = Callable[[Params, Tensor], Tensor]


def loss_of(model: Model) -> Callable[[Params, Tensor], Tensor]:
    return lambda params, x: model(params, x).square().mean()


def by_row(model: Model) -> Any:
    return lambda params, x: torch.vmap(lambda row: model(params, row))(x)


def per_sample_gradients(model: Model) -> Any:
    return torch.vmap(torch.func.grad(loss_of(model)), in_dims=(None, 0))


def jvp(model: Model) -> Any:
    return lambda params, x: torch.func.jvp(
        lambda p: model(p, x), (params,), ({k: p.cos() for k, p in params.items()},)
    )


def jacobian(transform: Any) -> Any:
    return lambda model: (
        lambda params, x: transform(lambda bias: model({**params, "bias": bias}, x).sum(0))(
            params["bias"]
        )
    )


def hessian(model: Model) -> Any:
    return lambda params, x: torch.func.hessian(
        lambda bias: loss_of(model)({**params, "bias": bias}, x)
    )(params["bias"])


def inner_loop(model: Model) -> Any:
    """MAML: the gradient of the loss after two steps of gradient descent."""

    def after(params: Params, x: Tensor) -> Tensor:
        for _ in range(2):
            grads = torch.func.grad(loss_of(model))(params, x)
            params = {k: p - 0.1 * grads[k] for k, p in params.items()}
        return loss_of(model)(params, x)

    return torch.func.grad_and_value(after)


TRANSFORMS: dict[str, Callable[[Model], Any]] = {
    "vmap": by_row,
    "per-sample gradients": per_sample_gradients,
    "jvp": jvp,
    "jacfwd": jacobian(torch.func.jacfwd),
    "jacrev": jacobian(torch.func.jacrev),
    "hessian": hessian,
    "inner loop": inner_loop,
}


@pytest.mark.cases_by_default(6)
@pytest.mark.parametrize(
    ("transform", "model", "mesh"),
    slow_unless(
        lambda transform, model, mesh: (
            (list(TRANSFORMS).index(transform) + list(MODELS).index(model)) % len(MESHES)
            == list(MESHES).index(mesh)
        ),
        itertools.product(TRANSFORMS, MODELS, MESHES),
    ),
)
def test_equals_one_device(transform: str, model: str, mesh: str):
    axes, specs, batch = MESHES[mesh]
    params, x = inputs()
    fn = TRANSFORMS[transform](MODELS[model])
    step = ftp.spmd(fn, ftp.simulated_mesh((2,) * len(axes), axes), (specs, batch), P())
    torch.testing.assert_close(step(params, x), fn(params, x), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("spec", [P("n"), P(None, None, "n"), P(None, "n")], ids=str)
def test_ensembles(spec: P):
    """Models stacked along a dim of their own, one of the dims cut: between models nothing is
    moved.
    """
    params, x = inputs(models=4)
    fn = torch.vmap(torch.func.grad_and_value(loss_of(mlp)), in_dims=(0, None))
    specs = {
        "up": spec,
        "bias": P("n") if spec == P("n") else P(),
        "down": P("n") if spec == P("n") else P(),
    }
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("n",)), (specs, P()))
    torch.testing.assert_close(step(params, x), fn(params, x), rtol=1e-12, atol=1e-14)
    if spec == P("n"):
        assert not step.lower(params, x).collectives


def _by_jvp(fn: Any, *primals: Any) -> Any:
    """What torch.func.linearize gives; under torch.func.grad and vmap its own is without
    tangents, or refused.
    """
    return fn(*primals), lambda *tangents: torch.func.jvp(fn, primals, tangents)[1]


LINEARIZED = {
    "a tensor": lambda make, w, x: (
        lambda out, linear: (out + linear(w.cos())).square().sum(),
        make(lambda q: (x @ q).tanh(), w),
    ),
    "trees": lambda make, w, x: (
        lambda out, linear: sum(
            (out["o"] * t["o"]).sum() + t["p"][0].square().sum()
            for t in (linear(w, x), linear(w.cos(), 0 * x))
        ),
        make(lambda q, y: {"o": (y @ q).tanh(), "p": [q.sin() * y.sum()]}, w, 2 * x),
    ),
    "mapped tangents": lambda make, w, x: (
        lambda out, linear: torch.vmap(linear)(torch.stack([w, 2 * w])).square().sum(),
        make(lambda q: (x @ q).tanh(), w),
    ),
    "a Hessian's product": lambda make, w, x: (
        lambda out, linear: (out * linear(w)).sum(),
        make(torch.func.grad(lambda q: (x @ q).tanh().sum()), w),
    ),
}


@pytest.mark.parametrize("name", LINEARIZED)
def test_linearize(name: str):
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def loss(w: torch.Tensor, x: torch.Tensor, make: Any = torch.func.linearize) -> torch.Tensor:
        value, linearized = LINEARIZED[name](make, w, x)
        return value(*linearized)

    grad, value = torch.func.grad_and_value(lambda w, x: loss(w, x, _by_jvp))(w, x)
    found, found_grad = ftp.shard(
        lambda w, x: loss(w, x), ftp.simulated_mesh((2,), ("tp",)), P("tp")
    )(w, x)
    torch.testing.assert_close((found, found_grad), (value, grad))
    assert (
        eager_transforms.lazy_dynamo_disallow.__module__ == eager_transforms.__name__
    )  # torch's own is as it was


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_helpers_under_compile_are_seen_through():
    """They are not compiled: plain torch's numbers are those of the helper itself."""

    def helper(h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(h) * 2

    compiled = torch.compile(helper, fullgraph=True)
    flag = torch._dynamo.config.error_on_nested_fx_trace
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    grad, value = torch.func.grad_and_value(lambda w: helper(x @ w).square().sum())(w)
    found = ftp.shard(
        lambda w, x: compiled(x @ w).square().sum(), ftp.simulated_mesh((2,), ("tp",)), P("tp")
    )(w, x)
    torch.testing.assert_close(found, (value, grad))
    assert torch._dynamo.config.error_on_nested_fx_trace is flag


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("values", [[INF, 2, 3], [NAN, 2, 3], [-INF, INF, 3], [0, INF, 2]], ids=str)
@pytest.mark.parametrize("spec", [P(), P("tp")])
def test_gradients_of_products_are_those_of_torch_func(values, spec):
    """``torch.autograd.grad`` divides the product by the element, which makes NaN of infinities;
    ``torch.func.grad``, whose gradients are a step's, multiplies the others.
    """
    x, mask = torch.tensor(values, dtype=torch.float64), torch.tensor([True, True, False])
    for fn in (
        torch.prod,
        lambda x: torch.prod(x, 0),
        lambda x: torch.masked.prod(x, 0, mask=mask),
    ):
        step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), spec)
        assert_same = torch.testing.assert_close
        assert_same(step(x)[1], torch.func.grad(fn)(x), rtol=0, atol=0, equal_nan=True)
    if values == [INF, 2, 3]:
        leaf = x.clone().requires_grad_()
        (by_autograd,) = torch.autograd.grad(leaf.prod(), leaf)
        assert by_autograd.isnan()[0] and torch.func.grad(torch.prod)(x)[0] == 6


ATTENDED = {
    "forward over reverse": lambda loss, p, x: torch.func.jvp(
        lambda p: torch.func.grad(loss)(p, x), (p,), (torch.ones_like(p),)
    )[1],
    "reverse over reverse": lambda loss, p, x: torch.func.grad(
        lambda p: torch.func.grad(loss)(p, x).square().sum()
    )(p),
    "of the input": lambda loss, p, x: torch.func.grad(
        lambda p: torch.func.grad(lambda x: loss(p, x))(x).square().sum()
    )(p),
}


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("way", ATTENDED)
def test_second_derivatives_of_fused_attention(way: str):
    """torch's fused kernels have none."""

    def loss(p: Tensor, x: Tensor) -> Tensor:
        q, k, v = (x @ p).unflatten(-1, (3, 2, 2)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    def program(p: Tensor, x: Tensor) -> Tensor:
        return ATTENDED[way](loss, p, x)

    generator = torch.Generator().manual_seed(0)
    p, x = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((4, 12), (2, 5, 4))
    )
    with sdpa_kernel(SDPBackend.MATH):
        expected = program(p, x)
    mesh = ftp.simulated_mesh((3,), ("tp",))
    found = ftp.spmd(program, mesh, (P(None, "tp"), P()), P(), certify=True)(p, x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_first_derivatives_of_attention_stay_fused():
    def loss(p: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x @ p, x, x).sum()

    step = ftp.shard(loss, ftp.AbstractMesh((2,), ("dp",)), P(), batch_specs=P("dp"))
    graph = step.lower(torch.empty(4, 4), torch.empty(2, 2, 5, 4)).graph.graph
    assert any("flash_attention" in str(node.target) for node in graph.nodes)


def wave(x: Tensor, p: Tensor) -> Tensor:
    return torch.sin(x @ p) / x[:1]


def shifted(x: Tensor, p: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    y = wave(x, p)
    return {"wave": y, "squared": y[1:] ** 2}, y.cos()


def along(x: Tensor, p: Tensor) -> Tensor:
    return torch.func.jvp(lambda x: wave(x, p), (x,), (x.cos(),))[1]


MAPPED_TWICE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "hessian": torch.func.hessian(lambda x, p: wave(x, p).sum()),
    "jacfwd": torch.func.jacfwd(wave),
    "jacfwd, aux": torch.func.jacfwd(shifted, (0, 1), has_aux=True),
    "jvp": torch.vmap(along, (None, 1)),
}


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("of", MAPPED_TWICE)
def test_gradients_of_forward_mode_under_two_vmaps(of: str):
    """torch traces none of them: the trace takes reverse mode for forward mode."""

    def loss(p: Tensor, x: Tensor) -> Tensor:
        found = torch.vmap(MAPPED_TWICE[of], (0, None))(x, p)
        return sum((y.square().mean() for y in optree.tree_leaves(found)), start=x.new_zeros(()))

    p, x = (torch.linspace(0.3, 2, n, dtype=torch.float64).sin().view(-1, 3) for n in (9, 12))
    for axis, spec in (("tp", P()), ("dp", P("dp"))):
        mesh = ftp.simulated_mesh((2,), (axis,))
        step = ftp.shard(loss, mesh, P(axis), batch_specs=spec, certify=True)
        expected = tuple(reversed(torch.func.grad_and_value(loss)(p, x)))
        torch.testing.assert_close(step(p, x), expected, rtol=1e-10, atol=1e-12)


def test_gradients_of_forward_mode_in_chunks_are_traced_again():
    """torch's second trace of them fails with another error than its first."""

    def loss(p: Tensor, x: Tensor) -> Tensor:
        of_rows = torch.vmap(torch.func.jacfwd(wave), (0, None), chunk_size=2)
        return of_rows(x, p).square().mean()

    p, x = (torch.linspace(0.3, 2, n, dtype=torch.float64).sin().view(-1, 3) for n in (9, 15))
    expected = tuple(reversed(torch.func.grad_and_value(loss)(p, x)))
    for ranks in (2, 3):
        step = ftp.shard(loss, ftp.simulated_mesh((ranks,), ("dp",)), P(), batch_specs=P("dp"))
        torch.testing.assert_close(step(p, x), expected, rtol=1e-10, atol=1e-12)


def test_tangents_that_are_views_under_vmap():
    """torch copies such a tangent into zeros that it makes by an op of its own."""

    def of_row(p: Tensor, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: (x.sin() * p).prod())
        column = torch.eye(3, dtype=x.dtype)[:, 1]
        return torch.func.jvp(slope, (x,), (column,))[1].sum()

    def energy(p: Tensor, x: Tensor) -> Tensor:
        return torch.vmap(of_row, (None, 0))(p, x).square().mean()

    p, x = (torch.linspace(0.3, 2, n, dtype=torch.float64).sin() for n in (3, 15))
    x = x.view(5, 3)
    for spec in (P("dp"), P(None, "dp")):
        mesh = ftp.simulated_mesh((2,), ("dp",))
        step = ftp.spmd(energy, mesh, (P(), spec), P(), certify=True)
        torch.testing.assert_close(step(p, x), energy(p, x), rtol=1e-10, atol=1e-12)


class Target(torch.nn.Module):
    """A target network that its call averages by ``.data``."""

    def __init__(self):
        super().__init__()
        self.online = torch.nn.Linear(3, 2)
        self.target = torch.nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x):
        for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
            old.data.mul_(0.9)
            old.data.add_(0.1 * new.data)
        return (self.online(x) - self.target(x)).square().mean()


def test_data_of_a_tensor_that_a_transform_does_not_see():
    mesh = ftp.simulated_mesh((2,), ("dp",))
    fn, params, buffers = ftp.functionalize(Target(), buffers=True)

    def train_step(params, buffers, x):
        of = torch.func.grad_and_value(lambda p: fn(p, buffers, x), has_aux=True)
        grads, (loss, new) = of(params)
        return {k: v - 0.1 * grads[k] for k, v in params.items()}, new, loss

    def frozen(w, scale, x):
        return torch.func.grad(lambda w: (x @ w * scale.data).square().sum())(w)

    x, w, scale = torch.randn(6, 3), torch.randn(3, 2), torch.randn(2)
    step = ftp.spmd(train_step, mesh, (P(), P(), P("dp")))
    torch.testing.assert_close(step(params, buffers, x), train_step(params, buffers, x))
    out = ftp.spmd(frozen, mesh, (P(), P(), P("dp")))(w, scale, x)
    torch.testing.assert_close(out, frozen(w, scale, x))
