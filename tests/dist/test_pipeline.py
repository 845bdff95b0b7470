"""Pipelines on gloo processes."""

import os
import time
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after
from torch.distributed.device_mesh import DeviceMesh

import ftp
import ftp.runtime.pipelines.messages
from ftp import P
from tests.pipeline import test_stacks
from tests.pipeline.test_steps import tensor_parallel, zero_with_tp
from tests.pipeline.test_train_steps import adamw, train_step
from tests.support.launch import launch
from tests.support.staged_models import Model, plan_of


def on_ep(name):
    return P("ep") if name == "experts" else P()


def job(shape, axes, model, plan, batch_spec, pipe, rows, compile):
    ftp.init_process_group()
    spec_of = {"tp": tensor_parallel, "zero": zero_with_tp, "ep": on_ep, "": lambda name: P()}[plan]
    mesh, params = ftp.make_mesh(shape, axes, device_type="cpu"), model.params()
    specs = pipe.place(params, plan_of(params, spec_of), mesh)
    step = ftp.shard(
        model.loss, mesh, specs, batch_specs=batch_spec, pipeline=pipe, compile=compile
    )
    placed = ftp.device_put(params, mesh, specs)
    batch = ftp.device_put(model.batch(rows), mesh, batch_spec)
    for _ in range(2):
        loss, grads = step(placed, *batch)
    lowered: Any = step.lower(placed, *batch)
    measured = lowered.timeline.measured
    full = ftp.device_get(grads, mesh, specs)
    ftp.destroy_process_group()
    own = [tuple(x.shape) for x in optree.tree_leaves(placed)]
    return loss, optree.tree_leaves(full), own, len(measured)


