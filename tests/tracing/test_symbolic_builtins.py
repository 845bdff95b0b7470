"""Sizes that code reads by ``int``, ``float`` and ``range`` are formulas: one plan serves them."""

import functools
import math
import threading

import pytest
import torch
from few_or_many import slow_after
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.tracing import symbolic_builtins

D = torch.float64
DIMS = {1: torch.export.Dim("S", min=1, max=512)}
MESHES = {
    "uneven": (ftp.simulated_mesh((3,), ("cp",)), P(), P(None, "cp")),
    "weights": (ftp.simulated_mesh((3,), ("tp",)), P(None, "tp"), P()),
}


def rotated(params, x):
    size, width = int(x.shape[1]), x.shape[-1]
    at = torch.outer(torch.arange(size, dtype=D), 100.0 ** -(torch.arange(0, width, 2) / width))
    at = torch.cat([at, at], -1)
    a, b = x.chunk(2, -1)
    return ((x * at.cos() + torch.cat([-b, a], -1) * at.sin()) @ params).square().mean()


def causal(params, x):
    size = int(x.shape[1])
    mask = torch.full((size, size), -math.inf, dtype=D).triu(1)
    scores = (x @ params) @ x.transpose(1, 2) / math.sqrt(size)
    return ((scores + mask).softmax(-1) @ x).square().mean()


def windowed(params, x):
    size = int(x.shape[1])
    at, width = torch.arange(size), int(size**0.5)
    mask = (at[:, None] - at).abs() <= width
    return F.scaled_dot_product_attention(x @ params, x, x, attn_mask=mask).square().mean()


def shares(params, x):
    size = int(x.shape[1])
    y = (x @ params)[:, : int(0.75 * size)]
    z = F.pad(y, (0, 0, 0, -size % 8 + int(size / 3)))
    return z.cumsum(1).square().sum() / float(size) + z.sum() / size


def rows(params, x):
    weight, at = (x.flatten(0, 1) @ params)[:, 0].topk(int(1.25 * int(2 * x.shape[1]) / 3))
    return (x.flatten(0, 1)[at] * weight[:, None]).square().sum()


def check(fn, step, size):
    generator = torch.Generator().manual_seed(size)
    params = torch.randn(4, 4, generator=generator, dtype=D)
    x = torch.randn(2, size, 4, generator=generator, dtype=D)
    value, grad = step(params, x)
    want_grad, want = torch.func.grad_and_value(fn)(params, x)
    assert torch.allclose(value, want, rtol=1e-11, atol=1e-13), size
    assert torch.allclose(grad, want_grad, rtol=1e-10, atol=1e-12), size


def blocked(params, x):
    size = int(x.shape[1])
    whole = -(-size // 8) * 8
    y = F.pad(x, (0, 0, 0, whole - size)).reshape(2, whole // 8, 8, 4) @ params
    return y.sum(2).square().mean() / torch.tensor(size) + torch.tensor([size, size / 3]).sum()


def spaced(params, x):
    size = len(x[0])
    parts, left = divmod(size, 4)
    y = (x @ params) * torch.linspace(-1, 1, size, dtype=D)[:, None]
    return y[:, : parts * 4].square().sum() / size + y[:, parts * 4 :].sum() * left


SIZES = (8, 12, 7, 9, 40, 1, 3, 2, 33, 512)
PROGRAMS = [rotated, causal, windowed, shares, rows, blocked, spaced]
TRACES = {spaced: 2}  # another where no position is left: its slice is whole, the rest empty


def step_of(fn, name, **options):
    mesh, specs, batch = MESHES[name]
    return ftp.shard(fn, mesh, specs, batch_specs=batch, dynamic_shapes=DIMS, **options)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_one_trace_serves_all_sizes(fn, name):
    step = step_of(fn, name)
    for size in SIZES:
        check(fn, step, size)
    traces = TRACES.get(fn, 1)
    assert step.shapes.traces == traces and step.shapes.plans <= 3 * traces
    assert not step.shapes.one_by_one


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"certify": True}, {"compile": True}], ids=str)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_one_trace_with_options(fn, options):
    step = step_of(fn, "uneven", **options)
    for size in SIZES:
        check(fn, step, size)
    assert step.shapes.traces == TRACES.get(fn, 1) and not step.shapes.one_by_one


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_every_size(fn, name):
    step = step_of(fn, name)
    for size in range(1, 513):
        check(fn, step, size)
    assert step.shapes.traces == TRACES.get(fn, 1) and not step.shapes.one_by_one


