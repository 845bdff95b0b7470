"""Compiled programs: inductor's cache keeps their code."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ftp

MESH = ftp.simulated_mesh((1,), ("tp",))


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() * 2).sum()


def test_inductor_finds_code_again(monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    x = torch.randn(3, 5, dtype=torch.float64)
    for is_again in (False, True):
        monkeypatch.setenv("FTP_CACHE", str(tmp_path / str(is_again)))  # inductor's cache only
        counters.clear()
        step = ftp.spmd(loss, MESH, ftp.P(), ftp.P(), compile=True)
        assert torch.allclose(step(x), loss(x))
        found = counters["inductor"]
        assert not found["fxgraph_cache_bypass"]
        assert found["fxgraph_cache_hit"] >= is_again


@pytest.mark.filterwarnings("ignore:Torchinductor does not support")
@pytest.mark.parametrize("number", [complex(1, -math.inf), complex(math.nan, math.nan)])
def test_complex_numbers_without_a_text(number):
    """Python reads ``(1-infj)`` as a name."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x * 2)
        made = [z * number, torch.full_like(z, number), (z * 2).masked_fill(x > 0, number)]
        return torch.view_as_real(torch.stack(made))

    x = torch.tensor([-1.0, 2.0, 0.5], dtype=torch.float64)
    got = ftp.spmd(fn, MESH, ftp.P(), ftp.P(), compile=True)(x)
    torch.testing.assert_close(got, fn(x), equal_nan=True)


@pytest.mark.slow
def test_code_of_one_vector_extension_does_not_serve_another(monkeypatch):
    x = torch.randn(7, 64)
    for isa in ("avx512", "avx2"):  # as on two machines that share the cache
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", isa)
        step = ftp.spmd(wide, MESH, ftp.P(), ftp.P(), compile=True)
        torch.testing.assert_close(step(x), wide(x))


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.cos() + x * 3


@pytest.mark.slow
def test_threads_compile_at_once():
    from torch._inductor.async_compile import AsyncCompile

    def scaled(k: int, x: torch.Tensor) -> torch.Tensor:
        return (x * k).sin().softmax(-1)

    def work(k: int) -> None:
        fn, x = functools.partial(scaled, k), torch.randn(3 + k, 5, dtype=torch.float64)
        step = ftp.spmd(fn, MESH, ftp.P(), ftp.P(), compile=True)
        torch.testing.assert_close(step(x), fn(x))

    before = AsyncCompile.cpp_pybinding
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(2, 6)))
    assert AsyncCompile.cpp_pybinding is before


@pytest.mark.parametrize("form", [torch.clone, torch.t])
def test_new_parameters_are_read_in_their_step(form):
    """Also those in another order in memory, which a kernel writes to a copy of."""
    opt = ftp.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)

    def train(w, g):
        w = form(w)
        new, state = opt.update(form(g), opt.init(w), w)
        return new, new.exp() @ new.t(), w - new, state

    given = [torch.randn(6, 4, dtype=torch.float64) for _ in range(2)]
    step = ftp.spmd(train, MESH, (ftp.P(), ftp.P()), compile=True)
    torch.testing.assert_close(step(*given), train(*given))


@pytest.mark.parametrize("compile", [False, True])
def test_two_updates_in_a_step(compile):
    opt = ftp.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)

    def train(w, g):
        new, state = opt.update(g, opt.init(w), w)
        new, state = opt.update(g, state, new)
        return opt.update(new * g, state, new)

    given = [torch.randn(6, 4, dtype=torch.float64) for _ in range(2)]
    step = ftp.spmd(train, MESH, (ftp.P(), ftp.P()), compile=compile)
    torch.testing.assert_close(step(*given), train(*given))
