"""A step whose model is in stages of a pipeline: planned as subgraphs, and run by a schedule."""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ftp.api.build import planned_of, result_facts
from ftp.api.definition import Definition, specs_of_results, traced_for
from ftp.api.graph_checks import check_prepared, check_programs
from ftp.api.inputs import Inputs
from ftp.api.planned import Planned
from ftp.api.step import Step
from ftp.errors import InputError, PlanWarning, SpecError, raise_all
from ftp.paused_gc import collection_paused
from ftp.pipeline.buffers import check_buffers, most_on_their_way
from ftp.pipeline.check import check_stages
from ftp.pipeline.check_stacks import check_parts_of_stacks
from ftp.pipeline.placement import Pipeline
from ftp.pipeline.split import split
from ftp.pipeline.stacked import Stacks, stacks_of, with_parts
from ftp.pipeline.subgraphs import Stages
from ftp.pipeline.value_stages import with_computed_outputs, with_constant_seeds
from ftp.planning.problem import Watch
from ftp.random.distributions import is_key
from ftp.random.distributions import split as split_key
from ftp.report.pipelined import LoweredPipeline
from ftp.runtime.pipelines.program import PipelineProgram
from ftp.runtime.pipelines.stage_programs import plan_stages, within_stage
from ftp.runtime.pipelines.subgraph_planner import StoredValue
from ftp.sharding.arguments import Shape
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import P, PartitionSpec, staged, without_stage
from ftp.tracing.trace import Traced


