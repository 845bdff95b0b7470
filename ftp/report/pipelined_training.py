"""``LoweredTraining``: a train step over a pipeline, before it runs."""

import math
from functools import cached_property

from ftp.planning.machine import GivenHardware
from ftp.report.collectives import Collectives
from ftp.report.pipelined import LoweredPipeline
from ftp.report.staged import LoweredRounds
from ftp.runtime.pipelines.training_program import TrainingProgram
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.spec import staged, without_stage


class LoweredTraining(LoweredPipeline):
    """A whole train step over a pipeline before it runs: its microbatches, reported as by
    `LoweredPipeline`, and the update after them.

    Attributes:
        update: the update, once a step.
    """

    def __init__(self, program: TrainingProgram):
        super().__init__(program.pipeline)
        self.program = self._returning = program
        self.update = LoweredRounds(program.update)

    def collectives_of(self, rank: int) -> Collectives:
        """One record per collective and message that a rank of the pipeline's axis issues: those of
        its actions, of the sums over microbatches, of the update.
        """
        return Collectives([*super().collectives_of(rank), *self.update.collectives_of(rank)])

    @cached_property
    def memory_by_rank(self) -> tuple[int, ...]:
        """The peak bytes of each rank of the pipeline's axis: while microbatches are on their way,
        the optimizer's state held meanwhile, or in the update.
        """
        held = [self._held(rank) for rank in range(self.program.ranks)]
        while_running = super().memory_by_rank
        return tuple(
            max(most + own - self._in_pipeline(rank), self._in_update(rank, own))
            for rank, (most, own) in enumerate(zip(while_running, held, strict=True))
        )

    def _bytes(self, i: int, rank: int) -> int:
        """Bytes of an input that a rank of the axis holds."""
        held, program = self.program.inputs[i], self.program
        stage = staged(held.spec)
        if stage is not None and stage.stage % program.ranks != rank:
            return 0
        axes = program.mesh.axes
        at = {**dict.fromkeys(axes, 0), program.axis: rank}
        shape = local_shape(without_stage(held.spec), held.shape, axes, at)
        return math.prod(shape) * held.dtype.itemsize

    def _held(self, rank: int) -> int:
        return sum(self._bytes(i, rank) for i in range(len(self.program.inputs)))

    def _in_pipeline(self, rank: int) -> int:
        parts = self.program.parts
        return sum(self._bytes(i, rank) for i in {*parts.params, *parts.batch})

    def _in_update(self, rank: int, held: int) -> int:
        """The most bytes that a round adds to what the rank holds; gradients are inputs of rounds
        that read them.
        """
        parts, most = self.program.parts, 0
        gradients = sum(self._bytes(parts.params[leaf], rank) for leaf in parts.leaves)
        for own in self.update.rounds:
            lowered = own.get(rank)
            if lowered is not None:
                most = max(most, lowered.memory - sum(lowered.input_bytes.values()))
        return held + gradients + most

    def cost(self, hardware: GivenHardware = None) -> float:
        """Estimated seconds of a step, by the slowest rank."""
        rounds = [
            max((float(lowered.cost(hardware)) for lowered in own.values()), default=0.0)
            for own in self.update.rounds
        ]
        return super().cost(hardware) + sum(rounds)

    def __str__(self) -> str:
        return f"{super().__str__()}\nthen, once a step: {self.update}"
