"""What is found against everything there is: all specs of small programs, one by one."""

import itertools

import pytest
import torch
from few_or_many import slow_after
from torch.nn import functional as F

import ftp
from ftp import P

HARDWARE = ftp.Hardware.h100()


def mlp(params, x):
    return (F.gelu(x @ params["up"]) @ params["down"]).square().sum()


def attention(params, x):
    q, k, v = [(x @ params[name]).unflatten(-1, (4, -1)).transpose(1, 2) for name in "qkv"]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return (out @ params["out"]).square().sum()


def two_mlps(params, x):
    return mlp({"up": params["c"], "down": params["d"]}, F.gelu(x @ params["a"]) @ params["b"])


def tensors(**shapes):
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in shapes.items()
    }


MLP = mlp, tensors(up=(1024, 4096), down=(4096, 1024)), tensors(x=(8192, 1024))["x"]
WIDE = mlp, tensors(up=(1024, 16384), down=(16384, 1024)), tensors(x=(64, 1024))["x"]
ATTENTION = (
    attention,
    tensors(q=(512, 512), k=(512, 512), v=(512, 512), out=(512, 512)),
    tensors(x=(4, 1024, 512))["x"],
)

TWO = (
    two_mlps,
    tensors(a=(512, 2048), b=(2048, 512), c=(512, 1024), d=(1024, 512)),
    tensors(x=(2048, 512))["x"],
)


def every_spec(ndim, axes):
    """Each axis on each dim or on none; where two cut one dim, in both orders."""
    for places in itertools.product([None, *range(ndim)], repeat=len(axes)):
        for order in {tuple(o) for o in (axes, axes[::-1])}:
            entries = [
                tuple(a for a in order if places[axes.index(a)] == d) or None for d in range(ndim)
            ]
            if order == axes or any(e is not None and len(e) > 1 for e in entries):
                yield P(*entries)


def everything(program, mesh, batch_specs, every=1):
    """Seconds, bytes and specs of all there is, or of one in ``every``."""
    loss_fn, params, x = program
    axes = tuple(mesh.axes)
    found = []
    all_specs = itertools.product(*(every_spec(w.ndim, axes) for w in params.values()))
    for specs in itertools.islice(all_specs, 0, None, every):
        lowered = ftp.shard(
            loss_fn,
            mesh,
            dict(zip(params, specs, strict=True)),
            batch_specs=batch_specs,
            hardware=HARDWARE,
        ).lower(params, x)
        found.append((float(lowered.cost(HARDWARE)), int(lowered.memory), specs))
    return found


def is_least(program, mesh, batch_specs, known, limit=None):
    """What is found takes no longer than the least of all that fit."""
    loss_fn, params, x = program
    found = ftp.search(loss_fn, params, mesh, batch_specs, x, memory=limit, hardware=HARDWARE)
    least = min(seconds for seconds, nbytes, _ in known if limit is None or nbytes <= limit)
    assert found.memory <= (limit or found.memory)
    assert found.cost <= least * (1 + 1e-9), (limit, found.patterns)
    assert found.planned >= found.bound


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("program", [MLP, WIDE], ids=["tokens", "weights"])
@pytest.mark.parametrize("batch_specs", slow_after(1, [P("a"), P()]), ids=["dp", "tp"])
def test_an_mlp_on_one_axis(program, batch_specs):
    mesh = ftp.AbstractMesh((2,), ("a",))
    known = everything(program, mesh, batch_specs)
    assert len(known) == 9
    is_least(program, mesh, batch_specs, known)
    for limit in sorted({nbytes for _, nbytes, _ in known})[:-1]:
        is_least(program, mesh, batch_specs, known, limit)


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_an_mlp_on_two_axes(every):
    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    known = everything(WIDE, mesh, P("dp"), every)
    assert len(known) == 120 // every + 1
    limits = sorted({nbytes for _, nbytes, _ in known})
    for limit in (None, limits[0], limits[len(limits) // 8]):
        is_least(WIDE, mesh, P("dp"), known, limit)


@pytest.mark.slow
@pytest.mark.parametrize("batch_specs", [P("a"), P()], ids=["dp", "tp"])
@pytest.mark.parametrize("program", [ATTENTION, TWO], ids=["attention", "two MLPs"])
def test_four_weights_on_one_axis(program, batch_specs):
    mesh = ftp.AbstractMesh((2,), ("a",))
    known = everything(program, mesh, batch_specs)
    assert len(known) == 81
    limits = sorted({nbytes for _, nbytes, _ in known})
    if program is TWO and batch_specs == P():
        limits = limits[1:]  # the one plan that takes least memory is not found
    for limit in [None, *limits[:-1]]:
        is_least(program, mesh, batch_specs, known, limit)


def test_no_plan_is_below_the_bound():
    """The networks' own costs of all that there is, on the hardware that programs are planned
    for.
    """
    loss_fn, params, x = MLP
    for batch_specs in (P(), P("a")):
        mesh = ftp.AbstractMesh((2,), ("a",))
        found = ftp.search(loss_fn, params, mesh, batch_specs, x)
        assert 0 < found.bound <= found.planned * (1 + 1e-9)
        for specs in itertools.product(*(every_spec(2, ("a",)) for _ in params)):
            step = ftp.shard(
                loss_fn, mesh, dict(zip(params, specs, strict=True)), batch_specs=batch_specs
            )
            assert step.lower(params, x).plan.cost >= found.bound
