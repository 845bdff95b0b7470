"""Step: a function sharded over a mesh, planned at its first call and run at every one."""

import json
import linecache
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

from ftp.api.arguments import (
    Arguments,
    check_donated_once,
    check_signature,
    check_static,
    check_values,
    nones,
    takes_by_name,
)
from ftp.api.certify import certified
from ftp.api.fast_path import Expected
from ftp.distributed.agreement import Calls, calls
from ftp.errors import FtpError, InputError, MeshError, MismatchError, SpecError, join_failures
from ftp.ops.constrain import Pin
from ftp.paused_gc import collection_paused
from ftp.planning.from_fx import found_by_trial
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.planner import Watch
from ftp.planning.prepare import plan_prepared, prepare
from ftp.report.lowered import Lowered, check_strictly
from ftp.rules.op_kinds import VIEWS
from ftp.runtime.program import Program
from ftp.runtime.shared_memory import is_asked_for
from ftp.sharding.arguments import Shape
from ftp.sharding.mesh import Mesh, use_mesh
from ftp.sharding.pytree import check_specs, flatten, kind_of, leaf_names
from ftp.sharding.spec import PartitionSpec, check_spec
from ftp.source import raised_line
from ftp.tensors.check_indices import check_indices, index_bounds
from ftp.tensors.device_put import global_shape
from ftp.tensors.global_shapes import abstract, agreed_shapes, describe_held, without_addresses
from ftp.tensors.placement import (
    Donated,
    Placement,
    Returned,
    check_alive,
    check_placed,
    known_of,
    placement,
    remember,
    returned,
)
from ftp.tensors.replicas import compare_copies
from ftp.tracing.captured import Captured, places_of, warn_of_others
from ftp.tracing.trace import Traced, trace
from ftp.version import __version__

PROGRAMS = 64  # kept by a step
MANY = 10  # programs of one step, at which it is said what changes from call to call
_PAD = "Pad tensors to one shape, or to a few (buckets)."
_AS_TENSOR = "Give numbers that change as tensors: torch.tensor(x)."
_MOST_FAKE = 10_000  # ops on shapes that torch remembers, a kilobyte each
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
    programs: int = PROGRAMS


