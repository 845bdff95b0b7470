"""Build: trace, plan and check one program for a call's inputs. The only message it takes from
another rank is the first rank's plan.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from ftp.api.definition import Definition, specs_of_results, traced_for
from ftp.api.inputs import Inputs
from ftp.api.planned import Planned, planned_for
from ftp.dynamic_int import Sizes
from ftp.paused_gc import collection_paused
from ftp.planning.plan import Plan
from ftp.program_files.kept import is_storing, kept_or_planned, key_of
from ftp.runtime.program import Program
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.calls import TorchCalls
from ftp.tracing.captured import places_of, with_read
from ftp.tracing.input_values import asking_whole
from ftp.tracing.trace import Traced
from ftp.tracing.watched_values import WatchedValues
from ftp.turns import turn

if TYPE_CHECKING:  # what a rank whose plan is found does not need
    from ftp.planning.problem import Watch


@collection_paused()
def build(
    definition: Definition,
    inputs: Inputs,
    watch: "Watch | None" = None,
    traced: Traced | None = None,
) -> Planned:
    """Trace, plan and check one program.

    Args:
        watch: what the planner reports to.
        traced: the function's trace, if a report has made it already.
    """
    is_lowered = traced is not None
    with turn():
        traced = traced or inputs.traced or traced_for(definition, inputs)
        if traced.asked is not None and traced.asked.inputs:
            # In explicit mode no line asks for whole inputs.
            of_value = replace(traced, asked=replace(traced.asked, inputs=()))
            traced = of_value if definition.options.explicit else asking_whole(traced)
        planning = Planning(definition, inputs, *specs_of_results(definition, inputs, traced))
        stores = is_storing(definition.mesh) and not is_lowered
        key = _key(planning, traced) if stores or inputs.reported else ""

    def make() -> Program:
        from ftp.api.graph_checks import check_programs

        plan = inputs.reported.get(key) or planning.plan(traced.gm, watch)
        made = planning.program(traced, plan)
        if definition.options.explicit:
            _check_explicit(made, planning)
        check_programs([made], definition.options)
        return made

    program = kept_or_planned(
        key if stores else "",
        definition.mesh,
        traced,
        planning.facts(traced),
        make,
        inputs.handed_out,
    )
    return planned_of(definition, inputs, traced, program)


def planned_of(definition: Definition, inputs: Inputs, traced: Traced, program: Any) -> Planned:
    """The `Planned` of a program: the program, and what each of its calls has to do."""
    tensors = [*traced.captured, *(each.tensor for each in traced.read)]
    places = places_of(definition.fn, tensors)
    captured = with_read(places, traced.captured, traced.read)
    donated = {} if traced.asked else definition.donated_names
    watched = WatchedValues(definition.fn) if isinstance(program, Program) else None
    return planned_for(inputs, program, definition.mesh, donated, captured, traced.asked, watched)


def result_facts(inputs: Inputs, traced: Traced) -> dict[str, Any]:
    """The fields that programs of all kinds share: a call's leaves, and the tree of its result."""
    return {
        "tensor_leaves": inputs.tensors,
        "leaf_specs": tuple(inputs.specs),
        "out_tree": traced.out_tree,
        "out_leaves": traced.out_leaves,
        "is_static": traced.is_static,
        "assumptions": traced.assumptions,
    }


class Planning:
    """Plans a function for one call's inputs.

    Args:
        out_specs: a spec per output, None where propagation is to choose.
        returned: positions of arguments that the result returns; they are state.
    """

    def __init__(
        self,
        definition: Definition,
        inputs: Inputs,
        out_specs: Sequence[PartitionSpec | None],
        returned: Collection[int],
    ):
        self.definition, self.inputs, self.out_specs = definition, inputs, out_specs
        self._state = definition.state.union(returned)

    @property
    def is_state(self) -> list[bool]:
        """Whether each tensor is state rather than a batch."""
        return [position in self._state for position in self.inputs.tensor_positions]

    def plan(
        self,
        gm: fx.GraphModule,
        watch: "Watch | None" = None,
        sizes: Sizes | None = None,
        number: Callable[[Any], Any] | None = None,
    ) -> Plan:
        """The plan of a traced graph.

        Args:
            sizes, number: as of `prepare`, for a trace with dynamic sizes.
        """
        from ftp.api.graph_checks import check_prepared
        from ftp.planning.prepare import plan_prepared, prepare, prepared_once

        mesh, options = self.definition.mesh, self.definition.options
        names, is_state = self.inputs.tensor_names, self.is_state
        known = self.inputs.known if sizes is None else None
        if known is not None and not options.strict:
            prepared = prepared_once(known, gm, names, is_state)
        else:
            prepared = prepare(
                gm, names, is_state, strict=options.strict, sizes=sizes, number=number
            )
        check_prepared(prepared, mesh)
        return plan_prepared(
            prepared,
            mesh.axes,
            self.inputs.tensor_specs,
            self.out_specs,
            data_axes=options.data_axes,
            reshard_after_forward=options.reshard_after_forward,
            strict=options.strict,
            hardware=self.definition.hardware,
            watch=watch,
            known=known,
        )

    def program(self, traced: Traced, plan: Plan) -> Program:
        return Program(
            mesh=self.definition.mesh,
            traced=traced.gm,
            plan=plan,
            constants=traced.constants,
            **self.facts(traced),
        )

    def facts(self, traced: Traced) -> dict[str, Any]:
        """The attributes of a program that are known without its plan."""
        definition, positions = self.definition, self.inputs.tensor_positions
        donate = () if traced.asked else definition.options.donate
        return {
            **result_facts(self.inputs, traced),
            "in_specs": tuple(self.inputs.tensor_specs),
            "roles": tuple(_role(position, self._state) for position in positions),
            "donated": tuple(at for at, position in enumerate(positions) if position in donate),
            "options": definition.options,
            "hardware": definition.hardware,
        }


def _check_explicit(program: Program, planning: Planning) -> None:
    from ftp.explicit.check import check_explicit
    from ftp.explicit.suggest import Probed, tagged

    def probed() -> Probed:
        noted = TorchCalls(probes=True)
        gm = tagged(traced_for(planning.definition, planning.inputs, noted).gm)
        names = planning.inputs.tensor_names
        return Probed(gm, noted, planning.plan, planning.out_specs, names)

    check_explicit(program, planning.out_specs, probed)


def reported_plan(
    definition: Definition, inputs: Inputs, traced: Traced, plan: Plan
) -> dict[str, Plan]:
    """The plan of a report by its key, for the call that follows; {} if that needs its own."""
    planning = Planning(definition, inputs, *specs_of_results(definition, inputs, traced))
    key = _key(planning, traced)
    return {key: plan} if key else {}


def _key(planning: Planning, traced: Traced) -> str:
    """Of the plan, for ranks and starts that plan the same."""
    definition, inputs = planning.definition, planning.inputs
    return key_of(
        definition.mesh,
        traced,
        inputs.tensor_names,
        planning.is_state,
        tuple(inputs.tensor_specs),
        planning.out_specs,
        definition.options,
        definition.hardware,
    )


def _role(position: int, state: Collection[int]) -> str:
    """The role of an argument's tensors, for reports."""
    if position not in state:
        return "batch"
    return "optimizer" if position else "parameters"
