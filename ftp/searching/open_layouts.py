"""The cuts that a search may make in a pattern's parameters on one mesh axis."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftp.planning.graph import Node, Value
from ftp.planning.reachable_cuts import factor_of, layout_of
from ftp.rules.op_kinds import VIEWS, is_matmul
from ftp.searching.opened import Opened
from ftp.sharding.layout import Layout, is_even, nominal, shard


def open_layouts(net: Opened, pattern: str, n: int, is_data: bool) -> list[Layout]:
    """The cuts of dims that divide, in whole heads if the parameters make heads; none for a single
    vector.

    On a data axis shards are gathered before they are used, so the first dim suffices. Networks do
    not consider cuts of fewer heads than ranks (see `shared_heads`).
    """
    members = _of_equal_ndim(net, pattern)
    dims = range(members[0].results[0].ndim if members else 0)
    even = {d: Layout("S", d) for d in dims if all(is_even(m.shape()[d], n) for m in members)}
    if is_data:
        return list(even.values())[:1]
    if not members or is_scale(net, members[0]):
        return []
    found = []
    for d in dims:
        if all(_unit(net, m, d, n) == 1 for m in members):
            found += [even[d]] if d in even else []
        elif (heads := _heads(net, members, d, n)) is not None and heads.count > n:
            found.append(shard(d, 1, heads.count, heads.size, n))
    return found


def shared_heads(net: Opened, pattern: str, n: int) -> Layout | None:
    """The cut of a pattern in whole heads that are fewer than the ranks: adjacent ranks hold the
    same head, and the weight is gathered where it is used.
    """
    members = _of_equal_ndim(net, pattern)
    for d in range(members[0].results[0].ndim if members else 0):
        heads = _heads(net, members, d, n)
        if heads is not None and heads.size > 1 and 1 < heads.count < n and n % heads.count == 0:
            return Layout("S", d, 1, heads.size)
    return None


def is_scale(net: Opened, node: Node) -> bool:
    """Whether a parameter is a vector without a matrix, such as a norm's scale."""
    module = net.patterns[node].rpartition(".")[0]
    return node.results[0].ndim == 1 and not any(
        other.results[0].ndim > 1 and net.patterns[other].rpartition(".")[0] == module
        for other in net.params
    )


def is_packed(layout: Layout, node: Node, n: int) -> bool:
    """Whether a layout cuts each of several tensors packed along a dim, such as q, k and v, evenly
    over ``n`` ranks.
    """
    size, outer, inner = node.shape()[layout.dim], layout.outer, layout.inner
    if not (isinstance(size, int) and isinstance(outer, int) and isinstance(inner, int)):
        return False
    return outer > 1 and size % (n * outer * inner) == 0


class _Heads(NamedTuple):
    """The heads along a dim: their number, and the elements of each, which stay together."""

    count: int
    size: int


def _heads(net: Opened, members: Sequence[Node], dim: int, n: int) -> _Heads | None:
    """The heads along a dim of a pattern's parameters; None if the parameters differ."""
    found = {(_unit(net, m, dim, n), m.shape()[dim]) for m in members}
    unit, size = found.pop()
    return None if found or not isinstance(size, int) else _Heads(size // unit, unit)


def _of_equal_ndim(net: Opened, pattern: str) -> list[Node]:
    """The parameters of a pattern; none if they differ in the number of dims."""
    members = net.members(pattern)
    return members if len({m.results[0].ndim for m in members}) == 1 else []


def _unit(net: Opened, parameter: Node, dim: int, n: int) -> int:
    """The number of elements of a parameter's dim that must stay together."""
    return _unit_of(Value(parameter), Layout("S", dim), n, net.graph.users)


def _unit_of(
    value: Value,
    layout: Layout,
    n: int,
    users: Mapping[Value, Sequence[tuple[Node, int]]],
    is_matmul_done: bool = False,
) -> int:
    """The number of elements that a cut must keep together: more than one if a view after the
    parameter's matmul does not allow the cut.
    """
    for user, slot in users.get(value, ()):
        is_next = not is_matmul_done and is_matmul(user.target)
        if not is_next and user.target not in VIEWS and user.kind != "constrain":
            continue
        dims = user.rule.operands[slot]
        cut = factor_of(dims, user.sizes, layout, n)
        if cut is None:
            return math.prod(nominal(user.sizes[f]) for f in dims[layout.dim][1:])
        there = layout_of(user.rule.results[0], user.sizes, cut, n)
        if there.kind != "S":
            continue
        unit = _unit_of(Value(user), there, n, users, is_matmul_done or is_next)
        if unit > 1:
            return unit
    return 1
