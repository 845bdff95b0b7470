"""The pieces of a tensor that a rank holds by a spec."""

import itertools
from collections.abc import Iterable, Sequence

from ftp.sharding.spec import P, Stage, Units


def local_shape(
    spec: P,
    shape: Sequence[int],
    axes: dict[str, int],
    coordinate: dict[str, int] | None = None,
) -> tuple[int, ...]:
    """The shape of the shard at ``coordinate`` {axis: index}; by default the largest in each dim,
    which is the first rank's, except in a zigzag.

    >>> local_shape(P("tp"), (5, 3), {"tp": 2}), local_shape(P("tp"), (5, 3), {"tp": 2}, {"tp": 1})
    ((3, 3), (2, 3))
    """
    if coordinate is None and any(c.zigzag for d in range(len(spec)) for c in spec.cuts(d)):
        ranges = [range(n) if axis in spec.axes else range(1) for axis, n in axes.items()]
        places = [dict(zip(axes, at, strict=True)) for at in itertools.product(*ranges)]
        shapes = [local_shape(spec, shape, axes, place) for place in places]
        return tuple(map(max, zip(*shapes, strict=True)))
    pieces = local_pieces(spec, shape, axes, coordinate or dict.fromkeys(axes, 0))
    return tuple(sum(stop - start for start, stop in dim) for dim in pieces)


Interval = tuple[int, int]  # offset in a dim, and length
Piece = tuple[int, int]  # start and stop in a dim


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals with adjacent ones joined, without empty ones.

    >>> joined([(0, 2), (2, 1), (4, 0), (5, 1)])
    [(0, 3), (5, 1)]
    """
    found: list[Interval] = []
    for start, length in intervals:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((start, length))
    return found


def local_pieces(
    spec: P, shape: Sequence[int], axes: dict[str, int], coordinate: dict[str, int]
) -> list[list[Piece]]:
    """For each dim, the pieces (start, stop) of the global dim in the shard at ``coordinate``, in
    order. Only packed dims and zigzags have several.

    Dims are cut like ``torch.chunk``, one axis after another.

    >>> local_pieces(P("tp"), (5, 3), {"tp": 2}, {"tp": 1})
    [[(3, 5)], [(0, 3)]]
    """
    found = []
    for dim, size in enumerate(shape):
        held: list[Piece] = [(0, size)]
        for cut in spec.cuts(dim):
            length = sum(stop - start for start, stop in held)
            held = [
                p
                for piece in cut_pieces(length, axes[cut.axis], coordinate[cut.axis], cut)
                for p in pieces_within(held, *piece) or [(held[0][0], held[0][0])]
            ]
        found.append(held)
    return found


def cut_pieces(size: int, n: int, index: int, cut: Units) -> list[Piece]:
    """The pieces (start, stop) of a dim of ``size`` that rank ``index`` of ``n`` holds, pack after
    pack; at least one, which may be empty.

    >>> [cut_pieces(6, 4, i, Units("tp", 3)) for i in range(4)]
    [[(0, 3)], [(0, 3)], [(3, 6)], [(3, 6)]]
    """
    if isinstance(cut, Stage):
        return [(0, size if index == cut.stage % n else 0)]
    if cut.zigzag:
        dealt = [chunk(size, 2 * n, i) for i in (index, 2 * n - 1 - index)]
        held = joined(dealt)
    else:
        dealt, begin = [], 0
        for pack in cut.sizes(size):
            repeats = cut.repeats(pack, n)
            start, length = chunk(pack, n // repeats, index // repeats, cut.size)
            dealt.append((begin + start, length))
            begin += pack
        held = [one for one in dealt if one[1]]
    return [(start, start + length) for start, length in held or dealt[:1]]


def pieces_within(held: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces of the global dim at (start, stop) of the concatenation of ``held``; none of them
    is empty.
    """
    found, before = [], 0
    for a, b in held:
        low, high = max(start, before), min(stop, before + b - a)
        if low < high:
            found.append((a + low - before, a + high - before))
        before += b - a
    return found


def cut_length(size: int, n: int, index: int, cut: Units) -> int:
    return sum(stop - start for start, stop in cut_pieces(size, n, index, cut))


def is_factored(spec: P, dim: int, size: int, axes: dict[str, int]) -> bool:
    """Whether every cut of the dim is a cut of ``f`` in ``[outer, f, inner]``. False if packs
    differ in size, or ranks share units.
    """
    sizes = {size}
    for cut in spec.cuts(dim):
        n = axes[cut.axis]
        if isinstance(cut, Stage) and n > 1:
            return False
        for held in sizes:
            packs = cut.sizes(held)
            if n > 1 and (len(set(packs)) > 1 or cut.repeats(packs[0], n) > 1):
                return False
        sizes = {cut_length(held, n, i, cut) for held in sizes for i in range(n)}
    return True


def chunk(size: int, n: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Offset and length of chunk ``index`` of ``n``, like ``torch.chunk`` in whole units; the last
    unit may be short.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // (unit * n)) * unit
    start = min(index * step, size)
    return start, min(step, size - start)
