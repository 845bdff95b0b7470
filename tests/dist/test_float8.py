"""Training in float8 on gloo processes, eager and compiled: as near to float64 as one device."""

import pytest
import torch.distributed as dist
from float8_mlp import PLACEMENTS, distance, drawn, gradients, linear, mlp
from launch import launch
from torch.nn import functional as F

import ftp

pytestmark = pytest.mark.dist


def _on_a_rank(placement: str, compiles: bool) -> tuple[float, float]:
    _, axes, specs, batch_specs = PLACEMENTS[placement]
    loss, (params, batch) = mlp(linear(by_rows=placement == "tp")), drawn(48, 32, 64)
    mesh = ftp.make_mesh((2,), axes, device_type="cpu")
    step = ftp.shard(loss, mesh, specs, batch_specs=batch_specs, compile=compiles)
    value, grads = step(
        ftp.device_put(params, mesh, specs), *ftp.device_put(batch, mesh, batch_specs)
    )
    found = [value, *ftp.device_get(grads, mesh, specs).values()]
    wide = {path: p.double() for path, p in params.items()}
    exact = gradients(mlp(F.linear), wide, [x.double() for x in batch])
    dist.barrier()
    dist.destroy_process_group()
    return distance(found, exact), distance(gradients(loss, params, batch), exact)


@pytest.mark.parametrize("placement", ["tp", "ZeRO-3"])
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_float8_on_processes(placement: str, compiles: bool):
    ranks = launch(_on_a_rank, 2, placement, compiles)
    assert [r.error for r in ranks] == [None] * 2
    for rank in ranks:
        found, one_device = rank.value
        assert found < 1.1 * one_device < 0.2
