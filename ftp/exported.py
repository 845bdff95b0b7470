"""Exported programs: one rank's ``torch.export.ExportedProgram`` of a single-device one, with its collectives in the graph."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from ftp.constrain import constrain
from ftp.errors import InputError, MeshError, SpecError, join_failures
from ftp.exported_plan import Pin, argument_specs, boundary, memory_of, names_of_leaves, result_specs, state_specs
from ftp.graph import BATCH, PARAMETER, Node, live, mark_dependencies, merge_common
from ftp.ingest import constraints, decompose, from_fx
from ftp.mesh import AnyMesh, Mesh, require_coordinate, resolve
from ftp.partition import LocalProgram, Partitioner
from ftp.placement import take
from ftp.planner import Plan, Specs, make_plan
from ftp.program import groups_of
from ftp.recorder import is_deterministic
from ftp.simulate import COLLECTIVES
from ftp.simulate import simulate as run_in_lockstep
from ftp.source import told_line
from ftp.spec import PartitionSpec, check_spec, local_pieces, local_shape
from ftp.trace import Traced, trace
from ftp.tree import flatten

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import ExportGraphSignature, InputSpec

aten = torch.ops.aten
P = PartitionSpec


def shard_exported(
    exported_program: "ExportedProgram",
    mesh: AnyMesh | None = None,
    styles_or_specs: Mapping[str, Any] | None = None,
    *,
    rank: int | None = None,
    in_specs: Any = PartitionSpec(),
    out_specs: Any = PartitionSpec(),
    axis: str | None = None,
    strict: bool = False,
) -> "ExportedProgram":
    """One rank's program of an exported forward pass: same signature, local state, collectives in its graph.

    What is not cut by a spec is on every rank. The input program is left as it is; the tensors of the new one are copies.

    Args:
        exported_program: what ``torch.export.export`` gave, decomposed or not, of fixed shapes.
        mesh: any mesh. Programs for a mesh without processes, and for other ranks, name their groups ``sim:`` and the axis; ``bind``
            gives them a process' own groups, ``simulate`` runs all of them in one process.
        styles_or_specs: ``{pattern: P}`` over paths of the state dict, non-persistent buffers and constants, as in ``ftp.plan``;
            ``{pattern: style}`` over module paths with torch's ``ColwiseParallel`` or ``RowwiseParallel``, classes or instances.
        rank: whose program; default this process', on a mesh without processes the first. Row-major on the mesh, or a rank of the
            world on a mesh of processes.
        in_specs: one ``P``, a tuple for the positional arguments, or ``{argument: specs}``; the program then takes local shards.
        out_specs: prefix tree of the result; None leaves the choice to propagation.
        axis: the mesh axis that styles cut over; default the only one, or "tp".
        strict: an op without a sharding rule is an error, rather than replicated with a warning.

    Raises:
        SpecError: specs, patterns and styles that do not fit. InputError: a program that is not supported, with the line.

    >>> import ftp
    >>> program = torch.export.export(torch.nn.Linear(6, 4), (torch.ones(2, 6),))
    >>> local = ftp.shard_exported(program, ftp.AbstractMesh((3,), ("tp",)), {"weight": ftp.P(None, "tp")}, rank=1)
    >>> local.state_dict["weight"].shape
    torch.Size([4, 2])
    >>> [str(n.target) for n in local.graph.nodes if "all_reduce" in str(n.target)]
    ['_c10d_functional.all_reduce.default']
    """
    m = resolve(mesh)
    coordinate, is_own = _coordinate(m, rank)
    _check_program(exported_program)
    with _quiet():
        functional = exported_program.run_decompositions({}) if _is_training(exported_program) else exported_program
    state = _state(functional)
    specs, pins = state_specs(functional, state, m, styles_or_specs, axis)
    entries = _entries(functional, state, specs, m, in_specs)
    out = _out_specs(functional, specs, entries, m, out_specs)
    traced, plan = _planned(functional, entries, out, pins, m, strict)
    group: Callable[[str], str] = m.group_name if is_own else (lambda name: f"sim:{name}")
    local = Partitioner(plan, torch.device(m.device_type), group).program(coordinate)
    build = _Build(exported_program, functional, entries, traced, plan, local, m, coordinate)
    return build.program({path: specs.get(path, P()) for path in functional.state_dict})


def bind(program: "ExportedProgram", mesh: AnyMesh | None = None) -> "ExportedProgram":
    """A program made for this rank without processes, or loaded from a file, on the process groups of ``mesh``."""
    m = resolve(mesh)
    require_coordinate(m)
    module = copy.deepcopy(program.graph_module)
    for node, old in zip(module.graph.nodes, program.graph.nodes, strict=True):
        node.name = old.name  # a copy renames what is called as a builtin is, such as input
    for node in _collectives(module.graph):
        name = node.args[-1]
        assert isinstance(name, str)
        if name.startswith("sim:"):
            node.args = (*node.args[:-1], m.group_name(name.removeprefix("sim:")))
    module.recompile()
    with _quiet():
        return program._update(module, copy.deepcopy(program.graph_signature))


def simulate(programs: Sequence["ExportedProgram"], mesh: AnyMesh | None, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Runs the programs of all ranks, in the mesh's order, in this process; what they mutate is written to their state.

    Args:
        arguments: per rank its positional arguments; keyword arguments as a dict at the end, where the program has some.

    Returns:
        Per rank its result.
    """
    m = resolve(mesh)
    if len(programs) != m.size() or len(arguments) != m.size():
        raise MeshError(f"The mesh {m} has {m.size()} ranks, but {len(programs)} programs and {len(arguments)} arguments are given.")
    locals_, inputs = [], []
    for program, given in zip(programs, arguments, strict=True):
        for node in _collectives(program.graph):
            name = str(node.args[-1])
            if not name.startswith("sim:"):
                raise MeshError("The programs are of a mesh of processes. Make them for ftp.simulated_mesh(...) to run all in one.")
            node.meta["axis"] = name.removeprefix("sim:")
        locals_.append(LocalProgram(program.graph_module, (), ()))
        inputs.append(_flat_inputs(program, given))
    with torch.no_grad():
        results = run_in_lockstep(locals_, inputs, groups_of(m))
    return [_delivered(program, given, flat) for program, given, flat in zip(programs, inputs, results, strict=True)]


