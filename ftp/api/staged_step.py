"""A step of any function whose arguments belong to stages of a pipeline: an optimizer's update, or
an initialization.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ftp.api.build import planned_of, result_facts
from ftp.api.definition import Definition, specs_of_results, traced_for
from ftp.api.graph_checks import check_prepared, check_programs
from ftp.api.inputs import Inputs
from ftp.api.options import check_staged
from ftp.api.planned import Planned
from ftp.api.step import Step
from ftp.errors import SpecError
from ftp.paused_gc import collection_paused
from ftp.pipeline.rounds import ALL, check_rounds, split_in_rounds
from ftp.planning.planner import Watch
from ftp.report.staged import LoweredRounds
from ftp.runtime.stage_programs import Held, PiecePlanner, within_stage
from ftp.runtime.staged_program import StagedProgram
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec, staged, without_stage
from ftp.tracing.trace import Traced


def has_stages(specs: Any) -> bool:
    """Whether some spec of a tree gives a stage."""
    return any(isinstance(s, PartitionSpec) and staged(s) is not None for s in flatten(specs)[0])


class StagedStep(Step):
    """``Step`` of a function whose specs give stages; ``ftp.spmd`` makes it."""

    def __init__(self, definition: Definition):
        check_staged(definition.options)
        super().__init__(definition)

    def lower(self, *args: Any) -> LoweredRounds:  # type: ignore[override]
        """The programs for these arguments (real, fake or meta), without running them or talking to
        other ranks.
        """
        return LoweredRounds(self._known(*args).program)  # type: ignore[arg-type]

    @collection_paused()
    def _build(
        self, inputs: Inputs, watch: Watch | None = None, traced: Traced | None = None
    ) -> Planned:
        definition, options = self._definition, self._options
        traced = traced or traced_for(definition, inputs)
        out_specs, _ = specs_of_results(definition, inputs, traced)
        axis = self._axis([*inputs.specs, *(s for s in out_specs if s is not None)])
        ranks = self.mesh.axes[axis]

        def rank_of(spec: PartitionSpec | None) -> int:
            entry = None if spec is None else staged(spec)
            return ALL if entry is None else entry.stage % ranks

        placeholders = [n for n in traced.gm.graph.nodes if n.op == "placeholder"]
        in_specs = inputs.tensor_specs + [PartitionSpec()] * len(traced.constants)
        holders, due = [rank_of(s) for s in in_specs], [rank_of(s) for s in out_specs]
        rounds = split_in_rounds(traced.gm, holders, due, ranks)
        check_rounds(traced.gm.graph, rounds, due, ranks)
        within = within_stage(self.mesh, axis)
        plain = [without_stage(s) for s in in_specs]
        constants = placeholders[len(inputs.tensors) :]
        names = inputs.tensor_names + [n.name for n in constants]
        asked = {
            name: without_stage(spec)
            for name, spec in zip(rounds.results, out_specs, strict=True)
            if spec is not None
        }
        planner = PiecePlanner(
            within,
            (names, ()),
            plain,
            (),
            (),
            asked,
            replace(options, data_axes=options.data_axes or ()),
            definition.hardware,
            partial(check_prepared, mesh=within),
        )
        for node, spec in zip(placeholders, plain, strict=True):
            val = node.meta["val"]
            planner.values[node.name] = Held(spec, tuple(val.shape), val.dtype)
        programs = {
            (at, rank): planner.plan(piece)
            for at, pieces in enumerate(rounds.pieces)
            for rank, piece in sorted(pieces.items())
        }
        check_programs(programs.values(), options)
        found_specs = [
            planner.values[name].spec if spec is None else spec
            for name, spec in zip(rounds.results, out_specs, strict=True)
        ]
        program = StagedProgram(
            mesh=self.mesh,
            within=within,
            axis=axis,
            rounds=rounds,
            programs=programs,
            values=planner.values,
            inputs=[n.name for n in placeholders],
            constants=traced.constants,
            due=due,
            out_specs=found_specs,
            out_shapes=traced.out_shapes,
            **result_facts(inputs, traced),
        )
        return planned_of(definition, inputs, traced, program)

    def _axis(self, specs: Sequence[PartitionSpec]) -> str:
        """The axis of the stages; raises where there are several, or it is cut otherwise too."""
        entries = [entry for s in specs if (entry := staged(s)) is not None]
        axes = sorted({entry.axis for entry in entries})
        if len(axes) > 1:
            raise SpecError(f"The specs give stages over {' and '.join(axes)}. Use one axis.")
        cut = [s for s in specs if axes[0] in s.axes and staged(s) is None]
        if cut:
            raise SpecError(
                f"The spec {cut[0]} cuts a dim over {axes[0]!r}, whose ranks are stages of a"
                " pipeline. Leave it out, or give a stage with pipeline.place."
            )
        return axes[0]
