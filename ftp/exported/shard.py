"""``shard_exported``: one rank's program of an exported program, by one trace and one plan."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.fx.node import map_arg

from ftp.dynamic_int import Sizes, in_multiples, value_of
from ftp.errors import InputError, SpecError, raise_all
from ftp.exported.build import KEY, Build, SignatureEntry, is_training, quiet
from ftp.exported.check import check_program
from ftp.exported.module_calls import module_of
from ftp.exported.open_dims import OpenDims
from ftp.exported.random_ops import drawn
from ftp.exported.specs import argument_specs, names_of_leaves, result_specs, state_specs
from ftp.exported.styles import ConstrainedValue
from ftp.ops.constrain import constrain
from ftp.partitioning.partition import Partitioner
from ftp.planning.machine import hardware_on
from ftp.planning.plan import Plan
from ftp.planning.prepare import plan_prepared, prepare
from ftp.random.draws import Draws
from ftp.sharding.check_spec import check_spec
from ftp.sharding.mesh import AnyMesh, Mesh, check_rank, require_coordinate, resolve
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import P, PartitionSpec
from ftp.source import told_line
from ftp.torch_internals.fake_tensors import FakeTensorMode
from ftp.tracing.trace import Traced, trace

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.exported_program import ModuleCallSignature

aten = torch.ops.aten


def shard_exported(
    exported_program: "ExportedProgram",
    mesh: AnyMesh | None,
    styles_or_specs: Mapping[str, Any],
    *,
    rank: int | None = None,
    in_specs: Any = PartitionSpec(),
    out_specs: Any = PartitionSpec(),
    axis: str | None = None,
    rng: bool = False,
    strict: bool = False,
) -> "ExportedProgram":
    """Shard an exported forward pass: the program of one rank, with its collectives in the graph.

    Args:
        exported_program: from ``torch.export.export``, decomposed or not; it is not changed. A
            rank's program serves all sizes that it was exported for with ``dynamic_shapes``.
        mesh: any mesh; None for the one in use. A program for a mesh without processes, or for
            another rank, names its groups ``sim:`` and the axis. ``ftp.exported.simulate`` runs
            such programs in one process, ``ftp.exported.bind`` binds one to process groups.
        styles_or_specs: ``{pattern: P}`` over paths of the state dict, non-persistent buffers and
            constants, as in ``ftp.plan``; or ``{pattern: style}`` over module paths, with torch's
            ``ColwiseParallel``, ``RowwiseParallel`` or ``SequenceParallel``, classes or instances,
            or instances of ``PrepareModuleInput``, ``PrepareModuleOutput`` or
            ``PrepareModuleInputOutput``. Tensors that no entry matches are replicated.
        rank: on a mesh of processes a rank of the world, default this process'; on another mesh a
            row-major position, default 0.
        in_specs: one ``P``, a tuple for the positional arguments, or ``{argument: specs}``; the
            program takes local shards. Default replicated.
        out_specs: prefix tree of the result; None lets the planner choose. Default replicated.
        axis: the mesh axis that styles shard over; default the only one, or "tp".
        rng: the program takes a key, ``rng=ftp.random.key(seed)``, from which random ops draw the
            numbers that ``ftp.functionalize(model)`` draws, on any mesh. Without ``rng`` random ops
            are an error.
        strict: an op without a sharding rule is an error; else it is replicated with a warning.

    Returns:
        An ``ExportedProgram`` of the same signature, with copies of this rank's shards as state.

    Raises:
        SpecError: specs, patterns or styles that do not fit.
        InputError: a program that is not supported, with the source line.

    >>> import ftp
    >>> program = torch.export.export(torch.nn.Linear(6, 4), (torch.ones(2, 6),))
    >>> mesh, specs = ftp.AbstractMesh((3,), ("tp",)), {"weight": ftp.P(None, "tp")}
    >>> local = ftp.shard_exported(program, mesh, specs, rank=1)
    >>> local.state_dict["weight"].shape
    torch.Size([4, 2])
    >>> [str(n.target) for n in local.graph.nodes if "all_reduce" in str(n.target)]
    ['_c10d_functional.all_reduce.default']
    """
    m = resolve(mesh)
    coordinate, is_own = _coordinate(m, rank)
    check_program(exported_program, rng)
    functional = _functional(exported_program)
    state, open_dims = _state(functional), OpenDims.of(functional, m.size())
    specs, pins = state_specs(
        functional, state, m, styles_or_specs, axis, _signatures(exported_program)
    )
    entries = _entries(functional, state, specs, m, in_specs, open_dims)
    if rng:
        entries.append(_key_entry(entries, m))
    out = _out_specs(functional, specs, entries, m, out_specs, open_dims)
    traced, plan = _planned(functional, entries, out, pins, m, strict, open_dims)
    group: Callable[..., str] = (
        m.group_name if is_own else (lambda *names: f"sim:{' × '.join(names)}")
    )
    local = Partitioner(plan, torch.device(m.device_type), group).program(coordinate)
    build = Build(
        exported_program, functional, entries, traced, plan, local, m, coordinate, open_dims
    )
    return build.program({path: specs.get(path, P()) for path in functional.state_dict})


def _functional(program: "ExportedProgram") -> "ExportedProgram":
    """The program without in-place ops. Call signatures are dropped: torch cannot keep them."""
    if not is_training(program):
        return program
    bare = copy.copy(program)
    bare._module_call_graph = [copy.copy(entry) for entry in program.module_call_graph]
    for entry in bare._module_call_graph[1:]:
        entry.signature = None
    with quiet():
        return bare.run_decompositions({})


def _signatures(program: "ExportedProgram") -> "list[tuple[str, ModuleCallSignature]]":
    return [
        (entry.fqn, entry.signature)
        for entry in program.module_call_graph
        if entry.fqn and entry.signature is not None
    ]


def _key_entry(entries: Sequence[SignatureEntry], mesh: Mesh) -> SignatureEntry:
    """The input for the random key."""
    from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

    if any(e.spec.arg.name == KEY for e in entries):
        raise InputError(
            f"The program has an argument {KEY!r} of its own, so rng=True cannot add one of this"
            " name. Export it with another name."
        )
    spec = InputSpec(InputKind.USER_INPUT, TensorArgument(KEY), None)
    device = next((e.value.device for e in entries if e.is_tensor), torch.device(mesh.device_type))
    with FakeTensorMode():
        return SignatureEntry(spec, KEY, torch.empty(2, dtype=torch.int64, device=device), P())


def _coordinate(mesh: Mesh, rank: int | None) -> tuple[dict[str, int], bool]:
    """A rank's coordinate, and whether the rank is this process."""
    is_process = mesh.kind == "process"
    if rank is None:
        coordinate = require_coordinate(mesh) if is_process else dict.fromkeys(mesh.axes, 0)
        return coordinate, is_process
    ranks = list(mesh.ranks) if is_process else list(range(mesh.size()))
    rank = check_rank(rank, ranks, "rank", f"the mesh {mesh}")
    return mesh.coordinates()[ranks.index(rank)], is_process and rank == mesh.rank


