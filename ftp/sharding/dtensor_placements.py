"""DTensor's placements as specs, and specs as placements. Each result is checked: every rank must
hold the same elements under both.
"""

import math
from collections.abc import Callable, Sequence
from itertools import permutations, product
from typing import Any

import torch

from ftp.errors import InputError, SpecError, join_failures
from ftp.sharding.local_pieces import (
    Interval,
    Piece,
    chunk,
    joined,
    local_pieces,
    pieces_within,
)
from ftp.sharding.mesh import Mesh
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import P, PartitionSpec, Units

_Placement: Any = torch._C._distributed.Placement  # type: ignore[attr-defined]

# The cuts of a dim in the mesh's order: axis, number of ranks, split factor (1 for a plain Shard).
_Cuts = list[tuple[str, int, int]]


def is_placements(value: Any) -> bool:
    """Whether a value is a sequence of DTensor placements."""
    return (
        isinstance(value, tuple | list)
        and bool(value)
        and all(isinstance(v, _Placement) for v in value)
    )


def spec_of_placements(
    placements: Sequence[Any], mesh: Mesh, shape: Sequence[int], where: str
) -> P:
    """The spec that shards a tensor of global ``shape`` like these DTensor placements, one per axis
    of ``mesh``; dims may be negative.

    Raises:
        SpecError: pending sums, and cuts that no spec states.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> from ftp.sharding.make_mesh import simulated_mesh
    >>> from ftp.sharding.mesh import resolve
    >>> mesh = resolve(simulated_mesh((2, 2), ("dp", "tp")))
    >>> spec_of_placements((Shard(-1), Replicate()), mesh, (4, 6), "w")
    P(None, 'dp')
    """
    if len(placements) != len(mesh.axes):
        raise SpecError(
            f"{where} has {len(placements)} placements, but the mesh is {mesh}. Give one for each"
            " axis."
        )
    per_dim: dict[int, _Cuts] = {}
    for placement, (axis, n) in zip(placements, mesh.axes.items(), strict=True):
        if placement.is_partial():
            raise SpecError(
                f"{where} is {placement!r} over {axis!r}, a pending sum, which no spec states."
                " Reduce it first: redistribute it to Replicate() or Shard(dim)."
            )
        if placement.is_replicate():
            continue
        if not -len(shape) <= placement.dim < len(shape):
            raise SpecError(
                f"{where} is {placement!r} over {axis!r}, but its shape {tuple(shape)} has"
                f" {len(shape)} dims."
            )
        factor = getattr(placement, "split_factor", 1)
        per_dim.setdefault(placement.dim % len(shape), []).append((axis, n, int(factor)))
    entries: list[Any] = [None] * len(shape)
    for dim, cuts in per_dim.items():
        found = _entry_of(cuts, int(shape[dim]), mesh)
        if found is None:
            raise SpecError(
                f"{where} is {tuple(placements)}: no spec cuts dim {dim} of size {shape[dim]} like"
                " this."
                " Redistribute it to plain Shard placements."
            )
        entries[dim] = found
    return P(*entries)


