"""Optimizers on whole matrices, written by the user, under ZeRO-3: matrices are gathered once or
sent to one rank each, and no product in the update is reduced.
"""

from collections import Counter

import pytest
import torch
from few_or_many import slow_after
from plan_reshards import unbucketed

import ftp
from ftp import P


def orthogonal(g, steps=3):
    """Newton-Schulz iteration as in public Muon code."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.mT if g.size(-2) > g.size(-1) else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if g.size(-2) > g.size(-1) else x


def each(updates):
    return {k: orthogonal(u) for k, u in updates.items()}


def stacked(updates):
    made = {}
    for kind in ("up", "down"):
        keys = [k for k in updates if k.startswith(kind)]
        parts = orthogonal(torch.stack([updates[k] for k in keys])).unbind()
        made.update(zip(keys, parts, strict=True))
    return made


def whitened(updates):
    """Shampoo without memory of earlier steps."""
    made = {}
    for k, u in updates.items():
        values, vectors = torch.linalg.eigh(u @ u.mT + 1e-3 * torch.eye(len(u), dtype=u.dtype))
        made[k] = vectors @ ((vectors.mT @ u) / values.sqrt()[:, None])
    return made


def loss_fn(params, x):
    for i in range(len(params) // 2):
        x = x + (x @ params[f"up{i}"].T).relu() @ params[f"down{i}"].T
    return x.square().mean()


def halves_loss(params, x):
    n = len(x) // 2
    return loss_fn(params, x[:n]) + loss_fn(params, x[n:])


def training(update, loss_fn=loss_fn):
    def step(params, momenta, x):
        grads, loss = torch.func.grad_and_value(loss_fn)(params, x)
        momenta = {k: 0.9 * momenta[k] + grads[k] for k in params}
        made = update({k: grads[k] + 0.9 * momenta[k] for k in params})
        return {k: params[k] - 0.1 * made[k] for k in params}, momenta, loss

    return step


def parameters(layers, width, make):
    shapes = {"up": (2 * width, width), "down": (width, 2 * width)}
    return {f"{k}{i}": make(shapes[k]) for i in range(layers) for k in shapes}


def lowered(update, params, x, mesh, spec, loss_fn=loss_fn, **options):
    specs = dict.fromkeys(params, spec)
    inputs, outputs = (specs, specs, P("dp")), (specs, specs, P())
    step = ftp.spmd(training(update, loss_fn), mesh, inputs, outputs, **options)
    return step, step.lower(params, params, x)


@pytest.mark.cases_by_default(3)
@pytest.mark.parametrize("update", [each, stacked, whitened])
@pytest.mark.parametrize(
    ("spec", "n"), slow_after(1, [(P("dp"), 2), (P("dp"), 3), (P(None, "dp"), 4)])
)
def test_updates_equal_those_of_one_device(update, spec, n):
    g = torch.Generator().manual_seed(0)
    params = parameters(n, 8, lambda s: torch.randn(s, generator=g, dtype=torch.float64) / 4)
    x = torch.randn(12, 8, generator=g, dtype=torch.float64)
    mesh = ftp.simulated_mesh((n,), ("dp",))
    step, made = lowered(update, params, x, mesh, spec, certify=True)
    assert made.plan.kept_rules == {"dp": True}
    expected = training(update)(params, params, x)
    torch.testing.assert_close(step(params, params, x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss_fn", [loss_fn, halves_loss])
def test_a_gradient_is_gathered_once_for_all_products_with_it(loss_fn):
    with torch.device("meta"):
        params, x = parameters(2, 64, torch.empty), torch.empty(4096, 64)
    mesh, spec = ftp.AbstractMesh((4,), ("dp",)), P("dp")
    _, made = lowered(each, params, x, mesh, spec, loss_fn)
    _, plain = lowered(lambda updates: updates, params, x, mesh, spec, loss_fn)
    assert _counted(made) - _counted(plain) == Counter({"all_gather": 4})
    sent = [m.collectives.wire_nbytes for m in (made, plain)]
    assert sent[0] - sent[1] == 3 / 4 * sum(p.numel() * 4 for p in params.values())


def test_stacked_matrices_are_sent_to_one_rank_each():
    with torch.device("meta"):
        params, x = parameters(4, 512, torch.empty), torch.empty(4096, 512)
    mesh, spec = ftp.AbstractMesh((4,), ("dp",)), P("dp")
    _, made = lowered(stacked, params, x, mesh, spec)
    _, plain = lowered(lambda updates: updates, params, x, mesh, spec)
    assert made.work == 1.0
    assert _counted(made) - _counted(plain) == Counter({"all_to_all": 4})
    sent = [m.collectives.wire_nbytes for m in (made, plain)]
    assert sent[0] - sent[1] == 2 * 3 / 16 * sum(p.numel() * 4 for p in params.values())


def _counted(made):
    return Counter(c.op for c in unbucketed(made).collectives)
