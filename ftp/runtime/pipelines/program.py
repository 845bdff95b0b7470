"""A pipeline's step as a program: each rank runs its actions in order, and sends values to other
stages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ftp.dataclass import dataclass
from ftp.pipeline.buffers import RankPair, arrivals, known_read, messages
from ftp.pipeline.placement import Pipeline
from ftp.pipeline.schedule import Action, TimedAction
from ftp.runtime.pipelines.messages import (
    BETWEEN_ACTIONS,
    Key,
    Mailbox,
    Messages,
    groups_of_pairs,
)
from ftp.runtime.pipelines.shared_messages import MessageQueue, message_queues
from ftp.runtime.pipelines.stage_programs import ProgramOfSubgraphs, StagePrograms, as_bytes
from ftp.runtime.pipelines.subgraph_planner import StoredValue
from ftp.runtime.pipelines.worker import Instant, Worker, seconds_between
from ftp.runtime.program import Program
from ftp.sharding.mesh import mesh_device, require_coordinate


@dataclass(kw_only=True)
class PipelineProgram(ProgramOfSubgraphs):
    """The program of a pipeline's ranks, for one set of abstract inputs; its outputs are results,
    then gradients.

    Attributes:
        on_their_way: per pair of ranks, the most messages that are in flight at once.
        made: the stages' programs, over the other axes.
        leaves: the parameters, with their layout within a stage.
        stage_of: per parameter its stage; None for a parameter on every rank.
        batch: the batch tensors.
        marks: per action of this process in its last call: (action, rank, start of the call, start
            of the action, end of the action).
    """

    pipeline: Pipeline
    actions: Sequence[Sequence[Action]]
    on_their_way: Mapping[RankPair, int]
    made: StagePrograms
    leaves: Sequence[StoredValue]
    stage_of: Sequence[int | None]
    batch: Sequence[StoredValue]
    marks: list[tuple[Action, int, Instant, Instant, Instant]] = field(default_factory=list)

    @property
    def measured(self) -> list[TimedAction]:
        """The timed actions of this process in its last call."""
        return [
            TimedAction(action, rank, seconds_between(begin, start), seconds_between(begin, end))
            for action, rank, begin, start, end in self.marks
        ]

    @property
    def subgraphs(self) -> Mapping[Any, Program]:
        reductions = {("R", rank): r.program for rank, r in self.made.reductions.items()}
        first = {(f"{kind} first", k): p for (kind, k), p in self.made.first.items()}
        return {**self.made.programs, **first, **reductions}

    @cached_property
    def description(self) -> str:
        subgraphs = [f"{key}: {p.fingerprint}" for key, p in sorted(self.subgraphs.items())]
        stages = self.made.stages
        return "\n".join(
            [
                f"pipeline over {self.axis}, {self.pipeline.microbatches} microbatches",
                *(" ".join(map(str, own)) for own in self.actions),
                *subgraphs,
                f"{stages.forward} {stages.backward} {stages.gradients} {stages.borrowed}",
                f"{self.out_specs}",
            ]
        )

    @cached_property
    def arrivals(self) -> Mapping[Action, Sequence[Action]]:
        """Per action that reads a message, the readers of all messages requested with it."""
        return arrivals(self.actions, len(self.made.stages.forward))

    @cached_property
    def known_read(self) -> Mapping[Action, Sequence[Action]]:
        """Per action, the actions of its rank whose messages have been read before it."""
        return known_read(self.actions, len(self.made.stages.forward))

    def run_as_rank(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.marks.clear()
        coordinate = require_coordinate(self.mesh)
        rank = coordinate[self.axis]
        posts = Messages(self.mesh, self.axis, self._order, self._empty, self._queues, self._groups)
        worker = Worker(self, rank, inputs, posts, self._local_shape)
        for _ in worker.run():
            raise AssertionError("a message between processes is waited for where it is read")
        posts.finish()
        return worker.outputs(self._shared(worker))

    def _shared(self, worker: Worker) -> list[torch.Tensor]:
        """The results, broadcast to all ranks from the stages that computed them."""
        assert self.mesh.torch is not None
        group = self.mesh.torch.get_group(self.axis)
        found = []
        for i, (stage, name) in enumerate(self.made.stages.results):
            held = self.made.values[name]
            own = worker.results.get(i)
            own = self._new(held) if own is None else own.contiguous()
            source = dist.get_global_rank(group, stage % self.ranks)
            if own.numel():
                dist.broadcast(as_bytes(own), source, group=group)
            found.append(own)
        return found

    @cached_property
    def _order(self) -> dict[RankPair, list[Key]]:
        """Per pair of ranks the messages from one to the other, in the order of sending."""
        stages, found = self.made.stages, dict[RankPair, list[Key]]()

        def add(kind: str, stage: int, to: int, number: int) -> None:
            pair = stage % self.ranks, to % self.ranks
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append((kind, stage, to, number))

        holders = list(enumerate(self.stage_of))
        for leaf, holder in holders:
            for rank in dict.fromkeys(k % self.ranks for k in stages.borrowed[leaf]):
                if holder is not None:
                    add("borrow", holder, rank, leaf)
        for (kind, stage, i), _, _ in messages(self.actions, len(stages.forward)):
            if stages.sent(kind, stage):
                forward = kind == "F"
                add("F" if forward else "B", stage, stage + 1 if forward else stage - 1, i)
        # Of a parameter on every rank each one gets the gradient.
        for of_all in (False, True):
            for leaf, holder in holders:
                for stage in stages.gradients[leaf] if (holder is None) == of_all else ():
                    for to in range(self.ranks) if holder is None else [holder]:
                        add("gradient", stage, to, leaf)
        return found

    def _empty(self, key: Key) -> list[torch.Tensor]:
        """New tensors for the values of a message."""
        kind, stage, _, number = key
        if kind not in BETWEEN_ACTIONS:
            return [self._new(self.leaves[number])]
        names = self.made.stages.sent(kind, stage)
        return [self._new(self.made.values[name]) for name in names]

    def _new(self, held: StoredValue) -> torch.Tensor:
        shape, device = self._local_shape(held), mesh_device(self.mesh)
        return torch.empty(shape, dtype=held.dtype, device=device)

    @cached_property
    def _groups(self) -> dict[RankPair, dist.ProcessGroup]:
        """Process groups of pairs of ranks. All ranks make them in their first call."""
        return groups_of_pairs(self.mesh, self.axis, self._order)

    @cached_property
    def _queues(self) -> dict[RankPair, MessageQueue]:
        """Shared memory for the messages between actions. All ranks make it in their first call."""
        slots: dict[RankPair, tuple[int, int]] = {}
        stages = self.made.stages
        for sent, step in ((stages.forward, 1), (stages.backward, -1)):
            for stage, names in enumerate(sent):
                pair = stage % self.ranks, (stage + step) % self.ranks
                if pair in self.on_their_way and names:
                    held = (self.made.values[name] for name in names)
                    size = sum(math.prod(self._local_shape(x)) * x.dtype.itemsize for x in held)
                    slots[pair] = self.on_their_way[pair], max(size, *slots.get(pair, (0, 0))[1:])
        return message_queues(self.mesh, self.axis, slots)

    @cached_property
    def _within(self) -> dict[str, int]:
        own = require_coordinate(self.mesh)
        return {axis: own[axis] for axis in self.made.mesh.axes}

    def _local_shape(self, held: StoredValue) -> tuple[int, ...]:
        return held.local_shape(self.made.mesh.axes, self._within)

    def run_simulated(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.marks.clear()
        posts = Mailbox()
        workers = [
            Worker(self, rank, inputs, posts, lambda held: held.shape) for rank in range(self.ranks)
        ]
        going = [worker.run() for worker in workers]
        while going:
            before = posts.count
            left = [run for run in going if next(run, "ended") != "ended"]
            assert len(left) < len(going) or posts.count > before, "ranks wait for one another"
            going = left
        results = [
            workers[stage % self.ranks].results[i]
            for i, (stage, _) in enumerate(self.made.stages.results)
        ]
        found = [worker.outputs(results) for worker in workers]
        n = len(results)
        own = [0 if stage is None else stage % self.ranks for stage in self.stage_of]
        return found[0][:n] + [found[rank][n + i] for i, rank in enumerate(own)]
