"""Step: a function sharded over a mesh, planned at its first call and run at every one."""

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree
import torch

from ftp.agreement import Calls, calls
from ftp.arguments import (
    Arguments,
    Shape,
    abstract,
    agreed_shapes,
    check_donated_once,
    check_signature,
    check_static,
    check_values,
    describe_held,
    without_addresses,
)
from ftp.attest import certified
from ftp.collection import collection_paused
from ftp.constrain import Pin
from ftp.cost import VIEWS
from ftp.errors import FtpError, InputError, MeshError, MismatchError, SpecError, join_failures
from ftp.expected import Expected
from ftp.graph import BATCH, PARAMETER, Graph, Node, Value, live, mark_dependencies, merge_common
from ftp.ingest import constraints, decompose, found_by_trial, from_fx, prune
from ftp.lowered import Lowered, check_strictly
from ftp.mesh import Mesh, use_mesh
from ftp.placement import Donated, Placement, Returned, check_alive, check_placed, global_shape, known_of, placement, remember, returned
from ftp.planner import Specs, Watch, make_plan
from ftp.program import Program
from ftp.replicas import compare_copies
from ftp.spec import PartitionSpec, check_spec
from ftp.trace import Traced, trace
from ftp.tree import check_specs, flatten, kind_of, leaf_names
from ftp.version import __version__

_tracing = threading.RLock()  # torch.fx patches modules while it traces
InSpecs = Callable[[tuple[Any, ...]], list[PartitionSpec]]
OutSpecs = Callable[[Any, Sequence[PartitionSpec], tuple[Any, ...]], Sequence[PartitionSpec | None]]


@dataclass(frozen=True)
class Options:
    """What ``shard`` and ``spmd`` are asked for beside specs; see there."""

    data_axes: tuple[str, ...] | None
    reshard_after_forward: bool
    donate: tuple[int, ...]
    compile: bool
    strict: bool
    certify: bool
    pack: bool = False
    check_inputs: bool = False
    prefetch: int | None = None
    chunks: int = 1
    cuda_graph: bool = False
    async_tp: bool = False