# Specs.


def _state(program: "ExportedProgram") -> dict[str, torch.Tensor]:
    """All tensors of the state dict and the constants, by path; the graph may not read some."""
    held = [*program.state_dict.items(), *program.constants.items()]
    return {path: value for path, value in held if isinstance(value, torch.Tensor)}


def _entries(
    program: "ExportedProgram",
    state: Mapping[str, torch.Tensor],
    specs: Mapping[str, P],
    mesh: Mesh,
    in_specs: Any,
    open_dims: OpenDims,
) -> list[SignatureEntry]:
    from torch.export.graph_signature import InputKind, TensorArgument

    cuts = iter(argument_specs(program, in_specs))
    names = iter(names_of_leaves(program, False))
    found, failures = [], []
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            assert spec.target is not None
            found.append(SignatureEntry(spec, spec.target, state[spec.target], specs[spec.target]))
            continue
        name, cut = next(names), next(cuts)
        if isinstance(spec.arg, TensorArgument):
            shape = open_dims.example(node.meta["val"].shape)
            failures += check_spec(cut, shape, mesh.axes, name)
            found.append(SignatureEntry(spec, name, node.meta["val"], cut))
            continue
        value = getattr(spec.arg, "value", None)
        if cut and not isinstance(in_specs, P):
            failures.append(_no_tensor(name, cut, value))
        found.append(SignatureEntry(spec, name, value, P()))
    devices = {e.value.device.type for e in found if e.is_tensor} - {mesh.device_type, "meta"}
    if devices:
        failures.append(
            f"The program is on {', '.join(sorted(devices))}, the mesh on {mesh.device_type}. Make"
            f" the mesh with device_type={min(devices)!r}, or move the program:"
            f" torch.export.passes.move_to_device_pass(program, {mesh.device_type!r})."
        )
    raise_all(SpecError, failures)
    return found


def _no_tensor(name: str, cut: P, value: Any) -> str:
    return f"{name} has spec {cut}, but is {value!r}; only a tensor can be cut. Give P()."


def _out_specs(
    program: "ExportedProgram",
    specs: Mapping[str, P],
    entries: Sequence[SignatureEntry],
    mesh: Mesh,
    given: Any,
    open_dims: OpenDims,
) -> list[P | None]:
    """A spec per output of the functional graph; a mutated input or buffer keeps its spec."""
    from torch.export.graph_signature import OutputKind, TensorArgument

    leaves = iter(result_specs(program, given))
    names = iter(names_of_leaves(program, True))
    inputs = {e.spec.arg.name: e.cut for e in entries}
    returned: Any = program.graph.output_node().args[0]
    vals = [n.meta["val"] if isinstance(n, fx.Node) else n for n in returned]
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
                shape = open_dims.example(val.shape)
                failures += check_spec(cut, shape, mesh.axes, name) if cut else []
            elif cut and not isinstance(given, P):
                failures.append(_no_tensor(name, cut, val))
            found.append(cut)
    raise_all(SpecError, failures)
    return found