@dataclass(frozen=True)
class _Entry:
    """One placeholder of the functional graph.

    Attributes:
        value: the tensor of the state, or the static value; the fake tensor of a user's input.
    """

    spec: "InputSpec"
    name: str
    value: Any
    cut: PartitionSpec

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


# What is refused.


def _coordinate(mesh: Mesh, rank: int | None) -> tuple[dict[str, int], bool]:
    """A rank's position on the mesh, and whether it is this process'."""
    if rank is None:
        return (require_coordinate(mesh), True) if mesh.kind == "process" else (dict.fromkeys(mesh.axes, 0), False)
    ranks = list(mesh.ranks) if mesh.kind == "process" else list(range(mesh.size()))
    if rank not in ranks:
        raise MeshError(f"rank={rank!r} is not on the mesh {mesh}, which holds ranks {ranks[0]} to {ranks[-1]}.")
    return mesh.coordinates()[ranks.index(rank)], mesh.kind == "process" and rank == mesh.rank


def _is_training(program: "ExportedProgram") -> bool:
    return any(v.dialect == "TRAINING" for v in program.verifiers)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of its own use of what it has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _check_program(program: Any) -> None:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import InputKind, OutputKind

    if not isinstance(program, ExportedProgram):
        raise InputError(
            f"shard_exported takes an ExportedProgram, not {type(program).__name__}. torch.export.export(model, args) makes one."
        )
    failures = []
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            failures.append(f"input {spec.arg.name} is a {spec.kind.name.lower().replace('_', ' ')}, which cannot be cut or traced.")
        elif spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent):
            if spec.target not in program.state_dict:
                failures.append(f"{spec.target!r} is missing from the program's state dict.")
        elif spec.kind is not InputKind.USER_INPUT and spec.target not in program.constants:
            failures.append(f"{spec.target!r} is missing from the program's constants.")
    for spec in signature.output_specs:
        if spec.kind in (OutputKind.LOSS_OUTPUT, OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT, OutputKind.TOKEN):
            failures.append(f"output {spec.arg.name} is a {spec.kind.name.lower().replace('_', ' ')}; only forward passes are taken.")
    for graph in _graphs(program.graph_module):
        for node in graph.nodes:
            failures += _unfit(node)
    if failures:
        raise InputError(join_failures(dict.fromkeys(failures)))


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            yield inner.graph


