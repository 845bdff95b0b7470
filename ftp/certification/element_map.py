"""What a tensor holds of a value, element by element, on all ranks that run one program, and what
moving it does to that.

A tensor is seen as *atoms*: its dims, taken apart where a reshape took them apart. For each dim of
the value there is an array with the position along that dim that each element has, or -1 where the
element is a zero that stands for nothing. The array has a dim for each mesh axis, which says how
the positions differ from rank to rank, and then one for each atom; it is as long as it needs to be,
or one. So a move is followed exactly, for every rank at once, whatever steps it is made of; nothing
is known here of layouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

Index = np.ndarray
Where = int | Index  # a position, or one for each rank: an array with a dim for each mesh axis
Pending = frozenset[tuple[str, str]]


class Unsound(Exception):
    """A step after which a tensor no longer holds what it should; the message says why."""


@dataclass(frozen=True, eq=False)
class Held:
    """What a tensor holds.

    Attributes:
        value: the value that it holds a part of.
        atoms: sizes, in the order of memory.
        groups: how many atoms make each dim of the tensor.
        index: per dim of the value, positions along it.
        pending: ``(axis, op)`` of reductions that are still to come.
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
        """Dims of the index that are mesh axes."""
        return self.index[0].ndim - len(self.atoms) if self.index else 0


@dataclass(frozen=True)
class Part:
    """What the ranks hold whose coordinates along an axis are ``at``."""

    at: tuple[int, ...]
    held: Held


@dataclass(frozen=True)
class Along:
    """A mesh axis: its name, its dim in an index, its size."""

    name: str
    dim: int
    n: int


def holding(value: str, index: Sequence[Index], pending: Pending = frozenset()) -> Held:
    """A tensor with ``index[d]`` of each dim of ``value``; the last dim of each array is along the
    tensor's.

    >>> holding("x", [np.arange(2), np.arange(3, 6)]).shape
    (2, 3)
    """
    n = len(index)
    shaped = tuple(
        a.reshape([*a.shape[:-1], *(a.shape[-1] if i == d else 1 for i in range(n))])
        for d, a in enumerate(index)
    )
    return Held(value, tuple(a.shape[-1] for a in index), (1,) * n, shaped, pending)


def held_by(x: Held, at: Sequence[int]) -> Held:
    """What one rank holds, the one ``at`` each axis of those that ``x`` speaks of."""
    index = []
    for i in x.index:
        for dim, place in enumerate(at):
            i = i.take([place if i.shape[dim] > 1 else 0], dim)
        index.append(i)
    return replace(x, index=tuple(index))


def is_same(a: Held, b: Held) -> bool:
    """Whether two tensors hold the same elements in the same places; pending sums aside."""
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


def _aligned(a: Held, b: Held) -> tuple[Held, Held]:
    if (a.atoms, a.groups) == (b.atoms, b.groups):
        return a, b
    return dims_as_atoms(a), dims_as_atoms(b)


def dims_as_atoms(x: Held) -> Held:
    """One atom a dim."""
    for dim in range(len(x.groups)):
        x, _ = _one_atom(x, dim)
    return x


def reshape(x: Held, shape: Sequence[int]) -> Held:
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


def zeros_like(x: Held, shape: Sequence[int] | None = None) -> Held:
    shape = x.shape if shape is None else tuple(shape)
    nothing = tuple(np.full((1,) * (x.lead + len(shape)), -1) for _ in x.index)
    return Held(x.value, tuple(shape), (1,) * len(shape), nothing, x.pending, True)


def permute(x: Held, dims: Sequence[int]) -> Held:
    starts = np.cumsum([0, *x.groups]).tolist()
    order = [a for d in dims for a in range(starts[d], starts[d] + x.groups[d])]
    axes = [*range(x.lead), *(x.lead + a for a in order)]
    return replace(
        x,
        atoms=tuple(x.atoms[a] for a in order),
        groups=tuple(x.groups[d] for d in dims),
        index=tuple(i.transpose(axes) for i in x.index),
    )


def number(at: Where) -> int | None:
    """A position that is the same on all ranks; None for one that differs."""
    if isinstance(at, int):
        return at
    first = at.reshape(-1)[0]
    return int(first) if (at == first).all() else None


def slice_dim(x: Held, dim: int, start: Where, stop: Where) -> Held:
    size = x.shape[dim]
    first, length = (
        number(_clipped(start, size)),
        number(np.maximum(_clipped(stop, size) - _clipped(start, size), 0)),
    )
    if length is None:
        raise Unsound("ranks with one program slice parts of different sizes")
    if (first, length) == (0, size):
        return x
    x, at = _one_atom(x, dim)
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


def _clipped(at: Where, size: int) -> Index:
    return np.clip(np.asarray(at), 0, size)


def _along(start: Index, length: int, lead: int, at: int, atoms: int) -> Index:
    """From ``start`` of each rank on, along an atom."""
    count = np.arange(length).reshape([length if a == at else 1 for a in range(atoms)])
    return start.reshape(*start.shape, *(1,) * atoms) + count


