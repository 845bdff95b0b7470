"""Layers of experts as torchtitan and Megatron write them: rows travel to their experts and back,
weights stay; values and gradients are those of one device.
"""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropless import FORMS, drawn, loop, routed
from few_or_many import slow_after
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ftp
from ftp import P

PLANS = {
    "ep": ((2,), ("ep",), "ep", ("ep",), None),
    "3 ranks": ((3,), ("ep",), "ep", ("ep",), None),
    "dp = ep, and tp within": ((2, 2), ("dp", "tp"), "dp", ("dp",), "tp"),
    "an axis of its own beside dp": ((2, 2), ("dp", "ep"), "ep", ("dp", "ep"), None),
    "ZeRO-3 for the rest": ((2, 2), ("dp", "ep"), "ep", ("dp", "ep"), None),
}
COUNTS = (8, 7, 2)  # experts; no axis divides 7, and of 2 one of 3 ranks owns none


def loss_of(layer: Any) -> Any:
    return lambda p, x: (layer(p, x.sin()) * torch.arange(x.numel()).view(x.shape)).sum()


def check(form: str, routing: Any, plan: str, **options: Any) -> None:
    count, tokens, k, favoured, seed = routing
    shape, axes, axis, token_axes, tp = PLANS[plan]
    k, favoured = min(k, count), None if favoured is None else favoured % count
    params, x = drawn(count, tokens, favoured, seed)
    layer = ftp.plans.send_tokens(lambda p, x: FORMS[form](p, x, k), axis, token_axes=token_axes)
    specs = {
        "router": P(None, "dp") if plan == "ZeRO-3 for the rest" else P(),
        "favour": P("dp") if plan == "ZeRO-3 for the rest" else P(),
        "up": P(axis, None, tp),
        "down": P(axis, tp),
    }
    mesh = ftp.simulated_mesh(shape, axes)
    step = ftp.shard(
        loss_of(layer), mesh, specs, batch_specs=P(token_axes), certify=True, **options
    )
    grads, value = torch.func.grad_and_value(loss_of(lambda p, x: loop(p, x, k)))(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-10, atol=1e-10)
    records = step.lower(params, x).collectives
    matrices = {tuple(params[name].shape[1:]) for name in ("up", "down")}
    assert not [
        c
        for c in records
        if axis in c.axes and len(c.global_shape) == 3 and tuple(c.global_shape[1:]) in matrices
    ]


ROUTINGS = st.tuples(
    st.sampled_from(COUNTS),
    st.integers(1, 7),
    st.integers(1, 8),
    st.none() | st.integers(0, 7),
    st.integers(0, 99),
)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=1)
@given(ROUTINGS, st.sampled_from(sorted(PLANS)))
def test_a_layer_as_it_is_written_is_the_loop_over_experts(form, routing, plan):
    """Tokens that do not divide, experts without tokens, and one that all tokens choose."""
    check(form, routing, plan)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("form", FORMS)
def test_experts_that_are_cut_within_are_certified(form):
    check(form, (6, 5, 2, None, 0), "dp = ep, and tp within")


@pytest.mark.parametrize("form", slow_after(1, FORMS))
def test_the_rest_may_be_cut_over_the_data_axis(form):
    check(form, (7, 5, 2, None, 0), "ZeRO-3 for the rest")


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_torchs_own(form):
    """To 1e-5 of each tensor's norm, gradients included."""
    params, x = drawn(7, 12, None, 3)
    params, x = {name: value.float() for name, value in params.items()}, x.float()
    # torch's kernel takes strides of whole 16 bytes.
    params["up"] = torch.cat([params["up"], params["up"].sin()], 2)
    params["down"] = torch.cat([params["down"], params["down"].cos()], 1)

    def loss_and_result(layer: Any) -> Any:
        def loss(p: Any, x: torch.Tensor) -> Any:
            out = layer(p, x)
            return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), out

        return loss

    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return FORMS[form](p, x, 2)

    sent = loss_and_result(ftp.plans.send_tokens(layer, "ep"))
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    mesh = ftp.simulated_mesh((3,), ("ep",))
    (_, out), grads = ftp.shard(sent, mesh, specs, batch_specs=P("ep"), has_aux=True)(params, x)
    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    value, expected = loss_and_result(layer)(own, x)
    value.backward()
    pairs = [(out, expected), *((grads[n], own[n].grad) for n in ("router", "up", "down"))]
    for made, due in pairs:
        assert torch.linalg.norm(made - due) <= 1e-5 * torch.linalg.norm(due)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", PLANS)
