"""The functions of ``distribute_module`` as specs and constraints."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ftp
from ftp import P
from ftp.errors import SpecError
from ftp.plans import from_distribute_module


def partition(name: str, module: nn.Module, mesh: Any) -> None:
    dims = {"up": 0, "down": -1}
    if name in dims:
        for key, p in list(module.named_parameters(recurse=False)):
            if p.ndim == 2 or name == "up":
                sharded = distribute_tensor(p, mesh, [Shard(dims[name])])
                module.register_parameter(key, nn.Parameter(sharded))


def inputs_of(module: nn.Module, inputs: Any, mesh: Any) -> Any:
    (x,) = inputs
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    return (x.redistribute(mesh, [Replicate()]),)


def output_of(outputs: Any, mesh: Any) -> Any:
    return outputs.redistribute(placements=[Shard(-1)]).to_local()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_all_three_functions():
    model = MLP().double()
    before = {path: p.clone() for path, p in model.named_parameters()}
    code = distribute_tensor.__code__
    specs, constraints = from_distribute_module(model, partition, inputs_of, output_of)
    assert distribute_tensor.__code__ is code
    assert dict(specs) == {
        "up.weight": P("tp"),
        "up.bias": P("tp"),
        "down.weight": P(None, "tp"),
        "down.bias": P(),
    }
    (around,) = constraints.values()
    assert around.inputs == ((P("tp"), P()), ...) and around.outputs == P(..., "tp")
    assert all(torch.equal(p, before[path]) for path, p in model.named_parameters())

    fn, params = ftp.functionalize(model, constraints=constraints)
    x = torch.randn(5, 6, dtype=torch.float64)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fn(params, x).square().mean()

    step = ftp.shard(loss, ftp.simulated_mesh((3,), ("tp",)), specs, certify=True)
    value, grads = step(params, x)
    expected = model(x).square().mean()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-13)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for path, grad in zip(before, wanted, strict=True):
        torch.testing.assert_close(grads[path], grad, rtol=1e-10, atol=1e-13)


def test_partition_alone_names_another_axis_of_a_mesh():
    mesh = ftp.AbstractMesh((2, 3), ("dp", "mp"))

    def halves(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            assert mesh.size() == 3 and mesh.mesh_dim_names == ("mp",)
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(1)]))

    specs, constraints = from_distribute_module(MLP(), halves, mesh=mesh, axis="mp")
    assert specs["up.weight"] == P(None, "mp") and specs["up.bias"] == P() and not constraints


def _partial(name: str, module: nn.Module, mesh: Any) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Partial()]))


REFUSED: dict[str, dict[str, Any]] = {
    r"has placements \(Partial": {"partition_fn": _partial},
    "asks for shape of input 0 of <lambda>": {"input_fn": lambda m, x, mesh: x[0].shape},
    "asks the mesh for its get_group": {"output_fn": lambda m, y, mesh: mesh.get_group()},
    "Pass mesh=": {"output_fn": lambda m, y, mesh: mesh.size()},
    "gives other inputs than it was given": {"input_fn": lambda m, x, mesh: (None,)},
    "not the output that it was given": {"output_fn": lambda y, mesh: (y, y)},
    "no input or output": {"input_fn": lambda x, mesh: DTensor.from_local(torch.ones(2), mesh)},
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str):
    with pytest.raises(SpecError, match=text):
        from_distribute_module(MLP(), **REFUSED[text])
