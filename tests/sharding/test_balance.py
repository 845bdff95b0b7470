"""balance: each rank computes as much, by an exact count; wrong meshes and lengths are refused."""

import itertools

import pytest
import torch
from few_or_many import slow_unless
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ftp
from ftp import P
from ftp.errors import SpecError
from ftp.sharding import balance as balancing
from ftp.sharding.layout import pieces


def sees(ends: Tensor) -> Tensor:
    """The dense mask of packed documents, causal within each."""
    at = torch.arange(int(ends[-1]))
    document = torch.bucketize(at, ends[1:], right=True)
    return (at[:, None] >= at) & (document[:, None] == document)


def work(order: Tensor, mask: Tensor, n: int, block: int) -> list[int]:
    """Per rank the pairs of its queries, in chunks of whole blocks."""
    pairs = mask.sum(1).unflatten(0, (-1, block)).sum(1)[order]
    return [int(part.sum()) for part in pairs.chunk(n)]


@st.composite
def packed(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    n, block = draw(st.integers(2, 5)), draw(st.sampled_from([1, 4, 16]))
    length = block * n * draw(st.integers(8, 20))
    cuts = draw(st.lists(st.integers(0, length), max_size=9))
    return torch.tensor([0, *sorted(cuts), length]), n, block


@settings(max_examples=25)
@given(packed())
def test_even_work(drawn: tuple[Tensor, int, int]):
    ends, n, block = drawn
    order = ftp.balance(ends, n, block=block)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(len(order)))
    found = work(order, sees(ends), n, block)
    assert max(found) <= 1.05 * sum(found) / n


