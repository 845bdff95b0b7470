"""Matmuls with a captured sparse matrix: values and gradients of the dense one."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import InputError

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


def test_as_an_argument_it_is_refused():
    step = ftp.spmd(lambda a, x: a @ x, ftp.simulated_mesh((2,), ("dp",)), P())
    with pytest.raises(InputError, match="ftp takes dense ones"):
        step(SPARSE["coo"], DENSE)
