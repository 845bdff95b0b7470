"""Specs of ``local``: which mesh axes they may name, and how they cut dims in equal parts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ftp.errors import SpecError, join_failures
from ftp.per_rank.sizes import meta, shape_of
from ftp.per_rank.uneven import uneven_cut
from ftp.sharding.spec import PartitionSpec, Units
from ftp.source import at_line


def own_axes(names: Sequence[str] | None, axes: Mapping[str, int]) -> dict[str, int]:
    """The axes along which the code is one rank's, in mesh order."""
    if names is None:
        return dict(axes)
    names = (names,) if isinstance(names, str) else tuple(names)
    known = ", ".join(f"{a!r} (size {n})" for a, n in axes.items())
    if not names:
        raise SpecError(f"{at_line()}ftp.local has axes=(): name at least one of {known}.")
    if unknown := [a for a in names if a not in axes]:
        raise SpecError(
            f"{at_line()}ftp.local has axes={names!r}, but the mesh has {known}: no axis"
            f" {unknown[0]!r}."
        )
    return {a: n for a, n in axes.items() if a in names}


def check_own(
    specs: Sequence[PartitionSpec], names: Sequence[str], axes: Mapping[str, int]
) -> None:
    """Refuse specs of an axis along which the code is not one rank's."""
    if failures := [
        f"{name} has spec {spec}, but axes={tuple(axes)!r} leaves {axis!r} to the planner. Specs of"
        f" ftp.local name the axes of its own code; put {axis!r} in the specs of the step, or in"
        " ftp.constrain."
        for name, spec in zip(names, specs, strict=True)
        for axis in spec.axes
        if axis not in axes
    ]:
        raise SpecError(at_line() + join_failures(failures))


def uneven(leaf: Any, spec: PartitionSpec, axes: Mapping[str, int], name: str) -> list[str]:
    if not isinstance(leaf, Tensor):
        return []
    failures, cut = [], uneven_cut(shape_of(leaf), spec, axes)
    for d, size in enumerate(shape_of(leaf)):
        cuts = spec.cuts(d)
        unit = math.lcm(*(c.size * (c.pack if isinstance(c.pack, int) else 1) for c in cuts))
        n = math.prod(axes[c.axis] for c in cuts)
        failures += packed(spec, d, name)
        if size % (n * unit) and (cut is None or cut.dim != d):
            units = f" in units of {unit}" if unit > 1 else ""
            failures.append(
                f"{name} of shape {tuple(leaf.shape)} has spec {spec}, which cuts dim {d} of size"
                f" {size} in {n}{units}: the parts are not equal. In ftp.local one dim of a"
                " tensor may have such parts, over one axis: pad the dim, or leave it whole."
            )
    return failures


def packed(spec: PartitionSpec, dim: int, name: str) -> list[str]:
    cuts = spec.cuts(dim)
    if any(c.zigzag for c in cuts):
        return [
            f"{name} has spec {spec}; per-rank code takes one chunk of a dim, and a zigzag is two."
            " Cut it only by the axis."
        ]
    if all(c.pack == 1 for c in cuts) or (len(cuts) == 1 and isinstance(cuts[0].pack, int)):
        return []
    return [
        f"{name} has spec {spec}; in ftp.local a dim of packs is sharded over one axis, and its"
        " packs are equal. Split it before."
    ]


def local_part(leaf: Tensor, spec: PartitionSpec, axes: Mapping[str, int]) -> Tensor:
    return meta(
        [
            -(-s // math.prod(axes[c.axis] for c in spec.cuts(d)))
            for d, s in enumerate(shape_of(leaf))
        ],
        leaf.dtype,
    )


def of_one(spec: PartitionSpec) -> PartitionSpec:
    """The spec without unit sizes, which change nothing where shards are equal."""
    return PartitionSpec(
        *(
            tuple(Units(c.axis, 1, c.pack) if c.pack != 1 else c.axis for c in spec.cuts(d)) or None
            for d in range(len(spec))
        )
    )


def whole_units(spec: PartitionSpec) -> PartitionSpec:
    """The spec without units, to check against a local shape."""
    if spec.entries[:1] == (...,):
        return spec
    entries = (tuple(c.axis for c in spec.cuts(d)) or None for d in range(len(spec)))
    return PartitionSpec(*entries, unreduced=spec.unreduced)
