"""Peak memory of an attention call along a cut sequence, beside its operands and results."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from ftp.ops import attention
from ftp.ops.attention import PART, PART_BACKWARD, Block, blocks, pieces_of, sum_dtype, tiles
from ftp.ops.attention_flex_ring import FLEX_RING, FLEX_RING_BACKWARD
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD
from ftp.ops.key_ring import Steps
from ftp.ops.ring_pieces import Needs
from ftp.ops.rings import RINGS
from ftp.runtime.local_shapes import LocalShapes, LocalTensor

_OF_KERNEL = 512  # keys that torch's kernel for CPUs takes at a time


def of_attention(node: fx.Node, shapes: LocalShapes) -> int:
    """The most bytes that an attention call holds at a time: copies of a tile's operands, its
    results, sums in a wider dtype, a ring's sent and received tensors, and the buffers of a CPU's
    kernel on one thread. 0 for any other op.
    """
    target: Any = node.target
    ring = None if target in (FLEX_RING, FLEX_RING_BACKWARD) else RINGS.get(target)
    if ring is None and target not in (PART, PART_BACKWARD, VARLEN, VARLEN_BACKWARD):
        return 0
    call = _CallSizes(node, shapes)
    if 0 in call.out or not call.k.shape[2]:
        return 0
    if ring is None:
        return call.after_sums(call.in_documents() if call.is_varlen else call.in_tiles())
    needs = ring.needs(map_arg(node.args, lambda n: shapes.numbers.get(n, 0)))
    steps = Steps(needs, rank_of(needs, call.rows, call.q.shape[2], call.k.shape[2]))
    return call.after_sums(call.in_ring(steps))


def rank_of(needs: Needs, rows: Sequence[int], queries: int, keys: int) -> int:
    """The rank of a ring that holds these queries and so many keys."""
    ring = needs.ring
    ranks = [r for r in range(ring.n) if ring.length_of(r) == keys]
    mine = pieces_of(rows, queries)
    return next((r for r in ranks if ring.queries_of(rows, r) == mine), ranks[0])


def is_copied(x: LocalTensor, length: int) -> bool:
    """Whether ``length`` elements of a sequence (dim 2) are copied to be contiguous."""
    stride = 1
    for size, held in reversed(list(zip(x.shape, x.stride, strict=True))):
        if size != 1 and held != stride:
            return True
        stride *= size
    return length < x.shape[2] and x.shape[0] * x.shape[1] > 1


@functools.lru_cache(256)
def longest_block(part: tuple[int, ...], size: int) -> int:
    """The length of a part's longest block, of at most ``TILE`` elements."""
    return max((block.length for block in blocks(part, size, attention.TILE)), default=0)


