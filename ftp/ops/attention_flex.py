"""flex_attention tile by tile: only one tile's scores exist at a time, and tiles that the mask does
not list are skipped.

The positions of queries, keys, batch and heads are arguments of the op, as in `ftp.ops.attention`;
``score_mod`` and ``mask_mod`` are graphs, see `ftp.ops.score_functions`.

Source: Dong et al. (2024), Flex Attention.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.ops import attention
from ftp.ops.attention import Block, blocks, merge, pieces_of, sum_dtype
from ftp.ops.define import define, register_fake
from ftp.ops.listed_blocks import listed, listed_tiles
from ftp.ops.philox import drawn_below, kept_scale, random_bits
from ftp.ops.score_functions import PLACE, evaluate, letters
from ftp.ops.tile_kernels import over_heads, repeated_heads

PAIRS = 1 << 21  # most (query, key) pairs, over all heads, whose scores exist at a time

# ``tables``: of a BlockMask how many blocks of keys are listed for each block of queries, and which
# come first; the same of full blocks, which the mask's function does not reach. ``known``: what the
# trace knows of them, see `ftp.ops.listed_blocks`; "" where it knows nothing. ``block``: queries
# and keys of a block. ``batch``, ``heads``: parts, as ``rows``; of heads those of the keys.
# ``drop_keys``: none, or the key from whose stream ``dropout`` draws, as for the weights of all
# (batch, heads, queries, keys) at once: ``drawn`` are the sizes of these dims but the first.
GIVEN = (
    "Tensor[] tables, Tensor[] of_score, Tensor[] of_mask, Tensor[] drop_keys, SymInt[] batch,"
    " SymInt[] heads, SymInt[] rows, SymInt[] columns, int[] block, float scale, str score,"
    " str mask, str known, float dropout, SymInt[] drawn"
)
FLEX = define(
    "scaled_dot_product_attention_flex"
    f"(Tensor q, Tensor k, Tensor v, {GIVEN}) -> (Tensor, Tensor, Tensor)"
)
FLEX_BACKWARD = define(
    "scaled_dot_product_attention_flex_backward"
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor logsumexp, Tensor delta,"
    f" {GIVEN}, bool[] wants) -> Tensor[]"
)
KEYS, KEYS_BACKWARD = (13, 14), (16, 17)  # which arguments are the keys of the functions


@dataclass(frozen=True)
class ScoreTile:
    """A tile of some batches and heads: slices of the tensors.

    Attributes:
        of_keys: the heads of keys; ``heads`` are those of queries.
        first: the position of its first key in the sequence.
        is_masked: whether the mask hides some of its pairs.
    """

    batch: slice
    heads: slice
    of_keys: slice
    queries: slice
    keys: slice
    first: int
    is_masked: bool

    @property
    def places(self) -> tuple[slice, slice, slice, slice]:
        return self.batch, self.heads, self.queries, self.keys

    @property
    def held(self) -> tuple[slice, slice, slice]:
        return self.batch, self.of_keys, self.queries

    @property
    def captured(self) -> tuple[slice, slice, slice, slice]:
        """The slices of captured tensors, which have all keys."""
        keys = slice(self.first, self.first + self.keys.stop - self.keys.start)
        return *self.places[:3], keys

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.batch, self.heads, self.queries]

    def of(self, x: Tensor) -> Tensor:
        return x[self.batch, self.of_keys, self.keys]

    def repeated(self, x: Tensor) -> Tensor:
        """The tile's keys or values ``x``, repeated for each head of queries."""
        return repeated_heads(x, self.heads.stop - self.heads.start)


