"""Element maps: which element of the global value each local element holds, on every rank, and how
data movement changes the map.

A tensor's dims are split into *atoms* where a reshape split them. For each dim of the global value
an array, the index, holds the position of every local element along that dim, or -1 where the
element is a zero of padding. The index has a dim for each mesh axis, then one for each atom; a dim
along which nothing changes has size 1. So data movement is followed exactly, on all ranks at once,
and no layout is assumed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ftp.certification.unsound import Unsound

Index = np.ndarray
Position = int | Index  # one for all ranks, or an array with a dim for each mesh axis
Pending = frozenset[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class ElementMap:
    """Which elements of a value a tensor holds.

    Attributes:
        value: name of the global value.
        atoms: sizes of the atoms, in memory order.
        groups: how many atoms make up each dim of the tensor.
        index: per dim of the value, the elements' positions along it.
        pending: ``(axis, op)`` of pending reductions.
        is_zero: whether the tensor is zero throughout.
    """

    value: str
    atoms: tuple[int, ...]
    groups: tuple[int, ...]
    index: tuple[Index, ...]
    pending: Pending = frozenset()
    is_zero: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape, at = [], 0
        for count in self.groups:
            shape.append(math.prod(self.atoms[at : at + count]))
            at += count
        return tuple(shape)

    @property
    def is_empty(self) -> bool:
        return 0 in self.atoms

    @property
    def lead(self) -> int:
        """How many leading dims of the index are mesh axes."""
        return self.index[0].ndim - len(self.atoms) if self.index else 0


@dataclass(frozen=True)
class MeshAxis:
    """A mesh axis: its name, its dim in an index, its size."""

    name: str
    dim: int
    n: int


def element_map(value: str, index: Sequence[Index], pending: Pending = frozenset()) -> ElementMap:
    """The map of a tensor that holds the positions ``index[d]`` along dim ``d`` of ``value``; the
    last dim of each array is the tensor's.

    >>> element_map("x", [np.arange(2), np.arange(3, 6)]).shape
    (2, 3)
    """
    n = len(index)
    shaped = tuple(
        a.reshape([*a.shape[:-1], *(a.shape[-1] if i == d else 1 for i in range(n))])
        for d, a in enumerate(index)
    )
    return ElementMap(value, tuple(a.shape[-1] for a in index), (1,) * n, shaped, pending)


def on_rank(x: ElementMap, at: Sequence[int]) -> ElementMap:
    """The map of one rank: ``at`` has its place along each mesh axis."""
    index = []
    for i in x.index:
        for dim, place in enumerate(at):
            i = i.take([place if i.shape[dim] > 1 else 0], dim)
        index.append(i)
    return replace(x, index=tuple(index))


def is_same(a: ElementMap, b: ElementMap) -> bool:
    """Whether two tensors hold the same elements in the same order, pending sums aside."""
    if a.shape != b.shape or a.value != b.value:
        return False
    if 0 in a.shape:
        return True
    if a.is_zero or b.is_zero:
        return a.is_zero and b.is_zero
    a, b = _aligned(a, b)
    return all(x is y or _equal(x, y) for x, y in zip(a.index, b.index, strict=True))


def _equal(x: Index, y: Index) -> bool:
    return bool(np.array_equal(x, y)) if x.shape == y.shape else bool((x == y).all())


def _aligned(a: ElementMap, b: ElementMap) -> tuple[ElementMap, ElementMap]:
    if (a.atoms, a.groups) == (b.atoms, b.groups):
        return a, b
    return dims_as_atoms(a), dims_as_atoms(b)


def dims_as_atoms(x: ElementMap) -> ElementMap:
    """``x`` with one atom for each dim."""
    for dim in range(len(x.groups)):
        x, _ = one_atom(x, dim)
    return x


def reshape(x: ElementMap, shape: Sequence[int]) -> ElementMap:
    shape = resolved(shape, math.prod(x.atoms))
    if tuple(shape) == x.shape:
        return x
    if x.is_empty:
        return zeros_like(x, shape)
    groups, at = [], 0
    for size in shape:
        first, left = at, size
        while left > 1:
            here = x.atoms[at]
            if left % here == 0:
                left //= here
                at += 1
            elif here % left == 0:
                x = _split(x, at, left)
                left = 1
                at += 1
            else:
                x = _merged(x, at)
        groups.append(at - first)
    while at < len(x.atoms):  # atoms of one element at the end
        if x.atoms[at] != 1:
            raise AssertionError("sizes agree")
        x = _without(x, at)
    return replace(x, groups=tuple(groups))


def resolved(shape: Sequence[int], total: int) -> list[int]:
    """A shape of ``total`` elements in which one size may be -1."""
    known = abs(math.prod(shape))
    found = [total // max(known, 1) if s == -1 else s for s in shape]
    if math.prod(found) != total:
        raise Unsound(f"{total} elements are reshaped to {tuple(shape)}")
    return found


def zeros_like(x: ElementMap, shape: Sequence[int] | None = None) -> ElementMap:
    shape = x.shape if shape is None else tuple(shape)
    nothing = tuple(np.full((1,) * (x.lead + len(shape)), -1) for _ in x.index)
    return ElementMap(x.value, tuple(shape), (1,) * len(shape), nothing, x.pending, True)


def permute(x: ElementMap, dims: Sequence[int]) -> ElementMap:
    starts = np.cumsum([0, *x.groups]).tolist()
    order = [a for d in dims for a in range(starts[d], starts[d] + x.groups[d])]
    axes = [*range(x.lead), *(x.lead + a for a in order)]
    return replace(
        x,
        atoms=tuple(x.atoms[a] for a in order),
        groups=tuple(x.groups[d] for d in dims),
        index=tuple(i.transpose(axes) for i in x.index),
    )


def common_position(at: Position) -> int | None:
    """A position that is equal on all ranks; None if it differs."""
    if isinstance(at, int):
        return at
    first = at.reshape(-1)[0]
    return int(first) if (at == first).all() else None


def slice_dim(x: ElementMap, dim: int, start: Position, stop: Position) -> ElementMap:
    size = x.shape[dim]
    first, length = (
        common_position(_clipped(start, size)),
        common_position(np.maximum(_clipped(stop, size) - _clipped(start, size), 0)),
    )
    if length is None:
        raise Unsound("ranks with one program slice parts of different sizes")
    if (first, length) == (0, size):
        return x
    x, at = one_atom(x, dim)
    lead = x.lead
    if first is not None:
        taken = (slice(None),) * (lead + at) + (slice(first, first + length),)
        index = tuple(i[taken] if i.shape[lead + at] != 1 else i for i in x.index)
    else:
        places = _along(_clipped(start, size), length, lead, at, len(x.atoms))
        index = tuple(
            np.take_along_axis(i, places, lead + at) if i.shape[lead + at] != 1 else i
            for i in x.index
        )
    return replace(x, atoms=(*x.atoms[:at], length, *x.atoms[at + 1 :]), index=index)


def flip_dim(x: ElementMap, dim: int) -> ElementMap:
    """Reverse a dim of the tensor."""
    x, at = one_atom(x, dim)
    return replace(x, index=tuple(np.flip(i, x.lead + at) for i in x.index))


def _clipped(at: Position, size: int) -> Index:
    return np.clip(np.asarray(at), 0, size)


def _along(start: Index, length: int, lead: int, at: int, atoms: int) -> Index:
    """``length`` positions from each rank's ``start`` on, along an atom."""
    count = np.arange(length).reshape([length if a == at else 1 for a in range(atoms)])
    return start.reshape(*start.shape, *(1,) * atoms) + count


