"""Trials of layers on drawn tokens: which capacities they find, at which sizes they run, and what
they cost.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from few_or_many import slow_after
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ftp
from ftp import P
from ftp.per_rank import token_trial


@pytest.fixture
def draws(monkeypatch) -> list[float]:
    """The differences of all draws, in order."""
    found: list[float] = []
    of_draw = token_trial._difference_of_draw
    monkeypatch.setattr(token_trial, "_known", {})
    monkeypatch.setattr(
        token_trial,
        "_difference_of_draw",
        lambda *given: (found.append(of_draw(*given)), found[-1])[1],
    )
    return found


def experts(p: Any, x: Tensor, k: int, capacity: int | None = None, inner: Any = None) -> Tensor:
    """SwiGLU with a shared expert; rows beyond ``capacity`` are multiplied by other experts."""
    shape, x = x.shape, x.flatten(0, -2)
    weights, chosen = (x @ p["router"]).float().softmax(-1).topk(k, -1)
    order = chosen.flatten().argsort(stable=True)
    counts = F.one_hot(chosen.flatten(), p["up"].shape[0]).sum(0)
    counts = counts if capacity is None else counts.clamp(max=capacity)
    offs = counts.cumsum(0).to(torch.int32)
    up, gate, down = (p[n].to(inner or x.dtype) for n in ("up", "gate", "down"))
    rows = x[order // k].to(up.dtype)
    h = F.silu(F.grouped_mm(rows, gate, offs=offs)) * F.grouped_mm(rows, up, offs=offs)
    made = F.grouped_mm(h, down, offs=offs).type_as(x)
    made = made * weights.flatten()[order][:, None].type_as(x)
    shared = F.linear(F.silu(F.linear(x, p["in"], p["bias"])), p["out"])
    return shared.index_add(0, order // k, made).view(shape)


def lower(
    shape: tuple[int, ...],
    count: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    **given: Any,
) -> ftp.Lowered:
    *_, dim = shape
    shapes = {
        "router": (dim, count),
        "up": (count, dim, hidden),
        "gate": (count, dim, hidden),
        "down": (count, hidden, dim),
        "in": (hidden, dim),
        "bias": (hidden,),
        "out": (dim, hidden),
    }
    params = {n: torch.empty(s, dtype=dtype, device="meta") for n, s in shapes.items()}
    specs = {n: P("ep") if n in ("up", "gate", "down") else P() for n in params}
    sent = ftp.plans.send_tokens(lambda p, x: experts(p, x, **given), "ep")
    mesh = ftp.AbstractMesh((2,), ("ep",))
    step = ftp.spmd(sent, mesh, (specs, P("ep")), P("ep"))
    return step.lower(params, torch.empty(shape, dtype=dtype, device="meta"))


SIZES = [  # of tokens, experts and the experts' hidden dim
    ((12, 8), 4, 8),
    ((1, 8), 4, 8),
    ((2, 300, 8), 4, 8),
    ((4, 3, 5, 8), 4, 8),
    ((8, 4096, 2048), 64, 1024),  # of OLMoE
    ((64, 4096, 7168), 256, 2048),  # of DeepSeek-V3: 11 GiB of weights, of which none is allocated
]


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", slow_after(1, [torch.bfloat16, torch.float32]))
def test_layers_without_a_capacity_pass(sizes, dtype, draws):
    lower(*sizes, dtype, k=2)
    assert len(draws) == 2


def test_a_layer_that_computes_in_less_precision_passes(draws):
    lower((40, 8), 4, 8, k=2, inner=torch.bfloat16)
    assert len(draws) == 2 and max(draws) < 1e-1


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("sizes", SIZES[4:], ids=str)
def test_a_capacity_of_large_experts_is_refused(sizes):
    with pytest.raises(ftp.errors.SpecError, match="results for a few random tokens"):
        lower(*sizes, torch.bfloat16, k=4, capacity=30)


@settings(max_examples=3)
@given(
    st.sampled_from([(400, 8), (20, 20, 8), (4, 100, 8), (5, 4, 20, 8)]),
    st.integers(1, 399),
    st.integers(1, 4),
)
def test_any_capacity_below_the_number_of_tokens_is_refused(shape, capacity, k):
    with pytest.raises(ftp.errors.SpecError, match="results for a few random tokens"):
        lower(shape, 8, 8, k=k, capacity=capacity)


def test_a_capacity_that_suffices_for_all_tokens_passes(draws):
    lower((400, 8), 8, 8, k=2, capacity=400)
    assert len(draws) == 2


def test_equal_layers_of_a_model_are_tried_once(draws):
    lower((12, 8), 4, 8, k=2)
    lower((12, 8), 4, 8, k=2)
    assert len(draws) == 2
    lower((12, 8), 4, 8, k=1)
    assert len(draws) == 4


def test_what_cannot_be_tried_stays_an_assumption(draws):
    """A layer that reads the elements of weights too large to draw."""

    def layer(p: Any, x: Tensor) -> Tensor:
        expert = (x @ p["router"]).argmax(-1)
        offs = F.one_hot(expert, 8).sum(0).cumsum(0).to(torch.int32)
        order = expert.argsort(stable=True)
        made = F.grouped_mm(x[order], p["up"], offs=offs) + p["up"].sum()
        return torch.zeros_like(x).index_copy(0, order, made)

    sent = ftp.plans.send_tokens(layer, "ep")
    mesh = ftp.AbstractMesh((2,), ("ep",))
    step = ftp.spmd(sent, mesh, ({"router": P(), "up": P("ep")}, P("ep")), P("ep"))
    params = {"router": torch.randn(512, 8), "up": torch.randn(8, 512, 512)}
    with pytest.warns(ftp.errors.PlanWarning, match="are gathered"):
        found = step.lower(params, torch.randn(6, 512))
    assert not draws and len(found.assumptions) == 1


def test_an_equal_program_that_captures_other_values_is_tried_again(monkeypatch):
    gm = torch.fx.symbolic_trace(lambda x: x)
    next(iter(gm.graph.nodes)).meta["val"] = torch.empty(4, 2, device="meta")
    verdicts = iter([None, 0.5])
    monkeypatch.setattr(token_trial, "_known", {})
    monkeypatch.setattr(token_trial, "_tried", lambda *_: next(verdicts))
    layers: list[Any] = [SimpleNamespace(gm=gm, constants=[x]) for x in torch.eye(2)]
    found = [
        token_trial.mixed_by(layer, token_trial.TokenTrial(4, (4, 2)), lambda shape: layers[0])
        for layer in layers
    ]
    assert found == [None, 0.5]
