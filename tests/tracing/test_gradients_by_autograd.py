"""Gradients that torch.func refuses and torch.autograd takes: equal to torch on one device."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from few_or_many import slow_after
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ftp
from ftp import P
from ftp.functional.gradient_hooks import GradientRefused

aten = torch.ops.aten


@torch.library.custom_op("autograd_tests::gelu_of_user", mutates_args=())
def gelu_of_user(x: Tensor) -> Tensor:
    return x * x.sigmoid()


gelu_of_user.register_fake(torch.empty_like)


def _gelu_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    s = x.sigmoid()
    return grad * (s + x * s * (1 - s))


gelu_of_user.register_autograd(
    _gelu_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)
ftp.pointwise(torch.ops.autograd_tests.gelu_of_user.default)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    backward = staticmethod(_gelu_backward)


def custom_op(p, x):
    return (gelu_of_user(x @ p["up"]) @ p["down"]).square().mean()


def function_with_ctx(p, x):
    return (Swish.apply(x @ p["up"]) @ p["down"]).square().mean()


def _block(x, p):
    return torch.tanh(x @ p["up"]) @ p["down"]


def checkpointed(p, x):
    for _ in range(2):
        x = x + checkpoint(_block, x, p, use_reentrant=False)
    return x.square().mean()


def checkpointed_reentrant(p, x):
    x = x @ p["up"] @ p["down"]
    return checkpoint(lambda x: _block(x, p), x, use_reentrant=True).square().mean()


def gradient_penalty(p, x):  # WGAN-GP
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(_block(x, p).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + _block(x, p).mean()


def physics(p, x):  # a PINN: the second derivative of the net along the first input
    x = x.detach().requires_grad_()
    u = _block(x, p).sum(1)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + u).square().mean()


def linear_cross_entropy(p, x):
    labels = torch.arange(x.shape[0]) % p["up"].shape[1]
    return F.linear_cross_entropy(x, p["up"].T, labels) + p["down"].square().sum()


def frozen(p, x):  # Medusa: heads on a model in inference mode
    with torch.inference_mode():
        h = torch.tanh(F.linear(x, p["up"].T))
    return (h.clone() @ p["down"]).square().mean()


PROGRAMS = [
    custom_op, function_with_ctx, checkpointed, checkpointed_reentrant, gradient_penalty, physics,
    linear_cross_entropy, frozen,
]  # fmt: skip
PLACEMENTS = {
    "tp2": ((2,), ("tp",), {"up": P(None, "tp"), "down": P("tp")}, P()),
    "tp3": ((3,), ("tp",), {"up": P(None, "tp"), "down": P("tp")}, P()),
    "dp2×tp2": ((2, 2), ("dp", "tp"), {"up": P(None, "tp"), "down": P("tp")}, P("dp")),
    "zero3": ((2,), ("dp",), {"up": P("dp"), "down": P("dp")}, P("dp")),
}


def drawn(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.cases_by_default(16)
@pytest.mark.parametrize("way", ["shard", "spmd", "remat"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_are_torch_autograds(loss, placement, way):
    """Of the step's loss, taken by torch.func in a function, or of a block that is recomputed."""
    shape, names, specs, batch_specs = PLACEMENTS[placement]
    params, x = {"up": drawn(4, 8), "down": drawn(8, 4)}, drawn(6, 4)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    expected = loss(leaves, x)
    expected.backward()
    mesh = ftp.simulated_mesh(shape, names)
    if way == "spmd":
        of_function = torch.func.grad_and_value(loss)
        step = ftp.spmd(of_function, mesh, (specs, batch_specs), (specs, P()), certify=True)
        grads, found = step(params, x)
    else:
        fn = ftp.remat(loss) if way == "remat" else loss
        step = ftp.shard(fn, mesh, specs, batch_specs=batch_specs, certify=True)
        if way == "remat" and loss is checkpointed_reentrant:
            with pytest.raises(GradientRefused, match="CheckpointFunction"):
                step(params, x)
            return
        found, grads = step(params, x)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    for name, leaf in leaves.items():
        right = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(grads[name], right, rtol=1e-12, atol=1e-12)


class Net(nn.Module):
    """Blocks with dropout, which torch.utils.checkpoint recomputes where ``use_reentrant`` is not
    None.
    """

    def __init__(self, use_reentrant):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()
        self.dropout, self.use_reentrant = nn.Dropout(0.5), use_reentrant

    def forward(self, x):
        x = self.block(x)
        for _ in range(2):
            if self.use_reentrant is None:
                x = x + self.block(x)
            else:
                x = x + checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return x

    def block(self, x):
        return self.down(self.dropout(torch.tanh(self.up(x))))


@pytest.mark.parametrize("use_reentrant", slow_after(1, [True, False]))
def test_a_checkpointed_module_recomputes_with_its_own_parameters_and_draws(use_reentrant):
    net = Net(use_reentrant)
    fn, params = ftp.functionalize(net)
    net.use_reentrant = None
    plain, _ = ftp.functionalize(net)
    # Other values than the module's own, which a recomputation could fall back to.
    params = {name: drawn(*p.shape) for name, p in params.items()}
    x, key = drawn(6, 4), ftp.random.key(3)

    def loss(fn):
        return lambda p, x, key: fn(p, x, rng=key).square().mean()

    expected_grads, expected = torch.func.grad_and_value(loss(plain))(params, x, key)
    net.use_reentrant = use_reentrant
    specs = ftp.plan(params, {"up.*": P("tp"), "down.weight": P(None, "tp"), "down.bias": P()})
    step = ftp.shard(loss(fn), ftp.simulated_mesh(2, "tp"), specs, certify=True)
    found, grads = step(params, x, key)
    torch.testing.assert_close((found, grads), (expected, expected_grads), rtol=1e-12, atol=1e-12)
    graph = step.lower(params, x, key).graph.graph
    assert sum(n.target is aten.tanh.default for n in graph.nodes) == 3 + 2