def pad_dim(x: ElementMap, dim: int, before: Position, after: Position) -> ElementMap:
    """Pad a dim of the tensor with zeros."""
    first, more = common_position(before), common_position(np.asarray(before) + np.asarray(after))
    if more is None or (np.asarray(before) < 0).any() or (np.asarray(after) < 0).any():
        raise Unsound(f"dim {dim} is padded by {before} and {after}")
    if more == 0:
        return x
    x, at = one_atom(x, dim)
    size = x.atoms[at]
    atoms = (*x.atoms[:at], more + size, *x.atoms[at + 1 :])
    if size == 0 or x.is_zero:
        return zeros_like(x, _shape(atoms, x.groups))
    if not x.index:
        raise Unsound("a scalar is padded")
    along = [d for d, i in enumerate(x.index) if i.shape[x.lead + at] != 1] or [0]
    index = list(x.index)
    for d in along:
        full = _widened(index[d], x.lead + at, size)
        if first is not None:
            margin = [
                (first, more - first) if a == x.lead + at else (0, 0) for a in range(full.ndim)
            ]
            index[d] = np.pad(full, margin, constant_values=-1)
        else:
            places = _along(-np.asarray(before), more + size, x.lead, at, len(atoms))
            taken = np.take_along_axis(full, np.clip(places, 0, size - 1), x.lead + at)
            index[d] = np.where((places >= 0) & (places < size), taken, -1)
    return replace(x, atoms=atoms, index=tuple(index))


