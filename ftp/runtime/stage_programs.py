"""The pieces of a pipeline's stages as planned programs: each over the mesh axes other than the
pipeline's, with what crosses stages sharded as its producer leaves it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import optree
import torch
from torch import fx

from ftp.errors import MeshError
from ftp.pipeline.pieces import StageGraph, Stages
from ftp.pipeline.schedule import Kind
from ftp.pipeline.stacked import Stacks
from ftp.pipeline.sums import check_sums, with_sums
from ftp.planning.cost import Hardware
from ftp.planning.prepare import Prepared, plan_prepared, prepare
from ftp.runtime.options import Options
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh, require_coordinate, resolve
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class StoredValue:
    """A value that outlives the action that computed it: its spec over the other axes, its global
    shape and its dtype.
    """

    spec: PartitionSpec
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduction:
    """What one rank of the pipeline's axis reduces over the data axes, once all microbatches are
    added up.

    Attributes:
        results, leaves: positions of the results and of the parameters, in the program's order.
    """

    results: tuple[int, ...]
    leaves: tuple[int, ...]
    program: Program


@dataclass(frozen=True)
class StagePrograms:
    """A program for each piece; equal pieces of several stages share one.

    Attributes:
        mesh: the axes other than the pipeline's, for the ranks that share this rank's stage.
        pieces: those of ``stages``, with the sums of gradients inside.
        values: what crosses pieces, by name; a gradient's name, too, for the sum of it.
        reductions: per rank of the pipeline's axis; a rank without any has none.
    """

    mesh: Mesh
    stages: Stages
    pieces: Mapping[tuple[Kind, int], StageGraph]
    programs: Mapping[tuple[Kind, int], Program]
    values: Mapping[str, StoredValue]
    reductions: Mapping[int, Reduction]


@dataclass(kw_only=True)
class ProgramOfPieces:
    """A program of which ranks of one axis run different pieces; ``Step`` runs it as a ``Program``.

    Attributes:
        mesh: all axes.
        axis: the one that holds the stages.
        out_specs, out_shapes: per output.
        stacks: inputs and outputs that the axis cuts, of which the pieces know one part a rank.
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

    @property
    def ranks(self) -> int:
        """Ranks along the axis of the stages."""
        return self.mesh.axes[self.axis]

    @property
    def pieces(self) -> Mapping[Any, Program]:
        """The pieces' programs."""
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
        found = {program.trial_rules for program in self.pieces.values()}
        return "; ".join(sorted(found - {""}))

    def has_issued(self, error: BaseException) -> bool:
        """Whether this rank may have sent something before ``error``."""
        return True

    def describe_failure(self, error: BaseException) -> str:
        """What raised ``error``."""
        return "a piece, or a message between stages"

    def overwritten(self, error: BaseException) -> Sequence[int]:
        """No input's memory is written to."""
        return ()

    @cached_property
    def run(self) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Takes this rank's tensors (all of the global ones, when simulated)."""
        if self.mesh.kind == "abstract":
            raise MeshError(
                f"The mesh {self.mesh} is abstract: it plans programs and runs none. Use"
                " ftp.make_mesh or ftp.simulated_mesh to run."
            )
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
    """A contiguous tensor's memory, flat: backends do not send every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def within_stage(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of the ranks that share a stage with this one: all axes but ``axis``."""
    rest = tuple(name for name in mesh.axis_names if name != axis)
    if mesh.kind == "process" and rest:
        assert mesh.torch is not None
        return resolve(mesh.torch[rest])
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
) -> StagePrograms:
    """Plan every piece, forward passes first: what a stage takes is sharded as it was left.

    Args:
        mesh: as `within_stage` gives it.
        names: of the parameters, and of the batch tensors.
        params, batch: their specs, without stages.
        stage_of: per parameter its stage; None of one that is on every rank.
        ranks: along the pipeline's axis.
        hardware: that plans are made for.
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
    numbers = sorted({k for _, k in stages.pieces})
    order: list[tuple[Any, int]] = [("F", k) for k in numbers]
    order += [(kind, k) for k in reversed(numbers) for kind in "BIW"]
    planner = PiecePlanner(mesh, names, params, batch, constants, asked, options, hardware, check)
    pieces: dict[tuple[Kind, int], StageGraph] = {}
    for key, piece in stages.pieces.items():
        kind, k = key
        gradients = {found[k] for found in stages.gradients if k in found} if kind in "BW" else ()
        read = {*stages.backward[k], *(v for p in stages.pieces.values() for v in p.values)}
        pieces[key] = with_sums(piece, gradients, read)
        check_sums(piece, pieces[key])
        for name in pieces[key].sums:
            planner.start_sum(name, piece)
    programs = {key: planner.plan(pieces[key]) for key in order if key in pieces}
    reductions = {
        rank: Reduction(results, leaves, planner.plan(piece))
        for rank in range(ranks)
        for results, leaves, piece in [sums.piece(rank, ranks, stage_of, planner.asked)]
        if piece.outputs
    }
    return StagePrograms(mesh, stages, pieces, programs, planner.values, reductions)


class _Sums:
    """The sums over the batch that are pending on the data axes when a piece ends.

    Args:
        params: specs of the parameters, without stages.
    """

    def __init__(self, stages: Stages, params: Sequence[PartitionSpec], data_axes: Sequence[str]):
        self.stages, self.params, self.data_axes = stages, params, data_axes
        self.vals = {
            name: node.meta["val"]
            for piece in stages.pieces.values()
            for name, node in zip(piece.outputs, _outputs(piece.gm), strict=True)
        }

    def pending(self, name: str, spec: PartitionSpec) -> PartitionSpec:
        """``spec`` with the sums over data axes that do not cut the value left pending."""
        axes = [axis for axis in self.data_axes if axis not in spec.axes]
        return (
            spec
            if self.vals[name].dtype == torch.bool
            else PartitionSpec(*spec.entries, unreduced=axes)
        )

    def piece(
        self,
        rank: int,
        ranks: int,
        stage_of: Sequence[int | None],
        asked: dict[str, PartitionSpec],
    ) -> tuple[tuple[int, ...], tuple[int, ...], StageGraph]:
        """The results and parameters of which a rank's sums are not in their specs yet, and the
        piece that brings them there.
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


