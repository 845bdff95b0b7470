"""The layouts that a search leaves open: the cuts that a mesh axis may make in the parameters of
each pattern, and the cuts that these reach.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftp.planning.axis_order import spec_layout
from ftp.planning.from_fx import constraints, decompose
from ftp.planning.graph import Node, Value, unchanged
from ftp.planning.reachable_cuts import Reach, factor_of, layout_of, reach
from ftp.rules.op_kinds import VIEWS, is_matmul
from ftp.searching.opened import Opened
from ftp.sharding.layout import Layout, R, is_even, nominal, shard


def on_primitives(net: Opened, axes: Mapping[str, int], data_axes: Sequence[str]) -> Opened:
    """The program with ops replaced by primitives if an axis may cut a dim that they keep whole."""
    while True:
        blocked: dict[Node, None] = {}
        for at, axis in enumerate(axes):
            if axes[axis] > 1:
                found, from_batch, _, _ = reaches(
                    net, axis, list(axes)[:at], axes, axis in data_axes, {}
                )
                reached = from_batch if axis in data_axes else found
                blocked.update(
                    dict.fromkeys(
                        node
                        for node in reached.blocked
                        if node.kind == "op" and node.rule.decompose
                    )
                )
        rewrite = decompose(net.graph, blocked) if blocked else unchanged(net.graph)
        if rewrite[0] is net.graph:
            return replace(net, packs=_packs(net, axes, data_axes))
        net = net.after(rewrite)


def open_layouts(net: Opened, pattern: str, n: int, is_data: bool) -> list[Layout]:
    """The cuts that an axis may make in the parameters of a pattern: of dims that divide, in whole
    heads if they make heads; none for a single vector.

    On a data axis shards are gathered before they are used, so the first dim suffices. Networks do
    not consider cuts of fewer heads than ranks (see `shared_heads`).
    """
    members = net.members(pattern)
    ndim = members[0].results[0].ndim
    if any(m.results[0].ndim != ndim for m in members):
        return []
    even = [Layout("S", d) for d in range(ndim) if all(is_even(m.shape()[d], n) for m in members)]
    if is_data:
        return even[:1]
    if _is_scale(net, members[0]):
        return []
    found = []
    for d in range(ndim):
        units = {unit_of(Value(m), Layout("S", d), n, net.users) for m in members}
        sizes = {m.shape()[d] for m in members}
        if units == {1}:
            found += [layout for layout in even if layout.dim == d]
        elif (
            len(units) == len(sizes) == 1
            and isinstance(size := sizes.pop(), int)
            and size // (unit := units.pop()) > n
        ):
            found.append(shard(d, 1, size // unit, unit, n))
    return found


def shared_heads(net: Opened, pattern: str, n: int) -> Layout | None:
    """The cut of a pattern in whole heads that are fewer than the ranks: adjacent ranks hold the
    same head, and the weight is gathered where it is used.
    """
    members = net.members(pattern)
    if any(m.results[0].ndim != members[0].results[0].ndim for m in members):
        return None
    for d in range(members[0].results[0].ndim):
        heads = set()
        for m in members:
            unit, size = unit_of(Value(m), Layout("S", d), n, net.users), m.shape()[d]
            heads.add((unit, size // unit if isinstance(size, int) else 0))
        unit, count = heads.pop()
        if not heads and unit > 1 and 1 < count < n and n % count == 0:
            return Layout("S", d, 1, unit)
    return None


def unit_of(
    value: Value,
    layout: Layout,
    n: int,
    users: Mapping[Value, Sequence[tuple[Node, int]]],
    is_matmul_done: bool = False,
) -> int:
    """The number of elements of a dim that must stay together: more than one if a view after the
    parameter's matmul does not allow the cut.
    """
    for user, slot in users.get(value, ()):
        is_next = not is_matmul_done and is_matmul(user.target)
        if not is_next and user.target not in VIEWS and user.kind != "constrain":
            continue
        cut = factor_of(user.rule.operands[slot], user.sizes, layout, n)
        if cut is None:
            return math.prod(
                nominal(user.sizes[f]) for f in user.rule.operands[slot][layout.dim][1:]
            )
        there = layout_of(user.rule.results[0], user.sizes, cut, n)
        if (
            there.kind == "S"
            and (unit := unit_of(Value(user), there, n, users, is_matmul_done or is_next)) > 1
        ):
            return unit
    return 1


def _is_scale(net: Opened, node: Node) -> bool:
    """Whether a parameter is a vector without a matrix, such as a norm's scale."""
    module = net.patterns[node].rpartition(".")[0]
    return node.results[0].ndim == 1 and not any(
        other.results[0].ndim > 1 and net.patterns[other].rpartition(".")[0] == module
        for other in net.params
    )