def placements_of_spec(spec: P, mesh: Mesh, shape: Sequence[int], where: str) -> tuple[Any, ...]:
    """The DTensor placements that shard a tensor of global ``shape`` like ``spec``.

    Raises:
        SpecError: there are none, as for uneven shards of two axes in some orders.

    >>> from ftp.sharding.make_mesh import simulated_mesh
    >>> from ftp.sharding.mesh import resolve
    >>> mesh = resolve(simulated_mesh((2, 2), ("dp", "tp")))
    >>> placements_of_spec(P(("tp", "dp")), mesh, (8,), "w")
    (_StridedShard(dim=0, sf=2), Shard(dim=0))
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    spec = spec.at_rank(len(shape))
    position = {axis: i for i, axis in enumerate(mesh.axis_names)}
    placements: list[Any] = [Replicate() for _ in mesh.axis_names]
    for dim in range(len(spec)):
        cuts: _Cuts = []
        order = spec.cuts(dim)
        for i, cut in enumerate(order):
            later = (c.axis for c in order[:i] if position[c.axis] > position[cut.axis])
            packs = cut.pack if isinstance(cut.pack, int) else len(cut.pack)
            factor = packs * math.prod(mesh.axes[axis] for axis in later)
            cuts.append((cut.axis, mesh.axes[cut.axis], factor))
            placements[position[cut.axis]] = (
                Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
            )
        cuts.sort(key=lambda c: position[c[0]])
        if cuts and (at := _differs(cuts, spec, dim, int(shape[dim]), mesh)) is not None:
            raise SpecError(
                f"{where}, of spec {spec} and shape {tuple(shape)}: DTensor has no placements for"
                " it; the nearest ones,"
                f" {tuple(placements)}, differ on rank {mesh.ranks[at] if mesh.ranks else at}."
                " Pad the dim to a multiple of the ranks, or ftp.reshard it to a spec of one axis"
                " a dim."
            )
    return tuple(placements)


def specs_of_any(
    specs: Any,
    tree: Any,
    mesh: Mesh,
    where: str = "tree",
    of: Callable[..., PartitionSpec] = spec_of_placements,
) -> Any:
    """A spec tree in which every sequence of placements (for a leaf, or all leaves below) is
    replaced by specs: ``of`` it, as of `spec_of_placements`.
    """

    def below(specs: Any, tree: Any, key: Any) -> Any:
        return specs_of_any(specs, tree, mesh, f"{where}[{key!r}]", of)

    if is_placements(specs):
        if isinstance(tree, torch.Tensor):
            return of(specs, mesh, tree.shape, where)
        if isinstance(tree, dict):
            return {k: below(specs, v, k) for k, v in tree.items()}
        if isinstance(tree, tuple | list) and type(tree) in (tuple, list):
            return type(tree)(below(specs, v, i) for i, v in enumerate(tree))
        if tree is None or not hasattr(tree, "__dict__"):
            return None if tree is None else P()
        raise SpecError(
            f"{where} is {kind_of(tree)}; placements are given to a tensor, or to a dict, list or"
            " tuple of them."
        )
    if type(specs) is dict and isinstance(tree, dict):
        return {k: below(s, tree[k], k) if k in tree else s for k, s in specs.items()}
    if type(specs) in (tuple, list) and isinstance(tree, tuple | list) and len(specs) == len(tree):
        pairs = enumerate(zip(specs, tree, strict=True))
        return type(specs)(below(s, v, i) for i, (s, v) in pairs)
    return specs


def _entry_of(cuts: _Cuts, size: int, mesh: Mesh) -> Any:
    """The entry of a spec that cuts a dim like DTensor; None if there is none."""
    position = {axis: i for i, (axis, _, _) in enumerate(cuts)}
    candidates = []
    for order in permutations(cuts):
        packs = []
        for i, (axis, _, factor) in enumerate(order):
            for before, n, _ in order[:i]:
                factor, rest = (
                    divmod(factor, n) if position[before] > position[axis] else (factor, 0)
                )
                if rest:
                    break
            else:
                packs.append(factor)
                continue
            break
        if len(packs) == len(order) and all(packs):
            candidates.append(
                (
                    sum(pack > 1 for pack in packs),
                    tuple(Units(c[0], 1, pack) for c, pack in zip(order, packs, strict=True)),
                )
            )
    for _, entry in sorted(candidates, key=lambda c: c[0]):
        unit_packs: list[Any] = [unit.pack for unit in entry]
        if any(pack != 1 and size % int(pack) for pack in unit_packs):
            continue
        entry = tuple(unit.axis if unit.is_plain else unit for unit in entry)
        spec = P(entry)
        if _differs(cuts, spec, 0, size, mesh) is None:
            return spec[0]
    return None


def _differs(cuts: _Cuts, spec: P, dim: int, size: int, mesh: Mesh) -> int | None:
    """The position on the mesh of the first rank whose part of a dim differs between DTensor and
    the spec; None if there is none.
    """
    axes = [axis for axis, _, _ in cuts]
    for at in product(*(range(n) for _, n, _ in cuts)):
        coordinate = {**dict.fromkeys(mesh.axes, 0), **dict(zip(axes, at, strict=True))}
        ours = local_pieces(P(spec[dim]), (size,), mesh.axes, coordinate)[0]
        if _intervals(ours) != _intervals(_dtensor_pieces(cuts, at, size)):
            return mesh.coordinates().index(coordinate)
    return None


def _dtensor_pieces(cuts: _Cuts, at: Sequence[int], size: int) -> list[Piece]:
    """The pieces of a dim that a rank holds in DTensor: the dim is cut axis by axis in the mesh's
    order, each of ``factor`` chunks by itself.
    """
    held = [(0, size)]
    for (_, n, factor), index in zip(cuts, at, strict=True):
        length = sum(b - a for a, b in held)
        found: list[Piece] = []
        for part in range(factor):
            outer, long = chunk(length, factor, part)
            start, short = chunk(long, n, index)
            found += pieces_within(held, outer + start, outer + start + short)
        held = found
    return held


def _intervals(pieces: Sequence[Piece]) -> list[Interval]:
    return joined((start, stop - start) for start, stop in pieces)


def is_dtensor(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) is not torch.Tensor
        and hasattr(value, "device_mesh")
        and hasattr(value, "placements")
    )


def check_plain(leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Raises for DTensors: ftp works on a rank's plain shard."""
    found = [name for leaf, name in zip(leaves, names, strict=True) if is_dtensor(leaf)]
    if found:
        raise InputError(
            join_failures(
                f"{name} is a DTensor, a shard already. Take its shard with ftp.from_dtensor(tree)."
                for name in found
            )
        )
