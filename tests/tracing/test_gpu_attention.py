"""Attention of programs for GPUs, traced where torch knows none: the kernel that will run, and what
it computes under any cut, by the CPU's kernel in its place.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ftp
from ftp import P
from ftp.ops import attention as parts
from ftp.ops import tile_kernels
from ftp.ops.rings import RINGS
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
    lse = lse[:, :, : q.shape[2]]
    return *CPU_BACKWARD(grad, q, k, v, out, lse, dropout, is_causal, **mask), None


def cudnn(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    assert bias is None and compute_lse
    out, lse = CPU(q, k, v, dropout_p, is_causal, scale=scale)
    seed, offset = torch.zeros([], dtype=torch.int64), torch.zeros([], dtype=torch.int64)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], seed, offset, None


def cudnn_backward(grad, q, k, v, out, lse, *rest, scale=None):
    *_, queries, keys, dropout, is_causal = rest
    assert (queries, keys) == (q.shape[2], k.shape[2]) and lse.shape[3] == 1
    return CPU_BACKWARD(grad, q, k, v, out, lse.squeeze(-1), dropout, is_causal, scale=scale)


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    """The GPU's ops on a CPU."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (flash, flash_backward, efficient, efficient_backward, cudnn, cudnn_backward):
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
        if kind == "cudnn":
            out, lse, *rest = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, is_causal
            )
            *sizes, seed, offset, _ = rest
            return out, *aten._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse, seed, offset, None, *sizes, 0.0, is_causal
            )
        out, lse, *rest = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal
        )
        *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, *rest, 0.0, [True, True, True, False], is_causal
        )
        return out, *grads

    return fn


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
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


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("is_ring", [True, False])
def test_tiles_are_computed_by_a_gpu_s_kernels(kind, is_ring, kernels, monkeypatch):
    """With its log-sum-exps: causal queries beside gathered keys, and in a ring."""
    taken, of_tiles = Counter(), "flash" if kind == "cudnn" else kind

    def kernel_of(q, v, has_mask):
        taken[of_tiles] += 1
        return of_tiles

    monkeypatch.setattr(tile_kernels, "kernel_of", kernel_of)
    args = [torch.randn(2, 4, 64, 8, dtype=torch.float64) for _ in range(4)]
    whole = [x.clone().requires_grad_() for x in args[1:]]
    out = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected = [out, *torch.autograd.grad(out, whole, args[0])]
    hardware = ftp.Hardware(flops=1e3, ring_step=0.0) if is_ring else ftp.Hardware(ring_step=1.0)
    cut = P(None, None, ftp.zigzag("a"))
    step = ftp.spmd(
        chain(kind, True), ftp.simulated_mesh((3,), ("a",)), cut, cut, hardware=hardware
    )
    moved = {c.op for c in step.lower(*args).collectives}
    assert moved == ({"ring"} if is_ring else {"all_gather", "reduce_scatter"})
    for one, other in zip(step(*args), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert taken[of_tiles] > 6


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_query_heads_of_a_gpu_stay_cut_over_more_ranks_than_heads_of_keys(kind, kernels):
    grad, q = (torch.randn(2, 4, 16, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, 16, 8, dtype=torch.float64) for _ in range(2))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected = [out, *torch.autograd.grad(out, whole, grad)]
    heads, mesh = P(None, "a"), ftp.simulated_mesh((4,), ("a",))
    specs = (heads, heads, P(), P())
    step = ftp.spmd(chain(kind, True), mesh, specs, specs, certify=True)
    assert {c.op for c in step.lower(grad, q, k, v).collectives} == {"all_reduce"}
    for one, other in zip(step(grad, q, k, v), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class Seen(TorchDispatchMode):
    """Counts attention kernels, and matmuls, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if "scaled_dot_product" in name or name in ("mm", "bmm"):
            self.found[name.removeprefix("_scaled_dot_product_")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("dtype", "of_keys", "kind"),
    [(torch.bfloat16, 2, "flash"), (torch.float32, 4, "efficient"), (torch.float64, 4, "")],
)
def test_a_ring_of_gpus_calls_their_kernels(dtype, of_keys, kind, monkeypatch):
    """On fake tensors that say they are a GPU's, with log-sum-exps in single precision."""
    monkeypatch.setattr(tile_kernels, "device_of", lambda x: "cuda")
    mesh = ftp.AbstractMesh((4,), ("cp",), device_type="cuda")
    cut, size = P(None, None, "cp"), 8192
    q, k = (torch.empty(1, h, size, 64, dtype=dtype, device="meta") for h in (4, of_keys))

    def run(q, k, v, grad):
        def attend(*x):
            return F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=of_keys != 4)

        out, vjp = torch.func.vjp(attend, q, k, v)
        return out, *vjp(grad)

    hardware = ftp.Hardware(flops=1e9, ring_step=0.0)
    lowered = ftp.lower(run, mesh, (cut,) * 4, q, k, k, q, out_specs=cut, hardware=hardware)
    rings = [n for n in lowered.graph.graph.nodes if n.target in RINGS]
    assert len(rings) == 2 == len(lowered.collectives)
    with FakeTensorMode(), Seen() as seen:
        for node in rings:
            made = RINGS[node.target].by_rank([given_of(node, q, k, r) for r in range(4)])
            found = [(x.dtype, tuple(x.shape)) for x in made[3]]
            rows, keys = ((dtype, (1, x.shape[1], size // 4, 64)) for x in (q, k))
            weights = parts.sum_dtype(dtype), rows[1][:3]
            is_backward = "backward" in str(node.target)
            assert found == ([rows, keys, keys] if is_backward else [rows, weights])
    kernels = {name: n for name, n in seen.found.items() if "attention" in name}
    assert set(kernels) == ({f"{kind}_attention", f"{kind}_attention_backward"} if kind else set())
    assert bool(kernels) != bool(seen.found["bmm"])


def given_of(node, q, k, rank):
    """A rank's arguments of a ring, on fake tensors."""
    args = []
    for argument, given in zip(node.target._schema.arguments, node.args, strict=True):
        if argument.name == "logsumexp":
            args.append(torch.empty(1, 4, 2048, dtype=parts.sum_dtype(q.dtype)))
        elif isinstance(given, torch.fx.Node):
            heads = (k if argument.name in "kv" else q).shape[1]
            args.append(torch.empty(1, heads, 2048, 64, dtype=q.dtype))
        elif argument.name == "rows":
            args.append([1, 8192, 1, 1, 2048 * rank, 2048])
        else:
            args.append(given)
    return tuple(args)
