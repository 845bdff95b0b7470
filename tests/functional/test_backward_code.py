"""Modules that are called in the backward pass, after the model's call has ended."""

import gc
from collections.abc import Callable
from copy import deepcopy
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ftp
from ftp import P
from ftp.errors import TraceError


class Adjoint(torch.autograd.Function):
    """As odeint_adjoint of torchdiffeq: the backward pass calls the module again."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], x: Tensor, *params: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return call(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x.view_as(x) if again else x.detach().requires_grad_()
            found = torch.autograd.grad(
                ctx.call(x), (x, *params), grads, allow_unused=True, create_graph=again
            )
        return None, *found


class TwoParts(torch.autograd.Function):
    """Under torch.func: its backward pass computes with a module's weight."""

    @staticmethod
    def forward(layer: nn.Linear, x: Tensor, w: Tensor, b: Tensor) -> Tensor:  # type: ignore
        return x @ w.t() + b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.layer, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, *_ = ctx.saved_tensors
        return None, grad @ ctx.layer.weight, grad.t() @ x, grad.sum(0)


class Reversed(torch.autograd.Function):
    """A reversible layer, which computes its input from its output."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, a: Tensor, b: Tensor, *params: Tensor) -> Any:
        ctx.f = f
        with torch.no_grad():
            b = b + f(a)
        ctx.save_for_backward(a, b, *params)
        return a.clone(), b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        da, db = grads
        a, _, *params = ctx.saved_tensors
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            found = torch.autograd.grad(ctx.f(a), (a, *params), db, allow_unused=True)
        return None, da + found[0], db, *found[1:]


def adjoint(m: "Model", x: Tensor) -> Tensor:
    return Adjoint.apply(lambda y: m.f(y).sin(), x, *m.f.parameters())  # type: ignore


def two_parts(m: "Model", x: Tensor) -> Tensor:
    return TwoParts.apply(m.f, x, m.f.weight, m.f.bias).sin()  # type: ignore


def reversible(m: "Model", x: Tensor) -> Tensor:
    out: Any = Reversed.apply(m.f, x, m.g(x), *m.f.parameters())
    return out[0].sin() * out[1]


def tensor_hook(m: "Model", x: Tensor) -> Tensor:
    y = m.f(x)
    y.register_hook(lambda g: m.g(g))
    return y.sin()


def node_hook(m: "Model", x: Tensor) -> Tensor:
    y, z = m.f(x).sin(), m.g(x).cos()
    y.grad_fn.register_prehook(lambda gs: (m.g(gs[0]),))  # type: ignore
    z.grad_fn.register_hook(lambda gs, _: (m.f(gs[0]),))  # type: ignore
    return y.sin() + z.cos()


def parameter_hook(m: "Model", x: Tensor) -> Tensor:
    return m.f(x).sin()  # with a hook that `case` registers


def module_hook(m: "Model", x: Tensor) -> Tensor:
    m.h.register_full_backward_pre_hook(lambda _, gs: (m.g(gs[0]),))
    m.h.register_full_backward_hook(lambda _, gx, gs: (m.g(gx[0]) + gx[0],))
    return m.h(m.f(x)).sin()


def saved_hooks(m: "Model", x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda y: y.detach(), lambda y: m.g(y)):
        return m.f(x).sin()


def checkpointed(m: "Model", x: Tensor) -> Tensor:
    return checkpoint(lambda y: m.g(m.f(y).sin()), x, use_reentrant=False)  # type: ignore


class Model(nn.Module):
    def __init__(self, how: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.e, self.f, self.g = (nn.Linear(4, 4) for _ in range(3))
        self.h = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, self.e(x))


def plain(m: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = m(x).square().sum()
    loss.backward()
    return loss.detach(), {
        k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in m.named_parameters()
    }


def other(m: nn.Module) -> nn.Module:
    """The model with other numbers: those of its own modules are wrong."""
    new = deepcopy(m)
    with torch.no_grad():
        for p in new.parameters():
            p.mul_(-0.7).add_(0.1)
    return new


def case(how: Callable[..., Tensor]) -> tuple[Model, nn.Module, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    model = Model(how).double()
    trained = other(model)
    for each in (model, trained) if how is parameter_hook else ():
        each.f.weight.register_hook(lambda g, each=each: each.g(g))  # type: ignore
    params = {k: p.detach().clone() for k, p in trained.named_parameters()}
    return model, trained, params, torch.randn(6, 4).double()


HOWS = [
    *(adjoint, two_parts, reversible, tensor_hook, node_hook, parameter_hook, module_hook),
    *(saved_hooks, checkpointed),
]
ALL = pytest.mark.parametrize("how", HOWS, ids=lambda how: how.__name__)


@ALL
def test_gradient_of_a_plain_call(how: Callable[..., Tensor]):
    model, trained, params, x = case(how)
    expected = plain(trained, x)
    fn, _ = ftp.functionalize(model)
    params = {k: p.requires_grad_() for k, p in params.items()}
    loss = fn(params, x).square().sum()
    loss.backward()
    found = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in params.items()}
    torch.testing.assert_close((loss.detach(), found), expected)


@ALL
def test_gradient_of_a_step(how: Callable[..., Tensor]):
    model, trained, params, x = case(how)
    expected = plain(trained, x)
    fn, _ = ftp.functionalize(model)
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(lambda p, x: fn(p, x).square().sum(), mesh, P("tp"))
    torch.testing.assert_close(step(params, x), expected)


@pytest.mark.parametrize("how", [adjoint, two_parts, reversible], ids=lambda how: how.__name__)
def test_gradient_of_a_recomputed_model(how: Callable[..., Tensor]):
    model, trained, params, x = case(how)
    expected = plain(nn.Sequential(trained), x)
    fn, _ = ftp.functionalize(nn.Sequential(model), remat={"0": "nothing"})
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(lambda p, x: fn(p, x).square().sum(), mesh, P("tp"))
    found = step({f"0.{k}": p for k, p in params.items()}, x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("how", [two_parts, tensor_hook], ids=lambda how: how.__name__)
def test_gradient_by_torch_func(how: Callable[..., Tensor]):
    model, trained, params, x = case(how)
    expected = plain(trained, x)
    fn, _ = ftp.functionalize(model)
    grads, loss = torch.func.grad_and_value(lambda p: fn(p, x).square().sum())(params)
    torch.testing.assert_close((loss, grads), expected)


@pytest.mark.parametrize("in_a_step", [False, True])
def test_second_derivatives(in_a_step: bool):
    model, trained, params, x = case(adjoint)

    def penalty(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    own = {k: p for k, p in trained.named_parameters() if k[0] in "ef"}
    expected = penalty(trained, x)
    grads = dict(zip(own, torch.autograd.grad(expected, [*own.values()]), strict=True))
    fn, _ = ftp.functionalize(model)
    if in_a_step:
        mesh = ftp.simulated_mesh((2,), ("tp",))
        step = ftp.shard(lambda p, x: penalty(lambda y: fn(p, y), x), mesh, P("tp"))
        loss, found = step(params, x)
    else:
        params = {k: p.requires_grad_() for k, p in params.items()}
        loss = penalty(lambda y: fn(params, y), x)
        found = dict(zip(own, torch.autograd.grad(loss, [params[k] for k in own]), strict=True))
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close({k: found[k] for k in own}, grads)


def test_threads_that_share_a_model():
    model, trained, params, x = case(adjoint)
    _, expected = plain(trained, x)
    fn, _ = ftp.functionalize(model)
    found = []

    def run(scale: float) -> None:
        for _ in range(20):
            own = {k: (p * scale).requires_grad_() for k, p in params.items()}
            loss = fn(own, x).square().sum()
            loss.backward()
            found.append((scale, own["f.weight"].grad))

    threads = [Thread(target=run, args=(scale,)) for scale in (1.0, -0.5, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    for scale, grad in found:
        if scale == 1.0:
            torch.testing.assert_close(grad, expected["f.weight"])


def test_a_graph_is_freed_at_once():
    model, _, params, x = case(adjoint)
    fn, _ = ftp.functionalize(model)
    params = {k: p.requires_grad_() for k, p in params.items()}
    weight = ref(params["f.weight"])
    gc.disable()
    try:
        fn(params, x).square().sum().backward()
        del params
        assert weight() is None
    finally:
        gc.enable()


def test_draws_in_the_backward_pass_are_refused():
    """They would not be those of the forward pass."""

    def dropping(m: Model, x: Tensor) -> Tensor:
        return Adjoint.apply(lambda y: m.h(m.f(y)).sin(), x, *m.f.parameters())  # type: ignore

    model, _, params, x = case(dropping)
    model.h = nn.Dropout(0.5)  # type: ignore
    fn, _ = ftp.functionalize(model)
    params = {k: p.requires_grad_() for k, p in params.items()}
    loss = fn(params, x, rng=ftp.random.key(0)).sum()
    with pytest.raises(TraceError, match="in module 'h' of Model, which the backward pass"):
        loss.backward()


@pytest.mark.parametrize("of_model", [False, True])
def test_a_gradient_of_parameters_that_a_closure_holds_is_refused(of_model: bool):
    model, _, params, x = case(adjoint)
    held = tuple(model.f.parameters())

    class Closed(Adjoint):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, *_ = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                found = torch.autograd.grad(ctx.call(x), (x, *held), grads, allow_unused=True)
            return None, *found

    model.how = lambda m, x: Closed.apply(m.f, x, *m.f.parameters())  # type: ignore
    fn, own = ftp.functionalize(model)
    params = {k: p.requires_grad_() for k, p in (own if of_model else params).items()}
    loss = fn(params, x).sum()
    with pytest.raises(TraceError, match=r"reads 'f.weight' from a tensor that shares its"):
        loss.backward()


def test_values_of_parameters_that_a_closure_holds_are_refused_under_torch_func():
    model, _, params, x = case(two_parts)

    class Closed(TwoParts):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, *_ = ctx.saved_tensors
            return None, grads[0] @ held[0], grads[0].t() @ x, grads[0].sum(0)

    held = [model.f.weight]
    model.how = lambda m, x: Closed.apply(m.f, x, m.f.weight, m.f.bias)  # type: ignore
    fn, _ = ftp.functionalize(model)
    with pytest.raises(TraceError, match=r"reads 'f.weight' from a tensor that shares its"):
        torch.func.grad(lambda p: fn(p, x).sum())(params)
