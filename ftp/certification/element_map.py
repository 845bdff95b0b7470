"""Element maps: which element of the global value each local element holds, on every rank, and how
data movement changes the map.

A dim of a tensor consists of *atoms*; a reshape splits and merges atoms. For each dim of the global
value, the index holds every local element's position along that dim, or a hole where the element is
a zero of padding. The dims of the index are the mesh axes, then the atoms. So the checker follows
data movement exactly, on all ranks at once, and assumes no layout.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ftp.certification.positions import Positions, concatenated, holes
from ftp.certification.positions import is_same as is_same_positions
from ftp.certification.progression import Index, divides
from ftp.certification.unsound import Unsound
from ftp.dataclass import dataclass
from ftp.dynamic_int import is_dynamic

Position = int | Index  # equal on all ranks, or an array with a dim for each mesh axis
PendingSums = frozenset[tuple[str, str]]  # (axis, op) of reductions that are still to be done


def pending_sums(axes: Iterable[str]) -> PendingSums:
    return frozenset((axis, "sum") for axis in axes)


@dataclass(frozen=True, eq=False)
class ElementMap:
    """Which elements of a value a tensor holds.

    Attributes:
        value: name of the global value.
        atoms: sizes of the atoms, in memory order.
        groups: number of atoms of each dim of the tensor.
        index: per dim of the value, the elements' positions along it.
        is_zero: whether all elements are zeros of padding.
    """

    value: str
    atoms: tuple[int, ...]
    groups: tuple[int, ...]
    index: tuple[Positions, ...]
    pending: PendingSums = frozenset()
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
        """Number of leading dims of the index, the mesh axes."""
        return self.index[0].ndim - len(self.atoms) if self.index else 0


@dataclass(frozen=True)
class MeshAxis:
    """A mesh axis: its name, its dim in an index, its size ``n``."""

    name: str
    dim: int
    n: int


@dataclass(frozen=True)
class DimPart:
    """A rank's part of one dim of a value: ``size`` positions, along the last dim of ``index``."""

    index: Positions
    size: int

    def positions(self) -> Index:
        """The positions as an array, where ``index`` is one rank's."""
        return np.broadcast_to(self.index.dense().reshape(-1), self.size).copy()


def element_map(
    value: str, parts: Sequence[DimPart], pending: PendingSums = frozenset()
) -> ElementMap:
    """The map of a tensor whose dim ``d`` holds the part ``parts[d]`` of dim ``d`` of ``value``.

    >>> from ftp.certification.positions import whole
    >>> element_map("x", [DimPart(whole(1, 0, 2), 2), DimPart(whole(1, 0, 3), 3)]).shape
    (2, 3)
    """
    lead = parts[0].index.ndim - 1 if parts else 0
    index = tuple(
        part.index.renamed([*range(lead), lead + d], lead + len(parts))
        for d, part in enumerate(parts)
    )
    return ElementMap(value, tuple(part.size for part in parts), (1,) * len(parts), index, pending)


def on_rank(x: ElementMap, at: Sequence[int]) -> ElementMap:
    """The map of the rank at a coordinate."""
    index = x.index
    for dim, place in enumerate(at):
        index = tuple(i.within(dim, place, 1, 1) for i in index)
    return replace(x, index=index)


def is_same(a: ElementMap, b: ElementMap) -> bool:
    """Whether two tensors hold the same elements in the same order, pending sums aside."""
    if a.shape != b.shape or a.value != b.value:
        return False
    if 0 in a.shape:
        return True
    if a.is_zero or b.is_zero:
        return a.is_zero and b.is_zero
    a, b = in_same_atoms([a, b])
    return all(map(is_same_positions, a.index, b.index))


def in_same_atoms(maps: Sequence[ElementMap]) -> Sequence[ElementMap]:
    """Maps of one shape in equal atoms: those of the map that has most, where the others' atoms can
    be split so; else one for each dim.
    """
    if len({(x.atoms, x.groups) for x in maps}) == 1:
        return maps
    finest = max(maps, key=lambda x: len(x.atoms))
    if all(math.prod(x.atoms) == math.prod(finest.atoms) for x in maps):
        found = [replace(reshape(x, finest.atoms), groups=finest.groups) for x in maps]
        if all(x.atoms == finest.atoms for x in found):
            return found
    return [dims_as_atoms(x) for x in maps]


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
        while is_dynamic(left) or left > 1:
            here = x.atoms[at]
            if divides(here, left):
                left //= here
                at += 1
            elif divides(left, here):
                x = _split(x, at, left)
                left = 1
                at += 1
            else:
                x = _merged(x, at)
        groups.append(at - first)
    while at < len(x.atoms):  # atoms of one element at the end
        if x.atoms[at] != 1:
            raise AssertionError("sizes agree")
        x = _replaced(x, at, 1, (), [i.without_dim(x.lead + at) for i in x.index])
    return replace(x, groups=tuple(groups))