class _CallSizes:
    """The sizes of one call.

    Attributes:
        of_queries: the tensors with a dim of queries.
        size, wide: bytes of an element of the tensors, and in the dtype of sums.
        heads, of_keys: batches times heads, of queries and of keys.
    """

    def __init__(self, node: fx.Node, shapes: LocalShapes):
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        self.is_forward = names[0] == "q"
        tensors = [n for n in ("grad_out", "q", "k", "v", "out", "logsumexp") if n in names]
        args: Any = node.args
        held = {n: shapes.values[args[names.index(n)]][0] for n in tensors}
        self.q, self.k, self.v = held["q"], held["k"], held["v"]
        self.of_queries = [x for name, x in held.items() if name not in ("k", "v")]
        self.out = (*self.q.shape[:3], self.v.shape[3])
        self.size, self.wide = self.q.dtype.itemsize, sum_dtype(self.q.dtype).itemsize
        self.is_varlen, self.is_ring = "ends_q" in names, "group" in names
        given: Any = map_arg(node.args, lambda n: shapes.numbers.get(n, 0))
        self.rows, self.columns, *rest = given[names.index("rows") :]
        self.is_causal = bool(rest and rest[0]) and not self.is_varlen
        at = names.index("attn_mask") if "attn_mask" in names else None
        mask = node.kwargs.get("attn_mask") if at is None or at >= len(node.args) else node.args[at]
        self.has_mask = isinstance(mask, fx.Node)
        if self.is_varlen:
            left, right = (given[names.index(side)] for side in ("left", "right"))
            self.has_mask = left >= 0 or right > 0
        self.heads, self.of_keys = math.prod(self.q.shape[:2]), math.prod(self.k.shape[:2])

    @property
    def more(self) -> int:
        """Bytes per element of a copy in a wider dtype; 0 if the dtype is wide enough."""
        return self.wide if self.wide != self.size else 0

    def pair(self, keys: int, size: int) -> int:
        """Bytes of ``keys`` keys and their values, of ``size`` bytes an element."""
        return self.of_keys * keys * (self.k.shape[3] + self.v.shape[3]) * size

    def after_sums(self, most: int) -> int:
        """The most bytes of a call whose sums have a wider dtype than its results: sums are held
        from its start, results from its end.
        """
        if not self.more:
            return most
        if self.is_forward:
            summed = math.prod(self.out) if self.is_varlen or self.is_ring else 0
        else:
            is_all = self.is_varlen and not self.is_ring
            summed = math.prod(self.q.shape) + self.pair(self.k.shape[2] if is_all else 0, 1)
        held = summed * (self.wide - self.size) + most
        is_freed = self.is_ring and not self.is_forward and not self.is_varlen  # while converted
        return held if is_freed else max(summed * self.wide, held)

    def tile(self, queries: int, keys: int, near: bool) -> int:
        """Bytes of a tile: copies of its parts, what it computes, and what merges it.

        Args:
            near: whether keys and values are copied.
        """
        rows, (e, v) = self.heads * queries, (self.q.shape[3], self.v.shape[3])
        copies = sum(
            self.heads * queries * math.prod(x.shape[3:]) * x.dtype.itemsize
            for x in self.of_queries
            if is_copied(x, queries)
        )
        copies += self.pair(keys, self.size) * near
        masked = queries * keys
        if self.is_forward:
            made = rows * (v * self.size + self.wide)
            inside = max(self._kernel(queries, keys), masked * self.has_mask)
            return max(copies + made + inside, made + rows * (v * self.more + 3 * self.wide))
        made = rows * e * self.size + self.pair(keys, self.size)
        return copies + made + self._kernel(queries, keys)

    def _kernel(self, queries: int, keys: int) -> int:
        """The kernel's own buffers, on one thread (torch's FlashAttentionKernel.cpp); the scores,
        if values and queries have different dims.
        """
        if self.q.shape[3] != self.v.shape[3]:
            return self.heads * queries * keys * self.wide * (2 if self.is_forward else 4)
        some = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
        pairs = some * min(keys, _OF_KERNEL)
        if self.is_forward:
            held = (pairs + some * (2 + self.q.shape[3])) * self.wide
            return held + pairs * self.size * bool(self.more)
        held = (2 * pairs + some) * self.wide + 2 * pairs * self.size * bool(self.more)
        return held + self.heads * queries * self.q.shape[3] * self.size

    def largest_tile(
        self, key_blocks: Sequence[Block], most: int, is_near: Callable[[int], bool]
    ) -> int:
        """The most bytes of a tile, of blocks of at most ``most`` queries.

        Args:
            is_near: whether so many keys and values are copied.
        """
        found, largest = 0, max((b.length for b in key_blocks), default=0)
        held = _row_blocks(tuple(self.rows), self.q.shape[2], most)
        full = max((b.length for b in held), default=0), largest
        known: set[tuple[int, int]] = set()
        for rows in reversed(held):  # blocks that see most keys first
            for keys in key_blocks:
                for t in tiles(rows, keys, self.is_causal):
                    sizes = t.queries.stop - t.queries.start, t.keys.stop - t.keys.start
                    if sizes not in known:
                        known.add(sizes)
                        found = max(found, self.tile(*sizes, is_near(sizes[1])))
            if full in known:
                break
        return found

    def in_tiles(self) -> int:
        """The most bytes of attention to all keys of the rank."""
        queries, most = self._most()
        key_blocks = blocks(self.columns, self.k.shape[2], most)
        found = self.largest_tile(key_blocks, queries, lambda keys: is_copied(self.k, keys))
        if self.is_forward:
            return found + self.heads * min(queries, self.q.shape[2]) * self.v.shape[3] * self.more
        return found + self.pair(min(most, self.k.shape[2]), self.more)

    def _most(self) -> tuple[int, int]:
        """The most queries and keys of a tile."""
        if self.is_forward:
            return attention.QUERIES, attention.KEYS
        return attention.TILE, attention.TILE

    def in_documents(self) -> int:
        """The most bytes of attention within documents."""
        keys = longest_block(tuple(self.columns), self.k.shape[2])
        return self._document_tile(keys, is_copied(self.k, keys))

    def _document_tile(self, keys: int, near: bool) -> int:
        """The bytes of a tile of one long document, of its mask if there is a window, and for
        gradients of a copy of the log-sum-exps.
        """
        queries = longest_block(tuple(self.rows), self.q.shape[2])
        mask = queries * keys * self.wide * self.has_mask
        finite = 0 if self.is_forward else self.heads * self.q.shape[2] * self.wide
        return mask + finite + self.tile(queries, keys, near)

    def in_ring(self, steps: Steps) -> int:
        """The most bytes over all steps of a rank."""
        most = 0
        queries, keys = self._most()
        pair = self.pair(1, 1)
        known: dict[Any, int] = {}
        part = is_copied(self.k, steps.ring.width)
        sizes = pair * self.size, pair * self.wide
        held = travelling(steps, sizes, not self.is_forward, part)
        for (piece, step), of_step in zip(steps.all, held, strict=True):
            owner = (steps.rank - step) % steps.ring.n
            received = steps.needs.length(steps.rank, owner, piece)
            if not received:
                most = max(most, of_step)
                continue

            def is_near(keys: int, own: bool = not step, received: int = received) -> bool:
                return (own and part) or (self.of_keys > 1 and received > keys)

            if self.is_varlen:
                longest = longest_block(tuple(steps.columns(owner, piece)), received)
                key = not step, received, longest
                tile = known.get(key) or self._document_tile(longest, is_near(longest))
            else:
                found = steps.blocks(owner, piece, keys)
                key = not step, received, tuple((b.first, b.length) for b in found)
                tile = known.get(key) or self.largest_tile(found, queries, is_near)
            known[key] = tile
            most = max(most, of_step + tile)
        return most


