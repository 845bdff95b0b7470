"""Models that draw at random: ``fn(params, ..., rng=key)`` plain on one device against any mesh,
and what each function draws.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from few_or_many import slow_after
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ftp
from ftp import P, random
from ftp.errors import InputError, TraceError
from ftp.random.draws import Draws
from ftp.random.torch_functions import DRAWN

KEY = random.key(11)
N = 1 << 14


class Head(nn.Module):
    """A weight that is cut, dropout, and then what is tested."""

    def __init__(self, then, p=0.2):
        super().__init__()
        self.up, self.drop = nn.Linear(6, 8), nn.Dropout(p)
        self.then = then if isinstance(then, nn.Module) else None
        self.body = then

    def forward(self, x):
        return self.body(self.drop(self.up(x)))


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.options = options

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0]


def noise(x):
    y = (
        x * torch.rand_like(x)
        + torch.randn(8, dtype=x.dtype)
        + torch.randint(0, 5, (8,)).to(x.dtype)
    )
    return (
        y
        + torch.bernoulli(torch.full_like(x, 0.3))
        + torch.empty_like(x).normal_()
        + torch.empty_like(x).uniform_(-1, 1)
    )


def all_dropouts(x):
    y = (
        F.dropout1d(x, 0.3)
        + F.dropout2d(x.unsqueeze(2), 0.3).squeeze(2)
        + F.dropout3d(x.unsqueeze(2).unsqueeze(2), 0.3).flatten(2)
    )
    return (
        y
        + F.alpha_dropout(x, 0.3, training=True)
        + F.feature_alpha_dropout(x, 0.3, training=True)
        + F.dropout(x * 2, 0.1, inplace=True)
    )


def attention(x):
    q, k = x.unsqueeze(1), x.unsqueeze(1) * 0.5
    y = F.scaled_dot_product_attention(q, k, q, dropout_p=0.4, is_causal=True)
    mask = (torch.arange(x.shape[1]) != 1).unsqueeze(0)
    return (
        y
        + F.scaled_dot_product_attention(
            q.expand(-1, 4, -1, -1), k, q, mask, 0.2, enable_gqa=True
        ).sum(1, keepdim=True)
    ).squeeze(1)


BODIES = {
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True),
    "multihead": Attention,
    "multihead weights": lambda: Attention(need_weights=True, average_attn_weights=False),
    "lstm": lambda: nn.Sequential(
        nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True), First()
    ),
    "gru": lambda: nn.Sequential(
        nn.GRU(8, 4, num_layers=2, dropout=0.4, batch_first=True, bidirectional=True), First()
    ),
    "dropouts": lambda: all_dropouts,
    "noise": lambda: noise,
    "attention": lambda: attention,
    "gumbel": lambda: lambda x: F.gumbel_softmax(x, dim=-1) + F.rrelu(x, training=True),
    "sampling": lambda: (
        lambda x: x + torch.multinomial(torch.arange(1.0, 9), 3).sum() + torch.randperm(8)
    ),
}


class First(nn.Module):
    def forward(self, outputs):
        return outputs[0]


def model_of(name, p=0.2):
    torch.manual_seed(0)
    return ftp.functionalize(Head(BODIES[name](), p).double())


def squares(fn):
    return lambda params, x, key: (fn(params, x, rng=key) ** 2).mean()


X = torch.linspace(-1, 1, 4 * 5 * 6, dtype=torch.float64).reshape(4, 5, 6).sin()


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("name", slow_after(4, BODIES))
def test_a_model_draws_the_same_on_any_mesh(name):
    fn, params = model_of(name)
    out = fn(params, X, rng=KEY)
    assert torch.equal(out, fn(params, X, rng=KEY))
    assert not torch.equal(out, fn(params, X, rng=random.key(12)))
    loss = squares(fn)
    expected = torch.func.grad_and_value(loss)(params, X, KEY)
    both = ftp.simulated_mesh((2, 3), ("dp", "tp"))
    for mesh, spec, batch in ((both, P("tp"), P("dp")), (both, P(("tp", "dp")), P("dp")))[
        : 1 if name in ("lstm", "gru", "encoder") else 2
    ]:
        step = ftp.shard(
            loss, mesh, ftp.plan(params, {"up.weight": spec}), batch_specs=(batch, P())
        )
        got_loss, got = step(params, X, KEY)
        torch.testing.assert_close((got, got_loss), expected, rtol=1e-10, atol=1e-12)


axes = st.permutations(["dp", "tp", None])


@settings(max_examples=4)
@given(
    st.sampled_from([(2, 2), (3, 2), (1, 4)]),
    axes,
    axes,
    st.sampled_from([P(), P("dp"), P(None, "dp"), P("dp", "tp"), P(("tp", "dp"))]),
)
def test_an_encoder_under_random_specs(shape, up, down, batch):
    fn, params = model_of("encoder")
    loss = squares(fn)
    mesh = ftp.simulated_mesh(shape, ("dp", "tp"))
    specs = ftp.plan(
        params,
        {
            "up.weight": P(*up[:2]),
            "body.linear1.weight": P(*down[:2]),
            "body.linear2.weight": P(*down[1:]),
        },
    )
    got_loss, got = ftp.shard(loss, mesh, specs, batch_specs=(batch, P()))(params, X, KEY)
    torch.testing.assert_close(
        (got, got_loss), torch.func.grad_and_value(loss)(params, X, KEY), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(
    "name", ["encoder", "multihead", "dropouts", "noise", "attention", "gumbel"]
)
def test_a_key_for_each_sample(name):
    fn, params = model_of(name)
    many = random.split(KEY, 4)
    got = torch.vmap(lambda x, key: fn(params, x.unsqueeze(0), rng=key).squeeze(0))(X, many)
    expected = torch.cat([fn(params, X[i : i + 1], rng=many[i]) for i in range(4)])
    torch.testing.assert_close(got, expected)
    grads = torch.vmap(torch.func.grad(squares(fn)), (None, 0, 0))(params, X.unsqueeze(1), many)
    for i in range(4):
        torch.testing.assert_close(
            {k: g[i] for k, g in grads.items()},
            torch.func.grad(squares(fn))(params, X[i : i + 1], many[i]),
        )


def test_attention_without_its_dropout_is_the_fused_one():
    """What dropout leaves of the math form, compared by dropping nothing: p below what 32 bits
    tell.
    """
    x = X.unsqueeze(1)
    tiny = 1e-12
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"is_causal": True},
        {"attn_mask": torch.arange(5)[None] > 0},
        {"attn_mask": torch.arange(25.0, dtype=torch.float64).view(5, 5)},
        {"scale": 0.3},
    )
    for options in variants:
        with Draws(KEY, "test"):
            got = F.scaled_dot_product_attention(x, x * 2, x + 1, dropout_p=tiny, **options)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(x, x * 2, x + 1, **options))


def test_layers_of_a_recurrence_are_the_fused_ones():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for options in (
            {},
            {"bidirectional": True},
            {"bias": False},
            *([{"proj_size": 3}] if kind is nn.LSTM else []),
        ):
            model = kind(6, 8, num_layers=3, **options).double()
            expected = model(X)
            model.dropout = 1e-12
            with Draws(KEY, "test"):
                got = model(X)
                packed = nn.utils.rnn.pack_padded_sequence(X, torch.tensor([4, 3, 3, 2, 1]))
                got_packed = model(packed)
            torch.testing.assert_close(got, expected)
            model.dropout = 0.0
            torch.testing.assert_close(got_packed, model(packed))


def test_one_layer_does_not_change_anothers_draws():
    def outputs(n):
        fn, params = ftp.functionalize(Parallel(n))
        return fn(params, torch.ones(64), rng=KEY)

    assert torch.equal(outputs(2)["1"], outputs(3)["1"])
    assert not torch.equal(outputs(2)["0"], outputs(2)["1"])


class Parallel(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.parts = nn.ModuleDict({str(i): nn.Dropout(0.5) for i in range(n)})

    def forward(self, x):
        return {name: part(x) for name, part in self.parts.items()}


def test_a_shared_module_draws_anew():
    drop = nn.Dropout(0.5)
    fn, params = ftp.functionalize(nn.Sequential(drop, drop))
    assert float((fn(params, torch.ones(N), rng=KEY) != 0).double().mean()) == pytest.approx(
        0.25, abs=0.03
    )


def test_eval_mode_and_zero_probability_take_no_key():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)).double().eval()
    fn, params = ftp.functionalize(model)
    assert torch.equal(fn(params, X), fn(params, X, rng=KEY))
    fn, params = ftp.functionalize(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0)).double())
    assert torch.equal(fn(params, X), fn(params, X, rng=KEY))


def test_without_a_key():
    fn, params = ftp.functionalize(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)).double())
    step = ftp.shard(lambda p, x: fn(p, x).sum(), ftp.simulated_mesh((2,), ("tp",)), P())
    for call in (lambda: fn(params, X), lambda: step(params, X)):
        with pytest.raises(TraceError) as error:
            call()
        text = str(error.value)
        assert text.startswith("dropout draws random numbers at ")
        assert "test_torch_functions.py:" in text
        assert (
            "in module '1' of Sequential, which has no key to draw them from. Call fn(params, ...,"
            " rng=key)" in text
        )
        assert "model.eval()" in text
    with pytest.raises(
        InputError, match=r"Sequential\(\.\.\., rng=\) takes a key, .* not an int\."
    ):
        fn(params, X, rng=3)


def test_what_cannot_be_drawn_from_a_key():
    class Draw(nn.Module):
        def __init__(self, draw):
            super().__init__()
            self.draw = draw

        def forward(self, x):
            return self.draw(x)

    for draw, message in (
        (torch.poisson, "poisson cannot be drawn from a key"),
        (lambda x: torch.rand(3, generator=torch.Generator()), "rand is given a generator"),
    ):
        fn, params = ftp.functionalize(Draw(draw))
        with pytest.raises(TraceError, match=message):
            fn(params, torch.ones(3), rng=KEY)


def test_a_recomputed_block_draws_the_same():
    fn, params = model_of("encoder")
    plain, again = (
        squares(fn),
        squares(lambda p, x, rng: ftp.remat(lambda p, x, key: fn(p, x, rng=key))(p, x, rng)),
    )
    expected = torch.func.grad_and_value(plain)(params, X, KEY)
    torch.testing.assert_close(torch.func.grad_and_value(again)(params, X, KEY), expected)
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    step = ftp.shard(
        again, mesh, ftp.plan(params, {"up.weight": P("tp")}), batch_specs=(P("dp"), P())
    )
    got_loss, got = step(params, X, KEY)
    torch.testing.assert_close((got, got_loss), expected, rtol=1e-10, atol=1e-12)


# Each of torch's functions: the same shape, type and distribution as it has.


def moments(x, at):
    x = x.double()
    return torch.stack([x.mean(), x.var(), (x < at).double().mean()])


CASES = {
    "rand": lambda: torch.rand(N, dtype=torch.float64),
    "rand sizes": lambda: torch.rand(N, 2),
    "rand size": lambda: torch.rand(size=(N,)),
    "randn": lambda: torch.randn((N, 1), dtype=torch.bfloat16),
    "rand_like": lambda: torch.rand_like(torch.ones(N), dtype=torch.float64),
    "randn_like": lambda: torch.randn_like(torch.ones(N, dtype=torch.float64)),
    "randint": lambda: torch.randint(10, (N,)),
    "randint between": lambda: torch.randint(-3, 5, (N, 1), dtype=torch.int32),
    "randint keywords": lambda: torch.randint(low=2, high=9, size=(N,)),
    "randint_like": lambda: torch.randint_like(torch.ones(N), 3, 8),
    "randperm": lambda: torch.randperm(N, dtype=torch.int32),
    "normal": lambda: torch.normal(1.0, 2.0, (N,)),
    "normal tensors": lambda: torch.normal(torch.full((N,), 3.0), torch.full((N,), 0.5)),
    "normal mean": lambda: torch.normal(torch.full((N,), 3.0), 2.0),
    "normal std": lambda: torch.normal(3.0, torch.full((N,), 2.0)),
    "bernoulli": lambda: torch.bernoulli(torch.full((N,), 0.3)),
    "bernoulli method": lambda: torch.ones(N, dtype=torch.float64).bernoulli(0.2),
    "multinomial": lambda: torch.multinomial(
        torch.tensor([[1.0, 2.0, 3.0], [3.0, 0.0, 1.0]]), N, replacement=True
    ),
    "multinomial without": lambda: torch.multinomial(torch.tensor([1.0, 2.0, 5.0]).expand(N, 3), 2),
    "uniform_": lambda: torch.empty(N).uniform_(-2, 3),
    "uniform_ keywords": lambda: torch.empty(N).uniform_(to=3.0),
    "normal_": lambda: torch.empty(N, dtype=torch.float64).normal_(2, 0.5),
    "normal_ keywords": lambda: torch.empty(N).normal_(std=3.0),
    "log_normal_": lambda: torch.empty(N).log_normal_(0.0, 0.25).clamp(max=3),
    "cauchy_": lambda: torch.empty(N).cauchy_(1.0, 2.0).clamp(-4, 4),
    "exponential_": lambda: torch.empty(N).exponential_(2.0),
    "geometric_": lambda: torch.empty(N).geometric_(0.3),
    "bernoulli_": lambda: torch.empty(N).bernoulli_(0.3),
    "bernoulli_ tensor": lambda: torch.empty(N).bernoulli_(torch.full((N,), 0.7)),
    "random_": lambda: torch.empty(N, dtype=torch.int64).random_(2, 9),
    "random_ to": lambda: torch.empty(N).random_(7),
    "random_ bare": lambda: torch.empty(N, dtype=torch.uint8).random_(),
    "dropout": lambda: F.dropout(torch.ones(N), 0.3),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(N), 0.3, training=True),
    "dropout2d": lambda: F.dropout2d(torch.ones(N, 3, 2, 2), 0.3),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(
        torch.arange(81.0).sin().reshape(1, 1, 9, 9).expand(N, 1, 9, 9), 2, output_size=3
    )[..., 1, 1],
    "fractional_max_pool3d": lambda: F.fractional_max_pool3d(
        torch.arange(729.0).sin().reshape(1, 1, 9, 9, 9).expand(N, 1, 9, 9, 9), 2, 3
    )[..., 1, 1, 1],
    "rrelu": lambda: F.rrelu(-torch.ones(N), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(N, 3)),
    "distribution": lambda: torch.distributions.Gumbel(torch.zeros(N), 1.0).sample(),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(N), std=2.0, a=-1.0, b=3.0),
    "kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(N // 64, 64)),
    "xavier_uniform_": lambda: nn.init.xavier_uniform_(torch.empty(N // 64, 64)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_keeps_its_distribution(name):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with Draws(KEY, "test"):
        got, second = CASES[name](), CASES[name]()
    assert torch.equal(state, torch.get_rng_state())
    with Draws(KEY, "test"):
        assert torch.equal(CASES[name](), got)
    expected = CASES[name]()
    assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)
    assert not torch.equal(got, second)
    spread = float(expected.double().std())
    slack = torch.tensor([spread, 3 * spread**2, 1.0]) * 7 / math.sqrt(N)
    middle = float(expected.double().mean())
    middle = (
        math.floor(middle) + 0.5
        if torch.equal(expected.double(), expected.double().round())
        else middle
    )
    assert bool(((moments(got, middle) - moments(expected, middle)).abs() <= slack).all()), (
        moments(got, middle),
        moments(expected, middle),
    )


def test_every_random_function_of_torch_is_known():
    """What torch itself tags as random, and its public functions that reach it, is drawn from
    the key or refused.
    """
    names = {func.__name__ for func in DRAWN}
    seen = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and "." not in name:
            packet = getattr(torch.ops.aten, name[6:], None)
            overload = getattr(packet, "default", None)
            if overload is not None and torch.Tag.nondeterministic_seeded in overload.tags:
                seen.add(name[6:])
    public = {
        n for n in seen if not n.startswith("_") and (hasattr(torch, n) or hasattr(torch.Tensor, n))
    }
    # Kernels beneath the functions that are known, and dropout's own.
    beneath = {
        "native_dropout",
        "rrelu_with_noise",
        "rrelu_with_noise_",
        "rrelu_with_noise_functional",
        "normal_functional",
        "miopen_rnn",
        "random",
    }
    assert public - names - beneath == set()


def test_slices_of_vmap_draw_what_randomness_says():
    """Of one key. Without a word torch refuses the draw, as ftp does."""
    fn, params = ftp.functionalize(nn.Sequential(nn.Linear(6, 8), nn.Dropout()).double().train())
    x = torch.randn(4, 6, dtype=torch.float64)

    def of_each(randomness: str) -> Any:
        def gradients(params: Any, x: torch.Tensor, key: torch.Tensor) -> Any:
            def loss(params: Any, row: torch.Tensor) -> torch.Tensor:
                return fn(params, row, rng=key).square().sum()

            return torch.vmap(torch.func.grad(loss), (None, 0), randomness=randomness)(params, x)

        return gradients

    expected = of_each("different")(params, x, KEY)
    mesh, specs = ftp.simulated_mesh((2, 2), ("dp", "tp")), P("tp")
    found = ftp.spmd(of_each("different"), mesh, (specs, P("dp"), P()))(params, x, KEY)
    torch.testing.assert_close(found, expected)
    kept = expected["0.bias"] != 0
    assert not torch.equal(kept[0], kept[1]) and kept.double().mean().item() == pytest.approx(
        0.5, abs=0.25
    )
    same = of_each("same")(params, x, KEY)["0.bias"] != 0
    assert torch.equal(same[0], same[1])
    with pytest.raises(TraceError, match="Give it randomness='different' or 'same', or map over a"):
        of_each("error")(params, x, KEY)
    keys = random.split(KEY, 4)  # a key of its own for each needs no word
    mapped = torch.vmap(lambda row, key: fn(params, row, rng=key))(x, keys)
    alone = [fn(params, row, rng=key) for row, key in zip(x, keys, strict=True)]
    torch.testing.assert_close(mapped, torch.stack(alone))


def test_slices_of_map_draw_their_own():
    def each(x: torch.Tensor) -> torch.Tensor:
        return torch._higher_order_ops.map(lambda row: F.dropout(row), x)

    def keyed(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        with Draws(key, "each"):
            return each(x)

    found = ftp.spmd(keyed, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P()))(
        torch.ones(4, 9), KEY
    )
    assert len({tuple(row.tolist()) for row in found}) == 4


def test_bounds_of_random_by_position_and_by_name():
    x = torch.zeros(64, dtype=torch.int64)
    with Draws(KEY, "model"):
        assert x.random_(3, to=7).unique().tolist() == [3, 4, 5, 6]
        assert x.random_(3, 7).unique().tolist() == [3, 4, 5, 6]
        assert x.random_(to=2).unique().tolist() == x.random_(2).unique().tolist() == [0, 1]


def test_normal_into_a_tensor():
    x = torch.empty(64)
    with Draws(KEY, "out"):
        torch.normal(100.0, 1.0, (64,), out=x)
    assert 98 < x.mean().item() < 102
