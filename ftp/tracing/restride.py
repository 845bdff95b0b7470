"""Replace ``as_strided`` by permutations and a reshape, or by unfolds of a flat tensor: its strides
and offset hold on one device only, and shards and gathered values have others.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ftp.errors import TraceError
from ftp.tracing.explain_errors import located

aten = torch.ops.aten


def without_strides(graph: fx.Graph) -> None:
    """Replace each ``as_strided``, and each scatter of one, that reads or writes all of a dense
    tensor exactly once, as pooling of tensors in channels-last memory and its gradient do. One that
    reads a part, or an element twice, reads the tensor's elements in the order of its memory.
    """
    for node in list(graph.nodes):
        if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
            with graph.inserting_before(node):
                value = _as_views(graph, node) or _of_flat(graph, node)
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


def _of_flat(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The ``as_strided``, or the scatter of one, of a flat tensor: the elements of its tensor in
    the order of their memory. If that is a view of more, as a slice is, they are those of the
    tensor that it views.
    """
    arguments: Any = node.args
    of, *rest = arguments
    source = [rest.pop(0)] if node.target is aten.as_strided_scatter.default else []
    size, stride, *offset = rest
    start = offset[0] if offset and offset[0] is not None else of.meta["val"].storage_offset()
    last = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    while (order := _order_of_all(of.meta["val"], last)) is None and not source and _is_view(of):
        of = of.args[0]
    if order is None:
        raise TraceError(
            f"as_strided{located(node.meta.get('source', ''))} reads memory outside of its tensor."
            " Use slices, transpose, unfold or view of the whole tensor instead."
        )
    x = of.meta["val"]
    flat = _laid_out(graph, of, order, [x.numel()], [0], node)
    if not source:
        return _windows(graph, flat, size, stride, start, last, node)
    given = (flat, *source, size, stride, start)
    made = graph.call_function(node.target, given)  # type: ignore[arg-type]
    values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in given]
    made.meta = {**node.meta, "val": node.target(*values)}  # type: ignore[operator]
    return _laid_out(graph, made, [0], x.shape, order, node)


def _windows(
    graph: fx.Graph,
    flat: fx.Node,
    size: Sequence[int],
    stride: Sequence[int],
    start: int,
    last: int,
    like: fx.Node,
) -> fx.Node:
    """``flat.as_strided(size, stride, start)``: for each dim, windows of what all later dims span.
    The rest of a window, at the end, is one element.
    """
    if 0 in size:
        return _call(graph, like, aten.new_empty.default, flat, list(size))
    node = _call(graph, like, aten.slice.Tensor, flat, 0, start, last + 1)
    span = last + 1 - start
    for at, (n, step) in enumerate(zip(size, stride, strict=True)):
        span -= (n - 1) * step
        if n == 1 or step == 0:
            node = _call(graph, like, aten.unsqueeze.default, node, -2)
            node = _call(graph, like, aten.expand.default, node, [*size[: at + 1], span])
        else:
            node = _call(graph, like, aten.unfold.default, node, at, span, step)
    return _call(graph, like, aten.select.int, node, -1, 0)


def _order_of_all(x: torch.Tensor, last: int) -> list[int] | None:
    """The memory order of a tensor that holds all elements of its memory up to ``last``; else
    None.
    """
    holds = not x.storage_offset() and last < max(x.numel(), 1)
    return memory_order(x.shape, x.stride()) if holds else None


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.returns[0].alias_info is not None


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
    call = partial(_call, graph, like)
    node = call(aten.permute.default, value, list(order))
    if not node.meta["val"].is_contiguous():
        node = call(aten.clone.default, node, memory_format=torch.contiguous_format)
    node = call(aten.view.default, node, [int(size[d]) for d in wanted])
    return call(aten.permute.default, node, [wanted.index(d) for d in range(len(wanted))])


def _call(
    graph: fx.Graph,
    like: fx.Node,
    target: Callable[..., Any],
    node: fx.Node,
    *args: Any,
    **kwargs: Any,
) -> fx.Node:
    made = graph.call_function(target, (node, *args), kwargs)
    made.meta = {**like.meta, "val": target(node.meta["val"], *args, **kwargs)}
    return made


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