@functools.lru_cache(64)
def _row_blocks(rows: tuple[int, ...], size: int, most: int) -> list[Block]:
    return blocks(rows, size, most)


def travelling(steps: Steps, sizes: tuple[int, int], returns: bool, is_part: bool) -> Iterator[int]:
    """The bytes of keys and values that a ring holds in each step: sent and received ones, and sums
    of gradients.

    Args:
        sizes: bytes of a key with its value, and in the dtype of sums.
        returns: whether gradients go back.
        is_part: whether a piece of the rank's keys is copied to be contiguous.
    """
    ring, needs, rank, (size, wide) = steps.ring, steps.needs, steps.rank, sizes

    def received(at: int) -> int:
        piece, step = steps.at(at)
        return needs.length(rank, (rank - step) % ring.n, piece) if step else 0

    def sent(at: int) -> tuple[int, bool]:
        piece, step = steps.at(at)
        held = steps.sent(piece, step) if step else []
        length = sum(block.length for block in held)
        return length, is_part or length < ring.length_of(rank)

    for at, (piece, step) in enumerate(steps.all):
        length, is_copy = sent(at + 1)
        held = (received(at) + received(at + 1) + length * is_copy) * size
        if returns:
            held += received(at) * wide if step else 0
            held += (received(at - 1) + sent(at - 1)[0]) * size
            summed = {of for of in (piece, steps.at(at - 1)[0], steps.at(at - 2)[0]) if of >= 0}
            own = (ring.piece(rank, of) for of in summed)
            held += sum(x.stop - x.start for x in own) * (wide - size)  # beside the result's
            if wide != size:  # a piece's part of the result is made with its sums
                held -= (ring.length_of(rank) - ring.piece(rank, piece).stop) * size
        yield held
