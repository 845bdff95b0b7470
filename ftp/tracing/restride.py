"""``as_strided`` over all of a tensor's memory, as permutations and a reshape, which have
sharding rules.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def without_strides(graph: fx.Graph) -> None:
    """Replace each ``as_strided``, and each scatter of one, that reads or writes all of a dense
    tensor exactly once.

    Pooling of tensors in channels-last memory and its gradient are examples. An ``as_strided`` that
    reads a part of its tensor, or an element twice, stays.
    """
    for node in list(graph.nodes):
        if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
            with graph.inserting_before(node):
                value = _as_views(graph, node)
            if value is not None:
                node.replace_all_uses_with(value)
                graph.erase_node(node)


def _as_views(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    arguments: Any = node.args
    of, *rest = arguments
    source = rest.pop(0) if node.target is aten.as_strided_scatter.default else None
    size, stride, *offset = rest
    x = of.meta["val"]
    held, seen = memory_order(x.shape, x.stride()), memory_order(size, stride)
    if held is None or seen is None or math.prod(size) != x.numel():
        return None
    if offset and offset[0] not in (None, x.storage_offset()):
        return None
    if source is None:
        return _laid_out(graph, of, held, size, seen, node)
    return _laid_out(graph, source, seen, x.shape, held, node)


def _laid_out(
    graph: fx.Graph,
    value: Any,
    order: Sequence[int],
    size: Any,
    wanted: Sequence[int],
    like: fx.Node,
) -> fx.Node:
    """``value``, read in the ``order`` of its dims, as a tensor of ``size`` whose dims are in
    ``wanted`` order.
    """

    def call(target: Callable[..., Any], node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, (node, *args), kwargs)
        made.meta = {**like.meta, "val": target(node.meta["val"], *args, **kwargs)}
        return made

    node = call(aten.permute.default, value, list(order))
    if not node.meta["val"].is_contiguous():
        node = call(aten.clone.default, node, memory_format=torch.contiguous_format)
    node = call(aten.view.default, node, [int(size[d]) for d in wanted])
    return call(aten.permute.default, node, [wanted.index(d) for d in range(len(wanted))])


def memory_order(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The dims from the slowest to the fastest if the strides are those of a permuted contiguous
    tensor; else None.

    >>> memory_order((4, 8, 5, 5), (200, 1, 40, 8)), memory_order((3, 3), (1, 1))
    ([0, 2, 3, 1], None)
    """
    order = sorted(range(len(size)), key=lambda d: (size[d] == 1, -stride[d], d))
    step = 1
    for d in reversed(order):
        if size[d] != 1:
            if stride[d] != step:
                return None
            step *= size[d]
    return order