_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


def _unfit(node: fx.Node) -> list[str]:
    line = told_line(node.meta.get("stack_trace") or "")
    module = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()][-1:]
    at = (f" at {line}" if line else "") + (f" (module {module[0]!r})" if module and module[0] else "")
    if isinstance(node.target, HigherOrderOperator) and node.target.name() not in _INLINED:
        return [f"{node.target.name()}{at} is a higher-order op, which has no sharding rule. Export the program without it."]
    if node.op == "call_function" and _is_symbolic(node) and not any(map(_is_symbolic, node.all_input_nodes)):
        if any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool) for v in pytree.tree_leaves(node.meta["val"])):
            return [f"{node.target}{at} reads a tensor's value; a program has shapes and no values. Keep the number as a tensor."]
        return [
            f"{node.target}{at} gives a shape that depends on values; a program has fixed shapes."
            " Use torch.where(mask, x, 0) or weights rather than x[mask], a fixed size rather than nonzero or unique."
        ]
    if node.op == "placeholder":
        val = node.meta.get("val")
        dims = [str(d) for d, s in enumerate(val.shape) if isinstance(s, torch.SymInt)] if isinstance(val, torch.Tensor) else []
        if not dims:
            return []
        used = next((told_line(u.meta.get("stack_trace") or "") for u in node.users), "")
        return [
            f"input {node.name} has dynamic dims ({', '.join(dims)}){f', first used at {used}' if used else ''}; a plan needs sizes."
            " Export without dynamic_shapes, once for each size."
        ]
    target = node.target
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))  # type: ignore[misc]
        if not is_deterministic(target, args, kwargs):  # type: ignore[arg-type]
            return [
                f"{target} draws random numbers{at}, and other ones on each rank."
                " If it is dropout that should be off, export model.eval(); else pass the numbers as an input."
            ]
    return []


def _is_symbolic(node: fx.Node) -> bool:
    """Whether a value is a number, or has a size, that is known only when the program runs."""
    vals = pytree.tree_leaves(node.meta.get("val"))
    numbers = [*(v for v in vals if not isinstance(v, torch.Tensor)), *(s for v in vals if isinstance(v, torch.Tensor) for s in v.shape)]
    return any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in numbers)


# Specs.


def _state(program: "ExportedProgram") -> dict[str, torch.Tensor]:
    """Every tensor that the graph takes beside the user's inputs, and those that it does not take, by path."""
    held = {**program.state_dict, **{k: v for k, v in program.constants.items() if isinstance(v, torch.Tensor)}}
    return {path: value for path, value in held.items() if isinstance(value, torch.Tensor)}


