"""Bytes that attention along a cut sequence needs while it runs, beside operands and results."""

import math
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from ftp.ops import attention
from ftp.ops.attention import PART, PART_BACKWARD, blocks, sum_dtype, tiles
from ftp.ops.attention_flex_ring import FLEX_RING, FLEX_RING_BACKWARD
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD
from ftp.ops.key_ring import Steps
from ftp.ops.rings import RINGS, RingOp
from ftp.runtime.local_shapes import LocalShapes


def of_attention(node: fx.Node, shapes: LocalShapes) -> int:
    """The most bytes at a time: copies of a tile, its results, sums in a wider dtype, and of a ring
    what is sent and has arrived. The kernels' own buffers are not counted.
    """
    target: Any = node.target
    ring = None if target in (FLEX_RING, FLEX_RING_BACKWARD) else RINGS.get(target)
    if ring is None and target not in (PART, PART_BACKWARD, VARLEN, VARLEN_BACKWARD):
        return 0
    given = _Given(node, shapes)
    if 0 in given.out:
        return 0
    if ring is not None:
        return given.in_ring(ring, map_arg(node.args, lambda n: shapes.numbers.get(n, 0)))
    return given.in_documents() if given.is_varlen else given.in_tiles()


class _Given:
    """The sizes of one call."""

    def __init__(self, node: fx.Node, shapes: LocalShapes):
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        self.is_forward = names[0] == "q"
        at = 0 if self.is_forward else 1
        q, k, v = (shapes.values[x][0] for x in node.args[at : at + 3])  # type: ignore[index]
        self.q, self.k, self.v, self.out = q.shape, k.shape, v.shape, (*q.shape[:3], v.shape[3])
        self.size, self.wide = q.dtype.itemsize, sum_dtype(q.dtype).itemsize
        self.is_varlen = "ends_q" in names
        given: Any = map_arg(node.args, lambda n: shapes.numbers.get(n, 0))
        self.rows, self.columns, *rest = given[names.index("rows") :]
        self.is_causal = bool(rest and rest[0]) and not self.is_varlen

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

    def in_ring(self, op: RingOp, args: Sequence[Any]) -> int:
        """The most over all steps of this rank."""
        needs = op.needs(args)
        ring = needs.ring
        rank = next(r for r in range(ring.n) if ring.length_of(r) == self.k[2])
        queries, keys = self._most()
        base = math.prod(self.out if self.is_forward else self.q) * self.extra
        if self.is_varlen:
            queries, keys = min(queries, self.q[2]), min(keys, ring.width)
            tile = self.tile(queries, keys) + queries * keys * (self.size + 1)
        else:
            tile = self.largest_tile(ring.blocks(rank, 0, keys), queries)
        steps = Steps(needs, rank)
        travel = travelling(steps, self.k, self.v, (self.size, self.wide), op.returns)
        return base + tile + travel


def travelling(
    steps: Steps, k: Sequence[int], v: Sequence[int], sizes: tuple[int, int], returns: bool
) -> int:
    """The most bytes of keys and values, of a ring's steps: those that are sent and have arrived,
    and sums of gradients.

    Args:
        k, v: shapes of keys and values.
        sizes: bytes of an element, and in the dtype of sums.
        returns: whether gradients go back.
    """
    ring, (size, wide), most = steps.ring, sizes, 0
    elements = k[0] * k[1] * ring.width * (k[3] + v[3])
    one, is_part = elements * size, ring.count > 1 and k[0] * k[1] > 1
    for at in range(len(steps.all)):
        piece, step = steps.at(at)
        _, far = steps.at(at + 1)
        before, back = steps.at(at - 1)
        held = one if step else 0
        if far:  # a copy that is sent, unless it is all of a tensor, and what arrives
            held += one * (1 + is_part)
        if returns:
            held += elements * wide if step else 0
            held += 2 * one if back else 0
            summed = {of for of in (piece, before, steps.at(at - 2)[0]) if of >= 0}
            held += len(summed) * elements * wide * (wide != size)
        most = max(most, held)
    return most
