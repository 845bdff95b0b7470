"""`varlen_attn` on a hostile paged cache: uneven heads and pages, ranks without any, pages that
sequences share, tables with holes, sequences without keys or queries.
"""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import ftp
from ftp import P


def one_device(
    q: Tensor, pools: tuple[Tensor, Tensor], table: Tensor, used: list[int], new: list[int],
    window: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Sequence by sequence, by the dense mask. Tokens after the last sequence give zeros."""
    out, (left, right), start = torch.zeros_like(q), window, 0
    for pages, count, rows in zip(table.long(), used, new, strict=True):
        keys, values = (
            pool[pages[: -(-count // pool.shape[1])]].flatten(0, 1)[:count].transpose(0, 1)
            for pool in pools
        )
        near = q[start : start + rows].transpose(0, 1).unflatten(0, (len(keys), -1))
        ahead = torch.arange(count) - torch.arange(count - rows, count)[:, None]
        sees = ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
        scores = torch.einsum("hgqd,hkd->hgqk", near, keys) / math.sqrt(q.shape[2])
        weights = torch.ops.aten._safe_softmax(scores.masked_fill(~sees, -math.inf), -1)
        result = torch.einsum("hgqk,hkd->hgqd", weights, values)
        out[start : start + rows] = result.flatten(0, 1).transpose(0, 1)
        start += rows
    return out


def pages_of(draw: random.Random, used: list[int], size: int, per: int) -> tuple[Tensor, int]:
    """A table of each sequence's pages, and the number of pages: some are shared, some unused."""
    pool = per * len(used) + draw.choice([-1, 0, 3])
    rows = [draw.sample(range(pool + 1), per) for _ in used]
    if draw.random() < 0.5:
        rows = [[rows[0][0], *row[1:]] for row in rows]  # a common prefix
    for row, count in zip(rows, used, strict=True):
        for at in range(-(-count // size), per):
            row[at] = draw.choice([-1, 10**6, -(2**31)])
    return torch.tensor(rows, dtype=draw.choice([torch.int32, torch.int64])), pool + 1


@pytest.mark.cases_by_default(3)
@pytest.mark.parametrize("seed", range(40))
def test_as_one_device(seed: int):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    size, per, heads, group = (draw.choice(c) for c in ([1, 2, 4], [1, 2, 3], [1, 2, 3], [1, 2]))
    new = [1, *(draw.choice([0, 1, 1, 3]) for _ in range(draw.randrange(4)))]
    used = [draw.randint(0, per * size) for _ in new]
    table, count = pages_of(draw, used, size, per)
    q = torch.randn(sum(new) + draw.choice([0, 0, 2]), heads * group, 2, dtype=torch.float64)
    pools = (torch.full((count, size, heads, 2), math.nan, dtype=torch.float64) for _ in "kv")
    k, v = pools
    for pages, keys in zip(table.tolist(), used, strict=True):
        for at in range(keys):
            k[pages[at // size], at % size] = torch.randn(heads, 2, dtype=torch.float64)
            v[pages[at // size], at % size] = torch.randn(heads, 2, dtype=torch.float64)
    window = draw.choice([(-1, 0), (-1, -1), (2, 0), (0, 0), (1, 1)])

    def decode(q: Any, k: Any, v: Any, table: Any, used: Any, ends: Any) -> Any:
        return varlen_attn(
            q, k, v, ends, None, 3, per * size, window_size=window, enable_gqa=group > 1,
            seqused_k=used, block_table=table,
        )  # fmt: skip

    shape = draw.choice([(2,), (3,), (5,), (2, 2), (2, 3)])
    names = ("x", "y")[: len(shape)]
    x, y = names[0], names[-1]
    of_heads, of_dims = P(None, None, x), P(None, None, None, x)
    cut, of_pages = draw.choice(
        [
            (P(None, x), of_heads), (P(None, x), of_heads), (P(y, x) if x != y else P(x), of_heads),
            (P(x), P()), (P(ftp.zigzag(x)), P(y)), (P(), P(None, x)), (P(), P(ftp.zigzag(x))),
            (P(None, x), P(y, None, x) if x != y else of_heads), (P(), of_dims),
            (of_heads, of_dims),
        ]
    )  # fmt: skip
    specs = cut, of_pages, of_pages, draw.choice([P(), P(x), P(None, x)]), draw.choice([P(), P(x)])
    ends = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    mesh = ftp.simulated_mesh(shape, names)
    step = ftp.spmd(decode, mesh, (*specs, P()), cut, certify=True)
    found = step(q, k, v, table, torch.tensor(used, dtype=table.dtype), ends)
    expected = one_device(q, (k, v), table, used, new, window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
