"""A whole train step over a pipeline: its gradient microbatch by microbatch, then the optimizer's
update once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ftp.api.build import planned_of, result_facts
from ftp.api.definition import specs_of_results, traced_for
from ftp.api.inputs import Inputs
from ftp.api.pipelined_step import StepOfMicrobatches, check_batch, held_of, plan_pipeline
from ftp.api.planned import Planned
from ftp.api.staged_step import plan_rounds
from ftp.errors import InputError
from ftp.ops.microbatch_means import Means, noting_means
from ftp.paused_gc import collection_paused
from ftp.pipeline.train_step import (
    Noted,
    TrainStep,
    batch_of,
    check_parts,
    cut_at_means,
    is_alike_after,
)
from ftp.planning.problem import Watch
from ftp.report.pipelined_training import LoweredTraining
from ftp.runtime.pipelines.stage_programs import within_stage
from ftp.runtime.pipelines.training_program import TrainingProgram
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import P, PartitionSpec, staged
from ftp.tracing.trace import Traced


class PipelinedTrainStep(StepOfMicrobatches):
    """``Step`` of a function that does more after it takes a gradient; ``ftp.spmd(..., pipeline=)``
    makes it.
    """

    def lower(self, *args: Any) -> LoweredTraining:
        """The step's programs for these arguments (real, fake or meta), without running them or
        talking to other ranks.
        """
        return LoweredTraining(self._known(*args).program)  # type: ignore[arg-type]

    @collection_paused()
    def _build(
        self, inputs: Inputs, watch: Watch | None = None, traced: Traced | None = None
    ) -> Planned:
        definition, call = self._definition, inputs.call
        names, specs, shapes = inputs.tensor_names, inputs.specs, inputs.shapes
        whole, noted = self._noted(inputs)
        traced, (out_specs, returned) = whole, specs_of_results(definition, inputs, whole)
        in_stages = {call.positions[i] for i, s in enumerate(specs) if staged(s) is not None}
        state = definition.state.union(returned, in_stages)
        is_state = [position in state for position in inputs.tensor_positions]
        batch = batch_of(traced.gm, noted, is_state)
        at = {inputs.tensors[k] for k in batch}
        given = [(specs[i], shapes[i] or (), call.names[i]) for i in sorted(at)]
        check_batch(self._pipeline, self.mesh, given)
        if not noted.batch:
            # That trace told which arguments are state. Trace again, with one microbatch of the
            # others.
            count = self._pipeline.microbatches
            micro = [
                (shape[0] // count, *shape[1:]) if i in at and shape else shape
                for i, shape in enumerate(shapes)
            ]
            of_one = replace(inputs, shapes=micro)
            traced, noted = self._noted(of_one)
            out_specs, _ = specs_of_results(definition, of_one, traced)
        parts = cut_at_means(traced.gm, noted, names, batch)
        check_parts(traced.gm, noted, parts, len(names))
        if traced is not whole:
            self._check_sizes(noted, whole, traced)
        program = self._program(parts, inputs, traced, out_specs[: noted.results])
        return planned_of(definition, inputs, traced, program)

    def _noted(self, inputs: Inputs) -> tuple[Traced, Noted]:
        """A trace of the function, with its means over microbatches."""
        with noting_means(self._pipeline.microbatches) as means:
            within = within_stage(self.mesh, self._pipeline.axis)
            traced = traced_for(self._definition, inputs, mesh=within)
        _check_means(means)
        if means.batch and self._takes_key:
            raise InputError(
                "rng=True, and the step's gradient is one of ftp.optim.accumulate, whose"
                " microbatches draw from one key in turn; those of a pipeline run on several ranks."
                " Take the gradient without accumulate, or leave rng=True out and give accumulate"
                f" the keys, ftp.random.split(key, {self._pipeline.microbatches}), as a batch"
                " argument of spec P(): fn(params, x, rng=keys[0])."
            )
        is_gradient = tuple(x is not None for x in means.of)
        results = sum(not static for static in traced.is_static)
        return traced, Noted(results, is_gradient, len(means.batch))

    def _check_sizes(self, noted: Noted, whole: Traced, traced: Traced) -> None:
        """Raises if ops after the gradient depend on the size of the batch: the trace saw one
        microbatch.
        """
        is_alike = is_alike_after(traced.gm, whole.gm, noted)
        if not is_alike or whole.out_leaves != traced.out_leaves:
            raise InputError(
                "What the step does after its gradient depends on the size of the batch, of which a"
                " pipeline takes one microbatch at a time. Compute it in the function that is"
                " differentiated, or give the number as an argument."
            )

    def _program(
        self,
        parts: TrainStep,
        inputs: Inputs,
        traced: Traced,
        out_specs: Sequence[PartitionSpec | None],
    ) -> TrainingProgram:
        held, names = held_of(inputs), inputs.tensor_names
        taken = [*parts.params, *parts.batch]
        specs = [P()] * parts.results + [held[parts.params[leaf]].spec for leaf in parts.leaves]
        pipeline = plan_pipeline(
            self._definition,
            self._pipeline,
            parts.microbatch,
            [names[i] for i in taken],
            [held[i] for i in taken],
            parts.leaves,
            len(parts.batch),
            [traced.constants[i] for i in parts.constants],
            specs,
            _flat(len(taken), len(specs)),
        )
        means = [
            f"mean {k}"
            if k < parts.results
            else f"the gradient of {names[parts.params[parts.leaves[k - parts.results]]]}"
            for k in parts.means
        ]
        update = plan_rounds(
            self._definition,
            parts.update,
            [*(names[i] for i in parts.given), *means],
            [*(held[i].spec for i in parts.given), *(specs[k] for k in parts.means)],
            [traced.constants[i] for i in parts.update_constants],
            out_specs,
            _flat(len(parts.given) + len(means), len(out_specs)),
        )
        return TrainingProgram(
            mesh=self.mesh,
            axis=self._pipeline.axis,
            parts=parts,
            pipeline=pipeline,
            update=update,
            inputs=held,
            out_specs=update.out_specs,
            out_shapes=update.out_shapes,
            **result_facts(inputs, traced),
        )


def _check_means(means: Means) -> None:
    if means.calls == 1 and any(x is not None for x in means.of):
        return
    found = "no gradient" if not means.calls else f"{means.calls} gradients"
    if means.calls == 1:
        found = "a gradient that is not like the parameters which accumulate is given"
    raise InputError(
        f"pipeline= in spmd, and the function takes {found}. Microbatches are those of one"
        " gradient: call torch.func.grad_and_value(loss_fn)(params, ...) once, or"
        " ftp.optim.accumulate of it. A loss alone is ftp.shard(loss_fn, ..., pipeline=). A"
        " function without a gradient, an evaluation, takes placed parameters without pipeline=."
    )


def _flat(inputs: int, outputs: int) -> dict[str, Any]:
    """The facts of a program that takes and returns tensors in a row."""
    return {
        "tensor_leaves": tuple(range(inputs)),
        "leaf_specs": (),
        "out_tree": flatten((0,) * outputs)[1],
        "out_leaves": tuple(range(outputs)),
        "is_static": (False,) * outputs,
        "assumptions": (),
    }
