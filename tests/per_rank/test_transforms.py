"""Derivatives of any order through per-rank code, and torch.vmap around it, equal plain torch's."""

import itertools
import math

import pytest
import torch
from few_or_many import slow_unless

import ftp
from ftp import P

MESHES = {
    "2": ((2,), ("ep",)),
    "3": ((3,), ("ep",)),
    "ep2×tp2": ((2, 2), ("ep", "tp")),
}


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def every_collective(x, w):
    n, i = ftp.axis.axis_size("ep"), ftp.axis.axis_index("ep")
    h = (x @ w).tanh()
    total = ftp.axis.all_reduce(h.sum(0), "ep")
    every = ftp.axis.all_gather(h, "ep", dim=0)
    share = ftp.axis.reduce_scatter(every.square() * (1 + i), "ep", dim=0)
    turned = ftp.axis.all_to_all(h, "ep", split_dim=0, concat_dim=1)
    ring = ftp.axis.ppermute(h, "ep", [(j, (j + 1) % n) for j in range(n)])
    return total, share * ring, turned


def on_one_device(n):
    def run(x, w):
        h = (x @ w).tanh()
        parts = h.chunk(n)
        share = sum((1 + i) * h.square() for i in range(n))
        ring = torch.cat([parts[i - 1] for i in range(n)])
        turned = torch.cat([torch.cat([p.chunk(n)[i] for p in parts], 1) for i in range(n)])
        return h.sum(0), share * ring, turned

    return run


def both(mesh):
    """The layer, and what it computes on one device."""
    own = ("ep",) if len(mesh.axes) > 1 else None
    outs = (P(), P("ep"), P("ep"))
    layer = ftp.local(every_collective, mesh, (P("ep"), P()), outs, own)
    return layer, on_one_device(mesh.axes["ep"])


def scalar(f):
    return lambda x, w: sum((y * torch.arange(y.numel()).view_as(y).sin()).sum() for y in f(x, w))


def penalty(f):
    """The gradient's square, so that its gradient is a second derivative."""

    def loss(w, x):
        slope, of_w = torch.func.grad(scalar(f), argnums=(0, 1))(x, w)
        return slope.square().sum() + of_w.square().sum()

    return loss


def of_batch(f):
    """A gradient for each member of a batch of weights."""
    return lambda ws, x: (
        torch.vmap(torch.func.grad(scalar(f), 1), (None, 0))(x, ws).square().sum()
        + torch.vmap(scalar(f), (None, 0))(x, ws).square().sum()
    )


def of_rows(f):
    """Each row of the data by itself: a batch of what is cut."""
    return lambda w, x: torch.vmap(scalar(f), (0, None))(x, w).square().sum()


def third(f):
    return lambda w, x: torch.func.grad(penalty(f))(w, x).square().sum()


CASES = {
    "second": (penalty, (4, 3), (8, 4)),
    "vmap of gradients": (of_batch, (2, 4, 3), (8, 4)),
    "vmap of shards": (of_rows, (4, 3), (2, 8, 4)),
}


@pytest.mark.parametrize(
    ("case", "mesh"),
    slow_unless(
        lambda case, mesh: (case == "second") == (mesh == "2") != (mesh == "3"),
        itertools.product(CASES, MESHES),
    ),
)
def test_equals_one_device(case, mesh):
    make, weights, data = CASES[case]
    shape, names = MESHES[mesh]
    mesh = ftp.simulated_mesh(shape, names)
    if mesh.axes["ep"] == 3:
        data = tuple(9 if n == 8 else n for n in data)
    layer, plain = both(mesh)
    w, x = drawn(*weights), drawn(*data)
    expected = torch.func.grad_and_value(make(plain))(w, x)
    cut = P(*(None for _ in weights[1:]), "tp") if len(names) > 1 else P()
    # Certificates of the others are not found yet.
    step = ftp.shard(make(layer), mesh, cut, certify=case == "second" and len(names) == 1)
    loss, grad = step(w, x)
    close((grad, loss), expected)


def test_a_third_derivative():
    layer, plain = both(ftp.simulated_mesh(2, "ep"))
    w, x = drawn(2, 2), drawn(4, 2)
    close(torch.func.grad(third(layer))(w, x), torch.func.grad(third(plain))(w, x))


def test_torch_autograd_differentiates_twice():
    layer, plain = both(ftp.simulated_mesh(2, "ep"))

    def twice(f):
        w, x = drawn(4, 3).requires_grad_(), drawn(8, 4)
        (slope,) = torch.autograd.grad(scalar(f)(x, w), w, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), w)[0]

    close(twice(layer), twice(plain))
