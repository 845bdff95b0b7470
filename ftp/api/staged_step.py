"""A step of any function whose arguments belong to stages of a pipeline: an optimizer's update, or
an initialization.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ftp.api.arguments import Arguments
from ftp.api.graph_checks import check_constraints, check_local_meshes, check_programs
from ftp.api.options import check_staged
from ftp.api.step import Step, _Planned
from ftp.errors import SpecError
from ftp.paused_gc import collection_paused
from ftp.pipeline.rounds import ALL, check_rounds, split_in_rounds
from ftp.planning.cost import Hardware
from ftp.planning.planner import Watch
from ftp.planning.prepare import Prepared
from ftp.report.staged import LoweredRounds
from ftp.runtime.options import Options
from ftp.runtime.stage_programs import Held, PiecePlanner, within_stage
from ftp.runtime.staged_program import StagedProgram
from ftp.sharding.arguments import Shape
from ftp.sharding.mesh import Mesh
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec, staged, without_stage
from ftp.tracing.trace import Traced


def has_stages(specs: Any) -> bool:
    """Whether some spec of a tree gives a stage."""
    return any(isinstance(s, PartitionSpec) and staged(s) is not None for s in flatten(specs)[0])


class StagedStep(Step):
    """``Step`` of a function whose specs give stages; ``ftp.spmd`` makes it."""

    def __init__(self, *args: Any, options: Options, **kwargs: Any):
        check_staged(options)
        super().__init__(*args, options=options, **kwargs)

    def lower(self, *args: Any) -> LoweredRounds:  # type: ignore[override]
        """The programs for these arguments (real, fake or meta), without running them or talking to
        other ranks.
        """
        return LoweredRounds(self._known(*args).program)  # type: ignore[arg-type]

    @collection_paused()
    def _build(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        watch: Watch | None = None,
        traced: Traced | None = None,
    ) -> _Planned:
        traced = traced or self._traced(call, specs, shapes)
        out_specs, _ = self._specs_of_results(call, specs, shapes, traced)
        tensors = tuple(i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor))
        facts = {
            "tensor_leaves": tensors,
            "leaf_specs": tuple(specs),
            "out_tree": traced.out_tree,
            "out_leaves": traced.out_leaves,
            "is_static": traced.is_static,
            "assumptions": traced.assumptions,
        }
        program = plan_rounds(
            traced.gm,
            [call.names[i] for i in tensors],
            [specs[i] for i in tensors],
            traced.constants,
            out_specs,
            self.mesh,
            self._options,
            self._hardware_on(self.mesh.hosts),
            facts,
        )
        return self._callable(call, shapes, traced, program)


def plan_rounds(
    gm: fx.GraphModule,
    names: Sequence[str],
    specs: Sequence[PartitionSpec],
    constants: Sequence[torch.Tensor],
    out_specs: Sequence[PartitionSpec | None],
    mesh: Mesh,
    options: Options,
    hardware: Hardware,
    facts: dict[str, Any],
) -> StagedProgram:
    """The program of a functional graph whose inputs belong to stages.

    Args:
        names, specs: of the graph's inputs; those that follow are the ``constants``.
        facts: the program's ``tensor_leaves``, ``leaf_specs``, ``out_tree``, ``out_leaves``,
            ``is_static`` and ``assumptions``.

    Raises:
        SpecError: stages over several axes, or over one that is cut otherwise too.
    """
    axis = _axis([*specs, *(s for s in out_specs if s is not None)])
    ranks = mesh.axes[axis]

    def rank_of(spec: PartitionSpec | None) -> int:
        entry = None if spec is None else staged(spec)
        return ALL if entry is None else entry.stage % ranks

    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    in_specs = [*specs, *[PartitionSpec()] * len(constants)]
    holders, due = [rank_of(s) for s in in_specs], [rank_of(s) for s in out_specs]
    rounds = split_in_rounds(gm, holders, due, ranks)
    check_rounds(gm.graph, rounds, due, ranks)
    within = within_stage(mesh, axis)

    def check(prepared: Prepared) -> None:
        check_constraints(prepared.constraints, within)
        check_local_meshes(prepared.graph, within)

    plain = [without_stage(s) for s in in_specs]
    called = [*names, *(n.name for n in inputs[len(names) :])]
    asked = {
        name: without_stage(spec)
        for name, spec in zip(rounds.results, out_specs, strict=True)
        if spec is not None
    }
    planner = PiecePlanner(
        within,
        (called, ()),
        plain,
        (),
        (),
        asked,
        replace(options, data_axes=options.data_axes or ()),
        hardware,
        check,
    )
    for node, spec in zip(inputs, plain, strict=True):
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
    outputs: Any = gm.graph.output_node().args[0]
    return StagedProgram(
        mesh=mesh,
        within=within,
        axis=axis,
        rounds=rounds,
        programs=programs,
        values=planner.values,
        inputs=[n.name for n in inputs],
        constants=constants,
        due=due,
        out_specs=found_specs,
        out_shapes=[tuple(node.meta["val"].shape) for node in outputs],
        **facts,
    )


def _axis(specs: Sequence[PartitionSpec]) -> str:
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
