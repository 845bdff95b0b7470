"""One rank of a pipeline's axis in one call: its actions in order, and its messages."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ftp.pipeline.schedule import Action
from ftp.pipeline.subgraphs import StageGraph
from ftp.runtime.pipelines.messages import Key, Mailbox, Messages
from ftp.runtime.pipelines.subgraph_planner import StoredValue
from ftp.sharding.mesh import mesh_device

if TYPE_CHECKING:
    from ftp.runtime.pipelines.program import PipelineProgram

Values = dict[str, torch.Tensor]
Instant = float | torch.cuda.Event  # seconds of the host's clock, or an event on a GPU


def seconds_between(start: Instant, end: Instant) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - start


class Worker:
    """One rank of the pipeline's axis in one call."""

    def __init__(
        self,
        program: "PipelineProgram",
        rank: int,
        inputs: Sequence[torch.Tensor],
        posts: "Mailbox | Messages",
        local: Callable[[StoredValue], tuple[int, ...]],
    ):
        self.program, self.rank, self.posts, self.local = program, rank, posts, local
        n = len(program.leaves)
        self.given, batch = inputs[:n], inputs[n:]
        self.params = list(self.given)  # later with parameters borrowed from other stages
        self.batch = [x.unflatten(0, (-1, program.pipeline.microbatches)) for x in batch]
        self.values: dict[tuple[int, int], Values] = {}
        self.results: dict[int, torch.Tensor] = {}  # sums over microbatches
        self.sums: dict[tuple[int, str], torch.Tensor] = {}  # of gradients, by stage
        self.parts: dict[tuple[int, int], torch.Tensor] = {}  # of a parameter's gradient, by stage
        self.gradients: dict[int, torch.Tensor] = {}
        self.begin = self._now()
        self.borrowed: list[tuple[Key, int]] = []  # messages in flight, and their leaves

    def run(self) -> Generator[None, None, None]:
        """Run all actions; yields while waiting for a message."""
        program, stages = self.program, self.program.made.stages
        self._lend()
        own = program.actions[self.rank]
        for at, action in enumerate(own):
            for following in own[at : at + 2]:
                self._expect(following)
            yield from self._receive(action)
            for kind, stage, i in program.known_read[action]:
                forward = kind == "F"
                to = stage + 1 if forward else stage - 1
                self.posts.release(("F" if forward else "B", stage, to, i))
            start = self._now()
            try:
                self._act(action)
            except Exception as e:
                e.add_note(f"in {action!r} of the pipeline")
                raise
            program.marks.append((action, self.rank, self.begin, start, self._now()))
        self._part()
        for leaf, found in enumerate(stages.gradients):
            holder = program.stage_of[leaf]
            if holder is not None and program.ranks > 1:
                self._send_back(leaf, holder, found)
        for leaf, found in enumerate(stages.gradients):
            yield from self._collect(leaf, found)
        self._reduce()

    def _now(self) -> Instant:
        """The current time; on a GPU an event on its stream, so that the host need not wait."""
        if mesh_device(self.program.mesh).type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _reduce(self) -> None:
        """Reduce the sums that are pending over the data axes, once for all microbatches."""
        reduction = self.program.made.reductions.get(self.rank)
        if reduction is None:
            return
        places = [(self.results, i) for i in reduction.results]
        places += [(self.gradients, leaf) for leaf in reduction.leaves]
        given = [sums[at].contiguous() for sums, at in places]
        for (sums, at), value in zip(places, reduction.program.run(given), strict=True):
            sums[at] = value

    def outputs(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Means over the microbatches. For a gradient of another rank's stage an empty tensor; for
        a parameter without a gradient the parameter itself.
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

    # Messages. Between stages of one rank values are handed over without a message.

    def _is_here(self, stage: int) -> bool:
        return stage % self.program.ranks == self.rank

    def _lend(self) -> None:
        """Send parameters to other stages that read them, and receive those of other stages."""
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
                        self.posts.expect(key, holder % program.ranks)
                        self.borrowed.append((key, leaf))

    def _awaited(self, action: Action) -> tuple[Key, tuple[str, ...]] | None:
        """The message that an action reads, and the names of its values; None where it reads none
        from another rank.
        """
        kind, stage, i = action
        names = self.program.made.stages.received(kind, stage)
        source = stage - 1 if kind == "F" else stage + 1
        if not names or self._is_here(source):
            return None
        return ("F" if kind == "F" else "B", source, stage, i), names

    def _expect(self, action: Action) -> None:
        if (awaited := self._awaited(action)) is not None:
            key, _ = awaited
            self.posts.expect(key, key[1] % self.program.ranks)

    def _receive(self, action: Action) -> Generator[None, None, None]:
        for key, leaf in self.borrowed:
            while not self.posts.is_here(key):
                yield
            self.params[leaf] = self.posts.take(key)[0]
        self.borrowed = []
        if (awaited := self._awaited(action)) is None:
            return
        key, names = awaited
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
        own, subgraph = self._at(action), program.made.subgraphs.get((kind, stage))
        sums = () if subgraph is None else subgraph.sums
        if subgraph is not None:
            self._run(subgraph, i, own)
        if kind == "F":
            for at, (of, name) in enumerate(stages.results):
                if of == stage:
                    _add(self.results, at, own[name])
            if stage + 1 < len(stages.forward):
                self._hand_on("F", stages.forward[stage], stage + 1, action)
            self._keep(own, stages.read_later(kind, stage))
            return
        if kind in "BI" and stage:
            self._hand_on("B", stages.backward[stage], stage - 1, action)
        if kind == "I":
            self._keep(own, stages.read_later(kind, stage))
            return
        for leaf, found in enumerate(stages.gradients):
            if stage in found and found[stage] not in sums:
                # The subgraph did not compute this value: it may share memory with an input.
                _add(self.parts, (leaf, stage), own[found[stage]].clone())
        del self.values[stage, i]

    def _run(self, subgraph: StageGraph, microbatch: int, own: Values) -> None:
        """Run a subgraph on the values that its stage holds. Values that nobody reads later are
        passed on for it to free.
        """
        made, stage, sums = self.program.made, subgraph.stage, subgraph.sums
        key: Any = subgraph.kind, stage
        is_first = key in made.first and not any(
            (stage, name) in self.sums for name in subgraph.sums
        )
        program = made.first[key] if is_first else made.programs[key]
        subgraph = made.stages.subgraphs[key] if is_first else subgraph
        kept = made.kept[key]
        read = subgraph.values[: len(subgraph.values) - len(subgraph.sums)]
        given = [
            *(self.params[leaf] for leaf in subgraph.params),
            *(self.batch[leaf].select(1, microbatch).contiguous() for leaf in subgraph.batch),
            *(own[name] if name in kept else own.pop(name) for name in read),
            *(self._sum(stage, name) for name in subgraph.sums),
        ]
        outputs = list(program.run(given))
        del given
        if is_first:
            shared = {at for at, _ in program.renewed}
            for at, name in enumerate(subgraph.outputs):
                if name in sums:
                    self.sums[stage, name] = _alone(outputs[at], at in shared)
                else:
                    own[name] = outputs[at]
            return
        count = len(outputs) - len(sums)
        own.update(zip(subgraph.outputs[:count], outputs, strict=False))
        self.sums.update(((stage, name), x) for name, x in zip(sums, outputs[count:], strict=True))

    def _sum(self, stage: int, name: str) -> torch.Tensor:
        """A gradient's sum so far, for its subgraph to write to."""
        held, device = self.program.made.values[name], mesh_device(self.program.mesh)
        found = self.sums.pop((stage, name), None)
        if found is None:
            found = torch.zeros(self.local(held), dtype=held.dtype, device=device)
        return found

    def _part(self) -> None:
        """Give each parameter the sum of its gradient; two parameters with one gradient get a copy
        each.
        """
        taken: set[tuple[int, str]] = set()
        for leaf, found in enumerate(self.program.made.stages.gradients):
            for stage, name in found.items():
                if (stage, name) in self.sums:
                    total = self.sums[stage, name]
                    is_first = (stage, name) not in taken
                    self.parts[leaf, stage] = total if is_first else total.clone()
                    taken.add((stage, name))
        self.sums.clear()

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
                self.posts.expect(key, stage % program.ranks)
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
        """The gradient of a parameter on every rank: each stage sends its part to all."""
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
                self.posts.expect(key, stage % self.program.ranks)
                while not self.posts.is_here(key):
                    yield
                self.parts[leaf, stage] = self.posts.take(key)[0]
            _add(self.gradients, leaf, self.parts.pop((leaf, stage)))


def _alone(value: torch.Tensor, is_shared: bool) -> torch.Tensor:
    """A tensor to add to in place: contiguous, in memory that holds nothing else."""
    whole = value.untyped_storage().nbytes() == value.numel() * value.itemsize
    if whole and value.is_contiguous() and not is_shared:
        return value
    return value.clone(memory_format=torch.contiguous_format)


def _add(sums: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
    """Add to a sum, not in place: its first value may share memory with a batch or parameter."""
    sums[key] = sums[key] + value if key in sums else value
