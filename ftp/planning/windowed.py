"""Ops along a dim that an axis cuts, on one window of the dim for each rank."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ftp.planning.algebra import reverse_scans
from ftp.planning.graph import Graph, Node, Rewrite, Value
from ftp.rules.call import replaced, tensors
from ftp.rules.windows import OVERLAYS, SCANS, WINDOWED, FarApart, by_windows

_OF_SCANS = {*SCANS, torch.ops.aten.flip.default}
Blocked = Mapping[int, Mapping[Node, int | None]]


def in_windows(graph: Graph, blocked: Blocked, decompose: Callable[..., Rewrite]) -> Rewrite:
    """The graph with ops replaced by ops on windows, where ranks then exchange less than they have;
    where there are some, with scans between flips replaced by reverse scans.

    Args:
        blocked: by a number of ranks, the nodes that keep whole what they may cut, and the dim of
            each one's windows (`window_of`).
    """
    if any(node.target in _OF_SCANS for nodes in blocked.values() for node in nodes):
        rewrite = reverse_scans(graph)
        if rewrite[0] is not graph:
            return rewrite
    by: dict[Node, Callable[..., Any]] = {}
    for n, nodes in blocked.items():
        for node, dim in nodes.items():
            if dim is not None:
                by.setdefault(node, by_windows(node.target, n, dim))
    return decompose(graph, by=by)


def window_of(n: int, node: Node, factor: str) -> int | None:
    """The dim along which an op that keeps a factor whole may be one on windows; None: none."""
    dim = _dim_of(node, factor) if node.target in WINDOWED else None
    return dim if dim is not None and fits(node, n, dim) else None


def _dim_of(node: Node, factor: str) -> int | None:
    """The dim of the operands that has a factor; None for one of another kind, as a kernel's."""
    alike = None if node.target in OVERLAYS else 1
    for dims in (*node.rule.operands[:alike], *node.rule.results[:1]):
        for at, dim in enumerate(dims):
            if factor in dim:
                return at
    return None


def fits(node: Node, n: int, dim: int) -> bool:
    """Whether the op has windows, of which each rank holds the most itself. Numbers that are no
    floats take few bytes to gather; but scans of them, such as positions, take long. Of one element
    for each rank, all are gathered in the time of one.
    """
    metas = [*(v.meta for v in node.operands), *node.results]
    given, first = (node.args, dict(node.kwargs)), node.operands[0].meta.dtype
    numbers = [*tensors(given, (int, float)), *(s for m in metas for s in m.shape)]
    if not all(type(x) in (int, float, bool) for x in numbers):
        return False  # dynamic sizes
    if all(m.shape[dim] <= n for m in (metas[0], node.results[0]) if dim < m.ndim):
        return False
    if not (first.is_floating_point or first.is_complex or node.target in SCANS):
        return False

    def like(value: Value) -> Any:
        return torch.empty(value.meta.shape, dtype=value.meta.dtype, device="meta")

    args, kwargs = (replaced(x, Value, like) for x in given)
    try:
        by_windows(node.target, n, dim)(*args, **kwargs)
    except FarApart:
        return False
    return True
