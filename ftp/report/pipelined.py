"""``LoweredPipeline``: a pipeline before it runs: programs, messages, memory, bubble, timeline."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ftp.dataclass import dataclass
from ftp.partitioning.collectives import Collective
from ftp.pipeline.schedule import Action, Kind, TimedAction, bubble, held_microbatches, simulate
from ftp.planning.machine import GivenHardware
from ftp.report.collectives import Collectives
from ftp.report.lowered import Lowered
from ftp.report.memory import in_bytes
from ftp.report.staged import lowered_once, own_index, transfer
from ftp.report.startable import Startable
from ftp.runtime.pipelines.program import PipelineProgram
from ftp.runtime.pipelines.subgraph_planner import StoredValue


@dataclass(frozen=True)
class Timeline:
    """When each action runs: as estimated, and as measured by this process' last call.

    Attributes:
        planned, measured: actions in order of time.
    """

    planned: Sequence[TimedAction]
    measured: Sequence[TimedAction] = ()

    def save(self, path: str | Path) -> None:
        """Write a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: a row a rank.

        Args:
            path: of a JSON file.
        """
        groups = {"planned": self.planned, "measured": self.measured}
        events: list[dict[str, Any]] = []
        for pid, (group, timed) in enumerate(groups.items()):
            if timed:
                events.append(
                    {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": group}}
                )
            for rank in sorted({t.rank for t in timed}):
                events.append(
                    {
                        "ph": "M",
                        "name": "thread_name",
                        "pid": pid,
                        "tid": rank,
                        "args": {"name": f"pipeline rank {rank}"},
                    }
                )
            events += [
                {
                    "ph": "X",
                    "name": str(t.action),
                    "cat": t.action.kind,
                    "pid": pid,
                    "tid": t.rank,
                    "ts": t.start * 1e6,
                    "dur": (t.end - t.start) * 1e6,
                    "args": {"stage": t.action.stage, "microbatch": t.action.microbatch},
                }
                for t in timed
            ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def picture(self, width: int = 72) -> str:
        """The planned actions as text, a line a rank; ``.`` is a wait."""
        end = max((t.end for t in self.planned), default=0.0) or 1.0
        lines = []
        for rank in sorted({t.rank for t in self.planned}):
            cells = ["."] * width
            for t in self.planned:
                if t.rank == rank:
                    first, last = (round(x / end * width) for x in (t.start, t.end))
                    cells[first:last] = t.action.kind * (last - first)
            lines.append(f"rank {rank:>3} |{''.join(cells)}|")
        return "\n".join(lines)


class LoweredPipeline(Startable):
    """A pipelined step before it runs; ``print`` shows its stages and its schedule.

    Attributes:
        stages: per stage the program of each kind of action; a kind without work has none.
        actions: per rank of the pipeline's axis its actions, in order.
        on_their_way: per pair of ranks ``(from, to)`` of that axis the most messages between stages
            that are sent and not yet read at once, whatever the ranks' speed; with buffers for so
            many no rank ever waits to send.

    >>> import ftp, torch
    >>> mesh, pipe = ftp.AbstractMesh((2,), ("pp",)), ftp.Pipeline("pp", microbatches=4)
    >>> params = {"layers": [{"w": torch.empty(8, 8)} for _ in range(4)]}
    >>> def loss_fn(params, x):
    ...     for layer in params["layers"]:
    ...         x = (x @ layer["w"]).relu()
    ...     return x.mean()
    >>> specs = pipe.place(params, None, mesh)
    >>> lowered = ftp.shard(loss_fn, mesh, specs, pipeline=pipe).lower(params, torch.empty(16, 8))
    >>> lowered.ideal_bubble, [c.op for c in lowered.collectives][:2]
    (0.2, ['send', 'send'])
    """

    def __init__(self, program: PipelineProgram):
        self._program = self._returning = program
        self.mesh = program.mesh
        self.actions, self.on_their_way = program.actions, program.on_their_way
        lowered = lowered_once(program.made.programs)
        self.stages: list[dict[Kind, Lowered]] = [
            {kind: one for (kind, k), one in lowered.items() if k == stage}
            for stage in range(len(program.made.stages.forward))
        ]

    # Messages and collectives.

    def messages(self, stage: int, kind: str) -> Collectives:
        """The messages that a stage sends for one microbatch: after "F" to the next stage, after
        "B" or "I" to the one before.
        """
        values, to = self._program.made.values, stage + 1 if kind == "F" else stage - 1
        return Collectives(
            self._message(values[name], f"{name} to stage {to}") for name in self._sent(kind, stage)
        )

    def _is_on_one_rank(self, stage: int, other: int) -> bool:
        ranks = self._program.ranks
        return not 0 <= other < len(self.stages) or stage % ranks == other % ranks

    def _message(self, held: StoredValue, cause: str) -> Collective:
        return transfer("send", held, self._program.axis, self._program.made.mesh.axes, cause)

    def _nbytes(self, held: StoredValue) -> int:
        return held.local_nbytes(self._program.made.mesh.axes)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each value that crosses subgraphs, by name."""
        return {name: self._nbytes(held) for name, held in self._program.made.values.items()}

    def collectives_of(self, rank: int) -> Collectives:
        """One record per collective and message that a rank of the pipeline's axis issues, in the
        order of its actions; what is sent once a step comes last.
        """
        program = self._program
        stages, found = program.made.stages, []
        for kind, stage, _ in program.actions[rank]:
            lowered = self.stages[stage].get(kind)
            if lowered is not None:
                found += [
                    replace(c, cause=f"{c.cause}, stage {stage}") for c in lowered.collectives
                ]
            found += self.messages(stage, kind)
        for leaf, (held, holder) in enumerate(zip(program.leaves, program.stage_of, strict=True)):
            if holder is None:
                continue
            home = holder % program.ranks
            others = dict.fromkeys(k % program.ranks for k in stages.borrowed[leaf])
            if home == rank:
                found += [
                    self._message(held, f"parameter {leaf} to a stage that reads it too")
                    for other in others
                    if other != home
                ]
            found += [
                self._message(held, f"gradient of parameter {leaf} to its stage")
                for k in stages.gradients[leaf]
                if k % program.ranks == rank != home
            ]
        reduction = self._reductions.get(rank)
        return Collectives([*found, *(reduction.collectives if reduction else ())])

    @cached_property
    def _reductions(self) -> dict[int, Lowered]:
        """Per rank, the program that reduces its sums over microbatches, once a step."""
        return lowered_once({rank: r.program for rank, r in self._program.made.reductions.items()})

    @property
    def collectives(self) -> Collectives:
        """`collectives_of` this process' rank; of the first without processes."""
        return self.collectives_of(own_index(self._program.mesh, self._program.axis))

    # Memory.

    @cached_property
    def memory_by_rank(self) -> tuple[int, ...]:
        """The peak bytes of each rank of the pipeline's axis: its parameters and gradients, the
        batch, what it holds of microbatches on their way, and what its largest action takes.
        """
        return tuple(self._peak(rank) for rank in range(self._program.ranks))

    @property
    def memory(self) -> int:
        """The peak bytes of the rank that needs most."""
        return max(self.memory_by_rank)

    def _peak(self, rank: int) -> int:
        """The peak bytes of one rank over its actions, see `memory_by_rank`."""
        program = self._program
        stages = program.made.stages
        base = self._held_throughout(rank)
        totals: dict[tuple[int, str], int] = {}  # of gradients, by stage
        coming: dict[tuple[int, str], int] = {}  # gradients so far and those of the action
        summed: dict[tuple[int, int], int] = {}  # by parameter and stage; some have equal gradients
        held: dict[tuple[int, int], set[str]] = {}
        sent: dict[Action, Sequence[str]] = {}  # and perhaps not read yet
        peak = base
        own_actions = program.actions[rank]
        for at, (kind, stage, i) in enumerate(own_actions):
            # The messages that an action and the next one read are received before the action
            # runs, and so are those sent before these.
            for following in own_actions[at : at + 2]:
                for reader in program.arrivals.get(following, ()):
                    held.setdefault(reader[1:], set()).update(stages.received(*reader[:2]))
            here = held.setdefault((stage, i), set())
            here.update(stages.received(kind, stage))
            for sender in program.known_read[own_actions[at]]:
                sent.pop(sender, None)
            subgraph = program.made.subgraphs.get((kind, stage))
            lowered = self.stages[stage].get(kind)
            is_first = (kind, stage) in self._first and not any(
                (stage, name) in totals
                for name in subgraph.sums  # type: ignore[union-attr]
            )
            if is_first:
                lowered = self._first[kind, stage]
            if kind in "BW":
                for leaf, found in enumerate(stages.gradients):
                    if stage in found:
                        summed[leaf, stage] = self._nbytes(program.leaves[leaf])
                        coming[stage, found[stage]] = summed[leaf, stage]
            if not is_first:
                totals |= coming
            living = base + sum(totals.values()) + self._bytes_of_values(held, sent)
            if subgraph is not None and lowered is not None:
                copied = (leaf for leaf in subgraph.batch if program.made.copied[leaf])
                living += sum(self._rows[leaf] for leaf in copied)
                peak = max(peak, living + lowered.memory - self._taken(lowered))
                here.update(subgraph.outputs[: len(subgraph.outputs) - len(subgraph.sums)])
            totals |= coming
            if messages := self._sent(kind, stage):
                sent[own_actions[at]] = messages
            here &= stages.read_later(kind, stage)
        return max(peak, self._peak_at_end(rank, base + sum(summed.values())))

    def _peak_at_end(self, rank: int, held: int) -> int:
        """The peak bytes of one rank that sums gradients over microbatches and receives gradients
        of its parameters from other ranks, with ``held`` bytes before.
        """
        program = self._program
        received = sum(
            self._nbytes(program.leaves[leaf])
            for leaf, found in enumerate(program.made.stages.gradients)
            for k in found
            if (program.stage_of[leaf] or 0) % program.ranks == rank != k % program.ranks
        )
        reduction = self._reductions.get(rank)
        reducing = 0 if reduction is None else reduction.memory - self._taken(reduction)
        return held + max(received, reducing)

    def _held_throughout(self, rank: int) -> int:
        """Bytes of the parameters that a rank owns or borrows, and of its batch."""
        program = self._program
        total = program.pipeline.microbatches * sum(self._rows)
        for leaf, holder in enumerate(program.stage_of):
            readers = () if holder is None else (holder, *program.made.stages.borrowed[leaf])
            if holder is None or any(k % program.ranks == rank for k in readers):
                total += self._nbytes(program.leaves[leaf])
        return total

    def _bytes_of_values(
        self, held: Mapping[tuple[int, int], set[str]], sent: Mapping[Action, Sequence[str]]
    ) -> int:
        """Bytes of the values held by stage and microbatch, and of those sent and not read yet."""
        values = {of: set(names) for of, names in held.items()}
        for sender, names in sent.items():
            values.setdefault(sender[1:], set()).update(names)
        return sum(self._sizes[name] for names in values.values() for name in names)

    def _sent(self, kind: str, stage: int) -> Sequence[str]:
        """The names of the values that a stage sends to another rank after an action."""
        is_here = self._is_on_one_rank(stage, stage + 1 if kind == "F" else stage - 1)
        return () if is_here else self._program.made.stages.sent(kind, stage)

    @cached_property
    def _rows(self) -> list[int]:
        """Bytes of one microbatch of each batch tensor."""
        axes, count = self._program.mesh.axes, self._program.pipeline.microbatches
        return [held.local_nbytes(axes) // count for held in self._program.batch]

    @cached_property
    def _first(self) -> dict[tuple[Kind, int], Lowered]:
        """The programs of stages' first microbatches."""
        return lowered_once(self._program.made.first)

    @staticmethod
    def _taken(lowered: Lowered) -> int:
        """Bytes of a program's inputs."""
        return sum(lowered.input_bytes.values())

    # Time.

    def seconds(self, action: Action, hardware: GivenHardware = None) -> float:
        """The estimated time of an action."""
        lowered = self.stages[action.stage].get(action.kind)
        if lowered is None:
            return 0.0
        known = self._costs.setdefault(repr(hardware), {})
        if id(lowered) not in known:
            known[id(lowered)] = float(lowered.cost(hardware))
        return known[id(lowered)]

    @cached_property
    def _costs(self) -> dict[str, dict[int, float]]:
        return {}

    def timed(self, hardware: GivenHardware = None) -> list[TimedAction]:
        """When each action runs, by estimated times."""
        return simulate(self.actions, len(self.stages), lambda a: self.seconds(a, hardware))

    def cost(self, hardware: GivenHardware = None) -> float:
        """Estimated seconds of a step, by the slowest rank."""
        ends: dict[int, float] = {}
        for t in self.timed(hardware):
            ends[t.rank] = max(ends.get(t.rank, 0.0), t.end)
        for rank, lowered in self._reductions.items():
            ends[rank] = ends.get(rank, 0.0) + float(lowered.cost(hardware))
        return max(ends.values())

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that they spend waiting, by estimated times."""
        return bubble(self.timed(), self._program.ranks)

    @property
    def ideal_bubble(self) -> float | None:
        """The bubble in closed form, of stages that take equally long: ``(p - 1) / (v m + p - 1)``
        of p ranks, m microbatches and v chunks; None for schedules without one.
        """
        pipeline, p = self._program.pipeline, self._program.ranks
        if pipeline.schedule not in ("gpipe", "1f1b", "interleaved"):
            return None
        chunks = pipeline.chunks if pipeline.schedule == "interleaved" else 1
        return (p - 1) / (chunks * pipeline.microbatches + p - 1)

    @property
    def timeline(self) -> Timeline:
        """When each action runs; ``timeline.save(path)`` writes a trace for Perfetto."""
        return Timeline(self.timed(), self._program.measured)

    def __str__(self) -> str:
        program = self._program
        pipeline = program.pipeline
        schedule = pipeline.schedule if isinstance(pipeline.schedule, str) else "a list of actions"
        lines = [
            f"pipeline of {len(self.stages)} stages over {pipeline.axis!r} of {program.mesh},"
            f" {pipeline.microbatches} microbatches, schedule {schedule}"
        ]
        for stage, lowered in enumerate(self.stages):
            sent = [
                f"{kind} sends {in_bytes(sum(c.nbytes for c in self.messages(stage, kind)))}"
                for kind in lowered
                if self.messages(stage, kind)
            ]
            count = sum(stage == k for k in program.stage_of)
            lines.append(
                f"  stage {stage}: {count} parameters; collectives a microbatch"
                f" {', '.join(f'{kind} {len(x.collectives)}' for kind, x in lowered.items())}"
                f"{'; ' if sent else ''}{', '.join(sent)}"
            )
        for name, first, last in program.made.stages.passed:
            lines.append(f"  %{name} of stage {first} is passed along to stage {last}")
        for rank, nbytes in enumerate(self.memory_by_rank):
            lines.append(
                f"  rank {rank}: {in_bytes(nbytes)} at the peak, at most"
                f" {held_microbatches(self.actions[rank])} microbatches held"
            )
        if self.on_their_way:
            most = max(self.on_their_way.values())
            lines.append(f"messages: at most {most} on their way from one rank to another")
        ideal = self.ideal_bubble
        closed = "" if ideal is None else f", {ideal:.1%} if all stages took equally long"
        lines.append(f"bubble: {self.bubble:.1%}{closed}")
        return "\n".join([*lines, self.timeline.picture()])
