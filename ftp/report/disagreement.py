"""Lint of ops whose inputs disagree on a layout, so that the planner's prices decide which input is
resharded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ftp.planning.graph import BATCH, Graph, Node, Reshard, Value
from ftp.planning.lookups import is_of_lookup
from ftp.report.causes import Origins, describe
from ftp.report.lint import Finding, folded
from ftp.rules.op_kinds import VIEWS, is_matmul
from ftp.sharding.spec import PartitionSpec


def disagreements(
    graph: Graph, found: Origins, specs: Mapping[Node, PartitionSpec]
) -> list[Finding]:
    """Ops whose inputs one axis cuts on different dims, where the plan reshards an activation that
    parameters cut.

    Constraints, cuts of the batch, parameters gathered on a data axis, and rows that are moved
    instead of a table are decisions of the user and not reported. Two batch arguments that an op
    takes in different cuts are. A pending sum is no cut.
    """
    findings = []
    for node in graph.nodes:
        if node.kind != "op" or len(node.operands) < 2 or node.phase % 2:
            continue
        for slot, value in enumerate(node.operands):
            resharded = reshard_of(value)
            if (
                resharded is None
                or resharded.target.src.kind != "S"
                or not _is_odd(resharded, node)
            ):
                continue
            axis = resharded.target.axis
            origin = found.get((resharded.operands[0], axis))
            others = [
                v for other, v in enumerate(node.operands) if other != slot and _is_cut(v, axis)
            ]
            if origin is None or origin.kind == "constrain" or not others:
                continue
            if origin.depends & BATCH and not _is_of_another(origin, node, others[0], axis, found):
                continue
            if not is_of_lookup(resharded, graph.users):
                findings.append(_finding(node, resharded, origin, others[0], specs))
    return folded(findings)


def _finding(
    node: Node, resharded: Node, origin: Node, other: Value, specs: Mapping[Node, PartitionSpec]
) -> Finding:
    home, axis = resharded.operands[0].node, resharded.target.axis
    spec = spec_of(Value(resharded))
    at = f" at {node.source}" if node.source else ""
    made = f" made at {home.source}" if home.source else ""
    text = (
        f"({node.target}){at} takes inputs that {axis!r} cuts on different dims: %{home.name}, cut"
        f" by {describe(origin, dict(specs))},"
        f" and %{_resharded_root(other).name}. The plan reshards the first"
        f" ({resharded.target.op}), because it costs less."
        f" Say what you mean: x = ftp.constrain(x, {spec}), x the value{made}."
    )
    return Finding("disagreement", "warning", f"%{node.name}", text)


def _is_odd(resharded: Node, user: Node) -> bool:
    """Whether a reshard is of an activation, or cuts a parameter on another dim for an elementwise
    op.
    """
    is_recut = resharded.target.op == "all_to_all" and not is_matmul(user.target)
    return bool(resharded.depends & BATCH) or is_recut


def _is_of_another(origin: Node, node: Node, other: Value, axis: str, found: Origins) -> bool:
    """Whether another argument (for a matmul, one of the batch) cuts the other operand."""
    resharded = reshard_of(other)
    at = found.get((resharded.operands[0] if resharded is not None else other, axis))
    if at is None or at is origin or at.kind != "input":
        return False
    return bool(at.depends & BATCH) or not is_matmul(node.target)


def reshard_of(value: Value) -> Node | None:
    """The reshard that an operand comes from, through views."""
    while value.node.kind == "op" and value.node.target in VIEWS:
        value = value.node.operands[0]
    return value.node if value.node.kind == "reshard" else None


def _resharded_root(value: Value) -> Node:
    resharded = reshard_of(value)
    return resharded.operands[0].node if resharded is not None else value.node


def _is_cut(value: Value, axis: str) -> bool:
    resharded = reshard_of(value)
    if resharded is not None and resharded.target.axis == axis:
        return resharded.target.src.kind == "S" or resharded.target.dst.kind == "S"
    return axis in spec_of(value).axes


def spec_of(value: Value) -> PartitionSpec:
    """A value's layout as a spec, as far as a spec can express it."""
    if value.node.kind == "reshard":
        reshard: Reshard = value.node.target
        spec = spec_of(value.node.operands[0])
        for axis in reshard.axes:
            spec = without_axis(spec, axis)
        return with_axes(spec, reshard.dst.dim, reshard.axes) if reshard.dst.kind == "S" else spec
    return _spec(value.axes)


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """A spec without the cuts over an axis.

    >>> without_axis(PartitionSpec(None, ("dp", "tp")), "dp")
    P(None, 'tp')
    """
    dims = map(spec.parts, range(len(spec)))
    return _spec(
        [tuple(p for p in dim if (p if isinstance(p, str) else p.axis) != axis) for dim in dims]
    )


def with_axes(spec: PartitionSpec, dim: int, axes: Sequence[str]) -> PartitionSpec:
    """A spec that also cuts a dim over further axes.

    >>> with_axes(PartitionSpec("dp"), 1, ("tp",)), with_axes(PartitionSpec("dp"), 0, ("tp",))
    (P('dp', 'tp'), P(('dp', 'tp')))
    """
    entries = [spec.parts(d) for d in range(max(len(spec), dim + 1))]
    entries[dim] = (*entries[dim], *axes)
    return _spec(entries)


def _spec(entries: list[tuple[Any, ...]]) -> PartitionSpec:
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*entries)