@dataclass(frozen=True, eq=False)
class _Planned:
    """A program, the arguments it was made for, and what its calls have to do.

    Attributes:
        shapes: per leaf of the arguments its global shape.
        placements: per output of the graph where it lies.
        renewed: outputs that share memory with an argument or with another output, and how they get
            their own.
        donated: leaves whose memory is reused, and what to remember of them.
        captured: where the function found tensors that it was not given.
    """

    program: Program
    key: tuple[Any, ...]
    shapes: tuple[Shape | None, ...]
    placements: tuple[Placement, ...]
    renewed: tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...]
    donated: tuple[tuple[int, Donated], ...]
    captured: list[Captured]

    @property
    def is_stale(self) -> bool:
        """Whether the function would find another tensor by now than the one that it captured."""
        return any(place.now() is not place.tensor for place in self.captured)

    def describe_leaf(self, i: int) -> str:
        """What a leaf of the arguments was, as far as it makes the program: a tensor of a global
        shape, or a value.
        """
        shape, (kind, known, *_) = self.shapes[i], self.key[1 + i]
        if shape is not None:
            return f"{str(known).removeprefix('torch.')}{list(shape)}"
        return known if kind in (float, complex) else repr(known)

    def result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What the function returns, from the outputs of the graph."""
        program = self.program
        leaves = [
            leaf if static else outputs[leaf]
            for leaf, static in zip(program.out_leaves, program.is_static, strict=True)
        ]
        return program.out_tree.unflatten(leaves)


class Step:
    """A function sharded over a mesh; planned once for each distinct abstract input, as ``jit``
    does.

    It keeps the programs used last. Ranks make the same calls, so they keep and drop the same.

    Args:
        in_specs: arguments to a spec per leaf. out_specs: the result, the arguments' specs and the
            arguments to a spec per leaf.
        arguments: what the positional arguments are called in messages.
        state: positions of arguments that are state rather than a batch.

    >>> import ftp
    >>> step = ftp.spmd(lambda x: 2 * x, ftp.simulated_mesh((2,), ("dp",)), ftp.P("dp"))
    >>> isinstance(step, Step), step(torch.ones(2)), len(step.lower(torch.ones(2)).collectives)
    (True, tensor([2., 2.]), 0)
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
        # The last used at the end; of each the numbers of the texts that torch keeps of its
        # modules.
        self._used: dict[_Planned, range] = {}
        self._count = 0  # of programs planned so far
        self.expects_many = False  # programs, so that no warning is due
        self._last: tuple[_Planned, Expected, Returned] | None = None

    def __call__(self, *args: Any, **unexpected: Any) -> Any:
        record = self._record
        if self._last is not None and not unexpected:
            planned, expected, last = self._last
            if (leaves := expected.leaves(args, last)) is not None and not (
                planned.captured and planned.is_stale
            ):
                outputs = self._run(planned, leaves, record)
                last.facts = expected.afterwards
                self._last = planned, expected, returned(outputs, planned.placements, record.call)
                return planned.result(outputs)
        try:
            call = Arguments(args, self._arguments)
            planned = self._look_up(call, unexpected)
            if planned is not None:
                warn_of_others(planned.captured, stacklevel=2)
        except Exception as e:
            # The other ranks are told, for they may be about to wait for this one.
            record.agree(record.next(), e)
            raise
        first_source = graph_module._loader.next_id
        is_new = planned is None
        if planned is None:
            planned = self._programs[call.key] = self._plan(call, record)
        program = planned.program
        facts = [known_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in call.leaves]
        outputs = self._run(
            planned,
            [call.leaves[i] for i in program.tensor_leaves],
            record,
            call if self._options.check_inputs else None,
        )
        self._use(planned, record)
        if is_new:
            self._used[planned] = range(first_source, graph_module._loader.next_id)
            self._count += 1
            if self._count == MANY and not self.expects_many:
                warnings.warn(self._describe_changes(call), stacklevel=2)
        before = self._last[2] if self._last is not None and self._last[0] is planned else None
        expected = Expected(
            call.treedef, call.leaves, facts, before, planned.placements, dict(planned.donated)
        )
        for leaf, fact in planned.donated:
            remember(call.leaves[leaf], fact)
        made = returned(outputs, planned.placements, record.call)
        self._last = None if self._options.check_inputs else (planned, expected, made)
        return planned.result(outputs)

    def _run(
        self,
        planned: _Planned,
        inputs: Sequence[torch.Tensor],
        record: Calls,
        unchecked: Arguments | None = None,
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
            for i in (
                program.overwritten(e.__cause__ or e if isinstance(e, FtpError) else e)
                if has_begun
                else ()
            ):
                remember(inputs[i], facts[program.tensor_leaves[i]])
            raise
        finally:
            torch._C._set_grad_enabled(is_grad_enabled)
        return outputs

    def lower(self, *args: Any) -> Lowered:
        """The program for these arguments (real, fake or meta), without running it or talking to
        other ranks.
        """
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
        given, when = (
            [*(call.leaves[i] for i in program.tensor_leaves), *program.constants],
            f" at call {record.next()}",
        )
        named = [
            *(call.names[i] for i in program.tensor_leaves),
            *(f"closure constant {i}" for i in range(len(program.constants))),
        ]
        check_indices(given, named, index_bounds(program.traced.graph), self.mesh, record, when)
        constants = [
            f"closure constant {i}, a tensor of shape {tuple(c.shape)},"
            for i, c in enumerate(program.constants)
        ]
        compare_copies(
            [*(call.leaves[i] for i in program.tensor_leaves), *program.constants],
            [*program.in_specs, *([PartitionSpec()] * len(constants))],
            [*(call.names[i] for i in program.tensor_leaves), *constants],
            self.mesh,
            record,
            when,
        )

    @cached_property
    def _record(self) -> Calls:
        if self.mesh.kind == "abstract":
            raise MeshError(
                f"The mesh {self.mesh} is abstract: it plans programs and runs none. Read the"
                " program with step.lower(...), or make the"
                " step on ftp.make_mesh(...) or ftp.simulated_mesh(...)."
            )
        return calls(self.mesh)

    def _argument_name(self, position: int) -> str:
        return self._arguments[position] if position < len(self._arguments) else f"args[{position}]"

    def _unexpected(self, n: int, keywords: Mapping[str, Any]) -> str:
        """What is wrong with keyword arguments after ``n`` positional ones."""
        positional = [*map(self._argument_name, range(n))]
        if strange := [name for name in keywords if name not in self._arguments[n:]]:
            fn, arguments = (
                getattr(self._fn, "__name__", kind_of(self._fn)),
                ", ".join(self._arguments),
            )
            if strange[0] in takes_by_name(self._fn):
                return (
                    f"The step takes no keyword {strange[0]!r}, though {fn} does: its arguments"
                    f" are positional, ({arguments})."
                    f" Make the step of functools.partial({fn}, {strange[0]}=...)."
                )
            again = f", and {strange[0]!r} is given already" if strange[0] in positional else ""
            return (
                f"The step takes no argument {strange[0]!r}: {fn} takes ({arguments}), by"
                f" position{again}. Call step({arguments})."
            )
        given = ", ".join([*positional, *sorted(keywords, key=self._arguments.index)])
        return (
            f"The step does not take the keyword {next(iter(keywords))!r}; its arguments are"
            f" positional. Call step({given})."
        )

    def _look_up(self, call: Arguments, unexpected: dict[str, Any]) -> _Planned | None:
        if unexpected:
            raise InputError(self._unexpected(len(call.args), unexpected))
        if self._options.donate:
            check_donated_once(call, self._options.donate)
        try:
            known = self._programs.get(call.key)
        except TypeError:
            check_static(call)
            raise
        if known is None:
            known = next(
                (
                    p
                    for p in self._programs.values()
                    if call.is_like(p.key, p.shapes, p.program.leaf_specs, self.mesh)
                ),
                None,
            )
            if known is not None:
                self._programs[call.key] = known
        return known

    def _use(self, planned: _Planned, record: Calls) -> None:
        """Notes that a program is used, and drops the one that was not for longest where there
        are too many.
        """
        self._used[planned] = self._used.pop(planned, range(0))
        if len(self._used) > self._options.programs:
            oldest = next(iter(self._used))
            sources = self._used.pop(oldest)
            self._programs = {
                key: kept for key, kept in self._programs.items() if kept is not oldest
            }
            record.forget(oldest.program.fingerprint)
            _drop_sources(sources)

    def _describe_changes(self, call: Arguments) -> str:
        """Which leaves of the calls so far made new programs of them, and what to do."""
        alike = [planned for planned in self._used if planned.key[0] == call.treedef]
        changes, advice = [], dict[str, None]()
        for i, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
            seen = [*dict.fromkeys(planned.describe_leaf(i) for planned in alike)]
            if len(seen) > 1:
                shown = seen if len(seen) < 4 else [*seen[:2], "...", seen[-1]]
                changes.append(f"{name} was {', '.join(shown)}")
                advice[_PAD if isinstance(leaf, torch.Tensor) else _AS_TENSOR] = None
        if len(alike) < len(self._used):
            changes.append("the tree of the arguments changed")
        more = f"; and {len(changes) - 4} more" if len(changes) > 4 else ""
        return (
            f"The step has planned {self._count} programs, as its arguments change:"
            f" {'; '.join(changes[:4])}{more}."
            f" Each costs as much as a first call. {' '.join(advice)}".rstrip()
            + f" The step keeps the {self._options.programs} programs used last"
            f" (programs={self._options.programs})."
        )

    def _plan(self, call: Arguments, record: Calls) -> _Planned:
        """A program for these arguments; on processes all ranks make it together, or all fail."""
        number = record.next()
        try:
            check_values(call, self.mesh)
            specs = self._checked_specs(call)
            shapes = self._estimated_shapes(call, specs)
            held = json.dumps(
                [describe_held(leaf, spec) for leaf, spec in zip(call.leaves, specs, strict=True)]
            )
        except Exception as e:
            record.agree(number, e)
            raise
        if self.mesh.kind == "process":
            versions = f"ftp {__version__}, torch {torch.__version__}"
            tree = without_addresses(str(call.treedef))
            environment = f"FTP_SHM={int(is_asked_for())}"
            facets = {
                "library version": versions,
                "environment": environment,
                "argument tree": tree,
            }
            record.agree(number, {**facets, "specs": str(specs)})
            everyone = [json.loads(text) for text in record.exchange("arguments", held)]
            loaded = {i for i, position in enumerate(call.positions) if position not in self._state}
            shapes = agreed_shapes(everyone, specs, call.names, self.mesh, loaded)
        try:
            planned = self._build(call, specs, shapes)
            agreed = {
                "rules found by trial": found_by_trial(planned.program.plan.graph),
                "program": planned.program.fingerprint,
            }
        except Exception as e:
            record.agree(number, e)
            raise
        try:
            record.agree(number, agreed)
        except MismatchError as e:
            if "disagree on the program" in str(
                e
            ):  # on every rank, so all of them come to say where it first differs
                record.agree(number, {"program": planned.program.description.replace("\n", "; ")})
            raise
        return planned

    def _estimated_shapes(
        self, call: Arguments, specs: Sequence[PartitionSpec]
    ) -> list[Shape | None]:
        return [
            global_shape(leaf, spec, self.mesh)
            for leaf, spec in zip(call.leaves, specs, strict=True)
        ]

    def _checked_specs(self, call: Arguments) -> list[PartitionSpec]:
        """A spec per leaf of the arguments; everything that can be wrong with either is found
        here.
        """
        check_static(call)
        check_signature(
            self._fn,
            call.args,
            f"the step, ({', '.join(map(self._argument_name, range(len(call.args))))})",
        )
        if self._options.donate:
            check_donated_once(call, self._options.donate)
        specs = self._in_specs(call.args)
        check_alive(call.leaves, call.names)
        check_placed(call.leaves, specs, call.names, self.mesh)
        leaves = [
            abstract(leaf, shape)
            for leaf, shape in zip(call.leaves, self._estimated_shapes(call, specs), strict=True)
        ]
        check_specs(specs, leaves, call.names, self.mesh.axes)
        return specs

    def _traced(self, call: Arguments, shapes: Sequence[Shape | None]) -> Traced:
        leaves = [abstract(leaf, shape) for leaf, shape in zip(call.leaves, shapes, strict=True)]
        with _tracing, use_mesh(self.mesh):
            try:
                return trace(
                    self._fn, leaves, call.treedef, self.mesh.device_type, names=call.names
                )
            except (AttributeError, TypeError) as e:
                if (names := nones(call)) and "NoneType" in str(e):
                    line = raised_line(e)
                    raise InputError(
                        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} None, which"
                        " the function uses as something else"
                        f"{f' at {line}' if line else ''}: {e}. Give a tensor, or let the function"
                        " ask whether it is None."
                    ) from e
                raise

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
        tensor_leaves = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        out_specs = self._checked_out_specs(traced, specs, call.args)
        trees = _returned_trees(call.treedef, shapes, specs, traced, out_specs)
        given = {
            position: [
                spec for spec, at in zip(specs, call.positions, strict=True) if at == position
            ]
            for position in trees
        }
        out_specs = _as_given(out_specs, trees, given, traced)
        state, strict = self._state | trees.keys(), self._options.strict
        is_state = [call.positions[i] in state for i in tensor_leaves]
        prepared = prepare(
            traced.gm, [call.names[i] for i in tensor_leaves], is_state, strict=strict
        )
        _check_constraints(prepared.constraints, self.mesh)
        _check_local_meshes(prepared.graph, self.mesh)
        plan = plan_prepared(
            prepared,
            self.mesh.axes,
            [specs[i] for i in tensor_leaves],
            out_specs,
            data_axes=self._options.data_axes,
            reshard_after_forward=self._options.reshard_after_forward,
            strict=strict,
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
            tuple(
                at
                for at, i in enumerate(tensor_leaves)
                if call.positions[i] in self._options.donate
            ),
            self._options.prefetch,
            self._options.chunks,
            self._options.cuda_graph,
            self._options.async_tp,
        )
        if self._options.strict:
            check_strictly(program)
        if self._options.certify:
            certified(program)
        placements = tuple(
            placement(self.mesh, spec, shape)
            for spec, shape in zip(program.out_specs, program.out_shapes, strict=True)
        )
        donated = {
            node.name
            for node, i in zip(prepared.arguments, tensor_leaves, strict=True)
            if call.positions[i] in self._options.donate
        }
        facts = {
            position: Donated(self._argument_name(position)) for position in self._options.donate
        }
        marks = tuple(
            (i, facts[call.positions[i]]) for i in tensor_leaves if call.positions[i] in facts
        )
        return _Planned(
            program,
            call.key,
            tuple(shapes),
            placements,
            _renewed(plan.graph, donated),
            marks,
            places_of(self._fn, traced.captured),
        )

    def _checked_out_specs(
        self, traced: Traced, specs: Sequence[PartitionSpec], args: tuple[Any, ...]
    ) -> list[PartitionSpec | None]:
        """A spec per output of the graph, or None where propagation is to choose."""
        result = traced.out_tree.unflatten(traced.out_leaves)
        found: list[PartitionSpec | None] = [None] * len(traced.out_shapes)
        failures = []
        leaf_specs = self._out_specs(result, specs, args)
        for leaf, static, spec, name in zip(
            traced.out_leaves,
            traced.is_static,
            leaf_specs,
            leaf_names(result, "the result"),
            strict=True,
        ):
            if not static:
                found[leaf] = spec
                failures += (
                    check_spec(spec, traced.out_shapes[leaf], self.mesh.axes, name) if spec else []
                )
            elif spec:
                failures.append(
                    f"{name} has spec {spec}, but is {leaf!r}, {kind_of(leaf)}; only a tensor can"
                    " be cut. Give P()."
                )
        if failures:
            raise SpecError(join_failures(failures))
        return found


