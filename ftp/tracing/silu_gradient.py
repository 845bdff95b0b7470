"""Fuse the gradient of SiLU into one op. torch writes seven, so that they have gradients too."""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def fuse_silu_gradients(graph: fx.Graph) -> None:
    """Replace ``grad * s * (1 + x * (1 - s))``, where ``s`` is ``sigmoid(x)``, by
    ``silu_backward(grad, x)``. Intermediate results of the formula stay, unused.
    """
    for node in graph.nodes:
        if node.target is aten.mul.Tensor and (operands := _operands(node)) is not None:
            node.target, node.args = aten.silu_backward.default, operands


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The gradient and ``x``, where a node is the last op of the formula."""
    by_s, factor = _two(node, aten.mul.Tensor)
    grad, s = _two(by_s, aten.mul.Tensor)
    product, one = _two(factor, aten.add.Scalar)
    x, rest = _two(product, aten.mul.Tensor)
    ones, also_s = _two(rest, aten.sub.Tensor)
    is_gate = isinstance(s, fx.Node) and s.target is aten.sigmoid.default and s.args == (x,)
    if not is_gate or s is not also_s or one != 1 or _two(ones, aten.full_like.default) != (s, 1):
        return None
    of_grad, of_x = grad.meta["val"], x.meta["val"]
    same = (of_grad.shape, of_grad.dtype) == (of_x.shape, of_x.dtype) and of_x.is_floating_point()
    return (grad, x) if same else None


def _two(node: Any, target: Any) -> tuple[Any, Any]:
    """The two arguments of a call of ``target`` that has no others."""
    is_call = isinstance(node, fx.Node) and node.target is target and not node.kwargs
    return node.args if is_call and len(node.args) == 2 else (None, None)
