"""Programs exported with dynamic_shapes: a rank's program equals one device at every size."""

import io
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from few_or_many import LOOSE, slow_after
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.export import Dim

import ftp
from ftp import P
from ftp.exported import simulate
from ftp.sharding.local_pieces import local_pieces
from ftp.sharding.mesh import resolve
from ftp.tensors.device_put import take

TP, TP3 = ftp.simulated_mesh((2,), ("tp",)), ftp.simulated_mesh((3,), ("tp",))
GRID = ftp.simulated_mesh((2, 2), ("dp", "tp"))


def export(model, args, dims, kwargs=None, decomposed=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own deprecated functions
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dims)
        return program.run_decompositions() if decomposed else program


def ranks_of(program, mesh, specs, **options):
    return [ftp.shard_exported(program, mesh, specs, rank=r, **options) for r in range(mesh.size())]


def shards(x, spec, mesh):
    m = resolve(mesh)
    return [take(x, local_pieces(spec, x.shape, m.axes, at)) for at in m.coordinates()]


def equal_one_device(made, mesh, model, x, spec=P(), rtol=1e-10):
    """All ranks' results are the shards of the model's."""
    with torch.no_grad():
        expected = shards(model(x), spec, mesh)
    given = [(part,) for part in shards(x, spec, mesh)]
    for result, one in zip(simulate(made, mesh, given), expected, strict=True):
        torch.testing.assert_close(result, one, rtol=rtol, atol=rtol)


class Block(nn.Module):
    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Sizes are used as sizes, as numbers, and as bounds of a slice."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(64, 8))
        self.block, self.head = Block(), nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        return self.head(self.block(x)) / tokens.shape[1] ** 0.5


MEGATRON = {
    "tokens.weight": P("tp"),
    "block.up.*": P("tp"),
    "block.down.weight": P(None, "tp"),
    "head.*": P("tp"),
}


@pytest.fixture(scope="module", params=slow_after(1, ["as exported", "decomposed"]))
def decoder(request):
    torch.manual_seed(0)
    model = Decoder().double()
    dims = {"tokens": {0: 2 * Dim("half", max=32), 1: Dim("time", max=64)}}
    tokens = torch.randint(11, (4, 6))
    return model, export(model, (tokens,), dims, decomposed=request.param == "decomposed")


@pytest.mark.parametrize(
    ("mesh", "spec"), slow_after(1, [(GRID, P("dp")), (TP3, P()), (TP, P())]), ids=str
)
def test_a_decoder_at_every_size(decoder, mesh, spec):
    model, program = decoder
    made = ranks_of(program, mesh, MEGATRON, in_specs=spec, out_specs=spec)
    for one in made:
        one.validate()
        assert not [n for n in one.graph.nodes if "_assert_scalar" in str(n.target)]

    @settings(LOOSE, max_examples=8)
    @given(half=st.integers(2, 5), time=st.integers(1, 64))
    def at(half, time):
        equal_one_device(made, mesh, model, torch.randint(11, (2 * half, time)), spec)

    at()


def test_torchs_own_checks_know_the_range():
    model, (x) = nn.Linear(4, 4), torch.ones(3, 4)
    program = export(model, (x,), {"input": {0: Dim("batch", min=3, max=9)}})
    (made,) = ranks_of(program, ftp.simulated_mesh(1, "tp"), {"weight": P("tp")})
    for size in (3, 9):
        x = torch.randn(size, 4)
        torch.testing.assert_close(made.module()(x), model(x))
    for size in (2, 10):
        with pytest.raises((AssertionError, RuntimeError), match=r"(3|9)"):
            made.module()(torch.ones(size, 4))


def test_saved_and_loaded():
    model = Block().double()
    program = export(model, (torch.randn(3, 5, 8).double(),), {"x": {0: Dim.AUTO, 1: Dim.AUTO}})
    loaded = []
    for one in ranks_of(program, TP, {"up.*": P("tp"), "down.weight": P(None, "tp")}):
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(one, file)
            file.seek(0)
            loaded.append(torch.export.load(file))
    for shape in ((2, 7, 8), (6, 2, 8)):
        equal_one_device(loaded, TP, model, torch.randn(shape).double())


