"""Varying axes: the mesh axes along which a value of per-rank code differs from rank to rank.

From them follow the sums that need no collective, and the check of ``local``'s ``out_specs``:
results are equal along axes that the specs do not name.

Shards of an input and the rank's index vary over their axes. The results of all_reduce and
all_gather do not vary over their axis. Any other result varies over the axes of its operands.

Source: JAX, the types of varying manual axes of ``jax.shard_map``.
"""

import itertools
from collections.abc import Mapping, Sequence
from operator import getitem, not_
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from ftp.errors import SpecError, join_failures
from ftp.ops.axis_collectives import OPS, axis_of
from ftp.per_rank.program import Port
from ftp.rules.bind import rule_of_node
from ftp.rules.call import operands_of
from ftp.sharding.pytree import leaf_names
from ftp.sharding.spec import PartitionSpec
from ftp.source import at_line
from ftp.tracing.trace import Traced

AxisSet = frozenset[str]
# Their results do not vary over their axis.
_INVARIANT = (OPS.all_reduce.default, OPS.all_gather.default)


def infer(graph: fx.Graph, inputs: Sequence[AxisSet]) -> dict[fx.Node, AxisSet]:
    """The axes over which each node's value varies; ``inputs``: those of the placeholders."""
    given = iter(inputs)
    found: dict[fx.Node, AxisSet] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op != "output":
            found[node] = _of(node, frozenset().union(*(found[n] for n in node.all_input_nodes)))
    return found


def _of(node: fx.Node, operands: AxisSet) -> AxisSet:
    axis = axis_of(node.target, node.args[1:])
    if axis is None:
        return operands
    return operands - {axis} if node.target in _INVARIANT else operands | {axis}


def cause(
    node: fx.Node, axis: str, types: Mapping[fx.Node, AxisSet], names: Mapping[fx.Node, str]
) -> tuple[str, str]:
    """Why a value varies over ``axis``: the line that computes it, and the input or op."""
    line = ""
    while True:
        line = line or node.meta.get("source", "")
        if node in names:
            return line, names[node]
        if axis_of(node.target, node.args[1:]) == axis:
            name = str(node.target).removeprefix("ftp.").removesuffix(".default")
            return line, f"{name} at {node.meta.get('source') or 'an unknown line'}"
        node = next(n for n in node.all_input_nodes if axis in types[n])


def without_known_sums(graph: fx.Graph, axis: str, types: dict[fx.Node, AxisSet]) -> set[int]:
    """Replace sums over ``axis`` whose value every rank can compute itself.

    The gradient of a replicated result enters the backward pass as ``contribute(grad)``: ``grad``
    on the first rank, zero on the others, so that every gradient is a sum over ranks. The sum of a
    value that is linear in it is computed by applying the same ops to ``grad``, without a
    collective.

    Returns:
        The positions of outputs that now hold the sum, not one rank's term of it.
    """
    sums: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        operand: Any = node.args[0] if node.args else None
        with graph.inserting_before(node):
            if node.target is OPS.contribute.default and node.args[1] == axis:
                # The sum of a value that varies is the first rank's, which other ranks do not know.
                if axis not in types[operand]:
                    sums[node] = operand
            elif (
                node.all_input_nodes
                and node.all_input_nodes[0] in sums
                and axis_of(node.target, node.args[1:]) == axis
            ):
                known = sums[operand]
                if node.target is OPS.all_reduce.default and node.args[1] == "sum":
                    node.replace_all_uses_with(known)
                elif node.target is OPS.reduce_scatter.default:
                    own = graph.call_function(OPS.own_part.default, (known, *node.args[1:]))
                    own.meta, types[own] = dict(node.meta), types[node]
                    node.replace_all_uses_with(own)
            elif _is_linear(node, sums, axis, types):
                arguments: Any = (node.args, node.kwargs)
                args, kwargs = map_arg(arguments, lambda n: sums.get(n, n))
                target: Any = node.target
                made = sums[node] = graph.call_function(target, args, kwargs)
                made.meta, types[made] = dict(node.meta), types[node] - {axis}
    output = graph.output_node()
    returned: Any = output.args[0]
    output.args = (tuple(sums.get(n, n) for n in returned),)
    return {i for i, n in enumerate(returned) if n in sums}


def _is_linear(
    node: fx.Node, sums: Mapping[fx.Node, fx.Node], axis: str, types: Mapping[fx.Node, AxisSet]
) -> bool:
    """Whether a node's sum over ranks follows from known sums: its op is linear in the operands
    that have one, and the other operands are equal on all ranks.
    """
    operands = node.all_input_nodes
    if not any(n in sums for n in operands):
        return False
    if node.target is getitem or axis_of(node.target, node.args[1:]):
        # The counts of unequal parts must be equal on the ranks that are summed over.
        return operands[0] in sums and all(axis not in types[n] for n in operands[1:])
    rule, slots = rule_of_node(node), operands_of(node)
    return rule is not None and any(
        all(slots[i] in sums for i in group)
        and all(axis not in types[n] for i, n in enumerate(slots) if i not in group)
        for group in rule.linear
    )


def check_claims(
    traced: Traced,
    results: Sequence[Port],
    types: Mapping[fx.Node, AxisSet],
    called: Mapping[fx.Node, str],
) -> None:
    """Refuse results that vary along an axis that their out spec does not name.

    Args:
        types: the axes over which each node varies.
        called: the names of inputs, for errors.
    """
    tree = traced.out_tree.unflatten(traced.out_leaves)
    named = itertools.compress(leaf_names(tree, "the result"), map(not_, traced.is_static))
    returned: Any = traced.gm.graph.output_node().args[0]
    failures = []
    for name, port, node in zip(named, results, returned, strict=True):
        for axis in sorted(types[node] - set(port.spec.axes)):
            line, origin = cause(node, axis, types, called)
            cut = _cut_too(port, axis)
            or_cut = f" or cut it by the axis in out_specs, as {cut}," if cut else ""
            at = f", at {line}" if line else ""
            failures.append(
                f"{name} has out spec {port.spec}, which says that all ranks along {axis!r} hold"
                f" the same, but it varies there: it comes from {origin}{at}.\n  Reduce it with"
                f" ftp.axis.all_reduce(x, {axis!r}),{or_cut} or pass check=False if you know that"
                " the ranks agree."
            )
    if failures:
        raise SpecError(at_line() + join_failures(failures))


def _cut_too(port: Port, axis: str) -> PartitionSpec | None:
    """The result's spec with its first whole dim sharded over ``axis``; None if it has none."""
    entries = [port.spec[d] if d < len(port.spec) else None for d in range(len(port.shape))]
    if None not in entries:
        return None
    entries[entries.index(None)] = axis
    return PartitionSpec(*entries)
