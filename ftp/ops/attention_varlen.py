"""Attention within packed documents, document by document, in tiles: pairs of two documents are not
computed, but for documents of less than ``FINE`` tokens, which share a tile. Only such tiles and
those of a window have a mask.

The positions of queries are arguments of the op, as in `ftp.ops.attention`; the ends of documents
are values.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.ops import attention
from ftp.ops.attention import Block, attend, blocks, sum_dtype
from ftp.ops.define import define
from ftp.ops.listed_blocks import FINE

# ``is_self``: queries and keys are in the same documents, so that a window is a range of positions.
GIVEN = (
    "Tensor ends_q, Tensor ends_k, SymInt[] rows, SymInt[] columns, int left, int right,"
    " float scale, bool is_self"
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


@dataclass(frozen=True)
class DocumentTile:
    """A tile of the queries and keys of one document, or of several short ones.

    Attributes:
        queries, keys: slices of the rank's tensors.
        first, begin: positions of the key that the first query is aligned with, and of the first
            key.
        is_causal: whether keys after the one that a query is aligned with are hidden.
        mask: of several documents or of a window, what to add to scores.
    """

    queries: slice
    keys: slice
    first: int
    begin: int
    is_causal: bool
    mask: Tensor | None

    @property
    def blocks(self) -> tuple[Block, Block]:
        """Queries and keys, as blocks of tensors that hold only these."""
        queries, keys = self.queries, self.keys
        return (
            Block(self.first, 0, queries.stop - queries.start),
            Block(self.begin, 0, keys.stop - keys.start),
        )


def _tiles(q: Tensor, k: Tensor, documents: Documents) -> Iterator[DocumentTile]:
    """The tiles in which a query sees a key. Only one tile's mask exists at a time."""
    left, right, most = documents.left, documents.right, attention.TILE
    ends_q, ends_k = documents.ends_q.tolist(), documents.ends_k.tolist()
    columns = blocks(documents.columns, k.shape[2], most)
    for block in blocks(documents.rows, q.shape[2], most):
        for rows, first, last in _in_documents(block, ends_q, ends_k):
            shift = ends_k[last] - ends_q[last]
            low, high = ends_k[first], ends_k[last]
            is_one = last - first == 1
            if is_one and left >= 0:
                low = max(low, rows.first + shift - left)
            if is_one and right >= 0:
                high = min(high, rows.first + rows.length + shift + right)
            is_hidden = not is_one or left >= 0 or right > 0
            for keys in columns:
                begin, end = max(keys.first, low), min(keys.first + keys.length, high)
                if begin >= end:
                    continue
                held = Block(begin, keys.slice(begin, end).start, end - begin)
                mask = _mask(documents, rows, held, q) if is_hidden else None
                tile = rows.slice(rows.first, rows.first + rows.length), keys.slice(begin, end)
                is_causal = not is_hidden and right == 0
                yield DocumentTile(*tile, rows.first + shift, begin, is_causal, mask)
                del mask


def _in_documents(
    block: Block, ends_q: Sequence[int], ends_k: Sequence[int]
) -> Iterator[tuple[Block, int, int]]:
    """A block of queries by its documents, short ones together: queries, and the first document and
    that after the last.

    >>> for rows, first, last in _in_documents(Block(0, 0, 400), [0, 3, 5, 300], [0, 3, 5, 300]):
    ...     print(rows.first, rows.length, first, last)
    0 5 0 2
    5 295 2 3
    """
    at, stop = block.first, block.first + block.length
    document = bisect.bisect_right(ends_q, at) - 1
    while at < stop and document < len(ends_q) - 1:
        first, begin = document, ends_k[document]
        document += 1
        while (
            document < len(ends_q) - 1
            and ends_q[document] < stop
            and max(ends_q[document + 1] - at, ends_k[document + 1] - begin) <= FINE
        ):
            document += 1
        end = min(ends_q[document], stop)
        if at < end:
            yield Block(at, block.at + at - block.first, end - at), first, document
        at = max(at, end)


def _mask(documents: Documents, rows: Block, keys: Block, like: Tensor) -> Tensor:
    ends_q, ends_k = documents.ends_q, documents.ends_k
    places = [
        in_documents(ends, torch.arange(x.first, x.first + x.length, device=ends.device))
        for ends, x in ((ends_q, rows), (ends_k, keys))
    ]
    (of_query, query_at), (of_key, key_at) = places
    # In a document with more keys than queries, the last query is aligned with the last key.
    more = (ends_k.long().diff() - ends_q.long().diff()).index_select(0, of_query)
    query_at = (query_at + more).unsqueeze(1)
    hides = of_query.unsqueeze(1) != of_key
    if documents.right >= 0:
        hides |= key_at > query_at + documents.right
    if documents.left >= 0:
        hides |= key_at < query_at - documents.left
    mask = torch.zeros(hides.shape, dtype=sum_dtype(like.dtype), device=like.device)
    return mask.masked_fill_(hides, -math.inf)[None, None]


def _within(x: Tensor, part: slice) -> Tensor:
    return x[:, :, part]


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
    for tile in _tiles(q, k, documents):
        near = _within(q, tile.queries), _within(k, tile.keys), _within(v, tile.keys)
        out, total = (_within(x, tile.queries) for x in into)
        attend(out, total, *near, *tile.blocks, tile.is_causal, documents.scale, tile.mask)
        del tile


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
    for tile in _tiles(q, k, documents):
        grad, near, made, weights = (
            _within(x, tile.queries) for x in (grad_out, q, out, logsumexp)
        )
        of_tile = grad, near, _within(k, tile.keys), _within(v, tile.keys), made, weights
        parts = (tile.queries, tile.keys, tile.keys)
        into = [_within(x, part) for x, part in zip(sums, parts, strict=True)]
        how = *tile.blocks, tile.is_causal, documents.scale, tile.mask
        attention.add_gradients(into, of_tile, *how)
        del tile, how


attention.register_shapes(VARLEN, VARLEN_BACKWARD)
