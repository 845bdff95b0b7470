"""Make programs that serve many sizes: find the family of a call, trace and plan for all of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from ftp.api import families
from ftp.api.arguments import Arguments
from ftp.api.build import Planning, planned_of
from ftp.api.definition import Definition, specs_of_results, traced_for
from ftp.api.dynamic_shapes import Dynamic, SeenShapes
from ftp.api.families import Family, FamilyPlan, FamilyTrace, ShapeCounts
from ftp.api.graph_checks import check_certified, check_programs
from ftp.api.inputs import Inputs
from ftp.api.numbers_read import MOST_PLANS, AlikeSizes, NumbersRead
from ftp.api.planned import Planned
from ftp.distributed.calls import exchange
from ftp.dynamic_int import IsOne, Sizes, in_multiples
from ftp.errors import CertificateError
from ftp.paused_gc import collection_paused
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.placement import placement
from ftp.tracing.alike import Alike


class DynamicPrograms:
    """The families of programs of a step with dynamic sizes.

    Args:
        limit: the number of families that are kept: those whose programs were used last.

    Attributes:
        families: by the key of a call without its dynamic sizes.
    """

    def __init__(self, limit: int):
        self.families: dict[tuple[object, ...], Family] = {}
        self._seen, self._limit = SeenShapes(limit), limit
        self._used: dict[int, Family] = {}  # by id, the latest at the end
        self._key_of = WeakKeyDictionary[Planned, tuple[object, ...]]()

    def known(self, definition: Definition, call: Arguments) -> Dynamic | None:
        """The dims that change size, as far as known before the call; None if no dim does."""
        if definition.dynamic is not None:
            return definition.dynamic(call.args)
        return self._seen.known(call)

    def found(self, definition: Definition, inputs: Inputs) -> Dynamic | None:
        """The dims that change size, with this call counted; None if no dim does."""
        if definition.dynamic is not None:
            return definition.dynamic(inputs.call.args)
        if not definition.finds_dynamic:
            return None
        return self._seen.add(inputs.call, inputs.shapes)

    def counts(self) -> ShapeCounts:
        return families.counts({id(f): f for f in self.families.values()}.values())

    def use(self, planned: Planned) -> None:
        """Mark the family of a program as used. Drops the least recently used one where there are
        too many.
        """
        family = self.families.get(self._key_of.get(planned, ()))
        if family is None:
            return
        self._used[id(family)] = self._used.pop(id(family), family)
        if len(self._used) > self._limit:
            del self._used[next(iter(self._used))]
            self.families = {key: f for key, f in self.families.items() if id(f) in self._used}

    def at_new_size(self, call: Arguments, dynamic: Dynamic, mesh: Mesh) -> Planned | None:
        """The program for these arguments by a plan that was made at another size; None if there is
        none.
        """
        family = self._family(call, dynamic, mesh)
        if family is None or not family.traces:
            return None
        sized = families.sizes_of(call.leaves, dynamic, family, mesh)
        if sized is None or (dynamic.is_seen and not dynamic.fits(sized)):
            return None
        values = dynamic.values(sized, call.names)
        plan = family.find(values)
        if plan is None:
            return None
        planned, refused = None, ""
        try:
            planned = _at_size(plan, call, values, mesh)
        except CertificateError as error:
            refused = str(error)
        if plan.planned.program.options.certify:
            # Ranks may have made the graphs of these sizes at other sizes: they decide together.
            refused = next(filter(None, exchange(mesh, "certificate", refused)), "")
        if planned is None or refused:  # `build` plans these sizes alone
            say = partial(families.warn_of_refused, dynamic) if family.why_not else family.give_up
            say(CertificateError(refused))
            return None
        self._key_of[planned] = _key(call, dynamic)
        return planned

    def _family(self, call: Arguments, dynamic: Dynamic, mesh: Mesh) -> Family | None:
        """The family of this call: programs of calls that differ from it only in dynamic sizes."""
        key = _key(call, dynamic)
        if key not in self.families:
            known = self.families.values()
            like = next((f for f in known if families.is_like(f, call, dynamic, mesh)), None)
            if like is not None:
                self.families[key] = like
        return self.families.get(key)

    def build(
        self,
        definition: Definition,
        inputs: Inputs,
        dynamic: Dynamic,
        build: Callable[[Inputs], Planned],
    ) -> Planned:
        """The program for these inputs: one that serves many sizes where possible, else the program
        of these sizes, by ``build``.
        """
        key = _key(inputs.call, dynamic)
        family = self._family(inputs.call, dynamic, definition.mesh)
        if family is None:
            family = self.families[key] = Family(dynamic)
        planned = _built(family, definition, inputs, dynamic, build)
        self._key_of[planned] = key
        return planned


def _built(
    family: Family,
    definition: Definition,
    inputs: Inputs,
    dynamic: Dynamic,
    build: Callable[[Inputs], Planned],
) -> Planned:
    call = inputs.call
    values = dynamic.values(inputs.shapes, call.names)
    if not family.why_not:
        try:
            if (plan := family.find(values)) is not None:
                return _at_size(plan, call, values, definition.mesh)
            trace = family.trace_for(values)
            if trace is None:
                trace = _traced(family, definition, inputs, values)
            if trace is None:
                return build(inputs)
            return _planned(trace, definition, inputs, dynamic, values)
        except Exception as error:
            made = build(inputs)  # an error of the function is one here too
            family.give_up(error)
            return made
    if definition.options.explicit:
        return build(inputs)
    return _with_numbers_read(family.numbers_read, definition, inputs, dynamic, values, build)


def _with_numbers_read(
    read: NumbersRead,
    definition: Definition,
    inputs: Inputs,
    dynamic: Dynamic,
    values: tuple[int, ...],
    build: Callable[[Inputs], Planned],
) -> Planned:
    """The program of a function that reads sizes as numbers: recorded at these sizes, and planned
    with other sizes whose recordings are alike.
    """
    traced = traced_for(definition, inputs, keeps_recording=True)
    found = traced.recording and read.find(values, traced.recording, dynamic)
    if found:
        group, values = found
        try:
            planned = _like_others(group, definition, inputs, values)
        except Exception as error:  # as of a rule that does not compute with formulas
            group.is_closed, planned = True, None
            if isinstance(error, CertificateError):
                families.warn_of_refused(dynamic, error)
        if planned is not None:
            return planned
    return build(replace(inputs, traced=traced))


def _like_others(
    group: AlikeSizes, definition: Definition, inputs: Inputs, values: tuple[int, ...]
) -> Planned | None:
    """The program of a group for these sizes and numbers; None where it makes no more programs."""
    trace = group.trace_for(values)
    plan = trace and trace.plan_for(values)
    if plan is not None:
        return _at_size(plan, inputs.call, values, definition.mesh)
    if group.is_closed:
        return None
    if trace is None:
        if len(group.traces) == families.MOST_TRACES:
            return None
        trace = _traced_at(group.dynamic, definition, inputs, values, group.alike)
        group.traces.append(trace)
    if len(trace.plans) == MOST_PLANS:
        return None
    return _planned(trace, definition, inputs, group.dynamic, values)


def _key(call: Arguments, dynamic: Dynamic) -> tuple[object, ...]:
    names = ((leaf, *dims.items()) for leaf, dims in dynamic.dims.items())
    return (*names, *call.key_without(dynamic.dims))


def _at_size(plan: FamilyPlan, call: Arguments, values: tuple[int, ...], mesh: Mesh) -> Planned:
    program, like = plan.program(values), plan.planned
    if program.options.certify:
        check_certified(program)
    outputs = (program.out_specs, program.out_shapes, plan.ranks.is_dynamic, like.placements)
    placements = tuple(
        placement(mesh, spec, shape) if is_dynamic else known
        for spec, shape, is_dynamic, known in zip(*outputs, strict=True)
    )
    shapes = tuple(families.shapes_at(plan.dynamic, like.shapes, values))
    return replace(like, program=program, key=call.key, shapes=shapes, placements=placements)


@collection_paused()
def _traced(
    family: Family, definition: Definition, inputs: Inputs, values: tuple[int, ...]
) -> FamilyTrace | None:
    """Trace for many sizes: if the function's code compares sizes, for those with the same results
    of the comparisons. None if a size is one and the function treats one differently.
    """
    for at in families.sizes_to_trace(family, inputs.shapes, values, definition.mesh.size()):
        try:
            trace = _traced_at(family.dynamic, definition, inputs, at)
        except IsOne:  # these sizes have a program of their own
            continue
        family.add(trace)
        if trace.sizes.conditions.holds(values):
            return trace
    return None


def _traced_at(
    dynamic: Dynamic,
    definition: Definition,
    inputs: Inputs,
    values: tuple[int, ...],
    replayed: Alike | None = None,
) -> FamilyTrace:
    """The trace for many sizes, such as ``values``: for multiples, if per-rank code asks."""

    def made(sizes: Sizes) -> FamilyTrace:
        formulas = families.shapes_with(dynamic, inputs.shapes, sizes)
        traced = traced_for(definition, inputs, formulas=formulas, sizes=sizes, replayed=replayed)
        return FamilyTrace(traced, sizes)

    return in_multiples(partial(families.sizes_for, dynamic, values), made)


@collection_paused()
def _planned(
    trace: FamilyTrace,
    definition: Definition,
    inputs: Inputs,
    dynamic: Dynamic,
    values: tuple[int, ...],
) -> Planned:
    traced = trace.traced
    formulas = families.shapes_with(dynamic, inputs.shapes, trace.sizes)
    out_specs, returned = specs_of_results(definition, replace(inputs, shapes=formulas), traced)
    planning = Planning(definition, inputs, out_specs, returned)
    assert traced.symbolic is not None
    number = traced.symbolic.dynamic

    def program(sizes: Sizes) -> Program:
        return planning.program(traced, planning.plan(traced.gm, sizes=sizes, number=number))

    made = FamilyPlan.of(dynamic, values, traced, program)
    sized = made.program(values)
    if definition.options.explicit:
        _check_explicit(sized, out_specs)
    check_programs([sized], definition.options)
    sized.make_graph()
    made.planned = planned_of(definition, inputs, traced, sized)
    trace.plans.append(made)
    return made.planned


def _check_explicit(program: Program, out_specs: Sequence[PartitionSpec | None]) -> None:
    """Leave collectives that no line asks for to the program of one size, whose error names them.

    Raises:
        NotDynamic: the plan has some.
    """
    from ftp.explicit.asked import unasked

    if unasked(program.plan, out_specs):
        raise families.NotDynamic("explicit=True finds collectives that no line asks for.")