@dataclass(frozen=True)
class Given:
    """One call: its tensors, their positions, and the functions of its scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Sequence[Tensor]
    of_score: Sequence[Tensor]
    of_mask: Sequence[Tensor]
    drop_keys: Sequence[Tensor]
    batch: Sequence[int]
    heads: Sequence[int]
    rows: Sequence[int]
    columns: Sequence[int]
    block: Sequence[int]
    scale: float
    score: str
    mask: str
    known: str
    dropout: float
    drawn: Sequence[int]

    @cached_property
    def at(self) -> tuple[Tensor, ...]:
        """Global indices of batch, heads, queries and keys."""
        count = self.k.shape[1]
        repeats = self.q.shape[1] // count if count else 1
        sizes = self.q.shape[0], count, self.q.shape[2], self.k.shape[2]
        found = []
        for part, size in zip(
            (self.batch, self.heads, self.rows, self.columns), sizes, strict=True
        ):
            held = [
                torch.arange(start, start + length, device=self.q.device)
                for start, length in pieces_of(part, size)
            ]
            found.append(torch.cat(held) if held else self.q.new_empty(0, dtype=torch.int64))
        if repeats > 1:
            of = torch.arange(repeats, device=self.q.device)
            found[1] = (found[1].unsqueeze(1) * repeats + of).flatten()
        return tuple(found)

    def blocks_listed(
        self, group: tuple[slice, slice, slice], first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        """For some query blocks, the listed key blocks to which ``mask_mod`` applies, and the full
        ones.
        """
        columns = self.tables[1].shape[-1]
        count, index, *of_full = (_of_group(x, group)[:, :, first : last + 1] for x in self.tables)
        some = listed(count, index, columns)
        full = listed(of_full[0], of_full[1], columns) if of_full else torch.zeros_like(some)
        return some, full

    def groups(self) -> Iterator[tuple[slice, slice, slice]]:
        """Batches, heads of queries and heads of keys that are computed at a time."""
        count = self.k.shape[1]
        repeats = self.q.shape[1] // count if count else 1
        batch, heads = group_size(self.q.shape[1], count, self.q.shape[2], self.k.shape[2])
        for b in range(0, self.q.shape[0], batch):
            for h in range(0, count, heads):
                stop = min(h + heads, count)
                of_queries = slice(h * repeats, stop * repeats)
                yield slice(b, min(b + batch, self.q.shape[0])), of_queries, slice(h, stop)

    def parts(
        self, group: tuple[slice, slice, slice], row: Block, columns: Sequence[Block]
    ) -> Iterator[ScoreTile]:
        """The tiles of a block of queries in which a query sees a key."""
        rows = row.first, row.first + row.length
        seen, full = self._states(group, rows) if self.tables else (None, None)
        for block in columns:
            keys = block.first, block.first + block.length
            found = [(rows, keys, bool(self.mask))]
            if seen is not None and full is not None:
                found = listed_tiles(seen, full, self.block, rows, keys)
            for (first, stop), held, is_masked in found:
                queries = row.slice(first, stop)
                yield ScoreTile(*group, queries, block.slice(*held), held[0], is_masked)

    def _states(
        self, group: tuple[slice, slice, slice], rows: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Per query block and key block, whether it is listed in any batch or head, and whether it
        is full in all.
        """
        first, last = rows[0] // self.block[0], (rows[1] - 1) // self.block[0]
        some, full = (x.flatten(0, 1) for x in self.blocks_listed(group, first, last))
        return (some | full).any(0).cpu().numpy(), full.all(0).cpu().numpy()

    def scores(self, part: ScoreTile) -> Tensor:
        """A tile's scores, before its functions."""
        wide = sum_dtype(self.q.dtype)
        q, k = part.of_queries(self.q).to(wide), part.repeated(part.of(self.k).to(wide))
        return (q @ k.transpose(-2, -1)).mul_(self.scale)

    def values(self, part: ScoreTile) -> Tensor:
        return part.repeated(part.of(self.v).to(sum_dtype(self.v.dtype)))

    def changed(self, scores: Tensor, part: ScoreTile, of_score: Sequence[Tensor]) -> Tensor:
        """A tile's scores, after its functions.

        Args:
            of_score: the tensors that ``score_mod`` captures, cut to the tile.
        """
        if not self.score:
            return scores
        at = [x[p] for x, p in zip(self.at, part.places, strict=True)]
        found = evaluate(self.score, scores, at, _near(at), of_score)
        return found.to(scores.dtype).expand(scores.shape)

    def sees(self, part: ScoreTile) -> Tensor | None:
        """The mask of a tile, which broadcasts to it; None: nothing is hidden."""
        if not part.is_masked:
            return None
        at = [x[p] for x, p in zip(self.at, part.places, strict=True)]
        seen = None
        if self.mask:
            within = self.within(part, self.of_mask, letters(self.mask, True))
            seen = evaluate(self.mask, None, at, _near(at), within)
        if not self.tables:
            return seen
        group = part.batch, part.heads, part.of_keys
        row, column = at[2] // self.block[0], at[3] // self.block[1]
        first = int(row[0])
        some, full = (
            x.index_select(2, row - first).index_select(3, column)
            for x in self.blocks_listed(group, first, int(row[-1]))
        )
        return (some if seen is None else some & seen) | full

    def dropped(self, x: Tensor, part: ScoreTile) -> Tensor:
        """The tile ``x`` after dropout."""
        if not self.drop_keys:
            return x
        strides = [math.prod(self.drawn[i:]) for i in range(4)]
        repeats = self.q.shape[1] // self.k.shape[1]
        sizes = self.q.shape[0], self.k.shape[1], self.q.shape[2]
        held = zip((self.batch, self.heads, self.rows), sizes, part.held, strict=True)
        is_dropped = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        for run in itertools.product(*(_runs(*given) for given in held)):
            firsts, here, lengths = map(list, zip(*run, strict=True))
            for numbers in (firsts, here, lengths):
                numbers[1] *= repeats
            offset = sum(map(operator.mul, (*firsts, part.first), strides))
            given = self.drop_keys[0], [*lengths, x.shape[3]], strides, offset
            at = tuple(slice(a, a + length) for a, length in zip(here, lengths, strict=True))
            is_dropped[at] = drawn_below(random_bits(*given), self.dropout)
        return x.masked_fill(is_dropped, 0).mul_(kept_scale(self.dropout))

    def within(
        self, part: ScoreTile, captured: Sequence[Tensor], named: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """The captured tensors, cut to the tile along the dims of the scores."""
        return [
            x[tuple(part.captured[PLACE.index(c)] if c else slice(None) for c in of)]
            if any(of)
            else x
            for x, of in zip(captured, named, strict=True)
        ]


def group_size(heads: int, of_keys: int, queries: int, keys: int) -> tuple[int, int]:
    """The numbers of batches and of key heads that are computed at a time, with at most ``PAIRS``
    scores of a tile.

    Args:
        heads, of_keys: of queries, and of keys.
    """
    repeats = heads // of_keys if of_keys else 1
    pairs = min(attention.TILE, queries) * min(attention.TILE, keys) * repeats
    some = max(1, min(of_keys, PAIRS // max(pairs, 1)))
    batch = max(1, PAIRS // (pairs * some)) if some == of_keys and pairs else 1
    return batch, some


def _runs(part: Sequence[int], size: int, within: slice) -> list[tuple[int, int, int]]:
    """Runs of a part within a slice of it: position in the whole, place in the slice, length."""
    found = []
    for block in blocks(part, size, max(size, 1)):
        low, high = max(block.at, within.start), min(block.at + block.length, within.stop)
        if low < high:
            found.append((block.first + low - block.at, low - within.start, high - low))
    return found


def _near(at: Sequence[Tensor]) -> list[Tensor]:
    return [torch.arange(x.shape[0], device=x.device) for x in at]


def _of_group(table: Tensor, group: tuple[slice, slice, slice]) -> Tensor:
    for dim, part in enumerate(group[:2]):
        if table.shape[dim] != 1:
            table = table.narrow(dim, part.start, part.stop - part.start)
    return table


def _finite(x: Tensor) -> Tensor:
    """Log-sum-exps with 0 for rows that see nothing, whose weights are 0."""
    return x.masked_fill(x == -math.inf, 0)


@torch.library.impl("ftp::scaled_dot_product_attention_flex", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, wide = Given(q, k, v, *rest), sum_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    logsumexp = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    top = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    attend(call, out, logsumexp, top)
    return out, logsumexp, top


def attend(call: Given, out: Tensor, logsumexp: Tensor, top: Tensor) -> None:
    """Merge the attention to the call's keys into results, log-sum-exps and highest scores."""
    if 0 in out.shape or not call.k.shape[2]:
        return
    wide = sum_dtype(call.q.dtype)
    columns = blocks(call.columns, call.k.shape[2], attention.TILE)
    named = letters(call.score, False)
    for group in call.groups():
        for row in blocks(call.rows, call.q.shape[2], attention.TILE):
            into = (*group[:2], slice(row.at, row.at + row.length))
            made = out[into].to(wide)
            for part in call.parts(group, row, columns):
                within = call.within(part, call.of_score, named)
                scores = call.changed(call.scores(part), part, within)
                if (sees := call.sees(part)) is not None:
                    scores = torch.where(sees, scores, -math.inf)
                of_part = torch.logsumexp(scores, -1)
                highest = part.of_queries(top)
                torch.maximum(highest, scores.amax(-1), out=highest)
                weights = (scores - _finite(of_part).unsqueeze(-1)).exp_()
                del scores, sees
                found = call.dropped(weights, part) @ call.values(part)
                del weights
                here = slice(part.queries.start - row.at, part.queries.stop - row.at)
                merge(made[:, :, here], part.of_queries(logsumexp), found, of_part)
                del found
            out[into] = made


@torch.library.impl("ftp::scaled_dot_product_attention_flex_backward", "CompositeExplicitAutograd")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logsumexp: Tensor,
    delta: Tensor,
    *rest: Any,
) -> list[Tensor]:
    *given, wants = rest
    call = Given(q, k, v, *given)
    like = (q, k, v, *wanted(call, wants))
    sums = [torch.zeros(x.shape, dtype=sum_dtype(x.dtype), device=x.device) for x in like]
    add_gradients(call, sums, wants, grad_out, logsumexp, delta)
    return [total.to(x.dtype) for total, x in zip(sums, like, strict=True)]


def wanted(call: Given, wants: Sequence[bool]) -> list[Tensor]:
    """The captured tensors whose gradients are asked for."""
    return [x for x, is_wanted in zip(call.of_score, wants, strict=True) if is_wanted]


def add_gradients(
    call: Given,
    sums: Sequence[Tensor],
    wants: Sequence[bool],
    grad_out: Tensor,
    logsumexp: Tensor,
    delta: Tensor,
) -> None:
    """Add the gradients of queries, keys, values and captured tensors."""
    if not grad_out.numel() or not call.k.shape[2]:
        return
    wide = sum_dtype(call.q.dtype)
    columns = blocks(call.columns, call.k.shape[2], attention.TILE)
    logsumexp = _finite(logsumexp)
    for group in call.groups():
        for row in blocks(call.rows, call.q.shape[2], attention.TILE):
            for part in call.parts(group, row, columns):
                near = (part.of_queries(x) for x in (grad_out, logsumexp, delta))
                _add(call, part, sums, wants, *(x.to(wide) for x in near))


def _add(
    call: Given,
    part: ScoreTile,
    sums: Sequence[Tensor],
    wants: Sequence[bool],
    grad: Tensor,
    logsumexp: Tensor,
    delta: Tensor,
) -> None:
    """Add the gradients of a tile."""
    of_q, of_k, of_v, *of_captured = sums
    named = letters(call.score, False)
    within = call.within(part, call.of_score, named)

    def change(scores: Tensor, *wanted: Tensor) -> Tensor:
        left = iter(wanted)
        given = [next(left) if is_wanted else x for x, is_wanted in zip(within, wants, strict=True)]
        return call.changed(scores, part, given)

    scores = call.scores(part)
    moving = [x for x, is_wanted in zip(within, wants, strict=True) if is_wanted]
    vjp = None
    if call.score:
        found: Any = torch.func.vjp(change, scores, *moving)
        scores, vjp = found
    if (sees := call.sees(part)) is not None:
        scores = torch.where(sees, scores, -math.inf)
    weights = (scores - logsumexp.unsqueeze(-1)).exp_()
    del scores
    to_v = part.of(of_v)
    to_v.add_(over_heads(call.dropped(weights, part).transpose(-2, -1) @ grad, to_v))
    of_scores = call.dropped(grad @ call.values(part).transpose(-2, -1), part)
    of_scores.sub_(delta.unsqueeze(-1)).mul_(weights)
    del weights
    if vjp is not None:
        of_scores, *made = vjp(of_scores)
        if sees is not None:  # a function may have no derivative at hidden pairs
            of_scores = torch.where(sees, of_scores, 0)
        shapes = [x for x, is_wanted in zip(named, wants, strict=True) if is_wanted]
        for total, x in zip(call.within(part, of_captured, shapes), made, strict=True):
            total.add_(x)
    of_scores = of_scores * call.scale
    wide = of_scores.dtype
    part.of_queries(of_q).add_(of_scores @ part.repeated(part.of(call.k).to(wide)))
    to_k = part.of(of_k)
    of_keys = of_scores.transpose(-2, -1) @ part.of_queries(call.q).to(wide)
    to_k.add_(over_heads(of_keys, to_k))


@register_fake("ftp::scaled_dot_product_attention_flex")
def fake(q, k, v, *_):
    wide = sum_dtype(q.dtype)
    rows = q.new_empty(q.shape[:3], dtype=wide)
    return q.new_empty((*q.shape[:3], v.shape[3])), rows, torch.empty_like(rows)


@register_fake("ftp::scaled_dot_product_attention_flex_backward")
def fake_backward(grad_out, q, k, v, logsumexp, delta, tables, of_score, *rest):
    moving = [x for x, is_wanted in zip(of_score, rest[-1], strict=True) if is_wanted]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *moving)]