def _drop_sources(numbers: range) -> None:
    """Drops what torch keeps of a program that is gone: texts of its modules, for tracebacks,
    and ops on its shapes.
    """
    if len(FakeTensorMode.cache) > _MOST_FAKE:
        FakeTensorMode.cache_clear()
    for number in numbers:
        key = f"<eval_with_key>.{number}"
        graph_module._loader.eval_cache.pop(key, None)
        linecache.cache.pop(key, None)


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
            f"{where} speaks of mesh axis {axis!r}, but the mesh is {mesh}. Give axes= names of"
            " its axes."
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
                f"ftp.local at {node.source} is given a mesh ({given}), but runs in a step on"
                f" {mesh}. Give it the same mesh, or none."
            ] = None
    if failures:
        raise MeshError(join_failures(failures))


def _returned_trees(
    tree: optree.PyTreeSpec,
    shapes: Sequence[Shape | None],
    specs: Sequence[PartitionSpec],
    traced: Traced,
    out_specs: Sequence[PartitionSpec | None],
) -> dict[int, list[list[int]]]:
    """Arguments that come back in the result, with the same tree and shapes, and specs where given:
    an optimizer's state, say.

    Returns:
        Per position of such an argument, for each tree of the result that is like it, the indices
        of the tree's leaves in the result.
    """
    returned = [
        (None, None) if static else (traced.out_shapes[leaf], out_specs[leaf])
        for leaf, static in zip(traced.out_leaves, traced.is_static, strict=True)
    ]
    subtrees = [flatten(sub) for sub in _subtrees(traced.out_tree.unflatten(range(len(returned))))]
    found: dict[int, list[list[int]]] = {}
    start = 0
    for position, child in enumerate(tree.children()):
        end = start + child.num_leaves
        given = list(zip(shapes[start:end], specs[start:end], strict=True))
        alike = [
            indices
            for indices, other in subtrees
            if other == child
            and all(
                shape == returned[i][0] and returned[i][1] in (spec, None)
                for (shape, spec), i in zip(given, indices, strict=True)
            )
        ]
        if not child.is_leaf() and given and alike:
            found[position] = alike
        start = end
    return found


