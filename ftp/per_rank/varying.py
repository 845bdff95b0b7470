"""What one rank's code knows of the other ranks: along which axes a value differs from rank to
rank, and which sums need no collective.

Parts of a cut input and a rank's own position vary; sums and gathers over an axis do not; any other
op's result varies where an operand does.

Source: JAX, the types of varying manual axes of ``jax.shard_map``.
"""

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from ftp.axis import OPS, axis_of
from ftp.errors import RuleError
from ftp.rules.bind import lookup
from ftp.rules.rule import Call, Meta, replaced

Axes = frozenset[str]
_SAME = (
    OPS.all_reduce.default,
    OPS.all_gather.default,
)  # their result does not vary along their axis


def infer(graph: fx.Graph, inputs: Sequence[Axes]) -> dict[fx.Node, Axes]:
    """The axes along which each node's value varies; ``inputs`` are those of the placeholders."""
    given = iter(inputs)
    found: dict[fx.Node, Axes] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op != "output":
            found[node] = _of(node, frozenset().union(*(found[n] for n in node.all_input_nodes)))
    return found


def _of(node: fx.Node, operands: Axes) -> Axes:
    axis = axis_of(node.target, node.args[1:])
    if axis is None:
        return operands
    return operands - {axis} if node.target in _SAME else operands | {axis}


def cause(
    node: fx.Node, axis: str, types: Mapping[fx.Node, Axes], names: Mapping[fx.Node, str]
) -> tuple[str, str]:
    """The line that computes a value that varies along ``axis``, and what makes it vary."""
    line = ""
    while True:
        line = line or node.meta.get("source", "")
        if node in names:
            return line, names[node]
        if axis_of(node.target, node.args[1:]) == axis:
            name = str(node.target).removeprefix("ftp.").removesuffix(".default")
            return line, f"{name} at {node.meta.get('source') or 'an unknown line'}"
        node = next(n for n in node.all_input_nodes if axis in types[n])


def without_known_sums(graph: fx.Graph, axis: str, types: dict[fx.Node, Axes]) -> set[int]:
    """Replaces sums over ``axis`` of what is computed linearly from one rank's contribution by the
    same of the contributed value.

    A gradient that all ranks hold enters the backward pass as the first rank's contribution, so
    that every gradient is a sum over ranks; where such a sum is asked for along the way, or at the
    end, it need not be communicated.

    Returns:
        The outputs that hold such a sum now, where they held a term of it.
    """
    sums: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        with graph.inserting_before(node):
            if node.target is OPS.contribute.default and node.args[1] == axis:
                sums[node] = node.args[0]  # type: ignore[assignment]
            elif (
                node.all_input_nodes
                and node.all_input_nodes[0] in sums
                and axis_of(node.target, node.args[1:]) == axis
            ):
                known = sums[node.args[0]]  # type: ignore[index]
                if node.target is OPS.all_reduce.default and node.args[1] == "sum":
                    node.replace_all_uses_with(known)
                elif node.target is OPS.reduce_scatter.default:
                    own = graph.call_function(OPS.own_part.default, (known, *node.args[1:]))
                    own.meta, types[own] = dict(node.meta), types[node]
                    node.replace_all_uses_with(own)
            elif _is_linear(node, sums, axis, types):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: sums.get(n, n))  # type: ignore[misc]
                made = sums[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
                made.meta, types[made] = dict(node.meta), types[node] - {axis}
    output = next(reversed(graph.nodes))
    returned: Any = output.args[0]
    output.args = (tuple(sums.get(n, n) for n in returned),)
    return {i for i, n in enumerate(returned) if n in sums}


def _is_linear(
    node: fx.Node, sums: Mapping[fx.Node, fx.Node], axis: str, types: Mapping[fx.Node, Axes]
) -> bool:
    """Whether a node adds up over the ranks: linear in operands whose sums are known together,
    the others equal on all ranks.
    """
    operands = node.all_input_nodes
    if not any(n in sums for n in operands):
        return False
    if node.target is getitem or axis_of(node.target, node.args[1:]):
        return True
    assert isinstance(node.target, torch._ops.OpOverload), node.target

    def meta(n: fx.Node) -> Meta:
        return Meta(tuple(n.meta["val"].shape), n.meta["val"].dtype)

    slots: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), slots.append)  # type: ignore[arg-type]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), meta)  # type: ignore[misc]
    val = node.meta["val"]
    vals = [val] if isinstance(val, torch.Tensor) else val
    try:
        rule = lookup(
            Call(
                node.target,
                replaced(args, (), tuple),
                replaced(kwargs, (), tuple),
                tuple(Meta(tuple(v.shape), v.dtype) for v in vals),
            )
        )
    except RuleError:
        return False
    if rule is None:
        return False
    return any(
        all(slots[i] in sums for i in group)
        and all(axis not in types[n] for i, n in enumerate(slots) if i not in group)
        for group in rule.linear
    )