@pytest.mark.parametrize("loss", [custom_op, function_with_ctx, checkpointed, gradient_penalty])
def test_second_derivatives_of_a_recomputed_block(loss):
    def derivatives(fn):
        x = drawn(6, 4).requires_grad_()
        params = {"up": drawn(4, 8).requires_grad_(), "down": drawn(8, 4).requires_grad_()}
        gradients = partial(torch.autograd.grad, inputs=[x, *params.values()], allow_unused=True)
        first = gradients(fn(params, x).sin(), create_graph=True, materialize_grads=True)
        norm = torch.stack([g.square().sum() for g in first]).sum()
        again = gradients(norm, materialize_grads=True)
        return [*first, *again]

    torch.testing.assert_close(derivatives(ftp.remat(loss)), derivatives(loss))


@pytest.mark.parametrize("paths", [(), ("0", "2")])
def test_backward_hooks_of_modules_run(paths):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = drawn(5, 3)
    model[0].weight.register_hook(lambda grad: grad.tanh())
    model[2].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))

    def run_twice(run):
        return (run(x).square() + run(x * 2)).mean()

    run_twice(model).backward()
    fn, params = ftp.functionalize(model, remat=dict.fromkeys(paths, "nothing"))
    step = ftp.shard(
        lambda p: run_twice(lambda x: fn(p, x)), ftp.simulated_mesh(2, "tp"), ftp.plan(params, {})
    )
    _, grads = step(params)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_whole_step_accumulates_and_returns_aux():
    def loss(params, x):
        return checkpointed(params, gelu_of_user(x)), {"size": params["up"].square().sum()}

    def step(params, x):
        grads, (value, aux) = ftp.optim.accumulate(
            torch.func.grad_and_value(loss, has_aux=True), 2
        )(params, x)
        grads, norm = ftp.optim.clip_by_global_norm(grads, 0.1)
        only = torch.func.grad(lambda x, scale: loss(params, x)[0] * scale, argnums=(1, 0))
        return grads, value, aux["size"], norm, only(x, x.new_tensor(2.0))

    shape, names, specs, batch_specs = PLACEMENTS["dp2×tp2"]
    params, x = {"up": drawn(4, 8), "down": drawn(8, 4)}, drawn(6, 4)
    out = specs, P(), P(), P(), (P(), batch_specs)
    mesh = ftp.simulated_mesh(shape, names)
    found = ftp.spmd(step, mesh, (specs, batch_specs), out)(params, x)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    inputs, scale = x.clone().requires_grad_(), x.new_tensor(2.0).requires_grad_()
    value, aux = loss(leaves, inputs)
    by_x, by_scale = torch.autograd.grad(value * scale, (inputs, scale), retain_graph=True)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.1)
    due = {name: leaf.grad for name, leaf in leaves.items()}, value, aux["size"], norm
    torch.testing.assert_close(found, (*due, (by_scale, by_x)), rtol=1e-11, atol=1e-12)


def test_torch_func_is_kept_where_it_works():
    def loss(w, x):  # vmap over a gradient, which torch.autograd does not take
        slopes = torch.func.vmap(torch.func.grad(lambda x: torch.tanh(x @ w).sum()))(x)
        return slopes.square().mean()

    w, x = drawn(4, 4), drawn(6, 4)
    expected = torch.func.grad_and_value(loss)(w, x)
    found = ftp.shard(loss, ftp.simulated_mesh(2, "tp"), P(None, "tp"))(w, x)
    torch.testing.assert_close(found, expected[::-1], rtol=1e-12, atol=1e-12)


def test_the_guide_runs():
    text = (Path(__file__).parent.parent.parent / "docs" / "gradients.md").read_text()
    (block,) = text.split("```python\n")[1:]
    exec(compile(block.split("```")[0], "docs/gradients.md", "exec"), {})


REFUSED = {
    "calls backward()": lambda p, x: (_block(x, p).sum().backward(), p["up"].sum())[1],
    "draws random numbers": lambda p, x: checkpoint(
        lambda y: F.dropout(y @ p["up"], 0.5), x, use_reentrant=False
    ).sum(),
    "use_reentrant=True) gives a gradient": lambda p, x: checkpoint(
        lambda y, p: _block(y, p), x, p, use_reentrant=True
    ).sum(),
    "would get a gradient of zero": lambda p, x: checkpoint(
        lambda y: _block(y, p), x, use_reentrant=True
    ).sum(),
    "forward takes ctx": lambda p, x: torch.func.grad(lambda x: Swish.apply(x).sum())(x).sum(),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("words", REFUSED)
def test_what_stays_refused_says_so(words):
    step = ftp.shard(REFUSED[words], ftp.simulated_mesh(2, "tp"), P())
    with pytest.raises(ftp.errors.TraceError, match=re.escape(words)):
        step.lower({"up": drawn(4, 8), "down": drawn(8, 4)}, drawn(6, 4))
