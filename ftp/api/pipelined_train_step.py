"""A whole train step over a pipeline: its gradient microbatch by microbatch, and what follows, an
optimizer's update, once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ftp.api.arguments import Arguments
from ftp.api.pipelined_step import check_batch, plan_pipeline
from ftp.api.staged_step import plan_rounds
from ftp.api.step import InSpecs, OutSpecs, Step, _Planned
from ftp.errors import InputError
from ftp.ops.microbatch_means import Means, noting_means
from ftp.paused_gc import collection_paused
from ftp.pipeline.placement import Pipeline
from ftp.pipeline.train_step import Noted, TrainStep, batch_of, cut_at_means
from ftp.planning.planner import Watch
from ftp.report.pipelined_training import LoweredTraining
from ftp.runtime.options import Options
from ftp.runtime.stage_programs import Held
from ftp.runtime.training_program import TrainingProgram
from ftp.sharding.arguments import Shape
from ftp.sharding.mesh import Mesh
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import P, PartitionSpec
from ftp.tracing.trace import Traced


class PipelinedTrainStep(Step):
    """``Step`` of a function that takes a gradient and goes on; ``ftp.spmd(..., pipeline=)`` makes
    it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: InSpecs,
        out_specs: OutSpecs,
        pipeline: Pipeline,
        *,
        arguments: Sequence[str],
        state: Sequence[int],
        options: Options,
    ):
        super().__init__(
            fn, mesh, in_specs, out_specs, arguments=arguments, state=state, options=options
        )
        self._pipeline = pipeline

    def lower(self, *args: Any) -> LoweredTraining:  # type: ignore[override]
        """The step's programs for these arguments (real, fake or meta), without running them or
        talking to other ranks.
        """
        return LoweredTraining(self._known(*args).program)  # type: ignore[arg-type]

    @collection_paused()
    def _build(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        watch: Watch | None = None,
        traced: Traced | None = None,
    ) -> _Planned:
        tensors = tuple(i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor))
        names = [call.names[i] for i in tensors]
        # First of the whole batch, which tells what is state.
        whole, noted = self._noted(call, specs, shapes)
        _, returned = self._specs_of_results(call, specs, shapes, whole)
        state = self._state.union(returned)
        batch = batch_of(
            whole.gm, noted, {k for k, i in enumerate(tensors) if call.positions[i] in state}
        )
        at = {tensors[k] for k in batch}
        check_batch(
            self._pipeline,
            self.mesh,
            [(specs[i], shapes[i] or (), call.names[i]) for i in sorted(at)],
        )
        count = self._pipeline.microbatches
        micro = [
            (shape[0] // count, *shape[1:]) if i in at and shape else shape
            for i, shape in enumerate(shapes)
        ]
        traced, noted = self._noted(call, specs, micro)
        parts = cut_at_means(traced.gm, noted, names, batch)
        self._check_sizes(parts, cut_at_means(whole.gm, noted, names, batch), whole, traced)
        out_specs, _ = self._specs_of_results(call, specs, micro, traced)
        held = [Held(specs[i], shapes[i] or (), call.leaves[i].dtype) for i in tensors]
        program = self._program(parts, names, held, traced, out_specs[: noted.results])
        program.tensor_leaves, program.leaf_specs = tensors, tuple(specs)
        return self._callable(call, shapes, traced, program)

    def _noted(
        self, call: Arguments, specs: Sequence[PartitionSpec], shapes: Sequence[Shape | None]
    ) -> tuple[Traced, Noted]:
        """The function traced, with its means over microbatches."""
        with noting_means(self._pipeline.microbatches) as means:
            traced = self._traced(call, specs, shapes)
        _check_means(means)
        is_gradient = tuple(x is not None for x in means.of)
        results = sum(not static for static in traced.is_static)
        return traced, Noted(results, is_gradient, len(means.batch))

    def _check_sizes(
        self, parts: TrainStep, of_whole: TrainStep, whole: Traced, traced: Traced
    ) -> None:
        """Raises where what follows the gradient depends on how many rows there are, of which the
        trace saw a microbatch's.
        """
        if parts.text != of_whole.text or whole.out_leaves != traced.out_leaves:
            raise InputError(
                "What the step does after its gradient depends on the size of the batch, of which a"
                " pipeline takes one microbatch at a time. Compute it in the function that is"
                " differentiated, or give the number as an argument."
            )

    def _program(
        self,
        parts: TrainStep,
        names: Sequence[str],
        held: Sequence[Held],
        traced: Traced,
        out_specs: Sequence[PartitionSpec | None],
    ) -> TrainingProgram:
        mesh, options = self.mesh, self._options
        hardware = self._hardware_on(mesh.hosts)
        inputs = [*parts.params, *parts.batch]
        of_gradients = [held[parts.params[leaf]] for leaf in parts.leaves]
        outputs: Any = parts.microbatch.graph.output_node().args[0]
        shapes = [tuple(node.meta["val"].shape) for node in outputs]
        specs = [P()] * parts.results + [x.spec for x in of_gradients]
        pipeline = plan_pipeline(
            self._pipeline,
            parts.microbatch,
            [names[i] for i in inputs],
            [held[i] for i in inputs],
            parts.leaves,
            [traced.constants[i] for i in parts.constants],
            mesh,
            options,
            hardware,
            {"out_specs": specs, "out_shapes": shapes, **_flat(len(inputs), len(outputs))},
            batch=len(parts.batch),
        )
        given = [held[i].spec for i in parts.given] + [specs[k] for k in parts.means]
        called = [names[i] for i in parts.given]
        called += [f"mean {k}" for k in range(len(parts.means))]
        update = plan_rounds(
            parts.update,
            called,
            given,
            [traced.constants[i] for i in parts.update_constants],
            out_specs,
            mesh,
            options,
            hardware,
            _flat(len(given), len(out_specs)),
        )
        return TrainingProgram(
            mesh=mesh,
            axis=self._pipeline.axis,
            parts=parts,
            pipeline=pipeline,
            update=update,
            inputs=held,
            out_specs=update.out_specs,
            out_shapes=update.out_shapes,
            tensor_leaves=(),
            leaf_specs=(),
            out_tree=traced.out_tree,
            out_leaves=traced.out_leaves,
            is_static=traced.is_static,
            assumptions=traced.assumptions,
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
        " ftp.optim.accumulate of it. A loss alone is ftp.shard(loss_fn, ..., pipeline=)."
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
