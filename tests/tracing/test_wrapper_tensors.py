"""Tensors that hold other tensors, made or captured by a traced function: their class runs ops on
what they hold, and the program has those.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import ftp
from ftp import P, errors

aten = torch.ops.aten


class Quantized(Tensor):
    """Integers and a scale for each row; products are of integers, all else of numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor):
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: Tensor, scale: Tensor):
        self.numbers, self.scale = numbers, scale

    @classmethod
    def of(cls, x: Tensor) -> "Quantized":
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
        return cls((x / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Quantized(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        if func is aten.mm.default and all(isinstance(x, cls) for x in args):
            a, b = args  # of rows both: a @ b.T
            return torch._int_mm(a.numbers, b.numbers.t()) * a.scale * b.scale.t()
        whole = tree_map(lambda x: x.numbers * x.scale if isinstance(x, cls) else x, args)
        return func(*whole, **(kwargs or {}))


class Product(torch.autograd.Function):
    """A product of quantized tensors forward, of numbers backward."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return aten.mm.default(Quantized.of(x), Quantized.of(w))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ Quantized.of(w), grad.t() @ x


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 3)])
def test_a_wrapper_made_in_the_function(shape: tuple[int, int]):
    torch.manual_seed(0)
    params = {
        "up": torch.randn(13, 6, dtype=torch.float64),
        "down": torch.randn(5, 13, dtype=torch.float64),
    }
    x = torch.randn(9, 6, dtype=torch.float64)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return Product.apply(Product.apply(x, params["up"]).sin(), params["down"]).square().mean()

    mesh = ftp.simulated_mesh(shape, ("dp", "tp"))
    specs = {"up": P("tp"), "down": P(None, "tp")}
    step = ftp.shard(loss, mesh, specs, batch_specs=P("dp"), certify=True)
    found, grads = step(params, x)
    given = {path: p.clone().requires_grad_() for path, p in params.items()}
    due = loss(given, x)
    torch.testing.assert_close(found, due.detach(), rtol=1e-12, atol=0)
    for path, grad in zip(given, torch.autograd.grad(due, list(given.values())), strict=True):
        torch.testing.assert_close(grads[path], grad, rtol=1e-10, atol=1e-12)
    assert torch.int32 in {r.dtype for r in step.lower(params, x).collectives} or shape[1] == 1


def test_a_captured_wrapper():
    torch.manual_seed(0)
    weight = Quantized.of(torch.randn(8, 6, dtype=torch.float64))
    x = torch.randn(4, 6, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return aten.mm.default(Quantized.of(x), weight) + (x @ weight.t()).sum()

    mesh = ftp.simulated_mesh((2,), ("dp",))
    step = ftp.spmd(f, mesh, P("dp"), P("dp"), certify=True)
    torch.testing.assert_close(step(x), f(x), rtol=1e-12, atol=0)
    weight = Quantized.of(torch.randn(8, 6, dtype=torch.float64))
    with pytest.warns(errors.StaleCaptureWarning, match=r"'weight', which f .* another object"):
        step(x)


def test_a_wrapper_as_an_argument_or_a_result():
    mesh, x = ftp.simulated_mesh((2,), ("dp",)), torch.randn(4, 6)
    with pytest.raises(
        errors.InputError, match=r"a tensor that holds others. Give those, numbers and scale"
    ):
        ftp.spmd(lambda q: q + 1, mesh, P())(Quantized.of(x))
    with pytest.raises(
        errors.TraceError, match=r"the result is a Quantized, .* Return those: numbers and scale"
    ):
        ftp.spmd(Quantized.of, mesh, P())(x)


def test_a_model_of_wrappers():
    """Frozen parameters that hold tensors are arguments by these, and cut by their specs."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*d, bias=False).double() for d in ((6, 10), (10, 6))))
    for linear in model:
        linear.weight = nn.Parameter(Quantized.of(linear.weight.detach()), requires_grad=False)
    due = model(x := torch.randn(5, 6, dtype=torch.float64))
    mesh = ftp.simulated_mesh((2,), ("tp",))
    fn, params = ftp.functionalize(model)
    assert not params
    torch.testing.assert_close(ftp.spmd(fn, mesh, ({}, P()))({}, x), due)

    fn, params, buffers = ftp.functionalize(model, buffers=True)
    assert list(buffers) == [f"{i}.weight.{name}" for i in (0, 1) for name in ("numbers", "scale")]
    specs = ftp.plan(buffers, {"0.weight.*": P("tp"), "1.weight.numbers": P(None, "tp")})
    step = ftp.spmd(lambda b, x: fn({}, b, x)[0], mesh, (specs, P()), certify=True)
    torch.testing.assert_close(step(ftp.device_put(buffers, mesh, specs), x), due)
    assert [c.op for c in step.lower(buffers, x).collectives] == ["all_reduce"]

    model[0].weight.requires_grad_()
    with pytest.raises(errors.InputError, match=r"'0.weight' is a Quantized, .*Freeze it"):
        ftp.functionalize(model)


@pytest.mark.parametrize("traced", [False, True])
def test_a_buffer_of_wrappers_comes_back_updated(traced: bool):
    class Doubles(nn.Module):
        def __init__(self, way: str):
            super().__init__()
            self.way = way
            self.register_buffer("q", Quantized.of(torch.randn(6, 6, dtype=torch.float64)))

        def forward(self, x: Tensor) -> Tensor:
            if self.way == "another":
                self.q = Quantized(self.q.numbers, self.q.scale * 2)
            elif self.way == "in place":
                self.q.scale.mul_(2)
            else:
                self.q = self.q * 2
            return x @ self.q.t()

    x, mesh = torch.randn(4, 6, dtype=torch.float64), ftp.simulated_mesh((2,), ("tp",))
    for way in ("another", "in place"):
        fn, params, buffers = ftp.functionalize(model := Doubles(way), buffers=True)
        before = {path: b.clone() for path, b in buffers.items()}
        step = ftp.spmd(fn, mesh, (P(), P("tp"), P()), P()) if traced else fn
        out, new = step(params, buffers, x)
        assert torch.equal(new["q.scale"], 2 * before["q.scale"])
        assert all(torch.equal(buffers[path], b) for path, b in before.items())
        torch.testing.assert_close(out, model(x))
    fn, params, buffers = ftp.functionalize(Doubles("plain"), buffers=True)
    with pytest.raises(errors.TraceError, match="makes buffer 'q' a Tensor; it must stay a Quant"):
        fn(params, buffers, x)
    fn, params = ftp.functionalize(Doubles("in place"))
    with pytest.raises(errors.TraceError, match=r"modifies attribute 'q.scale' while it runs"):
        fn(params, x)
