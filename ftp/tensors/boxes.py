"""Boxes: the rectangular parts of a tensor that ranks hold, and their intersections."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod

from ftp.dataclass import dataclass
from ftp.sharding.local_pieces import Piece, local_pieces
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import PartitionSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """``size`` elements from ``start`` on along each dim of a global tensor."""

    start: Shape
    size: Shape

    @property
    def numel(self) -> int:
        return prod(self.size)

    def meet(self, other: "Box") -> "Box | None":
        """The intersection; None if it is empty.

        >>> Box((0, 0), (4, 4)).meet(Box((2, 3), (4, 4)))
        Box(start=(2, 3), size=(2, 1))
        """
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """The slices of the box in a local tensor that starts at ``origin`` of the global tensor.

        >>> Box((2, 3), (2, 1)).slices((2, 0))
        (slice(0, 2, None), slice(3, 4, None))
        """
        return tuple(
            slice(a - o, a - o + n) for a, n, o in zip(self.start, self.size, origin, strict=True)
        )

    def split(self, numel: int) -> list["Box"]:
        """This box as boxes of at most ``numel`` elements, in order.

        >>> [b.start for b in Box((0, 0), (2, 5)).split(3)]
        [(0, 0), (0, 3), (1, 0), (1, 3)]
        """
        if self.numel <= numel:
            return [self]
        # Inner dims are whole as far as they fit, then comes a part of one dim; outer dims have one
        # index per box.
        dim, inner = len(self.size) - 1, 1
        while inner * self.size[dim] <= numel:
            inner *= self.size[dim]
            dim -= 1
        step = max(1, numel // inner)
        found = []
        for at in product(
            *(range(a, a + n) for a, n in zip(self.start[:dim], self.size[:dim], strict=True))
        ):
            for a in range(0, self.size[dim], step):
                start = (*at, self.start[dim] + a, *self.start[dim + 1 :])
                found.append(
                    Box(start, (*(1,) * dim, min(step, self.size[dim] - a), *self.size[dim + 1 :]))
                )
        return found


@dataclass(frozen=True)
class ShardBox:
    """A box of the global tensor, and its start in the local shard."""

    box: Box
    origin: Shape

    def slices(self, box: Box) -> tuple[slice, ...]:
        """The slices in the shard of ``box``, a part of this box."""
        return box.slices(tuple(a - o for a, o in zip(self.box.start, self.origin, strict=True)))


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The positions of two boxes that have an element in common, if any two do.

    >>> first_overlap([Box((0,), (4,)), Box((4,), (4,)), Box((2,), (4,))])
    (0, 2)
    """
    if len(boxes) < 2:
        return None
    # Sweep along the dim with the most starts: compare each box with open boxes, which reach past
    # its start.
    dim = max(
        range(len(boxes[0].start)), key=lambda d: len({b.start[d] for b in boxes}), default=None
    )
    if dim is None:
        return 0, 1
    order = sorted(
        (i for i, box in enumerate(boxes) if box.numel), key=lambda i: boxes[i].start[dim]
    )
    open_: list[int] = []
    for i in order:
        open_ = [j for j in open_ if boxes[j].start[dim] + boxes[j].size[dim] > boxes[i].start[dim]]
        if (j := next((j for j in open_ if boxes[j].meet(boxes[i])), None)) is not None:
            return min(i, j), max(i, j)
        open_.append(i)
    return None


def parts_of(pieces: Sequence[Sequence[Piece]]) -> list[ShardBox]:
    """The parts of a shard, from its pieces of each dim; no part of an empty one.

    >>> [(p.box.start, p.origin) for p in parts_of([[(2, 4), (6, 8)], [(0, 3)]])]
    [((2, 0), (0, 0)), ((6, 0), (2, 0))]
    """
    starts = [list(accumulate((b - a for a, b in p), initial=0)) for p in pieces]
    found = []
    for at in product(*(range(len(p)) for p in pieces)):
        held = [pieces[d][k] for d, k in enumerate(at)]
        box = Box(tuple(a for a, _ in held), tuple(b - a for a, b in held))
        if box.numel:
            found.append(ShardBox(box, tuple(starts[d][k] for d, k in enumerate(at))))
    return found


@lru_cache(maxsize=4096)
def parts_on(mesh: Mesh, spec: PartitionSpec, shape: Shape) -> tuple[tuple[ShardBox, ...], ...]:
    """The parts that each rank of a mesh holds, row-major. On a simulated mesh one process holds
    the whole tensor.
    """
    if mesh.kind != "process":
        return (tuple(parts_of([[(0, n)] for n in shape])),)
    found = []
    for at in mesh.coordinates():
        pieces = zip(local_pieces(spec, shape, mesh.axes, at), shape, strict=True)
        found.append(tuple(parts_of([_joined(p, n) for p, n in pieces])))
    return tuple(found)


@lru_cache(maxsize=4096)
def holders(mesh: Mesh, spec: PartitionSpec, shape: Shape) -> dict[Box, tuple[int, ...]]:
    """Every box that is held on the mesh, and the positions of the ranks that hold it."""
    found: dict[Box, list[int]] = {}
    for position, parts in enumerate(parts_on(mesh, spec, shape)):
        for part in parts:
            found.setdefault(part.box, []).append(position)
    return {box: tuple(positions) for box, positions in found.items()}


def _joined(pieces: Sequence[Piece], size: int) -> Sequence[Piece]:
    """One piece if the pieces are the whole dim in order. Otherwise pieces are not joined, as boxes
    of ranks that share units would differ.
    """
    ends = [0, *(b for _, b in pieces)]
    is_whole = all(a == end for (a, _), end in zip(pieces, ends, strict=False))
    return [(0, size)] if is_whole and ends[-1] == size else pieces