def _entries(
    program: "ExportedProgram", state: Mapping[str, torch.Tensor], specs: Mapping[str, P], mesh: Mesh, in_specs: Any
) -> list[_Entry]:
    from torch.export.graph_signature import InputKind, TensorArgument

    cuts = iter(argument_specs(program, mesh, in_specs))
    names = iter(names_of_leaves(program, False))
    found, failures = [], []
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            assert spec.target is not None
            found.append(_Entry(spec, spec.target, state[spec.target], specs[spec.target]))
            continue
        name, cut = next(names), next(cuts)
        if isinstance(spec.arg, TensorArgument):
            failures += check_spec(cut, tuple(node.meta["val"].shape), mesh.axes, name)
            found.append(_Entry(spec, name, node.meta["val"], cut))
            continue
        if cut and not isinstance(in_specs, P):
            failures.append(f"{name} has spec {cut}, but is {getattr(spec.arg, 'value', None)!r}; only a tensor can be cut. Give P().")
        found.append(_Entry(spec, name, getattr(spec.arg, "value", None), P()))
    devices = {e.value.device.type for e in found if e.is_tensor} - {mesh.device_type, "meta"}
    if devices:
        failures.append(
            f"The program is on {', '.join(sorted(devices))}, the mesh on {mesh.device_type}. Make the mesh with device_type="
            f"{min(devices)!r}, or move the program: torch.export.passes.move_to_device_pass(program, {mesh.device_type!r})."
        )
    if failures:
        raise SpecError(join_failures(failures))
    return found


def _out_specs(program: "ExportedProgram", specs: Mapping[str, P], entries: Sequence[_Entry], mesh: Mesh, given: Any) -> list[P | None]:
    """A spec per output of the functional graph: what is written back lies as what it is written to."""
    from torch.export.graph_signature import OutputKind, TensorArgument

    leaves = iter(result_specs(program, given))
    names = iter(names_of_leaves(program, True))
    inputs = {e.spec.arg.name: e.cut for e in entries}
    vals = [n.meta["val"] if isinstance(n, fx.Node) else n for n in program.graph.output_node().args[0]]  # type: ignore[union-attr]
    found: list[P | None] = []
    failures = []
    for spec, val in zip(program.graph_signature.output_specs, vals, strict=True):
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            found.append(inputs[spec.target or ""])
        elif spec.kind is not OutputKind.USER_OUTPUT:
            found.append(specs[spec.target or ""])
        else:
            cut, name = next(leaves), next(names)
            if isinstance(spec.arg, TensorArgument):
                failures += check_spec(cut, tuple(val.shape), mesh.axes, name) if cut else []
            elif cut and not isinstance(given, P):
                failures.append(f"{name} has spec {cut}, but is {val!r}; only a tensor can be cut. Give P().")
            found.append(cut)
    if failures:
        raise SpecError(join_failures(failures))
    return found


# From the exported graph to a plan.


class _Replay(fx.Interpreter):
    """Runs the exported graph, telling the line and the module of each op, with the values at module boundaries pinned."""

    def __init__(self, module: fx.GraphModule, pins: Mapping[fx.Node, Pin]):
        super().__init__(module)
        self.extra_traceback = False
        self.line = ""
        self._pins = pins

    def run_node(self, n: fx.Node) -> Any:
        self.line = told_line(n.meta.get("stack_trace") or "")
        out = super().run_node(n)
        pin = self._pins.get(n)
        return out if pin is None else constrain(out, pin.spec, axes=pin.axis)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None if target in _CHECKS else super().call_function(target, args, kwargs)


def _planned(
    program: "ExportedProgram", entries: Sequence[_Entry], out_specs: Sequence[P | None], pins: Sequence[Pin], mesh: Mesh, strict: bool
) -> tuple[Traced, Plan]:
    from torch.export.graph_signature import InputKind, TensorArgument

    at = {node: pin for pin in pins for node in boundary(program, pin.module, pin.slot)}
    replay = _Replay(program.graph_module, at)
    tensors = [e for e in entries if e.is_tensor]
    returned = [i for i, spec in enumerate(program.graph_signature.output_specs) if isinstance(spec.arg, TensorArgument)]

    def fn(*values: torch.Tensor) -> list[Any]:
        given = iter(values)
        out = replay.run(*(next(given) if e.is_tensor else e.value for e in entries))
        return [out[i] for i in returned]

    leaves = [torch.empty(tuple(e.value.shape), dtype=e.value.dtype, device="meta") for e in tensors]
    names = [e.spec.arg.name for e in tensors]
    with fx_traceback.preserve_node_meta():
        traced = trace(fn, leaves, flatten(tuple(leaves))[1], mesh.device_type, names=names, line=lambda: replay.line)
    graph = from_fx(traced.gm, names, strict=strict)
    batch, arguments = [], {}
    for node, entry in zip(graph.inputs, tensors, strict=False):
        is_state = entry.spec.kind is not InputKind.USER_INPUT
        node.depends = PARAMETER if is_state else BATCH
        arguments[node] = entry.cut
        if not is_state:
            batch.append(node)
    graph = merge_common(live(graph))
    mark_dependencies(graph)
    plan = make_plan(
        graph,
        mesh.axes,
        Specs(arguments, constraints(graph), [out_specs[i] for i in returned]),
        batch_inputs=batch,
        data_axes=tuple(dict.fromkeys(axis for node in batch for axis in arguments[node].axes)),
        decompose=lambda g, nodes: decompose(g, nodes, strict=strict),
    )
    return traced, plan


