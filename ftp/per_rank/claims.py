"""Check the claim of ``local``'s ``out_specs``: results are equal along axes not named."""

from collections.abc import Mapping, Sequence

from torch import fx

from ftp.errors import SpecError, join_failures
from ftp.per_rank.program import Port
from ftp.per_rank.varying import AxisSet, cause
from ftp.sharding.pytree import leaf_names
from ftp.sharding.spec import PartitionSpec
from ftp.source import at_line
from ftp.tracing.trace import Traced


def check_claims(
    traced: Traced,
    results: Sequence[Port],
    types: Mapping[fx.Node, AxisSet],
    called: Mapping[fx.Node, str],
) -> None:
    tree = traced.out_tree.unflatten(traced.out_leaves)
    named = [
        name
        for name, static in zip(leaf_names(tree, "the result"), traced.is_static, strict=True)
        if not static
    ]
    output = next(reversed(traced.gm.graph.nodes))
    failures = []
    for name, port, node in zip(named, results, output.args[0], strict=True):
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
