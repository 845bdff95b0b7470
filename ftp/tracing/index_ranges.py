"""Ranges of indices that ops give: ``argmax`` over 8 elements is in [0, 8)."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ftp.torch_internals.functorch import is_batched
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.captured_tensors import node_of
from ftp.tracing.data_dependent.known_values import are_written

aten = torch.ops.aten


def index_range(x: Tensor) -> int | None:
    """The smallest known n such that all values of ``x`` are in [0, n), from the ops that computed
    ``x``; None if there is none.
    """
    node = node_of(x)
    if node is None or is_batched(x):
        return None
    seen: dict[fx.Node, None] = {}
    while True:
        seen[node] = None
        found = _range_of(node)
        if found is not None:
            return None if are_written(((n, ()) for n in seen), node.graph) else found
        is_values = (
            node.target is operator.getitem
            and node.args[1] == 0
            and node.all_input_nodes[0].target in _WITH_INDICES
        )
        if not (is_values or node.target in _SELECTS) or not _is_long(node):
            return None
        node = node.all_input_nodes[0]
        if is_values:
            seen[node] = None
            node = node.all_input_nodes[0]


def _range_of(node: fx.Node) -> int | None:
    args: Any = node.args
    if node.target in (aten.argmax.default, aten.argmin.default):
        dim = _argument(node, "dim")
        return _size(args[0], dim) if dim is not None else args[0].meta["val"].numel()
    if node.target is operator.getitem and args[0].target in _WITH_INDICES and args[1] == 1:
        return _size(args[0].args[0], _argument(args[0], "dim"))
    if node.target is aten.remainder.Scalar and _is_long(node) and args[1] > 0:
        return args[1] if isinstance(args[1], int) else None
    if node.target is aten.clamp.default and _is_long(node):
        least, most = (_argument(node, name) for name in ("min", "max"))
        if isinstance(least, int) and isinstance(most, int) and 0 <= least <= most:
            return most + 1
    return None


def _size(node: fx.Node, dim: int) -> int:
    val = node.meta["val"]
    return int(val.shape[dim]) if val.ndim else 1


def _is_long(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.int64, torch.int32)


def _argument(node: fx.Node, name: str) -> Any:
    assert isinstance(node.target, OpOverload)
    arguments = node.target._schema.arguments
    at = next(i for i, a in enumerate(arguments) if a.name == name)
    given = node.args[at] if at < len(node.args) else arguments[at].default_value
    return node.kwargs.get(name, given)


_WITH_INDICES = {
    aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim,
}  # fmt: skip
# Ops whose results consist of elements of the first operand.
_SELECTS = {
    aten._to_copy.default, aten._unsafe_view.default, aten.alias.default, aten.clone.default,
    aten.detach.default, aten.expand.default, aten.flip.default, aten.gather.default,
    aten.index.Tensor, aten.index_select.default, aten.permute.default, aten.reshape.default,
    aten.select.int, aten.slice.Tensor, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.view.default,
}  # fmt: skip
