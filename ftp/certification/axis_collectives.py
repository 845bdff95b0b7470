"""Collectives over one mesh axis, on the element maps of all ranks along it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ftp.certification.element_map import (
    ElementMap,
    MeshAxis,
    concatenated_index,
    in_same_atoms,
    one_atom,
    reshape,
    zeros_like,
)
from ftp.certification.positions import Positions, overlaid
from ftp.certification.positions import is_same as is_same_positions
from ftp.certification.unsound import Unsound
from ftp.dataclass import dataclass


@dataclass(frozen=True)
class Contribution:
    """The element map of the ranks at coordinates ``at`` along an axis."""

    at: tuple[int, ...]
    held: ElementMap


def _column(parts: Sequence[Contribution], along: MeshAxis) -> ElementMap:
    """One element map for all ranks along an axis."""
    if len(parts) == 1:
        return parts[0].held
    parts = sorted(parts, key=lambda p: p.at)
    held = _with_few_holes(in_same_atoms([p.held for p in parts]), along)
    index = concatenated_index(held, along.dim, [len(p.at) for p in parts])
    order = np.argsort([at for p in parts for at in p.at]).tolist()
    if order != [*range(len(order))]:
        index = tuple(i.taken(along.dim, order) for i in index)
    return replace(held[0], index=index, is_zero=all(p.is_zero for p in held))


def _with_few_holes(held: Sequence[ElementMap], along: MeshAxis) -> Sequence[ElementMap]:
    """The maps, with holes for zeros in the dims alone along which the other ranks' parts differ:
    one hole makes a zero.
    """
    some = [p for p in held if not p.is_zero]
    if not 0 < len(some) < len(held):
        return held
    first = some[0].index
    alike = [
        not i.varies(along.dim) and all(is_same_positions(p.index[d], i) for p in some)
        for d, i in enumerate(first)
    ]
    if all(alike):
        return held
    return [
        replace(
            p, index=tuple(x if a else i for i, x, a in zip(p.index, first, alike, strict=True))
        )
        if p.is_zero
        else p
        for p in held
    ]


def _first(x: ElementMap, dim: int) -> ElementMap:
    return replace(x, index=tuple(i.within(dim, 0, 1, 1) for i in x.index))


def _is_common(parts: Sequence[Contribution], along: MeshAxis) -> bool:
    """Whether all ranks along an axis hold the same elements."""
    return len({p.held.is_zero for p in parts}) == 1 and not any(
        i.varies(along.dim) for i in _column(parts, along).index
    )


def _alike(parts: Sequence[Contribution], along: MeshAxis, what: str) -> list[Contribution]:
    """The ranks' parts of one value. Zeros of padding, all that a rank without elements sends, are
    zeros of any value.

    Args:
        what: names the collective in messages: "gathered", "exchanged".

    Raises:
        Unsound: parts of several shapes or values, or whose sum is pending over the axis.
    """
    first = next((p.held for p in parts if not p.held.is_zero), parts[0].held)
    if any(p.held.shape != first.shape for p in parts) or not first.groups:
        raise Unsound(f"ranks send parts of shapes {[p.held.shape for p in parts]}")
    zeros = zeros_like(first)
    found = [
        replace(p, held=zeros) if p.held.is_zero and p.held.value != first.value else p
        for p in parts
    ]
    if any(p.held.value != first.value for p in found) or len({p.held.pending for p in parts}) > 1:
        raise Unsound("ranks send parts of different values")
    if any(axis == along.name for axis, _ in first.pending):
        raise Unsound(f"a sum still pending over {along.name} is {what} along it")
    return found


def gather_axis(parts: Sequence[Contribution], along: MeshAxis) -> ElementMap:
    """The result of an all-gather: the parts concatenated along dim 0."""
    parts = _alike(parts, along, "gathered")
    first = parts[0].held
    if all(p.held.is_zero for p in parts) or first.is_empty:
        return zeros_like(first, (along.n * first.shape[0], *first.shape[1:]))
    x = _column(parts, along)
    if not x.index:
        _require_no_zeros(parts)
    ndim = x.lead + len(x.atoms)
    places = [x.lead if d == along.dim else d + (d >= x.lead) for d in range(ndim)]
    index = tuple(i.renamed(places, ndim + 1) for i in x.index)
    groups = (x.groups[0] + 1, *x.groups[1:])
    return replace(x, atoms=(along.n, *x.atoms), groups=groups, index=index)


def reduce_axis(parts: Sequence[Contribution], along: MeshAxis, op: str) -> ElementMap:
    """The result of a reduction: it completes a pending reduction, or adds up parts of the value
    that are padded with zeros.
    """
    first, axis = parts[0].held, along.name
    if any(p.held.shape != first.shape or p.held.value != first.value for p in parts):
        shapes = [p.held.shape for p in parts]
        raise Unsound(f"ranks send tensors of shapes {shapes} to one reduction")
    if first.is_empty:
        return replace(first, pending=first.pending - {(axis, op)})
    if (axis, op) in first.pending:
        if any(p.held.pending != first.pending for p in parts) or not _is_common(parts, along):
            raise Unsound("ranks send different parts to one reduction")
        return replace(_first(first, along.dim), pending=first.pending - {(axis, op)})
    if any(a == axis for p in parts for a, _ in p.held.pending):
        pending = dict(first.pending).get(axis, "another")
        raise Unsound(f"the reduction that is pending over {axis} is {pending}, not {op}")
    if op in ("max", "min"):
        is_other = any(p.held.is_zero or p.held.pending != first.pending for p in parts)
        if is_other or not _is_common(parts, along):
            raise Unsound(f"a {op} is taken over {axis} of different parts")
        return _first(first, along.dim)
    if op != "sum":
        raise Unsound(f"a {op} is taken over {axis} of parts of a value")
    return _joined_by_sum(parts, along)


def _joined_by_sum(parts: Sequence[Contribution], along: MeshAxis) -> ElementMap:
    """The sum of parts padded with zeros. At most one rank holds each element."""
    first, axis = parts[0].held, along.name
    bring = [p for p in parts if not p.held.is_zero]
    if not bring:
        return first
    if any(p.held.pending != bring[0].held.pending for p in bring):
        raise Unsound("ranks send different pending sums to one reduction")
    x = _column(bring, along)
    differ = [d for d, i in enumerate(x.index) if i.varies(along.dim)]
    if sum(len(p.at) for p in bring) > 1 and not differ:
        raise Unsound(f"it is summed over {axis}, along which several ranks hold the same elements")
    index = [i.within(along.dim, 0, 1, 1) for i in x.index]
    if differ:
        joined = overlaid([x.index[d] for d in differ], along.dim)
        if joined is None:
            raise Unsound(f"parts overlap in a sum over {axis}")
        for d, positions in zip(differ, joined, strict=True):
            index[d] = positions
    return replace(x, index=tuple(index))


def scatter_axis(x: ElementMap, along: MeshAxis, at: Sequence[int]) -> ElementMap:
    """Scatter ``x``, equal on all ranks of an axis: the ranks ``at`` keep their part of dim 0."""
    x = _in_parts(x, along.n)
    if x.is_zero or x.is_empty:
        return zeros_like(x, x.shape[1:])
    index = tuple(_swapped(i, along.dim, x.lead, at).without_dim(x.lead) for i in x.index)
    return replace(x, atoms=x.atoms[1:], groups=x.groups[1:], index=index)


def exchange_axis(parts: Sequence[Contribution], along: MeshAxis, at: Sequence[int]) -> ElementMap:
    """The result of an all-to-all of equal parts along dim 0, on the ranks at ``at``."""
    parts = _alike(parts, along, "exchanged")
    first = parts[0].held
    if all(p.held.is_zero for p in parts) or first.is_empty:
        return zeros_like(first)
    if not first.index:
        _require_no_zeros(parts)
    x = _column([Contribution(p.at, _in_parts(p.held, along.n)) for p in parts], along)
    index = tuple(_swapped(i, along.dim, x.lead, at) for i in x.index)
    return replace(x, groups=(x.groups[0] + x.groups[1], *x.groups[2:]), index=index)


def _require_no_zeros(parts: Sequence[Contribution]) -> None:
    """Raise Unsound if zeros are moved together with copies of a scalar. An element of a scalar has
    no position that would tell it from a zero.
    """
    if any(p.held.is_zero for p in parts):
        raise Unsound("zeros are moved with copies of a scalar")


def _in_parts(x: ElementMap, n: int) -> ElementMap:
    """Split dim 0 in ``n`` parts, a leading dim of one atom."""
    if not x.groups or x.shape[0] % n:
        raise Unsound(f"a tensor of shape {x.shape} is split for {n} ranks")
    x, _ = one_atom(reshape(x, (n, x.shape[0] // n, *x.shape[1:])), 0)
    return x


def _swapped(index: Positions, dim: int, atom: int, at: Sequence[int]) -> Positions:
    """Exchange a mesh axis with an atom in an index, and take the ranks at ``at``."""
    places = list(range(index.ndim))
    places[dim], places[atom] = atom, dim
    return index.renamed(places, index.ndim).taken(dim, at)
