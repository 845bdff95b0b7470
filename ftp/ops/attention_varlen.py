"""Attention within packed documents, by tiles: a tile whose queries and keys have no document in
common is skipped, and no mask is larger than a tile.

The positions of queries are arguments of the op, as in `ftp.ops.attention`; the ends of documents
are values.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ftp.ops import attention
from ftp.ops.attention import Block, Tile, attend, blocks, pieces_of, sum_dtype
from ftp.ops.define import define

# ``is_self``: queries and keys are in the same documents, so that a window is a range of positions.
GIVEN = (
    "Tensor ends_q, Tensor ends_k, int[] rows, int[] columns, int left, int right, float scale,"
    " bool is_self"
)
VARLEN = define(
    "scaled_dot_product_attention_varlen"
    f"(Tensor q, Tensor k, Tensor v, {GIVEN}) -> (Tensor, Tensor)"
)
VARLEN_BACKWARD = define(
    "scaled_dot_product_attention_varlen_backward"
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {GIVEN})"
    " -> (Tensor, Tensor, Tensor)"
)


def in_documents(ends: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The document of each position, and the position within it. Positions after the last document
    belong to one more.
    """
    ends = ends.long()
    document = torch.bucketize(at, ends[1:], right=True)
    return document, at - ends.index_select(0, document)


@dataclass(frozen=True)
class Documents:
    """The arguments `GIVEN` of one call: ends of documents, parts of queries and keys on this rank,
    and the numbers of keys before and after it that a query sees.
    """

    ends_q: Tensor
    ends_k: Tensor
    rows: Sequence[int]
    columns: Sequence[int]
    left: int
    right: int
    scale: float
    is_self: bool

    def with_keys(self, columns: Sequence[int]) -> "Documents":
        """The same call with some of the keys."""
        return replace(self, columns=columns)


@dataclass(frozen=True)
class _DocumentPlaces:
    """Documents and positions of a rank's queries and keys.

    Attributes:
        of_query, of_key: the document of each.
        query_at: the position of the key that a query is aligned with; in a document with more keys
            than queries, the last query is aligned with the last key.
        left, right: the numbers of keys before and after that position that a query sees; -1: all.
    """

    of_query: Tensor
    query_at: Tensor
    of_key: Tensor
    key_at: Tensor
    count: int
    left: int
    right: int

    @classmethod
    def of(
        cls,
        documents: Documents,
        sizes: tuple[int, int],
    ) -> "_DocumentPlaces":
        places = []
        ends, held = (documents.ends_q, documents.ends_k), (documents.rows, documents.columns)
        for end, part, size in zip(ends, held, sizes, strict=True):
            at = [
                torch.arange(start, start + length, device=end.device)
                for start, length in pieces_of(part, size)
            ]
            places.append(in_documents(end, torch.cat([*at, end.new_empty(0, dtype=torch.long)])))
        (of_query, query_at), (of_key, key_at) = places
        more = ends[1].long().diff() - ends[0].long().diff()
        more = torch.cat([more, more.new_zeros(1)]).index_select(0, of_query)
        window = documents.left, documents.right
        return cls(of_query, query_at + more, of_key, key_at, len(ends[0]) - 1, *window)

    def tiles(self, rows: Sequence[Block], keys: Sequence[Block]) -> Iterator[tuple[Tile, Tensor]]:
        """Each tile in which a query sees a key, with its mask."""
        ranges = [
            [(int(of[b.at]), int(of[b.at + b.length - 1])) for b in found]
            for of, found in ((self.of_query, rows), (self.of_key, keys))
        ]
        for row, (first, last) in zip(rows, ranges[0], strict=True):
            for key, (begin, end) in zip(keys, ranges[1], strict=True):
                if first > end or begin > last or first == self.count:
                    continue
                of_row, of_key = (slice(b.at, b.at + b.length) for b in (row, key))
                tile = Tile(of_row, of_key)
                held = [self.sees(tile)]
                if bool(held[0].any()):
                    yield tile, held.pop()

    def sees(self, tile: Tile) -> Tensor:
        of_query = self.of_query[tile.queries].unsqueeze(1)
        query_at, key_at = self.query_at[tile.queries].unsqueeze(1), self.key_at[tile.keys]
        sees = of_query == self.of_key[tile.keys]
        sees &= of_query < self.count
        if self.right >= 0:
            sees &= key_at <= query_at + self.right
        if self.left >= 0:
            sees &= key_at >= query_at - self.left
        return sees


def _tiles(q: Tensor, k: Tensor, documents: Documents) -> Iterator[tuple[Tile, Tensor]]:
    most, sizes = attention.TILE, (q.shape[2], k.shape[2])
    held = documents.rows, documents.columns
    rows, keys = (blocks(part, size, most) for part, size in zip(held, sizes, strict=True))
    for tile, sees in _DocumentPlaces.of(documents, sizes).tiles(rows, keys):
        mask = torch.zeros(sees.shape, dtype=sum_dtype(q.dtype), device=q.device)
        mask.masked_fill_(sees.logical_not_(), -math.inf)
        held = [mask[None, None]]
        del sees, mask
        yield tile, held.pop()  # only one tile's mask exists at a time


def _within(x: Tensor, part: slice) -> Tensor:
    return x[:, :, part]


def _whole(tile: Tile) -> tuple[Block, Block]:
    return (
        Block(0, 0, tile.queries.stop - tile.queries.start),
        Block(0, 0, tile.keys.stop - tile.keys.start),
    )


@torch.library.impl("ftp::scaled_dot_product_attention_varlen", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    wide = sum_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    total = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    merge_tiles((out, total), q, k, v, Documents(*given))
    return out.to(q.dtype), total


def merge_tiles(
    into: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
) -> None:
    """Merge the attention to these keys into results and log-sum-exps."""
    if not into[0].numel() or not k.shape[2]:
        return
    for tile, mask in _tiles(q, k, documents):
        near = _within(q, tile.queries), _within(k, tile.keys), _within(v, tile.keys)
        out, total = (_within(x, tile.queries) for x in into)
        attend(out, total, *near, *_whole(tile), False, documents.scale, mask)
        del mask


@torch.library.impl(
    "ftp::scaled_dot_product_attention_varlen_backward", "CompositeExplicitAutograd"
)
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = sum_dtype(q.dtype)
    grads = [
        torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v)
    ]
    add_tiles(grads, (grad_out, q, k, v, out, logsumexp), Documents(*given))
    of_q, of_k, of_v = (x.to(q.dtype) for x in grads)
    return of_q, of_k, of_v


def add_tiles(
    sums: Sequence[Tensor],
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    documents: Documents,
) -> None:
    """Add the gradients of queries, keys and values.

    Args:
        given: the result's gradient, q, k, v, the result, its log-sum-exps.
    """
    grad_out, q, k, v, out, logsumexp = given
    if not grad_out.numel() or not k.shape[2]:
        return
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0)
    for tile, mask in _tiles(q, k, documents):
        grad, near, made, weights = (
            _within(x, tile.queries) for x in (grad_out, q, out, logsumexp)
        )
        of_tile = grad, near, _within(k, tile.keys), _within(v, tile.keys), made, weights
        parts = (tile.queries, tile.keys, tile.keys)
        into = [_within(x, part) for x, part in zip(sums, parts, strict=True)]
        attention.add_gradients(into, of_tile, *_whole(tile), False, documents.scale, mask)
        del mask


attention.register_shapes(VARLEN, VARLEN_BACKWARD)
