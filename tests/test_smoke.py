"""A plan, a simulated step, a step of two processes and a certificate: the smoke set that every
supported torch must pass, as ``pytest -m smoke tests/test_smoke.py``.
"""

import os

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ftp
from ftp import P

pytestmark = pytest.mark.smoke

SPECS = {
    "0.weight": P("tp"),
    "1.weight": P("tp"), "1.bias": P("tp"),
    "3.weight": P(None, "tp"), "3.bias": P(),
    "4.weight": P(), "4.bias": P(),
}  # fmt: skip


def made():
    """A loss over an embedding, an MLP and a norm; parameters; a batch of (tokens, targets)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(12, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)
    ).double()
    fn, params = ftp.functionalize(model)
    weight = torch.randn(8, 12, dtype=torch.float64)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy((fn(params, tokens) @ weight).flatten(0, 1), targets.flatten())

    batch = (torch.randint(12, (4, 6)), torch.randint(12, (4, 6)))
    return loss_fn, params, batch


def expected():
    loss_fn, params, batch = made()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    loss = loss_fn(leaves, batch)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def test_plan():
    loss_fn, params, batch = made()
    lowered = ftp.shard(loss_fn, ftp.AbstractMesh((2,), ("tp",)), SPECS).lower(params, batch)
    # The embedding's rows and the row-parallel product are summed; so is the gradient of the
    # embedding's results, onto the rows' ranks.
    assert [c.op for c in lowered.collectives] == ["all_reduce", "all_reduce", "reduce_scatter"]
    assert "plan over tp: optimal" in str(lowered)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_simulated(shape: tuple[int, ...]):
    loss_fn, params, batch = made()
    names = ("tp", "dp")[: len(shape)]
    mesh = ftp.simulated_mesh(shape, names)
    step = ftp.shard(loss_fn, mesh, SPECS, batch_specs=P(*names[1:]))
    loss, grads = step(ftp.device_put(params, mesh, SPECS), batch)
    torch.testing.assert_close((loss, dict(grads)), expected())


def test_a_checkpointed_block_that_reads_a_value():
    """Its code runs again in the backward pass, by torch's private functions."""

    def loss_fn(w: Tensor, x: Tensor, n: Tensor) -> Tensor:
        rows = checkpoint(lambda y: y[: int(n)].cumsum(0).sin(), x @ w, use_reentrant=False)
        return rows.square().sum()

    torch.manual_seed(0)
    w, x = (torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64))
    leaf, n = w.clone().requires_grad_(), torch.tensor(3)
    want = loss_fn(leaf, x, n)
    want.backward()
    mesh = ftp.simulated_mesh((2,), ("tp",))
    with pytest.warns(ftp.errors.ReadWarning):
        found = ftp.shard(loss_fn, mesh, P("tp"))(w, x, n)
    torch.testing.assert_close(found, (want.detach(), leaf.grad))


def test_certificate():
    loss_fn, params, batch = made()
    step = ftp.shard(loss_fn, ftp.AbstractMesh((2,), ("tp",)), SPECS)
    certificate = ftp.certify(step.lower(params, batch))
    assert "on (tp 2), 2 ranks" in repr(certificate)
    assert certificate.assumptions == []


def ranks_step():
    loss_fn, params, batch = made()
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    loss, grads = ftp.shard(loss_fn, mesh, SPECS)(ftp.device_put(params, mesh, SPECS), batch)
    whole = ftp.device_get(dict(grads), mesh, SPECS)
    dist.destroy_process_group()
    return loss, whole, os.environ["RANK"]


@pytest.mark.dist
def test_two_processes():
    for rank in launch(ranks_step, 2, timeout=120):
        assert rank.exit == 0, rank.error or rank.stderr
        torch.testing.assert_close(rank.value[:2], expected())
