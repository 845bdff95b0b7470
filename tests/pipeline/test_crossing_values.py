"""Programs whose values cross stages in other ways than from layer to layer equal one device."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.errors import InputError, PlanWarning, SpecError

BINARY = {
    "add": torch.add,
    "gate": lambda u, v: u * v.sigmoid(),
    "attend": lambda u, v: (u @ v.transpose(1, 2)).softmax(-1) @ v,
    "norm": lambda u, v: u * (v.square().mean(-1, keepdim=True) + 1).rsqrt(),
    "mean": lambda u, v: u + v.mean(),
    "cat": lambda u, v: torch.cat([u, v], -1)[..., 3:9],
    "stop": lambda u, v: u.flip(1) - v.detach(),
    "mask": lambda u, v: torch.where(v > 0, u, 0.0),
    "view": lambda u, v: u.flatten(0, 1).view_as(u) * 0.9,
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64) / 2


@st.composite
def programs(draw: st.DrawFn) -> tuple[Any, list[int], list[Any]]:
    """Parameters, the stage of each, and ops: a name or a parameter, and two values."""
    stages = draw(st.integers(2, 4))
    placed = draw(st.permutations(range(stages))) if draw(st.booleans()) else list(range(stages))
    placed = sorted(placed + draw(st.lists(st.integers(0, stages - 1), max_size=3)))
    if draw(st.booleans()):
        placed = draw(st.permutations(placed))
    shapes = [draw(st.sampled_from([(6, 6), (6,), (1,)])) for _ in placed]
    params = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    ops: list[Any] = []
    value = st.integers(0, 12)
    for i in range(len(placed)):
        found = draw(st.lists(st.tuples(st.sampled_from(sorted(BINARY)), value, value), max_size=2))
        ops += [*found, (i, draw(value), draw(value))]
    return params, placed, ops


def loss_of(ops: list[Any]) -> Any:
    def loss(params, x, y):
        values = [x, y]
        for op, a, b in ops:
            # The newest value in half of the cases.
            u, v = (values[-1 if k % 2 else k // 2 % len(values)] for k in (a, b))
            if isinstance(op, str):
                values.append(BINARY[op](u, v))
            else:
                w = params[op]
                values.append(u @ w if w.ndim == 2 else u * w + v)
        return values[-1].square().mean() + sum(x.mean() for x in values[2::3])

    return loss


def check(loss: Any, params: Any, batch: Any, mesh: Any, specs: Any, pipe: Any) -> Any:
    step = ftp.shard(loss, mesh, specs, pipeline=pipe)
    one_device: Any = ftp.optim.accumulate(torch.func.grad_and_value(loss), pipe.microbatches)
    due, due_loss = one_device(params, *batch)
    torch.testing.assert_close(step(params, *batch), (due_loss, due), rtol=1e-11, atol=1e-11)
    return step.lower(params, *batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ftp.errors.PlanWarning")  # stages that do nothing
@given(case=programs(), schedule=st.sampled_from(["1f1b", "zero_bubble"]))
@settings(max_examples=80)
def test_any_program_at_any_stages(case, schedule):
    params, placed, ops = case
    stages = max(placed) + 1
    held = [[f"{i}" for i, at in enumerate(placed) if at == stage] for stage in range(stages)]
    pipe, mesh = ftp.Pipeline("pp", 2, schedule, stages=held), ftp.simulated_mesh(stages, "pp")
    batch = drawn(4, 3, 6, seed=90), drawn(4, 3, 6, seed=91)
    check(loss_of(ops), params, batch, mesh, pipe.place(params, P(), mesh), pipe)


def encoder_and_decoder(params, x, y):
    """The decoder's first layer compares two values of the encoder's stage."""
    e, d = params["emb"][x], params["emb"][y]
    e = e + torch.tanh(e @ params["encoder"])
    d = d + torch.tanh(d @ params["decoder"]) + (d @ e.transpose(1, 2)).softmax(-1) @ e
    return (d @ params["emb"].t()).square().mean()


def test_an_op_that_stays_keeps_what_it_reads():
    """Views of the decoder's input go on to its stage alone if the product that reads them does."""
    params = {"emb": drawn(7, 6), "encoder": drawn(6, 6), "decoder": drawn(6, 6, seed=1)}
    batch = torch.randint(7, (2, 4, 3)).unbind()
    pipe, mesh = ftp.Pipeline("pp", 2, stages=[["e*"], ["decoder"]]), ftp.simulated_mesh(2, "pp")
    specs = pipe.place(params, P(), mesh)
    lowered = check(encoder_and_decoder, params, batch, mesh, specs, pipe)
    with pytest.raises(InputError, match=r"certify takes a program, not a LoweredPipeline"):
        ftp.certify(lowered)
    page = ftp.visualize(lowered)
    assert str(page) == str(lowered) and "pipeline of 2 stages" in page.html


def test_a_stage_that_waits_for_a_later_one_is_warned_of():
    params = {"first": drawn(6, 6), "late": drawn(7, 6)}

    def loss(params, x):
        return (params["late"][x] @ params["first"]).square().mean()

    pipe, mesh = ftp.Pipeline("pp", 1, stages=[["first"], ["late"]]), ftp.simulated_mesh(2, "pp")
    step = ftp.shard(loss, mesh, pipe.place(params, P(), mesh), pipeline=pipe)
    text = r"Stage 0 of the pipeline computes nothing: params\['first'\], .* after params\['late'\]"
    with pytest.warns(PlanWarning, match=text):
        step.lower(params, torch.randint(7, (2, 3)))
    frozen = pipe.place(params, P(), mesh)
    step = ftp.shard(
        lambda p, q, x: loss(q, x), mesh, frozen, batch_specs=(frozen, P()), pipeline=pipe
    )
    with pytest.raises(
        SpecError, match=r"Parameters without a gradient are arguments of ftp\.spmd"
    ):
        step.lower(params, params, torch.randint(7, (2, 3)))


def test_per_rank_code_finds_the_mesh_of_its_stage():
    mesh, pipe = ftp.simulated_mesh((2, 2), ("pp", "tp")), ftp.Pipeline("pp", 2)
    params = {"layers": [drawn(6, 6, seed=i) for i in range(2)]}

    def rank_code(x, w):
        return ftp.axis.all_reduce((x @ w).square().sum(-1, keepdim=True), "tp")

    def loss_with(layer):
        def loss(params, x):
            for w in params["layers"]:
                x = x + layer(x, w)
            return x.square().mean()

        return loss

    by_rank = loss_with(ftp.local(rank_code, in_specs=(P(), P(None, "tp")), out_specs=P()))
    plain = loss_with(lambda x, w: (x @ w).square().sum(-1, keepdim=True))
    step = ftp.shard(by_rank, mesh, pipe.place(params, P(None, "tp"), mesh), pipeline=pipe)
    one_device: Any = ftp.optim.accumulate(torch.func.grad_and_value(plain), 2)
    due, due_loss = one_device(params, drawn(4, 6))
    torch.testing.assert_close(step(params, drawn(4, 6)), (due_loss, due), rtol=1e-11, atol=1e-11)
