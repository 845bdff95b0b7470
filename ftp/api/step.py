"""Step: a function sharded over a mesh, planned at its first call and run at every one.

Above 450 lines, as making a program and running one share the step's specs, options and record of
calls; what needs none of these is in ``arguments``, ``outputs``, ``graph_checks``, ``fast_path``.
"""

import json
import linecache
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

from ftp.api import families
from ftp.api.arguments import (
    Arguments,
    check_donated_once,
    check_signature,
    check_static,
    check_values,
    nones,
    takes_by_name,
)
from ftp.api.dynamic_shapes import Dynamic
from ftp.api.families import Family, FamilyPlan, FamilyTrace
from ftp.api.fast_path import Expected
from ftp.api.graph_checks import check_constraints, check_local_meshes, check_programs
from ftp.api.outputs import RENEWALS, returned_trees, with_given
from ftp.distributed.agreement import Calls, calls
from ftp.dynamic_int import Sizes
from ftp.errors import FtpError, InputError, MeshError, MismatchError, SpecError, join_failures
from ftp.explicit.check import check_explicit
from ftp.explicit.suggest import Probed, tagged
from ftp.paused_gc import collection_paused
from ftp.planning.cost import Hardware
from ftp.planning.machine import describe_hardware, hardware_on
from ftp.planning.plan import Plan
from ftp.planning.planner import Watch
from ftp.planning.prepare import plan_prepared, prepare
from ftp.program_files.kept import kept_or_planned, key_of
from ftp.report.lowered import Lowered
from ftp.runtime.options import Options
from ftp.runtime.program import Program
from ftp.runtime.shared_memory import is_asked_for
from ftp.runtime.stage_programs import ProgramOfPieces
from ftp.sharding.arguments import Shape
from ftp.sharding.launcher import host_name
from ftp.sharding.mesh import Mesh, use_mesh
from ftp.sharding.pytree import check_specs, flatten, kind_of, leaf_names
from ftp.sharding.spec import PartitionSpec, check_spec
from ftp.sharding.traced_arguments import arguments_with
from ftp.source import raised_line
from ftp.tensors.check_indices import check_indices
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
from ftp.tracing.calls import TorchCalls
from ftp.tracing.captured import Captured, places_of, warn_of_others
from ftp.tracing.trace import Traced, trace
from ftp.version import __version__

MANY = 10  # programs of one step, at which it warns of what changes from call to call
_PAD = "Pad tensors to one shape, or to a few (buckets)."
_AS_TENSOR = "Give numbers that change as tensors: torch.tensor(x)."
_MOST_FAKE = 10_000  # ops on shapes that torch remembers, a kilobyte each
_tracing = threading.RLock()  # torch.fx patches modules while it traces

InSpecs = Callable[[tuple[Any, ...]], list[PartitionSpec]]
OutSpecs = Callable[[Any, Sequence[PartitionSpec], tuple[Any, ...]], Sequence[PartitionSpec | None]]


