"""What a rank's tensor holds of a value, element by element, and what moving it does to that.

A tensor is seen as *atoms*: its dims, taken apart where a reshape took them apart. For each dim of the value there is an array,
broadcastable over the atoms, with the position along that dim that each element has, or -1 where the element is a zero that stands for
nothing. So a move is followed exactly, whatever steps it is made of; nothing is known here of layouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

Index = np.ndarray
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


def holding(value: str, index: Sequence[Index], pending: Pending = frozenset()) -> Held:
    """A tensor with ``index[d]`` of each dim of ``value``.

    >>> holding("x", [np.arange(2), np.arange(3, 6)]).shape
    (2, 3)
    """
    n = len(index)
    shaped = tuple(a.reshape([len(a) if i == d else 1 for i in range(n)]) for d, a in enumerate(index))
    return Held(value, tuple(len(a) for a in index), (1,) * n, shaped, pending)


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
    shape = _resolved(shape, math.prod(x.atoms))
    if math.prod(shape) != math.prod(x.atoms):
        raise Unsound(f"it is reshaped from {x.shape} to {tuple(shape)}")
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


def _resolved(shape: Sequence[int], total: int) -> list[int]:
    if -1 not in shape:
        return list(shape)
    known = -math.prod(shape)
    return [total // known if s == -1 else s for s in shape]


def zeros_like(x: Held, shape: Sequence[int] | None = None) -> Held:
    shape = x.shape if shape is None else tuple(shape)
    nothing = tuple(np.full((1,) * len(shape), -1) for _ in x.index)
    return Held(x.value, tuple(shape), (1,) * len(shape), nothing, x.pending, True)


def permute(x: Held, dims: Sequence[int]) -> Held:
    starts = np.cumsum([0, *x.groups]).tolist()
    order = [a for d in dims for a in range(starts[d], starts[d] + x.groups[d])]
    return replace(
        x,
        atoms=tuple(x.atoms[a] for a in order),
        groups=tuple(x.groups[d] for d in dims),
        index=tuple(i.transpose(order) for i in x.index),
    )


def slice_dim(x: Held, dim: int, start: int, stop: int) -> Held:
    size = x.shape[dim]
    start, stop = min(max(start, 0), size), min(max(stop, 0), size)
    if (start, stop) == (0, size):
        return x
    x, at = _one_atom(x, dim)
    taken = (slice(None),) * at + (slice(start, stop),)
    index = tuple(i[taken] if i.shape[at] != 1 else i for i in x.index)
    return replace(x, atoms=(*x.atoms[:at], max(stop - start, 0), *x.atoms[at + 1 :]), index=index)


def pad_dim(x: Held, dim: int, before: int, after: int) -> Held:
    """With zeros before and behind along a dim of the tensor."""
    if before < 0 or after < 0:
        raise Unsound(f"dim {dim} is padded by {before} and {after}")
    if before == after == 0:
        return x
    x, at = _one_atom(x, dim)
    size = x.atoms[at]
    atoms = (*x.atoms[:at], before + size + after, *x.atoms[at + 1 :])
    if size == 0 or x.is_zero:
        return zeros_like(x, _shape(atoms, x.groups))
    if not x.index:
        raise Unsound("a scalar is padded")
    along = [d for d, i in enumerate(x.index) if i.shape[at] != 1] or [0]
    margin = [(before, after) if a == at else (0, 0) for a in range(len(atoms))]
    index = list(x.index)
    for d in along:
        full = (
            index[d] if index[d].shape[at] == size else np.broadcast_to(index[d], (*index[d].shape[:at], size, *index[d].shape[at + 1 :]))
        )
        index[d] = np.pad(full, margin, constant_values=-1)
    return replace(x, atoms=atoms, index=tuple(index))


def _shape(atoms: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    return Held("", tuple(atoms), tuple(groups), ()).shape


def joined(parts: Sequence[Held], dim: int) -> Held:
    """Parts of one value in a row along a dim of the tensor."""
    parts = [p for p in parts if p.shape[dim] or len(parts) == 1] or list(parts[:1])
    if any(p.value != parts[0].value or p.pending != parts[0].pending or p.is_zero for p in parts) and len(parts) > 1:
        raise Unsound("parts of different values are joined")
    parts = [dims_as_atoms(p) for p in parts]
    first, sizes = parts[0], [p.atoms[dim] for p in parts]
    index = []
    for arrays in zip(*(p.index for p in parts), strict=True):
        if all(a.shape[dim] == 1 and _equal(a, arrays[0]) for a in arrays):
            index.append(arrays[0])
            continue
        wide = [np.broadcast_to(a, (*a.shape[:dim], size, *a.shape[dim + 1 :])) for a, size in zip(arrays, sizes, strict=True)]
        most = [max(a.shape[k] for a in wide) for k in range(len(first.atoms))]
        index.append(np.concatenate([np.broadcast_to(a, (*most[:dim], a.shape[dim], *most[dim + 1 :])) for a in wide], axis=dim))
    return replace(first, atoms=(*first.atoms[:dim], sum(sizes), *first.atoms[dim + 1 :]), index=tuple(index))


def concatenated(parts: Sequence[Held]) -> Held:
    """The parts behind each other along dim 0, as an all-gather leaves them."""
    first = parts[0]
    if any(p.shape != first.shape for p in parts):
        raise Unsound(f"ranks bring parts of shapes {[p.shape for p in parts]}")
    if any(p.value != first.value or p.pending != first.pending for p in parts):
        raise Unsound("ranks bring parts of different values")
    if all(p.is_zero for p in parts) or first.is_empty:
        return zeros_like(first, (len(parts) * first.shape[0], *first.shape[1:]))
    parts = [dims_as_atoms(p) for p in parts] if len({(p.atoms, p.groups) for p in parts}) > 1 else list(parts)
    index = []
    for arrays in zip(*(p.index for p in parts), strict=True):
        if all(a.shape == arrays[0].shape and _equal(a, arrays[0]) for a in arrays[1:]):
            index.append(arrays[0][None])
        else:
            index.append(np.stack(np.broadcast_arrays(*arrays)))
    groups = (parts[0].groups[0] + 1, *parts[0].groups[1:])
    return Held(first.value, (len(parts), *parts[0].atoms), groups, tuple(index), first.pending)


def added(parts: Sequence[Held], axis: str, op: str) -> Held:
    """What a reduction over ``axis`` of these tensors holds: pending sums are done, and parts among zeros are put together."""
    first = parts[0]
    if any(p.shape != first.shape or p.value != first.value for p in parts):
        raise Unsound(f"ranks bring tensors of shapes {[p.shape for p in parts]} to one reduction")
    if first.is_empty:
        return replace(first, pending=first.pending - {(axis, op)})
    if (axis, op) in first.pending:
        if any(p.pending != first.pending or not is_same(p, first) for p in parts):
            raise Unsound("ranks bring different parts to one reduction")
        return replace(first, pending=first.pending - {(axis, op)})
    if any(a == axis for p in parts for a, _ in p.pending):
        raise Unsound(f"the reduction that is pending over {axis} is {dict(first.pending).get(axis, 'another')}, not {op}")
    if op in ("max", "min"):
        if any(p.is_zero or not is_same(p, first) for p in parts):
            raise Unsound(f"a {op} is taken over {axis} of different parts")
        return first
    bring = [p for p in parts if not p.is_zero]
    if not bring:
        return first
    if any(p.pending != bring[0].pending for p in bring):
        raise Unsound("ranks bring different pending sums to one reduction")
    if len({(p.atoms, p.groups) for p in bring}) > 1:
        bring = [dims_as_atoms(p) for p in bring]
    arrays = list(zip(*(p.index for p in bring), strict=True))
    differ = [d for d, along in enumerate(arrays) if not all(_equal(a, along[0]) for a in along[1:])]
    if len(bring) > 1 and not differ:
        raise Unsound(f"it is summed over {axis}, where several ranks hold the same")
    index = list(bring[0].index)
    if differ:
        spread = np.broadcast_arrays(*(a for d in differ for a in arrays[d]))
        by_dim = [np.stack(spread[i * len(bring) : (i + 1) * len(bring)]) for i in range(len(differ))]
        is_element = np.logical_and.reduce([a >= 0 for a in by_dim])
        if (is_element.sum(0) > 1).any():
            raise Unsound(f"parts overlap in a sum over {axis}")
        for d, positions in zip(differ, by_dim, strict=True):
            index[d] = np.where(is_element, positions, -1).max(0)
    return replace(bring[0], index=tuple(index))


def parts_of(x: Held, n: int) -> list[Held]:
    """``x`` in ``n`` equal parts along dim 0."""
    if not x.groups or x.shape[0] % n:
        raise Unsound(f"a tensor of shape {x.shape} is dealt out to {n} ranks")
    step = x.shape[0] // n
    if x.is_zero or x.is_empty:
        return [zeros_like(x, (step, *x.shape[1:]))] * n
    y = reshape(x, (n, step, *x.shape[1:]))
    return [reshape(slice_dim(y, 0, i, i + 1), (step, *x.shape[1:])) for i in range(n)]


def _one_atom(x: Held, dim: int) -> tuple[Held, int]:
    """``x`` with the atoms of a dim merged to one, and where it is."""
    at = sum(x.groups[:dim])
    if x.groups[dim] == 0:
        x = _inserted(x, at, dim)
    for _ in range(x.groups[dim] - 1):
        x = _merged(x, at)
    return replace(x, groups=tuple(1 if d == dim else g for d, g in enumerate(x.groups))), at


def _inserted(x: Held, at: int, dim: int) -> Held:
    index = tuple(np.expand_dims(i, at) for i in x.index)
    groups = tuple(1 if d == dim else g for d, g in enumerate(x.groups))
    return replace(x, atoms=(*x.atoms[:at], 1, *x.atoms[at:]), index=index, groups=groups)


def _without(x: Held, at: int) -> Held:
    return replace(x, atoms=(*x.atoms[:at], *x.atoms[at + 1 :]), index=tuple(i.squeeze(at) for i in x.index))


def _split(x: Held, at: int, major: int) -> Held:
    minor = x.atoms[at] // major
    index = tuple(i.reshape(*i.shape[:at], *((1, 1) if i.shape[at] == 1 else (major, minor)), *i.shape[at + 1 :]) for i in x.index)
    return replace(x, atoms=(*x.atoms[:at], major, minor, *x.atoms[at + 1 :]), index=index)


def _merged(x: Held, at: int) -> Held:
    """Atoms ``at`` and the one behind it as one."""
    a, b = x.atoms[at : at + 2]
    index = []
    for i in x.index:
        if i.shape[at] == i.shape[at + 1] == 1:
            index.append(i.squeeze(at))
        else:
            whole = np.broadcast_to(i, (*i.shape[:at], a, b, *i.shape[at + 2 :]))
            index.append(whole.reshape(*i.shape[:at], a * b, *i.shape[at + 2 :]))
    return replace(x, atoms=(*x.atoms[:at], a * b, *x.atoms[at + 2 :]), index=tuple(index))
