"""Find the collectives of a plan that no line of the program asks for.

The program asks for gathers of parameters, or moves of the rows that it looks up in them, sums of
gradients, reshards that the specs of inputs and outputs or a constraint need, and the transposes of
these reshards in the backward pass.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from ftp.ops.constrain import MARK, pin_from_str
from ftp.passes.narrow_reductions import gradient_reductions
from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.planning.lookups import is_of_lookup
from ftp.planning.plan import Plan
from ftp.rules.op_kinds import VIEWS
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.calls import Line

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def unasked(
    plan: Plan, out_specs: Sequence[PartitionSpec | None], without: Collection[str] = ()
) -> list[Node]:
    """The reshards that no line of the program asks for.

    Args:
        out_specs: the given specs; None: the output asks for nothing.
        without: names of constraints to ignore.
    """
    return _UnaskedFinder(plan.graph, out_specs, without).unasked()


def collectives_of(graph: Graph) -> list[Node]:
    """The reshards that issue a collective."""
    return [n for n in graph.nodes if n.kind == "reshard" and n.target.op in COLLECTIVES]


def keeps_value(node: Node) -> bool:
    """Whether a node only reshards, constrains or views its operand."""
    return node.kind in ("reshard", "constrain") or node.target in VIEWS


def users_in_phase(
    users: Mapping[Value, Sequence[tuple[Node, int]]], value: Value, phase: int
) -> Sequence[tuple[Node, int]]:
    """A value's users, with their operand slots, in one phase; all users if none is in it."""
    found = users.get(value, ())
    return [u for u in found if u[0].phase == phase] or found


def passes_on(node: Node, slot: int) -> bool:
    """Whether an op computes each element of its result from one element of this operand."""
    if node.kind != "op" or len(node.results) != 1:
        return False
    dims, (result,) = node.rule.operands[slot], node.rule.results
    factors = {factor for dim in dims for factor in dim}
    return dims == result and not factors & node.rule.whole and not any(node.pending.values())


