"""One plan for many shapes on processes: right at every size, and a size that only one rank passes
is an error on all.
"""

import time
import warnings

import pytest
import torch
from few_or_many import slow_after
from launch import launch
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.errors import InputError, MismatchError

pytestmark = pytest.mark.dist
SPECS = {"emb": P(None, "tp"), "up": P(None, "tp"), "down": P("tp"), "head": P(None, "tp")}


def _loss(params, batch):
    tokens, targets = batch
    x = params["emb"][tokens]
    x = x + torch.cumsum(x, 1) / (1 + torch.arange(x.shape[1]))[:, None]
    x = F.layer_norm(x + F.gelu(x @ params["up"]) @ params["down"], (8,))
    return F.cross_entropy((x @ params["head"]).flatten(0, 1), targets.flatten())


def _params():
    generator = torch.Generator().manual_seed(0)
    shapes = {"emb": (12, 8), "up": (8, 16), "down": (16, 8), "head": (8, 12)}
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


def _batch(size):
    generator = torch.Generator().manual_seed(size)
    return tuple(torch.randint(0, 12, (4, size), generator=generator) for _ in range(2))


def _sizes_in_turn(spec: P, is_compiled: bool):
    """Sizes that come again, are uneven and shorter than the axis; then one rank's own; then one
    out of the range.
    """
    warnings.simplefilter("error", UserWarning)
    ftp.init_process_group(device_type="cpu")
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    full, errors = _params(), []
    dims = {1: torch.export.Dim("S", min=1, max=64)}
    step = ftp.shard(_loss, mesh, SPECS, batch_specs=spec, dynamic_shapes=dims, compile=is_compiled)
    params = ftp.device_put(full, mesh, SPECS)
    for size in (7, 6, 1, 33, 7):
        batch = ftp.device_put(_batch(size), mesh, spec)
        loss, grads = step(params, batch)
        want_grads, want = torch.func.grad_and_value(_loss)(full, _batch(size))
        errors.append(float((loss - want).abs()))
        grads = ftp.device_get(grads, mesh, SPECS)
        errors += [float((grads[k] - want_grads[k]).abs().max()) for k in full]
    raised = []
    for sizes in ((65, 65), (8, 9 if not spec else 8)):
        size = sizes[torch.distributed.get_rank()]
        start = time.monotonic()
        try:
            step(params, ftp.device_put(_batch(size), mesh, spec))
        except (InputError, MismatchError) as e:
            raised.append((type(e).__name__, str(e), time.monotonic() - start))
    family = next(iter(step._dynamic.families.values()))
    plans = [plan for trace in family.traces for plan in trace.plans]
    graphs = sum(len(known) for plan in plans for known in plan.ranks._known.values())
    assert not step.shapes.one_by_one
    ftp.destroy_process_group()
    return max(errors), raised, (len(family.traces), len(plans)), graphs


def _found_sizes(are_placed: bool):
    """Dims that nobody names, of placed batches, or of bare shards, of which all have one size."""
    warnings.simplefilter("error", UserWarning)
    ftp.init_process_group(device_type="cpu")
    mesh, spec = ftp.make_mesh((2,), ("tp",), device_type="cpu"), P(None, "tp")
    full, errors = _params(), []
    params = ftp.device_put(full, mesh, SPECS)
    step = ftp.shard(_loss, mesh, SPECS, batch_specs=spec)
    for size in (7, 6, 9, 1, 12, 33) if are_placed else (4, 8, 6, 12, 2):
        batch = ftp.device_put(_batch(size), mesh, spec)
        loss, _ = step(params, batch if are_placed else tuple(x.clone() for x in batch))
        errors.append(float((loss - _loss(full, _batch(size))).abs()))
    ftp.destroy_process_group()
    return max(errors), (step.shapes.traces, step.shapes.plans)


@pytest.mark.parametrize("are_placed", slow_after(1, [True, False]), ids=["placed", "bare"])
def test_dims_that_change_are_found(are_placed):
    for rank in launch(_found_sizes, 2, are_placed, timeout=400):
        assert rank.exit == 0, rank.stderr
        error, made = rank.value
        assert error < 1e-12 and made == ((1, 2) if are_placed else (1, 1))


@pytest.mark.parametrize("is_compiled", slow_after(1, [False, True]), ids=["eager", "compiled"])
@pytest.mark.parametrize("spec", [P(), P(None, "tp")], ids=str)
def test_sizes_in_turn(spec, is_compiled):
    for rank in launch(_sizes_in_turn, 2, spec, is_compiled, timeout=400):
        assert rank.exit == 0, rank.stderr
        error, raised, made, graphs = rank.value
        assert error < 1e-12
        assert made == (1, 1 if not spec else 2)
        assert graphs <= 2 * made[1]  # of each plan one for sizes of one, and one for all others
        kind, text, _ = raised[0]
        assert kind == "InputError"
        assert "dim 1 of batch[0] has size 65, outside Dim('S', min=1, max=64)" in text
        if not spec:
            kind, text, seconds = raised[1]
            assert kind == "MismatchError" and "S = 8" in text and "S = 9" in text
            assert seconds < 5


def _per_rank_code(is_compiled: bool):
    """Rows that a rank's own code computes, sends on and sums."""
    warnings.simplefilter("error", UserWarning)
    ftp.init_process_group(device_type="cpu")
    mesh, errors = ftp.make_mesh((2,), ("tp",), device_type="cpu"), []

    def code(x, w):
        y = (x @ w).tanh()
        return y, ftp.axis.all_gather(y, "tp").sum(0) + ftp.axis.all_reduce(y.sum(0), "tp")

    per_rank = ftp.local(code, mesh, (P("tp"), P()), (P("tp"), P()), check=False)

    def loss_of(f):
        def loss(w, x):
            rows, total = f(x, w)
            return (rows * x).square().sum() + total.square().sum()

        return loss

    whole = loss_of(lambda x, w: ((x @ w).tanh(), 2 * (x @ w).tanh().sum(0)))
    dims, spec = {0: torch.export.Dim("S", max=64)}, P("tp")
    step = ftp.shard(
        loss_of(per_rank), mesh, P(), batch_specs=spec, dynamic_shapes=dims, compile=is_compiled
    )
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for size in (7, 6, 1, 33, 12, 0, 7):
        generator = torch.Generator().manual_seed(size)
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        loss, grad = step(w, ftp.device_put(x, mesh, spec))
        want_grad, want = torch.func.grad_and_value(whole)(w, x)
        errors += [float((loss - want).abs()), float((grad - want_grad).abs().max())]
    ftp.destroy_process_group()
    return max(errors), (step.shapes.traces, step.shapes.plans), step.shapes.one_by_one


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_per_rank_code(is_compiled):
    for rank in launch(_per_rank_code, 2, is_compiled, timeout=400):
        assert rank.exit == 0, rank.stderr
        error, made, one_by_one = rank.value
        assert error < 1e-11 and made == (2, 3) and not one_by_one  # no rows have a plan
