"""Ops that change some elements of a tensor write to it where nothing reads it later: a cache of
keys that a step is given, and returns, is not copied.
"""

import pytest
import torch
from torch import fx

import ftp
from ftp import P
from ftp.certification.purify import without_writes
from ftp.certification.unsound import Unsound
from ftp.passes.buffer_reuse import reuse_memory_in, with_values

aten = torch.ops.aten
MESH = ftp.simulated_mesh((2,), ("tp",))


def changes(cache, x, at, w):
    k = x @ w
    cache = cache.index_copy(1, at, k).index_add(1, at, k)
    cache = cache.index_put((torch.arange(2)[:, None], at[None]), 2 * k, accumulate=True)
    cache = cache.scatter(1, at[None, :, None].expand(2, 2, 8), k).index_fill(1, at[:1], 3.0)
    return cache.scatter_add(1, at[None, :, None].expand(2, 2, 8), k), cache.sin().sum()


def given():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 10, 8), (2, 2, 4), (4, 8)
    cache, x, w = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return cache, x, torch.tensor([3, 7]), w


@pytest.mark.parametrize("donate", [(0,), ()])
@pytest.mark.parametrize("spec", [P(None, None, "tp"), P(None, "tp"), P("tp"), P()], ids=str)
def test_values_are_those_of_one_device(spec, donate):
    specs = (spec, P(), P(), P(None, "tp"))
    step = ftp.spmd(changes, MESH, specs, (spec, P()), donate=donate, certify=True)
    expected = changes(*given())
    for value, wanted in zip(step(*given()), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


def test_a_cache_that_a_step_is_given_is_not_copied():
    specs = (P(None, None, "tp"), P(), P(), P(None, "tp"))
    peaks = {}
    for donate in ((0,), ()):
        lowered = ftp.spmd(
            lambda cache, x, at, w: cache.index_copy(1, at, x @ w),
            MESH,
            specs,
            specs[0],
            donate=donate,
        ).lower(
            torch.zeros(2, 4096, 8), torch.zeros(2, 1, 4), torch.zeros(1).long(), torch.zeros(4, 8)
        )
        targets = [n.target for n in lowered.executed.nodes]
        assert (aten.index_copy_.default in targets) == bool(donate)
        peaks[donate] = int(lowered.memory)
    cache = 2 * 4096 * 4 * 4
    assert peaks[0,] < cache * 1.1 and peaks[()] > 2 * cache


@pytest.mark.parametrize(("ranks", "size"), [(2, 10), (3, 7), (4, 3)])
def test_one_row_of_a_cut_cache_is_written_where_it_is(ranks, size):
    """Also where a rank holds no row."""
    spec = P(None, "sp")

    def write(cache, x, at):
        cache = cache.index_copy(1, at, x)
        return cache, cache.sin().sum()

    mesh = ftp.simulated_mesh((ranks,), ("sp",))
    step = ftp.spmd(write, mesh, (spec, P(), P()), (spec, P()), donate=(0,), certify=True)
    cache = expected = torch.zeros(2, size, 3, dtype=torch.float64)
    for i in range(size):
        x, at = torch.full((2, 1, 3), i + 1.0, dtype=torch.float64), torch.tensor([i])
        cache, total = step(cache.clone(), x, at)
        expected, wanted = write(expected, x, at)
        assert torch.equal(cache, expected)
        torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
    targets = [n.target for n in step.lower(cache, x, at).executed.nodes]
    assert aten.index_copy_.default in targets and aten.slice.Tensor not in targets


def test_what_an_op_reads_beside_is_not_written():
    graph = fx.Graph()
    x, at = graph.placeholder("x"), graph.placeholder("at")
    y = graph.call_function(aten.sin.default, (x,))
    graph.output(graph.call_function(aten.scatter_add.default, (y, 0, at, y)))
    gm = with_values(fx.GraphModule({}, graph), [torch.ones(3), torch.tensor([2, 0, 1])])
    reuse_memory_in(gm.graph)
    assert aten.scatter_add.default in [n.target for n in gm.graph.nodes]


def test_certificates_refuse_a_write_to_what_the_op_reads_beside():
    graph = fx.Graph()
    x, at = graph.placeholder("x"), graph.placeholder("at")
    y = graph.call_function(aten.sin.default, (x,))
    graph.output((graph.call_function(aten.scatter_add_.default, (y, 0, at, y)),))
    with pytest.raises(Unsound, match="reads another part"):
        without_writes(graph, ())
