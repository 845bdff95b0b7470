"""Layers of experts in which a token's result depends on other tokens: what is refused by the ops,
what after a trial on drawn tokens, and what is an assumption.
"""

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropless import DIM, FORMS, drawn, loop, routed
from few_or_many import slow_unless

import ftp
from ftp import P
from tests.plans.test_send_tokens import PLANS, check, loss_of

# By the ops.


def experts_choose(p: Any, x: torch.Tensor) -> torch.Tensor:
    scores, tokens = (x @ p["router"]).softmax(-1).t().topk(3, 1)
    return of_chosen(p, x, scores, tokens)


def experts_choose_by_sorting(p: Any, x: torch.Tensor) -> torch.Tensor:
    scores = (x @ p["router"]).softmax(-1).t()
    tokens = scores.argsort(1, descending=True)[:, :3]
    return of_chosen(p, x, scores.gather(1, tokens), tokens)


def of_chosen(p: Any, x: torch.Tensor, scores: Any, tokens: Any) -> torch.Tensor:
    rows, offs = tokens.flatten(), 3 * torch.arange(1, 5, dtype=torch.int32)
    y = F.silu(F.grouped_mm(x[rows], p["up"], offs=offs))
    y = F.grouped_mm(y, p["down"], offs=offs)
    return torch.zeros_like(x).index_add(0, rows, y * scores.flatten()[:, None])


