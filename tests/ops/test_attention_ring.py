"""The ring of attention: as a dense masked softmax, and proven equal to it as a formula; mutants of
its merges and positions are refused.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import forget_steps
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import CertificateError
from ftp.ops import attention, key_ring, ring_pieces
from ftp.ops.attention_ring import RING, RING_BACKWARD, needs_of, one_rank, one_rank_backward
from ftp.ops.key_ring import PartSums
from ftp.ops.ring_pieces import Ring
from ftp.ops.rings import RINGS
from ftp.ops.sends import over, run
from ftp.sharding.layout import pieces


def dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return torch.softmax(scores, -1) @ v


def part(size: int, n: int, rank: int, is_zigzag: bool) -> tuple[list[int], list[int]]:
    """A rank's part of a sequence as numbers, and the positions in it."""
    held = pieces(size, n, rank, is_zigzag)
    numbers = [number for piece in held for number in piece]
    return [1, size, 1, len(held), *numbers], [i for a, m in held for i in range(a, a + m)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    """Several pieces and tiles of few tokens."""
    monkeypatch.setattr(ring_pieces, "SHORTEST", 3)
    forget_steps(monkeypatch)
    for name, size in {"QUERIES": 4, "KEYS": 5, "TILE": 3}.items():
        monkeypatch.setattr(attention, name, size)


@settings(max_examples=25)
@given(st.data())
def test_as_a_dense_softmax(data: Any):
    n, size, of_keys = data.draw(st.tuples(st.integers(2, 5), *[st.integers(1, 20)] * 2))
    is_causal, zigzag_q, zigzag_k = data.draw(st.tuples(*[st.booleans()] * 3))
    heads, repeats, of_values = data.draw(st.tuples(*[st.integers(1, 3)] * 3))
    torch.manual_seed(size)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    q, k = make(2, heads * repeats, size, 2), make(2, heads, of_keys, 2)
    v, grad = make(2, heads, of_keys, of_values), make(2, heads * repeats, size, of_values)
    out, vjp = torch.func.vjp(lambda *x: dense(*x, is_causal), q, k, v)
    of_q, of_k, of_v = vjp(grad)
    calls, held = [], []
    for rank in range(n):
        rows, here = part(size, n, rank, zigzag_q)
        _, there = part(of_keys, n, rank, zigzag_k)
        ring = [of_keys, n, 1, 1, int(zigzag_k), 0, int(zigzag_q), 1]
        tensors = q[:, :, here], k[:, :, there], v[:, :, there]
        calls.append((*tensors, None, rows, ring, is_causal, None, "a group"))
        held.append((here, there))
    made = RINGS[RING].by_rank(calls)
    back = RINGS[RING_BACKWARD].by_rank(
        [
            (grad[:, :, here], *call[:3], *of_rank, *call[3:])
            for (here, _), call, of_rank in zip(held, calls, made, strict=True)
        ]
    )
    for (here, there), (result, _), grads in zip(held, made, back, strict=True):
        right = out[:, :, here], of_q[:, :, here], of_k[:, :, there], of_v[:, :, there]
        for one, other in zip((result, *grads), right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_what_no_query_sees_is_not_sent():
    rows, keys = [1, 32, 1, 1, 0, 8], [32, 4, 1, 1, 0, 0, 0, 1]
    needs, every = (needs_of(keys, rows, is_causal, False) for is_causal in (True, False))
    assert needs.traffic() == (3 * 8, 3 * 8)  # the first rank's, the last rank's
    assert every.traffic() == (3 * 8, 3 * 8)
    assert [[bool(needs.held(rank, owner, 0)) for owner in range(4)] for rank in range(4)] == [
        [owner <= rank for owner in range(4)] for rank in range(4)
    ]
    needs, every = (needs_of(keys, rows, is_causal, True) for is_causal in (True, False))
    assert needs.traffic() == (3 * 8, 3 * 8)
    assert every.traffic() == (6 * 8, 6 * 8)


def test_sums_and_gradients_are_not_held_at_once():
    like, width = torch.empty(2, 3, 1024, 8, dtype=torch.bfloat16), 64
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        sums = PartSums(like)
        parts = [sums.part(slice(at, at + width)) for at in range(0, 1024, width)]
        for at, x in enumerate(parts):
            x.fill_(at)
        del x
        while parts:
            sums.finish(parts.pop(0))
        made = sums.result()
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak == like.numel() * 4 + like.numel() * 2 * width // 1024
    right = torch.arange(1024 // width).repeat_interleave(width).to(like.dtype)
    torch.testing.assert_close(made, right.unsqueeze(-1).expand_as(like), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 96, 16, dtype=dtype) for _ in range(4))
    exact, vjp = torch.func.vjp(lambda *x: dense(*x, True), *(x.double() for x in (q, k, v)))
    calls = []
    for rank in range(4):
        rows, here = part(96, 4, rank, True)
        held = (x[:, :, here] for x in (q, k, v))
        calls.append((*held, None, rows, [96, 4, 1, 1, 1, 0, 1, 1], True, None, "a group"))
    made = RINGS[RING].by_rank(calls)
    given = zip(calls, made, range(4), strict=True)
    back = RINGS[RING_BACKWARD].by_rank(
        [(grad[:, :, part(96, 4, r, True)[1]], *c[:3], *of_r, *c[3:]) for c, of_r, r in given]
    )
    for rank in range(4):
        here = part(96, 4, rank, True)[1]
        for one, right in zip(
            (made[rank][0], *back[rank]), (exact, *vjp(grad.double())), strict=True
        ):
            assert one.dtype == dtype
            worst = (one - right[:, :, here]).abs().max()
            assert worst < 4 * torch.finfo(dtype).eps * right.abs().max()


# Proofs: as formulas, with a dim of values that no kernel takes, so that each product is recorded.

CUT = P(None, None, "cp")


def prove(n: int = 2, size: int = 4, is_causal: bool = True, *, has_gradients: bool = True) -> Any:
    ring_pieces.SHORTEST = 1

    def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
        if not has_gradients:
            return (dense(q, k, v, is_causal),)
        out, vjp = torch.func.vjp(lambda *x: dense(*x, is_causal), q, k, v)
        return out, *vjp(grad)

    def rank_program(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
        rank, start = over(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        given_ = None, part(size, n, rank, False)[0], [size, n, 1, 1, 0, 0, 0, 1], is_causal, None
        out, weights = run(one_rank(rank, q, k, v, *given_), start)
        if not has_gradients:
            return (out,)
        back = one_rank_backward(rank, grad, q, k, v, out, weights, *given_)
        return out, *run(back, start)

    q, v = (torch.ones(1, 1, size, dim, dtype=torch.float64) for dim in (3, 2))
    mesh = ftp.AbstractMesh((n,), ("cp",))
    cuts = (CUT,) * (4 if has_gradients else 1)
    return ftp.equivalent(reference, rank_program, mesh, (CUT,) * 4, cuts, q, q, v, v)


@pytest.mark.slow
def test_the_ring_is_proven():
    (said,) = prove(has_gradients=False).assumptions
    assert "orders were drawn" in said  # of softmax's largest score


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradients_of_rings_are_proven(is_causal: bool):
    """Several tokens a rank, in several pieces; three ranks."""
    prove(is_causal=is_causal)
    prove(n=3, size=3, is_causal=is_causal)


def _merge_twice(out: Tensor, total: Tensor, part: Tensor, of_part: Tensor) -> None:
    attention_merge(out, total, part, of_part)
    out.mul_(2)


def _merge_unweighted(out: Tensor, total: Tensor, part: Tensor, of_part: Tensor) -> None:
    both = torch.logaddexp(total, of_part)
    out.mul_((total - both).exp_().unsqueeze(-1))
    out.add_(part)
    total.copy_(both)


attention_merge = attention.merge
blocks_of = Ring.blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        pytest.param(attention, "merge", _merge_twice, marks=pytest.mark.slow),
        (attention, "merge", _merge_unweighted),
        # Keys stand one place further on; gradients are returned to another rank.
        (
            Ring,
            "blocks",
            lambda self, rank, at, most: [
                attention.Block(b.first + rank, b.at, b.length)
                for b in blocks_of(self, rank, at, most)
            ],
        ),
        pytest.param(key_ring, "_add", lambda sums, arrived, held: None, marks=pytest.mark.slow),
    ],
)
def test_mutants_are_refused(monkeypatch: Any, owner: Any, name: str, wrong: Any):
    monkeypatch.setattr(owner, name, wrong)
    forget_steps(monkeypatch)
    with pytest.raises(CertificateError):
        prove()


def test_a_rank_that_reads_nothing_of_a_ring_takes_part_in_it():
    """It has no queries, and no part of what reads them; the others pass it their keys."""

    def program(x: Tensor) -> Tensor:
        seen = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return seen.gather(2, torch.tensor([1, 0, 1, 1]).reshape(1, 1, 4, 1))

    x = torch.randn(2, 2, 2, 2, dtype=torch.float64)
    cut = P(None, None, "cp")
    mesh = ftp.simulated_mesh((3,), ("cp",))
    hardware = ftp.Hardware(capacity=1.0)  # gathered keys do not fit
    step = ftp.spmd(
        lambda x: program(ftp.constrain(x, cut)), mesh, (cut,), P(), certify=True, hardware=hardware
    )
    assert [c.op for c in step.lower(x).collectives] == ["ring", "all_reduce"]
    torch.testing.assert_close(step(x), program(x))
