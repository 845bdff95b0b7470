"""Step: a function sharded over a mesh, planned at its first call and run at every one."""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from ftp.api.arguments import (
    Arguments,
    check_captured_kept,
    check_donated_once,
    check_static,
    check_values,
    describe_keywords,
)
from ftp.api.build import build, reported_plan
from ftp.api.definition import (
    Definition,
    changed_from,
    checked_specs,
    estimated_shapes,
    taken_for_shards,
    traced_for,
)
from ftp.api.dynamic_programs import DynamicPrograms
from ftp.api.fast_path import Expected
from ftp.api.inputs import Inputs
from ftp.api.planned import Planned
from ftp.api.program_cache import ProgramCache, next_source
from ftp.api.replica_checks import check_captured, check_inputs
from ftp.api.steps_by_values import StepsByValues
from ftp.distributed.calls import Calls, calls
from ftp.errors import FtpError, InputError, MeshError, MismatchError
from ftp.paused_gc import collection_paused
from ftp.planning.known_passes import KnownPasses
from ftp.planning.machine import describe_hardware
from ftp.planning.plan import Plan
from ftp.runtime.program import Program
from ftp.runtime.shared_pages import is_asked_for
from ftp.sharding.launcher import host_name
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.global_shapes import agreed_shapes, describe_held, without_addresses
from ftp.tensors.placement import Returned, known_of, remember, returned
from ftp.tensors.replicas import check_samples
from ftp.torch_internals.autograd_state import below_autograd, forward_level, set_grad_enabled
from ftp.torch_internals.process_groups import load_python_kernels
from ftp.tracing.settings import is_cast, uncast
from ftp.tracing.trace import Traced
from ftp.turns import are_crowded, own_cores
from ftp.version import __version__

if TYPE_CHECKING:
    from ftp.api.families import ShapeCounts
    from ftp.planning.problem import Watch
    from ftp.report.lowered import Lowered


