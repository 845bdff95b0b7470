"""Random numbers are what docs/random.md says, whatever the mesh and the spec."""

import math
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import ftp
from ftp import P, random, units
from ftp.errors import InputError, MeshError
from ftp.ops import native, philox

KEY = random.key(2024)
MASK = philox.MASK


# The generator.


# philox4x32 with 10 rounds in Random123's kat_vectors: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(word, bits):
    return word - (1 << bits) if word >> (bits - 1) else word


def pair(low, high):
    return signed(low | high << 32, 64)


@contextmanager
def without_compiler():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(philox, "_native", lambda: None)
        yield


@pytest.mark.parametrize("by", [nullcontext, without_compiler])
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_published_vectors(counter, key, expected, by):
    with by():
        check_vectors(counter, key, expected)


def check_vectors(counter, key, expected):
    assert philox.block(counter, key) == expected
    at, full = torch.tensor(pair(*counter[:2])), torch.tensor([pair(*key), pair(*counter[2:])])
    made = [pair(*expected[:2]), pair(*expected[2:])]
    assert philox.random_keys(full, at).tolist() == made
    assert philox.random_keys(full.expand(3, 2), at).tolist() == [made] * 3
    if counter[1] < 1 << 29:
        words = [signed(w, 32) for w in expected]
        assert philox.random_bits(full, (4,), (1,), 4 * pair(*counter[:2])).tolist() == words
        assert philox.bits_by_index(full, (4,), (1,), 4 * pair(*counter[:2])).tolist() == words


def test_the_kernel_meets_the_published_vectors():
    for counter, key, expected in KNOWN:
        out = torch.empty(1, 1, 2, dtype=torch.int64)
        philox._write(out, torch.tensor([pair(*counter[:2])]), pair(*key), pair(*counter[2:]))
        assert out.view(torch.int32).flatten().tolist() == [signed(w, 32) for w in expected]


def word(key, n):
    """A word of a key's stream, an int at a time."""
    k, t = key.tolist()
    block = n // 4
    return philox.block(
        (block & MASK, block >> 32, t & MASK, t >> 32 & MASK), (k & MASK, k >> 32 & MASK)
    )[n % 4]


keys = st.tuples(*[st.integers(-(1 << 63), (1 << 63) - 1)] * 2).map(torch.tensor)
steps = st.integers(0, 70) | st.sampled_from([1 << 30, (1 << 33) + 2])


@settings(max_examples=60)
@given(
    keys,
    st.lists(st.tuples(st.integers(0, 9), steps), max_size=3),
    st.integers(0, 1 << 40),
    st.integers(0, 3),
)
def test_any_part_of_a_stream(key, dims, offset, batch):
    size, stride = [n for n, _ in dims], [step for _, step in dims]
    many = torch.stack([key + i for i in range(batch)]) if batch else key
    made = philox.random_bits(many, size, stride, offset)
    assert made.is_contiguous()
    assert torch.equal(made, philox.bits_by_index(many, size, stride, offset))
    with without_compiler():
        assert torch.equal(made, philox.random_bits(many, size, stride, offset))
    assert made.shape == (*many.shape[:-1], *size)
    one = made[0] if batch else made
    at = [int(torch.randint(n, ())) for n in size if n]
    if len(at) == len(size):
        assert int(one[tuple(at)]) == signed(
            word(key, offset + sum(i * s for i, s in zip(at, stride, strict=True))), 32
        )


