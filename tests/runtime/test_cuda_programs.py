"""Programs of many kinds on simulated ranks of one real GPU, beside plain torch on it: the kernels
that a GPU has and a CPU has not. Left out where there is none; FTP_TEST_DEVICE=cpu runs the same
tests there.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils._pytree import tree_map

import ftp
from ftp import P
from tests.support.staged_models import Model

DEVICE = os.environ.get("FTP_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of inductor's import
]
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.bfloat16: {"rtol": 0.03, "atol": 0.03},
    torch.float32: {"rtol": 1e-3, "atol": 1e-4},
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype)


# Attention along a cut sequence.


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_a_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2], device=q.device)
    mask = (at.unsqueeze(1) - at).abs() < 70
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < 100)

    def smaller(score: Tensor, *_: Any) -> Tensor:
        return score * 0.9

    blocks = create_block_mask(window, None, None, q.shape[2], k.shape[2], device=DEVICE)
    out: Any = flex_attention(q, k, v, score_mod=smaller, block_mask=blocks)
    return out


def as_flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in matmuls: torch's own flex attention has no gradient on a CPU."""
    at = torch.arange(q.shape[2], device=q.device)
    apart = at.unsqueeze(1) - at
    scores = (q @ k.mT / q.shape[-1] ** 0.5 * 0.9).masked_fill(
        (apart < 0) | (apart >= 100), -torch.inf
    )
    return scores.softmax(-1) @ v


def gradients(attention: Any) -> Any:
    def step(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Any:
        def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (attention(q, k, v) * weight).sum()

        return torch.func.grad_and_value(loss, (0, 1, 2))(q, k, v)

    return step


@pytest.mark.parametrize("cut", [P(None, None, "cp"), P(None, None, ftp.zigzag("cp"))], ids=str)
@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("fn", [causal, in_a_window, flexible])
def test_attention_along_a_cut_sequence(fn: Any, dtype: torch.dtype, cut: Any):
    """Merged tiles, each by a kernel of the GPU."""
    mesh = ftp.simulated_mesh((4,), ("cp",), device_type=DEVICE)
    args = [draw(2, 4, 512, 32, dtype=dtype) for _ in range(4)]
    found = ftp.spmd(gradients(fn), mesh, cut, ((cut,) * 3, P()))(*args)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    plain = as_flexible if fn is flexible else fn
    due = gradients(plain)(*(a.to(wide) for a in args))
    close = CLOSE[dtype]
    (grads, loss), (of_one, one) = found, due
    torch.testing.assert_close(loss.to(wide), one, rtol=close["rtol"], atol=10.0)
    for grad, whole in zip(grads, of_one, strict=True):
        torch.testing.assert_close(grad.to(wide), whole, **close)


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
def test_packed_documents(dtype: torch.dtype):
    ends = torch.tensor([0, 100, 130, 384, 512], dtype=torch.int32, device=DEVICE)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = varlen_attn(q, k, v, ends, ends, 256, 256, window_size=(-1, 0))
        return out.square().sum()

    def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total: Any = 0
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            one = (x[start:end].transpose(0, 1) for x in (q, k, v))
            total = total + F.scaled_dot_product_attention(*one, is_causal=True).square().sum()
        return total

    args = [draw(512, 4, 32, dtype=dtype) for _ in range(3)]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    due, one = torch.func.grad_and_value(documents, (0, 1, 2))(*(a.to(wide) for a in args))
    mesh = ftp.simulated_mesh((2, 2), ("cp", "tp"), device_type=DEVICE)
    step = ftp.spmd(torch.func.grad_and_value(loss, (0, 1, 2)), mesh, P("cp", "tp"))
    grads, found = step(*args)
    torch.testing.assert_close(found.to(wide), one, rtol=CLOSE[dtype]["rtol"], atol=1e-6)
    for grad, whole in zip(grads, due, strict=True):
        torch.testing.assert_close(grad.to(wide), whole, **CLOSE[dtype])


# Modules, as a GPU runs them.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(32, 24, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.LazyLinear(5))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "encoder layer": (Attention, lambda: draw(4, 16, 32)),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: draw(4, 7, 32)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: draw(4, 7, 32)),
    "batch norm": (
        lambda: images(nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()),
        lambda: draw(4, 3, 8, 8),
    ),
    "group norm": (
        lambda: images(nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2)),
        lambda: draw(4, 3, 8, 8),
    ),
    "transposed": (
        lambda: images(nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2), nn.AdaptiveAvgPool2d(3)),
        lambda: draw(4, 3, 8, 8),
    ),
    "depthwise": (
        lambda: images(nn.Conv2d(8, 8, 3, groups=8, dilation=2), nn.Upsample(scale_factor=2)),
        lambda: draw(4, 3, 8, 8),
    ),
    "norms": (
        lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.RMSNorm(32)),
        lambda: draw(4, 6, 32),
    ),
}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_modules_in_float64(name: str, compile: bool):
    make, data = MODULES[name]
    torch.manual_seed(0)
    x = data()
    module = make().to(DEVICE, torch.float64)
    module(x)  # shapes of lazy layers
    fn, full = ftp.functionalize(module)

    def loss(params: Any, x: Tensor) -> Tensor:
        return fn(params, x).square().mean()

    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"), device_type=DEVICE)
    specs = ftp.plan(full, {"**.weight": P("tp")}, strict=False) if name == "norms" else P()
    step = ftp.shard(loss, mesh, specs, batch_specs=P("dp"), compile=compile)
    found, grads = step(full, x)
    due = module(x).square().mean()  # torch.func takes no gradient of cuDNN's recurrent networks
    due.backward()
    torch.testing.assert_close(found, due.detach(), **CLOSE[torch.float64])
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(grads[key], parameter.grad, **CLOSE[torch.float64], msg=key)