class _UnaskedFinder:
    def __init__(
        self,
        graph: Graph,
        out_specs: Sequence[PartitionSpec | None],
        without: Collection[str],
    ):
        self.graph, self.users = graph, graph.users
        self.places = {node: i for i, node in enumerate(graph.nodes)}
        self.returned = {
            value for value, spec in zip(graph.outputs, out_specs, strict=True) if spec is not None
        }
        self.pins = {
            node: pin_from_str(node.target)
            for node in graph.nodes
            if node.kind == "constrain" and node.name not in without
        }
        self.constrained = self._constrained()
        self.terms = self._terms()

    def unasked(self) -> list[Node]:
        gradients = gradient_reductions(self.graph)
        return [
            node
            for node in collectives_of(self.graph)
            if not (
                node.name in gradients
                or (node.target.src.kind == "S" and not node.depends & BATCH)  # of a parameter
                or self._leads(node)
                or self._is_transposed(node)
                or self._is_within_call(node)
                or is_of_lookup(node, self.users)
            )
        ]

    def _is_end(self, user: Node, axis: str) -> bool:
        """Whether a node fixes the layout of its operand on an axis."""
        pin = self.pins.get(user)
        if pin is None:
            return user.kind == "local" or axis in user.own_axes
        return pin.holds(axis) or user.target == MARK

    def _leads(self, reshard: Node) -> bool:
        """Whether an output or a constraint fixes the layout of a reshard's value, or of what all
        its users compute from it element by element.

        A constraint on an op's result does not ask for a reshard that matches one operand to
        another, nor for the sum of an unreduced input before an op that is not linear in it.
        """
        leads: dict[Value, bool] = {}
        reached, seen = [Value(reshard)], {Value(reshard)}
        for value in reached:
            users = users_in_phase(self.users, value, reshard.phase)
            axis = reshard.target.axis
            if value in self.returned or any(self._is_end(user, axis) for user, _ in users):
                leads[value] = True
                continue
            for user, slot in users:
                if keeps_value(user) or passes_on(user, slot):
                    reached += [v for v in user.values if v not in seen]
                    seen.update(user.values)
        for value in sorted(reached, key=lambda v: self.places[v.node], reverse=True):
            if value not in leads:
                leads[value] = self._is_led(value, reshard, leads)
        return leads[Value(reshard)]

    def _is_led(self, value: Value, reshard: Node, leads: Mapping[Value, bool]) -> bool:
        """Whether a value leads on, given which of the values computed from it do."""
        users = users_in_phase(self.users, value, reshard.phase)
        if any(keeps_value(user) and any(leads[v] for v in user.values) for user, _ in users):
            return True
        is_recut = reshard.target.src.kind == reshard.target.dst.kind == "S"
        return (
            bool(users)
            and not is_recut
            and all(
                passes_on(user, slot)
                and self._stays_a_sum(user, slot, reshard)
                and leads[Value(user)]
                for user, slot in users
            )
        )

    def _terms(self) -> dict[Node, frozenset[str]]:
        """Per node, the axes over which it is computed from terms of an unreduced input, with no
        line before it that asks for the sum.
        """
        found: dict[Node, frozenset[str]] = {}
        for node in self.graph.nodes:
            if node.kind == "input":
                axes = {axis for axis, _ in node.pending.get(0, ())}
            else:
                axes = {axis for value in node.operands for axis in found[value.node]}
            found[node] = frozenset(axis for axis in axes if not self._is_end(node, axis))
        return found

    def _stays_a_sum(self, user: Node, slot: int, reshard: Node) -> bool:
        """Whether an op on terms of an unreduced input gives terms of its result. A reshard that
        reduces before the op then has the same effect as one that reduces the result.
        """
        axes = self.terms[reshard].intersection(reshard.target.axes)
        slots = {i for i, value in enumerate(user.operands) if axes & self.terms[value.node]}
        return not axes or any({slot} | slots == set(group) for group in user.rule.linear)

    def _is_transposed(self, reshard: Node) -> bool:
        """Whether a reshard is the transpose of one that a constraint asks for: it passes the
        gradient of the constrained value on.
        """
        if reshard.target.src.kind != "S" or not reshard.operands[0].node.phase % 2:
            return False
        queue, seen = [reshard.operands[0]], set[Node]()
        for value in queue:
            node = value.node
            if node in seen or not node.phase % 2:
                continue
            seen.add(node)
            if node.kind == "local" or reshard.target.axis in node.own_axes or node in self.pins:
                return True
            if keeps_value(node):
                queue += node.operands
            else:
                queue += [v for slot, v in enumerate(node.operands) if passes_on(node, slot)]
        return False

    def _constrained(self) -> set[tuple[int, str]]:
        """Calls whose result is constrained, each with an axis."""
        found = set()
        axes = {a for n in self.graph.nodes if n.kind == "reshard" for a in n.target.axes}
        for node, pin in self.pins.items():
            if node.phase % 2:
                continue
            *_, made = makers(node.operands[0])
            if isinstance(line := made.node.source, Line):
                found |= {(line.call, axis) for axis in axes if pin.holds(axis)}
        return found

    def _is_within_call(self, reshard: Node) -> bool:
        """Whether a reshard is inside a call whose result is constrained, such as softmax."""
        line = reshard.operands[0].node.source
        if not isinstance(line, Line) or (line.call, reshard.target.axis) not in self.constrained:
            return False
        queue = [Value(reshard)]
        for value in queue:
            for user, _ in users_in_phase(self.users, value, reshard.phase):
                if keeps_value(user):
                    queue += user.values
                elif not (isinstance(user.source, Line) and user.source.call == line.call):
                    return False
            if value in self.returned:
                return False
        return True


def makers(value: Value) -> Iterator[Value]:
    """A value and the values that it reshards, constrains or views, back to the op's result."""
    yield value
    while keeps_value(value.node):
        value = value.node.operands[0]
        yield value