@dataclass(frozen=True)
class _Planned:
    """A program, the arguments it was made for, and what its calls have to do.

    Attributes:
        shapes: per leaf of the arguments its global shape.
        placements: per output of the graph where it lies.
        renewed: outputs that share memory with an argument or with another output, and how they get their own.
        donated: leaves whose memory is reused, and what to remember of them.
    """

    program: Program
    key: tuple[Any, ...]
    shapes: tuple[Shape | None, ...]
    placements: tuple[Placement, ...]
    renewed: tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...]
    donated: tuple[tuple[int, Donated], ...]

    def result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What the function returns, from the outputs of the graph."""
        program = self.program
        leaves = [leaf if static else outputs[leaf] for leaf, static in zip(program.out_leaves, program.is_static, strict=True)]
        return program.out_tree.unflatten(leaves)


class Step:
    """A function sharded over a mesh; planned once for each distinct abstract input, as ``jit`` does.

    Args:
        in_specs: arguments to a spec per leaf. out_specs: the result, the arguments' specs and the arguments to a spec per leaf.
        arguments: what the positional arguments are called in messages.
        state: positions of arguments that are state rather than a batch.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: InSpecs,
        out_specs: OutSpecs,
        *,
        arguments: Sequence[str],
        state: Sequence[int],
        options: Options,
    ):
        self.mesh = mesh
        self._fn, self._in_specs, self._out_specs = fn, in_specs, out_specs
        self._arguments, self._state, self._options = tuple(arguments), frozenset(state), options
        self._programs: dict[tuple[Any, ...], _Planned] = {}
        self._last: tuple[_Planned, Expected, Returned] | None = None

    def __call__(self, *args: Any, **unexpected: Any) -> Any:
        record = self._record
        if self._last is not None and not unexpected:
            planned, expected, last = self._last
            if (leaves := expected.leaves(args, last)) is not None:
                outputs = self._run(planned, leaves, record)
                last.facts = expected.afterwards
                self._last = planned, expected, returned(outputs, planned.placements)
                return planned.result(outputs)
        try:
            call = Arguments(args, self._arguments)
            planned = self._look_up(call, unexpected)
        except Exception as e:
            # The other ranks are told, for they may be about to wait for this one.
            record.agree(record.next(), e)
            raise
        if planned is None:
            planned = self._programs[call.key] = self._plan(call, record)
        program = planned.program
        outputs = self._run(planned, [call.leaves[i] for i in program.tensor_leaves], record, call if self._options.check_inputs else None)
        before = self._last[2] if self._last is not None and self._last[0] is planned else None
        facts = [known_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in call.leaves]
        expected = Expected(call.treedef, call.leaves, facts, before, planned.placements, dict(planned.donated))
        for leaf, fact in planned.donated:
            remember(call.leaves[leaf], fact)
        made = returned(outputs, planned.placements)
        self._last = None if self._options.check_inputs else (planned, expected, made)
        return planned.result(outputs)

    def _run(
        self, planned: _Planned, inputs: Sequence[torch.Tensor], record: Calls, unchecked: Arguments | None = None
    ) -> list[torch.Tensor]:
        program, is_grad_enabled, has_begun = planned.program, torch.is_grad_enabled(), False
        torch._C._set_grad_enabled(False)  # torch.no_grad takes ten times as long
        try:
            with record.running(program.fingerprint, program.describe_failure, program.has_issued):
                if unchecked is not None:
                    self._check_inputs(unchecked, program, record)
                has_begun = True
                outputs = list(program.run(inputs))
                for i, renew in planned.renewed:
                    outputs[i] = renew(outputs[i])
        except BaseException as e:
            facts = dict(planned.donated)
            for i in program.overwritten(e.__cause__ or e if isinstance(e, FtpError) else e) if has_begun else ():
                remember(inputs[i], facts[program.tensor_leaves[i]])
            raise
        finally:
            torch._C._set_grad_enabled(is_grad_enabled)
        return outputs

    def lower(self, *args: Any) -> Lowered:
        """The program for these arguments (real, fake or meta), without running it or talking to other ranks."""
        return self.lower_traced(None, *args)

    def lower_traced(self, traced: Traced | None, *args: Any) -> Lowered:
        """``lower``, of a function that has been traced already with such arguments."""
        call = Arguments(args, self._arguments)
        specs = self._checked_specs(call)
        shapes = self._estimated_shapes(call, specs)
        known = traced or self._traced(call, shapes)

        def again(changed: Mapping[int, PartitionSpec], watch: Watch | None = None) -> Lowered:
            other = [changed.get(i, spec) for i, spec in enumerate(specs)]
            return Lowered(self._build(call, other, shapes, watch, known).program, again)

        return Lowered(self._build(call, specs, shapes, None, known).program, again)

    def _check_inputs(self, call: Arguments, program: Program, record: Calls) -> None:
        constants = [f"closure constant {i}, a tensor of shape {tuple(c.shape)}," for i, c in enumerate(program.constants)]
        compare_copies(
            [*(call.leaves[i] for i in program.tensor_leaves), *program.constants],
            [*program.in_specs, *([PartitionSpec()] * len(constants))],
            [*(call.names[i] for i in program.tensor_leaves), *constants],
            self.mesh,
            record,
            f" at call {record.next()}",
        )

    @cached_property
    def _record(self) -> Calls:
        if self.mesh.kind == "abstract":
            raise MeshError(
                f"The mesh {self.mesh} is abstract: it plans programs and runs none. Read the program with step.lower(...), or make the"
                " step on ftp.make_mesh(...) or ftp.simulated_mesh(...)."
            )
        return calls(self.mesh)

    def _argument_name(self, position: int) -> str:
        return self._arguments[position] if position < len(self._arguments) else f"args[{position}]"

    def _look_up(self, call: Arguments, unexpected: dict[str, Any]) -> _Planned | None:
        if unexpected:
            given = ", ".join([*map(self._argument_name, range(len(call.args))), *unexpected])
            raise InputError(
                f"The step does not take the keyword {next(iter(unexpected))!r}; its arguments are positional. Call step({given})."
            )
        if self._options.donate:
            check_donated_once(call, self._options.donate)
        try:
            known = self._programs.get(call.key)
        except TypeError:
            check_static(call)
            raise
        if known is None:
            known = next((p for p in self._programs.values() if call.is_like(p.key, p.shapes, p.program.leaf_specs, self.mesh)), None)
            if known is not None:
                self._programs[call.key] = known
        return known

    def _plan(self, call: Arguments, record: Calls) -> _Planned:
        """A program for these arguments; on processes all ranks make it together, or all fail."""
        number = record.next()
        try:
            check_values(call, self.mesh)
            specs = self._checked_specs(call)
            shapes = self._estimated_shapes(call, specs)
            held = json.dumps([describe_held(leaf, spec) for leaf, spec in zip(call.leaves, specs, strict=True)])
        except Exception as e:
            record.agree(number, e)
            raise
        if self.mesh.kind == "process":
            versions = f"ftp {__version__}, torch {torch.__version__}"
            tree = without_addresses(str(call.treedef))
            record.agree(number, {"library version": versions, "argument tree": tree, "specs": str(specs)})
            everyone = [json.loads(text) for text in record.exchange("arguments", held)]
            shapes = agreed_shapes(everyone, specs, call.names, self.mesh)
        try:
            planned = self._build(call, specs, shapes)
            agreed = {"rules found by trial": found_by_trial(planned.program.plan.graph), "program": planned.program.fingerprint}
        except Exception as e:
            record.agree(number, e)
            raise
        try:
            record.agree(number, agreed)
        except MismatchError as e:
            if "disagree on the program" in str(e):  # on every rank, so all of them come to say where it first differs
                record.agree(number, {"program": planned.program.description.replace("\n", "; ")})
            raise
        return planned

    def _estimated_shapes(self, call: Arguments, specs: Sequence[PartitionSpec]) -> list[Shape | None]:
        return [global_shape(leaf, spec, self.mesh) for leaf, spec in zip(call.leaves, specs, strict=True)]

    def _checked_specs(self, call: Arguments) -> list[PartitionSpec]:
        """A spec per leaf of the arguments; everything that can be wrong with either is found here."""
        check_static(call)
        check_signature(self._fn, call.args, f"the step, ({', '.join(map(self._argument_name, range(len(call.args))))})")
        if self._options.donate:
            check_donated_once(call, self._options.donate)
        specs = self._in_specs(call.args)
        check_alive(call.leaves, call.names)
        check_placed(call.leaves, specs, call.names, self.mesh)
        leaves = [abstract(leaf, shape) for leaf, shape in zip(call.leaves, self._estimated_shapes(call, specs), strict=True)]
        check_specs(specs, leaves, call.names, self.mesh.axes)
        return specs

    def _traced(self, call: Arguments, shapes: Sequence[Shape | None]) -> Traced:
        leaves = [abstract(leaf, shape) for leaf, shape in zip(call.leaves, shapes, strict=True)]
        with _tracing, use_mesh(self.mesh):
            return trace(self._fn, leaves, call.treedef, self.mesh.device_type, names=call.names)

    @collection_paused()
    def _build(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        watch: Watch | None = None,
        traced: Traced | None = None,
    ) -> _Planned:
        leaves = [abstract(leaf, shape) for leaf, shape in zip(call.leaves, shapes, strict=True)]
        traced = traced or self._traced(call, shapes)
        tensor_names = [name for name, leaf in zip(call.names, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
        graph = from_fx(traced.gm, tensor_names, strict=self._options.strict)
        tensor_leaves = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        arguments = graph.inputs[: len(tensor_leaves)]
        out_specs = self._checked_out_specs(traced, graph, specs, call.args)
        state = self._state | _returned_state(call.treedef, shapes, specs, traced, [v.meta.shape for v in graph.outputs], out_specs)
        batch = []
        for node, i in zip(arguments, tensor_leaves, strict=True):
            node.depends = PARAMETER if call.positions[i] in state else BATCH
            if call.positions[i] not in state:
                batch.append(node)
        in_specs = {node: specs[i] for node, i in zip(arguments, tensor_leaves, strict=True)}
        graph = merge_common(prune(live(graph)))
        mark_dependencies(graph)
        constrained = constraints(graph)
        _check_constraints(constrained, self.mesh)
        _check_local_meshes(graph, self.mesh)
        data_axes = self._options.data_axes
        if data_axes is None:
            data_axes = tuple(dict.fromkeys(axis for node in batch for axis in in_specs[node].axes))
        plan = make_plan(
            graph,
            self.mesh.axes,
            Specs(in_specs, constrained, out_specs),
            batch_inputs=batch,
            data_axes=data_axes,
            reshard_after_forward=self._options.reshard_after_forward,
            decompose=lambda g, nodes: decompose(g, nodes, strict=self._options.strict),
            watch=watch,
        )
        program = Program(
            self.mesh,
            traced.gm,
            plan,
            tensor_leaves,
            tuple(specs[i] for i in tensor_leaves),
            traced.constants,
            traced.out_tree,
            traced.out_leaves,
            traced.is_static,
            tuple(specs),
            self._options.compile,
            tuple(_role(call.positions[i], state) for i in tensor_leaves),
            self._options.pack,
            tuple(at for at, i in enumerate(tensor_leaves) if call.positions[i] in self._options.donate),
            self._options.prefetch,
            self._options.chunks,
            self._options.cuda_graph,
            self._options.async_tp,
        )
        if self._options.strict:
            check_strictly(program)
        if self._options.certify:
            certified(program)
        placements = tuple(placement(self.mesh, spec, shape) for spec, shape in zip(program.out_specs, program.out_shapes, strict=True))
        donated = {node.name for node, i in zip(arguments, tensor_leaves, strict=True) if call.positions[i] in self._options.donate}
        facts = {position: Donated(self._argument_name(position)) for position in self._options.donate}
        marks = tuple((i, facts[call.positions[i]]) for i in tensor_leaves if call.positions[i] in facts)
        return _Planned(program, call.key, tuple(shapes), placements, _renewed(plan.graph, donated), marks)

    def _checked_out_specs(
        self, traced: Traced, graph: Graph, specs: Sequence[PartitionSpec], args: tuple[Any, ...]
    ) -> list[PartitionSpec | None]:
        """A spec per output of the graph, or None where propagation is to choose."""
        result = traced.out_tree.unflatten(traced.out_leaves)
        found: list[PartitionSpec | None] = [None] * len(graph.outputs)
        failures = []
        leaf_specs = self._out_specs(result, specs, args)
        for leaf, static, spec, name in zip(traced.out_leaves, traced.is_static, leaf_specs, leaf_names(result, "the result"), strict=True):
            if not static:
                found[leaf] = spec
                failures += check_spec(spec, graph.outputs[leaf].meta.shape, self.mesh.axes, name) if spec else []
            elif spec:
                failures.append(f"{name} has spec {spec}, but is {leaf!r}, {kind_of(leaf)}; only a tensor can be cut. Give P().")
        if failures:
            raise SpecError(join_failures(failures))
        return found


def _role(position: int, state: Collection[int]) -> str:
    """What an argument's tensors are to the program, for reports."""
    if position not in state:
        return "batch"
    return "optimizer" if position else "parameters"


def _check_constraints(constrained: dict[Node, Pin], mesh: Mesh) -> None:
    failures: dict[str, None] = {}
    for node, pin in constrained.items():
        where = f"the constraint at {node.source}" if node.source else "a constraint"
        failures |= dict.fromkeys(check_spec(pin.spec, node.results[0].shape, mesh.axes, where))
        failures |= dict.fromkeys(
            f"{where} speaks of mesh axis {axis!r}, but the mesh is {mesh}. Give axes= names of its axes."
            for axis in pin.axes or ()
            if axis not in (*mesh.axes, *pin.spec.axes)
        )
    if failures:
        raise SpecError(join_failures(failures))


def _check_local_meshes(graph: Graph, mesh: Mesh) -> None:
    failures: dict[str, None] = {}
    for node in graph.nodes:
        if node.kind == "local" and dict(node.target.axes) != mesh.axes:
            given = ", ".join(f"{axis} {n}" for axis, n in node.target.axes.items())
            failures[
                f"ftp.local at {node.source} is given a mesh ({given}), but runs in a step on {mesh}. Give it the same mesh, or none."
            ] = None
    if failures:
        raise MeshError(join_failures(failures))


def _returned_state(
    tree: optree.PyTreeSpec,
    shapes: Sequence[Shape | None],
    specs: Sequence[PartitionSpec],
    traced: Traced,
    out_shapes: Sequence[Shape],
    out_specs: Sequence[PartitionSpec | None],
) -> set[int]:
    """Positions of arguments that come back in the result, with the same tree, shapes and specs: state, such as an optimizer's."""
    returned = [
        (None, None) if static else (out_shapes[leaf], out_specs[leaf])
        for leaf, static in zip(traced.out_leaves, traced.is_static, strict=True)
    ]
    subtrees = [flatten(sub) for sub in _subtrees(traced.out_tree.unflatten(range(len(returned))))]
    found = set()
    start = 0
    for position, child in enumerate(tree.children()):
        end = start + child.num_leaves
        given = list(zip(shapes[start:end], specs[start:end], strict=True))
        alike = (
            all(shape == returned[i][0] and returned[i][1] in (spec, None) for (shape, spec), i in zip(given, indices, strict=True))
            for indices, other in subtrees
            if other == child
        )
        if not child.is_leaf() and given and any(alike):
            found.add(position)
        start = end
    return found


def _subtrees(tree: Any) -> list[Any]:
    if tree is None or optree.tree_is_leaf(tree, none_is_leaf=False, namespace="ftp"):
        return []
    level = optree.tree_flatten_one_level(tree, none_is_leaf=False, namespace="ftp")
    return [tree, *(sub for child in level.children for sub in _subtrees(child))]


def _renewed(graph: Graph, donated: set[str]) -> tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...]:
    """Outputs that are views of an argument or of another output are copied, as writing to one must not change the other."""
    found: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = []
    taken: set[Value] = set()
    for i, value in enumerate(graph.outputs):
        is_spread = False
        while value.node.operands and (value.node.kind in ("constrain", "move") or value.node.target in VIEWS):
            is_spread |= value.node.target is torch.ops.aten.expand.default
            value = value.node.operands[0]
        if value in taken or is_spread or (value.node.kind == "input" and value.node.name not in donated):
            found.append((i, torch.clone if not is_spread else _dense))
        elif value.node.kind == "input":
            found.append((i, torch.Tensor.detach))
        taken.add(value)
    return tuple(found)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
