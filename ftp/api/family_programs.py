"""Make programs that serve many sizes: trace and plan for all of a family."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ftp.api import families
from ftp.api.arguments import Arguments
from ftp.api.build import Planning, planned_of
from ftp.api.definition import Definition, specs_of_results, traced_for
from ftp.api.dynamic_shapes import Dynamic
from ftp.api.families import Family, FamilyPlan, FamilyTrace
from ftp.api.graph_checks import check_certified, check_programs
from ftp.api.inputs import Inputs
from ftp.api.numbers_read import MOST_PLANS, AlikeSizes, NumbersRead
from ftp.api.planned import Planned
from ftp.dynamic_int import IsOne, Sizes, in_multiples
from ftp.errors import CertificateError
from ftp.paused_gc import collection_paused
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.placement import placement
from ftp.tracing.alike import Alike, RecordedOps
from ftp.tracing.symbolic_builtins import AsksNumber, NumbersMade


def built(
    family: Family,
    definition: Definition,
    inputs: Inputs,
    dynamic: Dynamic,
    build: Callable[[Inputs], Planned],
) -> Planned:
    """The program for these inputs: one of the family, or of another one where sizes are read as
    numbers; else the program of these sizes, by ``build``.
    """
    call = inputs.call
    values = dynamic.values(inputs.shapes, call.names)
    if family.makes_traces():
        try:
            if (plan := family.find(values)) is not None:
                family.served += 1
                return at_size(plan, call, values, definition.mesh)
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
    with other sizes whose recordings are alike. Of a recording that a plan serves no more is made.
    """
    found: tuple[AlikeSizes, tuple[int, ...]] | None = None

    def is_served(recording: RecordedOps) -> bool:
        nonlocal found
        found = read.known(values, recording)
        return found is not None and found[0].plan_for(found[1]) is not None

    traced = traced_for(definition, inputs, recognises=is_served)
    if not traced.is_recognised:
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
    return build(inputs if traced.is_recognised else replace(inputs, traced=traced))


def _like_others(
    group: AlikeSizes, definition: Definition, inputs: Inputs, values: tuple[int, ...]
) -> Planned | None:
    """The program of a group for these sizes and numbers; None where it makes no more programs."""
    trace = group.trace_for(values)
    plan = trace and trace.plan_for(values)
    if plan is not None:
        return at_size(plan, inputs.call, values, definition.mesh)
    if group.is_closed:
        return None
    if trace is None:
        if len(group.traces) == families.MOST_TRACES:
            return None
        trace = _traced_at(group.dynamic, NumbersMade(), definition, inputs, values, group.alike)
        group.traces.append(trace)
    if len(trace.plans) == MOST_PLANS:
        return None
    return _planned(trace, definition, inputs, group.dynamic, values)


def at_size(plan: FamilyPlan, call: Arguments, values: tuple[int, ...], mesh: Mesh) -> Planned:
    """The program of a plan at these sizes."""
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
            trace = _traced_at(family.dynamic, family.numbers, definition, inputs, at)
        except IsOne:  # these sizes have a program of their own
            continue
        family.add(trace)
        if trace.sizes.conditions.holds(values):
            return trace
    return None


def _traced_at(
    dynamic: Dynamic,
    numbers: NumbersMade,
    definition: Definition,
    inputs: Inputs,
    values: tuple[int, ...],
    replayed: Alike | None = None,
) -> FamilyTrace:
    """The trace for many sizes, such as ``values``: for multiples, if per-rank code asks."""

    def made(sizes: Sizes) -> FamilyTrace:
        formulas = families.shapes_with(dynamic, inputs.shapes, sizes)
        with numbers.traced(definition.fn):
            traced = traced_for(
                definition, inputs, formulas=formulas, sizes=sizes, replayed=replayed
            )
        return FamilyTrace(traced, sizes)

    while True:
        with suppress(AsksNumber):
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
