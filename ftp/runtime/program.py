"""A planned program, run on processes or simulated."""

import functools
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import optree
import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.errors import InputError, MeshError, join_failures
from ftp.partitioning.local_program import LocalProgram
from ftp.partitioning.rank_tables import classes
from ftp.passes.onednn_matmuls import Matmul
from ftp.passes.transport import as_backends_take, keeping_nan
from ftp.paused_gc import collection_paused
from ftp.planning.cost import DEFAULT as DEFAULT_HARDWARE
from ftp.planning.cost import Hardware
from ftp.planning.machine import describe_hardware
from ftp.planning.plan import Plan, describe_plan
from ftp.rules.call import Meta
from ftp.rules.op_kinds import may_call_autograd
from ftp.runtime.compile import Run, compiled, eager
from ftp.runtime.cuda_graph import RecordedRun, graphs_of
from ftp.runtime.failed_op import begun, describe_op, failing, written_by
from ftp.runtime.gloo_calls import WAITS
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.options import DEFAULT, Options
from ftp.runtime.process_groups import (
    check_recordable,
    check_symmetric,
    faster_by_onednn,
    for_backends,
    memory_of,
    with_product_groups,
)
from ftp.runtime.renewed_outputs import renewed
from ftp.runtime.saved_code import NO_CODE, SavedCode
from ftp.runtime.shared_memory import through_memory
from ftp.runtime.simulate import simulate
from ftp.sharding.local_pieces import local_pieces, local_shape
from ftp.sharding.mesh import Mesh, mesh_device, require_coordinate
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.check_indices import IndexBound, index_bounds
from ftp.tensors.device_put import put, take
from ftp.torch_internals.fake_tensors import FakeTensorMode
from ftp.turns import turn

if TYPE_CHECKING:  # what a rank whose plan is found does not need
    from ftp.partitioning.partition import Partitioner
    from ftp.runtime.decided import Decided


