"""The orders in which mesh axes are planned."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftp.planning.graph import Graph
from ftp.planning.plan import FixedLayouts
from ftp.sharding.layout import PARTIAL, Layout, R, Size, cut_shape, div, shard
from ftp.sharding.local_pieces import is_factored
from ftp.sharding.spec import PartitionSpec, Units


def spec_layout(
    spec: PartitionSpec,
    shape: Sequence[Size],
    axis: str,
    axes: Mapping[str, int],
    folded: Sequence[str],
) -> Layout | None:
    """The layout on ``axis`` of a value of local ``shape`` under ``spec``; None where a more
    major axis must be folded first.
    """
    if axis in spec.unreduced:
        return PARTIAL
    for dim in range(len(spec)):
        outer, unit, zigzag = 1, None, False
        cuts = spec.cuts(dim)
        for at, cut in enumerate(cuts):
            if cut.axis == axis:
                # A more minor axis, folded already, has cut within this axis' units. The rest is
                # cut evenly, or it did not fit before.
                unit = 1 if any(c.axis in folded for c in cuts[at + 1 :]) else cut.size
                outer *= _packs(cut)
                zigzag = cut.zigzag
                break
            if cut.axis not in folded:
                if (
                    cut.zigzag
                    or _packs(cut) > 1
                    or (cut.size > 1 and div(shape[dim], outer * axes[cut.axis] * cut.size) is None)
                ):
                    return None
                outer *= axes[cut.axis]
        if unit is not None:
            extent = div(shape[dim], outer * unit)
            return None if extent is None else shard(dim, outer, extent, unit, axes[axis], zigzag)
    return R


def axis_orders(
    graph: Graph, axes: Mapping[str, int], specs: FixedLayouts
) -> tuple[list[tuple[str, ...]], FixedLayouts]:
    """The orders of the axes, mesh order first, in which most specs are a cut of ``[outer, f,
    inner]``, and the specs to plan for.

    Some dims fit no order: a dim that does not divide and is cut by the same axes in both orders,
    packs of several sizes, units that ranks share. Such a dim is planned as whole: gathered when
    the program starts, sliced when it ends.
    """
    shaped = [(spec, node.results[0].shape) for node, spec in specs.inputs.items()]
    shaped += [(pin.spec, node.results[0].shape) for node, pin in specs.constraints.items()]
    shaped += [
        (spec, value.meta.shape)
        for spec, value in zip(specs.outputs, graph.outputs, strict=True)
        if spec is not None
    ]
    nested = [
        (spec, shape)
        for spec, shape in shaped
        if any(_is_nested(spec, d) for d in range(len(spec)))
    ]
    orders = _orders(axes)
    misfits = [
        sum(not _fits(spec, shape, order, axes) for spec, shape in nested) for order in orders
    ]
    least = min(misfits)
    best = [order for order, wrong in zip(orders, misfits, strict=True) if wrong == least]
    if not least:
        return best, specs
    order = best[0]

    def fitting(spec: PartitionSpec, shape: Sequence[Size]) -> PartitionSpec:
        if _fits(spec, shape, order, axes):
            return spec
        return PartitionSpec(
            *[None if _is_nested(spec, d) else entry for d, entry in enumerate(spec)],
            unreduced=spec.unreduced,
        )

    return [order], FixedLayouts(
        {node: fitting(spec, node.results[0].shape) for node, spec in specs.inputs.items()},
        {
            node: replace(pin, spec=fitting(pin.spec, node.results[0].shape))
            for node, pin in specs.constraints.items()
        },
        [
            spec if spec is None else fitting(spec, v.meta.shape)
            for spec, v in zip(specs.outputs, graph.outputs, strict=True)
        ],
    )


def _orders(axes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """All orders of up to four axes, mesh order first; axes of one rank keep their places."""
    if len(axes) > 4:
        return [tuple(axes)]
    found = itertools.permutations(axis for axis, n in axes.items() if n > 1)
    return [
        tuple(next(turn) if n > 1 else axis for axis, n in axes.items())
        for turn in map(iter, found)
    ]


def _packs(cut: Units) -> int:
    return cut.pack if isinstance(cut.pack, int) else len(cut.pack)


def _is_nested(spec: PartitionSpec, dim: int) -> bool:
    return len(spec.cuts(dim)) > 1 or not all(cut.is_plain for cut in spec.cuts(dim))


def _fits(
    spec: PartitionSpec, shape: Sequence[Size], order: Sequence[str], axes: Mapping[str, int]
) -> bool:
    if not all(
        isinstance(size, int) and is_factored(spec, dim, size, dict(axes))
        for dim, size in enumerate(shape)
    ):
        return False
    local = tuple(shape)
    for at, name in enumerate(order):
        layout = spec_layout(spec, local, name, axes, order[:at])
        if layout is None:
            return False
        local = cut_shape(local, layout, name, axes[name])
    return True
