"""A step whose model is in stages of a pipeline: made in pieces, and run by a schedule."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ftp.api.arguments import Arguments
from ftp.api.graph_checks import check_constraints, check_local_meshes, check_programs
from ftp.api.step import InSpecs, OutSpecs, Step, _Planned
from ftp.errors import InputError, SpecError, join_failures
from ftp.paused_gc import collection_paused
from ftp.pipeline.check import check_stages
from ftp.pipeline.placement import Pipeline
from ftp.pipeline.split import split
from ftp.planning.cost import Hardware
from ftp.planning.planner import Watch
from ftp.planning.prepare import Prepared
from ftp.report.pipelined import LoweredPipeline
from ftp.runtime.options import Options
from ftp.runtime.pipeline_program import PipelineProgram
from ftp.runtime.stage_programs import Held, plan_stages, within_stage
from ftp.sharding.arguments import Shape
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import P, PartitionSpec, local_shape, without_stage
from ftp.tracing.trace import Traced


class PipelinedStep(Step):
    """``Step`` of a loss over a pipeline; ``ftp.shard(..., pipeline=)`` makes it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: InSpecs,
        out_specs: OutSpecs,
        pipeline: Pipeline,
        *,
        arguments: Sequence[str],
        options: Options,
    ):
        super().__init__(
            fn, mesh, in_specs, out_specs, arguments=arguments, state=(0,), options=options
        )
        self._pipeline = pipeline

    def lower(self, *args: Any) -> LoweredPipeline:  # type: ignore[override]
        """The pipeline's programs for these arguments (real, fake or meta), without running them or
        talking to other ranks.
        """
        return LoweredPipeline(self._known(*args).program)  # type: ignore[arg-type]

    @collection_paused()
    def _build(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        watch: Watch | None = None,
        traced: Traced | None = None,
    ) -> _Planned:
        pipeline = self._pipeline
        n = sum(position == 0 for position in call.positions)
        self._check_batch(call, specs, shapes, n)
        micro = [
            shape if i < n or shape is None else (shape[0] // pipeline.microbatches, *shape[1:])
            for i, shape in enumerate(shapes)
        ]
        traced = self._traced(call, specs, micro)
        tensors = tuple(i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor))
        out_specs, _ = self._specs_of_results(call, specs, shapes, traced)
        facts = {
            "out_specs": [P() if spec is None else spec for spec in out_specs],
            "out_shapes": traced.out_shapes,
            "tensor_leaves": tensors,
            "leaf_specs": tuple(specs),
            "out_tree": traced.out_tree,
            "out_leaves": traced.out_leaves,
            "is_static": traced.is_static,
            "assumptions": traced.assumptions,
        }
        whole = [Held(specs[i], shapes[i] or (), call.leaves[i].dtype) for i in tensors]
        program = plan_pipeline(
            pipeline,
            traced.gm,
            [call.names[i] for i in tensors],
            whole,
            range(n),
            traced.constants,
            self.mesh,
            self._options,
            self._hardware_on(self.mesh.hosts),
            facts,
        )
        return self._callable(call, shapes, traced, program)

    def _check_batch(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        n: int,
    ) -> None:
        batch = zip(call.leaves[n:], specs[n:], shapes[n:], call.names[n:], strict=True)
        check_batch(
            self._pipeline,
            self.mesh,
            [
                (spec, shape, name)
                for leaf, spec, shape, name in batch
                if isinstance(leaf, torch.Tensor) and shape is not None
            ],
        )


def plan_pipeline(
    pipeline: Pipeline,
    gm: fx.GraphModule,
    names: Sequence[str],
    inputs: Sequence[Held],
    leaves: Sequence[int],
    constants: Sequence[torch.Tensor],
    mesh: Mesh,
    options: Options,
    hardware: Hardware,
    facts: dict[str, Any],
    batch: int | None = None,
) -> PipelineProgram:
    """The program of a graph for one microbatch: parameters, batch, constants in; results, then
    gradients out.

    Args:
        names, inputs: of the parameters and the whole batch.
        leaves: which parameters the gradients are of.
        facts: the program's ``out_specs``, ``out_shapes``, ``tensor_leaves``, ``leaf_specs``,
            ``out_tree``, ``out_leaves``, ``is_static`` and ``assumptions``.
        batch: how many of the inputs are; default all but those with a gradient.

    Raises:
        ScheduleError, SpecError, PlanningError: stages or schedules that do not fit the graph.
    """
    n = len(leaves) if batch is None else len(inputs) - batch
    rows = len(inputs) - n
    stage_of = [
        pipeline.stage_of(held.spec, name) for held, name in zip(inputs[:n], names[:n], strict=True)
    ]
    ranks = mesh.axes[pipeline.axis]
    actions = pipeline.actions(ranks)
    outputs: Any = gm.graph.output_node().args[0]
    stages = split(
        gm,
        [0 if stage is None else stage for stage in stage_of],
        rows,
        len(outputs) - len(leaves),
        leaves,
        ranks * pipeline.chunks,
        halves=any(action.kind == "I" for own in actions for action in own),
    )
    check_stages(gm.graph, n, rows, leaves, stages, actions)
    within = within_stage(mesh, pipeline.axis)

    def check(prepared: Prepared) -> None:
        check_constraints(prepared.constraints, within)
        check_local_meshes(prepared.graph, within)

    params = [without_stage(held.spec) for held in inputs[:n]]
    made = plan_stages(
        stages,
        within,
        (names[:n], names[n:]),
        params,
        [held.spec for held in inputs[n:]],
        constants,
        options,
        hardware,
        check,
        stage_of,
        ranks,
    )
    programs = [*made.programs.values(), *(r.program for r in made.reductions.values())]
    check_programs(programs, options)
    return PipelineProgram(
        mesh=mesh,
        axis=pipeline.axis,
        pipeline=pipeline,
        actions=actions,
        made=made,
        leaves=[
            Held(spec, held.shape, held.dtype)
            for spec, held in zip(params, inputs[:n], strict=True)
        ],
        stage_of=stage_of,
        batch=list(inputs[n:]),
        **facts,
    )


def check_batch(
    pipeline: Pipeline, mesh: Mesh, batch: Sequence[tuple[PartitionSpec, Shape, str]]
) -> None:
    """Raises unless every rank's rows of the batch are whole microbatches.

    Args:
        batch: spec, shape and name of its tensors.
    """
    failures = []
    for spec, shape, name in batch:
        if pipeline.axis in spec.axes:
            raise SpecError(
                f"{name} has spec {spec}: the ranks of {pipeline.axis!r} are stages, which all"
                f" take the whole batch. Leave {pipeline.axis!r} out."
            )
        count = pipeline.microbatches
        rows = _rows_of_ranks(spec, shape, mesh.axes) if shape else {1}
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