def test_a_cut_sequence():
    """By styles inside, and by in_specs: a multiple of the ranks is what both need."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
    styles = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    options = {"in_specs": P(None, "tp"), "out_specs": P(None, "tp")}
    x = torch.randn(3, 4, 8).double()
    made = ranks_of(export(model, (x,), {"input": {1: 2 * Dim("half")}}), TP, styles, **options)
    for size in (4, 6, 20):
        equal_one_device(made, TP, model, torch.randn(3, size, 8).double(), P(None, "tp"))
    message = r"cuts input.shape\[1\] into 2 equal parts.*Export with 2 \* torch.export.Dim"
    with pytest.raises(ftp.errors.InputError, match=message):
        ranks_of(export(model, (x,), {"input": {1: Dim("time")}}), TP, styles, **options)
    four = ftp.simulated_mesh((4,), ("tp",))
    message = r"cuts s\d+ of input.shape\[1\] into 2 equal parts.*2 \* .* in place of its Dim"
    with pytest.raises(ftp.errors.InputError, match=message):
        ranks_of(export(model, (x,), {"input": {1: 2 * Dim("half")}}), four, styles, **options)


def test_two_inputs_of_one_size_and_a_longer_one():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x, y, *, longer):
            self.seen.add_(x.sum(0))  # type: ignore[operator]
            h = self.down(self.up(x * y).relu())
            return {"h": h + longer[1:], "mean": h.mean(0), "t": torch.cat([h, longer]).T}

    model, batch = Steps().double(), Dim("batch")
    dims = {"x": {0: batch}, "y": {0: batch}, "longer": {0: batch + 1}}

    def arguments(n):
        x, y, longer = (torch.randn(n + k, 4).double() for k in (0, 0, 1))
        return (x, y), {"longer": longer}

    args, kwargs = arguments(3)
    program = export(model, args, dims, kwargs)
    made = ranks_of(program, TP, {"up": ColwiseParallel, "down": RowwiseParallel})
    for n in (2, 3, 9):
        args, kwargs = arguments(n)
        with torch.no_grad():
            expected = model(*args, **kwargs)
        for rank in simulate(made, TP, [(*args, kwargs)] * 2):
            assert rank.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(rank[name], value)
        for one in made:
            torch.testing.assert_close(one.state_dict["seen"], model.seen)


def test_random_ops_draw_what_one_device_draws():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4)).double()
    fn, params = ftp.functionalize(model)
    program = export(model, (torch.randn(3, 4).double(),), {"input": {0: Dim("batch")}})
    made = ranks_of(program, TP, {"0": ColwiseParallel, "2": RowwiseParallel}, rng=True)
    for n, key in ((2, ftp.random.key(0)), (7, ftp.random.key(1))):
        x = torch.randn(n, 4).double()
        for result in simulate(made, TP, [(x, {"rng": key})] * 2):
            torch.testing.assert_close(result, fn(params, x, rng=key).detach())


class Refused(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        match self.what:
            case "nonzero":
                return x[x.nonzero()[:, 0]].sum(0)
            case "size":
                return x.sum(), x.shape[0]
            case _:
                return x * x[:, 0].sum().item()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nonzero", r"aten.nonzero.default at .*x.nonzero\(\).* depends on values"),
        ("size", r"output .* is a size, which differs between a rank's shard and the whole"),
        ("item", r"reads a tensor's value"),
    ],
)
def test_what_is_refused_with_open_dims_too(what, message):
    program = export(Refused(what), (torch.ones(3, 4),), {"x": {0: Dim("batch")}})
    with pytest.raises(ftp.errors.InputError, match=message):
        ftp.shard_exported(program, TP, {})


def test_a_layout_of_a_module_on_an_open_dim():
    """A module's output is cut on an open dim, by a layout."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).double()
    styles = {"0": PrepareModuleOutput(output_layouts=(Shard(0),), desired_output_layouts=Shard(0))}
    program = export(model, (torch.randn(4, 4).double(),), {"input": {0: 2 * Dim("half")}})
    made = ranks_of(program, TP, styles)
    for n in (4, 10):
        equal_one_device(made, TP, model, torch.randn(n, 4).double())


class Padded(nn.Module):
    """Its result is longer by a size that is a rounded float."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        more = math.ceil(x.shape[1] * 0.1 * 10)
        rest = x.new_ones(1, 1, 6).expand(x.shape[0], more, 6)
        return torch.cat([self.linear(x), rest], 1) * round(x.shape[1] / 2)


def test_results_of_sizes_that_are_rounded():
    model = Padded().double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    program = export(model, (x,), {"x": {1: Dim("S", min=2, max=400)}})
    made = ranks_of(program, TP, {"linear.weight": P("tp"), "linear.bias": P("tp")})
    sizes = [n for n in range(2, 400) if math.ceil(n * 0.1 * 10) != n][:2]
    assert sizes
    for size in (9, 2, 57, *sizes):
        equal_one_device(made, TP, model, torch.randn(2, size, 8, dtype=torch.float64))
