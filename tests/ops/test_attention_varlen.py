"""Attention within packed documents, on parts of queries and keys, as a dense masked softmax."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftp.ops import attention, attention_varlen
from ftp.ops.attention import pieces_of, tiles
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD, Documents


def places(ends: list[int], size: int) -> tuple[list[int], list[int]]:
    """Of each position its document, and the number of places before the document's end."""
    document = [sum(at >= end for end in ends[1:]) for at in range(size)]
    last = [*ends[1:], size]
    return document, [last[d] - at for at, d in enumerate(document)]


def seen(ends_q: list[int], ends_k: list[int], sizes: tuple[int, int], window: Any) -> Tensor:
    (of_q, to_q), (of_k, to_k) = (
        places(ends, size) for ends, size in zip((ends_q, ends_k), sizes, strict=True)
    )
    left, right = window
    found = torch.zeros(sizes, dtype=torch.bool)
    for i, j in [(i, j) for i in range(sizes[0]) for j in range(sizes[1])]:
        ahead = to_q[i] - to_k[j]  # the last query stands beside the last key
        found[i, j] = of_q[i] == of_k[j] < len(ends_q) - 1
        found[i, j] &= (left < 0 or ahead >= -left) and (right < 0 or ahead <= right)
    return found


def part(data: Any, size: int) -> list[int]:
    """Some of a sequence's pieces, in order."""
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    held = list(zip(cuts[::2], cuts[1::2], strict=False)) or [(0, size)]
    return [1, size, 1, len(held), *(x for a, b in held for x in (a, b - a))]


@settings(max_examples=40)
@given(st.data())
def test_as_a_dense_softmax(data: Any):
    attention_varlen.FINE, attention.TILE = data.draw(
        st.tuples(st.sampled_from([1, 3, 128]), st.sampled_from([4, 1024]))
    )
    try:
        check(data)
    finally:
        attention_varlen.FINE, attention.TILE = 128, 1024


def check(data: Any) -> None:
    is_self = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.tuples(*[st.integers(0, 9)] * 2), min_size=1, max_size=5))
    more = data.draw(st.tuples(*[st.integers(0, 3)] * 2))  # after the last document
    ends_q, ends_k = (
        [0, *torch.tensor([n[0 if is_self else i] for n in lengths]).cumsum(0).tolist()]
        for i in range(2)
    )
    sizes = ends_q[-1] + more[0] + 1, ends_k[-1] + more[0 if is_self else 1] + 1
    window = data.draw(st.sampled_from([(-1, 0), (-1, -1), (3, 0), (2, 1), (-1, 2), (0, -1)]))
    rows, columns = part(data, sizes[0]), part(data, sizes[1])
    held = [
        torch.tensor([i for a, n in pieces_of(of, 0) for i in range(a, a + n)], dtype=torch.long)
        for of in (rows, columns)
    ]
    sees = seen(ends_q, ends_k, sizes, window)[held[0]][:, held[1]]
    torch.manual_seed(sizes[0])
    q, grad = torch.randn(2, 1, 4, len(held[0]), 2, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, len(held[1]), 2, dtype=torch.float64)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.mT * 0.7).masked_fill(~sees, -math.inf)
        return torch.ops.aten._safe_softmax(scores, -1) @ v, scores.logsumexp(-1)

    right, vjp = torch.func.vjp(lambda *x: dense(*x)[0], q, k, v)
    ends = torch.tensor(ends_q), torch.tensor(ends_k)
    rest = *ends, rows, columns, *window, 0.7, is_self
    out, weights = VARLEN(q, k, v, *rest)
    grads = VARLEN_BACKWARD(grad, q, k, v, out, weights, *rest)
    for one, other in zip(
        (out, weights, *grads), (right, dense(q, k, v)[1], *vjp(grad)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [3, 100, 700, 3000])
def test_pairs_of_two_documents_are_not_computed(length: int):
    """But in tiles of ``FINE`` tokens, of documents that are shorter."""
    ends = torch.tensor([*range(0, 4096, length), 4096])
    x = torch.empty(1, 1, 4096, 2)
    computed = 0
    for tile in attention_varlen._tiles(x, x, Documents(ends, ends, [], [], -1, 0, 1.0, True)):
        for t in tiles(*tile.blocks, tile.is_causal):
            count = t.queries.stop - t.queries.start
            keys = t.keys.stop - t.keys.start
            computed += count * (count + 1) // 2 if t.is_diagonal else count * keys
    own = ends.diff()
    exact = int((own * (own + 1) // 2).sum())
    if length >= attention_varlen.FINE:
        assert computed == exact
    else:
        assert exact <= computed <= 4096 * attention_varlen.FINE