# From the exported graph to a plan.


CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


class _ExportedReplay(fx.Interpreter):
    """Runs the exported graph within a trace: notes each op's line and module, and constrains the
    values of ``pins``.
    """

    def __init__(self, module: fx.GraphModule, pins: Sequence[ConstrainedValue]):
        super().__init__(module)
        self.extra_traceback = False
        self.line = self._module = ""
        self.draws = Draws(None, "the program")
        self._read: dict[tuple[fx.Node, fx.Node], tuple[ConstrainedValue, ...]] = {}
        self._given: dict[fx.Node, list[ConstrainedValue]] = {}
        # A value enters the outer module first, and leaves the inner module first.
        for pin in sorted(pins, key=lambda pin: len(pin.call.nodes)):
            if not pin.is_read:
                self._given.setdefault(pin.node, []).append(pin)
                continue
            for node in pin.call.nodes:
                if pin.node in node.all_input_nodes:
                    self._read[node, pin.node] = (pin, *self._read.get((node, pin.node), ()))
        self._arrived: dict[tuple[ConstrainedValue, ...], Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.line = told_line(n.meta.get("stack_trace") or "")
        self._module = module_of(n)
        out = super().run_node(n)
        for pin in self._given.get(n, []):
            out = _pinned(out, pin)
        return out

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        def load(read: fx.Node) -> Any:
            found, chain = self.env[read], self._read.get((n, read), ())
            for at, pin in enumerate(chain, 1):
                if chain[:at] not in self._arrived:
                    self._arrived[chain[:at]] = _pinned(found, pin)
                found = self._arrived[chain[:at]]
            return found

        return map_arg(args, load)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in CHECKS:
            return None
        if self.draws.key is not None and (draw := drawn(target, args, kwargs)) is not None:
            with self.draws.at(self._module):
                return draw(self.draws)
        return super().call_function(target, args, kwargs)


def _pinned(value: torch.Tensor, pin: ConstrainedValue) -> torch.Tensor:
    for spec in pin.specs:
        value = constrain(value, spec, axes=pin.axis)
    return value


def _planned(
    program: "ExportedProgram",
    entries: Sequence[SignatureEntry],
    out_specs: Sequence[P | None],
    pins: Sequence[ConstrainedValue],
    mesh: Mesh,
    strict: bool,
    open_dims: OpenDims,
) -> tuple[Traced, Plan]:
    from torch.export.graph_signature import InputKind, TensorArgument

    from ftp.tracing.symbolic import symbolic_of

    replays: dict[int, _ExportedReplay] = {}
    tensors = [e for e in entries if e.is_tensor]
    returned = [
        i
        for i, spec in enumerate(program.graph_signature.output_specs)
        if isinstance(spec.arg, TensorArgument)
    ]

    def fn(*values: torch.Tensor) -> list[Any]:
        given = iter(values)
        everything = [next(given) if e.is_tensor else e.value for e in entries]
        replay = replays[0] = _ExportedReplay(program.graph_module, pins)
        if entries and entries[-1].name == KEY and entries[-1].spec.target is None:
            replay.draws.key = everything.pop()
        out = replay.run(*everything)
        return [out[i] for i in returned]

    sizes = open_dims.sizes()
    shapes = [open_dims.formulas(e.value.shape, sizes) for e in tensors]
    leaves = [
        torch.empty(tuple(map(value_of, shape)), dtype=e.value.dtype, device="meta")
        for e, shape in zip(tensors, shapes, strict=True)
    ]
    names = [e.spec.arg.name for e in tensors]
    with fx_traceback.preserve_node_meta():
        traced = trace(
            fn,
            leaves,
            flatten(tuple(leaves))[1],
            mesh.device_type,
            names=names,
            line=lambda: replays[0].line if replays else "",
            shapes=shapes,
            symbolic=symbolic_of(sizes) if open_dims.ranges else None,
        )
    is_state = [entry.spec.kind is not InputKind.USER_INPUT for entry in tensors]
    cuts, results = [entry.cut for entry in tensors], [out_specs[i] for i in returned]

    def plan(sizes: Sizes | None) -> Plan:
        number = None if traced.symbolic is None else traced.symbolic.dynamic
        prepared = prepare(traced.gm, names, is_state, strict=strict, sizes=sizes, number=number)
        return plan_prepared(
            prepared, mesh.axes, cuts, results, strict=strict, hardware=hardware_on(mesh)
        )

    if not open_dims.ranges:
        return traced, plan(None)
    made = in_multiples(open_dims.sizes, plan)
    assert made.sizes is not None
    made.sizes.ask_again(sizes.conditions)
    return traced, made