@dataclass(frozen=True, eq=False)
class _Planned:
    """A program, the arguments it was made for, and what its calls have to do.

    Attributes:
        shapes: per leaf of the arguments its global shape.
        placements: per output of the graph, its layout.
        renewed: outputs that share memory with an argument or another output, and how each is
            copied.
        donated: leaves whose memory is reused, and the fact to record of them.
        captured: tensors that the function reads and that are no arguments, and where they are.
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
        """Whether a captured tensor has been replaced by another since the trace."""
        return any(place.now() is not place.tensor for place in self.captured)

    def describe_leaf(self, i: int) -> str:
        """A leaf of the arguments as it keys the program: dtype and global shape, or a value."""
        shape, (kind, known, *_) = self.shapes[i], self.key[1 + i]
        if shape is not None:
            return f"{str(known).removeprefix('torch.')}{list(shape)}"
        return known if kind in (float, complex) else repr(known)

    def result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The function's result, from the outputs of the graph."""
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
        dynamic: arguments to their dims that change size.

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
        dynamic: Callable[[tuple[Any, ...]], Dynamic] | None = None,
    ):
        self.mesh = mesh
        self._fn, self._in_specs, self._out_specs = fn, in_specs, out_specs
        self._arguments, self._state, self._options = tuple(arguments), frozenset(state), options
        self._dynamic = dynamic
        self._families: dict[tuple[Any, ...], Family] = {}
        self._programs: dict[tuple[Any, ...], _Planned] = {}
        # By last use, the latest at the end; each with the numbers of its modules' source texts,
        # which torch keeps.
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
            # Tell the other ranks, which may be about to wait for this one.
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
                if unchecked is not None:
                    program.check_assumptions(outputs, f" at call {record.next()}")
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

    @property
    def shapes(self) -> families.ShapeCounts:
        """With ``dynamic_shapes``: how many traces and plans serve all sizes of the calls so far,
        and why sizes are planned one by one, where they are.
        """
        return families.counts({id(f): f for f in self._families.values()}.values())

    def lower(self, *args: Any) -> Lowered:
        """The program for these arguments (real, fake or meta), without running it or talking to
        other ranks.
        """
        return self.lower_traced(None, *args)

    def lower_traced(self, traced: Traced | None, *args: Any) -> Lowered:
        """``lower``, of a function that has been traced already with such arguments."""
        call, specs, shapes = self._abstract(args)
        if self._dynamic is not None:
            self._dynamic(call.args).values(shapes, call.names)
        known = traced or self._traced(call, specs, shapes)

        def again(changed: Mapping[int, PartitionSpec], watch: Watch | None = None) -> Lowered:
            other = [changed.get(i, spec) for i, spec in enumerate(specs)]
            return self._lowered(call, self._build(call, other, shapes, watch, known), again)

        return self._lowered(call, self._build(call, specs, shapes, None, known), again)

    def _lowered(
        self, call: Arguments, planned: _Planned, again: Callable[..., Lowered] | None
    ) -> Lowered:
        from ftp.api.compiled_step import bound  # which is a Step

        return Lowered(planned.program, again, bound(self, call, planned))

    def _abstract(
        self, args: tuple[Any, ...]
    ) -> tuple[Arguments, list[PartitionSpec], list[Shape | None]]:
        """Arguments with their checked specs and global shapes, as far as this rank can tell."""
        call = Arguments(args, self._arguments)
        specs = self._checked_specs(call)
        return call, specs, self._estimated_shapes(call, specs)

    def _known(self, *args: Any) -> _Planned:
        """What is planned for these arguments; else made, without talking to other ranks."""
        call, specs, shapes = self._abstract(args)
        return self._programs.get(call.key) or self._build(call, specs, shapes)

    def _check_inputs(self, call: Arguments, program: Program, record: Calls) -> None:
        given, when = (
            [*(call.leaves[i] for i in program.tensor_leaves), *program.constants],
            f" at call {record.next()}",
        )
        named = [
            *(call.names[i] for i in program.tensor_leaves),
            *(f"closure constant {i}" for i in range(len(program.constants))),
        ]
        specs = [*program.in_specs, *([PartitionSpec()] * len(program.constants))]
        check_indices(given, specs, named, program.index_bounds, self.mesh, record, when)
        constants = [
            f"closure constant {i}, a tensor of shape {tuple(c.shape)},"
            for i, c in enumerate(program.constants)
        ]
        compare_copies(
            given,
            specs,
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
        """The error for keyword arguments after ``n`` positional ones."""
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
        if known is None and self._dynamic is not None:
            known = self._at_new_size(call, self._dynamic(call.args))
            if known is not None:
                self._programs[call.key] = known
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
        """Mark a program as used, and drop the least recently used one where there are too many."""
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
        """The warning that names the leaves which change between calls, and what to do."""
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
        """A program for these arguments; on processes all ranks plan it together, or all fail."""
        number = record.next()
        try:
            check_values(call, self.mesh)
            specs = self._checked_specs(call)
            shapes = self._estimated_shapes(call, specs)
            held = json.dumps(
                [
                    *map(describe_held, call.leaves, specs),
                    host_name(),
                ]
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
                "hardware": describe_hardware(self._hardware_on(())),
            }
            record.agree(number, {**facets, "specs": str(specs)})
            everyone = [json.loads(text) for text in record.exchange("arguments", held)]
            self.mesh = replace(self.mesh, hosts=_several(host for *_, host in everyone))
            loaded = {i for i, position in enumerate(call.positions) if position not in self._state}
            shapes = agreed_shapes(everyone, specs, call.names, self.mesh, loaded)
        try:
            planned = self._built(call, specs, shapes)
            agreed = {
                "rules found by trial": planned.program.trial_rules,
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

    def _at_new_size(self, call: Arguments, dynamic: Dynamic) -> _Planned | None:
        """The program for these arguments at a size that is new, where its plan is made."""
        family = self._family(call, dynamic)
        if family is None or family.why_not or not family.traces:
            return None
        sized = families.sizes_of(call.leaves, dynamic, family, self.mesh)
        if sized is None:
            return None
        values = dynamic.values(sized, call.names)
        plan = family.find(values)
        return None if plan is None else self._at_size(plan, call, values)

    def _family(self, call: Arguments, dynamic: Dynamic) -> Family | None:
        """The programs of calls that are like this one but for sizes."""
        key = call.key_without(dynamic.dims)
        if key not in self._families:
            for family in self._families.values():
                if families.is_like(family, call, dynamic, self.mesh):
                    self._families[key] = family
                    break
        return self._families.get(key)

    def _at_size(self, plan: FamilyPlan, call: Arguments, values: tuple[int, ...]) -> _Planned:
        program, like = plan.program(values), plan.planned
        placements = tuple(
            placement(self.mesh, spec, shape) if is_dynamic else known
            for spec, shape, is_dynamic, known in zip(
                program.out_specs,
                program.out_shapes,
                plan.ranks.is_dynamic,
                like.placements,
                strict=True,
            )
        )
        shapes = tuple(families.shapes_at(plan.dynamic, like.shapes, values))
        return replace(like, program=program, key=call.key, shapes=shapes, placements=placements)

    def _built(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
    ) -> _Planned:
        """``_build``, for many sizes where dims are dynamic and that can be."""
        dynamic = None if self._dynamic is None else self._dynamic(call.args)
        if dynamic is None or not dynamic.ranges:
            return self._build(call, specs, shapes)
        values = dynamic.values(shapes, call.names)
        family = self._family(call, dynamic)
        if family is None:
            family = self._families[call.key_without(dynamic.dims)] = Family(dynamic)
        if not family.why_not and (apart := families.option_apart(self._options)):
            family.give_up(f"{apart} asks for a program of each size.")
        if not family.why_not:
            try:
                trace = family.trace_for(values)
                if trace is None:
                    trace = self._traced_dynamic(family, call, specs, shapes, values)
                if trace is None:
                    return self._build(call, specs, shapes)
                return self._planned_dynamic(trace, dynamic, call, specs, shapes, values)
            except Exception as error:
                made = self._build(call, specs, shapes)  # an error of the function is one here too
                family.give_up(families.reason(error))
                return made
        return self._build(call, specs, shapes)

    @collection_paused()
    def _traced_dynamic(
        self,
        family: Family,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        values: tuple[int, ...],
    ) -> FamilyTrace | None:
        """Trace for all sizes; a function that asks for one, for those with the same answers. None
        where these are sizes of one, which the function takes apart.
        """
        for at in families.sizes_to_trace(family, shapes, values):
            sizes = families.sizes_for(family.dynamic, at)
            with_formulas = families.shapes_with(family.dynamic, shapes, sizes)
            trace = FamilyTrace(
                self._traced(call, specs, shapes, formulas=with_formulas, sizes=sizes), sizes
            )
            family.add(trace)
            if sizes.conditions.holds(values):
                return trace
        return None

    @collection_paused()
    def _planned_dynamic(
        self,
        trace: FamilyTrace,
        dynamic: Dynamic,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        values: tuple[int, ...],
    ) -> _Planned:
        traced = trace.traced
        formulas = families.shapes_with(dynamic, shapes, trace.sizes)
        out_specs, returned_state = self._specs_of_results(call, specs, formulas, traced)
        state = self._state.union(returned_state)
        tensors = tuple(i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor))

        facts = self._facts(call, specs, traced, tensors, state)
        assert traced.symbolic is not None
        number = traced.symbolic.dynamic

        def program(sizes: Sizes) -> Program:
            return Program(
                mesh=self.mesh,
                traced=traced.gm,
                plan=self._planned(call, specs, traced.gm, state, out_specs, None, sizes, number),
                out_tree=traced.out_tree,
                constants=traced.constants,
                **facts,
            )

        made = families.FamilyPlan.of(dynamic, values, program)
        sized = made.program(values)
        check_programs([sized], self._options)
        sized.make_graph()
        made.planned = self._callable(call, shapes, traced, sized)
        trace.plans.append(made)
        return made.planned

    def _estimated_shapes(
        self, call: Arguments, specs: Sequence[PartitionSpec]
    ) -> list[Shape | None]:
        return [
            global_shape(leaf, spec, self.mesh)
            for leaf, spec in zip(call.leaves, specs, strict=True)
        ]

    def _checked_specs(self, call: Arguments) -> list[PartitionSpec]:
        """A spec per leaf of the arguments, both checked."""
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
        check_specs(specs, leaves, call.names, self.mesh.axes, takes_sums=True)
        return specs

    def _traced(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        calls: TorchCalls | None = None,
        formulas: Sequence[Shape | None] | None = None,
        sizes: Sizes | None = None,
    ) -> Traced:
        if calls is None and self._options.explicit:
            calls = TorchCalls()
        leaves = [abstract(leaf, shape) for leaf, shape in zip(call.leaves, shapes, strict=True)]

        @wraps(self._fn)
        def fn(*args: Any) -> Any:
            with arguments_with(flatten(args)[0], specs):
                return self._fn(*args)

        with _tracing, use_mesh(self.mesh):
            try:
                return trace(
                    fn,
                    leaves,
                    call.treedef,
                    self.mesh.device_type,
                    names=call.names,
                    checked=self._options.check_inputs,
                    calls=calls,
                    shapes=formulas,
                    symbolic=None if sizes is None else families.symbolic_of(sizes),
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
        """Trace, plan and check one program for these arguments."""
        is_lowered = traced is not None  # and has a plan of its own, for reports
        traced = traced or self._traced(call, specs, shapes)
        out_specs, returned_state = self._specs_of_results(call, specs, shapes, traced)
        state = self._state.union(returned_state)
        tensors = tuple(i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor))
        facts = self._facts(call, specs, traced, tensors, state)

        def make() -> Program:
            made = Program(
                mesh=self.mesh,
                traced=traced.gm,
                plan=self._planned(call, specs, traced.gm, state, out_specs, watch),
                out_tree=traced.out_tree,
                constants=traced.constants,
                **facts,
            )
            if self._options.explicit:
                self._check_explicit(made, call, specs, shapes, state, out_specs)
            check_programs([made], self._options)
            return made

        program = make() if is_lowered else self._kept(call, traced, state, out_specs, facts, make)
        return self._callable(call, shapes, traced, program)

    def _specs_of_results(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        traced: Traced,
    ) -> tuple[list[PartitionSpec | None], Collection[int]]:
        """A spec per output, None where propagation is to choose; and the positions of arguments
        that come back.
        """
        out_specs = self._checked_out_specs(traced, specs, call.args)
        trees = returned_trees(call.treedef, shapes, specs, traced, out_specs)
        given = {
            position: [
                spec for spec, at in zip(specs, call.positions, strict=True) if at == position
            ]
            for position in trees
        }
        return list(with_given(out_specs, trees, given, traced)), trees.keys()

    def _planned(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        gm: fx.GraphModule,
        state: Collection[int],
        out_specs: Sequence[PartitionSpec | None],
        watch: Watch | None,
        sizes: Sizes | None = None,
        number: Callable[[Any], Any] | None = None,
    ) -> Plan:
        options = self._options
        tensors = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
        prepared = prepare(
            gm,
            [call.names[i] for i in tensors],
            [call.positions[i] in state for i in tensors],
            strict=options.strict,
            sizes=sizes,
            number=number,
        )
        check_constraints(prepared.constraints, self.mesh)
        check_local_meshes(prepared.graph, self.mesh)
        return plan_prepared(
            prepared,
            self.mesh.axes,
            [specs[i] for i in tensors],
            out_specs,
            data_axes=options.data_axes,
            reshard_after_forward=options.reshard_after_forward,
            strict=options.strict,
            hardware=self._hardware_on(self.mesh.hosts),
            watch=watch,
        )

    def _check_explicit(
        self,
        program: Program,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        shapes: Sequence[Shape | None],
        state: Collection[int],
        out_specs: Sequence[PartitionSpec | None],
    ) -> None:
        def plans(gm: fx.GraphModule) -> Plan:
            return self._planned(call, specs, gm, state, out_specs, None)

        def probed() -> Probed:
            noted = TorchCalls(probes=True)
            gm = tagged(self._traced(call, specs, shapes, noted).gm)
            names = [call.names[i] for i in program.tensor_leaves]
            return Probed(gm, noted, plans, out_specs, names)

        check_explicit(program, out_specs, probed)

    def _hardware_on(self, hosts: tuple[str, ...]) -> Hardware:
        """What programs are planned for where ranks are on these hosts."""
        return hardware_on(replace(self.mesh, hosts=hosts), self._options.hardware)

    def _kept(
        self,
        call: Arguments,
        traced: Traced,
        state: Collection[int],
        out_specs: Sequence[PartitionSpec | None],
        facts: dict[str, Any],
        make: Callable[[], Program],
    ) -> Program:
        """The program as another rank of the host, or an earlier start, has planned it."""
        tensors = facts["tensor_leaves"]
        names = [call.names[i] for i in tensors]
        is_state = [call.positions[i] in state for i in tensors]
        specs, options, hardware = facts["in_specs"], self._options, facts["hardware"]
        key = key_of(self.mesh, traced, names, is_state, specs, out_specs, options, hardware)
        return kept_or_planned(key, self.mesh, traced, facts, make)

    def _facts(
        self,
        call: Arguments,
        specs: Sequence[PartitionSpec],
        traced: Traced,
        tensors: tuple[int, ...],
        state: Collection[int],
    ) -> dict[str, Any]:
        """The attributes of a program that are known without its plan."""
        donate = self._options.donate
        return {
            "tensor_leaves": tensors,
            "in_specs": tuple(specs[i] for i in tensors),
            "out_leaves": traced.out_leaves,
            "is_static": traced.is_static,
            "assumptions": traced.assumptions,
            "leaf_specs": tuple(specs),
            "roles": tuple(_role(call.positions[i], state) for i in tensors),
            "donated": tuple(at for at, i in enumerate(tensors) if call.positions[i] in donate),
            "options": self._options,
            "hardware": self._hardware_on(self.mesh.hosts),
        }

    def _callable(
        self,
        call: Arguments,
        shapes: Sequence[Shape | None],
        traced: Traced,
        program: Program | ProgramOfPieces,
    ) -> _Planned:
        placements = tuple(
            placement(self.mesh, spec, shape)
            for spec, shape in zip(program.out_specs, program.out_shapes, strict=True)
        )
        facts = {
            position: Donated(self._argument_name(position)) for position in self._options.donate
        }
        marks = tuple(
            (i, facts[call.positions[i]])
            for i in program.tensor_leaves
            if call.positions[i] in facts
        )
        copied: Sequence[Any] = ()
        if isinstance(program, Program):
            copied = [(i, RENEWALS[name]) for i, name in program.renewed]
        return _Planned(
            program,  # type: ignore[arg-type]
            call.key,
            tuple(shapes),
            placements,
            tuple(copied),
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
                    check_spec(spec, traced.out_shapes[leaf], self.mesh.axes, name, takes_sums=True)
                    if spec
                    else []
                )
            elif spec:
                failures.append(
                    f"{name} has spec {spec}, but is {leaf!r}, {kind_of(leaf)}; only a tensor can"
                    " be cut. Give P()."
                )
        if failures:
            raise SpecError(join_failures(failures))
        results = sum(not static for static in traced.is_static)
        found[results:] = [PartitionSpec()] * (len(found) - results)  # whether assumptions hold
        return found


def _drop_sources(numbers: range) -> None:
    """Drop torch's caches for a dropped program: source texts of its modules, fake results of its
    ops.
    """
    if len(FakeTensorMode.cache) > _MOST_FAKE:
        FakeTensorMode.cache_clear()
    for number in numbers:
        key = f"<eval_with_key>.{number}"
        graph_module._loader.eval_cache.pop(key, None)
        linecache.cache.pop(key, None)


def _several(hosts: Iterable[str]) -> tuple[str, ...]:
    """The hosts of ranks; none where it is one."""
    found = tuple(hosts)
    return found if len(set(found)) > 1 else ()


def _role(position: int, state: Collection[int]) -> str:
    """The role of an argument's tensors, for reports."""
    if position not in state:
        return "batch"
    return "optimizer" if position else "parameters"
