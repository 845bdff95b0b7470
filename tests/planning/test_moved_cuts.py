"""Ops that need a dim whole which the mesh cuts: where that is faster than to gather it, the cut
moves to another dim by an all-to-all. Their numbers are those of one device.
"""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P

SLOW = ftp.Hardware(flops=1e6, memory=1e6, link=ftp.Link(latency=1e-12, bandwidth=1e6))
LAST = {
    "sort": lambda x: x.sort(-1)[0] * torch.arange(x.shape[-1]),
    "topk": lambda x: x.topk(2, -1)[0],
    "median": lambda x: x.median(-1)[0],
    "quantile": lambda x: x.quantile(0.3, -1),
    "cumprod": lambda x: x.cumprod(-1),
    "unfold": lambda x: x.unfold(-1, 3, 2),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "fft of two dims": lambda x: torch.fft.fft2(x, dim=(0, -1)).abs(),
    "sort of products": lambda x: (x * 2).relu().sort(-1)[0].cumprod(-1).sin(),
    "nucleus": lambda x: x.softmax(-1).sort(-1, descending=True)[0].cumsum(-1).clamp(max=0.9),
    "singular values": torch.linalg.svdvals,
}


@pytest.mark.parametrize("name", sorted(LAST))
@settings(max_examples=4)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([4, 5, 8, 12, 17])),
    axes=st.sampled_from([{"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]),
    cuts=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    cuts_weight=st.booleans(),
)
def test_numbers_are_those_of_one_device(name, shape, axes, cuts, cuts_weight):
    torch.manual_seed(0)
    x, w = torch.randn(shape).double(), torch.randn(shape[-1]).double()

    def loss(w, x):
        return (LAST[name](x * w) * torch.pi).square().sum()

    at = [[axis for axis, dim in zip(axes, cuts, strict=False) if dim == d] for d in range(3)]
    spec = P(*(tuple(names) or None for names in at))
    mesh = ftp.simulated_mesh(tuple(axes.values()), tuple(axes))
    weight = P(spec[2]) if cuts_weight else P()
    step = ftp.shard(loss, mesh, weight, batch_specs=spec, certify=True, hardware=SLOW)
    got, expected = step(w, x), torch.func.grad_and_value(loss)(w, x)
    torch.testing.assert_close(got, expected[::-1], rtol=1e-9, atol=1e-9)


def sent(fn, spec, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered = ftp.lower(fn, ftp.AbstractMesh((4,), ("s",)), spec, x, **options)
    return [(c.op, c.wire_nbytes) for c in lowered.collectives], lowered


@pytest.mark.parametrize("name", ["sort", "topk", "cumprod", "fft"])
def test_an_all_to_all_moves_a_quarter(name):
    x = torch.empty(64, 4096, 16, device="meta").transpose(1, 2)
    moves, lowered = sent(LAST[name], P(None, None, "s"), x)
    assert moves == [("all_to_all", 4096 * 16 * 64 * 4 // 4 * 3 // 4)]
    assert lowered.out_specs[0] in ("s", ("s",))


def test_the_cut_moves_back():
    """A Fourier transform along a cut sequence between two layers, as in FNet."""
    x, w = torch.empty(16, 2048, 256, device="meta"), torch.empty(256, 256, device="meta")

    def mixed(w, x):
        return torch.fft.fft(x @ w, dim=1).real @ w

    specs = P(), P(None, "s")
    mesh = ftp.AbstractMesh((4,), ("s",))
    lowered = ftp.lower(mixed, mesh, specs, w, x, out_specs=P(None, "s"))
    assert [c.op for c in lowered.collectives] == ["all_to_all", "all_to_all"]
    assert lowered.work == 1.0 and not lowered.lint


def test_few_elements_are_gathered():
    """Two latencies cost more than the gather."""
    moves, _ = sent(LAST["cumprod"], P(None, None, "s"), torch.empty(8, 4, 16), out_specs=P())
    assert [op for op, _ in moves] == ["all_gather"]


def test_a_cut_moves_rather_than_to_gather_before_a_matmul():
    """Parameters on the sequence's axis: a plan without moves gathers all activations at once, not
    for the sort, and breaks a constraint.
    """

    def loss(w, x):
        return ((x @ w).sort(1)[0].tanh() @ w).square().mean()

    mesh = ftp.AbstractMesh((4,), ("s",))
    step = ftp.shard(loss, mesh, P("s"), batch_specs=P(None, "s"))
    given = torch.empty(512, 512, device="meta"), torch.empty(16, 2048, 512, device="meta")
    lowered = step.lower(*given)
    assert all(lowered.plan.kept_rules.values())
    assert max(c.nbytes for c in lowered.collectives if c.op == "all_gather") == 512 * 512 * 4
