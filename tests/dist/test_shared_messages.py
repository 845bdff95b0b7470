"""Messages between stages through shared memory."""

import os
import time
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after

import ftp
from ftp import P
from ftp.runtime.pipelines.shared_messages import message_queues
from ftp.sharding.mesh import resolve
from tests.dist.test_pipeline import dying
from tests.pipeline.test_steps import zero_with_tp
from tests.support.launch import launch
from tests.support.staged_models import Model, plan_of

ASKED = {"FTP_SHM": "1"}
CASES: dict[str, Any] = {
    "interleaved": (
        (2,),
        ("pp",),
        Model(4, skips=True),
        ftp.Pipeline("pp", 4, "interleaved", chunks=2),
    ),
    "zero bubble, ZeRO-3": (
        (2, 2, 1),
        ("pp", "dp", "tp"),
        Model(3),
        ftp.Pipeline("pp", 3, "zero_bubble"),
    ),
    "a list of actions": (
        (2,),
        ("pp",),
        Model(2),
        ftp.Pipeline(
            "pp",
            2,
            [
                [ftp.Action(k, 0, i) for k, i in (("F", 0), ("F", 1), ("B", 1), ("B", 0))],
                [ftp.Action(k, 1, i) for k, i in (("F", 1), ("F", 0), ("B", 0), ("B", 1))],
            ],
        ),
    ),
}


def job(name: str) -> Any:
    ftp.init_process_group()
    shape, axes, model, pipe = CASES[name]
    mesh, params, rows = ftp.make_mesh(shape, axes, device_type="cpu"), model.params(), P()
    plan: Any = P()
    if "dp" in axes:
        rows, plan = P("dp"), plan_of(params, zero_with_tp)
    specs = pipe.place(params, plan, mesh)
    step = ftp.shard(model.loss, mesh, specs, batch_specs=rows, pipeline=pipe)
    placed = ftp.device_put(params, mesh, specs)
    batch = ftp.device_put(model.batch(4 * pipe.microbatches), mesh, rows)
    sends: list[Any] = []
    isend = dist.isend
    dist.isend = lambda *args, **kwargs: sends.append(args) or isend(*args, **kwargs)
    for _ in range(3):
        loss, grads = step(placed, *batch)
    dist.isend = isend
    full = ftp.device_get(grads, mesh, specs)
    ftp.destroy_process_group()
    return loss, optree.tree_leaves(full), len(sends)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device_without_sockets(name: str):
    shape, _, model, pipe = CASES[name]
    due_loss, due = model.on_one_device(pipe.microbatches, 4 * pipe.microbatches)
    ranks = launch(job, torch.Size(shape).numel(), name, timeout=120, env=ASKED)
    for rank in ranks:
        assert rank.error is None, rank.error
        loss, grads, sends = rank.value
        torch.testing.assert_close(loss, due_loss, rtol=1e-12, atol=1e-12)
        for a, b in zip(grads, optree.tree_leaves(due), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert sends == 0
        assert "FTP_SHM" not in rank.stderr  # no warning that sockets are used


def messages_of(step: int, number: int) -> list[torch.Tensor]:
    base = torch.arange(6.0).reshape(2, 3).t() + 100 * step + 10 * number
    return [base, torch.tensor([number % 2 == 0]), torch.empty(0, 4), torch.tensor(number)]


def queueing(room: int) -> None:
    """Messages awaited in another order than asked for; the reader comes late, then the sender."""
    ftp.init_process_group()
    mesh = resolve(ftp.make_mesh((2,), ("pp",), device_type="cpu"))
    size = sum(x.numel() * x.itemsize for x in messages_of(0, 0))
    queues = message_queues(mesh, "pp", {(0, 1): (room, size), (1, 0): (room, size)})
    rank = dist.get_rank()
    for step in range(4):
        if step % 2 == rank:
            time.sleep(0.3)
        for pair in ((0, 1), (1, 0)):
            due = [messages_of(step, number) for number in range(6)]
            if rank == pair[0]:
                for message in due:
                    queues[pair].send(message)
            else:
                found = [[torch.zeros(x.shape, dtype=x.dtype) for x in of] for of in due]
                coming = [queues[pair].receive(into) for into in found]
                for number in (1, 0, 3, 2, 5, 4):
                    coming[number].wait()
                    assert all(map(torch.equal, found[number], due[number])), (step, number)
    ftp.destroy_process_group()


@pytest.mark.parametrize("room", slow_after(1, [1, 2, 7]))
def test_messages_of_a_queue(room: int):
    for rank in launch(queueing, 2, room, timeout=60, env=ASKED):
        assert rank.error is None, rank.error


@pytest.mark.parametrize("dead", slow_after(1, [0, 3]))
def test_a_dead_rank_is_named_by_all(dead: int):
    for number, rank in enumerate(launch(dying, 4, dead, timeout=90, env=ASKED)):
        if number != dead:
            assert rank.error is None, rank.error
            error, seconds = rank.value
            assert f"rank {dead}" in error.lower(), error
            assert seconds < 20


def stopping() -> Any:
    """A rank that never comes: the error of the one that waits for its message."""
    ftp.init_process_group(timeout=2.0)
    mesh = resolve(ftp.make_mesh((2,), ("pp",), device_type="cpu"))
    queues = message_queues(mesh, "pp", {(0, 1): (1, 8)})
    begin = time.monotonic()
    try:
        if os.environ["RANK"] == "1":
            queues[0, 1].receive([torch.zeros(1, dtype=torch.int64)]).wait()
        else:
            time.sleep(4)
    except dist.DistBackendError as e:
        return str(e), time.monotonic() - begin
    return "", 0.0


def test_a_message_that_never_comes_is_an_error_after_the_timeout():
    ranks = launch(stopping, 2, timeout=60, env=ASKED)
    assert [rank.error for rank in ranks] == [None, None]
    error, seconds = ranks[1].value
    assert error == (
        "The message between stages through shared memory failed: a rank did not come within"
        " 0:00:02."
    )
    assert 2 <= seconds < 4
