"""In-place changes of a tensor's shape, as by ``x.t_()``, while views of it exist.

The gradient of a view replays the op that made it on what it views. After a change of that shape in
place the op would find another tensor than the one that it was applied to.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ftp.errors import TraceError, raise_all
from ftp.ops.written import writes
from ftp.tracing.explain_errors import located
from ftp.tracing.functionalize_graph import storages

aten = torch.ops.aten
RESHAPES = {
    aten.t_.default, aten.transpose_.default, aten.swapaxes_.default, aten.swapdims_.default,
    aten.unsqueeze_.default, aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims,
    aten.as_strided_.default,
}  # fmt: skip


def check_reshaped_views(graph: fx.Graph) -> None:
    """Refuse to change a shape in place where the gradient of a view would be wrong: of a tensor
    whose earlier views are used afterwards, or of a view where its memory is written afterwards.
    """
    nodes = list(graph.nodes)
    changed = [
        (at, node) for at, node in enumerate(nodes) if node.target in RESHAPES and _changes(node)
    ]
    if not changed or not any(node.meta.get("phase") for node in nodes):
        return
    sharing = _by_storage(nodes)
    failures = dict.fromkeys(
        f"{node.target}{located(node.meta['source'])} changes a shape in place, and"
        f" {user.target}{located(user.meta['source'])} uses the same memory: its gradient"
        " would be wrong. Make a new tensor: x = x.t() instead of x.t_()."
        for at, node in changed
        if (user := _used_later(nodes, at, sharing)) is not None
    )
    raise_all(TraceError, failures)


def _changes(node: fx.Node) -> bool:
    """Whether a shape or strides change: the recorder keeps a node's ``val`` as it was before an
    op in place.
    """
    before, after = (n.meta["val"] for n in (node.all_input_nodes[0], node))
    return (before.shape, before.stride()) != (after.shape, after.stride())


def _by_storage(nodes: Sequence[fx.Node]) -> Mapping[int, Sequence[int]]:
    """Per storage, the indices of the nodes whose values or inputs lie in it."""
    held = {node: storages(node) for node in nodes}
    found = defaultdict(list)
    for at, node in enumerate(nodes):
        for storage in held[node].union(*(held[value] for value in node.all_input_nodes)):
            found[storage].append(at)
    return found


def _used_later(
    nodes: Sequence[fx.Node], at: int, sharing: Mapping[int, Sequence[int]]
) -> fx.Node | None:
    """The first node after the change at ``at`` that makes a gradient wrong.

    Args:
        sharing: what `_by_storage` gives.
    """
    first, itself = nodes[at], {nodes[at]}
    memory = storages(first)
    while first.args and (written := writes(first)) == [first.args[0]]:
        (first,) = written
        itself.add(first)
    near = sorted({i for storage in memory for i in sharing[storage]})
    before = (nodes[i] for i in near if i < at)
    aliases = {n for n in before if n not in itself and storages(n) & memory}
    is_view = any(n in aliases for n in first.all_input_nodes)
    is_written = False
    for user in (nodes[i] for i in near if i > at):
        if user.op != "call_function" or user.meta.get("phase"):
            continue
        if not is_view and any(value in aliases for value in user.all_input_nodes):
            return user
        is_written |= any(storages(value) & memory for value in writes(user))
        if any(value in itself for value in user.all_input_nodes):
            if is_view and is_written:
                return user
            if storages(user) & memory:
                itself.add(user)
    return None
