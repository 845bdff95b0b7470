"""Replicas under torch.vmap, stacked along a dim that the mesh cuts: each is as alone, and nothing
moves between them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P

N = 3  # replicas on two ranks


def rand(*shape: int) -> Tensor:
    return torch.randn(N, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def attention(p: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = ((x @ p[n]).unflatten(-1, (2, -1)).transpose(1, 2) for n in "qkv")
    causal = mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).square().mean()


def padded(p: Any, ids: Tensor) -> Tensor:
    return F.embedding(ids, p["e"], padding_idx=3).square().sum()


def by_frequency(p: Any, ids: Tensor) -> Tensor:
    return F.embedding(ids, p["e"], scale_grad_by_freq=True).square().sum()


IDS = torch.randint(7, (N, 2, 5), generator=torch.Generator().manual_seed(0))
TABLES, WEIGHTS, X = {"e": rand(7, 4)}, {k: rand(6, 6) for k in "qkv"}, rand(2, 4, 6)
CASES: dict[str, tuple[Any, tuple[Any, ...], tuple[int | None, ...]]] = {
    "embedding": (padded, (TABLES, IDS), (0, 0)),
    "embedding of shared ids": (by_frequency, (TABLES, IDS[0]), (0, None)),
    "embedding in a shared table": (padded, ({"e": TABLES["e"][0]}, IDS), (None, 0)),
    "attention": (attention, (WEIGHTS, X), (0, 0)),
    "attention with masks": (attention, (WEIGHTS, X, rand(2, 1, 4, 4)), (0, 0, 0)),
    "attention with a mask": (attention, (WEIGHTS, X, rand(4, 4)[0]), (0, 0, None)),
}


def part(arg: Any, i: int, dim: int | None) -> Any:
    if dim is None:
        return arg
    return {k: v[i] for k, v in arg.items()} if isinstance(arg, dict) else arg[i]


@pytest.mark.parametrize("case", CASES)
def test_nothing_moves_between_replicas(case: str):
    loss, args, dims = CASES[case]
    specs = tuple(P() if dim is None else P("replica") for dim in dims)
    step = ftp.spmd(
        torch.vmap(torch.func.grad(loss), in_dims=dims),
        ftp.simulated_mesh((2,), ("replica",)),
        specs,
        P("replica"),
        data_axes=(),
    )
    assert not step.lower(*args).collectives
    found = step(*args)
    for i in range(N):
        one = (part(arg, i, dim) for arg, dim in zip(args, dims, strict=True))
        expected = torch.func.grad(loss)(*one)
        torch.testing.assert_close({k: v[i] for k, v in found.items()}, expected)


def test_gradients_of_a_mapped_function():
    """The rules of ops that are differentiated after they are mapped."""

    def total(p: Any, ids: Tensor) -> Tensor:
        return torch.vmap(padded)(p, ids).sum()

    step = ftp.shard(total, ftp.simulated_mesh((2,), ("replica",)), P("replica"), batch_specs=P())
    _, found = step(TABLES, IDS)
    for i in range(N):
        expected = torch.func.grad(padded)(part(TABLES, i, 0), IDS[i])
        torch.testing.assert_close(found["e"][i], expected["e"])


def test_attention_of_a_gpu_is_one_op():
    params = {k: torch.empty(2, 128, 128, dtype=torch.bfloat16, device="meta") for k in "qkv"}
    x = torch.empty(2, 4, 64, 128, dtype=torch.bfloat16, device="meta")
    mesh = ftp.AbstractMesh((2,), ("replica",), device_type="cuda")
    mapped = torch.vmap(torch.func.grad(attention))
    step = ftp.spmd(mapped, mesh, P("replica"), P("replica"), data_axes=())
    lowered = step.lower(params, x)
    calls = [str(n.target) for n in lowered.graph.graph.nodes if "attention" in str(n.target)]
    assert len(calls) == 2 and not lowered.collectives, calls