@settings(max_examples=10)
@given(ROUTINGS)
def test_a_layer_as_it_is_written_is_the_loop_over_experts_often(form, plan, routing):
    check(form, routing, plan)


# A layer of DeepSeek-V3 in the form of torchtitan's.


class Experts(nn.Module):
    """SwiGLU of rows that are sorted by expert."""

    def __init__(self, dim: int, hidden: int, count: int):
        super().__init__()
        self.count, self.is_loop = count, False
        self.w1 = nn.Parameter(torch.randn(count, hidden, dim))
        self.w2 = nn.Parameter(torch.randn(count, dim, hidden))
        self.w3 = nn.Parameter(torch.randn(count, hidden, dim))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.is_loop:
            parts = zip(x.split(counts.tolist()), self.w1, self.w2, self.w3, strict=True)
            return torch.cat([(F.silu(r @ a.T) * (r @ c.T)) @ b.T for r, a, b, c in parts])
        offs = counts.cumsum(0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=offs))
        h = h * torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=offs)
        return torch._grouped_mm(h, self.w2.transpose(-2, -1), offs=offs).type_as(x)


class Mixture(nn.Module):
    """Sigmoid scores, a bias that only routes, scores before experts, a shared expert."""

    def __init__(self, dim: int, hidden: int, count: int, k: int):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(dim, count, bias=False)
        self.experts = Experts(dim, hidden, count)
        self.shared = nn.Linear(dim, dim)
        self.register_buffer("bias", torch.randn(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        scores = self.gate(rows).sigmoid()
        chosen = (scores + self.bias).topk(self.k, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = F.one_hot(chosen.flatten(), self.experts.count).sum(0)
        order = chosen.flatten().argsort(stable=True)
        token = (order // self.k)[:, None].expand(-1, rows.shape[1])
        sent = rows.gather(0, token) * weights.flatten()[order][:, None]
        out = self.shared(rows).scatter_add(0, token, self.experts(sent, counts))
        return out.view(x.shape)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.moe, self.head = nn.Linear(4, 8), Mixture(8, 6, 4, 2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.moe(self.inner(x)).tanh())


def test_a_layer_of_deepseek_trains_two_steps_as_on_one_device():
    """ZeRO-3 for what is no expert. Four exchanges a step carry rows: there, back, and the
    gradients of both.
    """
    model, x = Model().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    sends = ftp.plans.on_expert_axis("ep", token_axes=("dp", "ep"))
    fn, params = ftp.functionalize(model, constraints={"moe": sends})
    of_experts = {"moe.experts.*": P("ep")}
    rest = {"inner.*": P("dp"), "moe.gate.*": P(None, "dp"), "moe.shared.*": P("dp")}
    params = {name: p.detach().clone() for name, p in params.items()}
    specs = ftp.plan(params, {**of_experts, **rest})
    mesh = ftp.simulated_mesh((2, 2), ("dp", "ep"))

    def train(params, x):
        grads, value = torch.func.grad_and_value(lambda p: fn(p, x).square().sum())(params)
        return {name: p - 0.01 * grads[name] for name, p in params.items()}, value

    step = ftp.spmd(train, mesh, (specs, P(("dp", "ep"))), (specs, P()))
    model.moe.experts.is_loop = True
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        value = model(x).square().sum()
        value.backward()
        optimizer.step()
        expected.append(value.detach())
    model.moe.experts.is_loop = False
    program = step.lower(params, x)
    for value in expected:
        params, found = step(params, x)
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(params[name], p.detach(), rtol=1e-11, atol=1e-11)
    # 20 padded tokens on four ranks, two experts each, half of them on the other rank.
    rows = [c for c in program.collectives if c.worst_nbytes is not None]
    assert [c.wire_nbytes for c in rows] == [5 * 2 * 8 * 8 // 2] * 4
    assert all(
        math.prod(c.global_shape) < 4 * 6 * 8
        for c in program.collectives
        if c.op in ("all_gather", "all_to_all") and "ep" in c.axes and c.worst_nbytes is None
    )


# What a row is computed from decides where.


def elsewhere(y: torch.Tensor) -> torch.Tensor:
    """Rows go to other places, and back."""
    return y.roll(1, 0).flip(0).flip(0).roll(-1, 0)


def by_place(y: torch.Tensor) -> torch.Tensor:
    """What becomes of a row depends on where it stands among the rank's rows, and no longer does;
    some of it is written.
    """
    scale = torch.arange(1, len(y) + 1)[:, None]
    y = ((y.tril() + y.triu(1)) * scale / scale).clone()
    y[:, :1] = 1.0
    return y


@pytest.mark.parametrize("between", [elsewhere, by_place])
def test_rows_come_back_for_what_needs_them_together(between):
    def layer(p, x):
        expert = routed(p, x, 1)[1][:, 0]
        order = expert.argsort(stable=True)
        offs = F.one_hot(expert, p["up"].shape[0]).sum(0).cumsum(0).to(torch.int32)
        y = between(F.grouped_mm(x[order], p["up"].transpose(1, 2).transpose(1, 2), offs=offs))
        return torch.zeros_like(x).index_copy(0, order, F.grouped_mm(y, p["down"], offs=offs))

    def plain(p, x):
        experts = routed(p, x, 1)[1]
        made = [between(x @ up) @ down for up, down in zip(p["up"], p["down"], strict=True)]
        return sum(y * (experts == e) for e, y in enumerate(made))

    params, x = drawn(4, 6, 1, 0)
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    sent = ftp.plans.send_tokens(layer, "ep")
    step = ftp.shard(loss_of(sent), ftp.simulated_mesh(2, "ep"), specs, batch_specs=P("ep"))
    grads, value = torch.func.grad_and_value(loss_of(plain))(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-11, atol=1e-11)
    rows = [c for c in step.lower(params, x).collectives if c.worst_nbytes is not None]
    assert len(rows) == 7  # there and back twice, with their gradients; that of x is not asked for


# Rows that are computed twice, and what belongs to each row, beside rows that travel.


def sorted_rows(p: Any, x: torch.Tensor) -> tuple[Any, ...]:
    """Two experts a token: rows' tokens, their weights, and a function that gives the ends anew."""
    weights, experts = routed(p, x, 2)
    order = experts.flatten().argsort(stable=True)
    ends = lambda: F.one_hot(experts, 4).sum((0, 1)).cumsum(0).to(torch.int32)  # noqa: E731
    return order, weights.flatten()[order][:, None], ends


def written_twice(p: Any, x: torch.Tensor) -> torch.Tensor:
    order, weights, ends = sorted_rows(p, x)
    gate = F.silu(F.grouped_mm(x[order // 2], p["up"], offs=ends()))
    h = gate * F.grouped_mm(x[order // 2], p["up"].sin(), offs=ends())
    made = F.grouped_mm(h, p["down"], offs=ends()) * weights
    return torch.zeros_like(x).index_add(0, order // 2, made)


def once_without_gradient(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The rows that have no gradient are not those that have one."""
    order, weights, ends = sorted_rows(p, x)
    x = x * p["scale"].sum()
    with torch.no_grad():
        size = F.grouped_mm(x[order // 2], p["up"], offs=ends()).abs()
    h = F.silu(F.grouped_mm(x[order // 2], p["up"], offs=ends())) / (1 + size)
    made = F.grouped_mm(h, p["down"], offs=ends()) * weights
    return torch.zeros_like(x).index_add(0, order // 2, made)


def weighted_between(p: Any, x: torch.Tensor) -> torch.Tensor:
    """As in Megatron, weights of the router multiply between the matmuls."""
    order, weights, ends = sorted_rows(p, x)
    h = F.silu(F.grouped_mm(x[order // 2], p["up"], offs=ends())) * weights
    made = F.grouped_mm(h, p["down"], offs=ends())
    return torch.zeros_like(x).index_add(0, order // 2, made)


def normalized_and_scaled(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Rows of zeros, of which there are some where fewer rows arrive than may, would be 0 / 0."""
    order, weights, ends = sorted_rows(p, x)
    h = F.grouped_mm(x[order // 2], p["up"], offs=ends())
    h = h / h.square().sum(-1, keepdim=True).sqrt() * p["scale"] / weights
    made = F.grouped_mm(h, p["down"], offs=ends())
    return torch.zeros_like(x).index_add(0, order // 2, made)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("layer", "widths"),
    [  # of rows there, back, and of the gradients; that of x is not asked for
        (written_twice, [4, 4, 4]),
        (once_without_gradient, [4, 4, 4, 4, 4]),
        (weighted_between, [4, 1, 4, 4, 1]),
        (normalized_and_scaled, [4, 1, 1, 4, 4, 1]),
    ],
)
def test_what_travels_beside_rows(layer, widths, monkeypatch):
    params, x = drawn(4, 6, None, 0)
    params["scale"] = torch.linspace(1, 2, 6, dtype=torch.float64)
    specs = {"router": P(), "favour": P(), "scale": P(), "up": P("ep"), "down": P("ep")}
    sent = ftp.plans.send_tokens(layer, "ep")
    mesh = ftp.simulated_mesh(2, "ep")
    step = ftp.shard(loss_of(sent), mesh, specs, batch_specs=P("ep"), certify=True)
    found = step(params, x)
    rows = [c for c in step.lower(params, x).collectives if c.worst_nbytes is not None]
    assert sorted(c.shape[1] if len(c.shape) > 1 else 1 for c in rows) == sorted(widths)

    def by_group(a: Any, b: Any, offs: Any) -> torch.Tensor:
        parts = a.tensor_split([int(end) for end in offs[:-1]])
        return torch.cat([part @ w for part, w in zip(parts, b, strict=True)])

    monkeypatch.setattr(F, "grouped_mm", by_group)
    grads, value = torch.func.grad_and_value(loss_of(layer))(params, x)
    torch.testing.assert_close(found, (value, grads), rtol=1e-10, atol=1e-10)


def test_weights_that_are_read_otherwise_are_gathered_and_named():
    def layer(p, x):
        return FORMS["torchtitan_form"](p, x, 2) + p["up"].square().sum()

    params, x = drawn(4, 6, None, 0)
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    sent = ftp.plans.send_tokens(layer, "ep")
    step = ftp.shard(loss_of(sent), ftp.simulated_mesh(2, "ep"), specs, batch_specs=P("ep"))
    with pytest.warns(ftp.errors.PlanWarning, match=r"4 experts of params\['up'\] are gathered"):
        loss, grads = step(params, x)
    plain = loss_of(lambda p, x: loop(p, x, 2) + p["up"].square().sum())
    expected, value = torch.func.grad_and_value(plain)(params, x)
    torch.testing.assert_close((loss, grads), (value, expected), rtol=1e-10, atol=1e-10)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("count", [7, 2])
def test_experts_that_the_axis_does_not_divide(count):
    """The last of three ranks owns one expert of seven, and none of two."""
    check("torchtitan_form", (count, 5, 2, None, 0), "3 ranks")


def test_what_send_tokens_refuses():
    mesh = ftp.simulated_mesh(3, "ep")

    def run(layer, params, x, **given):
        sent = ftp.plans.send_tokens(layer, "ep", **given)
        return ftp.spmd(lambda p, x: sent(p, x), mesh, (P(), P("ep")), P("ep"))(params, x)

    def dense(p, x):
        return sum(x @ p["up"][e] @ p["down"][e] for e in range(6))

    form = FORMS["torchtitan_form"]
    params, x = drawn(6, 6, 0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ftp.errors.SpecError, match="no grouped matmul of the layer reads one"):
            run(dense, params, x)
        two = {"a": params, "b": drawn(4, 6, 0, 0)[0]}
        with pytest.raises(ftp.errors.SpecError, match=r"up'\] \(4, 4, 6\).*, whose numbers of"):
            run(lambda p, x: form(p["a"], x, 2) + form(p["b"], x, 2), two, x)
        with pytest.raises(ftp.errors.SpecError, match=r"shape \(2, 4\) and returns \(\)"):
            run(lambda p, x: form(p, x, 2).sum(), params, x)
        with pytest.raises(ftp.errors.InputError, match="would receive 6 rows, more than bound=3"):
            run(lambda p, x: form(p, x, 1), params, x, capacity=1.5)
        with pytest.raises(ftp.errors.SpecError, match="there are no tokens"):
            run(lambda p, x: form(p, x, 1), params, x[:0])
    with pytest.raises(ftp.errors.SpecError, match="token_axes must name it too"):
        ftp.plans.send_tokens(dense, "ep", token_axes=("dp",))
    with pytest.raises(ftp.errors.SpecError, match="an equal load needs 1"):
        ftp.plans.on_expert_axis("ep", capacity=0.5)