# Experts, stages, programs on disk, float8.


def experts(p: Any, x: Tensor) -> Tensor:
    weight, expert = (x @ p["router"]).float().softmax(-1).max(-1)
    order = expert.argsort(stable=True)
    ends = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.silu(F.grouped_mm(x[order], p["up"], offs=ends)), p["down"], offs=ends)
    y = y * weight[order].to(y.dtype)[:, None]
    return torch.zeros_like(x).index_add(0, order, y)


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_over_an_axis(dtype: torch.dtype, sent: bool):
    params = {
        "router": draw(32, 4, dtype=dtype),
        "up": draw(4, 32, 64, dtype=dtype) / 6,
        "down": draw(4, 64, 32, dtype=dtype) / 8,
    }
    x = draw(48, 32, dtype=dtype)
    layer = ftp.plans.send_tokens(experts, "ep") if sent else experts
    mesh = ftp.simulated_mesh((2,), ("ep",), device_type=DEVICE)
    specs = {"router": P(), "up": P("ep"), "down": P("ep")}

    def loss_of(layer: Any) -> Any:
        return lambda p, x: layer(p, x).float().square().mean()

    step = ftp.shard(loss_of(layer), mesh, specs, batch_specs=P("ep") if sent else P())
    loss, grads = step(params, x)
    due, one = torch.func.grad_and_value(loss_of(experts))(params, x)
    torch.testing.assert_close(loss, one, **CLOSE[dtype])
    for name, grad in due.items():
        torch.testing.assert_close(grads[name], grad, **CLOSE[dtype], msg=name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_simulated_stages(schedule: str):
    model, pipe = Model(4, tied=True, scaled=True, skips=True), ftp.Pipeline("pp", 4, schedule)
    mesh = ftp.simulated_mesh((2,), ("pp",), device_type=DEVICE)
    full, batch = model.params(), model.batch(8)
    specs = pipe.place(full, P(), mesh)
    step = ftp.shard(model.loss, mesh, specs, pipeline=pipe)
    params, rows = ftp.device_put(full, mesh, specs), ftp.device_put(batch, mesh, P())
    loss, grads = step(params, *rows)
    found = loss.cpu(), tree_map(Tensor.cpu, ftp.device_get(grads, mesh, specs))
    torch.testing.assert_close(found, model.on_one_device(4, 8))


def test_a_lowered_program_is_saved_and_loaded(tmp_path: Path):
    mesh = ftp.simulated_mesh((2,), ("tp",), device_type=DEVICE)

    def loss(p: Any, x: Tensor) -> Tensor:
        return (torch.relu(x @ p["a"]) @ p["b"]).square().mean()

    params, x = {"a": draw(8, 16), "b": draw(16, 8)}, draw(4, 8)
    step = ftp.shard(loss, mesh, {"a": P(None, "tp"), "b": P("tp")})
    step.lower(params, x).save(tmp_path / "program")
    found = ftp.load_program(tmp_path / "program", mesh)(params, x)
    grads, due = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(found, (due, grads))


@pytest.mark.parametrize("make", ["Muon", "SGD", "Adam", "Adafactor"])
def test_optimizers(make: str):
    options = {"momentum": 0.9} if make == "SGD" else {}
    opt = ftp.optim.from_torch(getattr(torch.optim, make), lr=0.01, **options)
    params = {"a": draw(8, 16), "b": draw(16, 8)}
    mesh, specs = (
        ftp.simulated_mesh((2,), ("tp",), device_type=DEVICE),
        {"a": P(None, "tp"), "b": P("tp")},
    )
    grads = [{"a": draw(8, 16), "b": draw(16, 8)} for _ in range(3)]
    of_state = opt.specs(params, specs)
    step = ftp.spmd(opt.update, mesh, (specs, of_state, specs), (specs, of_state))
    mine, state = params, opt.init(params)
    weights = {n: nn.Parameter(p.clone()) for n, p in params.items()}
    plain = getattr(torch.optim, make)(weights.values(), lr=0.01, **options)
    for given in grads:
        mine, state = step(given, state, mine)
        for name, weight in weights.items():
            weight.grad = given[name].clone()
        plain.step()
    for name, weight in weights.items():
        # Muon's products are in bfloat16
        close = {"rtol": 0.02, "atol": 1e-3} if make == "Muon" else {}
        torch.testing.assert_close(mine[name], weight.detach(), **close)


@pytest.mark.skipif(DEVICE == "cpu", reason="a kernel of GPUs")
def test_float8_products():
    def product(x: Tensor, w: Tensor) -> Tensor:
        one = torch.ones((), device=x.device)
        a, b = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    x, w = draw(64, 128, dtype=torch.float32), draw(64, 128, dtype=torch.float32)
    due = product(x, w)
    mesh = ftp.simulated_mesh((2,), ("tp",), device_type=DEVICE)
    for specs, out in (((P("tp"), P()), P("tp")), ((P(), P("tp")), P(None, "tp"))):
        found = ftp.spmd(product, mesh, specs, out)(x, w)
        torch.testing.assert_close(found, due, rtol=0.02, atol=0.02)


def test_autocast_is_the_programs():
    def loss(p: Any, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return (F.silu(x @ p["a"]) @ p["b"]).float().square().mean()

    params = {"a": draw(32, 64, dtype=torch.float32), "b": draw(64, 32, dtype=torch.float32)}
    x = draw(8, 32, dtype=torch.float32)
    mesh = ftp.simulated_mesh((2,), ("tp",), device_type=DEVICE)
    step = ftp.shard(loss, mesh, {"a": P(None, "tp"), "b": P("tp")})
    found, sharded = step(params, x)
    grads, due = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(found, due, rtol=0.02, atol=0.02)
    for name, grad in grads.items():
        torch.testing.assert_close(
            sharded[name], grad, rtol=0.05, atol=0.05 * float(grad.abs().max())
        )
