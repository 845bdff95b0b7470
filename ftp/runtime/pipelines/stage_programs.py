"""The subgraphs of a pipeline's stages as planned programs: each over the mesh axes other than the
pipeline's. A value that crosses stages keeps the sharding that its producer gives it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import optree
import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.pipeline.schedule import Kind
from ftp.pipeline.stacked import Stacks
from ftp.pipeline.subgraphs import StageGraph, Stages
from ftp.pipeline.sums import check_sums, names_of_gradients, with_sums
from ftp.planning.cost import Hardware
from ftp.planning.prepare import Prepared
from ftp.runtime.options import Options
from ftp.runtime.pipelines.subgraph_planner import StoredValue, SubgraphPlanner, outputs_of
from ftp.runtime.program import Program, check_runs
from ftp.sharding.mesh import Mesh, require_coordinate, resolve
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class Reduction:
    """The sums that one rank of the pipeline's axis reduces over the data axes after all
    microbatches are added up.

    Attributes:
        results, leaves: positions of the results and of the parameters, in the program's order.
    """

    results: tuple[int, ...]
    leaves: tuple[int, ...]
    program: Program


@dataclass(frozen=True)
class StagePrograms:
    """A program for each subgraph; equal subgraphs of several stages share one.

    Attributes:
        mesh: the axes other than the pipeline's, for the ranks that share this rank's stage.
        subgraphs: those of ``stages``, with the sums of gradients inside.
        first: programs of the subgraphs without sums, for a stage's first microbatch, whose
            gradients start the sums.
        copied: per batch tensor, whether its microbatches are copies.
        values: values that cross subgraphs, by name; the name of a gradient is that of its sum too.
        reductions: by rank of the pipeline's axis; ranks without pending sums have no entry.
    """

    mesh: Mesh
    stages: Stages
    subgraphs: Mapping[tuple[Kind, int], StageGraph]
    programs: Mapping[tuple[Kind, int], Program]
    first: Mapping[tuple[Kind, int], Program]
    copied: Sequence[bool]
    values: Mapping[str, StoredValue]
    reductions: Mapping[int, Reduction]

    @cached_property
    def kept(self) -> dict[tuple[str, int], set[str]]:
        """Per kind of action and stage, the values that the stage holds after it."""
        return {(kind, k): self.stages.read_after(kind, k) for kind, k in self.subgraphs}


@dataclass(kw_only=True)
class ProgramOfSubgraphs:
    """A program in which the ranks of one axis run different subgraphs; ``Step`` runs it like a
    ``Program``.

    Attributes:
        mesh: the whole mesh.
        axis: the axis of the stages.
        out_specs, out_shapes: per output.
        stacks: inputs and outputs that the axis cuts; the subgraphs have one part per rank.
        tensor_leaves, leaf_specs, out_tree, out_leaves, is_static, assumptions: as of ``Program``.
    """

    mesh: Mesh
    axis: str
    out_specs: list[PartitionSpec]
    out_shapes: list[tuple[int, ...]]
    tensor_leaves: tuple[int, ...]
    leaf_specs: tuple[PartitionSpec, ...]
    out_tree: optree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    is_static: tuple[bool, ...]
    assumptions: tuple[str, ...] = ()
    stacks: Stacks | None = None
    is_of_many_sizes: ClassVar[bool] = False

    @property
    def ranks(self) -> int:
        """Ranks along the axis of the stages."""
        return self.mesh.axes[self.axis]

    @property
    def subgraphs(self) -> Mapping[Any, Program]:
        """The subgraphs' programs."""
        raise NotImplementedError

    @property
    def description(self) -> str:
        """The program as text that is equal on all ranks."""
        raise NotImplementedError

    @cached_property
    def fingerprint(self) -> str:
        """A hash, equal on all ranks that planned the same program."""
        return hashlib.sha256(self.description.encode()).hexdigest()[:16]

    @property
    def trial_rules(self) -> str:
        """The rules found for ops without a stated one, as text."""
        found = {program.trial_rules for program in self.subgraphs.values()}
        return "; ".join(sorted(found - {""}))

    def has_issued(self, error: BaseException) -> bool:
        """Whether this rank may have sent something before ``error``."""
        return True

    @property
    def runs_without_autograd(self) -> bool:
        """See `Program`: several threads may run the subgraphs."""
        return False

    def communicates(self) -> bool:
        """True: stages send each other messages."""
        return True

    def describe_failure(self, error: BaseException) -> str:
        """The part of the program that raised ``error``."""
        return "a subgraph, or a message between stages"

    def overwritten(self, error: BaseException) -> Sequence[int]:
        """Empty: no input's memory is written to."""
        return ()

    @cached_property
    def run(self) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """A function of this rank's tensors (of global tensors when simulated)."""
        check_runs(self.mesh)
        run, rank = self.run_simulated, None
        if self.mesh.kind == "process":
            run, rank = self.run_as_rank, require_coordinate(self.mesh)[self.axis]
        stacks = self.stacks
        if stacks is None or stacks.is_empty:
            return run
        return lambda inputs: stacks.together(run(stacks.apart(inputs, rank)), rank)

    def run_as_rank(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError

    def run_simulated(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as flat bytes: backends do not send every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def within_stage(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of the ranks that share a stage with this one: all axes but ``axis``."""
    rest = tuple(name for name in mesh.axis_names if name != axis)
    if mesh.kind == "process" and rest:
        assert mesh.torch is not None
        ranks = np.array(mesh.ranks).reshape(mesh.shape)
        stages = np.moveaxis(ranks, mesh.axis_names.index(axis), 0).reshape(mesh.axes[axis], -1)
        is_ascending = bool((np.diff(stages) > 0).all())  # equal on all ranks, as plans are
        return replace(resolve(mesh.torch[rest]), is_ascending=is_ascending)
    kind = "simulated" if mesh.kind == "process" else mesh.kind
    return Mesh(tuple(mesh.axes[name] for name in rest), rest, mesh.device_type, kind)


def plan_stages(
    stages: Stages,
    mesh: Mesh,
    names: tuple[Sequence[str], Sequence[str]],
    params: Sequence[PartitionSpec],
    batch: Sequence[PartitionSpec],
    constants: Sequence[torch.Tensor],
    options: Options,
    hardware: Hardware,
    check: Callable[[Prepared], None],
    stage_of: Sequence[int | None],
    ranks: int,
    copied: Sequence[bool],
) -> StagePrograms:
    """Plan every subgraph, forward passes first: a value that a stage takes has the sharding that
    its producer gave it.

    Args:
        mesh: from `within_stage`.
        names: of the parameters, and of the batch tensors.
        params, batch: their specs, without stages.
        stage_of: per parameter its stage; None for a parameter on every rank.
        ranks: number of ranks along the pipeline's axis.
        copied: per batch tensor, whether its microbatches are copies.
        hardware: the hardware that plans are made for.
        check: raises for constraints that do not fit the mesh.
    """
    if options.data_axes is None:
        axes = dict.fromkeys(axis for spec in batch for axis in spec.axes)
        options = replace(options, data_axes=tuple(axes))
    # Sums over the batch stay pending until all microbatches are added up.
    sums = _Sums(stages, params, [a for a in options.data_axes or () if a in mesh.axes])
    asked = {
        name: sums.pending(name, params[leaf])
        for leaf, found in enumerate(stages.gradients)
        for name in found.values()
    }
    asked |= {name: sums.pending(name, PartitionSpec()) for _, name in stages.results}
    numbers = sorted({k for _, k in stages.subgraphs})
    order: list[tuple[Any, int]] = [("F", k) for k in numbers]
    order += [(kind, k) for k in reversed(numbers) for kind in "BIW"]
    planner = SubgraphPlanner(
        mesh, names, params, batch, constants, asked, options, hardware, check
    )
    leaf_of = {x: leaf for leaf, of in enumerate(stages.gradients) for x in of.values()}
    subgraphs: dict[tuple[Kind, int], StageGraph] = {}
    for key, subgraph in stages.subgraphs.items():
        kind, k = key
        gradients = {found[k] for found in stages.gradients if k in found} if kind in "BW" else ()
        read = {*stages.backward[k], *(v for p in stages.subgraphs.values() for v in p.values)}
        subgraphs[key] = with_sums(subgraph, gradients, read)
        check_sums(subgraph, subgraphs[key])
        for name in subgraphs[key].sums:
            planner.start_sum(name, subgraph, leaf_of[name])
    planner.gradients.update(names_of_gradients(stages, subgraphs.values()))
    given_up = {
        key: _given_up(subgraph, stages, copied) for key, subgraph in stages.subgraphs.items()
    }
    programs = {
        key: planner.plan(subgraphs[key], given_up[key]) for key in order if key in subgraphs
    }
    first = {
        key: planner.plan_first(stages.subgraphs[key], subgraph, programs[key], given_up[key])
        for key, subgraph in subgraphs.items()
        if subgraph.sums and not set(subgraph.sums).intersection(subgraph.outputs)
    }
    reductions = {}
    for rank in range(ranks):
        results, leaves, subgraph = sums.subgraph(rank, ranks, stage_of, planner.asked)
        if subgraph.outputs:
            planner.gradients.update(subgraph.outputs[len(results) :])
            reductions[rank] = Reduction(results, leaves, planner.plan(subgraph))
    values = planner.values
    return StagePrograms(mesh, stages, subgraphs, programs, first, copied, values, reductions)


def _given_up(subgraph: StageGraph, stages: Stages, copied: Sequence[bool]) -> tuple[int, ...]:
    """The inputs that nothing reads after an action."""
    params, batch = len(subgraph.params), len(subgraph.batch)
    kept = stages.read_after(subgraph.kind, subgraph.stage)
    return (
        *(params + k for k, leaf in enumerate(subgraph.batch) if copied[leaf]),
        *(params + batch + k for k, name in enumerate(subgraph.values) if name not in kept),
    )


class _Sums:
    """The sums over the batch that are pending on the data axes when a subgraph ends.

    Args:
        params: specs of the parameters, without stages.
    """

    def __init__(self, stages: Stages, params: Sequence[PartitionSpec], data_axes: Sequence[str]):
        self.stages, self.params, self.data_axes = stages, params, data_axes
        self.vals = {
            name: node.meta["val"]
            for subgraph in stages.subgraphs.values()
            for name, node in zip(subgraph.outputs, outputs_of(subgraph.gm), strict=True)
        }

    def pending(self, name: str, spec: PartitionSpec) -> PartitionSpec:
        """``spec``, unreduced over the data axes that do not cut the value."""
        axes = [axis for axis in self.data_axes if axis not in spec.axes]
        is_bool = self.vals[name].dtype == torch.bool
        return spec if is_bool else PartitionSpec(*spec.entries, unreduced=axes)

    def subgraph(
        self,
        rank: int,
        ranks: int,
        stage_of: Sequence[int | None],
        asked: dict[str, PartitionSpec],
    ) -> tuple[tuple[int, ...], tuple[int, ...], StageGraph]:
        """The results and parameters of a rank whose sums are not in their final specs, and the
        subgraph that reshards them to these.
        """
        results = [
            (i, name, PartitionSpec())
            for i, (stage, name) in enumerate(self.stages.results)
            if stage % ranks == rank
        ]
        leaves = [
            (leaf, next(iter(found.values())), self.params[leaf])
            for leaf, found in enumerate(self.stages.gradients)
            if found and ((stage := stage_of[leaf]) is None or stage % ranks == rank)
        ]
        results, leaves = (
            [(at, name, spec) for at, name, spec in taken if asked[name] != spec]
            for taken in (results, leaves)
        )
        graph, nodes, reduced = fx.Graph(), [], {}
        for i, (_, name, spec) in enumerate((*results, *leaves)):
            nodes.append(graph.placeholder(f"sum_{i}"))
            nodes[-1].meta["val"] = self.vals[name]
            reduced[f"{name}, reduced {i} on {rank}"] = spec
        graph.output(tuple(nodes))
        asked.update(reduced)
        gm, values = fx.GraphModule({}, graph), tuple(name for _, name, _ in (*results, *leaves))
        return (
            tuple(at for at, _, _ in results),
            tuple(at for at, _, _ in leaves),
            StageGraph("R", rank, gm, (), (), values, (), tuple(reduced)),
        )
