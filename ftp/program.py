"""A planned program: run it on processes, simulate it, read it before it runs."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree
import torch
from torch import fx

from ftp.collectives import Collective
from ftp.constrain import pin_from_str
from ftp.cost import DEFAULT, VIEWS, Hardware, collective_seconds, op_seconds
from ftp.errors import MeshError
from ftp.graph import Node, Value
from ftp.layout import nominal
from ftp.mesh import Mesh, require_coordinate
from ftp.partition import LocalProgram, Partitioner
from ftp.placement import mesh_device, put, take
from ftp.planner import Plan
from ftp.simulate import simulate
from ftp.spec import PartitionSpec, local_pieces

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b1",
}


@dataclass
class Program:
    """One planned program of one mesh, for one set of abstract inputs.

    Attributes:
        traced: the single-device program as it was traced.
        tensor_leaves: which leaves of the arguments are inputs of the graph, in order.
        in_specs, out_specs: a spec per input and per output.
        constants: closure tensors, inputs after the arguments' tensors.
        out_leaves, is_static: per leaf of the result the index of an output, or a static value (see ``trace.Traced``).
        leaf_specs: per leaf of the arguments, static ones too.
    """

    mesh: Mesh
    traced: fx.GraphModule
    plan: Plan
    tensor_leaves: tuple[int, ...]
    in_specs: tuple[PartitionSpec, ...]
    constants: tuple[torch.Tensor, ...]
    out_tree: optree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    is_static: tuple[bool, ...]
    leaf_specs: tuple[PartitionSpec, ...]
    compile: bool = False

    @cached_property
    def partitioner(self) -> Partitioner:
        return Partitioner(self.plan, mesh_device(self.mesh), self.mesh.group_name)

    @property
    def out_specs(self) -> list[PartitionSpec]:
        return self.plan.out_specs

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [v.meta.shape for v in self.plan.graph.outputs]

    @cached_property
    def fingerprint(self) -> str:
        """Equal on all ranks that have planned the same program."""
        return hashlib.sha256(describe_plan(self.plan).encode()).hexdigest()[:16]

    def local(self, coordinate: Mapping[str, int] | None = None) -> LocalProgram:
        """This rank's program; the first rank's where there are no processes."""
        if coordinate is None:
            coordinate = require_coordinate(self.mesh) if self.mesh.kind == "process" else dict.fromkeys(self.mesh.axes, 0)
        return self.partitioner.program(coordinate)

    @cached_property
    def run(self) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """Takes this rank's input tensors (all of the global ones, when simulated) and returns its outputs."""
        if self.mesh.kind == "abstract":
            raise MeshError(
                f"The mesh {self.mesh} is abstract: it plans programs and runs none. Use ftp.make_mesh or ftp.simulated_mesh to run."
            )
        return self._run_on_processes() if self.mesh.kind == "process" else self._run_simulated

    def _run_on_processes(self) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        program = self.local()
        offsets = program.offsets_at(require_coordinate(self.mesh))
        device = mesh_device(self.mesh)
        extra = [*(c.to(device) for c in self.constants), *offsets]
        function = torch.compile(program.gm, dynamic=False) if self.compile else program.gm
        return lambda inputs: function(*inputs, *extra)

    def _run_simulated(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        coordinates = self.mesh.coordinates()
        programs = [self.partitioner.program(c) for c in coordinates]
        axes = self.mesh.axes
        locals_ = []
        for coordinate, program in zip(coordinates, programs, strict=True):
            shards = [shard_of(x, spec, axes, coordinate) for x, spec in zip(inputs, self.in_specs, strict=True)]
            locals_.append([*shards, *self.constants, *program.offsets_at(coordinate)])
        outputs = simulate(programs, locals_, groups_of(self.mesh))
        return [
            join_parts([rank[i] for rank in outputs], spec, shape, axes, coordinates)
            for i, (spec, shape) in enumerate(zip(self.out_specs, self.out_shapes, strict=True))
        ]


def shard_of(x: torch.Tensor, spec: PartitionSpec, axes: Mapping[str, int], coordinate: Mapping[str, int]) -> torch.Tensor:
    return take(x, local_pieces(spec, x.shape, dict(axes), dict(coordinate))).contiguous() if spec else x


def join_parts(
    parts: Sequence[torch.Tensor],
    spec: PartitionSpec,
    shape: tuple[int, ...],
    axes: Mapping[str, int],
    coordinates: Sequence[Mapping[str, int]],
) -> torch.Tensor:
    if not spec:
        return parts[0]
    whole = parts[0].new_empty(shape)
    for part, coordinate in zip(parts, coordinates, strict=True):
        put(whole, part, local_pieces(spec, shape, dict(axes), dict(coordinate)))
    return whole


def groups_of(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Per axis the groups of ranks, by their position on the mesh, that differ in that axis only."""
    found: dict[str, dict[tuple[int, ...], list[int]]] = {axis: {} for axis in mesh.axis_names}
    for rank, coordinate in enumerate(mesh.coordinates()):
        for axis in mesh.axis_names:
            found[axis].setdefault(tuple(c for a, c in coordinate.items() if a != axis), []).append(rank)
    return {axis: list(groups.values()) for axis, groups in found.items()}


def describe_plan(plan: Plan) -> str:
    """The plan as text that is equal on all ranks: every node, what is cut and what is moved."""
    lines = []
    number = {node: i for i, node in enumerate(plan.graph.nodes)}
    for node, i in number.items():
        arguments = [f"%{number[v.node]}.{v.index}" for v in node.operands]
        constants = [repr(a) for a in node.args if not isinstance(a, Value | list | tuple)]
        lines.append(f"%{i} = {node.kind} {node.target} {arguments} {constants} {node.rule.sizes} {node.cuts}")
    lines.append(f"return {[f'%{number[v.node]}.{v.index}' for v in plan.graph.outputs]} {plan.out_specs}")
    return "\n".join(lines)


class Lowered:
    """A program before it runs; ``print`` shows it.

    Attributes:
        plan: what was decided, with the cost of each axis' network.
    """

    def __init__(self, program: Program):
        self._program = program
        self.plan = program.plan

    @property
    def graph(self) -> fx.GraphModule:
        """This rank's program on local tensors (the first rank's where there are no processes)."""
        return self._program.local().gm

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """One record per issued collective, in order, unfolded."""
        return self._program.local().collectives

    @property
    def out_specs(self) -> Any:
        """The result's tree with a spec for each leaf."""
        specs = self._program.out_specs
        leaves = [
            PartitionSpec() if static else specs[leaf]
            for leaf, static in zip(self._program.out_leaves, self._program.is_static, strict=True)
        ]
        return self._program.out_tree.unflatten(leaves)

    @cached_property
    def memory(self) -> int:
        """Peak bytes per rank: inputs, constants, and what lives between its first and last use; views cost nothing."""
        graph = self.plan.graph
        root: dict[Value, Value] = {}
        for node in graph.nodes:
            for i in range(len(node.results)):
                value = Value(node, i)
                is_view = node.kind == "constrain" or (node.kind == "op" and node.target in VIEWS)
                root[value] = root.get(node.operands[0], node.operands[0]) if is_view and node.operands else value
        last: dict[Value, int] = {}
        for at, node in enumerate(graph.nodes):
            for value in node.operands:
                last[root[value]] = at
        for value in graph.outputs:
            last[root[value]] = len(graph.nodes)
        live = peak = sum(_nbytes(Value(node)) for node in graph.inputs)
        ends: dict[int, int] = {}
        for at, node in enumerate(graph.nodes):
            if node.kind == "input":
                continue
            for i in range(len(node.results)):
                value = Value(node, i)
                if root[value] is value or root[value] == value:
                    live += _nbytes(value)
                    end = last.get(value, at)
                    ends[end] = ends.get(end, 0) + _nbytes(value)
            peak = max(peak, live)
            live -= ends.pop(at, 0)
        return peak

    def cost(self, hardware: Hardware = DEFAULT) -> float:
        """Estimated seconds of a step on each rank, nothing overlapped."""
        seconds = 0.0
        for node in self.plan.graph.nodes:
            sizes = {f: nominal(s) for f, s in node.sizes.items()}
            if node.kind == "op":
                seconds += op_seconds(node.target, node.rule, sizes, node.results, hardware)
        return seconds + sum(
            collective_seconds(c.op, c.nbytes, math.prod(self.plan.axes[a] for a in c.axes), hardware.link) for c in self.collectives
        )

    def __str__(self) -> str:
        issued = {}
        local = self._program.local()
        for node in local.gm.graph.nodes:
            if "collective" in node.meta:
                issued.setdefault(node.meta.get("origin"), []).append(node.meta["collective"])
        lines = [f"program on {self._program.mesh}"]
        for node in self.plan.graph.nodes:
            lines += _lines(node, issued.get(node.name, []))
        lines += [f"  return %{v.node.name}: {_typed(v)}" for v in self.plan.graph.outputs]
        counts = Counter((c.op, c.axes, c.shape, c.dtype) for c in self.collectives)
        lines.append(f"collectives: {len(self.collectives)}, {sum(c.wire_nbytes for c in self.collectives):,} bytes sent per rank")
        for (op, axes, shape, dtype), count in counts.items():
            lines.append(f"  {count:4d} x {op} over {', '.join(axes)} of {_DTYPES.get(dtype, dtype)}{list(shape)}")
        for axis, solution in self.plan.solutions.items():
            proof = "optimal" if solution.optimal else f"at most {(solution.cost - solution.bound) / solution.cost:.1%} above the optimum"
            broken = (
                ""
                if self.plan.kept_rules[axis]
                else "; no plan keeps all rules of conduct: some activations or parameters move that should stay"
            )
            lines.append(f"plan over {axis}: {proof}, largest table {solution.largest_table:,}{broken}")
        return "\n".join(lines)


def _lines(node: Node, issued: Sequence[Collective]) -> list[str]:
    typed = ", ".join(_typed(Value(node, i)) for i in range(len(node.results)))
    operands = ", ".join(f"%{v.node.name}" for v in node.operands)
    if node.kind == "move":
        if not issued:
            return [f"  %{node.name}: {typed} = {node.target.op} over {node.target.axis} of {operands}, local"]
        where = f"{issued[0].op} over {', '.join(issued[0].axes)}"
        return [f"  >> %{node.name}: {typed} = {where} of {operands}, {issued[0].nbytes:,} bytes, for {node.cause}"]
    if node.kind == "input":
        return [f"  %{node.name}: {typed}"]
    name = f"constrain[{pin_from_str(node.target)}]" if node.kind == "constrain" else str(node.target).removeprefix("aten.")
    comment = f"    # {node.source}" if node.source else ""
    inside = [f"  >>   {c.op} over {', '.join(c.axes)}, {c.nbytes:,} bytes    # {c.source}" for c in issued]
    return [f"  %{node.name}: {typed} = {name}({operands}){comment}", *inside]


def _typed(value: Value) -> str:
    """A value's dtype, global shape and the axes that cut each dim, as ``f32[512@dp, 256]``; pending sums behind."""
    cuts: dict[str, list[str]] = {}
    for cut in value.node.cuts:
        cuts.setdefault(cut.factor, []).append(cut.axis)
    pieces = []
    for size, dim in zip(value.meta.shape, value.dims, strict=True):
        axes = [axis for factor in dim for axis in cuts.get(factor, ())]
        pieces.append(f"{size}@{','.join(axes)}" if axes else str(size))
    pending = "".join(f" {{{op} over {axis}}}" for axis, op in value.node.pending.get(value.index, ()))
    return f"{_DTYPES.get(value.meta.dtype, str(value.meta.dtype).removeprefix('torch.'))}[{', '.join(pieces)}]{pending}"


def _nbytes(value: Value) -> int:
    return math.prod(map(nominal, value.shape)) * value.meta.dtype.itemsize
