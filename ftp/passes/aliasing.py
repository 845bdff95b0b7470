"""Which nodes of a rank's graph may share memory."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
UNSAFE_VIEW = aten._unsafe_view.default  # a view, though its schema does not say so
WHOLE_VIEWS = {  # views, or copies, with each element of their operand once
    UNSAFE_VIEW, aten.view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.alias.default, aten.detach.default,
}  # fmt: skip


def is_view(node: fx.Node) -> bool:
    """Whether a node's result may share memory with an operand, according to its schema; that of a
    direct call (see `call_directly`) does not.
    """
    is_call = node.op == "call_function" and not node.meta.get("direct")
    return is_call and gives_view(node.target)


@functools.cache
def gives_view(target: Any) -> bool:
    """Whether results of calls of ``target`` may share memory with an operand."""
    if target in (operator.getitem, WAIT, UNSAFE_VIEW) or not isinstance(target, OpOverload):
        return True
    return any(r.alias_info is not None for r in target._schema.returns)


def families(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Per node, the node that owns the memory it uses: itself, or for a view its first operand's
    owner. The result of an op outside aten counts as a view of all operands, which become one
    family.
    """
    root: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            node = root[node]
        return node

    for node in graph.nodes:
        root[node] = node
        if is_view(node):
            count = 1 if isinstance(node.target, OpOverload) else None
            for operand in node.all_input_nodes[:count]:
                root[find(node)] = find(operand)
    return {node: find(node) for node in graph.nodes}


def read_until(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    """The node after which a node has read its operands: for a collective, its wait; an all-reduce
    reads a copy.
    """
    waits = (position[user] for user in node.users if user.target is WAIT)
    return position[node] if node.target is ALL_REDUCE else max(waits, default=position[node])


def last_uses(nodes: Sequence[fx.Node], family: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """Per family the node that last writes or reads its memory; outputs are read at the end."""
    position = {node: at for at, node in enumerate(nodes)}
    awaited = {x for node in nodes if node.target is WAIT for x in node.all_input_nodes}
    last: dict[fx.Node, int] = {}
    for node, at in position.items():
        until = read_until(node, position) if node in awaited else at
        last[family[node]] = max(last.get(family[node], at), at)
        for operand in node.all_input_nodes:
            last[family[operand]] = max(last.get(family[operand], until), until)
    return last
