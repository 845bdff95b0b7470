"""Compiled programs: inductor's cache keeps their code."""

import torch

import ftp

MESH = ftp.simulated_mesh((1,), ("tp",))


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() * 2).sum()


def test_inductor_finds_code_again():
    from torch._dynamo.utils import counters

    x = torch.randn(3, 5, dtype=torch.float64)
    for is_again in (False, True):
        counters.clear()
        step = ftp.spmd(loss, MESH, ftp.P(), ftp.P(), compile=True)
        assert torch.allclose(step(x), loss(x))
        found = counters["inductor"]
        assert not found["fxgraph_cache_bypass"]
        assert found["fxgraph_cache_hit"] >= is_again
