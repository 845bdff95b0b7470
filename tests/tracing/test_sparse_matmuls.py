"""Matmuls with a sparse matrix, captured or an argument: values and gradients of the dense one."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import InputError, TraceError

DENSE = torch.tensor(
    [[0.0, 0.5, 0, 0, 2], [0.5, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [3, 0, 0, 0, 1]],
    dtype=torch.float64,
)
TWICE = torch.sparse_coo_tensor(
    torch.tensor([[0, 0, 4], [1, 1, 2]]),
    torch.tensor([1.0, 2.0, 3.0]).double(),
    (5, 5),
    check_invariants=True,
)  # an entry in two parts
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # CSR is in beta
    SPARSE = {
        "coo": DENSE.to_sparse_coo(),
        "csr": DENSE.to_sparse_csr(),
        "not coalesced": TWICE,
    }


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("mesh", [((3,), ("dp",)), ((2, 2), ("dp", "tp"))], ids=["dp3", "dp2×tp2"])
@pytest.mark.parametrize("layout", SPARSE)
def test_a_graph_network(layout: str, mesh: tuple[tuple, tuple]):
    """Two layers and a vector, rows of nodes cut, five of them."""
    sparse = SPARSE[layout]

    def network(a: Tensor, params: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
        matmul = torch.mm if a.layout is torch.strided else torch.sparse.mm
        hidden = matmul(a, x @ params["up"]).relu()
        out = a @ (hidden @ params["down"])
        return F.cross_entropy(out, labels) + (a @ hidden[:, 0]).square().sum()

    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"up": (3, 4), "down": (4, 6)}.items()
    }
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 5, 2, 2, 1])
    own = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = network(sparse.to_dense(), own, x, labels)
    gradients = torch.autograd.grad(expected, list(own.values()))
    specs = {"up": P(None, "tp"), "down": P("tp")} if "tp" in mesh[1] else P()
    step = ftp.shard(
        lambda params, x, labels: network(sparse, params, x, labels),
        ftp.simulated_mesh(*mesh),
        specs,
        batch_specs=P("dp"),
        certify=True,
    )
    value, grads = step(params, x, labels)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=0)
    for name, gradient in zip(own, gradients, strict=True):
        torch.testing.assert_close(grads[name], gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("cut", [P(), P("dp")], ids=["whole", "entries cut"])
@pytest.mark.parametrize("layout", SPARSE)
def test_as_an_argument(layout: str, cut: P):
    """The adjacency is in the batch; some ranks' parts of its entries are unequal, or empty."""
    sparse = SPARSE[layout]

    def loss(params: dict[str, Tensor], a: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        matmul = torch.mm if a.layout is torch.strided else torch.sparse.mm
        hidden = matmul(a, x @ params["up"]).relu()
        out = a.T @ (hidden @ params["down"]) + torch.mv(a, hidden[:, 0])[:, None]
        return F.cross_entropy(out, labels) + (hidden.T @ a).square().mean()

    generator = torch.Generator().manual_seed(1)
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"up": (3, 4), "down": (4, 6)}.items()
    }
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 5, 2, 2, 1])
    own = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = loss(own, sparse.to_dense(), x, labels)
    gradients = torch.autograd.grad(expected, list(own.values()))
    mesh = ftp.simulated_mesh((3,), ("dp",))
    step = ftp.shard(loss, mesh, P("dp"), batch_specs=(cut, P("dp"), P("dp")), certify=True)
    placed = ftp.device_put(sparse, mesh, cut)
    for a in (sparse, placed):
        value, grads = step(params, a, x, labels)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=0)
        for name, gradient in zip(own, gradients, strict=True):
            torch.testing.assert_close(grads[name], gradient, rtol=1e-10, atol=1e-13)
    back = ftp.device_get(placed, mesh, cut)
    assert back.layout is sparse.layout
    torch.testing.assert_close(back.to_dense(), sparse.to_dense(), rtol=0, atol=0)