CASES = {
    "pp": (
        2,
        (2,),
        ("pp",),
        Model(3, tied=True, scaled=True),
        "",
        P(),
        ftp.Pipeline("pp", 3),
        False,
    ),
    "interleaved": (
        2,
        (2,),
        ("pp",),
        Model(4, skips=True),
        "",
        P(),
        ftp.Pipeline("pp", 2, "interleaved", chunks=2),
        False,
    ),
    "compiled": (2, (2,), ("pp",), Model(2), "", P(), ftp.Pipeline("pp", 2), True),
    "zero": (
        4,
        (2, 2),
        ("pp", "dp"),
        Model(2, tied=True),
        "",
        P("dp"),
        ftp.Pipeline("pp", 2, "zero_bubble"),
        False,
    ),
    "tp": (4, (2, 2), ("tp", "pp"), Model(3), "tp", P(), ftp.Pipeline("pp", 4, "gpipe"), False),
    "experts": (
        4,
        (2, 2),
        ("pp", "ep"),
        Model(2, experts=3),
        "ep",
        P("ep"),
        ftp.Pipeline("pp", 2),
        False,
    ),
}
SLOW = {"compiled", "tp"}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_equals_one_device(name):
    n, shape, axes, model, plan, batch_spec, pipe, compile = CASES[name]
    rows = 2 * pipe.microbatches
    ranks = launch(job, n, shape, axes, model, plan, batch_spec, pipe, rows, compile, timeout=240)
    due_loss, due = model.on_one_device(pipe.microbatches, rows)
    for rank in ranks:
        assert rank.error is None, rank.error
        loss, grads, _, measured = rank.value
        torch.testing.assert_close(loss, due_loss, rtol=1e-12, atol=1e-12)
        for a, b in zip(grads, optree.tree_leaves(due), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert measured == len(pipe.actions(shape[axes.index("pp")])[0])
    held = [sum(torch.Size(s).numel() for s in rank.value[2]) for rank in ranks]
    assert max(held) < 0.8 * sum(x.numel() for x in optree.tree_leaves(model.params()))


def _out_of_order(ranks):
    dist.init_process_group("gloo")
    mesh, model, rows = DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp", "cp")), Model(2), 8
    pipe, params, batch_spec = ftp.Pipeline("pp", 2), model.params(), P(("dp", "cp"))
    specs = pipe.place(params, plan_of(params, lambda name: P()), mesh)
    step = ftp.shard(model.loss, mesh, specs, batch_specs=batch_spec, pipeline=pipe)
    batch = ftp.device_put(model.batch(rows), mesh, batch_spec)
    loss, grads = step(ftp.device_put(params, mesh, specs), *batch)
    whole = ftp.device_get(grads, mesh, specs)
    ftp.destroy_process_group()
    return loss, optree.tree_leaves(whole)


@pytest.mark.slow
def test_ranks_in_another_order_on_one_stage():
    """Collectives over both axes are merged where ranks ascend: here on no stage."""
    due_loss, due = Model(2).on_one_device(2, 8)
    for rank in launch(_out_of_order, 8, [[[0, 1], [2, 3]], [[4, 6], [5, 7]]]):
        assert rank.error is None, rank.error
        loss, grads = rank.value
        torch.testing.assert_close(loss, due_loss, rtol=1e-12, atol=1e-12)
        for a, b in zip(grads, optree.tree_leaves(due), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def ordered(model, shape, pipe):
    """A step whose pairs of ranks have process groups, as NCCL's: what each group was asked for."""
    ftp.runtime.pipelines.messages.uses_nccl = lambda mesh: True
    ftp.init_process_group()
    asked: dict[tuple[int, ...], list[Any]] = {}

    def noting(name):
        call = getattr(dist, name)

        def noted(data, rank, *, group, **kwargs):
            ranks = (dist.get_rank(), rank) if name == "isend" else (rank, dist.get_rank())
            asked.setdefault(ranks, []).append((len(data), group.group_name))
            return call(data, rank, group=group, **kwargs)

        setattr(dist, name, noted)

    noting("isend")
    noting("irecv")
    mesh, params = ftp.make_mesh(shape, ("pp", "dp"), device_type="cpu"), model.params()
    specs = pipe.place(params, P(), mesh)
    step = ftp.shard(model.loss, mesh, specs, batch_specs=P("dp"), pipeline=pipe)
    placed = ftp.device_put(params, mesh, specs)
    batch = ftp.device_put(model.batch(4 * pipe.microbatches), mesh, P("dp"))
    for _ in range(2):
        loss, grads = step(placed, *batch)
    full = ftp.device_get(grads, mesh, specs)
    ftp.destroy_process_group()
    return loss, optree.tree_leaves(full), asked


def of_kinds(kinds: Any, stage: int, numbers: str) -> list[ftp.Action]:
    pairs: Any = zip(kinds, numbers, strict=True)
    return [ftp.Action(kind, stage, int(i)) for kind, i in pairs]


# Ranks read in another order than is sent, in each direction.
CROSSED = [of_kinds("FFFBBB", 0, "012210"), of_kinds("FFFBBB", 1, "210012")]


@pytest.mark.parametrize(
    ("shape", "layers", "schedule", "chunks"),
    [
        ((2, 1), 2, CROSSED, 1),
        pytest.param((2, 2), 4, "interleaved", 2, marks=pytest.mark.slow),
        ((3, 1), 3, "zero_bubble", 1),
    ],
)
def test_a_group_is_asked_in_one_order_on_both_ranks(shape, layers, schedule, chunks):
    """NCCL pairs sends with receives by their order. Each direction has a group of its own."""
    model = Model(layers, tied=True, scaled=True, skips=True)
    pipe = ftp.Pipeline("pp", 3 if chunks == 1 else 2, schedule, chunks=chunks)
    ranks = launch(ordered, shape[0] * shape[1], model, shape, pipe, timeout=240)
    due_loss, due = model.on_one_device(pipe.microbatches, 4 * pipe.microbatches)
    asked: dict[tuple[int, ...], list[Any]] = {}
    for rank in ranks:
        assert rank.error is None, rank.error
        loss, grads, own = rank.value
        torch.testing.assert_close(loss, due_loss, rtol=1e-12, atol=1e-12)
        for a, b in zip(grads, optree.tree_leaves(due), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for pair, calls in own.items():
            asked.setdefault(pair, []).append(calls)
    assert all(sender == receiver for sender, receiver in asked.values())
    names = [{name for _, name in calls} for (calls, _) in asked.values()]
    assert all(len(found) == 1 for found in names)
    assert len(set.union(*names)) == len(asked)


def stacked(rows):
    ftp.init_process_group()
    mesh, params = ftp.make_mesh((2,), ("pp",), device_type="cpu"), test_stacks.params_of(3)
    pipe, opt = ftp.Pipeline("pp", 2), adamw()
    specs = pipe.place(params, test_stacks.specs_of(None), mesh)
    specs = (specs, opt.specs(params, specs))
    fn = train_step(test_stacks.loss, opt, None)
    step = ftp.spmd(fn, mesh, (*specs, P(), P()), pipeline=pipe)
    held: Any = ftp.device_put((params, opt.init(params)), mesh, specs)
    own = held[0]["layers"]["up"].shape[0]
    *held, loss, norm = step(*held, *ftp.device_put(rows, mesh, P()))
    full = ftp.device_get(tuple(held), mesh, specs)
    ftp.destroy_process_group()
    return own, (loss, norm, full)


def test_stacked_layers_over_two_ranks():
    rows, opt = test_stacks.batch_of(4), adamw()
    ranks = launch(stacked, 2, rows, timeout=240)
    params: Any = test_stacks.params_of(3)
    due = train_step(test_stacks.loss, opt, 2)(params, opt.init(params), *rows)
    for rank, layers in zip(ranks, (2, 1), strict=True):
        assert rank.error is None, rank.error
        own, (loss, norm, full) = rank.value
        assert own == layers
        for a, b in zip(
            optree.tree_leaves((*full, loss, norm)), optree.tree_leaves(due), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def training(model, shape, axes, pipe, steps):
    ftp.init_process_group()
    mesh = ftp.make_mesh(shape, axes, device_type="cpu")
    params, opt = model.params(), adamw()
    specs = pipe.place(params, plan_of(params, zero_with_tp), mesh)
    specs = (specs, opt.specs(params, specs))
    step = ftp.spmd(
        train_step(model.loss, opt, None), mesh, (*specs, P("dp"), P("dp")), pipeline=pipe
    )
    held = ftp.device_put((params, opt.init(params)), mesh, specs)
    batch = ftp.device_put(model.batch(4 * pipe.microbatches), mesh, P("dp"))
    for _ in range(steps):
        *held, loss, norm = step(*held, *batch)
    full = ftp.device_get(tuple(held), mesh, specs)
    ftp.destroy_process_group()
    return loss, norm, full


def test_training_equals_one_device():
    model, pipe, opt = Model(2, tied=True), ftp.Pipeline("pp", 2, "zero_bubble"), adamw()
    ranks = launch(training, 4, model, (2, 2, 1), ("pp", "dp", "tp"), pipe, 3, timeout=240)
    due: Any = (model.params(), opt.init(model.params()))
    one_device = train_step(model.loss, opt, 2)
    for _ in range(3):
        *due, loss, norm = one_device(*due, *model.batch(8))
    for rank in ranks:
        assert rank.error is None, rank.error
        torch.testing.assert_close(rank.value[:2], (loss, norm), rtol=1e-11, atol=1e-12)
        for a, b in zip(
            optree.tree_leaves(rank.value[2]), optree.tree_leaves(tuple(due)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def dying(rank_to_die, shape=(2, 2)):
    """A rank's error after another one has died, and the seconds until it came."""
    ftp.init_process_group()
    model, pipe = Model(shape[0]), ftp.Pipeline("pp", 4)
    mesh, params = ftp.make_mesh(shape, ("pp", "dp"), device_type="cpu"), model.params()
    specs = pipe.place(params, P(), mesh)
    step = ftp.shard(model.loss, mesh, specs, batch_specs=P("dp"), pipeline=pipe)
    placed = ftp.device_put(params, mesh, specs)
    batch = ftp.device_put(model.batch(8), mesh, P("dp"))
    for _ in range(2):
        step(placed, *batch)
    if int(os.environ["RANK"]) == rank_to_die:
        os._exit(9)
    begin = time.monotonic()
    try:
        step(placed, *batch)
    except ftp.errors.CollectiveError as e:
        return str(e), time.monotonic() - begin
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("dead", "shape"),
    slow_after(1, [(1, (2, 2)), (2, (2, 2)), *((dead, (4, 1)) for dead in range(4))]),
)
def test_a_dead_rank_of_a_stage_is_named_by_all(dead, shape):
    ranks = launch(dying, 4, dead, shape, timeout=90)
    for number, rank in enumerate(ranks):
        if number != dead:
            assert rank.error is None, rank.error
            error, seconds = rank.value
            assert f"rank {dead}" in error.lower(), error
            assert seconds < 20


def caught(call):
    try:
        call()
    except ftp.errors.FtpError as e:
        return f"{type(e).__name__}: {e}"
    return None


def disagreeing(what, odd):
    """The error of a rank where ``odd`` alone has another schedule, program or batch."""
    ftp.init_process_group()
    mesh = ftp.make_mesh((2, 2), ("pp", "dp"), device_type="cpu")
    model, here = Model(2), int(os.environ["RANK"]) == odd
    pipe = ftp.Pipeline("pp", 2, "gpipe" if here and what == "schedule" else "1f1b")
    factor = 2.0 if here and what == "program" else 1.0
    specs = pipe.place(model.params(), P(), mesh)
    step = ftp.shard(
        lambda *args: factor * model.loss(*args), mesh, specs, batch_specs=P("dp"), pipeline=pipe
    )
    placed = ftp.device_put(model.params(), mesh, specs)
    same = ftp.device_put(model.batch(8), mesh, P("dp"))
    # A rank makes its own rows.
    batch = tuple(x[:2] for x in same) if here and what == "batch" else same
    return caught(lambda: step(placed, *batch))


@pytest.mark.parametrize(
    ("what", "odd", "said"),
    [
        ("schedule", 1, "on the program of call 1: rank 1 differs from"),
        pytest.param("program", 3, "rank 3 differs from", marks=pytest.mark.slow),
        ("batch", 2, "rank 0 holds (4, 5), rank 2 (2, 5)"),
    ],
)
def test_a_rank_that_differs_is_named_by_ranks_of_every_stage(what, odd, said):
    for rank in launch(disagreeing, 4, what, odd, timeout=90):
        assert rank.error is None, rank.error
        assert rank.value.startswith("MismatchError: ") and said in rank.value, rank.value


def drifting():
    """What `check_replicas` says of placed parameters before and after rank 3's copy changes."""
    ftp.init_process_group()
    mesh = ftp.make_mesh((2, 2), ("pp", "dp"), device_type="cpu")
    model, pipe = Model(2, scaled=True), ftp.Pipeline("pp", 2)
    specs = pipe.place(model.params(), P(), mesh)
    held = ftp.device_put(model.params(), mesh, specs)
    found = [caught(lambda: ftp.check_replicas(held, mesh, specs))]
    if int(os.environ["RANK"]) == 3:
        held["layers"][1]["up"] += 1e-9
    found.append(caught(lambda: ftp.check_replicas(held, mesh, specs, step=7)))
    ftp.destroy_process_group()
    return found


def test_copies_of_a_stage_that_differ_are_named():
    for rank in launch(drifting, 4, timeout=90):
        assert rank.error is None, rank.error
        good, bad = rank.value
        assert good is None
        assert bad.startswith("ReplicaError: ") and bad.count("['layers'][1]['up']") == 1
        assert "is not the same at step 7 on ranks that share it: rank 3 differs from rank 2" in bad
