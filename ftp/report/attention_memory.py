"""Bytes that attention along a cut sequence needs while it runs, beside operands and results."""

import math
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from ftp.ops import attention
from ftp.ops.attention import PART, PART_BACKWARD, blocks, sum_dtype, tiles
from ftp.ops.attention_ring import RING, RINGS, Ring, Steps
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD
from ftp.runtime.local_shapes import LocalShapes


def of_attention(node: fx.Node, shapes: LocalShapes) -> int:
    """The most bytes at a time: copies of a tile, its results, sums in a wider dtype, and of a ring
    what is sent and has arrived. The kernels' own buffers are not counted.
    """
    if node.target not in (PART, PART_BACKWARD, VARLEN, VARLEN_BACKWARD, *RINGS):
        return 0
    given = _Given(node, shapes)
    if 0 in given.out:
        return 0
    if node.target in (VARLEN, VARLEN_BACKWARD):
        return given.in_documents()
    return given.in_ring() if node.target in RINGS else given.in_tiles()


class _Given:
    """The sizes of one call."""

    def __init__(self, node: fx.Node, shapes: LocalShapes):
        self.is_forward = node.target in (PART, RING, VARLEN)
        at = 0 if self.is_forward else 1
        q, k, v = (shapes.values[x][0] for x in node.args[at : at + 3])  # type: ignore[index]
        self.q, self.k, self.v, self.out = q.shape, k.shape, v.shape, (*q.shape[:3], v.shape[3])
        self.size, self.wide = q.dtype.itemsize, sum_dtype(q.dtype).itemsize
        is_varlen = node.target in (VARLEN, VARLEN_BACKWARD)
        # Behind the ends of documents, or a ring's mask.
        after = (3 if at == 0 else 6) + 2 * is_varlen + (node.target in RINGS)
        given: Any = map_arg(node.args[after:], lambda n: shapes.numbers.get(n, 0))
        self.rows, self.columns, *rest = given
        self.is_causal = bool(rest and rest[0]) and not is_varlen

    @property
    def extra(self) -> int:
        """Bytes of an element that is held in a wider dtype beside its own."""
        return self.wide if self.wide != self.size else 0

    def pair(self, keys: int, size: int) -> int:
        """Bytes of so many keys with their values."""
        return self.k[0] * self.k[1] * keys * (self.k[3] + self.v[3]) * size

    def tile(self, queries: int, keys: int) -> int:
        """Bytes of a tile: copies of its parts, what it computes, and what merges it."""
        rows = self.q[0] * self.q[1] * queries
        e, v = self.q[3], self.v[3]
        copies = rows * e * self.size * (queries < self.q[2]) + self.pair(keys, self.size)
        if self.is_forward:
            return copies + rows * (v * (self.size + self.extra) + 4 * self.wide)
        more = rows * 2 * v * self.size * (queries < self.q[2]) + rows * self.wide
        return copies + more + rows * e * self.size + self.pair(keys, self.size)

    def largest_tile(self, key_blocks: Sequence[Any], most: int) -> int:
        row_blocks = blocks(self.rows, self.q[2], most)
        found = {
            (t.queries.stop - t.queries.start, t.keys.stop - t.keys.start)
            for keys in key_blocks
            for rows in row_blocks
            for t in tiles(rows, keys, self.is_causal)
        }
        return max((self.tile(*sizes) for sizes in found), default=0)

    def in_tiles(self) -> int:
        queries, keys = self._most()
        key_blocks = blocks(self.columns, self.k[2], keys)
        found = self.largest_tile(key_blocks, queries)
        if self.is_forward:
            return found + math.prod(self.out) // self.q[2] * min(queries, self.q[2]) * self.extra
        return found + math.prod(self.q) * self.extra + self.pair(keys, self.extra)

    def _most(self) -> tuple[int, int]:
        if self.is_forward:
            return attention.QUERIES, attention.KEYS
        return attention.TILE, attention.TILE

    def in_documents(self) -> int:
        """All sums in the wider dtype, and a tile with its mask."""
        queries, keys = (min(attention.TILE, x[2]) for x in (self.q, self.k))
        found = self.tile(queries, keys) + queries * keys * (self.size + 1)
        if self.is_forward:
            return found + math.prod(self.out) * self.extra
        return found + math.prod(self.q) * self.extra + self.pair(self.k[2], self.extra)

    def in_ring(self) -> int:
        """The most over all steps of this rank."""
        ring = Ring.of(self.columns)
        rank = next(r for r in range(ring.n) if ring.length_of(r) == self.k[2])
        steps = Steps(ring, rank, self.rows, self.is_causal)
        queries, keys = self._most()
        base = math.prod(self.out if self.is_forward else self.q) * self.extra
        tile = self.largest_tile(ring.blocks(rank, 0, keys), queries)
        most = 0
        for at in range(len(steps.all)):
            piece, step = steps.at(at)
            _, far = steps.at(at + 1)
            before, back = steps.at(at - 1)
            width = ring.width
            held = self.pair(width, self.size) if step else 0
            if far:  # a copy that is sent, unless it is all of a tensor, and what arrives
                is_part = ring.count > 1 and self.k[0] * self.k[1] > 1
                held += self.pair(width, self.size) * (1 + is_part)
            if not self.is_forward:
                held += self.pair(width, self.wide) if step else 0
                held += 2 * self.pair(width, self.size) if back else 0
                summed = {of for of in (piece, before, steps.at(at - 2)[0]) if of >= 0}
                held += len(summed) * self.pair(width, self.extra)
            most = max(most, held + tile)
        return base + most
