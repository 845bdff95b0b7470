"""Attention within packed documents, by tiles: a tile whose queries and keys are of no common
document is not computed, and no mask is larger than a tile.

Where queries stand reaches the op as numbers, as in `ftp.ops.attention`; where documents end are
values.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftp.ops import attention
from ftp.ops.attention import Block, Tile, attend, blocks, pieces_of, sum_dtype

# ``is_self``: queries and keys are of the same documents, so that a window is one of positions.
GIVEN = (
    "Tensor ends_q, Tensor ends_k, int[] rows, int[] columns, int left, int right, float scale,"
    " bool is_self"
)
torch.library.define(
    "ftp::scaled_dot_product_attention_varlen",
    f"(Tensor q, Tensor k, Tensor v, {GIVEN}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "ftp::scaled_dot_product_attention_varlen_backward",
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {GIVEN})"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
VARLEN = torch.ops.ftp.scaled_dot_product_attention_varlen.default
VARLEN_BACKWARD = torch.ops.ftp.scaled_dot_product_attention_varlen_backward.default


def in_documents(ends: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The document of each position, and the position within it. Positions after the last document
    belong to one more.
    """
    ends = ends.long()
    document = torch.bucketize(at, ends[1:], right=True)
    return document, at - ends.index_select(0, document)


@dataclass(frozen=True)
class _Documents:
    """Documents and places of the queries and the keys that a rank holds.

    Attributes:
        of_query, of_key: the document.
        query_at: the place of the key beside which a query stands; of a document with more keys
            than queries the last of both stand beside each other.
        left, right: how many keys before and after that place a query sees; -1: all.
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
        ends: tuple[Tensor, Tensor],
        held: tuple[Sequence[int], Sequence[int]],
        sizes: tuple[int, int],
        window: tuple[int, int],
    ) -> "_Documents":
        places = []
        for end, part, size in zip(ends, held, sizes, strict=True):
            at = [
                torch.arange(start, start + length, device=end.device)
                for start, length in pieces_of(part, size)
            ]
            places.append(in_documents(end, torch.cat([*at, end.new_empty(0, dtype=torch.long)])))
        (of_query, query_at), (of_key, key_at) = places
        more = ends[1].long().diff() - ends[0].long().diff()
        more = torch.cat([more, more.new_zeros(1)]).index_select(0, of_query)
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
                sees = self.sees(tile)
                if bool(sees.any()):
                    yield tile, sees

    def sees(self, tile: Tile) -> Tensor:
        of_query = self.of_query[tile.queries].unsqueeze(1)
        sees = (of_query == self.of_key[tile.keys]) & (of_query < self.count)
        if self.left >= 0 or self.right >= 0:
            ahead = self.key_at[tile.keys] - self.query_at[tile.queries].unsqueeze(1)
            sees = sees if self.right < 0 else sees & (ahead <= self.right)
            sees = sees if self.left < 0 else sees & (ahead >= -self.left)
        return sees


def _tiles(
    q: Tensor,
    k: Tensor,
    ends: tuple[Tensor, Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    window: tuple[int, int],
) -> Iterator[tuple[Tile, Tensor]]:
    documents = _Documents.of(ends, (rows, columns), (q.shape[2], k.shape[2]), window)
    most = attention.TILE
    for tile, sees in documents.tiles(
        blocks(rows, q.shape[2], most), blocks(columns, k.shape[2], most)
    ):
        mask = torch.zeros(sees.shape, dtype=q.dtype, device=q.device)
        yield tile, mask.masked_fill_(~sees, -math.inf)[None, None]


def _within(x: Tensor, part: slice) -> Tensor:
    return x[:, :, part]


def _whole(tile: Tile) -> tuple[Block, Block]:
    return (
        Block(0, 0, tile.queries.stop - tile.queries.start),
        Block(0, 0, tile.keys.stop - tile.keys.start),
    )


@torch.library.impl("ftp::scaled_dot_product_attention_varlen", "CompositeExplicitAutograd")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    rows: list[int],
    columns: list[int],
    left: int,
    right: int,
    scale: float,
    is_self: bool,
) -> tuple[Tensor, Tensor]:
    wide = sum_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    total = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    merge_tiles((out, total), q, k, v, (ends_q, ends_k), rows, columns, (left, right), scale)
    return out.to(q.dtype), total


def merge_tiles(
    into: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    window: tuple[int, int],
    scale: float,
) -> None:
    """Merge what queries see of the keys into their results and log-sum-exps."""
    if not into[0].numel() or not k.shape[2]:
        return
    for tile, mask in _tiles(q, k, ends, rows, columns, window):
        near = _within(q, tile.queries), _within(k, tile.keys), _within(v, tile.keys)
        out, total = (_within(x, tile.queries) for x in into)
        attend(out, total, *near, *_whole(tile), False, scale, mask)


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
    ends_q: Tensor,
    ends_k: Tensor,
    rows: list[int],
    columns: list[int],
    left: int,
    right: int,
    scale: float,
    is_self: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = sum_dtype(q.dtype)
    grads = [
        torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v)
    ]
    given = grad_out, q, k, v, out, logsumexp
    add_tiles(grads, given, (ends_q, ends_k), rows, columns, (left, right), scale)
    of_q, of_k, of_v = (x.to(q.dtype) for x in grads)
    return of_q, of_k, of_v


def add_tiles(
    sums: Sequence[Tensor],
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    ends: tuple[Tensor, Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    window: tuple[int, int],
    scale: float,
) -> None:
    """Add the gradients of queries, keys and values.

    Args:
        given: the result's gradient, q, k, v, the result, its log-sum-exps.
    """
    grad_out, q, k, v, out, logsumexp = given
    if not grad_out.numel() or not k.shape[2]:
        return
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0)
    for tile, mask in _tiles(q, k, ends, rows, columns, window):
        grad, near, made, weights = (
            _within(x, tile.queries) for x in (grad_out, q, out, logsumexp)
        )
        of_tile = grad, near, _within(k, tile.keys), _within(v, tile.keys), made, weights
        parts = (tile.queries, tile.keys, tile.keys)
        into = [_within(x, part) for x, part in zip(sums, parts, strict=True)]
        attention.add_gradients(into, of_tile, *_whole(tile), False, scale, mask)


@torch.library.register_fake("ftp::scaled_dot_product_attention_varlen")
def fake(q, k, v, *_):
    wide = sum_dtype(q.dtype)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.register_fake("ftp::scaled_dot_product_attention_varlen_backward")
def fake_backward(grad_out, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
