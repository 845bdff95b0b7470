"""The peak memory of a stage's rank is what the CPU's allocator measures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from few_or_many import slow_after
from torch.profiler import ProfilerActivity, profile

import ftp
from ftp import P
from ftp.runtime.pipelines.program import PipelineProgram
from ftp.runtime.pipelines.worker import Worker
from tests.support.models import LlamaConfig, build, lm_batch, lm_loss


class Buffers:
    """Messages of a rank that is alone: it receives what it asks for, unwritten, and holds what it
    sends until that has been read for certain.
    """

    def __init__(self, program: PipelineProgram, rank: int):
        self.program, self.rank = program, rank
        self.left = {pair: list(keys) for pair, keys in program._order.items()}
        self.received: dict[Any, list[torch.Tensor]] = {}
        self.sent: dict[Any, list[torch.Tensor]] = {}

    def send(self, key, values, rank):
        assert self.left[self.rank, rank].pop(0) == key
        self.sent[key] = values

    def release(self, key):
        del self.sent[key]

    def expect(self, key, rank):
        left = self.left[rank, self.rank]
        while key in left:
            coming = left.pop(0)
            self.received[coming] = self.program._empty(coming)

    def is_here(self, key):
        return True

    def take(self, key):
        return self.received.pop(key)


def run(program: PipelineProgram, rank: int, inputs: list[torch.Tensor]) -> Any:
    program.__dict__["_within"] = {}  # there are no other axes
    posts: Any = Buffers(program, rank)
    worker = Worker(program, rank, inputs, posts, lambda held: held.shape)
    assert not list(worker.run())
    return worker.outputs([torch.zeros(()) for _ in program.made.stages.results])


def measured(program: PipelineProgram, rank: int) -> tuple[int, int]:
    """Bytes that the allocator handed out at most during a step of one rank, and its inputs'."""
    inputs = [torch.zeros(h.shape, dtype=h.dtype) for h in (*program.leaves, *program.batch)]
    for leaf, holder in enumerate(program.stage_of):
        if holder is not None and holder % program.ranks != rank:
            inputs[leaf] = torch.zeros(0)
    run(program, rank, inputs)
    return most_allocated(lambda: run(program, rank, inputs)), sum(
        x.numel() * x.itemsize for x in inputs
    )


def most_allocated(run: Callable[[], Any]) -> int:
    """Bytes that the allocator handed out at most during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        outputs = run()
    del outputs
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()  # type: ignore[attr-defined]
            peak = max(peak, live)
    return peak


def lowered(schedule: Any, microbatches: int) -> Any:
    cfg = LlamaConfig(vocab=128, dim=32, layers=4, heads=4, hidden=80)
    fn, params = ftp.functionalize(build(cfg))
    chunks = 2 if schedule == "interleaved" else 1
    pipe = ftp.Pipeline("pp", microbatches, schedule, chunks=chunks)
    mesh = ftp.simulated_mesh((2,), ("pp",))
    step = ftp.shard(lm_loss(fn), mesh, pipe.place(params, P(), mesh), pipeline=pipe)
    return step.lower(params, lm_batch(cfg, 2 * microbatches, 32))


NUMBERS = 64  # bytes: losses, which a report leaves out


def of_kinds(kinds: str, stage: int, numbers: str) -> list[ftp.Action]:
    pairs: Any = zip(kinds, numbers, strict=True)
    return [ftp.Action(kind, stage, int(i)) for kind, i in pairs]


# The second rank reads last what the first one sends first, and the other way round.
CROSSED = [of_kinds("FFFFBBBB", 0, "01233210"), of_kinds("FFFFBBBB", 1, "32100123")]


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    "schedule",
    [
        *slow_after(2, ["1f1b", "interleaved", "gpipe", "zero_bubble"]),
        pytest.param(CROSSED, id="crossed", marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_what_the_allocator_measures(schedule):
    report = lowered(schedule, 4)
    for rank in range(2):
        peak, inputs = measured(report._program, rank)
        assert abs(report.memory_by_rank[rank] - inputs - peak) <= NUMBERS


def test_one_f_one_b_holds_as_many_microbatches_as_stages():
    """More of them take no more of the first stage, where GPipe holds every one."""
    programs = {
        (schedule, count): lowered(schedule, count)._program
        for schedule, count in (("1f1b", 4), ("1f1b", 6), ("gpipe", 2), ("gpipe", 6))
    }
    of = {key: measured(program, 0)[0] for key, program in programs.items()}
    assert of["gpipe", 6] > 2 * of["gpipe", 2]
    assert abs(of["1f1b", 6] - of["1f1b", 4]) <= NUMBERS
    program = programs["1f1b", 4]  # two stages: two microbatches, and the gradients' sums so far
    gradients = sum(
        torch.Size(held.shape).numel() * held.dtype.itemsize
        for held, stage in zip(program.leaves, program.stage_of, strict=True)
        if stage == 0
    )
    assert of["1f1b", 4] <= of["gpipe", 2] + gradients + NUMBERS


class Block(torch.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.up, self.down = torch.nn.Linear(dim, 4 * dim), torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_first_stage_holds_no_more_than_autograd(schedule):
    """Activations are freed as a backward pass reads them, and the first microbatch's gradients are
    the sums: beside autograd's memory there is one message more, of the next action.
    """
    count, rows, length, dim = 4, 2, 8, 32
    layers = torch.nn.ModuleDict({f"{i}": Block(dim) for i in range(4)})
    stage = torch.nn.Sequential(layers["0"], layers["1"])

    def loss_fn(params, x):
        for i in range(4):
            x = torch.func.functional_call(layers[str(i)], params[i], (x,))
        return x.square().mean()

    params = [dict(layers[str(i)].named_parameters()) for i in range(4)]
    mesh, pipe = ftp.simulated_mesh((2,), ("pp",)), ftp.Pipeline("pp", count, schedule)
    step = ftp.shard(loss_fn, mesh, pipe.place(params, P(), mesh), pipeline=pipe)
    lowered: Any = step.lower(params, torch.randn(count * rows, length, dim))
    xs = [torch.randn(rows, length, dim) for _ in range(count)]
    message = xs[0].numel() * xs[0].itemsize

    def by_autograd():
        held = {}
        for kind, _, i in lowered.actions[0]:
            if kind == "F":
                held[i] = stage(xs[i])
            else:
                held.pop(i).backward(torch.zeros_like(xs[i]))

    stage.zero_grad()
    theirs = most_allocated(by_autograd)
    assert measured(lowered._program, 0)[0] <= theirs + message + NUMBERS
