"""Attention between parts of a sequence, against a dense masked softmax."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import ftp
from ftp.ops import attention, attention_flex
from ftp.ops.attention import PART, PART_BACKWARD, pieces_of


def dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor:
    """Attention by a dense mask; rows that see nothing are zero."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


def positions(part: list[int], size: int) -> list[int]:
    return [i for start, length in pieces_of(part, size) for i in range(start, start + length)]


@st.composite
def parts(draw: Any, size: int) -> list[int]:
    """A part of ``size`` positions: whole, one piece, or the two of a zigzag, cut again or not."""
    n = draw(st.integers(1, 4))
    if draw(st.booleans()):
        at, step = draw(st.integers(0, n - 1)), -(-size // n)
        start = min(at * step, size)
        return [1, size, 1, 1, start, min(step, size - start)]
    step, at = -(-size // (2 * n)), draw(st.integers(0, n - 1))
    numbers = []
    for i in (at, 2 * n - 1 - at):
        start = min(i * step, size)
        numbers += [start, min(step, size - start)]
    part = [1, size, 1, 2, *numbers]
    held = numbers[1] + numbers[3]
    return [*part, 1, held, 1, 1, 0, held // 2] if draw(st.booleans()) else part


@settings(max_examples=60)
@given(st.data())
def test_parts(data: Any):
    attention.QUERIES, attention.KEYS, attention.TILE = data.draw(
        st.tuples(*[st.integers(1, 6)] * 3), label="tiles"
    )
    b, heads, repeats = data.draw(st.tuples(*[st.integers(1, 2)] * 3))
    size, of_keys = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    dim, of_values = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    is_causal, is_masked = data.draw(st.tuples(st.booleans(), st.booleans()))
    rows, columns = data.draw(parts(size)), data.draw(parts(of_keys))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    q, k = make(b, heads * repeats, size, dim), make(b, heads, of_keys, dim)
    v, grad = make(b, heads, of_keys, of_values), make(b, heads * repeats, size, of_values)
    mask = None
    if is_masked:
        mask = make(b, 1, size, of_keys)
        mask[torch.rand_like(mask) < 0.4] = -math.inf
    here, there = positions(rows, size), positions(columns, of_keys)
    # The same on whole tensors: keys of other parts are masked, queries of other parts unread.
    others = torch.full((of_keys,), -math.inf, dtype=torch.float64)
    others[there] = 0
    seen = others if mask is None else mask + others
    expected, vjp = torch.func.vjp(lambda *x: dense(*x, is_causal, seen), q, k, v)
    kept = torch.zeros_like(grad)
    kept[:, :, here] = grad[:, :, here]
    grads = vjp(kept)
    local = None if mask is None else mask[:, :, here][..., there]
    given_ = q[:, :, here], k[:, :, there], v[:, :, there]
    out, weight = PART(*given_, rows, columns, is_causal, attn_mask=local)
    torch.testing.assert_close(out, expected[:, :, here], rtol=0, atol=1e-10)
    made = PART_BACKWARD(
        grad[:, :, here], *given_, out, weight, rows, columns, is_causal, attn_mask=local
    )
    for one, all_, at in zip(made, grads, (here, there, there), strict=True):
        torch.testing.assert_close(one, all_[:, :, at], rtol=0, atol=1e-10)


@pytest.fixture(autouse=True)
def _tiles():
    sizes = attention.QUERIES, attention.KEYS, attention.TILE
    yield
    attention.QUERIES, attention.KEYS, attention.TILE = sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype):
    """Parts are summed in single precision at least: as precise as one kernel on the whole."""
    attention.QUERIES, attention.KEYS, attention.TILE = 16, 8, 8
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 96, 16, dtype=dtype) for _ in range(4))
    expected, vjp = torch.func.vjp(
        lambda *x: dense(*x, True, None), *(x.double() for x in (q, k, v))
    )
    out, weight = PART(q, k, v, [], [], True)
    assert weight.dtype == torch.float32
    made = (out, *PART_BACKWARD(grad, q, k, v, out, weight, [], [], True))
    for one, exact in zip(made, (expected, *vjp(grad.double())), strict=True):
        assert one.dtype == dtype
        bound = 4 * torch.finfo(dtype).eps + 32 * torch.finfo(torch.float32).eps
        assert (one - exact).abs().max() < bound * exact.abs().max()


@pytest.mark.parametrize("is_balanced", [False, True])
def test_blocks_that_are_not_listed_are_not_computed(is_balanced: bool):
    """Of documents whose blocks `ftp.balance` deals out, of full and other blocks."""
    size, width = 2048, 128
    ends = torch.tensor([0, 100, 700, 800, 2048])
    order = ftp.balance(ends, 2) if is_balanced else torch.arange(size // width)
    at = (width * order.unsqueeze(1) + torch.arange(width)).flatten()
    document = torch.bucketize(at, ends[1:], right=True)
    blocks = create_block_mask(
        lambda b, h, q, k: (at[q] >= at[k]) & (document[q] == document[k]),
        None, None, size, size, "cpu", BLOCK_SIZE=width,
    )  # fmt: skip
    listed = blocks.to_dense()[0, 0].bool()
    tables: Any = [blocks.kv_num_blocks, blocks.kv_indices]
    tables += [blocks.full_kv_num_blocks, blocks.full_kv_indices]
    computed = torch.zeros(size, size, dtype=torch.int64)
    for rank in range(2):
        half, k = torch.empty(1, 1, size // 2, 2), torch.empty(1, 1, size, 2)
        rows = [1, size, 1, 1, rank * size // 2, size // 2]
        places = [], [], [], [], [], rows, [], [width, width]
        call = attention_flex.Given(half, k, k, tables, *places, 1.0, "", "a mask", "", 0.0, [])
        for group in call.groups():
            for row in attention.blocks(rows, size // 2, attention.TILE):
                for tile in call.parts(group, row, attention.blocks([], size, attention.TILE)):
                    computed[rank * size // 2 :][tile.queries, tile.keys] += 1
    assert torch.equal(computed, listed.repeat_interleave(width, 0).repeat_interleave(width, 1))