def chunks(params, x):
    total = x.new_zeros(())
    for at in range(0, int(x.shape[1]), 16):
        total = total + torch.tanh(x[:, at : min(at + 16, int(x.shape[1]))] @ params).sum()
    return total / len(range(0, x.shape[1], 16))


def blocks_and_rest(params, x):
    size = int(x.shape[1])
    done = [x[:, i * 20 : (i + 1) * 20] @ params for i in range(size // 20)]
    rest = x[:, size // 20 * 20 :] @ params
    return torch.cat([*done, rest.sin()] if size % 20 else done, 1).square().sum()


@pytest.mark.filterwarnings("ignore:dynamic_shapes. every size:UserWarning")
@pytest.mark.parametrize("fn", slow_after(1, [chunks, blocks_and_rest]))
def test_a_loop_over_parts_is_traced_for_each_number_of_them(fn):
    step = step_of(fn, "uneven")
    for size in (15, 10, 16, 3, 25, 32, 17, 18, 29, 40, 41, 20, 60, 19, 21):
        check(fn, step, size)
    assert 2 <= step.shapes.traces <= 8


def scaled(params, x):
    """As positions that are stretched beyond a length."""
    size = int(x.shape[1])
    y = (x @ params).square().mean() / max(size / 20, 1.0)
    return y + (x.sum() if math.sqrt(size) >= 6 else y) + (y if size / 7 <= 3 else 0)


def power_of_two(params, x):
    size = int(x.shape[1])
    whole = 1 << (size - 1).bit_length()
    y = F.pad(x, (0, 0, 0, whole - size)) @ params
    return y.square().sum() / whole + (2 ** math.ceil(math.log2(size)) + (size << 1) + (size >> 2))


def pairs(params, x):
    """Of an odd size the halves have sizes of different formulas, which are equal."""
    y = x @ params if x.shape[1] % 2 == 0 else (x @ params)[:, :-1]
    return (y[:, 0::2] - y[:, 1::2]).square().sum()


def by_length(params, x):
    is_long, is_of_some = x.shape[1] > 20, x.shape[1] > 16
    scale = {True: 2.0, False: 1.0}[is_long] + 4 * (is_long == is_of_some) + 8 * (is_long == 1)
    return (x @ params).square().sum() * scale


@pytest.mark.parametrize("fn", slow_after(2, [pairs, by_length, scaled, power_of_two]))
def test_a_trace_serves_the_sizes_of_one_answer(fn):
    step = step_of(fn, "uneven")
    sizes = (15, 20, 21, 16, 22, 14, 28, 18, 30, 36, 35, 42, 19, 17, 37, 31, 32, 1, 25, 26)
    for size in sizes:
        check(fn, step, size)
    assert step.shapes.traces <= 7 and not step.shapes.one_by_one


@pytest.mark.filterwarnings("ignore:The step has planned .* programs")
@pytest.mark.slow
@pytest.mark.parametrize("fn", [chunks, blocks_and_rest, scaled, power_of_two])
def test_every_size_of_programs_that_ask(fn):
    mesh, specs, batch = MESHES["uneven"]
    step = ftp.shard(fn, mesh, specs, batch_specs=batch)
    for size in (n * 77 % 193 for n in range(1, 193)):
        check(fn, step, size)
    assert step.shapes.traces >= 4


def _kept(kind):
    table, held = {}, [0, None]

    def by_size(params, x):
        n = int(x.shape[1])
        if n not in table:
            table[n] = torch.arange(n, dtype=D)
        return ((x * table[n][:, None]) @ params).square().mean()

    def grown(params, x):
        n = int(x.shape[1])
        if n > held[0]:
            held[:] = [n, torch.arange(n, dtype=D)]
        return ((x * held[1][:n, None]) @ params).square().mean()

    def most(params, x):
        held[0] = max(held[0], int(x.shape[1]))
        return (x @ params).square().mean()

    @functools.lru_cache
    def cached(n):
        return torch.arange(n, dtype=D)

    def by_cache(params, x):
        return ((x * cached(int(x.shape[1]))[:, None]) @ params).square().mean()

    return {"by_size": by_size, "grown": grown, "most": most, "by_cache": by_cache}[kind]


@pytest.mark.filterwarnings("ignore:dynamic_shapes. every size:UserWarning")
@pytest.mark.filterwarnings("ignore:'held.0.'. which grown .* went from")
@pytest.mark.parametrize("named", slow_after(1, [True, False]))
@pytest.mark.parametrize("kind", ["by_size", "grown", "most", "by_cache"])
def test_what_a_function_keeps_by_size(kind, named):
    """Plain torch and the step take turns: what one keeps, the other can read."""
    fn = _kept(kind)
    mesh, specs, batch = MESHES["uneven"]
    step = ftp.shard(fn, mesh, specs, batch_specs=batch, dynamic_shapes=DIMS if named else None)
    for size in (9, 12, 6, 103, 1, 9):
        check(fn, step, size)


@pytest.mark.filterwarnings("ignore:dynamic_shapes. every size:UserWarning")
def test_keys_and_texts_are_of_the_number():
    names = {9: "a", 12: "bb"}

    def loss(params, x):
        n = int(x.shape[1])
        scale = len(names.get(n, "ccc")) + len(f"{n}") + (2 if n in {9, 6} else 0)
        return scale * (x[:, : n // 2 + 1] @ params).sum()

    step = step_of(loss, "uneven")
    for size in (9, 12, 6, 103, 1, 9):
        check(loss, step, size)


def test_only_calls_are_replaced():
    def code(n):
        kinds = {int: 1, float: 2}
        inner = lambda m: [int(x) for x in range(m)]  # noqa: E731
        return int(n), kinds[type(n)], isinstance(n, int), inner(3), list(map(int, "12"))

    plain = code.__code__
    with symbolic_builtins.NumbersMade().traced(code):
        assert code.__code__ is not plain and code.__code__.co_names != plain.co_names
        assert code(5) == (5, 1, True, [0, 1, 2], [1, 2])
        thread = threading.Thread(target=code, args=(5,))
        thread.start()
        thread.join()
    assert code.__code__ is plain


def _refused(n):
    try:
        return len(range(n, 30.0))
    except TypeError:
        return 7


RANGES = {
    "equal": lambda n: 2 if range(0, n, 20) == range(0, n, 20) else 3,
    "unequal": lambda n: 2 if range(0, n, 20) != range(0, n + 7, 20) else 3,
    "key": lambda n: {range(0, 12, 20): 5}.get(range(0, n, 20), 3),
    "text": lambda n: len(f"{range(0, n, 20)}"),
    "part": lambda n: getattr(range(0, n, 20)[:5], "stop", 500) + sum(range(3, n, 20)[::-1]),
    "class of a part": lambda n: 2 if isinstance(range(0, n, 20)[1:], range) else 3,
    "refused": _refused,
}


@pytest.mark.filterwarnings("ignore:dynamic_shapes. every size:UserWarning")
@pytest.mark.parametrize("form", RANGES)
def test_a_range_of_sizes_is_a_range(form):
    def loss(params, x):
        return RANGES[form](int(x.shape[1])) * (x @ params).sum()

    step = step_of(loss, "uneven")
    for size in (9, 12, 6, 103, 1, 15, 30):
        check(loss, step, size)


@pytest.mark.filterwarnings("ignore:dynamic_shapes. every size:UserWarning")
def test_code_that_a_call_makes():
    def loss(params, x):
        exec("def number(n): return int(n)", made := {})
        return made["number"](x.shape[1]) * (x @ params).sum()

    step = step_of(loss, "uneven")
    for size in (9, 12, 6, 9):
        check(loss, step, size)


@pytest.mark.filterwarnings("ignore:dynamic_shapes. every size:UserWarning")
def test_the_user_may_catch_all_errors():
    table = {9: 2.0}

    def loss(params, x):
        try:
            scale = table[int(x.shape[1])]
        except (TypeError, KeyError):
            scale = 3.0
        except BaseException:
            scale = 5.0
        return scale * (x @ params).sum()

    step = step_of(loss, "uneven")
    for size in (9, 12, 6, 9):
        check(loss, step, size)


RESULTS = {
    "size": lambda n: n,
    "int": lambda n: int(n) + 1,
    "share": lambda n: {"a": int(n / 2), "b": 2 * n},
    "float": lambda n: (float(n), n / 3),
    "question": lambda n: n > 8,
    "range": lambda n: list(range(0, n, 5)),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_numbers_in_a_result_are_pythons(kind):
    def loss(params, x):
        return (x @ params).sum(), RESULTS[kind](int(x.shape[1]))

    step = ftp.shard(loss, MESHES["uneven"][0], batch_specs=P(None, "cp"), has_aux=True)
    params = torch.eye(4, dtype=D)
    for size in (9, 12, 7, 20, 33, 5):
        (_, found), _ = step(params, torch.ones(2, size, 4, dtype=D))
        assert repr(found) == repr(RESULTS[kind](size))
    assert kind not in ("size", "int", "share") or step.shapes.traces == 1
