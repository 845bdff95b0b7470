"""Attention of programs for GPUs, traced where torch knows none: the kernel that will run, and what
it computes under any cut, by the CPU's kernel in its place.
"""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.sharding.pytree import flatten
from ftp.tracing.gradient import grad_and_value
from ftp.tracing.trace import trace

aten = torch.ops.aten
CPU = aten._scaled_dot_product_flash_attention_for_cpu
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = CPU(q, k, v, dropout_p, is_causal, scale=scale)
    seed, unused = (torch.zeros(n, dtype=torch.uint64) for n in ([2], []))
    return out, lse, None, None, q.shape[2], k.shape[2], seed, unused, q.new_empty(0)


def flash_backward(grad, q, k, v, out, lse, *rest, scale=None):
    _, _, queries, keys, dropout, is_causal, _, _ = rest
    assert (queries, keys) == (q.shape[2], k.shape[2])
    return CPU_BACKWARD(grad, q, k, v, out, lse, dropout, is_causal, scale=scale)


def efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    assert compute_lse and (bias is None or bias.shape == (*q.shape[:3], k.shape[2]))
    out, lse = CPU(q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale)
    return out, lse, torch.zeros([], dtype=torch.int64), torch.zeros([], dtype=torch.int64)


def efficient_backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, is_causal=False, *, scale=None
):
    assert wanted == [True, True, True, False]
    mask = {"attn_mask": bias, "scale": scale}
    return *CPU_BACKWARD(grad, q, k, v, out, lse, dropout, is_causal, **mask), None


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    """The GPU's ops on a CPU."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (flash, flash_backward, efficient, efficient_backward):
        kind, _, way = kernel.__name__.partition("_")
        name = f"_scaled_dot_product_{kind}_attention{'_' * bool(way)}{way}"
        library.impl(name, kernel, "CPU")
    yield
    library._destroy()


def attention(params, x, *mask):
    q, k, v = ((x @ params[n]).unflatten(-1, (-1, 16)).transpose(1, 2) for n in "qkv")
    mask = mask[0] if mask else None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != q.shape[1]
    )
    return (out * torch.arange(16, dtype=out.dtype)).square().mean()


def given(dtype, keys, *mask):
    sizes = {"q": 64, "k": 16 * keys, "v": 16 * keys}
    params = {n: torch.randn(64, size).to(dtype) / 8 for n, size in sizes.items()}
    return params, torch.randn(2, 32, 64).to(dtype), *mask


def traced_for(device, args):
    leaves, tree = flatten(args)
    names = [f"x{i}" for i in range(len(leaves))]
    return trace(grad_and_value(attention), leaves, tree, device, names=names).gm


def kinds(graph):
    found = [str(n.target) for n in graph.nodes if "scaled_dot_product" in str(n.target)]
    return [
        name.removeprefix("aten._scaled_dot_product_").removesuffix(".default") for name in found
    ]


CASES = {
    "half": (given(torch.bfloat16, 4), "flash_attention"),
    "half, fewer keys": (given(torch.float16, 2), "flash_attention"),
    "half, mask": (given(torch.bfloat16, 4, torch.ones(32, 32).tril() > 0), "efficient_attention"),
    "single": (given(torch.float32, 4), "efficient_attention"),
    "single, mask": (given(torch.float32, 4, torch.randn(2, 1, 32, 32)), "efficient_attention"),
    "single, fewer keys": (given(torch.float32, 2), "flash_attention_for_cpu"),
    "double": (given(torch.float64, 4), "flash_attention_for_cpu"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_of_a_gpu_is_recorded_and_computes_the_same(name, kernels):
    args, kind = CASES[name]
    on_gpu, on_cpu = traced_for("cuda", args), traced_for("cpu", args)
    assert kinds(on_gpu.graph) == [kind, f"{kind}_backward"]
    leaves, _ = flatten(args)
    for node in on_gpu.graph.nodes:  # that are made on the device
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    on_gpu.recompile()
    for one, other in zip(on_gpu(*leaves), on_cpu(*leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_is_lowered_for_a_gpu_holds_its_kernel():
    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"), device_type="cuda")
    specs = {n: P(None, "tp") for n in "qkv"}
    for dtype, kind in ((torch.bfloat16, "flash"), (torch.float32, "efficient")):
        params, x = given(dtype, 4)
        params = {n: w.to("meta") for n, w in params.items()}
        step = ftp.shard(attention, mesh, specs, batch_specs=P("dp"))
        lowered = step.lower(params, x.to("meta"))
        assert kinds(lowered.graph.graph) == [f"{kind}_attention", f"{kind}_attention_backward"]
        assert lowered.memory > 0 and lowered.cost("h100") > 0
        assert lowered.work == 1


def chain(kind, is_causal):
    """An op and its gradient's op, called as autograd calls them."""

    def fn(grad, q, k, v):
        if kind == "flash":
            out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
            *sizes, seed, unused, _ = rest
            return out, *aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, *sizes, 0.0, is_causal, seed, unused
            )
        out, lse, *rest = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal
        )
        *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, *rest, 0.0, [True, True, True, False], is_causal
        )
        return out, *grads

    return fn


@pytest.mark.parametrize("kind", ["flash", "efficient"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_queries_and_heads_of_a_gpu_are_cut(kind, is_causal, kernels):
    cuts = [((3,), P(None, None, "a")), ((2, 2), P("b", None, "a")), ((3,), P(None, "a"))]
    args = [torch.randn(2, 4, 32, 8, dtype=torch.float64) for _ in range(4)]
    whole = [x.clone().requires_grad_() for x in args[1:]]
    out = F.scaled_dot_product_attention(*whole, is_causal=is_causal)
    expected = [out, *torch.autograd.grad(out, whole, args[0])]
    for shape, spec in cuts:
        step = ftp.spmd(
            chain(kind, is_causal), ftp.simulated_mesh(shape, tuple("ab"[: len(shape)])), spec, spec
        )
        for one, other in zip(step(*args), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
