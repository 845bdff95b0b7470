"""Attention with dropout, by tiles: as a dense softmax whose weights are dropped, on every mesh."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import strategies as st
from rings import forget_steps
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P, zigzag
from ftp.ops import attention_flex
from ftp.random.draws import Draws

KEY = ftp.random.key(3)
SLOW = ftp.Hardware(flops=1e3, ring_step=0.0)  # on which keys go around a ring
MESHES = [
    ((2,), P(None, None, "cp")),
    ((3,), P(None, None, zigzag("cp"))),
    ((2, 2), P(None, "tp", "cp")),
    ((2, 2), P("tp", None, zigzag("cp"))),
]
Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ftp.ops.ring_pieces.SHORTEST", 2)
    monkeypatch.setattr("ftp.ops.attention.TILE", 3)
    forget_steps(monkeypatch)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool) -> Tensor:
    with Draws(KEY, "attend"):
        return F.scaled_dot_product_attention(q, k, v, mask, p, causal, enable_gqa=True)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf)
    if mask is not None:
        hidden = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hidden else scores + mask
    weights = torch.ops.aten._safe_softmax(scores, -1)
    with Draws(KEY, "attend") as draws:
        key = draws.next_key("scaled_dot_product_attention")
    return ftp.random.dropout(key, weights, p) @ v


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@few_or_many(st.data(), few=2, many=60)
def test_as_a_dense_softmax(data: Any):
    shape, cut = data.draw(st.sampled_from(MESHES))
    size, of_keys = data.draw(st.tuples(st.integers(3, 11), st.sampled_from([2, 4])))
    kind = data.draw(st.sampled_from(["none", "causal", "hidden", "learned"]))
    p, is_ring = data.draw(st.tuples(st.sampled_from([0.3, 1.0]), st.booleans()))
    torch.manual_seed(size)
    q, k, v = make(2, 4, size, 3), *(make(2, of_keys, size, 3) for _ in "kv")
    rows = data.draw(st.sampled_from([1, size]))
    hidden, bias = torch.rand(2, 1, rows, size) > 0.4, make(1, 4, rows, size)

    def gradients(fn: Attend) -> Attend:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, grad: Tensor) -> Any:
            def whole(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
                mask = {"hidden": hidden, "learned": bias}.get(kind)
                return fn(q, k, v, mask, p, kind == "causal")

            out, vjp = torch.func.vjp(whole, q, k, v, bias)
            return out, *vjp(grad)

        return run

    mesh = ftp.simulated_mesh(shape, ("cp", "tp")[: len(shape)])
    args = q, k, v, bias, make(2, 4, size, 3)
    step = ftp.spmd(
        gradients(attend),
        mesh,
        (cut, cut, cut, P(), cut),
        (cut, cut, cut, cut, P()),
        certify=True,
        hardware=SLOW if is_ring else None,
    )
    rings = [c.op for c in step.lower(*args).collectives].count("ring")
    assert rings == (2 if is_ring else 0)
    expected = gradients(dense)(*args)
    for one, eager, right in zip(step(*args), gradients(attend)(*args), expected, strict=True):
        torch.testing.assert_close(one, right, rtol=0, atol=1e-10)
        torch.testing.assert_close(eager, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3, 4)])
def test_any_number_of_batch_dims(lead: tuple[int, ...]):
    q = make(*lead, 5, 3)
    mask = torch.rand(*lead[1:], 5, 5) > 0.3
    if not lead:
        scores = torch.softmax((q @ q.mT / math.sqrt(3)).masked_fill(~mask, -math.inf), -1)
        with Draws(KEY, "attend") as draws:
            right = ftp.random.dropout(draws.next_key("it"), scores.nan_to_num(), 0.4) @ q
        with Draws(KEY, "attend"):
            found = F.scaled_dot_product_attention(q, q, q, mask, 0.4)
    else:
        found, right = (f(q, q, q, mask, 0.4, False) for f in (attend, dense))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_transforms():
    """Forward mode, the gradient's directional derivative, and a batch of scales."""
    torch.manual_seed(0)
    q, t = make(1, 2, 7, 3), make(1, 2, 7, 3)

    def derivatives(fn: Attend) -> Callable[..., Any]:
        def run(q: Tensor, t: Tensor) -> Any:
            along = lambda x: fn(x, q, x * q, None, 0.3, True).square().sum()  # noqa: E731
            first = torch.func.jvp(along, (q,), (t,))[1]
            second = torch.func.jvp(torch.func.grad(along), (q,), (t,))[1]
            scaled = torch.vmap(lambda s: along(q * s), randomness="same")
            return first, second, scaled(q.new_tensor([1.0, 2.0]))

        return run

    cut = P(None, None, "cp")
    step = ftp.spmd(derivatives(attend), ftp.simulated_mesh((2,), ("cp",)), cut, (P(), cut, P()))
    for one, right in zip(step(q, t), derivatives(dense)(q, t), strict=True):
        torch.testing.assert_close(one, right, rtol=0, atol=1e-10)


def test_no_weights_are_held():
    """Memory is linear in the tokens, forward and backward."""
    mesh, cut, held = ftp.AbstractMesh((4,), ("cp",), device_type="cpu"), P(None, None, "cp"), []

    def run(q: Tensor) -> Any:
        out, vjp = torch.func.vjp(lambda q: attend(q, q, q, None, 0.1, True), q)
        return vjp(out)[0]

    for tokens in (1 << 14, 1 << 17):
        q = torch.empty(1, 2, tokens, 64, dtype=torch.bfloat16, device="meta")
        held.append(int(ftp.lower(run, mesh, cut, q, out_specs=cut).memory) / tokens)
    assert held[1] <= 1.01 * held[0]


def test_mutants_of_positions_are_seen(monkeypatch: pytest.MonkeyPatch):
    """Draws of the rank's own positions are those of other pairs."""
    q = make(1, 2, 8, 3)
    right = dense(q, q, q, None, 0.5, False)
    mesh, cut = ftp.simulated_mesh((2,), ("cp",)), P(None, None, "cp")
    run = lambda q: attend(q, q, q, None, 0.5, False)  # noqa: E731
    torch.testing.assert_close(ftp.spmd(run, mesh, cut, cut)(q), right, rtol=0, atol=1e-10)
    runs = attention_flex._runs
    monkeypatch.setattr(attention_flex, "_runs", lambda part, *rest: runs([], *rest))
    assert not torch.allclose(ftp.spmd(run, mesh, cut, cut)(q), right)
