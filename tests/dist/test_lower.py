"""`lower` on processes takes what is not placed for a shard."""

import pytest
import torch
from launch import launch

import ftp
from ftp import P
from ftp.errors import InputError

pytestmark = pytest.mark.dist


def _lowers():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    fn, params = ftp.functionalize(model)
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    specs = ftp.plan(params, {"0.*": P("tp"), "2.weight": P(None, "tp")})
    step = ftp.shard(lambda p, x: fn(p, x).square().mean(), mesh, specs)
    x = torch.ones(3, 4)
    with pytest.warns(UserWarning, match="call ftp.device_put") as seen:
        step.lower(params, x)
    in_rows = ftp.spmd(lambda w, x: (x @ w).sum(), mesh, (P("tp"), P()))
    with pytest.raises(InputError) as refused:
        in_rows.lower(torch.ones(4, 2), x)
    placed = ftp.device_put(params, mesh, specs)
    texts = [
        str(step.lower(tree, x)) for tree in (placed, {k: p.to("meta") for k, p in params.items()})
    ]
    return str(seen[0].message), str(refused.value), *texts


def test_parameters_that_are_not_placed_are_warned_of():
    said, refused, placed, whole = launch(_lowers, 2)[0].value
    assert "lower takes params['0.bias'], of shape (6,)" in said and "shape (12,)" in said, said
    assert "lower takes w, of shape (4, 2), for this rank's shard" in refused
    assert "the trace failed: a and b must have same reduction dim" in refused
    assert "f32[6@tp, 4]" in placed and placed == whole
