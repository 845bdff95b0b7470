"""Draws, models in train mode and initialization on gloo processes: the numbers of one device."""

import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after
from launch import launch
from torch import nn

import ftp
from ftp import P, random

pytestmark = pytest.mark.dist


def _train(shape, spec):
    mesh = ftp.make_mesh(shape, ("dp", "tp"), device_type="cpu")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.4), nn.Linear(10, 3)).double()
    fn, meta = ftp.functionalize(model)
    specs = ftp.plan(meta, {"0.weight": spec, "2.weight": P(None, "tp")})
    key = random.key(3)
    params = ftp.init_params(model, key, mesh, specs)
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)

    def loss(params, x, key):
        return (fn(params, x, rng=key) ** 2).mean()

    step = ftp.shard(loss, mesh, specs, batch_specs=(P("dp"), P()))
    got, grads = step(params, ftp.device_put(x, mesh, P("dp")), random.fold_in(key, 1))
    full, grads = ftp.device_get(params, mesh, specs), ftp.device_get(grads, mesh, specs)
    one = ftp.init_params(model, key, ftp.simulated_mesh((1,), ("tp",)))
    same = all(torch.equal(full[path], one[path]) for path in one)
    expected_grads, expected = torch.func.grad_and_value(loss)(one, x, random.fold_in(key, 1))
    errors = [
        float((got - expected).abs()),
        *(float((grads[p] - g).abs().max()) for p, g in expected_grads.items()),
    ]
    dist.barrier()
    dist.destroy_process_group()
    return same, max(errors)


@pytest.mark.parametrize(
    ("shape", "spec"), slow_after(1, [((2, 2), P(("tp", "dp"))), ((1, 3), P("tp"))]), ids=str
)
def test_a_step_with_dropout_from_drawn_parameters(shape, spec):
    ranks = launch(_train, shape[0] * shape[1], shape, spec, timeout=120)
    assert [r.exit for r in ranks] == [0] * len(ranks), [r.error or r.stderr[-2000:] for r in ranks]
    for r in ranks:
        same, error = r.value
        assert same
        assert error < 1e-12
