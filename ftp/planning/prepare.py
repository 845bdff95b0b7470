"""Traced program to plan, for steps, exported programs and the search."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from ftp.dataclass import dataclass
from ftp.dynamic_int import Sizes, moved
from ftp.ops.constrain import Pin
from ftp.planning.cost import DEFAULT, Hardware
from ftp.planning.from_fx import constraints, decompose, from_fx, prune
from ftp.planning.graph import BATCH, PARAMETER, Graph, Node
from ftp.planning.graph_passes import live, mark_dependencies, merge_common
from ftp.planning.known_passes import KnownPasses
from ftp.planning.plan import FixedLayouts, Plan
from ftp.planning.planner import make_plan
from ftp.planning.problem import Watch
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.data_dependent.branches import unmark_cut


@dataclass(frozen=True)
class Prepared:
    """A traced program, ready to be planned.

    Attributes:
        graph: with rules on all ops, without dead code, with common subexpressions merged and
            dependencies marked.
        arguments: the input nodes of the arguments' tensors; inputs after them are closure
            constants.
        constraints: the pin of each constraint node.
        sizes: the dynamic sizes, if any.
    """

    graph: Graph
    arguments: tuple[Node, ...]
    constraints: dict[Node, Pin]
    sizes: Sizes | None = None

    @property
    def batch(self) -> list[Node]:
        """The arguments that are not state."""
        return [node for node in self.arguments if node.depends & BATCH]


def prepare(
    gm: fx.GraphModule,
    names: Sequence[str],
    is_state: Sequence[bool],
    *,
    strict: bool = False,
    sizes: Sizes | None = None,
    number: Callable[[Any], Any] | None = None,
) -> Prepared:
    """Bind rules to a traced program and simplify it.

    Args:
        names: of the arguments' tensors, in the order of the placeholders.
        is_state: per argument tensor, whether it is state (parameters, an optimizer's) rather than
            part of a batch.
        strict: an op without a rule is an error, rather than replicated with a warning.
        sizes: the dynamic sizes, if any, in which the program is planned.
        number: gives the formula for a number of the trace.
    """
    unmark_cut(gm.graph)
    size = None
    if sizes is not None and number is not None:
        size = partial(_size, sizes, number)
    graph = from_fx(gm, names, strict=strict, size=size, sizes=sizes)
    graph, _ = prune(live(graph))
    graph, _ = merge_common(graph)
    arguments = graph.inputs[: len(names)]
    for node, state in zip(arguments, is_state, strict=True):
        node.depends = PARAMETER if state else BATCH
    mark_dependencies(graph)
    return Prepared(graph, tuple(arguments), constraints(graph), sizes)


def _size(sizes: Sizes, number: Callable[[Any], Any], x: Any) -> Any:
    return moved(number(x), sizes)


def prepared_once(
    known: KnownPasses, gm: fx.GraphModule, names: Sequence[str], is_state: Sequence[bool]
) -> Prepared:
    """`prepare`, once for all plans of a traced program."""
    make = partial(prepare, gm, names, is_state)
    return known.once(gm, "prepared", *names, *is_state, make=make)


def plan_prepared(
    prepared: Prepared,
    axes: dict[str, int],
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec | None],
    *,
    data_axes: Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    strict: bool = False,
    hardware: Hardware = DEFAULT,
    watch: Watch | None = None,
    known: KnownPasses | None = None,
) -> Plan:
    """The cheapest plan.

    Args:
        axes: the mesh's axes and their sizes.
        in_specs: per argument tensor.
        out_specs: per output of the graph; None leaves the choice to the planner.
        data_axes: the axes on which parameters are resharded and activations are not; default those
            that cut a batch argument.
        hardware: with links by axis, from `hardware_on`.
        known: as of `make_plan`.
    """
    specs = dict(zip(prepared.arguments, in_specs, strict=True))
    if data_axes is None:
        data_axes = tuple(
            dict.fromkeys(axis for node in prepared.batch for axis in specs[node].axes)
        )
    plan = make_plan(
        prepared.graph,
        axes,
        FixedLayouts(specs, prepared.constraints, list(out_specs)),
        batch_inputs=prepared.batch,
        data_axes=data_axes,
        reshard_after_forward=reshard_after_forward,
        hardware=hardware,
        decompose=partial(decompose, strict=strict, sizes=prepared.sizes),
        watch=watch,
        known=known,
    )
    plan.sizes = prepared.sizes
    return plan