@pytest.mark.parametrize(
    ("blocks", "seed"),
    # Of 100 draws of 8 blocks on each rank, three that need swaps of two blocks or a second
    # dealing.
    slow_unless(
        lambda blocks, seed: blocks == 8 or seed < 3,
        [*((8, seed) for seed in (26, 59, 94)), *itertools.product([16, 192], range(24))],
    ),
)
def test_computed_blocks_are_even(blocks: int, seed: int):
    """Of random documents each rank computes as many pairs of a block of queries and one of keys,
    within 5 %, also where a document begins within a block, and documents are shorter."""
    draw = torch.Generator().manual_seed(seed)
    n, block = 2 + seed % 4, 128
    count = blocks * n
    number = 1 + seed % 12 if seed % 2 else count * block // 100
    cuts = torch.randint(1, count * block, (number,), generator=draw).sort().values
    ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([count * block])])
    token = torch.arange(count * block)
    document = torch.bucketize(token, ends[1:], right=True)
    begins = ends[document]
    seen = (token - begins + 1).unflatten(0, (-1, block)).sum(1)
    computed = torch.arange(count) - begins[::block] // block + 1
    order = ftp.balance(ends, n, block=block)
    for measure in (seen, computed):
        found = [int(measure[part].sum()) for part in order.chunk(n)]
        assert max(found) <= 1.05 * sum(found) / n
    if blocks == 16:
        mask = create_block_mask(
            lambda b, h, q, k: (q >= k) & (document[q] == document[k]),
            None, None, count * block, count * block, "cpu",
        )  # fmt: skip
        assert ftp.balance(mask, n).tolist() == order.tolist()


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_whole_documents_are_even(seed: int, n: int):
    """Documents of up to a quarter of a rank's tokens, of all lengths, in plain chunks."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (16 * 64 ** torch.rand(12 * n, generator=draw)).long()
    lengths = torch.cat([lengths, lengths.new_tensor([0, -int(lengths.sum()) % n])])
    lengths = torch.cat([lengths, lengths.new_full((4 * n,), int(lengths.max()))])
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    order = ftp.balance(ends, n, block=None)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert int(lengths.max()) <= int(lengths.sum()) / n / 4
    seen = torch.cat([torch.arange(length) + 1 for length in lengths[order].tolist()])
    found = [int(part.sum()) for part in seen.chunk(n)]
    assert max(found) <= 1.05 * sum(found) / n


@pytest.mark.parametrize(("least", "most"), [(100, 4096), (1, 32768)])
def test_long_documents_are_even_in_a_repeating_zigzag(least: int, most: int):
    """Tokens as (periods, 2 * n * block), the second dim in zigzag."""
    n, block, size = 8, 32, 1 << 16
    draw, period = torch.Generator().manual_seed(0), 2 * n * block
    held = [pieces(period, n, rank, True) for rank in range(n)]
    for _ in range(20):
        lengths = torch.randint(least, most + 1, (9 * size // most,), generator=draw).tolist()
        seen = torch.cat([torch.arange(1, 1 + length) for length in lengths])[:size]
        of_period = seen.view(-1, period).sum(0)
        found = [sum(int(of_period[a : a + b].sum()) for a, b in parts) for parts in held]
        assert max(found) <= 1.05 * sum(found) / n


@settings(max_examples=15)
@given(packed(), st.sampled_from(["documents", "window", "prefix"]), st.booleans())
def test_any_mask(drawn: tuple[Tensor, int, int], kind: str, is_larger: bool):
    """A BlockMask of other blocks, also ones that do not divide the length."""
    ends, n, block = drawn
    length = int(ends[-1])
    at = torch.arange(length)
    document = torch.bucketize(at, ends[1:], right=True)
    mod, dense = {
        "documents": (
            lambda b, h, q, k: (q >= k) & (document[q] == document[k]),
            sees(ends),
        ),
        "window": (lambda b, h, q, k: (q - k).abs() < 7, (at[:, None] - at).abs() < 7),
        "prefix": (lambda b, h, q, k: (q >= k) | (k < 9), (at[:, None] >= at) | (at < 9)),
    }[kind]
    mask = create_block_mask(
        mod, 2, None, length, length, "cpu", BLOCK_SIZE=(24 if is_larger else 5)
    )
    assert ftp.balance(mask, n, block=block).tolist() == balanced(dense, n, block)


def balanced(dense: Tensor, n: int, block: int) -> list[int]:
    whole = create_block_mask(
        lambda b, h, q, k: dense[q, k], None, None, *dense.shape, "cpu", BLOCK_SIZE=len(dense)
    )
    return ftp.balance(whole, n, block=block).tolist()


def test_a_rank_without_blocks():
    order = ftp.balance(torch.tensor([0, 12]), 5, block=2)  # 6 blocks: 2, 2, 2, none, none
    assert work(order, sees(torch.tensor([0, 12])), 5, 2) == [26, 26, 26]


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("given_ends", "cuts"),
    [
        ([0, 21, 25, 40], [(2, "cp"), (3, ftp.units("cp", 4))]),
        ([0, 5, 16], [(4, "cp")]),  # a block on each rank
        ([0, 5, 8], [(4, "cp")]),  # fewer blocks than ranks
    ],
)
def test_a_step_on_permuted_tokens(given_ends: list[int], cuts: list):
    """The loss and gradients of one device on tokens that are not permuted."""
    block, vocabulary = 4, 11
    torch.manual_seed(0)
    params = {
        name: torch.randn(size, dtype=torch.float64)
        for name, size in {"emb": (vocabulary, 8), "at": (40, 8), "head": (8, vocabulary)}.items()
    }

    def loss_fn(params: dict, tokens: Tensor, labels: Tensor, order: Tensor, ends: Tensor):
        at = (block * order.unsqueeze(1) + torch.arange(block)).flatten()
        document = (at.unsqueeze(1) >= ends[1:]).sum(1)
        x = (params["emb"][tokens] + params["at"][at]).unflatten(2, (2, 4)).transpose(1, 2)

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where((at[q] >= at[k]) & (document[q] == document[k]), s, -torch.inf)

        out = flex_attention(x, x, x, score_mod=score).transpose(1, 2).flatten(2)
        return torch.nn.functional.cross_entropy(
            (out @ params["head"]).flatten(0, 1), labels.flatten()
        )

    length = given_ends[-1]
    batch = torch.randint(0, vocabulary, (2, 2, length))
    ends, plain = torch.tensor(given_ends), torch.arange(length // block)
    one_device = ftp.shard(loss_fn, ftp.simulated_mesh((1,), ("cp",)), P(), batch_specs=P())
    right = one_device(params, *batch, plain, ends)
    for n, entry in cuts:
        spec = P(None, entry)
        order = ftp.balance(ends, n, block=block)
        tokens, labels = batch.unflatten(2, (-1, block))[:, :, order].flatten(2)
        specs = (spec, spec, P(), P())
        mesh = ftp.simulated_mesh((n,), ("cp",))
        step = ftp.shard(loss_fn, mesh, P(), batch_specs=specs, certify=True)
        torch.testing.assert_close(
            step(params, tokens, labels, order, ends), right, rtol=0, atol=1e-10
        )


def test_what_does_not_fit_is_refused():
    ends = torch.tensor([0, 24])
    with pytest.raises(SpecError, match="24 is no whole number of blocks of 5"):
        ftp.balance(ends, 2, block=5)
    with pytest.raises(SpecError, match=r"whole number of blocks of 128\. Pad it to 128"):
        ftp.balance(ends, 2)
    for wrong in (torch.tensor([1, 24]), torch.tensor([0, 9, 8]), torch.ones(2, 3), ends.float()):
        with pytest.raises(SpecError, match="where each document ends"):
            ftp.balance(wrong, 2, block=1)
    with pytest.raises(SpecError, match="at least 1"):
        ftp.balance(ends, 0, block=1)
    whole = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, "cpu")
    with pytest.raises(SpecError, match="block=None takes cu_seqlens"):
        ftp.balance(whole, 2, block=None)
    with pytest.raises(SpecError, match="where each document ends"):
        ftp.balance(torch.tensor([1, 24]), 2, block=None)
    with pytest.raises(SpecError, match="not a list"):
        ftp.balance([0, 24], 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [P(), P("cp")])
def test_an_order_for_another_number_of_ranks(spec: P):
    order = ftp.balance(torch.tensor([0, 24]), 3, block=2)
    mesh = ftp.simulated_mesh((2, 4), ("cp", "tp"))
    said = r"balances the work of 3 ranks, but the mesh has cp 2.*ftp.balance\(mask, n\)"
    with pytest.raises(SpecError, match=said):
        ftp.device_put(order, mesh, spec)
    step = ftp.spmd(lambda order: order * 2, mesh, spec)
    with pytest.raises(SpecError, match=said):
        step(order)
    with pytest.raises(SpecError, match=said):
        step.lower(order)
    for n, fits in ((2, P("cp")), (8, P(("cp", "tp"))), (4, P()), (8, P())):
        ftp.device_put(ftp.balance(torch.tensor([0, 24]), n, block=2), mesh, fits)


def test_few_pairs_of_many_blocks_are_tried():
    """All pairs of 8,192 blocks of a rank are 34 million."""
    chosen = balancing._some(8192, 2)
    assert 100 < len(chosen) <= balancing._CANDIDATES and chosen.max() > 7000
    assert len(balancing._some(8, 2)) == 28 and len(balancing._some(0, 2)) == 0