# From a rank's graph to an exported program.

_KEPT = ("nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack", "custom")


@dataclass(eq=False)
class _Build:
    original: "ExportedProgram"
    functional: "ExportedProgram"
    entries: list[_Entry]
    traced: Traced
    plan: Plan
    local: LocalProgram
    mesh: Mesh
    coordinate: dict[str, int]

    def program(self, state_specs: Mapping[str, P]) -> "ExportedProgram":
        from torch.export import ExportedProgram

        self.graph = fx.Graph()
        self.constants = dict(self.original.constants)
        signature = self._signature()
        copies: dict[Any, torch.Tensor] = {}
        cut = {e.spec.target: e.cut for e in self.entries if e.spec.target is not None}
        for path, value in self.constants.items():
            if isinstance(value, torch.Tensor):
                self.constants[path] = self._cut(value, cut.get(path, P()), copies)
        state = {path: self._cut(value, state_specs[path], copies) for path, value in self.original.state_dict.items()}
        self._values(signature, state)
        module = fx.GraphModule({}, self.graph)
        module.meta.update(self.original.graph_module.meta)
        calls = [copy.copy(entry) for entry in self.original.module_call_graph]
        for entry in calls[1:]:
            entry.signature = None  # it speaks of values inside the graph, which are other ones now
        with _quiet():
            return ExportedProgram(
                root=module,
                graph=module.graph,
                graph_signature=signature,
                state_dict=state,
                range_constraints=dict(self.original.range_constraints),
                module_call_graph=calls,
                example_inputs=self._example_inputs(),
                constants=self.constants,
                verifiers=list(self.original.verifiers),
            )

    def _signature(self) -> "ExportGraphSignature":
        """Fills the graph, and says what its inputs and outputs are: the original's, in its order and by its names."""
        from torch.export.graph_signature import (
            ExportGraphSignature,
            InputKind,
            InputSpec,
            OutputKind,
            OutputSpec,
            TensorArgument,
        )

        original = self.original.graph_signature
        tensors = [e.spec.arg.name for e in self.entries if e.is_tensor]
        inputs = [n for n in self.local.gm.graph.nodes if n.op == "placeholder"]
        constants = [f"c_ftp_constant_{i}" for i in range(len(self.traced.constants))]
        held: dict[fx.Node, Any] = dict(zip(inputs[len(tensors) + len(constants) :], self.local.offsets_at(self.coordinate), strict=True))
        by_name = dict(zip((*tensors, *constants), inputs, strict=False))
        specs = list(original.input_specs)
        first = next((i for i, s in enumerate(specs) if s.kind is InputKind.USER_INPUT), len(specs))
        for name, tensor in zip(constants, self.traced.constants, strict=True):
            path = name.removeprefix("c_")
            self.constants[path] = tensor
            specs.insert(first, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name), path))
            first += 1
        vals = {n.name: n for n in self.original.graph.nodes if n.op == "placeholder"}
        placed = {}
        for spec in specs:
            node = placed[spec.arg.name] = self._named(self.graph.placeholder(spec.arg.name), spec.arg.name)
            node.target = node.name
            if spec.arg.name in vals:
                node.meta = {k: v for k, v in vals[spec.arg.name].meta.items() if k not in ("tensor_meta", "from_node")}
            if spec.arg.name in by_name:
                held[by_name[spec.arg.name]] = node
        free = {s.arg.name for s in original.output_specs if isinstance(s.arg, TensorArgument)} - set(placed)
        self.graph._graph_namespace._used_names.update(free)
        self._body(held)
        # What is written back goes first in a functional graph; a training graph writes by itself.
        functional = self.functional.graph_signature.output_specs
        returned = iter(held[n] for n in self.local.gm.graph.output_node().args[0])  # type: ignore[union-attr]
        values: list[Any] = [next(returned) if isinstance(s.arg, TensorArgument) else s.arg.value for s in functional]  # type: ignore[union-attr]
        if _is_training(self.original):
            for spec, value in zip(functional, values, strict=True):
                if spec.kind is not OutputKind.USER_OUTPUT:
                    into = next(s.arg.name for s in specs if spec.target in (s.target, s.arg.name if s.target is None else None))
                    self.graph.call_function(aten.copy_.default, (placed[into], value)).meta.update(_kept(value.meta))
            values = [v for s, v in zip(functional, values, strict=True) if s.kind is OutputKind.USER_OUTPUT]
        outputs, named = [], set()
        for spec, value in zip(original.output_specs, values, strict=True):
            if not isinstance(spec.arg, TensorArgument):
                outputs.append(copy.copy(spec))
                continue
            if value.op != "placeholder" and spec.arg.name in free and value not in named:
                free.remove(spec.arg.name)
                named.add(self._named(value, spec.arg.name))
            outputs.append(OutputSpec(spec.kind, TensorArgument(value.name), spec.target))
        self.graph.output(tuple(values))
        return ExportGraphSignature([copy.deepcopy(s) for s in specs], outputs)

    def _named(self, node: fx.Node, name: str) -> fx.Node:
        """The node by a name that torch.export has chosen, a Python builtin's too."""
        self.graph._graph_namespace._used_names.add(name)
        node.name = name
        return node

    def _body(self, held: dict[fx.Node, Any]) -> None:
        """Copies the local program's ops; each knows the module and the line of what it computes or moves."""
        traced = {n.name: n.meta for n in self.traced.gm.graph.nodes if n.op == "call_function"}
        root = self._root_stack()
        causes = {node.name: self._cause(node, traced) for node in self.plan.graph.nodes}
        last: dict[str, Any] = root
        is_meta = {e.value.device.type for e in self.entries if e.is_tensor} == {"meta"}  # a program without weights stays one
        for node in self.local.gm.graph.nodes:
            if node.op != "call_function":
                continue
            made = held[node] = self.graph.node_copy(node, lambda n: held[n])
            if is_meta and made.kwargs.get("device") is not None:
                made.kwargs = {**made.kwargs, "device": torch.device("meta")}
            meta = causes.get(node.meta.get("origin"))
            last = meta or last
            made.meta = {"nn_module_stack": root["nn_module_stack"], **_kept(last)}

    def _root_stack(self) -> dict[str, Any]:
        for node in self.original.graph.nodes:
            for key, value in (node.meta.get("nn_module_stack") or {}).items():
                return {"nn_module_stack": {key: value}}
        return {"nn_module_stack": {"": ("", "torch.nn.modules.module.Module")}}

    def _cause(self, node: Node, traced: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
        """What the exported graph knows of the op that an op comes from; of a moved value's origin, or its first reader's."""
        while node.kind in ("move", "constrain"):
            node = node.operands[0].node
        if node.kind == "input":
            users = self._users.get(id(node), [])
            node = next((u for u in users if u.kind == "op"), node)
        return traced.get(node.name.split(".")[0])

    @cached_property
    def _users(self) -> dict[int, list[Node]]:
        """Per node the ops that read its results, through moves."""
        found: dict[int, list[Node]] = {}
        for node in self.plan.graph.nodes:
            for value in node.operands:
                origin = value.node
                while origin.kind in ("move", "constrain"):
                    origin = origin.operands[0].node
                found.setdefault(id(origin), []).append(node)
        return found

    def _cut(self, value: Any, spec: P, copies: dict[Any, torch.Tensor]) -> Any:
        """A copy of this rank's part; one tensor under two paths stays one."""
        if not isinstance(value, torch.Tensor):
            return value
        key = (memory_of(value), spec, isinstance(value, nn.Parameter))
        if key not in copies:
            pieces = local_pieces(spec, value.shape, self.mesh.axes, self.coordinate)
            part = take(value.detach(), pieces) if spec else value.detach()
            part = part.clone(memory_format=torch.contiguous_format) if spec else part.clone()
            copies[key] = nn.Parameter(part, value.requires_grad) if isinstance(value, nn.Parameter) else part
        return copies[key]

    def _values(self, signature: "ExportGraphSignature", state: Mapping[str, torch.Tensor]) -> None:
        """Each node's value on this rank, as shapes: ``meta["val"]``."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        cuts = {e.spec.arg.name: e.cut for e in self.entries}
        held = {**self.constants, **state}
        specs = {s.arg.name: s for s in signature.input_specs}
        with mode:
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    target = specs[node.name].target
                    if target is not None:
                        node.meta["val"] = _fake(held[target], held[target].device)
                    elif isinstance(node.meta["val"], torch.Tensor):
                        val = node.meta["val"]
                        shape = local_shape(cuts[node.name], val.shape, self.mesh.axes, self.coordinate)
                        is_whole = shape == tuple(val.shape)
                        node.meta["val"] = _fake(val, val.device) if is_whole else torch.empty(shape, dtype=val.dtype, device=val.device)
                elif node.op == "call_function":
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])  # type: ignore[misc]
                    node.meta["val"] = node.target(*args, **kwargs)

    def _example_inputs(self) -> Any:
        from torch.export.graph_signature import InputKind

        if self.original.example_inputs is None:
            return None
        leaves, tree = pytree.tree_flatten(self.original.example_inputs)
        users = [e for e in self.entries if e.spec.kind is InputKind.USER_INPUT]
        if len(leaves) != len(users):
            return None
        return tree.unflatten([self._cut(x, e.cut, {}) if e.cut else x for x, e in zip(leaves, users, strict=True)])


def _fake(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _kept(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {k: copy.copy(meta[k]) for k in _KEPT if k in meta}


# Running.


def _collectives(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in COLLECTIVES]


def _flat_inputs(program: "ExportedProgram", given: tuple[Any, ...]) -> list[Any]:
    signature = program.module_call_graph[0].signature
    assert signature is not None
    keywords = pytree.tree_unflatten(range(signature.in_spec.num_leaves), signature.in_spec)[1]
    args, kwargs = (given[:-1], given[-1]) if keywords else (given, {})
    leaves, tree = pytree.tree_flatten((args, {k: kwargs[k] for k in keywords if k in kwargs}))
    if tree != signature.in_spec:
        raise InputError(f"The program takes {signature.in_spec}, but is given {tree}.")
    users = iter(leaves)
    held = {**program.state_dict, **program.constants}
    return [held[s.target] if s.target is not None else next(users) for s in program.graph_signature.input_specs]


def _delivered(program: "ExportedProgram", inputs: Sequence[Any], flat: Sequence[Any]) -> Any:
    from torch.export.graph_signature import OutputKind

    signature = program.module_call_graph[0].signature
    assert signature is not None
    by_name = {s.arg.name: x for s, x in zip(program.graph_signature.input_specs, inputs, strict=True)}
    targets = {s.target: s.arg.name for s in program.graph_signature.input_specs if s.target is not None}
    results = []
    for spec, value in zip(program.graph_signature.output_specs, flat, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
        else:
            by_name[targets.get(spec.target, spec.target)].copy_(value)  # type: ignore[arg-type]
    return pytree.tree_unflatten(results, signature.out_spec)