def _widened(index: Index, dim: int, size: int) -> Index:
    return (
        index
        if index.shape[dim] == size
        else np.broadcast_to(index, (*index.shape[:dim], size, *index.shape[dim + 1 :]))
    )


def _shape(atoms: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    return ElementMap("", tuple(atoms), tuple(groups), ()).shape


def concatenate(parts: Sequence[ElementMap], dim: int) -> ElementMap:
    """Concatenate parts of one value along a dim of the tensor."""
    parts = [p for p in parts if p.shape[dim] or len(parts) == 1] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    if any(p.value != parts[0].value or p.pending != parts[0].pending or p.is_zero for p in parts):
        raise Unsound("parts of different values are concatenated")
    parts = [dims_as_atoms(p) for p in parts]
    first, sizes = parts[0], [p.atoms[dim] for p in parts]
    return replace(
        first,
        atoms=(*first.atoms[:dim], sum(sizes), *first.atoms[dim + 1 :]),
        index=stack_indexes(parts, first.lead + dim, sizes),
    )


def stack_indexes(parts: Sequence[ElementMap], dim: int, sizes: Sequence[int]) -> tuple[Index, ...]:
    """Concatenate the parts' indexes along ``dim``; parts with equal ones share one."""
    index = []
    for arrays in zip(*(p.index for p in parts), strict=True):
        if all(a.shape[dim] == 1 and _equal(a, arrays[0]) for a in arrays):
            index.append(arrays[0])
            continue
        wide = [_widened(a, dim, size) for a, size in zip(arrays, sizes, strict=True)]
        most = [max(a.shape[k] for a in wide) for k in range(wide[0].ndim)]
        index.append(
            np.concatenate(
                [np.broadcast_to(a, (*most[:dim], a.shape[dim], *most[dim + 1 :])) for a in wide],
                axis=dim,
            )
        )
    return tuple(index)


# Atoms.


def one_atom(x: ElementMap, dim: int) -> tuple[ElementMap, int]:
    """Merge the atoms of a dim; returns the map and the atom's place."""
    at = sum(x.groups[:dim])
    if x.groups[dim] == 1:
        return x, at
    if x.groups[dim] == 0:
        x = _inserted(x, at, dim)
    for _ in range(x.groups[dim] - 1):
        x = _merged(x, at)
    return replace(x, groups=tuple(1 if d == dim else g for d, g in enumerate(x.groups))), at


def _inserted(x: ElementMap, at: int, dim: int) -> ElementMap:
    index = tuple(np.expand_dims(i, x.lead + at) for i in x.index)
    groups = tuple(1 if d == dim else g for d, g in enumerate(x.groups))
    return replace(x, atoms=(*x.atoms[:at], 1, *x.atoms[at:]), index=index, groups=groups)


def _without(x: ElementMap, at: int) -> ElementMap:
    return replace(
        x,
        atoms=(*x.atoms[:at], *x.atoms[at + 1 :]),
        index=tuple(i.squeeze(x.lead + at) for i in x.index),
    )


def _split(x: ElementMap, at: int, major: int) -> ElementMap:
    minor = x.atoms[at] // major
    k = x.lead + at
    index = tuple(
        i.reshape(*i.shape[:k], *((1, 1) if i.shape[k] == 1 else (major, minor)), *i.shape[k + 1 :])
        for i in x.index
    )
    return replace(x, atoms=(*x.atoms[:at], major, minor, *x.atoms[at + 1 :]), index=index)


def _merged(x: ElementMap, at: int) -> ElementMap:
    """Merge atoms ``at`` and ``at + 1``."""
    a, b = x.atoms[at : at + 2]
    k = x.lead + at
    index = []
    for i in x.index:
        if i.shape[k] == i.shape[k + 1] == 1:
            index.append(i.squeeze(k))
        else:
            whole = np.broadcast_to(i, (*i.shape[:k], a, b, *i.shape[k + 2 :]))
            index.append(whole.reshape(*i.shape[:k], a * b, *i.shape[k + 2 :]))
    return replace(x, atoms=(*x.atoms[:at], a * b, *x.atoms[at + 2 :]), index=tuple(index))
