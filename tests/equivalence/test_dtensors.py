"""Rank programs on DTensors: redistributions forward and backward, pending sums, two mesh axes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call

import ftp
from ftp import P
from ftp.errors import CertificateError, SpecError
from tests.museum.proven import GRID, MESH, randn

X, UP, DOWN = randn(4, 6), randn(6, 4), randn(4, 3)
WHOLE, ROWS, COLUMNS, SUM = [Replicate()], [Shard(0)], [Shard(1)], [Partial()]


def redistributed(placements: Any):
    return lambda *args: mlp(*args).redistribute(placements=placements)


def mlp(x, up, *down):
    y = x @ up
    for w in down:
        y = torch.relu(y) @ w
    return y


def test_a_column_parallel_layer_that_gathers():
    """Each rank cuts its own part of the gradient, not the part that the rank before it cut."""
    specs = (WHOLE, COLUMNS), WHOLE
    ftp.equivalent(mlp, redistributed(WHOLE), MESH, *specs, X, UP, grad=True)


def test_two_mesh_axes():
    specs = [Shard(0), Replicate()], [Replicate(), Shard(1)], [Replicate(), Shard(0)]
    given = (GRID, specs, [Shard(0), Replicate()], X, UP, DOWN)
    ftp.equivalent(mlp, redistributed([Shard(0), Replicate()]), *given, grad=True)


def test_a_parallelized_module():
    """Its weights are drawn inside, and replaced by arguments: the draws reach no result."""

    def program(x, *weights):
        module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 6))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(module, MESH.device_mesh, plan)
        names = ("0.weight", "0.bias", "2.weight", "2.bias")
        return functional_call(module, dict(zip(names, weights, strict=True)), x)

    def reference(x, w, b, v, c):
        return F.linear(torch.relu(F.linear(x, w, b)), v, c)

    weights = torch.randn(4, 6), torch.randn(4), torch.randn(6, 4), torch.randn(6)
    specs = (P(), ROWS, ROWS, COLUMNS, WHOLE)
    given = (MESH, specs, P(), torch.randn(3, 6), *weights)
    ftp.equivalent(reference, program, *given, grad=True)


def gradients(x, w):
    x, w = (t.detach().requires_grad_() for t in (x, w))
    return torch.autograd.grad((x @ w).square().sum(), (x, w))


def test_a_gradient_that_is_left_a_pending_sum():
    """The gradient of a weight of data parallelism, as DTensor leaves it: out_specs says so, or
    the program reduces it.
    """
    given = (MESH, (ROWS, WHOLE))

    def reduced(x, w):
        of_x, of_w = gradients(x, w)
        assert of_w.placements == (Partial(),)  # type: ignore[attr-defined]
        return of_x, of_w.redistribute(placements=WHOLE)  # type: ignore[attr-defined]

    ftp.equivalent(gradients, gradients, *given, (ROWS, SUM), X, UP)
    ftp.equivalent(gradients, reduced, *given, (ROWS, WHOLE), X, UP)
    with pytest.raises(SpecError, match=r"output\[1\] on rank 0 is a DTensor with placements") as e:
        ftp.equivalent(gradients, gradients, *given, (ROWS, WHOLE), X, UP)
    assert "(Partial(sum),); its spec is P(None, None)" in str(e.value)


def test_placements_that_are_others_than_those_of_the_spec():
    square, specs = randn(4, 4), (MESH, ROWS)
    with pytest.raises(SpecError, match=r"\(Shard\(dim=0\),\); its spec is P\(None, 'tp'\)"):
        ftp.equivalent(torch.tanh, torch.tanh, *specs, COLUMNS, square)
    ftp.equivalent(torch.tanh, torch.tanh, *specs, P("tp"), square)

    def gathered(x):
        return torch.tanh(x).redistribute(placements=WHOLE)

    ftp.equivalent(torch.tanh, gathered, *specs, P(), square)


def test_a_local_tensor_that_is_wrong_is_refused():
    def program(x, w):
        y = x.to_local() @ w.to_local()
        return torch.distributed.tensor.DTensor.from_local(  # wrong
            y, x.device_mesh, WHOLE, run_check=False
        )

    with pytest.raises(CertificateError, match="a sum that is still pending over tp"):
        ftp.equivalent(mlp, program, MESH, (COLUMNS, ROWS), WHOLE, X, UP)