def resolved(shape: Sequence[int], total: int) -> list[int]:
    """A shape of ``total`` elements, with its size for a -1."""
    known = math.prod(s for s in shape if s != -1)
    found = [total // max(known, 1) if s == -1 else s for s in shape]
    if math.prod(found) != total or any(s < 0 for s in found):
        raise Unsound(f"{total} elements are reshaped to {tuple(shape)}")
    return found


def zeros_like(x: ElementMap, shape: Sequence[int] | None = None) -> ElementMap:
    shape = x.shape if shape is None else tuple(shape)
    nothing = (holes(x.lead + len(shape)),) * len(x.index)
    return ElementMap(x.value, tuple(shape), (1,) * len(shape), nothing, x.pending, True)


def permute(x: ElementMap, dims: Sequence[int]) -> ElementMap:
    starts = np.cumsum([0, *x.groups]).tolist()
    order = [a for d in dims for a in range(starts[d], starts[d] + x.groups[d])]
    places = [*range(x.lead), *(x.lead + order.index(a) for a in range(len(order)))]
    return replace(
        x,
        atoms=tuple(x.atoms[a] for a in order),
        groups=tuple(x.groups[d] for d in dims),
        index=tuple(i.renamed(places, len(places)) for i in x.index),
    )


def common_position(at: Position) -> int | None:
    """A position that is equal on all ranks; None if ranks differ."""
    if isinstance(at, int):
        return at
    first = at.item(0)
    return first if (at == first).all() else None


def slice_dim(x: ElementMap, dim: int, start: Position, stop: Position) -> ElementMap:
    size = x.shape[dim]
    starts, stops = np.clip(start, 0, size), np.clip(stop, 0, size)
    first, length = common_position(starts), common_position(np.maximum(stops - starts, 0))
    if length is None:
        raise Unsound("ranks with one program slice parts of different sizes")
    if (first, length) == (0, size):
        return x
    x, at = one_atom(x, dim)
    index = [
        i.within(x.lead + at, first, 1, length)
        if first is not None
        else i.from_starts(x.lead + at, starts, length)
        for i in x.index
    ]
    return _replaced(x, at, 1, (length,), index)


def flip_dim(x: ElementMap, dim: int) -> ElementMap:
    """Reverse a dim of the tensor."""
    x, at = one_atom(x, dim)
    size = x.atoms[at]
    return replace(x, index=tuple(i.within(x.lead + at, size - 1, -1, size) for i in x.index))


def pad_dim(x: ElementMap, dim: int, before: Position, after: Position) -> ElementMap:
    """Pad a dim of the tensor with zeros."""
    more = common_position(np.asarray(before) + np.asarray(after))
    if more is None or (np.asarray(before) < 0).any() or (np.asarray(after) < 0).any():
        raise Unsound(f"dim {dim} is padded by {before} and {after}")
    if more == 0:
        return x
    size = x.shape[dim]
    if size == 0 or x.is_zero:
        return zeros_like(x, (*x.shape[:dim], more + size, *x.shape[dim + 1 :]))
    if not x.index:
        raise Unsound("a scalar is padded")
    x, at = one_atom(x, dim)
    dim, index = x.lead + at, list(x.index)
    for d in [d for d, i in enumerate(index) if i.varies(dim)] or [0]:
        index[d] = index[d].padded(dim, size, np.asarray(before), more + size)
    return _replaced(x, at, 1, (more + size,), index)


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
        index=concatenated_index(parts, first.lead + dim, sizes),
    )


def concatenated_index(
    parts: Sequence[ElementMap], dim: int, sizes: Sequence[int]
) -> tuple[Positions, ...]:
    """The parts' indexes, concatenated along ``dim``."""
    return tuple(
        concatenated(index, dim, sizes) for index in zip(*(p.index for p in parts), strict=True)
    )


# Atoms.


def one_atom(x: ElementMap, dim: int) -> tuple[ElementMap, int]:
    """Make a dim one atom; returns the map and the atom's place."""
    at = sum(x.groups[:dim])
    if x.groups[dim] == 1:
        return x, at
    if x.groups[dim] == 0:
        x = _replaced(x, at, 0, (1,), [i.with_dim(x.lead + at) for i in x.index])
    for _ in range(x.groups[dim] - 1):
        x = _merged(x, at)
    return replace(x, groups=tuple(1 if d == dim else g for d, g in enumerate(x.groups))), at


def _split(x: ElementMap, at: int, major: int) -> ElementMap:
    minor = x.atoms[at] // major
    return _replaced(
        x, at, 1, (major, minor), [i.split(x.lead + at, major, minor) for i in x.index]
    )


def _merged(x: ElementMap, at: int) -> ElementMap:
    """Merge atoms ``at`` and ``at + 1``."""
    a, b = x.atoms[at : at + 2]
    return _replaced(x, at, 2, (a * b,), [i.merged(x.lead + at, a, b) for i in x.index])


def _replaced(
    x: ElementMap, at: int, count: int, atoms: Sequence[int], index: Sequence[Positions]
) -> ElementMap:
    """``x`` with ``atoms`` in place of ``count`` atoms from ``at`` on, and a new index."""
    return replace(x, atoms=(*x.atoms[:at], *atoms, *x.atoms[at + count :]), index=tuple(index))
