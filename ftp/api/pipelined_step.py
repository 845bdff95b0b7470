"""A step whose model is in stages of a pipeline: made in pieces, and run by a schedule."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ftp.api.arguments import Arguments
from ftp.api.build import planned_of, result_facts
from ftp.api.definition import Definition, specs_of_results, traced_for
from ftp.api.graph_checks import check_prepared, check_programs
from ftp.api.inputs import Inputs
from ftp.api.planned import Planned
from ftp.api.step import Step
from ftp.errors import InputError, SpecError, join_failures
from ftp.paused_gc import collection_paused
from ftp.pipeline.check import check_stages
from ftp.pipeline.placement import Pipeline
from ftp.pipeline.split import split
from ftp.planning.planner import Watch
from ftp.report.pipelined import LoweredPipeline
from ftp.runtime.pipeline_program import PipelineProgram
from ftp.runtime.stage_programs import Held, plan_stages, within_stage
from ftp.sharding.arguments import Shape
from ftp.sharding.spec import P, PartitionSpec, local_shape, without_stage
from ftp.tracing.trace import Traced


class PipelinedStep(Step):
    """``Step`` of a loss over a pipeline; ``ftp.shard(..., pipeline=)`` makes it."""

    def __init__(self, definition: Definition, pipeline: Pipeline):
        super().__init__(definition)
        self._pipeline = pipeline

    def lower(self, *args: Any) -> LoweredPipeline:  # type: ignore[override]
        """The pipeline's programs for these arguments (real, fake or meta), without running them or
        talking to other ranks.
        """
        return LoweredPipeline(self._known(*args).program)  # type: ignore[arg-type]

    @collection_paused()
    def _build(
        self, inputs: Inputs, watch: Watch | None = None, traced: Traced | None = None
    ) -> Planned:
        definition, pipeline = self._definition, self._pipeline
        call, specs, shapes = inputs.call, inputs.specs, inputs.shapes
        n = sum(position == 0 for position in call.positions)
        self._check_batch(call, specs, shapes, n)
        micro = [
            shape if i < n or shape is None else (shape[0] // pipeline.microbatches, *shape[1:])
            for i, shape in enumerate(shapes)
        ]
        traced, tensors = traced_for(definition, replace(inputs, shapes=micro)), inputs.tensors
        stage_of = [pipeline.stage_of(specs[i], call.names[i]) for i in range(n)]
        ranks = self.mesh.axes[pipeline.axis]
        actions = pipeline.actions(ranks)
        results = len(traced.out_shapes) - n
        stages = split(
            traced.gm,
            [0 if stage is None else stage for stage in stage_of],
            len(tensors) - n,
            results,
            ranks * pipeline.chunks,
            halves=any(action.kind == "I" for own in actions for action in own),
        )
        check_stages(traced.gm.graph, n, len(tensors) - n, stages, actions)
        within = within_stage(self.mesh, pipeline.axis)
        params = [without_stage(specs[i]) for i in range(n)]
        batch = [specs[i] for i in tensors[n:]]
        made = plan_stages(
            stages,
            within,
            (call.names[:n], [call.names[i] for i in tensors[n:]]),
            params,
            batch,
            traced.constants,
            self._options,
            definition.hardware,
            partial(check_prepared, mesh=within),
            stage_of,
            ranks,
        )
        programs = [*made.programs.values(), *(r.program for r in made.reductions.values())]
        check_programs(programs, self._options)
        out_specs, _ = specs_of_results(definition, inputs, traced)
        whole = [Held(specs[i], shapes[i] or (), call.leaves[i].dtype) for i in tensors]
        program = PipelineProgram(
            mesh=self.mesh,
            axis=pipeline.axis,
            pipeline=pipeline,
            actions=actions,
            made=made,
            leaves=[
                Held(spec, leaf.shape, leaf.dtype)
                for spec, leaf in zip(params, whole[:n], strict=True)
            ],
            stage_of=stage_of,
            batch=whole[n:],
            out_specs=[P() if spec is None else spec for spec in out_specs],
            out_shapes=traced.out_shapes,
            **result_facts(inputs, traced),
        )
        return planned_of(definition, inputs, traced, program)

    def _check_batch(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        n: int,
    ) -> None:
        """Raises unless every rank's rows of the batch are whole microbatches."""
        pipeline, failures = self._pipeline, []
        for leaf, spec, shape, name in zip(
            call.leaves[n:], specs[n:], shapes[n:], call.names[n:], strict=True
        ):
            if not isinstance(leaf, torch.Tensor) or shape is None:
                continue
            if pipeline.axis in spec.axes:
                raise SpecError(
                    f"{name} has spec {spec}: the ranks of {pipeline.axis!r} are stages, which all"
                    f" take the whole batch. Leave {pipeline.axis!r} out."
                )
            count = pipeline.microbatches
            rows = _rows_of_ranks(spec, shape, self.mesh.axes) if shape else {1}
            odd = [r for r in sorted(rows) if r % count]
            if not shape or odd:
                held = f", of which a rank holds {odd[0]} rows," if shape and spec.cuts(0) else ""
                failures.append(
                    f"{name} has shape {tuple(shape)}{held} which do not divide into {count}"
                    " microbatches. Give a batch of a multiple of"
                    f" {count} rows for each rank, or another number of microbatches."
                )
        if failures:
            raise InputError(join_failures(failures))


def _rows_of_ranks(spec: PartitionSpec, shape: Shape, axes: dict[str, int]) -> set[int]:
    """How many rows a rank holds of a batch tensor, for each rank that the first dim's cuts tell
    apart.
    """
    first = P(spec[0]) if len(spec) else P()
    places = itertools.product(*(range(axes[axis]) for axis in first.axes))
    return {
        local_shape(first, shape[:1], axes, dict(zip(first.axes, at, strict=True)))[0]
        for at in places
    }
