"""Causes of layouts: the input or constraint that each cut and pending sum comes from."""

from collections.abc import Sequence
from itertools import chain

from ftp.ops.constrain import pin_from_str
from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.rules.op_kinds import VIEWS
from ftp.sharding.spec import PartitionSpec

Origins = dict[tuple[Value, str], Node]
Users = dict[Value, list[tuple[Node, int]]]
FORWARD = 32  # users searched for the constraint that a cut leads to


def origins(
    graph: Graph, axes: Sequence[str], cut_inputs: Sequence[tuple[Node, PartitionSpec]]
) -> Origins:
    """``{(value, axis): the input or constraint by which the axis cuts the value}``, also for axes
    over which the value is a pending sum.

    If several operands cut one factor of an op, a constraint is preferred to a parameter, and a
    parameter to an activation.
    """
    found: Origins = {}
    followed: dict[tuple[int, int, int], list[tuple[str, list[int]]]] = {}  # copies share it
    users = graph.users if _has_constraints(graph) else {}
    for node, spec in cut_inputs:
        found.update({(Value(node), axis): node for axis in spec.axes})
    for node in graph.nodes:
        if node.kind in ("constrain", "reshard"):
            for axis in axes:
                if node.kind == "constrain":
                    at = _through_constraint(node, axis, found)
                else:
                    at = _through_reshard(node, axis, found, users)
                if at is not None:
                    found[Value(node), axis] = at
        elif node.kind == "op":
            key = id(node.cuts), id(node.pending), id(node.rule)
            if key not in followed:
                followed[key] = _followed(node)
            for axis, slots in followed[key]:
                if (at := _first(node, axis, slots, found)) is not None:
                    for value in node.values:
                        found[value, axis] = at
    return found


def _through_constraint(node: Node, axis: str, found: Origins) -> Node | None:
    pin = pin_from_str(node.target)
    if axis in pin.spec.axes:
        return node
    return None if pin.holds(axis) else found.get((node.operands[0], axis))


def _through_reshard(node: Node, axis: str, found: Origins, users: Users) -> Node | None:
    reshard = node.target
    if reshard.axis == axis and reshard.dst.kind == "R":
        return None
    if reshard.axis == axis and reshard.dst.kind == "S":
        return constraint_forward(Value(node), axis, users) or found.get((node.operands[0], axis))
    return found.get((node.operands[0], axis))


def _has_constraints(graph: Graph) -> bool:
    return any(node.kind == "constrain" for node in graph.nodes)


def constraint_forward(value: Value, axis: str, users: Users) -> Node | None:
    """The nearest constraint on ``axis`` that the value's cut leads to."""
    queue, seen = [value], {value.node}
    for at in queue:
        for user, _ in users.get(at, ()):
            if user.kind == "constrain" and axis in pin_from_str(user.target).spec.axes:
                return user
            is_cut = any(cut.axis == axis for cut in user.cuts)
            if is_cut and user not in seen and len(seen) < FORWARD:
                seen.add(user)
                queue += user.values
    return None


def _followed(node: Node) -> list[tuple[str, list[int]]]:
    """Per axis that cuts an op, or over which it is pending, the operands that it may cut too."""
    cut_on: dict[str, set[str]] = {}
    for cut in node.cuts:
        cut_on.setdefault(cut.axis, set()).add(cut.factor)
    pending = {axis for waits in node.pending.values() for axis, _ in waits}
    return [
        (
            axis,
            [
                slot
                for slot, dims in enumerate(node.rule.operands)
                if axis not in cut_on or not cut_on[axis].isdisjoint(chain(*dims))
            ],
        )
        for axis in dict.fromkeys((*cut_on, *pending))
    ]


def _first(node: Node, axis: str, slots: Sequence[int], found: Origins) -> Node | None:
    """The origin by which an axis cuts an op's operands, the preferred one of several."""
    first: tuple[int, Node] | None = None
    for slot in slots:
        value = node.operands[slot]
        if (origin := found.get((value, axis))) is not None:
            rank = _rank(origin, value)
            first = (rank, origin) if first is None or rank < first[0] else first
    return None if first is None else first[1]


def _rank(origin: Node, value: Value) -> int:
    if origin.kind == "constrain":
        return 0
    return 1 + bool(value.node.depends & BATCH) + bool(origin.depends & BATCH)


def describe(origin: Node, specs: dict[Node, PartitionSpec]) -> str:
    """An input with its spec, or a constraint with its line."""
    if origin.kind == "constrain":
        at = f" at {origin.source}" if origin.source else ""
        return f"the constraint {pin_from_str(origin.target)}{at}"
    return f"{origin.name} {specs.get(origin, PartitionSpec())}"


def of_reshards(
    graph: Graph, found: Origins, specs: dict[Node, PartitionSpec], outputs: Sequence[str]
) -> dict[str, str]:
    """Per reshard, by name, the cut that makes it necessary and the op that needs its result."""
    users = graph.users
    towards = users if _has_constraints(graph) else {}
    returned: dict[Value, str] = {}
    for value, name in zip(graph.outputs, outputs, strict=False):
        returned.setdefault(value, name)
    why = {}
    for node in graph.nodes:
        if node.kind != "reshard":
            continue
        reshard = node.target
        origin = found.get((node.operands[0], reshard.axis))
        because = {"P": "summed because of", "S": "cut by"}.get(reshard.src.kind, "whole,")
        first = f"{because} {describe(origin, specs)}" if origin is not None else ""
        last = _needed_by(node, users, returned)
        if reshard.dst.kind == "S":
            constraint = constraint_forward(Value(node), reshard.axis, towards)
            last = f"for {describe(constraint, specs)}" if constraint is not None else last
        why[node.name] = ", ".join(filter(None, (first, last)))
    return why


def _needed_by(node: Node, users: Users, returned: dict[Value, str]) -> str:
    value = Value(node)
    while value not in returned and value in users:
        user = users[value][0][0]
        if user.kind == "constrain" and pin_from_str(user.target).axes != ():
            return (
                "for the constraint"
                f" {pin_from_str(user.target)}{f' at {user.source}' if user.source else ''}"
            )
        if user.kind not in ("reshard", "constrain") and user.target not in VIEWS:
            break
        value = Value(user)
    if value in returned:
        return f"for {returned[value]}"
    return f"for {node.cause}" if node.cause else ""