@dataclass(kw_only=True)
class Program:
    """One planned program of one mesh, for one set of abstract inputs.

    Attributes:
        traced: the single-device program as it was traced.
        tensor_leaves: indices of the leaves of the arguments that are inputs of the graph.
        in_specs, out_specs: a spec per input and per output.
        constants: closure tensors, inputs after the arguments' tensors.
        out_leaves, is_static: per leaf of the result the index of an output, or a static value (see
            ``trace.Traced``).
        leaf_specs: per leaf of the arguments, static leaves included.
        roles: per tensor leaf: ``parameters``, ``optimizer`` or ``batch``.
        donated: positions of inputs whose memory a run may use for its outputs.
        given_up: positions of inputs that the caller does not need after a run. If there are any,
            ``run`` takes a list and empties it, and an eager rank frees each after its last use.
        gradients: of a subgraph of a step, the outputs that are gradients, or sums of them; None
            for a whole step, whose graph tells.
        assumptions: claims about values that the function takes as true; with ``check_inputs`` the
            last outputs say whether they hold.
        options: of the step; those about the run (``compile``, ``bucket``, ``prefetch``,
            ``chunks``, ``cuda_graph``, ``async_tp``, ``reduce_dtype``) are read here.
        hardware: the hardware that it was planned for.
    """

    mesh: Mesh
    traced: fx.GraphModule
    plan: Plan
    tensor_leaves: tuple[int, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_tree: optree.PyTreeSpec
    constants: tuple[torch.Tensor, ...] = ()
    out_leaves: tuple[Any, ...] = ()
    is_static: tuple[bool, ...] = ()
    leaf_specs: tuple[PartitionSpec, ...] = ()
    roles: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()
    given_up: tuple[int, ...] = ()
    gradients: tuple[int, ...] | None = None
    assumptions: tuple[str, ...] = ()
    options: Options = DEFAULT
    hardware: Hardware = DEFAULT_HARDWARE
    is_of_many_sizes: ClassVar[bool] = False  # whether its plan serves other sizes too

    def with_options(self, **changes: Any) -> "Program":
        """The same plan, run with other options."""
        return replace(self, options=replace(self.options, **changes))

    @cached_property
    def partitioner(self) -> "Partitioner":
        """The partitioner of the plan itself, without buckets, chunks and fused matmuls."""
        from ftp.runtime.decided import decide, partitioner_of

        plain = replace(self.options, bucket=False, chunks=1, async_tp=False, reduce_dtype=None)
        decided = decide(self.plan.graph, plain, self.mesh.axes)
        return partitioner_of(self.plan, decided, self.options, self.mesh)

    @cached_property
    def _decided(self) -> "Decided":
        from ftp.runtime.decided import decide

        axes = self.mesh.axes if self.mesh.is_ascending else {}
        return decide(self.plan.graph, self.options, axes, self.hardware, self.gradients)

    @cached_property
    def _as_decided(self) -> "Partitioner":
        from ftp.runtime.decided import partitioner_of

        return partitioner_of(self.plan, self._decided, self.options, self.mesh)

    @property
    def out_specs(self) -> list[PartitionSpec]:
        return self.plan.out_specs

    def check_assumptions(self, outputs: Sequence[torch.Tensor], when: str) -> None:
        """Raise an InputError that lists the assumptions which do not hold after a run; all ranks
        have the same answers.
        """
        answers = outputs[len(outputs) - len(self.assumptions) :]
        failures = [
            f"{claim}: this does not hold{when}."
            for claim, holds in zip(self.assumptions, answers, strict=True)
            if not bool(holds)
        ]
        if failures:
            raise InputError(join_failures(dict.fromkeys(failures)))

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [v.meta.shape for v in self.plan.graph.outputs]

    @property
    def trial_rules(self) -> str:
        """The rules found for ops without a stated one, as text."""
        from ftp.planning.from_fx import found_by_trial

        return found_by_trial(self.plan.graph)

    @cached_property
    def fingerprint(self) -> str:
        """A hash, equal on all ranks that planned the same program."""
        return hashlib.sha256(self.description.encode()).hexdigest()[:16]

    @cached_property
    def renewed(self) -> tuple[tuple[int, str], ...]:
        """The outputs that must be copied because they share memory, and how each is copied."""
        inputs = self.plan.graph.inputs
        return renewed(self.plan.graph, {inputs[at].name for at in self.donated})

    @cached_property
    def index_bounds(self) -> dict[int, list[IndexBound]]:
        """The ranges of inputs that index a dim."""
        return index_bounds(self.traced_graph)

    @property
    def traced_graph(self) -> fx.Graph:
        """The single-device program, of the sizes that this program is for."""
        return self.traced.graph

    @property
    def description(self) -> str:
        """The program as text that is equal on all ranks: the plan, in the order in which its
        collectives are issued, those that are issued together, and the options.

        Ranks that plan for themselves compare estimates, which are not equal to the last bit on
        all processors: with another choice a rank would wait for other collectives.
        """
        o, decided = self.options, self._decided
        return (
            f"{describe_plan(replace(self.plan, graph=decided.graph))}\n{decided.description}"
            f"\nbucket={o.bucket}, prefetch={o.prefetch},"
            f" chunks={o.chunks}, async_tp={o.async_tp}, reduce_dtype={o.reduce_dtype}"
            f"{'' if self.gradients is None else f', gradients={self.gradients}'}"
            f"\nplanned for {describe_hardware(self.hardware)}"
        )

    @collection_paused()
    def local(self, coordinate: Mapping[str, int] | None = None) -> LocalProgram:
        """This rank's program; the first rank's where there are no processes."""
        return self._in_use.program(self.own_coordinate if coordinate is None else coordinate)

    @property
    def _in_use(self) -> "Partitioner":
        """The partitioner in use: that of the plan itself, if the options ask for no other."""
        o = self.options
        is_plain = not o.bucket and o.chunks == 1 and not o.async_tp and o.reduce_dtype is None
        if is_plain and not (self.hardware.links and self._decided.spans):
            return self.partitioner
        return self._as_decided

    def alike(self) -> list[list[list[int]]]:
        """Per mesh axis, its coordinates in groups within which all ranks have the same graph."""
        return classes(self.mesh.axes, self._in_use.tables(self.mesh.axes))

    def decide(self) -> None:
        """Decide what to do with collectives, for all ranks."""
        assert self.partitioner is not None and self._as_decided is not None

    @cached_property
    def run(self) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """A function from this rank's input tensors (global ones if simulated) to its outputs."""
        check_runs(self.mesh)
        if self.mesh.kind == "process" or self.mesh.size() == 1:  # one rank needs no simulation
            return self._run_as_rank()
        return self._run_simulated

    def _run_as_rank(self) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        extra, prepared = self._beside_inputs(), self._runs

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            given = [*inputs, *extra]
            if self.given_up:
                inputs.clear()  # type: ignore[attr-defined]
            if not prepared:
                prepared.append(self._recorded(self._prepared(self.local(), given)))
            return prepared[0](given)

        return run

    @cached_property
    def _runs(self) -> list[Run]:
        """The function that runs this rank's graph, as a list; empty until it is made."""
        return []

    def _beside_inputs(self, coordinate: Mapping[str, int] | None = None) -> list[Any]:
        """The arguments of a rank's graph after the inputs: constants and offsets."""
        at = self.own_coordinate if coordinate is None else coordinate
        constants = [c.to(mesh_device(self.mesh)) for c in self.constants]
        return [*constants, *self.local(at).offsets_at(at)]

    @property
    def own_coordinate(self) -> dict[str, int]:
        """This rank's coordinate; the first rank's where there are no processes."""
        mesh = self.mesh
        is_process = mesh.kind == "process"
        return require_coordinate(mesh) if is_process else dict.fromkeys(mesh.axes, 0)

    @property
    def input_specs(self) -> list[PartitionSpec]:
        """A spec per input of the plan's graph: those of the arguments, then ``P()``."""
        whole = len(self.plan.graph.inputs) - len(self.in_specs)
        return [*self.in_specs, *[PartitionSpec()] * whole]

    def prepare(self, metas: Sequence[Meta]) -> None:
        """Make the function that runs this rank's graph, compiled under ``compile``, before the
        first run. On processes all ranks call it together.

        Args:
            metas: of the inputs, global.
        """
        if self.mesh.kind == "simulated" and self.mesh.size() > 1:
            for coordinate in self.mesh.coordinates():
                self.local(coordinate)
        elif self.run is not None and not self._runs:
            given = self.fake_inputs(metas, self.own_coordinate)
            self._runs.append(self._recorded(self._prepared(self.local(), given)))

    def fake_inputs(self, metas: Sequence[Meta], coordinate: dict[str, int]) -> list[Any]:
        """The arguments of a rank's graph; inputs are fake tensors of these global ``metas``."""
        axes, device = self.mesh.axes, mesh_device(self.mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = [
                torch.empty(
                    local_shape(spec, meta.shape, axes, coordinate), dtype=meta.dtype, device=device
                )
                for meta, spec in zip(metas, self.in_specs, strict=True)
            ]
        return [*inputs, *self._beside_inputs(coordinate)]

    @property
    def saved_code(self) -> SavedCode:
        """Code that came with the program."""
        return NO_CODE

    @cached_property
    def by_onednn(self) -> dict[Matmul, bool]:
        """The matmuls that the ranks have asked about: whether oneDNN computes them."""
        return dict(self.saved_code.by_onednn)

    def _prepared(self, program: LocalProgram, given: Sequence[Any]) -> Run:
        """The function that runs this rank's graph; ``given`` are its first inputs."""
        if self.options.compile:
            return self._compiled(self._bound(program), given)
        return self._eager(program, given)

    def _bound(self, program: LocalProgram) -> fx.Graph:
        """This rank's graph on process groups, its collectives in the forms that backends take. All
        ranks call it together.
        """
        mesh, device, ours = self.mesh, mesh_device(self.mesh), program.gm.graph
        graph = as_backends_take(with_product_groups(ours, mesh))
        if self.options.async_tp:
            check_symmetric(graph, mesh)
        if self.options.cuda_graph:
            check_recordable(graph, device)
        if mesh.kind == "process":
            graph = keeping_nan(through_memory(graph, memory_of(mesh, graph)))
            graph = for_backends(
                graph,
                device,
                host=self._has_host,
                is_crowded=mesh.is_crowded,
                is_own=graph is not ours,
            )
        return graph

    def _recorded(self, run: Run) -> Run:
        """The function that runs this rank's graph, recorded as one CUDA graph if asked for."""
        if not self.options.cuda_graph:
            return run
        names = [node.name for node in self.plan.graph.inputs]
        graphs = graphs_of(mesh_device(self.mesh))
        return RecordedRun(run, self.donated, names, graphs, describe_op)

    @property
    def _has_host(self) -> bool:
        """Whether the host runs the graph; a recording runs without it."""
        return not self.options.cuda_graph

    def _compiled(self, graph: fx.Graph, given: Sequence[Any]) -> Run:
        choose = functools.partial(faster_by_onednn, self.mesh, known=self.by_onednn)
        code = self.saved_code.functions
        return compiled(graph, given, self.donated, choose, host=self._has_host, code=code)

    def _eager(self, program: LocalProgram, given: Sequence[Any]) -> Run:
        graph, host, empties = self._bound(program), self._has_host, bool(self.given_up)
        with turn():
            return eager(graph, given, self.donated, host=host, empties=empties)

    def has_issued(self, error: BaseException) -> bool:
        """Whether this rank may have issued a collective of its graph before ``error``."""
        done = begun(error, Program._prepared.__code__)
        return done is None or any("collective" in n.meta or n.meta.get("issues") for n in done)

    @cached_property
    def runs_without_autograd(self) -> bool:
        """Whether a rank's graph has collectives, and no op that may call autograd."""
        if self.mesh.kind != "process" or not self.communicates():
            return False
        return not any(may_call_autograd(n.target) for n in self.local().gm.graph.nodes)

    def communicates(self) -> bool:
        """Whether a call waits for other ranks."""
        nodes = self.local().gm.graph.nodes
        return any("collective" in n.meta or n.meta.get("issues") for n in nodes)

    def overwritten(self, error: BaseException) -> Sequence[int]:
        """The donated inputs that this rank may have written to before ``error``."""
        if self.mesh.kind == "simulated" and self.mesh.size() > 1:
            return ()  # a simulation writes to no input
        done = begun(error, Program._prepared.__code__)
        if done is None or not (done and self.donated):
            return self.donated if done is None else ()
        written = written_by(done)
        inputs = [node for node in done[0].graph.nodes if node.op == "placeholder"]
        return [i for i in self.donated if inputs[i] in written]

    def describe_failure(self, error: BaseException) -> str:
        """The collective of this rank's graph that raised ``error``, and its line; "" if the graph
        was compiled.
        """
        node = failing(error)
        if node is not None and node.target in WAITS:
            node = node.args[0]
        made = node.meta.get("collective") if isinstance(node, fx.Node) else None
        if made is None:
            return ""
        where = f" at {made.source}" if made.source else ""
        return (
            f"{made.op} over {', '.join(made.axes)} of"
            f" {str(made.dtype).removeprefix('torch.')}{list(made.shape)}{where}"
        )

    def _run_simulated(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        coordinates = self.mesh.coordinates()
        programs = [self.local(c) for c in coordinates]
        axes = self.mesh.axes
        constants = [c.to(self.mesh.device_type) for c in self.constants]
        locals_ = []
        for coordinate, program in zip(coordinates, programs, strict=True):
            shards = [
                shard_of(x, spec, axes, coordinate)
                for x, spec in zip(inputs, self.in_specs, strict=True)
            ]
            locals_.append([*shards, *constants, *program.offsets_at(coordinate)])
        outputs = simulate(programs, locals_, groups_of(self.mesh))
        return [
            join_parts([rank[i] for rank in outputs], spec, shape, axes, coordinates)
            for i, (spec, shape) in enumerate(zip(self.out_specs, self.out_shapes, strict=True))
        ]


def check_runs(mesh: Mesh) -> None:
    """Raise for an abstract mesh.

    Raises:
        MeshError: it is.
    """
    if mesh.kind == "abstract":
        raise MeshError(
            f"The mesh {mesh} is abstract: it plans programs and runs none. Use"
            " ftp.make_mesh or ftp.simulated_mesh to run."
        )


def shard_of(
    x: torch.Tensor, spec: PartitionSpec, axes: Mapping[str, int], coordinate: Mapping[str, int]
) -> torch.Tensor:
    if not spec:
        return x
    shard = take(x, local_pieces(spec, x.shape, dict(axes), dict(coordinate))).contiguous()
    is_first = not any(coordinate[axis] for axis in spec.unreduced)
    return shard if is_first else torch.zeros_like(shard)


def join_parts(
    parts: Sequence[torch.Tensor],
    spec: PartitionSpec,
    shape: tuple[int, ...],
    axes: Mapping[str, int],
    coordinates: Sequence[Mapping[str, int]],
) -> torch.Tensor:
    if not spec:
        return parts[0]
    terms: dict[tuple[int, ...], torch.Tensor] = {}
    for part, coordinate in zip(parts, coordinates, strict=True):
        at = tuple(coordinate[axis] for axis in spec.unreduced)
        if at not in terms:
            terms[at] = part.new_empty(shape)
        put(terms[at], part, local_pieces(spec, shape, dict(axes), dict(coordinate)))
    return functools.reduce(operator.add, terms.values())
