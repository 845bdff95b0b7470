"""Parameters drawn shard by shard are those of one device, and distributed as torch's own."""

import math

import pytest
import torch
from torch import fx, nn

import ftp
from ftp import P, random
from ftp.api.init_params import initializer
from ftp.errors import InputError
from ftp.random.draws import path_number

KEY = random.key(7)
ONE = ftp.simulated_mesh((1,), ("tp",))


class Net(nn.Module):
    def __init__(self, wide=1):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 12 * wide)
        self.norms = nn.ModuleList(
            [nn.LayerNorm(12 * wide), nn.BatchNorm1d(12 * wide), nn.GroupNorm(3, 12 * wide)]
        )
        self.lstm = nn.LSTM(12 * wide, 5)
        self.conv = nn.Conv2d(3, 4, 3)
        self.encoder = nn.TransformerEncoderLayer(12 * wide, 2, 16)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight


def on_meta(make, *args):
    with torch.device("meta"):
        return make(*args)


@pytest.fixture(scope="module")
def reference():
    return ftp.init_params(on_meta(Net), KEY, ONE)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((1, 4), P("tp")),
        ((2, 2), P("tp", "dp")),
        ((3, 2), P(("tp", "dp"))),
        ((2, 3), P(("dp", "tp"))),
        ((2, 2), P(None, "tp")),
    ],
    ids=str,
)
def test_the_bits_of_one_device(reference, shape, spec):
    mesh = ftp.simulated_mesh(shape, ("dp", "tp"))
    specs = {path: P(*spec[: p.ndim]) for path, p in reference.items()}
    model = on_meta(Net)
    before = {name: id(p) for name, p in model.named_parameters()}
    got = ftp.init_params(model, KEY, mesh, specs)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert all(p.is_meta for p in model.parameters())
    assert got.keys() == reference.keys() == ftp.functionalize(model)[1].keys()
    for path, expected in reference.items():
        assert torch.equal(got[path], expected), path


def test_distributed_as_torchs_own():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected, buffers = ftp.functionalize(Net(40), buffers=True)[1:]
    got, got_buffers = ftp.init_params(on_meta(Net, 40), KEY, ONE, buffers=True)
    assert got.keys() == expected.keys()
    torch.testing.assert_close(got_buffers, buffers)
    for path, theirs in expected.items():
        ours = got[path]
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        spread = float(theirs.std())
        assert float(ours.mean()) == pytest.approx(
            float(theirs.mean()), abs=8 * spread / math.sqrt(ours.numel()) + 1e-12
        ), path
        if ours.numel() > 50:
            assert float(ours.std()) == pytest.approx(spread, rel=8 / math.sqrt(ours.numel())), path
            assert float(ours.max()) == pytest.approx(float(theirs.max()), rel=0.4, abs=1e-12), path


def test_no_rank_holds_a_whole_tensor():
    model = on_meta(
        lambda: nn.Sequential(
            nn.Linear(64, 256), nn.Embedding(512, 64), nn.Linear(256, 128, bias=False)
        )
    )
    mesh = ftp.AbstractMesh((4, 8), ("dp", "tp"))
    for spec in (P("tp", "dp"), P(("tp", "dp")), P(("dp", "tp"))):
        step = initializer(
            model,
            KEY,
            mesh,
            {"0.weight": spec, "0.bias": P("tp"), "1.weight": spec, "2.weight": spec},
            init=None,
            buffers=False,
            buffer_specs=P(),
        )
        lowered = step.lower(KEY)
        assert not lowered.collectives
        sizes: list[int] = []

        class Record(fx.Interpreter):
            def run_node(self, n, sizes=sizes):
                out = super().run_node(n)
                sizes.append(out.numel() if isinstance(out, torch.Tensor) else 0)
                return out

        offsets = [n for n in lowered.graph.graph.nodes if n.op == "placeholder"][1:]
        out = Record(lowered.graph).run(KEY, *[0] * len(offsets))
        assert sorted(x.numel() for x in out) == sorted(
            [64 * 256 // 32, 256 // 8, 512 * 64 // 32, 256 * 128 // 32]
        )
        # A normal takes two words an element.
        assert max(sizes) <= 2 * 512 * 64 // 32


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.inner = nn.Linear(6, 6)
        self.register_buffer("table", torch.arange(6.0))


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))

    def reset_parameters(self):
        self.a.data.normal_(0.0, 0.5)


