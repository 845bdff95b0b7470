"""A train step over a pipeline as a program: the pipeline's step, then the update."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ftp.dataclass import dataclass
from ftp.pipeline.train_step import TrainStep
from ftp.runtime.pipelines.program import PipelineProgram
from ftp.runtime.pipelines.stage_programs import ProgramOfSubgraphs
from ftp.runtime.pipelines.staged_program import StagedProgram
from ftp.runtime.pipelines.subgraph_planner import StoredValue
from ftp.runtime.program import Program


@dataclass(kw_only=True)
class TrainingProgram(ProgramOfSubgraphs):
    """The program of a pipeline's ranks for a whole train step.

    Attributes:
        parts: the step's graph, cut into gradient and update.
        pipeline: runs the microbatches.
        update: runs once, on the means over microbatches.
        inputs: of the step.
    """

    parts: TrainStep
    pipeline: PipelineProgram
    update: StagedProgram
    inputs: Sequence[StoredValue]

    @property
    def subgraphs(self) -> Mapping[Any, Program]:
        return {**self.pipeline.subgraphs, **self.update.subgraphs}

    @cached_property
    def description(self) -> str:
        parts = self.parts
        return "\n".join(
            [
                self.pipeline.description,
                self.update.description,
                f"{parts.params} {parts.batch} {parts.leaves} {parts.given} {parts.means}",
            ]
        )

    def run_as_rank(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._run(inputs)

    def run_simulated(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._run(inputs)

    def _run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = self.parts
        found = self.pipeline.run([inputs[i] for i in (*parts.params, *parts.batch)])
        results = parts.results
        made = found[:results] + [found[results + leaf] for leaf in parts.leaves]
        del found
        means = [made[k] for k in parts.means]
        del made
        return self.update.run([*(inputs[i] for i in parts.given), *means])
