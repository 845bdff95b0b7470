"""Exported programs on gloo processes equal one device, made here or elsewhere."""

import io
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import fx

import ftp
from ftp import P
from ftp.exported import bind

pytestmark = pytest.mark.dist

SPECS = {"0.weight": P("tp"), "0.bias": P("tp"), "2.weight": P(None, "tp")}


class _Checked(fx.Interpreter):
    """Sees that every value is as its node says."""

    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and n.op == "call_function":
            said = n.meta["val"]
            assert (value.shape, value.dtype, value.stride()) == (
                said.shape,
                said.dtype,
                said.stride(),
            ), n
        return value


def _run():
    warnings.simplefilter("ignore")
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4)).double(),
        torch.randn(3, 4, dtype=torch.float64),
    )
    expected = model(x).detach()
    program = torch.export.export(model, (x,))
    here = ftp.shard_exported(program, mesh, SPECS)
    elsewhere = ftp.shard_exported(program, ftp.AbstractMesh((2,), ("tp",)), SPECS, rank=rank)
    loaded = []
    for one in (here, elsewhere):
        file = io.BytesIO()
        torch.export.save(one, file)
        file.seek(0)
        loaded.append(torch.export.load(file))
    errors = []
    for one in (
        here,
        loaded[0],
        bind(elsewhere, mesh),
        bind(loaded[1], mesh),
        bind(loaded[1], mesh).run_decompositions(),
    ):
        errors.append(float((one.module()(x) - expected).abs().max()))
    dims = {"input": {0: torch.export.Dim("batch")}}
    of_any_size = ftp.shard_exported(
        torch.export.export(model, (x,), dynamic_shapes=dims), mesh, SPECS
    ).module()
    for size in (2, 7):
        x_of_size = torch.randn(size, 4, dtype=torch.float64)
        errors.append(float((of_any_size(x_of_size) - model(x_of_size)).detach().abs().max()))
    state = [here.state_dict[s.target] for s in here.graph_signature.input_specs if s.target]
    with torch.no_grad():
        (result,) = _Checked(here.graph_module).run(*state, x)
    errors.append(float((result - expected).abs().max()))
    loss = here.module()(x).square().mean()
    other = [
        n.args[-1]
        for n in ftp.shard_exported(program, mesh, SPECS, rank=1 - rank).graph.nodes
        if "all_reduce" in str(n.target)
    ]
    dist.barrier()
    dist.destroy_process_group()
    return errors, bool(loss.isfinite()), other


def test_on_processes():
    for rank in launch(_run, 2):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        errors, is_finite, other = rank.value
        assert max(errors) < 1e-12 and len(errors) == 8 and is_finite
        assert other == ["sim:tp"]