def pad_dim(x: Held, dim: int, before: Where, after: Where) -> Held:
    """With zeros before and behind along a dim of the tensor."""
    first, more = number(before), number(np.asarray(before) + np.asarray(after))
    if more is None or (np.asarray(before) < 0).any() or (np.asarray(after) < 0).any():
        raise Unsound(f"dim {dim} is padded by {before} and {after}")
    if more == 0:
        return x
    x, at = _one_atom(x, dim)
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
    return Held("", tuple(atoms), tuple(groups), ()).shape


def joined(parts: Sequence[Held], dim: int) -> Held:
    """Parts of one value in a row along a dim of the tensor."""
    parts = [p for p in parts if p.shape[dim] or len(parts) == 1] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    if any(p.value != parts[0].value or p.pending != parts[0].pending or p.is_zero for p in parts):
        raise Unsound("parts of different values are joined")
    parts = [dims_as_atoms(p) for p in parts]
    first, sizes = parts[0], [p.atoms[dim] for p in parts]
    return replace(
        first,
        atoms=(*first.atoms[:dim], sum(sizes), *first.atoms[dim + 1 :]),
        index=_in_a_row(parts, first.lead + dim, sizes),
    )


def _in_a_row(parts: Sequence[Held], dim: int, sizes: Sequence[int]) -> tuple[Index, ...]:
    """Per dim of the value the parts' arrays one behind the other along ``dim``; one for all
    where they are the same.
    """
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


# What ranks do together. Each takes what all ranks along an axis hold.


def _column(parts: Sequence[Part], along: Along) -> Held:
    """What all ranks along an axis hold, as one."""
    if len(parts) == 1:
        return parts[0].held
    held = [p.held for p in parts]
    if len({(p.atoms, p.groups) for p in held}) > 1:
        held = [dims_as_atoms(p) for p in held]
    index = list(_in_a_row(held, along.dim, [len(p.at) for p in parts]))
    order = np.argsort([at for p in parts for at in p.at])
    index = [i if i.shape[along.dim] == 1 else i.take(order, along.dim) for i in index]
    return replace(held[0], index=tuple(index), is_zero=all(p.is_zero for p in held))


def _is_constant(index: Index, dim: int) -> bool:
    return index.shape[dim] == 1 or bool((index == index.take([0], dim)).all())


def _first(x: Held, dim: int) -> Held:
    return replace(x, index=tuple(i.take([0], dim) for i in x.index))


def _is_common(parts: Sequence[Part], along: Along) -> bool:
    """Whether all ranks along an axis hold the same."""
    if any(p.held.is_zero != parts[0].held.is_zero for p in parts):
        return False
    return all(_is_constant(i, along.dim) for i in _column(parts, along).index)


def concatenated(parts: Sequence[Part], along: Along) -> Held:
    """The parts behind each other along dim 0, as an all-gather leaves them."""
    first = parts[0].held
    if any(p.held.shape != first.shape for p in parts) or not first.groups:
        raise Unsound(f"ranks bring parts of shapes {[p.held.shape for p in parts]}")
    if any(p.held.value != first.value or p.held.pending != first.pending for p in parts):
        raise Unsound("ranks bring parts of different values")
    if any(axis == along.name for axis, _ in first.pending):
        raise Unsound(f"a sum still pending over {along.name} is gathered along it")
    if all(p.held.is_zero for p in parts) or first.is_empty:
        return zeros_like(first, (along.n * first.shape[0], *first.shape[1:]))
    x = _column(parts, along)
    lead = x.lead
    index = tuple(np.expand_dims(np.moveaxis(i, along.dim, lead - 1), along.dim) for i in x.index)
    return Held(x.value, (along.n, *x.atoms), (x.groups[0] + 1, *x.groups[1:]), index, x.pending)


def added(parts: Sequence[Part], along: Along, op: str) -> Held:
    """What a reduction over an axis of these tensors holds: pending sums are done, and parts
    among zeros are put together.
    """
    first, axis = parts[0].held, along.name
    if any(p.held.shape != first.shape or p.held.value != first.value for p in parts):
        raise Unsound(
            f"ranks bring tensors of shapes {[p.held.shape for p in parts]} to one reduction"
        )
    if first.is_empty:
        return replace(first, pending=first.pending - {(axis, op)})
    if (axis, op) in first.pending:
        if any(p.held.pending != first.pending for p in parts) or not _is_common(parts, along):
            raise Unsound("ranks bring different parts to one reduction")
        return replace(_first(first, along.dim), pending=first.pending - {(axis, op)})
    if any(a == axis for p in parts for a, _ in p.held.pending):
        raise Unsound(
            f"the reduction that is pending over {axis} is"
            f" {dict(first.pending).get(axis, 'another')}, not {op}"
        )
    if op in ("max", "min"):
        if any(p.held.is_zero for p in parts) or not _is_common(parts, along):
            raise Unsound(f"a {op} is taken over {axis} of different parts")
        return _first(first, along.dim)
    bring = [p for p in parts if not p.held.is_zero]
    if not bring:
        return first
    if any(p.held.pending != bring[0].held.pending for p in bring):
        raise Unsound("ranks bring different pending sums to one reduction")
    x = _column(bring, along)
    differ = [d for d, i in enumerate(x.index) if not _is_constant(i, along.dim)]
    if sum(len(p.at) for p in bring) > 1 and not differ:
        raise Unsound(f"it is summed over {axis}, where several ranks hold the same")
    index = [i.take([0], along.dim) for i in x.index]
    if differ:
        spread = np.broadcast_arrays(*(x.index[d] for d in differ))
        is_element = np.logical_and.reduce([a >= 0 for a in spread])
        if (is_element.sum(along.dim) > 1).any():
            raise Unsound(f"parts overlap in a sum over {axis}")
        for d, positions in zip(differ, spread, strict=True):
            index[d] = np.where(is_element, positions, -1).max(along.dim, keepdims=True)
    return replace(x, index=tuple(index))