def test_what_nothing_initializes():
    model = on_meta(lambda: nn.ModuleDict({"bare": Bare(), "partly": Partly()}))
    with pytest.raises(InputError) as error:
        ftp.init_params(model, KEY, ONE, buffers=True)
    assert str(error.value) == (
        "parameter 'bare.scale' has no initialization: module 'bare' (Bare) has no"
        " reset_parameters. Write one that fills self.scale in"
        " place, or give init={'bare.scale': lambda key, shape, dtype: ...}, such as 0.02 *"
        " ftp.random.normal(key, shape, dtype).\n"
        "parameter 'partly.b' has no initialization: reset_parameters of module 'partly' (Partly)"
        " does not write it. Write one that fills"
        " self.b in place, or give init={'partly.b': lambda key, shape, dtype: ...}, such as 0.02"
        " * ftp.random.normal(key, shape, dtype).\n"
        "buffer 'bare.table' has no initialization: module 'bare' (Bare) has no reset_parameters."
        " Write one that fills self.table in place,"
        " or give init={'bare.table': lambda key, shape, dtype: ...}, such as 0.02 *"
        " ftp.random.normal(key, shape, dtype)."
    )


def test_initializers_by_pattern():
    model = on_meta(Bare)
    init = {
        "scale": lambda key, shape, dtype: torch.ones(shape, dtype=dtype),
        "table": lambda key, shape, dtype: torch.arange(6, dtype=dtype),
        "inner.*": lambda key, shape, dtype: 0.02 * random.normal(key, shape, dtype),
    }
    mesh = ftp.simulated_mesh((3,), ("tp",))
    params, buffers = ftp.init_params(model, KEY, mesh, P("tp"), init=init, buffers=True)
    assert torch.equal(params["scale"], torch.ones(6))
    assert torch.equal(buffers["table"], torch.arange(6.0))
    for name in ("weight", "bias"):
        key = random.fold_in(random.fold_in(KEY, path_number(f"inner.{name}")), 0)
        assert torch.equal(
            params[f"inner.{name}"], 0.02 * random.normal(key, tuple(params[f"inner.{name}"].shape))
        )
    assert ftp.init_params(Bare(), KEY, ONE, init={"scale": init["scale"]}, buffers=True)[1][
        "table"
    ].tolist() == list(range(6))
    with pytest.raises(
        InputError,
        match=r"init of 'scale' returns torch.float32 of shape \(2,\); the parameter is"
        r" torch.float32 of shape \(6,\)",
    ):
        ftp.init_params(model, KEY, ONE, init={"scale": lambda key, shape, dtype: torch.ones(2)})
    with pytest.raises(InputError, match="init of 'scale' returns 'ones'; the parameter is"):
        ftp.init_params(model, KEY, ONE, init={"scale": lambda key, shape, dtype: "ones"})
    with pytest.raises(InputError, match="'scales' matches"):
        ftp.init_params(model, KEY, ONE, init={"scales": init["scale"]})
    with pytest.raises(
        InputError,
        match=r"init\['scale'\] is 1.0, a float; it must be a function \(key, shape, dtype\)",
    ):
        ftp.init_params(model, KEY, ONE, init={"scale": 1.0})  # type: ignore[dict-item]


def test_frozen_parameters_and_other_types():
    model = on_meta(
        lambda: nn.Sequential(
            nn.Linear(4, 6, dtype=torch.bfloat16), nn.Linear(6, 2, dtype=torch.float64)
        )
    )
    model[1].weight.requires_grad_(False)
    params, others = ftp.init_params(model, KEY, ONE, buffers=True)
    assert {path: p.dtype for path, p in params.items()} == {
        "0.weight": torch.bfloat16,
        "0.bias": torch.bfloat16,
        "1.bias": torch.float64,
    }
    assert others["1.weight"].dtype is torch.float64
    assert 0 < float(others["1.weight"].abs().max()) <= 1 / math.sqrt(6)


def test_drawn_parameters_are_placed_and_trainable():
    model = on_meta(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    fn, meta = ftp.functionalize(model)
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    specs = ftp.plan(meta, {"0.weight": P("tp", "dp"), "2.weight": P(None, "tp")})
    params = ftp.init_params(model, KEY, mesh, specs)
    x = torch.randn(4, 6)
    loss = lambda params, x: (fn(params, x) ** 2).mean()  # noqa: E731
    got = ftp.shard(loss, mesh, specs, batch_specs=P("dp"))(params, x)
    expected_grads, expected = torch.func.grad_and_value(loss)(
        ftp.device_get(params, mesh, specs), x
    )
    torch.testing.assert_close(got, (expected, expected_grads))