@pytest.mark.parametrize(
    ("keys", "blocks"), [(1, philox.CHUNK + 3), (3, philox.CHUNK // 2 + 1), (70, 5)]
)
def test_parts_larger_than_a_chunk(keys, blocks):
    many = random.split(KEY, keys)
    with without_compiler():
        made = philox.random_bits(many, (4 * blocks,), (1,), 2)
    assert torch.equal(made, philox.random_bits(many, (4 * blocks,), (1,), 2))
    assert torch.equal(
        made, torch.stack([philox.bits_by_index(k, (4 * blocks,), (1,), 2) for k in many])
    )


def test_what_cannot_be_compiled_is_done_without(tmp_path, monkeypatch):
    build, source = native.compiled.__wrapped__, Path(philox.__file__).with_name("philox.c")
    has_compiler = philox._native() is not None
    monkeypatch.setenv("FTP_CACHE", str(tmp_path))
    if has_compiler:
        assert build(source) is not None
        assert [p.suffix for p in tmp_path.glob("compiled/*")] == [".so"]
    monkeypatch.setenv("FTP_CACHE", str(tmp_path / "another"))
    for name in ("CC", "PATH"):
        monkeypatch.setenv(name, "/nowhere")
    assert build(source) is None
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setenv("FTP_CACHE", str(tmp_path / "file"))  # another folder is taken
    assert (build(source) is not None) == has_compiler


# The definitions of docs/random.md, an element at a time.


def test_uniform_by_its_definition():
    words = [word(KEY, n) for n in range(12)]
    for dtype, digits in ((torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)):
        expected = [(w >> (32 - digits)) / 2**digits for w in words]
        assert random.uniform(KEY, (3, 4), dtype).flatten().tolist() == expected
    pairs = [words[2 * i] | words[2 * i + 1] << 32 for i in range(6)]
    assert random.uniform(KEY, (6,), torch.float64).tolist() == [(w >> 11) / 2**53 for w in pairs]
    assert random.randint(KEY, -5, 20, (6,)).tolist() == [
        (w & ((1 << 63) - 1)) % 25 - 5 for w in pairs
    ]
    assert random.permutation(KEY, 6).tolist() == sorted(
        range(6), key=lambda i: signed(pairs[i], 64)
    )


def test_bernoulli_by_its_definition():
    words = [signed(word(KEY, n), 32) + (1 << 31) for n in range(64)]
    for p in (0.0, 1e-3, 0.3, 0.5, 1.0):
        expected = [w < round(p * 2**32) for w in words]
        assert random.bernoulli(KEY, p, (4, 16)).flatten().tolist() == expected
        assert (
            random.bernoulli(KEY, torch.full((4, 16), p, dtype=torch.float64)).flatten().tolist()
            == expected
        )
        kept = [0.0 if w else 1 / (1 - p) for w in expected]
        assert random.dropout(KEY, torch.ones(64, dtype=torch.float64), p).tolist() == kept


def test_normal_by_its_definition():
    words = [word(KEY, n) for n in range(400)]
    first = [math.sqrt(-2 * math.log((w + 1) / 2**32)) for w in words[::2]]
    expected = [
        r * math.cos(2 * math.pi * (w >> 8) / 2**24)
        for r, w in zip(first, words[1::2], strict=True)
    ]
    torch.testing.assert_close(
        random.normal(KEY, (200,)).double(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=3e-6,
    )
    words = [(words[2 * i] | words[2 * i + 1] << 32) >> 11 for i in range(200)]
    expected = [
        math.sqrt(-2 * math.log((a + 1) / 2**53)) * math.cos(2 * math.pi * b / 2**53)
        for a, b in zip(words[::2], words[1::2], strict=True)
    ]
    torch.testing.assert_close(
        random.normal(KEY, (100,), torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-13,
        atol=1e-13,
    )


def test_keys_by_their_definition():
    def made(counter):
        k, t = KEY.tolist()
        w = philox.block(
            (counter & MASK, counter >> 32, t & MASK, t >> 32 & MASK), (k & MASK, k >> 32 & MASK)
        )
        return [pair(*w[:2]), pair(*w[2:])]

    assert random.split(KEY, 3).tolist() == [made((1 << 62) + i) for i in range(3)]
    for i in (0, 7, (1 << 61) - 1):
        assert random.fold_in(KEY, i).tolist() == made((1 << 62) + (1 << 61) + i)
        assert torch.equal(random.fold_in(KEY, torch.tensor(i)), random.fold_in(KEY, i))
    assert random.key(-1).tolist() == [-1, 0]


# Meshes and specs.


MESHES = {
    shape: ftp.simulated_mesh(shape, ("a", "b")[: len(shape)])
    for shape in [(2,), (3,), (2, 2), (3, 2), (2, 3)]
}


@st.composite
def cuts(draw, axes, ndim):
    """A spec that gives each axis to one dim or to none, several to one dim in any order, in
    units or not.
    """
    entries: list = [()] * ndim
    for axis in draw(st.permutations(axes)):
        d = draw(st.integers(-1, ndim - 1))
        if d >= 0:
            entries[d] = (*entries[d], axis)
    return P(*(e or None for e in entries))


@st.composite
def cases(draw):
    shape = draw(st.sampled_from(sorted(MESHES)))
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    return shape, sizes, draw(cuts(MESHES[shape].axis_names, len(sizes)))


@few_or_many(cases(), st.integers(0, 1 << 40), few=3, many=15)
def test_every_draw_is_the_same_on_any_mesh(case, seed):
    mesh, sizes, spec = case
    key = random.key(seed)
    x = torch.arange(1.0, math.prod(sizes) + 1, dtype=torch.float64).reshape(sizes)

    def draw(key, x):
        a, b, c, d, e = random.split(key, 5)
        return (
            random.dropout(a, x, 0.3),
            random.uniform(b, sizes),
            random.normal(c, sizes),
            random.bernoulli(d, x / x.max()),
            random.truncated_normal(random.fold_in(e, 3), -1.0, 2.0, sizes, torch.float64),
            random.randint(e, 0, 1000, sizes),
        )

    step = ftp.spmd(draw, MESHES[mesh], (P(), spec), spec)
    for got, expected in zip(step(key, x), draw(key, x), strict=True):
        assert got.dtype is expected.dtype
        assert torch.equal(got, expected)
    assert not [c for c in step.lower(key, x).collectives if "max" not in c.source]


def test_a_mask_takes_the_layout_of_what_it_multiplies():
    mesh = ftp.AbstractMesh((4, 8), ("dp", "tp"))
    x, w = torch.empty(64, 512, device="meta"), torch.empty(512, 2048, device="meta")
    lowered = ftp.lower(
        lambda key, x, w: random.dropout(key, x @ w, 0.1).sum(),
        mesh,
        (P(), P("dp"), P(None, "tp")),
        KEY,
        x,
        w,
        out_specs=P(),
    )
    (made,) = [n for n in lowered.graph.graph.nodes if n.target is philox.random_bits]
    assert math.prod(made.args[1]) == 64 * 2048 // 32
    assert {c.shape for c in lowered.collectives} == {()}


def test_a_mask_seen_through_views_and_units():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    x = torch.arange(1.0, 241).reshape(4, 5, 12)

    def f(key, x):
        y = random.dropout(key, x.reshape(20, 12), 0.4)
        return y.reshape(4, 5, 4, 3).transpose(1, 2)

    for spec in (
        P("dp", None, "tp"),
        P(None, None, units("tp", 3)),
        P(None, "dp", units("tp", 3)),
        P(None, None, ("tp", "dp")),
        P("tp", "dp"),
    ):
        step = ftp.spmd(f, mesh, (P(), spec))
        assert torch.equal(step(KEY, x), f(KEY, x))
        assert all(c.cause.endswith("for the result") for c in step.lower(KEY, x).collectives)


@settings(max_examples=30)
@given(
    st.sampled_from([(2, 2), (3, 2), (2, 3)]),
    st.integers(1, 13),
    st.integers(1, 5),
    st.permutations("ab"),
    st.booleans(),
)
def test_nested_cuts_of_flattened_dims(mesh, n, m, axes, outer):
    """The inner dim of a flattened pair is cut, unevenly, twice: parts with holes in them."""
    spec = P(tuple(axes)) if outer else P(None, tuple(axes))

    def f(key, x):
        return random.dropout(key, x.flatten(), 0.5).view(x.shape) + x

    x = torch.ones(n, m) if outer else torch.ones(m, n)
    step = ftp.spmd(f, MESHES[mesh], (P(), spec), spec)
    assert torch.equal(step(KEY, x), f(KEY, x))


def test_whole_draws_are_the_same_on_any_mesh():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    logits = torch.linspace(-2, 2, 60).reshape(5, 12)

    def f(key, logits):
        return (
            random.permutation(key, 11),
            random.categorical(key, logits),
            random.permutation(key, logits),
        )

    step = ftp.spmd(f, mesh, (P(), P("dp", "tp")), P(), strict=True)
    for got, expected in zip(step(KEY, logits), f(KEY, logits), strict=True):
        assert torch.equal(got, expected)


def test_a_key_from_a_closure_and_one_that_is_split_inside():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    x = torch.ones(6, 3)

    def f(x):
        key = random.fold_in(KEY, 2)
        for k in random.split(key, 2):
            x = random.dropout(k, x, 0.2)
        return x

    assert torch.equal(ftp.spmd(f, mesh, P("tp"), P("tp"))(x), f(x))


def test_gradients_see_the_same_mask():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    w, x = torch.randn(6, 8, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)

    def loss(w, x, key):
        return (random.dropout(key, x @ w, 0.4).relu() ** 2).mean()

    expected = torch.func.grad_and_value(loss)(w, x, KEY)
    for spec in (P(None, "tp"), P("tp"), P(("tp", "dp")), P("dp", "tp")):
        got_loss, got = ftp.shard(loss, mesh, spec, batch_specs=(P("dp"), P()))(w, x, KEY)
        torch.testing.assert_close((got, got_loss), expected)


# Transforms.


def test_under_vmap_each_key_draws_its_own():
    many = random.split(KEY, 5)
    x = torch.randn(5, 3, 4)

    def f(key, x):
        a, b = random.split(key)
        return (
            random.dropout(a, x, 0.5),
            random.normal(b, (2,)),
            random.fold_in(key, 9),
            random.permutation(key, 4),
        )

    for got, expected in zip(
        torch.vmap(f)(many, x), zip(*map(f, many, x), strict=True), strict=True
    ):
        assert torch.equal(got, torch.stack(expected))
    by_index = torch.vmap(lambda i: random.fold_in(KEY, i))(torch.arange(4))
    assert torch.equal(by_index, torch.stack([random.fold_in(KEY, i) for i in range(4)]))
    nested = torch.vmap(torch.vmap(lambda key, i: random.fold_in(key, i), (None, 0)), (0, None))(
        many, torch.arange(4)
    )
    assert torch.equal(nested[2, 3], random.fold_in(many[2], 3))
    same = torch.vmap(lambda x: random.dropout(KEY, x, 0.5))(x)
    assert torch.equal(same, torch.stack([random.dropout(KEY, row, 0.5) for row in x]))


def test_under_vmap_and_sharded():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    x = torch.randn(5, 6, dtype=torch.float64)

    def f(keys, x):
        return torch.vmap(lambda key, row: random.dropout(key, row, 0.5))(keys, x)

    many = random.split(KEY, 5)
    step = ftp.spmd(f, mesh, (P(), P("dp", "tp")), P("dp", "tp"), strict=True)
    assert torch.equal(step(many, x), f(many, x))
    assert not step.lower(many, x).collectives


def test_under_grad_jvp_and_make_fx():
    x = torch.randn(4, 3, dtype=torch.float64)
    mask = random.dropout(KEY, torch.ones_like(x), 0.3)
    f = lambda x: random.dropout(KEY, x, 0.3)  # noqa: E731
    assert torch.equal(torch.func.grad(lambda x: f(x).sum())(x), mask)
    assert torch.equal(torch.func.jvp(f, (x,), (torch.ones_like(x),))[1], mask)
    assert torch.equal(torch.func.jacrev(f)(x).sum((2, 3)), mask)
    for mode in ("real", "fake"):
        traced = make_fx(
            torch.func.functionalize(lambda key, x: random.dropout(key, x, 0.3)), tracing_mode=mode
        )(KEY, x)
        other = random.key(5)
        assert torch.equal(traced(other, x), random.dropout(other, x, 0.3))
        assert len(traced.graph.nodes) < 10


def everything(key, x):
    a, b = random.split(key)
    return (
        random.dropout(a, x, 0.3),
        random.uniform(b, (5, 3)),
        random.bernoulli(random.fold_in(key, 1), 0.2, (9,)),
        random.permutation(a, 7),
    )


@pytest.mark.slow
def test_compiled_with_the_ops_taken_apart():
    x = torch.randn(4, 3)
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(KEY, x), everything(KEY, x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.slow
def test_compiled_by_inductor():
    """The ops taken apart, and whole in a rank's graph whose offset is an input."""
    x = torch.randn(40, 8)
    lowered = ftp.lower(
        lambda key, x: random.dropout(key, x, 0.3),
        ftp.AbstractMesh((2,), ("tp",)),
        (P(), P(None, "tp")),
        KEY,
        x,
    )
    (part,) = torch.compile(lowered.graph, dynamic=False)(KEY, x[:, 4:].contiguous(), 4)
    assert torch.equal(part, random.dropout(KEY, x, 0.3)[:, 4:])
    for got, expected in zip(
        torch.compile(everything, fullgraph=True)(KEY, x), everything(KEY, x), strict=True
    ):
        assert torch.equal(got, expected)


def test_meta_keys_have_shapes_only():
    key = KEY.to("meta")
    assert random.uniform(random.fold_in(random.split(key)[0], 1), (3, 2)).shape == (3, 2)
    assert random.split(key, 3).device.type == "meta"


# Quality.

N = 1 << 16


def chi2(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniform_is_uniform():
    for key in (random.key(0), random.key(1), random.split(KEY)[1]):
        u = random.uniform(key, (N,), torch.float64)
        assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * N)
        assert abs(float(u.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / N)
        # 255 degrees of freedom: mean 255, deviation 22.6.
        assert chi2(torch.histc(u, 256, 0, 1), N / 256) < 255 + 5 * 22.6
        # Kolmogorov-Smirnov: beyond 2.2 once in 10^4.
        gaps = u.sort().values - torch.arange(N, dtype=torch.float64) / N
        assert math.sqrt(N) * float(gaps.abs().max()) < 2.2
        # Neighbours, in pairs of 16 bins.
        pairs = (u.view(-1, 2) * 16).long()
        assert (
            chi2(torch.bincount(pairs[:, 0] * 16 + pairs[:, 1], minlength=256), N / 512)
            < 255 + 5 * 22.6
        )


def test_every_bit_is_a_fair_coin():
    words = random.bits(KEY, (N,))
    ones = torch.stack([(words >> b & 1).double() for b in range(32)])
    assert float((ones.mean(1) - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(N)
    assert float((torch.corrcoef(ones) - torch.eye(32)).abs().max()) < 5.5 / math.sqrt(N)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_normal_has_its_moments(dtype):
    z = random.normal(KEY, (N,), dtype).double()
    for power, moment, deviation in (
        (1, 0, 1),
        (2, 1, math.sqrt(2)),
        (3, 0, math.sqrt(15)),
        (4, 3, math.sqrt(96)),
    ):
        slack = 0.01 if dtype in (torch.bfloat16, torch.float16) else 0.0
        assert abs(float((z**power).mean()) - moment) < 5 * deviation / math.sqrt(N) + slack
    inside = [float((z.abs() < s).double().mean()) for s in (1, 2, 3)]
    assert inside == pytest.approx([math.erf(s / math.sqrt(2)) for s in (1, 2, 3)], abs=0.01)


def test_other_distributions():
    e = random.exponential(KEY, (N,), torch.float64)
    assert float(e.mean()) == pytest.approx(1, abs=5 / math.sqrt(N))
    t = random.truncated_normal(KEY, -1.0, 2.0, (N,), torch.float64)
    assert -1 <= float(t.min()) < -0.99 and 1.95 < float(t.max()) <= 2
    # (phi(-1) - phi(2)) / (Phi(2) - Phi(-1))
    density = lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    mass = (math.erf(2 / math.sqrt(2)) + math.erf(1 / math.sqrt(2))) / 2
    assert float(t.mean()) == pytest.approx((density(1) - density(2)) / mass, abs=5 / math.sqrt(N))
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = random.categorical(KEY, logits, (N,))
    assert (
        chi2(torch.bincount(drawn, minlength=4), logits.softmax(0) * N) < 3 + 5 * math.sqrt(6) * 2
    )
    assert (
        chi2(torch.bincount(random.randint(KEY, 10, 17, (N,)) - 10), N / 7)
        < 6 + 5 * math.sqrt(12) * 2
    )
    orders = torch.vmap(lambda key: random.permutation(key, 3))(
        random.split(KEY, 6000)
    ) @ torch.tensor([9, 3, 1])
    assert chi2(torch.bincount(orders)[orders.unique()], 1000) < 5 + 5 * math.sqrt(10) * 2
    assert len(orders.unique()) == 6


def test_keys_are_independent():
    many = [
        KEY,
        *random.split(KEY, 8),
        *(random.fold_in(KEY, i) for i in range(8)),
        *(random.key(s) for s in range(8)),
    ]
    many += [random.fold_in(random.fold_in(KEY, 0), i) for i in range(4)] + list(
        random.split(random.fold_in(KEY, 1), 4)
    )
    draws = torch.stack([random.uniform(k, (N // 4,), torch.float64) for k in many])
    off = torch.corrcoef(draws) - torch.eye(len(many))
    assert float(off.abs().max()) < 5.5 / math.sqrt(N // 4)


def test_streams_do_not_overlap():
    first = random.split(KEY, 2000)
    many = torch.cat(
        [
            first,
            torch.stack([random.fold_in(KEY, i) for i in range(2000)]),
            random.split(first[0], 2000),
        ]
    )
    assert len(many.unique(dim=0)) == 6000
    words = torch.cat(
        [
            philox.random_bits(many[:2000], (4,), (1,), 0),
            random.bits(KEY, (2000, 4)),
            many[:4000].view(torch.int32),
        ]
    )
    assert len(words.unique(dim=0)) == len(words)


def test_shards_are_independent():
    """A rank's part is no other rank's part."""
    whole = random.uniform(KEY, (8, N // 8), torch.float64)
    assert float((torch.corrcoef(whole) - torch.eye(8)).abs().max()) < 5.5 / math.sqrt(N // 8)


# Bad input.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random.key(1.5), "key takes an integer seed of 64 bits, not 1.5, a float."),
        (
            lambda: random.uniform(3),
            "uniform takes a key, an int64 tensor of shape (2,) as ftp.random.key(seed) makes, not"
            " an int.",
        ),  # type: ignore[arg-type]
        (
            lambda: random.normal(random.split(KEY, 3), (2,)),
            "normal takes a key, an int64 tensor of shape (2,) as ftp.random.key(seed) makes, not"
            " torch.int64 of shape (3, 2)."
            " Take one of the keys, or torch.vmap over them.",
        ),
        (
            lambda: random.fold_in(KEY, -1),
            "fold_in takes an integer from 0 to 2**61 - 1 or a 0-d integer tensor, not -1, an int.",
        ),
        (
            lambda: random.dropout(KEY, torch.ones(2), 1.5),
            "dropout takes a probability from 0 to 1, not p=1.5.",
        ),
        (
            lambda: random.uniform(KEY, (2,), torch.int64),
            "uniform draws float64, float32, bfloat16 or float16, not torch.int64.",
        ),
        (lambda: random.randint(KEY, 3, 3), "randint takes integers low < high, not 3 and 3."),
        (
            lambda: random.uniform(KEY, (-1,)),
            "uniform takes a shape of sizes from 0 on, not (-1,).",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == message


# Megatron.


def test_megatron_streams():
    mesh = ftp.simulated_mesh((2, 4), ("dp", "tp"))
    streams = random.megatron_compat(1234, mesh)
    assert torch.equal(streams.default, random.key(1234))
    assert torch.equal(
        streams.model_parallel, torch.stack([random.key(1234 + 2718 + rank) for rank in range(4)])
    )
    generators = streams.generators(rank=3)
    assert [g.initial_seed() for g in generators] == [1234, 1234 + 2718 + 3]
    with pytest.raises(InputError, match="takes a rank from 0 to 3 where there are no processes"):
        streams.generators()
    with pytest.raises(MeshError, match="counts ranks along axis 'mp'; the mesh has 'dp', 'tp'"):
        random.megatron_compat(1, mesh, axis="mp")
