"""One mesh axis of a program whose parameters' layouts are open: what is fixed on it, and what it
may cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftp.dataclass import dataclass
from ftp.planning.axis_order import spec_layout
from ftp.planning.from_fx import constraints, decompose
from ftp.planning.graph import Node, Value
from ftp.planning.reachable_cuts import Reach, reach
from ftp.searching.open_layouts import is_packed, is_scale, open_layouts
from ftp.searching.opened import Opened
from ftp.sharding.layout import Layout, R
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class OpenAxis:
    """One axis of a program with open parameters.

    Attributes:
        reach: the cuts that the axis may make.
        from_batch: on a data axis, the cuts that the batch's specs lead to.
        pinned: the layouts that are fixed: of inputs and constraints.
        cuts: per open parameter, the cuts that it may have.
    """

    reach: Reach
    from_batch: Reach
    pinned: dict[Node, Layout]
    cuts: dict[Node, Sequence[Layout]]


def open_axis(
    net: Opened,
    axis: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    is_data: bool,
    forced: Mapping[str, Layout | None] | None = None,
) -> OpenAxis:
    """The axis of a program, after the axes that are ``folded``.

    Args:
        forced: the layouts, by pattern, of parameters that are not open; None: whole.
    """
    n = axes[axis]
    pinned = _pinned(net, axis, folded, axes, forced or {})
    constrained = [
        (value, layout)
        for node, layout in pinned.items()
        if node.kind == "constrain"
        for value in (Value(node), node.operands[0])
    ]
    fixed = [(Value(node), layout) for node, layout in pinned.items()] + constrained
    free = {node: net.patterns[node] for node in net.params if node not in pinned}
    cuts = {p: open_layouts(net, p, n, is_data) for p in dict.fromkeys(free.values())}
    opened = [(Value(node), cut) for node, p in free.items() for cut in cuts[p]]
    found, from_batch = reach(net.graph, axis, n, fixed + opened, pinned), Reach()
    if is_data:
        of_batch = [(Value(node), pinned[node]) for node in net.batch]
        from_batch = reach(net.graph, axis, n, of_batch + constrained, pinned)
    else:
        _keep_scaled_dims_whole(net, axis, n, pinned, found)
        for pattern in cuts:
            reached = found.layouts.get(Value(net.members(pattern)[0]), ())
            packs = [c for c in net.packs.get((axis, pattern), ()) if c in reached]
            cuts[pattern] = [*cuts[pattern], *packs]
    return OpenAxis(found, from_batch, pinned, {node: cuts[p] for node, p in free.items()})


def _pinned(
    net: Opened,
    axis: str,
    folded: Sequence[str],
    axes: Mapping[str, int],
    forced: Mapping[str, Layout | None],
) -> dict[Node, Layout]:
    """The fixed layouts: of the batch, of forced parameters, of constraints and of constants."""

    def layout(node: Node, spec: PartitionSpec) -> Layout:
        return spec_layout(spec, node.shape(), axis, axes, folded) or R

    pins = constraints(net.graph).items()
    known = {
        **{node: layout(node, spec) for node, spec in net.batch.items()},
        **{n: forced[p] or R for n in net.params if (p := net.patterns[n]) in forced},
        **{node: layout(node, pin.spec) for node, pin in pins if pin.holds(axis)},
    }
    constants = [n for n in net.graph.inputs if n not in known and n not in net.patterns]
    return known | dict.fromkeys(constants, R)


def _keep_scaled_dims_whole(
    net: Opened, axis: str, n: int, pinned: Mapping[Node, Layout], found: Reach
) -> None:
    """Take from ``found`` the cuts of dims that norms scale, the features between blocks: cutting
    them is another kind of plan, with more expensive collectives.
    """
    scales = [node for node in net.params if is_scale(net, node) and node not in pinned]
    of_scales = [(Value(node), Layout("S", 0)) for node in scales]
    whole = reach(net.graph, axis, n, of_scales, pinned).cuts
    found.cuts = {
        node: [cut for cut in cuts if cut not in whole.get(node, ())]
        for node, cuts in found.cuts.items()
    }


def on_primitives(net: Opened, axes: Mapping[str, int], data_axes: Sequence[str]) -> Opened:
    """The program with ops replaced by primitives if an axis may cut a dim that they keep whole,
    and with the cuts of packed tensors.
    """
    while blocked := _blocked(net, axes, data_axes):
        rewrite = decompose(net.graph, blocked)
        if rewrite[0] is net.graph:
            break
        net = net.after(rewrite)
    return replace(net, packs=_packs(net, axes, data_axes))


def _blocked(net: Opened, axes: Mapping[str, int], data_axes: Sequence[str]) -> list[Node]:
    """The ops that keep a dim whole which an axis may cut, and whose primitives do not."""
    found: dict[Node, None] = {}
    for at, axis in enumerate(axes):
        if axes[axis] > 1:
            is_data = axis in data_axes
            opened = open_axis(net, axis, list(axes)[:at], axes, is_data)
            found.update(dict.fromkeys((opened.from_batch if is_data else opened.reach).blocked))
    return [node for node in found if node.kind == "op" and node.rule.decompose]


def _packs(
    net: Opened, axes: Mapping[str, int], data_axes: Sequence[str]
) -> dict[tuple[str, str], list[Layout]]:
    """Per axis and pattern the packed cuts that views and matmuls ask for if no other axis cuts
    anything: an axis that cuts within another's shards would ask for packs that no tensor has.
    """
    found: dict[tuple[str, str], list[Layout]] = {}
    for axis, n in axes.items():
        if n > 1 and axis not in data_axes:
            reached = open_axis(net, axis, (), axes, False).reach.layouts
            for pattern in dict.fromkeys(net.patterns.values()):
                member = net.members(pattern)[0]
                layouts = [c for c in reached.get(Value(member), ()) if is_packed(c, member, n)]
                if layouts:
                    found[axis, pattern] = layouts
    return found