def _outputs(gm: fx.GraphModule) -> Sequence[Any]:
    return gm.graph.output_node().args[0]  # type: ignore[return-value]


@dataclass
class PiecePlanner:
    """Plans pieces in an order in which each comes after those whose values it reads.

    Attributes:
        mesh: as `within_stage` gives it.
        names, params, batch: of `plan_stages`.
        asked: specs of values that are decided, by name.
        check: raises for constraints that do not fit the mesh.
        values: what the pieces so far give, by name.
    """

    mesh: Mesh
    names: tuple[Sequence[str], Sequence[str]]
    params: Sequence[PartitionSpec]
    batch: Sequence[PartitionSpec]
    constants: Sequence[torch.Tensor]
    asked: dict[str, PartitionSpec]
    options: Options
    hardware: Hardware
    check: Callable[[Prepared], None]
    values: dict[str, StoredValue] = field(default_factory=dict)
    _known: dict[str, Program] = field(default_factory=dict)

    def start_sum(self, name: str, piece: StageGraph) -> None:
        """Decide how the sum of a gradient over microbatches is sharded: as the gradient is."""
        val = _outputs(piece.gm)[piece.outputs.index(name)].meta["val"]
        held = StoredValue(self.asked[name], tuple(val.shape), val.dtype)
        self.values[name] = self.values[f"{name}, summed"] = held
        self.asked[f"{name}, summed"] = held.spec

    def plan(self, piece: StageGraph) -> Program:
        """The program of a piece; the one of an equal piece, if there was one."""
        given = [
            *(self.params[i] for i in piece.params),
            *(self.batch[i] for i in piece.batch),
            *(self.values[name].spec for name in piece.values),
        ]
        asked = [self.asked.get(name) for name in piece.outputs]
        text = _describe(piece, given, asked)
        if text not in self._known:
            self._known[text] = _planned(
                piece,
                self.mesh,
                self.names,
                given,
                asked,
                self.constants,
                self.options,
                self.hardware,
                self.check,
            )
        program = self._known[text]
        for name, spec, shape, node in zip(
            piece.outputs, program.out_specs, program.out_shapes, _outputs(piece.gm), strict=True
        ):
            self.values[name] = StoredValue(spec, shape, node.meta["val"].dtype)
        return program


def _planned(
    piece: StageGraph,
    mesh: Mesh,
    names: tuple[Sequence[str], Sequence[str]],
    given: Sequence[PartitionSpec],
    asked: Sequence[PartitionSpec | None],
    constants: Sequence[torch.Tensor],
    options: Options,
    hardware: Hardware,
    check: Callable[[Prepared], None],
) -> Program:
    called = [names[0][i] for i in piece.params] + [names[1][i] for i in piece.batch]
    called += piece.values
    is_state = [True] * len(piece.params) + [False] * (len(piece.batch) + len(piece.values))
    prepared = prepare(piece.gm, called, is_state, strict=options.strict)
    check(prepared)
    plan = plan_prepared(
        prepared,
        mesh.axes,
        given,
        asked,
        data_axes=options.data_axes,
        reshard_after_forward=options.reshard_after_forward,
        strict=options.strict,
        hardware=hardware,
    )
    roles = ["parameters"] * len(piece.params) + ["batch"] * len(piece.batch)
    roles += ["activations"] * (len(piece.values) - len(piece.sums))
    roles += ["gradients"] * len(piece.sums)
    outputs = len(piece.outputs)
    return Program(
        mesh=mesh,
        traced=piece.gm,
        plan=plan,
        tensor_leaves=tuple(range(len(given))),
        in_specs=tuple(given),
        constants=tuple(constants[i] for i in piece.constants),
        out_tree=flatten((0,) * outputs)[1],
        out_leaves=tuple(range(outputs)),
        is_static=(False,) * outputs,
        leaf_specs=tuple(given),
        roles=tuple(roles),
        donated=tuple(range(len(given) - len(piece.sums), len(given))),
        options=options,
        hardware=hardware,
    )


def _describe(
    piece: StageGraph, given: Sequence[PartitionSpec], asked: Sequence[PartitionSpec | None]
) -> str:
    """A piece as text without names, equal for those that one program serves."""
    number: dict[fx.Node, str] = {}
    lines = [piece.kind, str(given), str(asked), str(piece.constants)]
    lines += [str(len(piece.params)), str(len(piece.sums))]
    for node in piece.gm.graph.nodes:
        number[node] = f"%{len(number)}"
        val = node.meta.get("val")
        kind = [
            f"{tuple(v.shape)} {v.dtype}"
            for v in (val if isinstance(val, list | tuple) else [val])
            if isinstance(v, torch.Tensor)
        ]
        arguments = fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)  # type: ignore[arg-type]
        target = "" if node.op == "placeholder" else str(node.target)
        region = node.meta.get("region")
        lines.append(f"{node.op} {target} {arguments} {kind} {region}")
    return "\n".join(lines)
