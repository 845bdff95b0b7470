"""`lower` on processes takes what is not placed for a shard."""

import os
import warnings

import pytest
import torch
from launch import launch

import ftp
from ftp import P
from ftp.errors import InputError, StaleCaptureWarning

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


def _lowered_by_one_rank():
    kept, w = {}, torch.eye(4, dtype=torch.float64)

    def loss(w, x):
        n = x.shape[0]
        if "table" not in kept or len(kept["table"]) < n:
            kept["table"] = torch.arange(n, dtype=torch.float64)[:, None] / n
        return ((x @ w) * kept["table"][:n]).square().sum()

    step = ftp.shard(loss, ftp.make_mesh((2,), ("tp",), device_type="cpu"), P())
    x = torch.ones(4, 4, dtype=torch.float64)
    found = [float(step(w, x)[0])]
    if os.environ["RANK"] == "0":
        step.lower(w, x.repeat(4, 1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", StaleCaptureWarning)
        found.append(float(step(w, x)[0]))
    return found, len(told)


def test_a_rank_that_lowers_alone_does_not_plan_alone():
    first, second = launch(_lowered_by_one_rank, 2, timeout=60)
    assert (first.value, second.value) == (([3.5, 3.5], 1), ([3.5, 3.5], 0)), first.error


def _lowered_before_the_first_call():
    rank = int(os.environ["RANK"])
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    w = torch.arange(16, dtype=torch.float64).reshape(4, 4).sin()
    held, x = ftp.device_put(w, mesh, P(None, "tp")), torch.eye(4, dtype=torch.float64)
    found = []
    for ranks in ((0,), (1,), (0, 1)):
        step = ftp.shard(lambda w, x: (x @ w).square().sum(), mesh, P(None, "tp"))
        if rank in ranks:
            assert len(step.lower(held, x).collectives) == 1
        found.append(float(step(held, x)[0]))
    return found, float(w.square().sum())


@pytest.mark.parametrize("stored", ["0", "1"])
def test_some_ranks_lower_before_the_first_call(stored: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FTP_PLANS", stored)
    for rank in launch(_lowered_before_the_first_call, 2, timeout=60):
        assert rank.error is None, rank.error
        found, due = rank.value
        assert found == pytest.approx([due] * 3, rel=1e-12)
