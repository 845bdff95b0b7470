"""Expected parts: the positions of a value that the specs and the claims give each rank."""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ftp.certification.cells import Cell
from ftp.certification.certificate import Operation, Spec
from ftp.certification.element_map import DimPart, MeshAxis
from ftp.certification.positions import concatenated, from_array, whole
from ftp.certification.progression import Index, array_of
from ftp.certification.ranks import shrunk
from ftp.certification.unsound import Refused, Unsound
from ftp.per_rank.planned import rank_axes, region_of
from ftp.per_rank.program import factor
from ftp.rules.local_op import LocalCut
from ftp.rules.notation import Dim
from ftp.rules.rule import BoundRule


class ExpectedParts:
    """The positions that each rank holds, by the specs and by the claims of ``operations``."""

    def __init__(self, axes: Mapping[str, MeshAxis], operations: Sequence[Operation]):
        self.axes, self.operations = axes, operations
        self._cuts: dict[Any, DimPart] = {}
        self._factors: dict[Any, tuple[dict[str, DimPart], dict[str, list[LocalCut]]]] = {}
        self._chunks: dict[Any, list[tuple[Index, int]]] = {}

    @cached_property
    def rank_axes(self) -> dict[str, frozenset[str]]:
        """Per op of per-rank code, the axes along which each rank has a value of its own."""
        found: dict[str, frozenset[str]] = {}
        for op in self.operations:
            operands = [found.get(ref.name, frozenset()) for ref in op.operands]
            found[op.name] = rank_axes(op.target, op.args, operands) if op.args else frozenset()
        return found

    def whole(self, size: int) -> DimPart:
        return DimPart(whole(len(self.axes) + 1, len(self.axes), size), size)

    # Parts by a spec.

    def cut_by_spec(self, shape: Sequence[int], spec: Spec, cell: Cell) -> list[DimPart]:
        return [
            self.cut(size, spec[dim] if dim < len(spec) else (), cell)
            for dim, size in enumerate(shape)
        ]

    def cut(self, size: int, cuts: Sequence[tuple[str, int, Any]], cell: Cell) -> DimPart:
        """The positions that each rank of a cell holds along a dim."""
        key = (cell, size, tuple(cuts))
        if key not in self._cuts:
            found = self._cut(size, cuts, cell)
            self._cuts[key] = self._cut_alone(size, cuts, cell) if found is None else found
        return self._cuts[key]

    def _cut(self, size: int, cuts: Sequence[tuple[str, int, Any]], cell: Cell) -> DimPart | None:
        """The part of a dim that the ranks of a cell hold; None if its size varies between them."""
        held = self.whole(size)
        for axis, unit, packs in cuts:
            sizes = [held.size // packs] * packs if isinstance(packs, int) else packs
            of_ranks = [
                self.zigzag_at(held.size, axis, rank)
                if packs == "zigzag"
                else [
                    self.units(end - pack, pack, axis, unit, rank)
                    for pack, end in zip(sizes, itertools.accumulate(sizes), strict=True)
                ]
                for rank in cell.at[self.axes[axis].dim]
            ]
            if _differ_in_length(of_ranks):
                return None
            held = self.taken(held, 1, held.size, 1, self.starts(of_ranks, axis))
        return held

    def _cut_alone(self, size: int, cuts: Sequence[tuple[str, int, Any]], cell: Cell) -> DimPart:
        """`_cut`, one rank at a time."""
        dims = {self.axes[axis].dim for axis, _, _ in cuts}
        ranges = [at if dim in dims else at[:1] for dim, at in enumerate(cell.at)]
        rows = []
        for coordinate in itertools.product(*ranges):
            alone = self._cut(size, cuts, Cell(cell.graph, tuple((i,) for i in coordinate)))
            assert alone is not None, "one rank's parts are of one size"
            rows.append(alone.positions())
        if len({len(r) for r in rows}) > 1:
            raise Unsound("ranks with one program hold parts of different sizes")
        stacked = np.stack(rows).reshape(*map(len, ranges), -1)
        return DimPart(from_array(stacked), len(rows[0]))

    def units(self, first: int, size: int, axis: str, unit: int, rank: int) -> tuple[int, int]:
        """Start and length of a rank's chunk, in whole units, of ``size`` elements from ``first``
        on. If the number of ranks is a multiple of the number of units, neighbours share a unit.
        """
        count, n = -(-size // unit), self.axes[axis].n
        if unit > 1 and 0 < count < n and n % count == 0:
            start, length = rank // (n // count), 1
        else:
            start, length = self.chunk_at(count, axis, rank)
        begin, end = min(start * unit, size), min((start + length) * unit, size)
        return first + begin, end - begin

    # Parts by the claims of an op.

    def factors(
        self, op: Operation, rule: BoundRule, cell: Cell
    ) -> tuple[dict[str, DimPart], dict[str, list[LocalCut]]]:
        """Check an op's claims against its rule.

        Returns:
            Per factor the claimed positions on each rank, and the claimed cuts. The start of a cut
            is an array with a dim for each mesh axis.
        """
        if (cell, op.name) not in self._factors:
            self._check_claims(op, rule)
            self._factors[cell, op.name] = self._cut_factors(op, rule, cell)
        return self._factors[cell, op.name]

    def _check_claims(self, op: Operation, rule: BoundRule) -> None:
        """Refuse cuts and pending operands that the rule does not allow."""
        region = region_of(op.target, op.args)
        claimed = {claim.axis: claim.factor for claim in op.claims}
        for axis, n in region.items():
            if n != self.axes[axis].n or (n > 1 and claimed.get(axis) != factor(axis)):
                raise Refused(f"{op} is not cut over {axis}, whose ranks it enters or leaves")
        first: dict[str, str] = {}  # per axis the first factor that it cuts
        seen: set[tuple[str, str]] = set()
        for claim in op.claims:
            is_ring = (first.get(claim.axis), claim.factor) in (*rule.ring, *rule.together)
            is_again = (claim.axis, claim.factor) in seen
            if claim.axis in first and (not is_ring or is_again):
                raise Refused(f"{op} is claimed to be cut twice over {claim.axis}")
            is_kept = (
                claim.factor in rule.whole
                and claim.axis not in region
                and not is_ring
                and not self._starts_alike(op, rule, claim.factor)
            )
            if is_kept or claim.factor not in rule.sizes:
                raise Refused(
                    f"{op} is claimed to be cut along {claim.factor}, which its rule {rule} keeps"
                    " whole"
                )
            first.setdefault(claim.axis, claim.factor)
            seen.add((claim.axis, claim.factor))
        for axis, slots in op.partial.items():
            if axis in first:
                raise Refused(
                    f"{op} is cut over {axis}, and its operands {slots} are pending over it"
                )
            if tuple(sorted(slots)) not in {tuple(sorted(g)) for g in rule.linear}:
                raise Refused(
                    f"{op} is not linear in its operands {slots} together, which are pending over"
                    f" {axis}"
                )

    def _cut_factors(
        self, op: Operation, rule: BoundRule, cell: Cell
    ) -> tuple[dict[str, DimPart], dict[str, list[LocalCut]]]:
        """Cut the rule's factors as an op claims, claim after claim."""
        index = {f: self.whole(size) for f, size in rule.sizes.items()}
        cuts: dict[str, list[LocalCut]] = {}
        for claim in op.claims:
            outer, extent, inner = (
                self.size(s, cell) for s in (claim.outer, claim.extent, claim.inner)
            )
            held = index[claim.factor]
            if outer * extent * inner != held.size:
                raise Refused(
                    f"{op} is claimed to be cut in {outer} x {extent} x {inner} of {held.size}"
                )
            pieces = self.pieces(extent, claim.axis, claim.zigzag, cell)
            index[claim.factor] = self.taken(held, outer, extent, inner, pieces)
            bounds: Any = pieces
            (start, _), *second = bounds
            length = sum(length for _, length in pieces)
            along = self.axes[claim.axis]
            of_axis: Any = {"axis": claim.axis, "n": along.n, "place": along.dim}
            cut = LocalCut(outer, extent, inner, start, length, *second, **of_axis)
            cuts.setdefault(claim.factor, []).append(cut)
        return index, cuts

    def _starts_alike(self, op: Operation, rule: BoundRule, factor: str) -> bool:
        """Whether an op claims to be cut along a pair of factors that its rule cuts together, over
        one axis only, and the sizes of both allow it.
        """
        for pair in rule.together:
            if factor in pair:
                claims = [claim for claim in op.claims if claim.factor in pair]
                if [claim.factor for claim in claims] != list(pair):
                    return False
                first, second = claims
                plain = all(
                    (claim.outer, claim.inner, claim.zigzag) == (1, 1, False) for claim in claims
                )
                sizes, n = [rule.sizes[f] for f in pair], self.axes[first.axis].n
                may = rule.may_cut_together(pair, sizes, n)
                return plain and first.axis == second.axis and may
        return False

    def taken(
        self,
        held: DimPart,
        outer: int,
        extent: int,
        inner: int,
        pieces: Sequence[tuple[Index, int]],
    ) -> DimPart:
        """The positions of ``held``, viewed as (outer, extent, inner), at ``pieces`` of the extent,
        each (starts, length).
        """
        dim = len(self.axes)
        seen = held.index.split(dim, outer, extent * inner).split(dim + 1, extent, inner)
        lengths = [length for _, length in pieces]
        parts = [seen.from_starts(dim + 1, start, length) for start, length in pieces]
        found = concatenated(parts, dim + 1, lengths)
        length = sum(lengths)
        found = found.merged(dim + 1, length, inner).merged(dim, outer, length * inner)
        return DimPart(found, outer * length * inner)

    def starts(
        self, of_ranks: Sequence[Sequence[tuple[int, int]]], axis: str
    ) -> list[tuple[Index, int]]:
        """Per piece its starts, an array with a dim for each mesh axis, and its length.

        Args:
            of_ranks: per rank along the axis, (start, length) of each piece. Lengths are equal.
        """
        dim = self.axes[axis].dim
        shape = [len(of_ranks) if d == dim else 1 for d in range(len(self.axes))]
        return [
            (array_of(start for start, _ in pieces).reshape(shape), pieces[0][1])
            for pieces in zip(*of_ranks, strict=True)
        ]

    # Chunks.

    def chunk_at(self, size: int, axis: str, rank: int) -> tuple[int, int]:
        """Start and length of a rank's chunk. As in ``torch.chunk`` the last ones are shorter or
        empty.
        """
        length = -(-size // self.axes[axis].n)
        start = min(rank * length, size)
        return start, min(length, size - start)

    def zigzag_at(self, size: int, axis: str, rank: int) -> list[tuple[int, int]]:
        """Start and length of a rank's two chunks of a zigzag: ``rank`` and its mirror image."""
        n = self.axes[axis].n
        length = -(-size // (2 * n))
        starts = [min(i * length, size) for i in (rank, 2 * n - 1 - rank)]
        return [(start, min(length, size - start)) for start in starts]

    def pieces_at(self, size: int, axis: str, zigzag: bool, rank: int) -> list[tuple[int, int]]:
        return self.zigzag_at(size, axis, rank) if zigzag else [self.chunk_at(size, axis, rank)]

    def pieces(self, size: int, axis: str, zigzag: bool, cell: Cell) -> list[tuple[Index, int]]:
        """Per piece of a claimed cut its starts on the ranks of a cell, and its length."""
        key = (cell, size, axis, zigzag)
        if key not in self._chunks:
            ranks = cell.at[self.axes[axis].dim]
            found = [self.pieces_at(size, axis, zigzag, i) for i in ranks]
            if _differ_in_length(found):
                raise Refused(
                    f"ranks with one program hold chunks of different sizes of {size} over {axis}"
                )
            self._chunks[key] = self.starts(found, axis)
        return self._chunks[key]

    def size(self, size: Any, cell: Cell) -> int:
        """The number that a claimed size is on a cell."""
        if isinstance(size, int):
            return size
        const, chunks = size
        return const * math.prod(
            sum(length for _, length in self.pieces(self.size(whole, cell), axis, zigzag, cell))
            for whole, axis, _, zigzag in chunks
        )

    @cached_property
    def sizes(self) -> list[tuple[Any, str, bool]]:
        """The distinct cuts of the claims: size, axis, and whether in zigzag."""
        found: dict[str, tuple[Any, str, bool]] = {}

        def collect(size: Any, axis: str | None, zigzag: bool) -> None:
            if axis is not None:
                found.setdefault(f"{size} {axis} {zigzag}", (size, axis, zigzag))
            for before, inner, _, dealt in () if isinstance(size, int) else size[1]:
                collect(before, inner, dealt)

        for op in self.operations:
            for claim in op.claims:
                collect(claim.extent, claim.axis, claim.zigzag)
                collect(claim.outer, None, False)
                collect(claim.inner, None, False)
        return list(found.values())

    @cached_property
    def lengths(self) -> list[Index]:
        """Per distinct cut, the chunk's length on each rank: an array with a dim for each axis."""
        return [self._lengths(*cut) for cut in self.sizes]

    def _lengths(self, size: Any, axis: str, zigzag: bool) -> Index:
        # Ranks with equal sizes before the cut are computed once.
        along, before = self.axes[axis], self._sizes(size)
        which = {size: i for i, size in enumerate(dict.fromkeys(before.ravel().tolist()))}
        lengths = array_of(
            sum(n for _, n in self.pieces_at(s, axis, zigzag, i))
            for s in which
            for i in range(along.n)
        ).reshape(len(which), along.n)
        rows = np.array([which[s] for s in before.ravel().tolist()]).reshape(before.shape)
        ranks = [along.n if d == along.dim else 1 for d in range(len(self.axes))]
        return shrunk(lengths[rows, np.arange(along.n).reshape(ranks)])

    def positions_along(
        self, dim: Dim, index: Mapping[str, DimPart], sizes: Mapping[str, int]
    ) -> DimPart:
        """The part of a dim that consists of factors, major to minor."""
        if len(dim) == 1:
            return index[dim[0]]
        at = len(self.axes)
        found = self.whole(1)
        for name in dim:
            part = index[name]
            major = found.index.with_dim(at + 1).scaled(sizes[name])
            both = major.plus(part.index.with_dim(at)).merged(at, found.size, part.size)
            found = DimPart(both, found.size * part.size)
        return found

    def _sizes(self, size: Any) -> Index:
        """The number that a claimed size is on each rank."""
        const, chunks = (size, ()) if isinstance(size, int) else size
        found = array_of([const]).reshape((1,) * len(self.axes))
        for inner, axis, _, zigzag in chunks:
            found = found * self._lengths(inner, axis, zigzag)
        return found


def _differ_in_length(of_ranks: Sequence[Sequence[tuple[int, int]]]) -> bool:
    return len({tuple(length for _, length in pieces) for pieces in of_ranks}) > 1
