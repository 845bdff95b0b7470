"""A pipeline's step as a program: each rank runs its actions in order, and sends what crosses
stages.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from ftp.pipeline.buffers import Channel
from ftp.pipeline.placement import Pipeline
from ftp.pipeline.schedule import Action, Timed
from ftp.runtime.program import Program
from ftp.runtime.stage_messages import Key, Mailbox, Messages
from ftp.runtime.stage_programs import ProgramOfPieces, StagePrograms, StoredValue, as_bytes
from ftp.sharding.mesh import mesh_device, require_coordinate
from ftp.sharding.spec import local_shape

Values = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class PipelineProgram(ProgramOfPieces):
    """The program of a pipeline's ranks, for one set of abstract inputs; its outputs are results,
    then gradients.

    Attributes:
        on_their_way: per pair of ranks the most messages between stages at once.
        made: the stages' programs, over the other axes.
        leaves: the parameters, within their stage.
        stage_of: per parameter its stage; None of one that is on every rank.
        batch: the batch tensors.
        measured: this process' actions in its last call.
    """

    pipeline: Pipeline
    actions: Sequence[Sequence[Action]]
    on_their_way: Mapping[Channel, int]
    made: StagePrograms
    leaves: Sequence[StoredValue]
    stage_of: Sequence[int | None]
    batch: Sequence[StoredValue]
    measured: list[Timed] = field(default_factory=list)

    @property
    def pieces(self) -> Mapping[Any, Program]:
        reductions = {("R", rank): r.program for rank, r in self.made.reductions.items()}
        return {**self.made.programs, **reductions}

    @cached_property
    def description(self) -> str:
        pieces = [f"{key}: {p.fingerprint}" for key, p in sorted(self.pieces.items())]
        stages = self.made.stages
        return "\n".join(
            [
                f"pipeline over {self.axis}, {self.pipeline.microbatches} microbatches",
                *(" ".join(map(str, own)) for own in self.actions),
                *pieces,
                f"{stages.forward} {stages.backward} {stages.gradients} {stages.borrowed}",
                f"{self.out_specs}",
            ]
        )

    def run_as_rank(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.measured.clear()
        coordinate = require_coordinate(self.mesh)
        rank = coordinate[self.axis]
        posts = Messages(self.mesh, self.axis, self._tags)
        worker = _Worker(self, rank, inputs, posts, self._local_shape)
        for _ in worker.run():
            raise AssertionError("a message between processes is waited for where it is read")
        posts.finish()
        return worker.outputs(self._shared(worker, rank))

    def _shared(self, worker: "_Worker", rank: int) -> list[torch.Tensor]:
        """The results, which all ranks get from the stages that computed them."""
        assert self.mesh.torch is not None
        group = self.mesh.torch.get_group(self.axis)
        found = []
        for i, (stage, name) in enumerate(self.made.stages.results):
            held = self.made.values[name]
            own = worker.results.get(i)
            if own is None:
                shape = local_shape(held.spec, held.shape, self.made.mesh.axes, self._within)
                own = torch.empty(shape, dtype=held.dtype, device=mesh_device(self.mesh))
            own = own.contiguous()
            source = dist.get_global_rank(group, stage % self.ranks)
            if own.numel():
                dist.broadcast(as_bytes(own), source, group=group)
            found.append(own)
        return found

    @cached_property
    def _tags(self) -> dict[Key, int]:
        """A number for each message that ranks may exchange; its values have the next ones."""
        stages = self.made.stages
        counts: dict[Key, int] = {}
        for i in range(self.pipeline.microbatches):
            for k, names in enumerate(stages.forward):
                counts["F", k, k + 1, i] = len(names)
            for k, names in enumerate(stages.backward):
                counts["B", k, k - 1, i] = len(names)
        for leaf, holder in enumerate(self.stage_of):
            for rank in range(self.ranks):
                counts["borrow", holder or 0, rank, leaf] = 1
            for stage in stages.gradients[leaf]:
                for to in range(max(self.ranks, len(stages.forward))):
                    counts["gradient", stage, to, leaf] = 1
        return dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))

    @cached_property
    def _within(self) -> dict[str, int]:
        own = require_coordinate(self.mesh)
        return {axis: own[axis] for axis in self.made.mesh.axes}

    def _local_shape(self, held: StoredValue) -> tuple[int, ...]:
        return local_shape(held.spec, held.shape, self.made.mesh.axes, self._within)

    def run_simulated(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.measured.clear()
        posts = Mailbox()
        workers = [
            _Worker(self, rank, inputs, posts, lambda held: held.shape)
            for rank in range(self.ranks)
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


class _Worker:
    """One rank of the pipeline's axis in one call."""

    def __init__(
        self,
        program: PipelineProgram,
        rank: int,
        inputs: Sequence[torch.Tensor],
        posts: "Mailbox | Messages",
        local: Callable[[StoredValue], tuple[int, ...]],
    ):
        self.program, self.rank, self.posts, self.local = program, rank, posts, local
        n = len(program.leaves)
        self.given, batch = inputs[:n], inputs[n:]
        self.params = list(self.given)  # with those of other stages, once they are borrowed
        self.batch = [x.unflatten(0, (-1, program.pipeline.microbatches)) for x in batch]
        self.values: dict[tuple[int, int], Values] = {}
        self.results: dict[int, torch.Tensor] = {}  # sums over microbatches
        self.sums: dict[tuple[int, str], torch.Tensor] = {}  # of gradients, by stage
        self.parts: dict[tuple[int, int], torch.Tensor] = {}  # of a parameter's gradient, by stage
        self.gradients: dict[int, torch.Tensor] = {}
        self.begin = time.perf_counter()
        self.borrowed: list[tuple[Key, int]] = []  # messages on their way, and their leaves

    def run(self) -> Generator[None, None, None]:
        """Yields while it waits for a message."""
        program, stages = self.program, self.program.made.stages
        self._lend()
        own = program.actions[self.rank]
        for at, action in enumerate(own):
            for following in own[at : at + 2]:
                self._expect(following)
            yield from self._receive(action)
            start = time.perf_counter()
            try:
                self._act(action)
            except Exception as e:
                e.add_note(f"in {action!r} of the pipeline")
                raise
            end = time.perf_counter()
            program.measured.append(Timed(action, self.rank, start - self.begin, end - self.begin))
        self._part()
        for leaf, found in enumerate(stages.gradients):
            holder = program.stage_of[leaf]
            if holder is not None and program.ranks > 1:
                self._send_back(leaf, holder, found)
        for leaf, found in enumerate(stages.gradients):
            yield from self._collect(leaf, found)
        self._reduce()

    def _reduce(self) -> None:
        """Reduce what is pending over the data axes, once for all microbatches."""
        reduction = self.program.made.reductions.get(self.rank)
        if reduction is None:
            return
        places = [(self.results, i) for i in reduction.results]
        places += [(self.gradients, leaf) for leaf in reduction.leaves]
        given = [sums[at].contiguous() for sums, at in places]
        for (sums, at), value in zip(places, reduction.program.run(given), strict=True):
            sums[at] = value

    def outputs(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Means over the microbatches; an empty tensor for a gradient of another rank's stage, and
        a parameter that has none itself.
        """
        program = self.program
        count = program.pipeline.microbatches
        gradients = []
        for leaf, _held in enumerate(program.leaves):
            total = self.gradients.get(leaf)
            if not program.made.stages.gradients[leaf]:
                gradients.append(self.given[leaf])
            elif total is None:
                gradients.append(torch.empty_like(self.given[leaf], requires_grad=False))
            elif program.stage_of[leaf] is None:  # simulated ranks share it
                gradients.append(total / count)
            else:
                gradients.append(total.div_(count))
        return [*(x / count for x in results), *gradients]

    # Messages. Those between stages of one rank are handed over.

    def _is_here(self, stage: int) -> bool:
        return stage % self.program.ranks == self.rank

    def _lend(self) -> None:
        """Send parameters to the other stages that read them, and take those of others."""
        program = self.program
        for receives in (False, True):
            for leaf, borrowers in enumerate(program.made.stages.borrowed):
                holder = program.stage_of[leaf]
                if holder is None:
                    continue
                ranks = dict.fromkeys(k % program.ranks for k in borrowers)
                for rank in (r for r in ranks if r != holder % program.ranks):
                    key = ("borrow", holder, rank, leaf)
                    if not receives and self._is_here(holder):
                        self.posts.send(key, [self.params[leaf]], rank)
                    elif receives and rank == self.rank:
                        self.posts.expect(
                            key, [self._empty(program.leaves[leaf])], holder % program.ranks
                        )
                        self.borrowed.append((key, leaf))

    def _empty(self, held: StoredValue) -> torch.Tensor:
        return torch.empty(
            self.local(held), dtype=held.dtype, device=mesh_device(self.program.mesh)
        )

    def _source(self, action: Action) -> tuple[Key, tuple[str, ...], int] | None:
        """The message that an action waits for: its key, the values' names, their stage."""
        kind, stage, i = action
        stages = self.program.made.stages
        if kind == "F" and stage:
            return ("F", stage - 1, stage, i), stages.forward[stage - 1], stage - 1
        if kind in "BI" and stage + 1 < len(stages.backward):
            return ("B", stage + 1, stage, i), stages.backward[stage + 1], stage + 1
        return None

    def _expect(self, action: Action) -> None:
        source = self._source(action)
        if source is None or self._is_here(source[2]) or not source[1]:
            return
        key, names, stage = source
        if not self.posts.is_expected(key):
            like = [self._empty(self.program.made.values[name]) for name in names]
            self.posts.expect(key, like, stage % self.program.ranks)

    def _receive(self, action: Action) -> Generator[None, None, None]:
        for key, leaf in self.borrowed:
            while not self.posts.is_here(key):
                yield
            self.params[leaf] = self.posts.take(key)[0]
        self.borrowed = []
        source = self._source(action)
        if source is None or self._is_here(source[2]) or not source[1]:
            return
        key, names, _ = source
        while not self.posts.is_here(key):
            yield
        self._at(action).update(zip(names, self.posts.take(key), strict=True))

    def _at(self, action: Action) -> Values:
        return self.values.setdefault((action.stage, action.microbatch), {})

    def _hand_on(self, kind: str, names: Sequence[str], to: int, action: Action) -> None:
        if not names:
            return
        own = self._at(action)
        values = [own[name] for name in names]
        if self._is_here(to):
            there = self.values.setdefault((to, action.microbatch), {})
            there.update(zip(names, values, strict=True))
        else:
            key = (kind, action.stage, to, action.microbatch)
            self.posts.send(key, values, to % self.program.ranks)

    # Work.

    def _act(self, action: Action) -> None:
        kind, stage, i = action
        program, stages = self.program, self.program.made.stages
        own, piece = self._at(action), program.made.pieces.get((kind, stage))
        sums = () if piece is None else piece.sums
        if piece is not None:
            read, made = (
                names[: len(names) - len(sums)] for names in (piece.values, piece.outputs)
            )
            given = [
                *(self.params[leaf] for leaf in piece.params),
                *(self.batch[leaf].select(1, i).contiguous() for leaf in piece.batch),
                *(own[name] for name in read),
                *(self._sum(stage, name) for name in sums),
            ]
            outputs = program.made.programs[kind, stage].run(given)
            own.update(zip(made, outputs, strict=False))
            for name, total in zip(sums, outputs[len(made) :], strict=True):
                self.sums[stage, name] = total
            del given, outputs
        if kind == "F":
            for at, (of, name) in enumerate(stages.results):
                if of == stage:
                    _add(self.results, at, own[name])
            if stage + 1 < len(stages.forward):
                self._hand_on("F", stages.forward[stage], stage + 1, action)
            self._keep(own, self._read_later(stage, "BIW", stages.backward[stage]))
            return
        if kind in "BI" and stage:
            self._hand_on("B", stages.backward[stage], stage - 1, action)
        if kind == "I":
            self._keep(own, self._read_later(stage, "W", ()))
            return
        for leaf, found in enumerate(stages.gradients):
            if stage in found and found[stage] not in sums:
                # A value that the piece did not compute: it may share memory with what it read.
                _add(self.parts, (leaf, stage), own[found[stage]].clone())
        del self.values[stage, i]

    def _sum(self, stage: int, name: str) -> torch.Tensor:
        """A gradient's sum so far, which its piece writes to."""
        if (stage, name) not in self.sums:
            held = self.program.made.values[name]
            device = mesh_device(self.program.mesh)
            zeros = torch.zeros(self.local(held), dtype=held.dtype, device=device)
            self.sums[stage, name] = zeros
        return self.sums[stage, name]

    def _part(self) -> None:
        """Give each parameter its sums; two of one gradient have one each."""
        taken: set[tuple[int, str]] = set()
        for leaf, found in enumerate(self.program.made.stages.gradients):
            for stage, name in found.items():
                if (stage, name) in self.sums:
                    total = self.sums[stage, name]
                    is_first = (stage, name) not in taken
                    self.parts[leaf, stage] = total if is_first else total.clone()
                    taken.add((stage, name))
        self.sums.clear()

    def _read_later(self, stage: int, kinds: str, sent: Sequence[str]) -> set[str]:
        pieces = self.program.made.stages.pieces
        later = (pieces[kind, stage] for kind in kinds if (kind, stage) in pieces)  # type: ignore[index]
        return {*sent, *(name for piece in later for name in piece.values)}

    @staticmethod
    def _keep(own: Values, names: set[str]) -> None:
        for name in [name for name in own if name not in names]:
            del own[name]

    # Gradients of parameters that several stages read.

    def _send_back(self, leaf: int, holder: int, found: Mapping[int, str]) -> None:
        for stage in found:
            if self._is_here(stage) and not self._is_here(holder):
                key = ("gradient", stage, holder, leaf)
                self.posts.send(key, [self.parts.pop((leaf, stage))], holder % self.program.ranks)

    def _collect(self, leaf: int, found: Mapping[int, str]) -> Generator[None, None, None]:
        """Sum a parameter's gradient over the stages that read it, in their order."""
        program = self.program
        holder = program.stage_of[leaf]
        if holder is None:
            yield from self._share(leaf, found)
            return
        if not self._is_here(holder):
            return
        keys = {stage: ("gradient", stage, holder, leaf) for stage in found}
        for stage, key in keys.items():
            if not self._is_here(stage):
                like = self._empty(program.leaves[leaf])
                self.posts.expect(key, [like], stage % program.ranks)
        for stage, key in keys.items():
            if not self._is_here(stage):
                while not self.posts.is_here(key):
                    yield
                self.parts[leaf, stage] = self.posts.take(key)[0]
            part = self.parts.pop((leaf, stage))
            if leaf in self.gradients:
                self.gradients[leaf].add_(part)
            else:
                self.gradients[leaf] = part

    def _share(self, leaf: int, found: Mapping[int, str]) -> Generator[None, None, None]:
        """The gradient of a parameter on every rank: each stage's part goes to all."""
        others = [r for r in range(self.program.ranks) if r != self.rank]
        for stage in found:
            if self._is_here(stage):
                for rank in others:
                    self.posts.send(
                        ("gradient", stage, rank, leaf), [self.parts[leaf, stage]], rank
                    )
        for stage in found:
            key = ("gradient", stage, self.rank, leaf)
            if not self._is_here(stage):
                like = self._empty(self.program.leaves[leaf])
                self.posts.expect(key, [like], stage % self.program.ranks)
                while not self.posts.is_here(key):
                    yield
                self.parts[leaf, stage] = self.posts.take(key)[0]
            _add(self.gradients, leaf, self.parts.pop((leaf, stage)))


def _add(sums: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
    """Not in place: the first value may share memory with the batch or a parameter."""
    sums[key] = sums[key] + value if key in sums else value
