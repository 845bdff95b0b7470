"""A step of any function whose arguments belong to stages of a pipeline: an optimizer's update, or
an initialization.
"""

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
from ftp.api.options import check_staged
from ftp.api.planned import Planned
from ftp.api.step import Step
from ftp.errors import SpecError
from ftp.paused_gc import collection_paused
from ftp.pipeline.check_stacks import check_parts_of_stacks
from ftp.pipeline.rounds import ALL, check_rounds, split_in_rounds
from ftp.pipeline.stacked import Stacks, is_stack, stacks_of, with_parts
from ftp.planning.problem import Watch
from ftp.report.staged import LoweredRounds
from ftp.runtime.pipelines.stage_programs import within_stage
from ftp.runtime.pipelines.staged_program import StagedProgram
from ftp.runtime.pipelines.subgraph_planner import StoredValue, SubgraphPlanner
from ftp.sharding.spec import PartitionSpec, staged, without_stage
from ftp.tracing.trace import Traced


class StagedStep(Step):
    """``Step`` of a function whose specs give stages; ``ftp.spmd`` makes it."""

    def __init__(self, definition: Definition):
        check_staged(definition.options, is_pipeline=False)
        super().__init__(definition)

    def lower(self, *args: Any) -> LoweredRounds:
        """The programs for these arguments (real, fake or meta), without running them or talking to
        other ranks.
        """
        return LoweredRounds(self._known(*args).program)  # type: ignore[arg-type]

    @collection_paused()
    def _build(
        self, inputs: Inputs, watch: Watch | None = None, traced: Traced | None = None
    ) -> Planned:
        definition = self._definition
        axes = {entry.axis for spec in inputs.specs if (entry := staged(spec)) is not None}
        within = within_stage(self.mesh, axes.pop()) if len(axes) == 1 else None
        traced = traced or traced_for(definition, inputs, mesh=within)
        out_specs, _ = specs_of_results(definition, inputs, traced)
        program = plan_rounds(
            definition,
            traced.gm,
            inputs.tensor_names,
            inputs.tensor_specs,
            traced.constants,
            out_specs,
            result_facts(inputs, traced),
        )
        return planned_of(definition, inputs, traced, program)


def plan_rounds(
    definition: Definition,
    gm: fx.GraphModule,
    names: Sequence[str],
    specs: Sequence[PartitionSpec],
    constants: Sequence[torch.Tensor],
    out_specs: Sequence[PartitionSpec | None],
    facts: dict[str, Any],
) -> StagedProgram:
    """The program of a functional graph whose inputs belong to stages.

    Args:
        names, specs: of the graph's inputs; those that follow are the ``constants``.
        facts: as of `result_facts`.

    Raises:
        SpecError: stages over several axes, or over one that specs also cut dims over.
    """
    mesh, options = definition.mesh, definition.options
    axis = _axis([*specs, *(s for s in out_specs if s is not None)])
    ranks = mesh.axes[axis]
    count = len(names)
    outputs: Any = gm.graph.output_node().args[0]
    out_shapes = [tuple(node.meta["val"].shape) for node in outputs]
    # From here on a stack of layers that the axis cuts is one argument per rank.
    stacks, whole_specs = stacks_of(gm, specs, out_specs, axis, ranks), out_specs
    if not stacks.is_empty:
        traced, gm = gm, with_parts(gm, stacks)
        check_parts_of_stacks(traced.graph, gm.graph, stacks.inputs, stacks.outputs)
        places = stacks.places(stacks.inputs[: len(names)])
        names = [names[i] if r is None else f"{names[i]} of rank {r}" for i, r in places]
        specs = stacks.specs(specs, stacks.inputs, axis)
        out_specs = stacks.specs(out_specs, stacks.outputs, axis)

    def rank_of(spec: PartitionSpec | None) -> int:
        entry = None if spec is None else staged(spec)
        return ALL if entry is None else entry.stage % ranks

    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    in_specs = [*specs, *[PartitionSpec()] * len(constants)]
    holders, due = [rank_of(s) for s in in_specs], [rank_of(s) for s in out_specs]
    rounds = split_in_rounds(gm, holders, due, ranks)
    check_rounds(gm.graph, rounds, due, ranks)
    within = within_stage(mesh, axis)
    plain = [without_stage(s) for s in in_specs]
    asked = {
        name: without_stage(spec)
        for name, spec in zip(rounds.results, out_specs, strict=True)
        if spec is not None
    }
    planner = SubgraphPlanner(
        within,
        ([*names, *(n.name for n in placeholders[len(names) :])], ()),
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
        planner.values[node.name] = StoredValue(spec, tuple(val.shape), val.dtype)
    programs = {
        (at, rank): planner.plan(subgraph)
        for at, subgraphs in enumerate(rounds.subgraphs)
        for rank, subgraph in sorted(subgraphs.items())
    }
    check_programs(programs.values(), options)
    at = [k for k, (_, r) in enumerate(stacks.places(stacks.outputs)) if r in (None, 0)]
    found_specs = [
        planner.values[rounds.results[k]].spec if spec is None else spec
        for k, spec in zip(at, whole_specs, strict=True)
    ]
    return StagedProgram(
        mesh=mesh,
        within=within,
        axis=axis,
        rounds=rounds,
        programs=programs,
        values=planner.values,
        inputs=[n.name for n in placeholders],
        constants=constants,
        due=due,
        out_specs=found_specs,
        out_shapes=out_shapes,
        stacks=Stacks(stacks.inputs[:count], stacks.outputs),
        **facts,
    )


def _axis(specs: Sequence[PartitionSpec]) -> str:
    """The axis of the stages; raises if there are several, or if specs also cut dims over it."""
    entries = [entry for s in specs if (entry := staged(s)) is not None]
    axes = sorted({entry.axis for entry in entries})
    if len(axes) > 1:
        raise SpecError(f"The specs give stages over {' and '.join(axes)}. Use one axis.")
    cut = [s for s in specs if axes[0] in s.axes and staged(s) is None and not is_stack(s, axes[0])]
    if cut:
        raise SpecError(
            f"The spec {cut[0]} cuts a dim over {axes[0]!r}, whose ranks are stages of a"
            " pipeline. Leave it out, or give a stage with pipeline.place. A stack of layers has"
            f" {axes[0]!r} alone on dim 0."
        )
    return axes[0]