def _as_given(
    out_specs: Sequence[PartitionSpec | None],
    trees: Mapping[int, Sequence[Sequence[int]]],
    given: Mapping[int, Sequence[PartitionSpec]],
    traced: Traced,
) -> list[PartitionSpec | None]:
    """``out_specs``, with those of state ``given`` for the outputs that propagation might leave
    elsewhere, so that the next call takes it.

    Of several arguments that are alike the first comes back first; where it cannot be told which
    one is which, propagation chooses.
    """
    found = list(out_specs)
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for indices in sorted(
        {tuple(indices) for found in trees.values() for indices in found},
        key=lambda own: (own[0], -len(own)),
    ):
        alike.setdefault(
            tuple(p for p, found in trees.items() if list(indices) in found), []
        ).append(indices)
    for positions, subtrees in alike.items():
        specs = [given[position] for position in positions]
        if all(of == specs[0] for of in specs):
            specs = specs[:1] * len(subtrees)
        for indices, of in (
            zip(subtrees, specs, strict=False) if len(subtrees) == len(specs) else ()
        ):
            for i, spec in zip(indices, of, strict=True):
                if not traced.is_static[i] and found[leaf := traced.out_leaves[i]] is None:
                    found[leaf] = spec
    return found


def _subtrees(tree: Any) -> list[Any]:
    if tree is None or optree.tree_is_leaf(tree, none_is_leaf=False, namespace="ftp"):
        return []
    level = optree.tree_flatten_one_level(tree, none_is_leaf=False, namespace="ftp")
    return [tree, *(sub for child in level.children for sub in _subtrees(child))]


def _renewed(
    graph: Graph, donated: set[str]
) -> tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...]:
    """Outputs that are views of an argument or of another output are copied, as writing to one
    must not change the other.
    """
    found: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = []
    taken: set[Value] = set()
    for i, value in enumerate(graph.outputs):
        is_spread = False
        while value.node.operands and (
            value.node.kind in ("constrain", "move") or value.node.target in VIEWS
        ):
            is_spread |= value.node.target is torch.ops.aten.expand.default
            value = value.node.operands[0]
        if (
            value in taken
            or is_spread
            or (value.node.kind == "input" and value.node.name not in donated)
        ):
            found.append((i, torch.clone if not is_spread else _dense))
        elif value.node.kind == "input":
            found.append((i, torch.Tensor.detach))
        taken.add(value)
    return tuple(found)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
