"""Tensors that a step's function leaves behind for its next call."""

import functools
import warnings
from collections import deque
from types import SimpleNamespace

import pytest
import torch

import ftp
from ftp import P
from ftp.errors import StaleCaptureWarning, TraceError

MESH = ftp.simulated_mesh((2,), ("tp",))


def arguments():
    return torch.ones(4, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)


def _functions():
    log, by_name, recent = [], {}, deque(maxlen=2)
    held, total = SimpleNamespace(h=torch.zeros(())), torch.zeros(())

    def of_variable(y):
        nonlocal total
        total = total + y
        return total

    def of_object(y):
        held.h = held.h + y.detach()
        return held.h * y

    def of_dict(y):
        by_name["y"] = y + by_name.get("y", 0)
        return by_name["y"]

    def of_default(y, kept=[]):  # noqa: B006
        kept.append(y)
        return sum(kept)

    return {
        "log[0]": lambda y: log.append(y) or sum(log),
        "recent[0]": lambda y: recent.append(y) or sum(recent),
        "by_name['y']": of_dict,
        "held.h": of_object,
        "total": of_variable,
        "kept[0]": of_default,
    }


@pytest.mark.parametrize("place", sorted(_functions()))
@pytest.mark.parametrize("takes_gradients", [False, True])
def test_a_tensor_that_the_next_call_would_read_is_an_error(place, takes_gradients):
    keep = _functions()[place]

    def loss(w, x):
        return keep((x @ w).square().sum())

    make = ftp.shard if takes_gradients else ftp.spmd
    step = make(loss, MESH, P(None, "tp"))
    with pytest.raises(TraceError, match=r"which .* reads, holds a tensor that the .* next") as e:
        step(*arguments())
    assert place in str(e.value).split(", which")[0]


@pytest.mark.parametrize("makes_mask", [False, True])
def test_a_tensor_that_is_not_read_again_may_stay(makes_mask):
    seen, memo = {}, {}

    def loss(w, x):
        if makes_mask and "mask" not in memo:
            memo["mask"] = torch.ones(4, 4, dtype=torch.float64)
        seen["hidden"] = x @ (w * memo.get("mask", 1))
        return seen["hidden"].sum(), seen

    w, x = arguments()
    (value, aux), grads = ftp.shard(loss, MESH, P(None, "tp"), has_aux=True)(w, x)
    assert value == (x @ w).sum() and torch.equal(aux["hidden"], x @ w)
    assert torch.equal(grads, torch.full_like(w, 2.0))


@pytest.mark.parametrize("reads_history", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_history_beside_a_mask_that_is_made_once(reads_history, is_large):
    memo, width = {}, 40 if is_large else 4

    def loss(w, x):
        if "mask" not in memo:
            memo["mask"] = torch.arange(width * width, dtype=w.dtype).reshape(width, width) % 3
            assert not memo["mask"][0, 0]
        before = memo.get("hidden", 0) if reads_history else 0
        memo["hidden"] = x @ (w * memo["mask"])
        return (before + memo["hidden"]).sum()

    w, x = torch.ones(width, width, dtype=torch.float64), torch.ones(2, width, dtype=torch.float64)
    step = ftp.shard(loss, MESH, P(None, "tp"))
    if reads_history:
        with pytest.raises(TraceError, match=r"memo\['hidden'\]\", which .* reads, holds a tensor"):
            step(w, x)
    else:
        value, grads = step(w, x)
        mask = torch.arange(width * width, dtype=w.dtype).reshape(width, width) % 3
        assert value == (x @ (w * mask)).sum() and torch.equal(grads, mask * 2)
        assert not isinstance(memo["mask"], type(None))


class Logs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.up(x).square().sum()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("kind", ["functionalized", "functional_call"])
def test_the_closure_of_a_hook(reads, kind):
    model, seen = Logs(), []

    def hook(module, args, out):
        total = out + sum(seen) if reads else out
        seen.append(out)
        return total

    model.up.register_forward_hook(hook)
    if kind == "functionalized":
        loss, params = ftp.functionalize(model)
    else:
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params, x):
            return torch.func.functional_call(model, params, (x,))

    step = ftp.shard(loss, MESH, P())
    x = torch.ones(2, 4, dtype=torch.float64)
    if reads:
        with pytest.raises(TraceError, match=r"'seen\[0\]', which hook .* reads, holds a tensor"):
            step(params, x)
    else:
        value, _ = step(params, x)
        seen.clear()
        torch.testing.assert_close(value, model(x).detach())