def dealt(x: Held, along: Along, at: Sequence[int]) -> Held:
    """Of ``x``, the same on all ranks along an axis, the part that each of those at ``at`` gets
    of ``n`` along dim 0.
    """
    x = _in_parts(x, along.n)
    if x.is_zero or x.is_empty:
        return zeros_like(x, x.shape[1:])
    dim = along.dim
    index = tuple(_swapped(i, dim, x.lead, at) for i in x.index)
    return replace(
        x, atoms=x.atoms[1:], groups=x.groups[1:], index=tuple(i.squeeze(x.lead) for i in index)
    )


def exchanged(parts: Sequence[Part], along: Along, at: Sequence[int]) -> Held:
    """What an all-to-all of equal parts along dim 0 leaves on the ranks at ``at``."""
    first = parts[0].held
    if any(p.held.shape != first.shape for p in parts):
        raise Unsound(f"ranks bring parts of shapes {[p.held.shape for p in parts]}")
    if any(p.held.value != first.value or p.held.pending != first.pending for p in parts):
        raise Unsound("ranks bring parts of different values")
    if any(axis == along.name for axis, _ in first.pending):
        raise Unsound(f"a sum still pending over {along.name} is dealt out along it")
    if all(p.held.is_zero for p in parts) or first.is_empty:
        return zeros_like(first)
    x = _column([Part(p.at, _in_parts(p.held, along.n)) for p in parts], along)
    index = tuple(_swapped(i, along.dim, x.lead, at) for i in x.index)
    return replace(x, groups=(x.groups[0] + x.groups[1], *x.groups[2:]), index=index)


def _in_parts(x: Held, n: int) -> Held:
    """``x`` with ``n`` parts of dim 0 as a dim and an atom of their own."""
    if not x.groups or x.shape[0] % n:
        raise Unsound(f"a tensor of shape {x.shape} is dealt out to {n} ranks")
    x, _ = _one_atom(reshape(x, (n, x.shape[0] // n, *x.shape[1:])), 0)
    return x


def _swapped(index: Index, dim: int, atom: int, at: Sequence[int]) -> Index:
    """The index with the first atom in the place of a mesh axis, of which the ranks at ``at``
    are taken.
    """
    index = index.swapaxes(dim, atom)
    return index if index.shape[dim] == 1 else index.take(list(at), dim)


# Atoms.


def _one_atom(x: Held, dim: int) -> tuple[Held, int]:
    """``x`` with the atoms of a dim merged to one, and where it is."""
    at = sum(x.groups[:dim])
    if x.groups[dim] == 1:
        return x, at
    if x.groups[dim] == 0:
        x = _inserted(x, at, dim)
    for _ in range(x.groups[dim] - 1):
        x = _merged(x, at)
    return replace(x, groups=tuple(1 if d == dim else g for d, g in enumerate(x.groups))), at


def _inserted(x: Held, at: int, dim: int) -> Held:
    index = tuple(np.expand_dims(i, x.lead + at) for i in x.index)
    groups = tuple(1 if d == dim else g for d, g in enumerate(x.groups))
    return replace(x, atoms=(*x.atoms[:at], 1, *x.atoms[at:]), index=index, groups=groups)


def _without(x: Held, at: int) -> Held:
    return replace(
        x,
        atoms=(*x.atoms[:at], *x.atoms[at + 1 :]),
        index=tuple(i.squeeze(x.lead + at) for i in x.index),
    )


def _split(x: Held, at: int, major: int) -> Held:
    minor = x.atoms[at] // major
    k = x.lead + at
    index = tuple(
        i.reshape(*i.shape[:k], *((1, 1) if i.shape[k] == 1 else (major, minor)), *i.shape[k + 1 :])
        for i in x.index
    )
    return replace(x, atoms=(*x.atoms[:at], major, minor, *x.atoms[at + 1 :]), index=index)


def _merged(x: Held, at: int) -> Held:
    """Atoms ``at`` and the one behind it as one."""
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
