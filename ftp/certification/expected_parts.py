"""Expected parts: the positions of a value that each rank holds, by the specs and the claims."""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ftp.certification.cells import Cell
from ftp.certification.certificate import Coordinate, Operation, Spec
from ftp.certification.element_map import Index, MeshAxis, common_position
from ftp.certification.unsound import Refused, Unsound
from ftp.per_rank.planned import rank_axes, region_of
from ftp.per_rank.program import factor
from ftp.rules.local_op import Cut
from ftp.rules.notation import Dim
from ftp.rules.rule import BoundRule


class ExpectedParts:
    """Positions of each rank's parts; equal questions are answered once.

    Args:
        operations: with their claims, which say which sizes are cut over which axes.
    """

    def __init__(self, axes: Mapping[str, MeshAxis], operations: Sequence[Operation]):
        self.axes, self.operations = axes, operations
        self._cuts: dict[Any, Index] = {}
        self._wholes: dict[int, Index] = {}
        self._parts: dict[Any, tuple[Index, Index]] = {}
        self._chunks: dict[Any, list[tuple[Index, int]]] = {}

    @cached_property
    def rank_axes(self) -> dict[str, frozenset[str]]:
        """Per op the axes along which its results are one rank's: those of per-rank code."""
        found: dict[str, frozenset[str]] = {}
        for op in self.operations:
            operands = [found.get(ref.name, frozenset()) for ref in op.operands]
            found[op.name] = rank_axes(op.target, op.args, operands) if op.args else frozenset()
        return found

    # Parts by a spec.

    def cut_by_spec(self, shape: Sequence[int], spec: Spec, cell: Cell) -> list[Index]:
        found = []
        for dim, size in enumerate(shape):
            cuts = spec[dim] if dim < len(spec) else ()
            if not cuts:
                found.append(self.whole(int(size)))
                continue
            key = (cell, int(size), cuts)
            if key not in self._cuts:
                self._cuts[key] = self.cut(int(size), cuts, cell)
            found.append(self._cuts[key])
        return found

    def cut(self, size: int, cuts: Sequence[tuple[str, int, Any]], cell: Cell) -> Index:
        """The positions along a dim that each rank of a cell holds."""
        dims = {self.axes[axis].dim for axis, _, _ in cuts}
        ranges = [at if dim in dims else at[:1] for dim, at in enumerate(cell.at)]
        rows = []
        for coordinate in itertools.product(*ranges):
            index = np.arange(size)
            for axis, unit, packs in cuts:
                if packs == "zigzag":
                    held = self.zigzag_at(len(index), axis, coordinate)
                    index = np.concatenate([index[a : a + length] for a, length in held])
                    continue
                sizes = [len(index) // packs] * packs if isinstance(packs, int) else packs
                ends = np.cumsum(sizes).tolist()
                index = np.concatenate(
                    [
                        self.units(index[end - s : end], axis, unit, coordinate)
                        for s, end in zip(sizes, ends, strict=True)
                    ]
                )
            rows.append(index)
        if len({len(r) for r in rows}) > 1:
            raise Unsound("ranks with one program hold parts of different sizes")
        return np.stack(rows).reshape(*map(len, ranges), -1)

    def units(self, index: Index, axis: str, unit: int, coordinate: Coordinate) -> Index:
        """A rank's chunk of whole units. Neighbours share a unit if the ranks are a multiple."""
        count, n = -(-len(index) // unit), self.axes[axis].n
        if unit > 1 and 0 < count < n and n % count == 0:
            start, length = coordinate[self.axes[axis].dim] // (n // count), 1
        else:
            start, length = self.chunk_at(count, axis, coordinate)
        return index[start * unit : (start + length) * unit]

    # Parts by the claims of an op.

    def factors(
        self, op: Operation, rule: BoundRule, cell: Cell
    ) -> tuple[dict[str, Index], dict[str, list[Cut]]]:
        """Check an op's claims against its rule.

        Returns, per factor, the claimed positions on each rank, and the claimed cuts in numbers.

        The start of a cut is an array over the ranks if it differs between them.
        """
        index = {f: self.whole(size) for f, size in rule.sizes.items()}
        region = region_of(op.target, op.args)
        claimed = {claim.axis: claim.factor for claim in op.claims}
        for axis, n in region.items():
            if n != self.axes[axis].n or (n > 1 and claimed.get(axis) != factor(axis)):
                raise Refused(f"{op} is not cut over {axis}, whose ranks it enters or leaves")
        cuts: dict[str, list[Cut]] = {}
        cut_axes: dict[str, str] = {}
        for claim in op.claims:
            is_ring = (cut_axes.get(claim.axis), claim.factor) in rule.ring
            if claim.axis in cut_axes and (not is_ring or claim.factor in cuts):
                raise Refused(f"{op} is claimed to be cut twice over {claim.axis}")
            is_kept = claim.factor in rule.whole and claim.axis not in region and not is_ring
            if is_kept or claim.factor not in rule.sizes:
                raise Refused(
                    f"{op} is claimed to be cut along {claim.factor}, which its rule {rule} keeps"
                    " whole"
                )
            cut_axes.setdefault(claim.axis, claim.factor)
            outer, extent, inner = (
                self.size(s, cell) for s in (claim.outer, claim.extent, claim.inner)
            )
            held = index[claim.factor]
            if outer * extent * inner != held.shape[-1]:
                raise Refused(
                    f"{op} is claimed to be cut in {outer} x {extent} x {inner} of {held.shape[-1]}"
                )
            pieces = self.pieces(extent, claim.axis, claim.zigzag, cell)
            index[claim.factor] = self.part(held, outer, extent, inner, pieces)
            (start, _), *second = pieces
            length = sum(length for _, length in pieces)
            of_axis = {"axis": claim.axis, "n": self.axes[claim.axis].n}
            cut = Cut(outer, extent, inner, start, length, *second, **of_axis)  # type: ignore[arg-type]
            cuts.setdefault(claim.factor, []).append(cut)
        for axis, slots in op.partial.items():
            if axis in cut_axes:
                raise Refused(
                    f"{op} is cut over {axis}, and its operands {slots} are pending over it"
                )
            if tuple(sorted(slots)) not in {tuple(sorted(g)) for g in rule.linear}:
                raise Refused(
                    f"{op} is not linear in its operands {slots} together, which are pending over"
                    f" {axis}"
                )
        return index, cuts

    def whole(self, size: int) -> Index:
        if size not in self._wholes:
            self._wholes[size] = np.arange(size).reshape(*(1,) * len(self.axes), size)
        return self._wholes[size]

    def part(
        self, held: Index, outer: int, extent: int, inner: int, pieces: Sequence[tuple[Index, int]]
    ) -> Index:
        """The positions that a cut leaves each rank, piece after piece."""
        begins = [(start.tobytes(), start.shape, length) for start, length in pieces]
        key = (id(held), outer, extent, inner, *begins)
        if key not in self._parts:
            seen = held.reshape(*held.shape[:-1], outer, extent, inner)
            parts = []
            for start, length in pieces:
                if (first := common_position(start)) is not None:
                    parts.append(seen[..., first : first + length, :])
                    continue
                count = np.arange(length).reshape(length, 1)
                places = start.reshape(*start.shape, 1, 1, 1) + count
                parts.append(np.take_along_axis(seen, places, -2))
            lead = np.broadcast_shapes(*(part.shape[:-3] for part in parts))
            parts = [np.broadcast_to(part, (*lead, *part.shape[-3:])) for part in parts]
            found = np.concatenate(parts, -2) if len(parts) > 1 else parts[0]
            self._parts[key] = held, found.reshape(*found.shape[:-3], -1)
        return self._parts[key][1]

    # Chunks.

    def chunk_at(self, size: int, axis: str, coordinate: Coordinate) -> tuple[int, int]:
        """Start and length of a rank's chunk. As in ``torch.chunk`` the last ones are shorter or
        empty.
        """
        length = math.ceil(size / self.axes[axis].n)
        start = min(coordinate[self.axes[axis].dim] * length, size)
        return start, min(length, size - start)

    def zigzag_at(self, size: int, axis: str, coordinate: Coordinate) -> list[tuple[int, int]]:
        """Start and length of a rank's two chunks of a zigzag, one counted from the front, one from
        the back.
        """
        along = self.axes[axis]
        length, rank = math.ceil(size / (2 * along.n)), coordinate[along.dim]
        starts = [min(i * length, size) for i in (rank, 2 * along.n - 1 - rank)]
        return [(start, min(length, size - start)) for start in starts]

    def pieces_at(
        self, size: int, axis: str, zigzag: bool, coordinate: Coordinate
    ) -> list[tuple[int, int]]:
        if zigzag:
            return self.zigzag_at(size, axis, coordinate)
        return [self.chunk_at(size, axis, coordinate)]

    def pieces(self, size: int, axis: str, zigzag: bool, cell: Cell) -> list[tuple[Index, int]]:
        """The starts of each piece of a cell's ranks, and its common length."""
        key = (cell, size, axis, zigzag)
        if key not in self._chunks:
            along = self.axes[axis]
            found = [
                self.pieces_at(size, axis, zigzag, (0,) * along.dim + (i,))
                for i in cell.at[along.dim]
            ]
            if len({tuple(length for _, length in held) for held in found}) > 1:
                raise Refused(
                    f"ranks with one program hold chunks of different sizes of {size} over {axis}"
                )
            shape = [len(found) if dim == along.dim else 1 for dim in range(len(self.axes))]
            self._chunks[key] = [
                (np.array([start for start, _ in of_ranks]).reshape(shape), of_ranks[0][1])
                for of_ranks in zip(*found, strict=True)
            ]
        return self._chunks[key]

    def length_at(self, size: int, axis: str, zigzag: bool, coordinate: Coordinate) -> int:
        return sum(length for _, length in self.pieces_at(size, axis, zigzag, coordinate))

    def size(self, size: Any, cell: Cell) -> int:
        if isinstance(size, int):
            return size
        const, chunks = size
        return const * math.prod(
            sum(length for _, length in self.pieces(self.size(whole, cell), axis, zigzag, cell))
            for whole, axis, _, zigzag in chunks
        )

    def size_at(self, size: Any, coordinate: Coordinate) -> int:
        if isinstance(size, int):
            return size
        const, chunks = size
        return const * math.prod(
            self.length_at(self.size_at(whole, coordinate), axis, zigzag, coordinate)
            for whole, axis, _, zigzag in chunks
        )

    @cached_property
    def sizes(self) -> list[tuple[Any, str, bool]]:
        """The distinct sizes that the claims cut, each with its axis and whether in zigzag."""
        found: dict[str, tuple[Any, str, bool]] = {}

        def collect(size: Any, axis: str | None, zigzag: bool) -> None:
            if axis is not None:
                found.setdefault(f"{size} {axis} {zigzag}", (size, axis, zigzag))
            for whole, inner, _, dealt in () if isinstance(size, int) else size[1]:
                collect(whole, inner, dealt)

        for op in self.operations:
            for claim in op.claims:
                collect(claim.extent, claim.axis, claim.zigzag)
                collect(claim.outer, None, False)
                collect(claim.inner, None, False)
        return list(found.values())

    def lengths(self, coordinate: Coordinate) -> list[int]:
        return [
            self.length_at(self.size_at(size, coordinate), axis, zigzag, coordinate)
            for size, axis, zigzag in self.sizes
        ]


def positions_along(dim: Dim, index: Mapping[str, Index], sizes: Mapping[str, int]) -> Index:
    """Positions along a dim composed of factors, major to minor."""
    if len(dim) == 1:
        return index[dim[0]]
    lead = next(iter(index.values())).ndim - 1 if index else 0
    found = np.zeros((1,) * (lead + 1), dtype=np.int64)
    for name in dim:
        both = found[..., :, None] * sizes[name] + index[name][..., None, :]
        found = both.reshape(*both.shape[:-2], -1)
    return found
