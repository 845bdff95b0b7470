"""Tangents in forward mode that are zero, as those of weights in a derivative by inputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ftp.rules.op_kinds import VIEWS_AND_COPIES

aten = torch.ops.aten


def _zeros(size: Sequence[Any], **options: Any) -> Tensor:
    aten._efficientzerotensor.default([], **options)  # the mark of forward mode
    return aten.zeros.default([], **options).expand(size)


def _zeros_like(x: Tensor, like: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """Zeros with the strides of ``like``, under the leading dims of ``x``."""
    batch = x.shape[:self_num_batch_dims]
    whole = like.expand(*batch, *like.shape) if batch else like
    return torch.zeros_like(whole, dtype=x.dtype)


RECORDED_AS: dict[Any, Any] = {
    aten._efficientzerotensor.default: _zeros,
    aten._new_zeros_with_same_feature_meta.default: _zeros_like,
}
"""What is recorded in place of ops whose C++ asks for sizes as numbers, which may be dynamic, and
skips products of zeros: each run of the function has the same ops.
"""


def drop_zero_tangents(graph: fx.Graph) -> None:
    """Let sums skip the products of autograd's zero tangents, which torch computes. The products
    stay, unused. A program without forward mode may expand a zero of its own.
    """
    if all(node.target is not aten._efficientzerotensor.default for node in graph.nodes):
        return
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_zero(node, zeros):
            zeros.add(node)
        elif node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            x, y = node.args
            kept = x if y in zeros else y if x in zeros else None
            is_negative = kept is y and node.target is aten.sub.Tensor
            if isinstance(kept, fx.Node) and not is_negative and is_alike(node, kept):
                node.replace_all_uses_with(kept)


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether a node is one of autograd's zero tangents, or linear in one."""
    if node.target is aten._efficientzerotensor.default:
        return True
    of: Any = node.args[0] if node.args else None
    if node.target is aten.expand.default and of.target is aten.zeros.default:
        return not of.args[0]  # torch expands a number where it needs the tensor
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return bool(node.args) and zeros.issuperset(node.args)
    return any(node.args[i] in zeros for i in _LINEAR.get(node.target, ()))


_OF_FIRST = VIEWS_AND_COPIES | {
    aten.neg.default, aten.sum.dim_IntList, aten.sum.default, aten.div.Tensor,
}  # fmt: skip
_OF_EACH = (aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
_LINEAR: Mapping[Any, Sequence[int]] = {
    **dict.fromkeys(_OF_FIRST, (0,)),
    **dict.fromkeys(_OF_EACH, (0, 1)),
}
"""Ops that are linear in each of these arguments alone."""


def is_alike(a: fx.Node, b: Any) -> bool:
    """Whether two nodes' tensors have one shape, dtype and device."""
    x, y = a.meta["val"], b.meta["val"]
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
