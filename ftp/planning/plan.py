"""The planner's input, specs, and its output, a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import field

from ftp.dataclass import dataclass
from ftp.dynamic_int import Sizes
from ftp.ops.constrain import Pin
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.solver.minimize import Solution
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class FixedLayouts:
    """The fixed layouts: a spec per input node, a pin per constraint node, a spec per output (None:
    open).
    """

    inputs: Mapping[Node, PartitionSpec]
    constraints: Mapping[Node, Pin]
    outputs: Sequence[PartitionSpec | None]

    def on(self, copies: Mapping[Node, Node]) -> "FixedLayouts":
        """The same for a rewritten graph."""
        inputs = {copies[node]: spec for node, spec in self.inputs.items()}
        pins = {copies[node]: pin for node, pin in self.constraints.items() if node in copies}
        return FixedLayouts(inputs, pins, self.outputs)


@dataclass
class Plan:
    """A graph with its reshards, cut over every axis of the mesh.

    Attributes:
        axes: {name: size} in the order in which they were folded.
        solutions: per axis, the solver's result: cost in seconds, bound, largest table.
        kept_rules: per axis, whether the plan keeps all placement constraints.
        out_specs: per output.
        alike: number of repeated layers that were planned as one (0: none); optima and bounds are
            then over plans that give these layers equal layouts.
        entries, exits: specs of inputs that are gathered when the program starts, and of outputs
            that are sliced when it ends.
        sizes: the dynamic sizes, if any; the sizes of nodes are formulas of them.
    """

    graph: Graph
    axes: dict[str, int]
    solutions: dict[str, Solution] = field(default_factory=dict)
    kept_rules: dict[str, bool] = field(default_factory=dict)
    out_specs: list[PartitionSpec] = field(default_factory=list)
    entries: dict[Node, PartitionSpec] = field(default_factory=dict)
    exits: dict[int, PartitionSpec] = field(default_factory=dict)
    alike: int = 0
    sizes: Sizes | None = None

    @property
    def cost(self) -> float:
        """Seconds of all axes' networks together."""
        return sum(s.cost for s in self.solutions.values())


def describe_plan(plan: Plan) -> str:
    """The plan as text that is equal on all ranks: every node with its cuts."""
    lines = []
    number = {node: i for i, node in enumerate(plan.graph.nodes)}
    for node, i in number.items():
        arguments = [f"%{number[v.node]}.{v.index}" for v in node.operands]
        constants = [repr(a) for a in node.args if not isinstance(a, Value | list | tuple)]
        lines.append(
            f"%{i} = {node.kind} {node.target} {arguments} {constants} {node.rule.sizes}"
            f" {node.cuts}"
        )
    lines.append(
        f"return {[f'%{number[v.node]}.{v.index}' for v in plan.graph.outputs]} {plan.out_specs}"
    )
    return "\n".join(lines)
