"""Dropless experts as programs write them (sort, grouped_mm, back to the tokens): on any plan,
values and gradients are those of a loop over experts in float64, and experts' weights stay.
"""

import pytest
import torch
from dropless import DIM, FORMS, HIDDEN, drawn, loop
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P


def checked(form, k, mesh, specs, batch, params, x) -> ftp.Lowered:
    def loss_of(layer):
        return lambda p, x: (layer(p, x.sin(), k) * torch.arange(x.numel()).view(x.shape)).sum()

    specs = {"router": P(), "favour": P(), **specs}
    step = ftp.shard(loss_of(form), mesh, specs, batch_specs=batch, certify=True)
    grads, value = torch.func.grad_and_value(loss_of(loop))(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-10, atol=1e-10)
    return step.lower(params, x)


@st.composite
def routings(draw):
    """Experts, tokens and choices that need not divide, and an expert that all tokens choose."""
    experts = draw(st.sampled_from((3, 7, 8)))
    k = draw(st.integers(1, experts))
    favoured = draw(st.none() | st.integers(0, experts - 1))
    return experts, draw(st.integers(1, 5)), k, favoured, draw(st.integers(0, 99))


PLANS = {
    "ep": ((3,), ("ep",), {"up": P("ep"), "down": P("ep")}, P()),
    "tp": ((2,), ("tp",), {"up": P(None, None, "tp"), "down": P(None, "tp")}, P()),
    "ep × tp": ((2, 2), ("ep", "tp"), {"up": P("ep", None, "tp"), "down": P("ep", "tp")}, P()),
    "ZeRO-3": ((2,), ("dp",), {"up": P(None, "dp"), "down": P(None, "dp")}, P("dp")),
}


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=1)
@given(routings(), st.sampled_from(sorted(PLANS)))
def test_any_plan_is_the_loop_over_experts(form, routing, plan):
    experts, tokens, k, favoured, seed = routing
    shape, axes, specs, batch = PLANS[plan]
    params, x = drawn(experts, tokens, favoured, seed)
    checked(FORMS[form], k, ftp.simulated_mesh(shape, axes), specs, batch, params, x)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", PLANS)
@settings(max_examples=12)
@given(routings())
def test_any_plan_is_the_loop_over_experts_often(form, plan, routing):
    experts, tokens, k, favoured, seed = routing
    shape, axes, specs, batch = PLANS[plan]
    params, x = drawn(experts, tokens, favoured, seed)
    checked(FORMS[form], k, ftp.simulated_mesh(shape, axes), specs, batch, params, x)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_experts_on_their_own_axis_stay(form):
    """7 experts on 3 ranks, one of them chosen by every token."""
    params, x = drawn(7, 5, 2, 0)
    _, _, specs, batch = PLANS["ep"]
    program = checked(FORMS[form], 2, ftp.simulated_mesh(3, "ep"), specs, batch, params, x)
    shapes = {tuple(params[name].shape) for name in ("up", "down")}
    assert program.collectives
    assert all(tuple(c.global_shape) not in shapes for c in program.collectives)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_grouped_mm_of_any_dtype_and_strides(dtype):
    """Transposed weights, as transformers has them, expanded gradients, and rows of no group."""
    x = torch.randn(6, DIM, dtype=torch.float64)
    w = torch.randn(3, HIDDEN, DIM, dtype=torch.float64)
    offs = torch.tensor([0, 4, 5], dtype=torch.int32)

    def loss(w, x):
        return torch._grouped_mm(x, w.transpose(1, 2), offs=offs)[:5].float().sum()

    def plain(w, x):
        return sum((x[a:b] @ w[e].T).sum() for e, a, b in ((1, 0, 4), (2, 4, 5)))

    mesh = ftp.simulated_mesh(2, "ep")
    step = ftp.shard(loss, mesh, P("ep"))
    value, grad = step(w.to(dtype), x.to(dtype))
    expected_grad, expected = torch.func.grad_and_value(plain)(w, x)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), expected_grad, rtol=30 * eps, atol=30 * eps)
    # The terms of the sum cancel, so that its rounding is judged by their magnitudes.
    summed = max(eps, torch.finfo(torch.float32).eps)
    assert abs(float(value) - float(expected)) <= 2 * summed * float(plain(w.abs(), x.abs()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", ["ep", "ep × tp"])
def test_float32_is_torchs_own_grouped_mm(form, plan):
    """To 1e-5 of each tensor's norm, gradients included."""
    shape, axes, specs, batch = PLANS[plan]
    params, x = drawn(7, 12, None, 3)
    params, x = {name: value.float() for name, value in params.items()}, x.float()
    # torch's kernel takes strides of whole 16 bytes.
    params["up"] = torch.cat([params["up"], params["up"].sin()], 2)
    params["down"] = torch.cat([params["down"], params["down"].cos()], 1)

    def loss(p, x):
        out = FORMS[form](p, x, 2)
        return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), out

    specs = {"router": P(), "favour": P(), **specs}
    step = ftp.shard(loss, ftp.simulated_mesh(shape, axes), specs, batch_specs=batch, has_aux=True)
    (_, out), grads = step(params, x)
    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    value, expected = loss(own, x)
    value.backward()
    pairs = [(out, expected), *((grads[n], own[n].grad) for n in ("router", "up", "down"))]
    for made, due in pairs:
        assert torch.linalg.norm(made - due) <= 1e-5 * torch.linalg.norm(due)