def capacity(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    chosen = F.one_hot(expert, 4)
    place = (chosen.cumsum(0) * chosen).sum(1)
    return FORMS["torchtitan_form"](p, x, 1) * (place <= 3)[:, None]


def load(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    return FORMS["transformers_form"](p, x, 1) / F.one_hot(expert, 4).sum(0)[expert][:, None]


def mean_of_an_expert(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    sums = x.new_zeros(4, x.shape[1]).index_add(0, expert, x)
    return FORMS["megatron_form"](p, x, 1) + sums[expert]


def sinkhorn(p: Any, x: torch.Tensor) -> torch.Tensor:
    scores = (x @ p["router"]).exp()
    expert = (scores / scores.sum(0)).argmax(1)
    order = expert.argsort(stable=True)
    offs = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.grouped_mm(x[order], p["up"], offs=offs), p["down"], offs=offs)
    return torch.zeros_like(x).index_copy(0, order, y)


def of_routed(p: Any, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    order = expert.argsort(stable=True)
    offs = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.grouped_mm(x[order], p["up"], offs=offs), p["down"], offs=offs)
    return torch.zeros_like(x).index_copy(0, order, y)


def place_of(expert: torch.Tensor) -> torch.Tensor:
    """How many tokens before have a token's expert."""
    chosen = F.one_hot(expert, 4)
    return (chosen.cumsum(0) * chosen).sum(1) - 1


def surplus_to_the_next(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    return of_routed(p, x, torch.where(place_of(expert) < 2, expert, (expert + 1) % 4))


def to_the_idlest(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    return of_routed(p, x, (expert + F.one_hot(expert, 4).sum(0).argmin()) % 4)


MIXING = {
    experts_choose: "topk",
    experts_choose_by_sorting: "sort",
    capacity: "mul",
    load: "div",
    mean_of_an_expert: "index_add",
    sinkhorn: "sum",
    surplus_to_the_next: "sort",
    to_the_idlest: "sort",
}
NORMS = {
    "centred": lambda x: x - x.mean(0),
    "scaled": lambda x: x / x.abs().max(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax over tokens": lambda x: x.softmax(0),
    "attention": lambda x: (x @ x.t()).softmax(-1) @ x,
    "running sums": lambda x: x.cumsum(0),
    "first token": lambda x: x - x[:1],
}


def test_a_layer_that_mixes_positions_of_a_sequence_is_not_refused():
    """Tokens are cut along the batch alone: attention within a sequence is of one row."""
    params, x = drawn(4, 12, None, 0)
    rows = x.view(6, 2, -1)

    def layer(p, x, form):
        q = x.unsqueeze(1)
        y = x + F.scaled_dot_product_attention(q, q, q).squeeze(1) + x.mean(1, keepdim=True)
        return form(p, y.flatten(0, 1), 2).view_as(x)

    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    sent = ftp.plans.send_tokens(lambda p, x: layer(p, x, FORMS["torchtitan_form"]), "ep")
    step = ftp.shard(loss_of(sent), ftp.simulated_mesh(2, "ep"), specs, batch_specs=P("ep"))
    plain = loss_of(lambda p, x: layer(p, x, loop))
    grads, value = torch.func.grad_and_value(plain)(params, rows)
    torch.testing.assert_close(step(params, rows), (value, grads), rtol=1e-10, atol=1e-10)


def test_a_layer_that_mixes_tokens_is_refused():
    params, x = drawn(4, 6, None, 0)
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    form = FORMS["transformers_form"]
    layers = {
        **MIXING,
        **{(lambda p, x, f=f: form(p, f(x), 2)): "" for f in NORMS.values()},
        **{(lambda p, x, f=f: f(form(p, x, 2))): "" for f in NORMS.values()},
    }
    for layer, op in layers.items():
        sent = ftp.plans.send_tokens(layer, "ep")
        step = ftp.spmd(sent, ftp.simulated_mesh(2, "ep"), (specs, P("ep")), P("ep"))
        with pytest.raises(
            ftp.errors.SpecError,
            match=rf"result depends on other tokens, by \w+\.{op}[^ ]* at .*test_mixed",
        ):
            step(params, x)


# By a trial, where ops do not tell.


def surplus_is_dropped(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    kept = torch.where(place_of(expert) < 2, len(x), torch.arange(len(x)))
    return F.pad(of_routed(p, x, expert), (0, 0, 0, 1)).index_fill(0, kept, 0.0)[:-1]


def surplus_reads_a_spare_row(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    kept = torch.where(place_of(expert) < 2, torch.arange(len(x)), len(x))
    return F.pad(of_routed(p, x, expert), (0, 0, 0, 1)).index_select(0, kept)


def surplus_goes_to_a_spare_row(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    kept = torch.where(place_of(expert) < 2, torch.arange(len(x)), len(x))
    return x.new_zeros(len(x) + 1, DIM).index_copy(0, kept, of_routed(p, x, expert))[:-1]


def of_ends(p: Any, x: torch.Tensor, ends: Any, is_sorted: bool = True) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    order = expert.argsort(stable=True) if is_sorted else torch.arange(len(x))
    offs = ends(F.one_hot(expert, 4).sum(0), len(x)).to(torch.int32)
    y = F.silu(F.grouped_mm(x[order], p["up"], offs=offs))
    return torch.zeros_like(x).index_copy(0, order, F.grouped_mm(y, p["down"], offs=offs))


def counts_are_clamped(p: Any, x: torch.Tensor) -> torch.Tensor:
    return of_ends(p, x, lambda counts, n: counts.clamp(max=3).cumsum(0))


def every_expert_gets_as_many(p: Any, x: torch.Tensor) -> torch.Tensor:
    return of_ends(p, x, lambda counts, n: torch.arange(1, 5) * n // 4)


def rows_are_not_sorted(p: Any, x: torch.Tensor) -> torch.Tensor:
    return of_ends(p, x, lambda counts, n: counts.cumsum(0), is_sorted=False)


def left_where_sorted(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    return of_routed(p, x, expert)[expert.argsort(stable=True)]


def by_the_place(p: Any, x: torch.Tensor) -> torch.Tensor:
    return of_routed(p, x, torch.arange(len(x)) % 4)


def by_the_expert_before(p: Any, x: torch.Tensor) -> torch.Tensor:
    return of_routed(p, x, routed(p, x, 1)[1][:, 0].roll(1, 0))


def with_the_token_before(p: Any, x: torch.Tensor) -> torch.Tensor:
    return of_routed(p, x + x.roll(1, 0), routed(p, x, 1)[1][:, 0])


def with_the_token_opposite(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = of_routed(p, x, routed(p, x, 1)[1][:, 0])
    return y + 0.1 * y.flip(0)


def of_the_number_of_tokens(p: Any, x: torch.Tensor) -> torch.Tensor:
    return of_routed(p, x, routed(p, x, 1)[1][:, 0]) / len(x)


def with_dropout(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Each rank would draw the same mask for its tokens."""
    return FORMS["torchtitan_form"](p, ftp.random.dropout(p["key"], x, 0.5), 2)


UNTOLD = (
    surplus_is_dropped,
    surplus_reads_a_spare_row,
    surplus_goes_to_a_spare_row,
    counts_are_clamped,
    every_expert_gets_as_many,
    rows_are_not_sorted,
    left_where_sorted,
    by_the_place,
    by_the_expert_before,
    with_the_token_before,
    with_the_token_opposite,
    of_the_number_of_tokens,
    with_dropout,
)


@pytest.mark.cases_by_default(5)
@pytest.mark.parametrize("tokens", [12, 40])
@pytest.mark.parametrize("layer", UNTOLD)
def test_what_ops_do_not_tell_is_refused_after_a_trial(layer, tokens):
    params, x = drawn(4, tokens, None, 2)
    params["key"] = ftp.random.key(0)
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep"), "key": P()}
    sent = ftp.plans.send_tokens(layer, "ep")
    step = ftp.spmd(sent, ftp.simulated_mesh(2, "ep"), (specs, P("ep")), P("ep"))
    with pytest.raises(
        ftp.errors.SpecError,
        match="or on its position: the layer",
    ):
        step(params, x)


def more_counts_are_clamped(p: Any, x: torch.Tensor) -> torch.Tensor:
    expert = routed(p, x, 1)[1][:, 0]
    order = expert.argsort(stable=True)
    offs = F.one_hot(expert, 4).sum(0).clamp(max=20).cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.grouped_mm(x[order], p["up"], offs=offs), p["down"], offs=offs)
    return torch.zeros_like(x).index_copy(0, order, y)


def many_tokens_are_centred(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = of_routed(p, x, routed(p, x, 1)[1][:, 0])
    return y - y.mean(0) if x.shape[0] > 30 else y


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("layer", [more_counts_are_clamped, many_tokens_are_centred])
def test_a_layer_that_mixes_many_tokens_is_refused_for_dynamic_sizes_too(layer):
    """The first call has fewer tokens, and a rank has fewer than all."""
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    sent, dims = ftp.plans.send_tokens(layer, "ep"), (None, {0: torch.export.Dim("S")})
    mesh = ftp.simulated_mesh(2, "ep")
    step = ftp.spmd(sent, mesh, (specs, P("ep")), P("ep"), dynamic_shapes=dims)
    one = ftp.spmd(layer, ftp.simulated_mesh(1, "ep"), (P(), P()), P())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first layer is planned for each size
        params, x = drawn(4, 8, 0, 2)
        torch.testing.assert_close(step(params, x), one(params, x))
    with pytest.raises(ftp.errors.SpecError, match="result depends on other tokens"):
        step(*drawn(4, 40, 0, 2))
    assert bool(step.shapes.plans) == (layer is many_tokens_are_centred)


def large_tokens_are_mixed(p: Any, x: torch.Tensor) -> torch.Tensor:
    mixed = torch.where(x[:, :1] > 9, x.flip(0), x)
    return of_routed(p, mixed, routed(p, x, 1)[1][:, 0])


def test_what_no_trial_shows_is_an_assumption_that_can_be_checked():
    params, x = drawn(4, 12, None, 2)
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    sent = ftp.plans.send_tokens(large_tokens_are_mixed, "ep")
    mesh, loss = ftp.simulated_mesh(2, "ep"), loss_of(lambda p, x: sent(p, 30 * x))
    claims = ftp.shard(loss, mesh, specs, batch_specs=P("ep")).lower(params, x).assumptions
    said = r"test_mixed_tokens\.py:\d+.*a token's result does not depend on other tokens"
    assert [bool(re.search(said, claim)) for claim in claims] == [True]
    step = ftp.shard(loss, mesh, specs, batch_specs=P("ep"), check_inputs=True)
    with pytest.raises(ftp.errors.InputError, match=said + ".*: this does not hold"):
        step(params, x)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("form", "plan"),
    slow_unless(
        lambda form, plan: list(PLANS).index(plan) == list(FORMS).index(form) < 2,
        itertools.product(FORMS, PLANS),
    ),
)
def test_right_layers_hold_the_assumption(form, plan):
    check(form, (6, 7, 2, None, 0), plan, check_inputs=True)


def test_the_assumption_leaves_no_work_where_it_is_not_checked():
    params, x = drawn(4, 6, None, 0)
    calls = []

    def layer(p, x):
        calls.append(len(x))
        return FORMS["torchtitan_form"](p, x, 2)

    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    loss = loss_of(ftp.plans.send_tokens(layer, "ep"))
    mesh, counts = ftp.simulated_mesh(2, "ep"), []
    for is_checked in (False, False, True):
        calls.clear()
        step = ftp.shard(loss, mesh, specs, batch_specs=P("ep"), check_inputs=is_checked)
        step.lower(params, x)
        counts.append(calls.count(6))
    # All tokens: in a trial, which equal layers share, in the trace that is compared with that of a
    # rank's, and then only where it is checked.
    assert counts == [counts[0], 1, 2] and counts[0] <= 2


def _scaled(p: Any, x: torch.Tensor, scale: Any) -> torch.Tensor:
    return FORMS["transformers_form"](p, x, 1) * scale


ASKING = {
    "if": lambda p, x: _scaled(p, x, 2 if x.shape[0] > 40 else 1),
    "int": lambda p, x: _scaled(p, x, 2 if int(x.shape[0]) > 40 else 1),
    "range": lambda p, x: sum(_scaled(p, x, 1) for _ in range(x.shape[0] // 40 + 1)),
    "one size": lambda p, x: _scaled(p, x, 2 if x.shape[0] == 64 else 1),
    "tensor": lambda p, x: _scaled(p, x, torch.tensor(2.0 if x.shape[0] > 40 else 1.0)),
}
ALLOWED = {
    "few": lambda p, x: _scaled(p, x, 2 if x.shape[0] > 5 else 1),
    "zeros": lambda p, x: _scaled(p, x, 1) + torch.zeros(int(x.shape[0]), 1),
    "padded": lambda p, x: F.pad(_scaled(p, x, 1), (0, 0, 0, -x.shape[0] % 48))[: x.shape[0]],
}


@pytest.mark.parametrize("name", [*ASKING, *ALLOWED])
def test_a_layer_that_goes_another_way_for_all_tokens_than_for_a_ranks(name):
    layer = {**ASKING, **ALLOWED}[name]
    p, x = drawn(4, 64, None, 0)
    sent = ftp.plans.send_tokens(layer, "ep")
    specs = {key: P("ep") if value.ndim == 3 else P() for key, value in p.items()}
    mesh = ftp.simulated_mesh((2,), ("ep",))
    step = ftp.spmd(lambda p, x: sent(p, x), mesh, (specs, P("ep")), P("ep"))
    if name in ALLOWED:
        torch.testing.assert_close(step(p, x), loop(p, x, 1) * (2 if name == "few" else 1))
    else:
        said = r"by their number, which .* for all 64 than for the 32 of a rank"
        with pytest.raises(ftp.errors.SpecError, match=said):
            step(p, x)