def _counting():
    calls, held, times = 0, SimpleNamespace(n=1), [0]

    def of_variable(y):
        nonlocal calls
        calls += 1
        return y * calls

    def of_object(y):
        held.n *= 2
        return y[: held.n]

    def of_list(y):
        times[0] += 1
        return y * torch.tensor(times[0])

    def idle(y):
        nonlocal calls
        calls += 1
        times[0] += 1
        return y * held.n

    return {"calls": of_variable, "held.n": of_object, "times[0]": of_list, "": idle}


@pytest.mark.parametrize("place", sorted(_counting()))
def test_numbers_that_are_counted_and_change_the_program_are_warned_of(place):
    count = _counting()[place]
    step = ftp.shard(lambda w, x: count(x @ w).sum(), MESH, P(None, "tp"))
    w, x = torch.ones(4, 4, dtype=torch.float64), torch.ones(5, 4, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(w, x)
    told = [str(w.message) for w in caught if w.category is StaleCaptureWarning]
    assert len(told) == bool(place)
    if place:
        assert told[0].startswith(f"{place!r}, which ") and "from" in told[0]


@pytest.mark.parametrize("cached", [functools.cache, functools.lru_cache])
def test_caches_hold_no_tensors_of_a_trace(cached):
    """A trace of symbolic sizes fails at ``len``; the next ones must not read what it cached."""

    @cached
    def cosines(n, at=1):
        return [torch.arange(n, dtype=torch.float64).cos() * at]

    def loss(w, x):
        return (cosines(len(x))[0][:, None] * (x @ w)).square().sum()

    step = ftp.shard(loss, MESH, P("tp"))
    w, _ = arguments()
    for n in (2, 4, 3, 5, 2):
        x = torch.ones(n, 4, dtype=torch.float64)
        value, _ = step(w, x)
        torch.testing.assert_close(value, loss(w, x))
        cosines.cache_clear()  # of the tensors of torch, which the next trace would take


@functools.cache
def _positions(n):
    return SimpleNamespace(at=torch.arange(n, dtype=torch.float64))


class _Rotary(torch.nn.Module):
    @functools.lru_cache  # noqa: B019
    def angles(self, n):
        return torch.arange(n, dtype=torch.float64).sin()

    @staticmethod
    @functools.cache
    def scale(n):
        return {"by": torch.full((n,), 2.0, dtype=torch.float64)}

    def forward(self, x):
        n = len(x)
        return (x.T * self.angles(n) * self.scale(n)["by"] + _positions(n).at).T


class _Holder:
    def __init__(self):
        self.rotary = _Rotary()

    def apply(self, x):
        return self.rotary(x)


def test_caches_of_methods_hold_no_tensors_of_a_trace():
    holder, (w, x) = _Holder(), arguments()
    functional, params = ftp.functionalize(holder.rotary)
    for fn in (holder.apply, lambda x: holder.apply(x), lambda x: functional(params, x)):
        value, _ = ftp.shard(lambda w, x, fn=fn: fn(x @ w).sum(), MESH, P("tp"))(w, x)
        torch.testing.assert_close(value, holder.apply(x @ w).sum())
        for cache in (_positions, _Rotary.angles, _Rotary.scale):
            cache.cache_clear()