class StepOfMicrobatches(Step):
    """A ``Step`` over a pipeline.

    Args:
        takes_key: the last argument is a random key; each microbatch gets another key made from it.
    """

    def __init__(self, definition: Definition, pipeline: Pipeline, *, takes_key: bool = False):
        super().__init__(definition)
        self._pipeline, self._takes_key = pipeline, takes_key

    def __call__(self, *args: Any, **unexpected: Any) -> Any:
        return super().__call__(*self._with_keys(args), **unexpected)

    def _known(self, *args: Any) -> Planned:
        return super()._known(*self._with_keys(args))

    def _with_keys(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with the last one, a key, replaced by a row of keys, one per microbatch. A
        value that is no key stays: the check of arguments reports it on all ranks.
        """
        if not (self._takes_key and args and is_key(args[-1])):
            return args
        return (*args[:-1], split_key(args[-1], self._pipeline.microbatches))


class PipelinedStep(StepOfMicrobatches):
    """``Step`` of a loss over a pipeline; ``ftp.shard(..., pipeline=)`` makes it."""

    def lower(self, *args: Any) -> LoweredPipeline:
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
        batch = zip(call.leaves[n:], specs[n:], shapes[n:], call.names[n:], strict=True)
        given = [(spec, shape, name) for _, spec, shape, name in batch if shape is not None]
        check_batch(pipeline, self.mesh, given)
        micro = [
            shape if i < n or shape is None else (shape[0] // pipeline.microbatches, *shape[1:])
            for i, shape in enumerate(shapes)
        ]
        within = within_stage(self.mesh, pipeline.axis)
        traced = traced_for(definition, replace(inputs, shapes=micro), mesh=within)
        out_specs, _ = specs_of_results(definition, inputs, traced)
        program = plan_pipeline(
            definition,
            pipeline,
            traced.gm,
            inputs.tensor_names,
            held_of(inputs),
            range(n),
            len(inputs.tensors) - n,
            traced.constants,
            [P() if spec is None else spec for spec in out_specs],
            result_facts(inputs, traced),
        )
        return planned_of(definition, inputs, traced, program)


def held_of(inputs: Inputs) -> list[StoredValue]:
    """Spec, global shape and dtype of each tensor of a call."""
    leaves, specs, shapes = inputs.call.leaves, inputs.specs, inputs.shapes
    return [StoredValue(specs[i], shapes[i] or (), leaves[i].dtype) for i in inputs.tensors]


def plan_pipeline(
    definition: Definition,
    pipeline: Pipeline,
    gm: fx.GraphModule,
    names: Sequence[str],
    inputs: Sequence[StoredValue],
    leaves: Sequence[int],
    batch: int,
    constants: Sequence[torch.Tensor],
    out_specs: Sequence[PartitionSpec],
    facts: dict[str, Any],
) -> PipelineProgram:
    """The program of a graph for one microbatch: parameters, batch, constants in; results, then
    gradients out.

    Args:
        names, inputs: of the parameters and the whole batch.
        leaves: indices of the parameters that have gradients.
        batch: number of inputs that belong to the batch: the last ones.
        facts: of `result_facts`.

    Raises:
        ScheduleError, SpecError, PlanningError: stages or schedules that do not fit the graph.
    """
    mesh, options, ranks = definition.mesh, definition.options, definition.mesh.axes[pipeline.axis]
    traced = with_computed_outputs(gm)
    gm = with_constant_seeds(traced)
    whole: Any = gm.graph.output_node().args[0]
    out_shapes = [tuple(node.meta["val"].shape) for node in whole]
    # From here on a stack of layers that the axis cuts is one parameter per rank.
    count, results = len(inputs), len(whole) - len(leaves)
    stacks = stacks_of(gm, [held.spec for held in inputs], out_specs, pipeline.axis, ranks)
    if not stacks.is_empty:
        pipeline.check_stacks(ranks)
        gm, places = with_parts(gm, stacks, names), stacks.places(stacks.inputs[: len(inputs)])
        check_parts_of_stacks(traced.graph, gm.graph, stacks.inputs, stacks.outputs)
        traced = gm
        leaves = [k for leaf in leaves for k, (i, _) in enumerate(places) if i == leaf]
        names = [names[i] if r is None else f"{names[i]} of rank {r}" for i, r in places]
        specs = stacks.specs([held.spec for held in inputs], stacks.inputs, pipeline.axis)
        inputs = [
            replace(inputs[i], spec=spec, shape=stacks.shape(inputs[i].shape, i, r))
            for (i, r), spec in zip(places, specs, strict=True)
        ]
    n = len(inputs) - batch
    stage_of = pipeline.stages_of([held.spec for held in inputs[:n]], names[:n], ranks)
    actions = pipeline.actions(ranks)
    outputs: Any = gm.graph.output_node().args[0]
    stages = split(
        gm,
        [0 if stage is None else stage for stage in stage_of],
        batch,
        len(outputs) - len(leaves),
        leaves,
        ranks * pipeline.chunks,
        {(action.kind, action.stage) for own in actions for action in own},
    )
    check_stages(traced.graph, n, batch, leaves, stages, actions)
    _warn_of_idle_stages(stages, stage_of, names)
    most = most_on_their_way(actions, ranks * pipeline.chunks)
    check_buffers(actions, ranks * pipeline.chunks, most)
    within = within_stage(mesh, pipeline.axis)
    params = [without_stage(held.spec) for held in inputs[:n]]
    made = plan_stages(
        stages,
        within,
        (names[:n], names[n:]),
        params,
        [held.spec for held in inputs[n:]],
        constants,
        options,
        definition.hardware,
        partial(check_prepared, mesh=within),
        stage_of,
        ranks,
        _copied(pipeline, inputs[n:], within),
    )
    programs = [*made.programs.values(), *made.first.values()]
    programs += [r.program for r in made.reductions.values()]
    check_programs(programs, options)
    return PipelineProgram(
        mesh=mesh,
        axis=pipeline.axis,
        pipeline=pipeline,
        actions=actions,
        on_their_way=most,
        made=made,
        leaves=[
            StoredValue(spec, held.shape, held.dtype)
            for spec, held in zip(params, inputs[:n], strict=True)
        ],
        stage_of=stage_of,
        batch=list(inputs[n:]),
        out_specs=list(out_specs),
        out_shapes=out_shapes,
        # It returns a gradient for every parameter.
        stacks=Stacks(stacks.inputs[:count], (None,) * results + stacks.inputs[: count - batch]),
        **facts,
    )


def _warn_of_idle_stages(
    stages: Stages, stage_of: Sequence[int | None], names: Sequence[str]
) -> None:
    """Warn of a stage whose parameters only later stages read: the op that reads them also reads a
    value computed there.
    """
    for k in range(len(stages.forward)):
        read = [i for i, at in enumerate(stages.borrowed) if at and stage_of[i] == k]
        if ("F", k) in stages.subgraphs or not read:
            continue
        later = min(stages.borrowed[read[0]])
        first = next(i for i in stages.subgraphs["F", later].params if stage_of[i] == later)
        warnings.warn(
            f"Stage {k} of the pipeline computes nothing: {names[read[0]]}, of stage {k}, is read"
            f" at stage {later}, after {names[first]}, of stage {later}. Give that one an earlier"
            " stage: by stages= of ftp.Pipeline, or first in the tree.",
            PlanWarning,
            stacklevel=2,
        )


def _copied(pipeline: Pipeline, batch: Sequence[StoredValue], within: Mesh) -> list[bool]:
    """Per batch tensor, whether a microbatch is a copy because its rows are not adjacent."""
    count = pipeline.microbatches
    rows = (local_shape(held.spec, held.shape, within.axes)[0] for held in batch)
    return [1 < count < n for n in rows]


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
            frozen = (
                " Parameters without a gradient are arguments of ftp.spmd("
                "torch.func.grad_and_value(loss_fn), ..., pipeline=)."
            )
            raise SpecError(
                f"{name} has spec {spec}: the ranks of {pipeline.axis!r} are stages, which all"
                f" take the whole batch. Leave {pipeline.axis!r} out."
                f"{frozen if staged(spec) is not None else ''}"
            )
        count = pipeline.microbatches
        if not shape:
            failures.append(
                f"{name} is 0-d: it has no rows, of which each microbatch takes some. Give"
                f" {name}.expand({count}) of spec P(), and read element 0 in the function, or a"
                " Python number."
            )
            continue
        rows = _rows_of_ranks(spec, shape, mesh.axes)
        odd = [r for r in sorted(rows) if r % count]
        if odd:
            held = f", of which a rank holds {odd[0]} rows," if spec.cuts(0) else ""
            key = f" Of a random key give ftp.random.split(key, {count})." if shape == (2,) else ""
            failures.append(
                f"{name} has shape {tuple(shape)}{held} which do not divide into {count}"
                " microbatches. Give a batch of a multiple of"
                f" {count} rows for each rank, or another number of microbatches.{key}"
            )
    raise_all(InputError, failures)


def _rows_of_ranks(spec: PartitionSpec, shape: Shape, axes: dict[str, int]) -> set[int]:
    """The numbers of rows of a batch tensor that ranks hold, under all cuts of its first dim."""
    first = P(spec[0]) if len(spec) else P()
    places = itertools.product(*(range(axes[axis]) for axis in first.axes))
    return {
        local_shape(first, shape[:1], axes, dict(zip(first.axes, at, strict=True)))[0]
        for at in places
    }