@given(
    entries=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=7),
    mesh=st.sampled_from([((2,), ("dp",)), ((3,), ("dp",)), ((2, 2), ("dp", "tp"))]),
    specs=st.tuples(*[st.sampled_from([P(), P("dp")])] * 2),
)
@settings(max_examples=4, deadline=None)
def test_gradients_of_values_and_dense_operands(entries: Any, mesh: Any, specs: Any):
    """A matrix made of values in the function; places that come twice add up; none at all."""
    indices = torch.tensor(entries, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    values = torch.linspace(0.5, 2, len(entries), dtype=torch.float64)
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).sin().reshape(5, 3)

    def loss(values: Tensor, x: Tensor, indices: Tensor, scale: float = 2.0) -> Tensor:
        a = torch.sparse_coo_tensor(indices, values * scale, (4, 5))
        return torch.sparse.mm(a, x).square().sum() + (a @ x).sin().sum()

    own, dense = values.clone().requires_grad_(), x.clone().requires_grad_()
    matrix = torch.zeros(4, 5, dtype=torch.float64).index_put(
        (indices[0], indices[1]), own * 2, accumulate=True
    )
    made = matrix @ dense
    expected = torch.autograd.grad(made.square().sum() + made.sin().sum(), (own, dense))
    of_values, of_rows = specs
    step = ftp.spmd(
        torch.func.grad(loss, argnums=(0, 1)),
        ftp.simulated_mesh(*mesh),
        (of_values, of_rows, P(None, *of_values)),
        certify=True,
    )
    found = step(values, x, indices)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "fn",
    [lambda a: a + 1, lambda a: a.sum(), torch.relu, lambda a: a[0], lambda a: a * torch.ones(5)],
    ids=["sum", "method", "function", "index", "elements"],
)
def test_what_is_not_known_of_a_sparse_argument(fn: Callable[[Any], Any]):
    with pytest.raises(TraceError, match="may be multiplied by a dense matrix or vector"):
        ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), P())(SPARSE["coo"])


def test_other_sparse_tensors_are_refused():
    step = ftp.spmd(lambda a, x: a @ x, ftp.simulated_mesh((2,), ("dp",)), P())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = DENSE[None].to_sparse(), DENSE.to_sparse(1), DENSE.to_sparse_csc()
    for sparse in others:
        with pytest.raises(InputError, match="sparse matrices in COO or CSR"):
            step(sparse, DENSE)
    with pytest.raises(InputError, match=r"shape \(5, 5\) is multiplied by a tensor of shape \(3,"):
        step(SPARSE["coo"], DENSE[:3])


@pytest.mark.parametrize("layout", SPARSE)
def test_a_sum_with_a_dense_matrix(layout: str):
    """Weights with a sparse update, as of SHiRA: adapters that train some of the elements."""
    at = torch.tensor([[0, 0, 4], [1, 1, 2]])

    def loss(params: dict[str, Tensor], a: Tensor, x: Tensor) -> Tensor:
        update = torch.sparse_coo_tensor(at, params["values"], (5, 5), check_invariants=True)
        w = params["w"].clone()
        w += update
        w.add_(update, alpha=-0.5)
        total = torch.add(w, a, alpha=2) if a.layout is torch.sparse_coo else w + 2 * a
        return (x @ total + (x + 1) @ w.add(update)).sin().sum()

    generator = torch.Generator().manual_seed(0)
    w = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    values = torch.tensor([1.0, -2, 0.5], dtype=torch.float64)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    sparse = SPARSE[layout]
    own = {"w": w.clone().requires_grad_(), "values": values.clone().requires_grad_()}
    due = loss(own, sparse.to_dense(), x)
    grads = dict(zip(own, torch.autograd.grad(due, list(own.values())), strict=True))
    mesh = ftp.simulated_mesh((2,), ("tp",))
    for specs in ({"w": P("tp"), "values": P()}, {"w": P(None, "tp"), "values": P("tp")}):
        step = ftp.shard(loss, mesh, specs, batch_specs=(P(), P("tp")))
        found = step({"w": w, "values": values}, sparse, x)
        torch.testing.assert_close(found, (due.detach(), grads))