def reaches(
    net: Opened,
    axis: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    is_data: bool,
    forced: Mapping[str, Layout | None],
) -> tuple[Reach, Reach, dict[Node, Layout], dict[Node, Sequence[Layout]]]:
    """Of an axis: the cuts that it may make, the cuts that the batch's specs lead to, the fixed
    layouts, and the layouts that parameters may have.
    """
    n = axes[axis]
    pinned = {
        node: spec_layout(spec, node.shape(), axis, axes, folded) or R
        for node, spec in net.batch.items()
    }
    pinned |= {
        node: forced[net.patterns[node]] or R for node in net.params if net.patterns[node] in forced
    }
    for node, pin in constraints(net.graph).items():
        if pin.holds(axis):
            pinned[node] = spec_layout(pin.spec, node.shape(), axis, axes, folded) or R
    pinned |= {
        node: R for node in net.graph.inputs if node not in pinned and node not in net.patterns
    }
    constrained = [
        (v, pinned[node])
        for node in pinned
        if node.kind == "constrain"
        for v in (Value(node), node.operands[0])
    ]
    of_batch = [(Value(node), pinned[node]) for node in net.batch] + constrained
    fixed = [(Value(node), layout) for node, layout in pinned.items()]
    free = {node: net.patterns[node] for node in net.params if node not in pinned}
    cuts = {
        pattern: open_layouts(net, pattern, n, is_data) for pattern in dict.fromkeys(free.values())
    }
    found = reach(
        net.graph,
        axis,
        n,
        fixed + constrained + [(Value(node), c) for node, p in free.items() for c in cuts[p]],
        pinned,
    )
    if not is_data:
        # Values that norms scale, the features between blocks, stay whole: cutting them is another
        # kind of plan, with more expensive collectives.
        scales = [node for node in net.params if _is_scale(net, node) and node not in pinned]
        whole = reach(
            net.graph, axis, n, [(Value(node), Layout("S", 0)) for node in scales], pinned
        ).cuts
        found.cuts = {
            node: [cut for cut in cuts if cut not in whole.get(node, ())]
            for node, cuts in found.cuts.items()
        }
        # Several tensors packed along a dim are cut like their users.
        for pattern in cuts:
            reached = found.layouts.get(Value(net.members(pattern)[0]), ())
            packs = [c for c in net.packs.get((axis, pattern), ()) if c in reached]
            cuts[pattern] = [*cuts[pattern], *packs]
    return (
        found,
        reach(net.graph, axis, n, of_batch, pinned) if is_data else Reach(),
        pinned,
        {node: cuts[p] for node, p in free.items()},
    )


def _packs(
    net: Opened, axes: Mapping[str, int], data_axes: Sequence[str]
) -> dict[tuple[str, str], list[Layout]]:
    """Per axis and pattern the packed cuts that views and matmuls ask for if no other axis cuts
    anything: an axis that cuts within another's shards would ask for packs that no tensor has.
    """
    found: dict[tuple[str, str], list[Layout]] = {}
    for axis, n in axes.items():
        if n > 1 and axis not in data_axes:
            reached = reaches(net, axis, (), axes, False, {})[0].layouts
            for pattern in dict.fromkeys(net.patterns.values()):
                member = net.members(pattern)[0]
                layouts = [c for c in reached.get(Value(member), ()) if is_packed(c, member, n)]
                if layouts:
                    found[axis, pattern] = layouts
    return found


def is_packed(layout: Layout, node: Node, n: int) -> bool:
    size = node.shape()[layout.dim]
    if not all(isinstance(x, int) for x in (size, layout.outer, layout.inner)) or layout.outer == 1:
        return False
    return size % (n * layout.outer * layout.inner) == 0  # type: ignore[operator]