class Step:
    """A function sharded over a mesh; planned once for each distinct abstract input, as ``jit``
    does.

    It keeps the programs used last. Ranks make the same calls, so they keep and drop the same.

    >>> import ftp
    >>> step = ftp.spmd(lambda x: 2 * x, ftp.simulated_mesh((2,), ("dp",)), ftp.P("dp"))
    >>> isinstance(step, Step), step(torch.ones(2)), len(step.lower(torch.ones(2)).collectives)
    (True, tensor([2., 2.]), 0)
    """

    def __init__(self, definition: Definition, traced: Mapping[Any, Traced] | None = None):
        self._definition, self._options = definition, definition.options
        self._traced_before = dict(traced or {})  # by the key of the arguments
        self._dynamic = DynamicPrograms(definition.options.programs)
        self._cache = ProgramCache(definition.options.programs)
        self._last: tuple[Planned, Expected, Returned] | None = None
        self._reported: Mapping[str, Plan] = {}

    @property
    def mesh(self) -> Mesh:
        return self._definition.mesh

    def __copy__(self, memo: Any = None) -> "Step":
        return self  # as any function

    __deepcopy__ = __copy__

    def __getstate__(self) -> Any:
        raise TypeError(
            "A step cannot be pickled: its programs are of this process' mesh. Give a process that"
            " you start the function and the specs, and call ftp.shard or ftp.spmd there."
        )

    def __call__(self, *args: Any, **unexpected: Any) -> Any:
        if is_cast():
            with uncast():
                return Step.__call__(self, *args, **unexpected)
        record = self._record
        if self._last is not None and not unexpected:
            planned, expected, last = self._last
            if (leaves := expected.leaves(args, last)) is not None and not planned.is_stale:
                outputs = self._run(planned, leaves, record)
                last.facts = expected.afterwards
                self._last = planned, expected, returned(outputs, planned.placements, record.call)
                return self._result(planned, outputs, record, args)
        try:
            call = Arguments(args, self._definition.arguments)
            planned = self._look_up(call, unexpected)
            outgrown = planned if planned is not None and self._is_outgrown(planned) else None
            if outgrown is not None:
                self._drop(outgrown, record)
                planned = None
            if planned is not None:
                planned.check_unchanged(partial(self._traced, call, planned), stacklevel=2)
                _check_captured_kept(call, planned)
        except BaseException as e:
            # The other ranks may wait for this one: tell them.
            record.agree(record.next(), e)
            raise
        first_source = next_source()
        is_new = planned is None
        if planned is None:
            planned = self._cache.programs[call.key] = self._plan(call, record)
            if outgrown is not None:
                planned.compare(outgrown)
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
            self._cache.count(planned, first_source, call)
        before = self._last[2] if self._last is not None and self._last[0] is planned else None
        expected = Expected(call, facts, before, planned.placements, dict(planned.donated))
        for leaf, fact in planned.donated:
            remember(call.leaves[leaf], fact)
        made = returned(outputs, planned.placements, record.call)
        self._last = None if self._options.check_inputs else (planned, expected, made)
        return self._result(planned, outputs, record, args)

    def _result(
        self, planned: Planned, outputs: list[torch.Tensor], record: Calls, args: tuple[Any, ...]
    ) -> Any:
        """The function's result. If the program returns a value that the function reads, the result
        of the step that is traced with this value.
        """
        if planned.asked is None:
            return planned.result(outputs)
        return self._by_values.step_for(planned, outputs, record, args)(*args)

    @cached_property
    def _by_values(self) -> StepsByValues:
        return StepsByValues(replace(self._definition, finds_dynamic=False), Step)

    def _run(
        self,
        planned: Planned,
        inputs: Sequence[torch.Tensor],
        record: Calls,
        unchecked: Arguments | None = None,
    ) -> list[torch.Tensor]:
        program, is_grad_enabled, has_begun = planned.program, torch.is_grad_enabled(), False
        set_grad_enabled(False)  # torch.no_grad takes ten times as long
        try:
            with (
                record.running(
                    program.fingerprint,
                    program.describe_failure,
                    program.has_issued,
                    program.communicates,
                ),
                _without_autograd(program),
            ):
                if unchecked is not None:
                    check_inputs(unchecked, planned, self.mesh, record)
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
            set_grad_enabled(is_grad_enabled)
        return outputs

    @property
    def shapes(self) -> "ShapeCounts":
        """How many traces and plans serve many sizes of dims that change, and why sizes are planned
        one by one, if they are.
        """
        return self._dynamic.counts()

    def lower(self, *args: Any) -> "Lowered":
        """The program for these arguments (real, fake or meta), without running it or talking to
        other ranks.

        Raises:
            InputError, SpecError, PlacementError: arguments that a call would refuse.
            TraceError: a function that cannot be one graph. PlanningError: a finding of
            ``strict=True``.

        >>> import ftp, torch
        >>> step = ftp.spmd(torch.sum, ftp.AbstractMesh((2,), ("dp",)), ftp.P("dp"), ftp.P())
        >>> [c.op for c in step.lower(torch.empty(4, device="meta")).collectives]
        ['all_reduce']
        """
        return self.lower_traced(None, *args)

    @collection_paused()
    def lower_traced(
        self, traced: Traced | None, *args: Any, known: KnownPasses | None = None
    ) -> "Lowered":
        """``lower`` with a trace that was made already for such arguments.

        Args:
            known: results of passes over the trace, if programs for other specs share them.
        """
        from ftp.api.compiled_step import bound  # which is a Step
        from ftp.report.lowered import Lowered

        if is_cast():
            with uncast():
                return self.lower_traced(traced, *args, known=known)
        inputs = self._abstract(args)
        call, definition = inputs.call, self._definition
        taken = taken_for_shards(definition, call, inputs.shapes)
        if definition.dynamic is not None:
            definition.dynamic(call.args).values(inputs.shapes, call.names)
        try:
            trace = traced or traced_for(definition, inputs)
        except Exception as error:
            if taken is None or isinstance(error, FtpError):  # which has a reason of its own
                raise
            raise InputError(f"{taken}\n  With such shapes the trace failed: {error}") from error
        if taken is not None:
            warnings.warn(taken, stacklevel=4)
        if trace.asked is not None:
            last = self._by_values.last.get(trace.asked.given.level)
            if last is None:  # the error that names the line
                traced_for(replace(definition, reads=None), inputs)
            assert last is not None
            return last.lower_traced(None, *args)

        def lowered(
            changed: Mapping[int, PartitionSpec],
            watch: "Watch | None" = None,
            known: KnownPasses | None = None,  # of a search; reports do not keep it
        ) -> Lowered:
            specs = [changed.get(i, spec) for i, spec in enumerate(inputs.specs)]
            planned = self._build(replace(inputs, specs=specs, known=known), watch, trace)
            is_first = self.mesh.kind != "abstract" and call.key not in self._cache.programs
            if is_first and not (changed or watch or traced):
                self._reported = reported_plan(definition, inputs, trace, planned.program.plan)
            return Lowered(planned.program, lowered, bound(definition, call, planned))

        return lowered({}, known=known)

    def _abstract(self, args: tuple[Any, ...]) -> Inputs:
        """Arguments with their checked specs and global shapes, as far as this rank can tell."""
        call = Arguments(args, self._definition.arguments)
        specs = self._checked_specs(call)
        return Inputs(call, specs, estimated_shapes(call, specs, self.mesh))

    def _traced(self, call: Arguments, planned: Planned) -> Traced:
        specs = self._checked_specs(call)
        return traced_for(self._definition, Inputs(call, specs, planned.shapes))

    def _known(self, *args: Any) -> Planned:
        """The program of these arguments; planned now, without talking to other ranks, if it is
        new.
        """
        with uncast():
            inputs = self._abstract(args)
            return self._cache.programs.get(inputs.call.key) or self._build(inputs)

    @cached_property
    def _record(self) -> Calls:
        if self.mesh.kind == "abstract":
            raise MeshError(
                f"The mesh {self.mesh} is abstract: it plans programs and runs none. Read the"
                " program with step.lower(...), or make the step on ftp.make_mesh(...) or"
                " ftp.simulated_mesh(...)."
            )
        return calls(self.mesh)

    def _look_up(self, call: Arguments, unexpected: dict[str, Any]) -> Planned | None:
        definition, cache = self._definition, self._cache
        if unexpected:
            raise InputError(
                describe_keywords(definition.fn, definition.arguments, len(call.args), unexpected)
            )
        if self._options.donate:
            check_donated_once(call, self._options.donate)
        try:
            known = cache.programs.get(call.key)
        except TypeError:
            check_static(call)
            raise
        if known is None:
            dynamic = self._dynamic.known(definition, call)
            if dynamic is not None:
                known = self._dynamic.at_new_size(call, dynamic, self.mesh)
            if known is None:
                known = cache.alike(call, self.mesh)
            if known is not None:
                cache.programs[call.key] = known
        return known

    def _use(self, planned: Planned, record: Calls) -> None:
        self._dynamic.use(planned)
        if (dropped := self._cache.use(planned)) is not None:
            record.forget(dropped.program.fingerprint)

    def _is_outgrown(self, planned: Planned) -> bool:
        """Whether to plan anew with a table that a later trace has put in another's place. Not on
        several processes: ``lower`` may have traced on one rank alone.
        """
        is_shared = self.mesh.kind == "process" and self.mesh.size() > 1
        return not is_shared and planned.is_outgrown

    def _drop(self, planned: Planned, record: Calls) -> None:
        """Forget a program of a table that a later trace has replaced, and families of such."""
        self._dynamic.drop_outgrown()
        self._cache.drop(planned)
        record.forget(planned.program.fingerprint)

    def _plan(self, call: Arguments, record: Calls) -> Planned:
        """A program for these arguments; on processes all ranks plan it together, or all fail."""
        number = record.next()
        try:
            check_values(call, self.mesh)
            specs = self._checked_specs(call)
            shapes = estimated_shapes(call, specs, self.mesh)
            is_shared = self.mesh.kind == "process" and self.mesh.size() > 1
            leaves = [
                describe_held(leaf, spec, self.mesh if is_shared else None)
                for leaf, spec in zip(call.leaves, specs, strict=True)
            ]
            held = json.dumps([*leaves, host_name()])
        except BaseException as e:
            record.agree(number, e)
            raise
        if self.mesh.kind == "process":
            facets = {
                "library version": f"ftp {__version__}, torch {torch.__version__}",
                "environment": f"FTP_SHM={int(is_asked_for())}",
                "argument tree": without_addresses(str(call.treedef)),
                "hardware": describe_hardware(self._definition.hardware_on(())),
                "specs": str(specs),
            }
            last = next(reversed(self._cache.used), None)
            record.agree(number, facets, about=changed_from(call, shapes, last and last.key))
            # The cores stand apart: those of ranks that are bound differ, and no other text does.
            sent = record.exchange("arguments", "\n".join((held, json.dumps(own_cores()))))
            texts, cores = zip(*(text.split("\n") for text in sent), strict=True)
            read = {text: json.loads(text) for text in dict.fromkeys(texts)}  # most are equal
            everyone = [read[text] for text in texts]
            hosts = tuple(host for *_, host in everyone)
            hosts = hosts if len(set(hosts)) > 1 else ()
            is_crowded = not hosts and are_crowded([tuple(json.loads(text)) for text in cores])
            mesh = replace(self.mesh, hosts=hosts, is_crowded=is_crowded)
            self._definition = replace(self._definition, mesh=mesh)
            loaded = {i for i, at in enumerate(call.positions) if at not in self._definition.state}
            shapes = agreed_shapes(everyone, specs, call.names, self.mesh, loaded)
            check_samples(everyone, specs, call.names, self.mesh, f" at call {number}")
        # On one host the plan goes through a file.
        handed_out = record.hand_out() if self.mesh.hosts else None
        try:
            try:
                traced = self._traced_before.pop(call.key, None)
                inputs = Inputs(call, specs, shapes, handed_out, traced, reported=self._reported)
                planned = self._built(inputs)
                self._reported = {}
                _check_captured_kept(call, planned)
            finally:
                if handed_out is not None:
                    handed_out.give(b"")  # in case this rank has given no plan
            agreed = {
                "rules found by trial": planned.program.trial_rules,
                "program": planned.program.fingerprint,
            }
        except BaseException as e:
            record.agree(number, e)
            raise
        try:
            record.agree(number, agreed)
            if handed_out is not None:
                handed_out.forget()
        except MismatchError as e:
            # Every rank gets here, and all report where the program first differs.
            if e.facet == "program":
                record.agree(number, {"program": planned.program.description.replace("\n", "; ")})
            raise
        if is_shared:
            check_captured(planned, self.mesh, record, f" at call {number}")
        return planned

    def _checked_specs(self, call: Arguments) -> list[PartitionSpec]:
        """A spec per leaf of the arguments, both checked."""
        return checked_specs(self._definition, call)

    def _built(self, inputs: Inputs) -> Planned:
        """``_build``; for many sizes at once where dims are dynamic and it is possible."""
        definition = self._definition
        dynamic = self._dynamic.found(definition, inputs)
        if dynamic is None or not dynamic.ranges:
            return self._build(inputs)
        return self._dynamic.build(definition, inputs, dynamic, self._build)

    def _build(
        self, inputs: Inputs, watch: "Watch | None" = None, traced: Traced | None = None
    ) -> Planned:
        """See `build`; subclasses build their kind of program here."""
        return build(self._definition, inputs, watch, traced)


def _check_captured_kept(call: Arguments, planned: Planned) -> None:
    if planned.donated and isinstance(planned.program, Program):
        donated = [i for i, _ in planned.donated]
        check_captured_kept(call, donated, planned.program.constants)


def _without_autograd(program: Program) -> AbstractContextManager[Any]:
    """Torch's autograd of collectives is Python code: 7 of the 19 µs of a small one. Tangents of
    inputs are not lost.
    """
    if forward_level() < 0 and program.runs_without_autograd:
        return below_autograd()
    load_python_kernels()
    return nullcontext()
