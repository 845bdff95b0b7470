"""Tensors that a step's function leaves behind for its next call."""

import copy
import functools
import pickle
import warnings
from collections import defaultdict, deque
from operator import methodcaller
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
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


class _Table(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


def _angles(n, powers):
    """Written in place, as sinusoidal tables are."""
    angles = torch.arange(n, dtype=powers.dtype)[:, None] / 10 ** (powers / 4)
    table = torch.zeros(n, 4, dtype=powers.dtype)
    table[:, 0::2], table[:, 1::2] = angles.cos()[:, 0::2], angles.sin()[:, 1::2]
    table[0].mul_(2)
    return table


class _Embedder:
    """Keeps its table from the first call on, as Z-Image's does, and is no module."""

    def __init__(self, kind):
        self.kind, self.table = kind, None
        self.powers = torch.arange(4, dtype=torch.float64)

    def __call__(self, n):
        if self.table is None:
            real = _angles(2000, self.powers)
            self.table = {
                "tensor": real,
                "list": [real, real.sin()],
                "tuple": (real, (real.sin(), 1)),
                "named": {"at": _Table(real, real.sin())},
                "complex": torch.polar(real, real),
            }[self.kind]
        held = self.table
        match self.kind:
            case "tensor":
                return held[:n]
            case "list":
                return (held[0] + held[1])[:n]
            case "tuple":
                return (held[0] + held[1][0])[:n]
            case "named":
                return (held["at"].cos + held["at"].sin)[:n]
        return held[:n].conj().imag


class _Embedding(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.embedder = torch.nn.Linear(4, 4, dtype=torch.float64), _Embedder(kind)

    def forward(self, x):
        return self.linear(x) * self.embedder(len(x))


@pytest.mark.parametrize("holds", ["model", "closure"])
@pytest.mark.parametrize("kind", ["tensor", "list", "tuple", "named", "complex"])
def test_a_table_that_an_object_keeps_is_one_of_values_after_a_trace(holds, kind):
    torch.manual_seed(0)
    model, embedder = _Embedding(kind), _Embedder(kind)
    fn, params = ftp.functionalize(model)

    def loss(params, x):
        if holds == "closure":
            x = x * embedder(len(x))
        return fn(params, x).square().sum()

    step = ftp.shard(loss, MESH, P())
    for n in (2, 5, 3):
        x = torch.randn(n, 4, dtype=torch.float64)
        value, grads = step(params, x)
        of_torch = _Embedding(kind)
        of_torch.load_state_dict(params)
        given = x * _Embedder(kind)(n) if holds == "closure" else x
        expected = of_torch(given).square().sum()
        torch.testing.assert_close(value, expected.detach())
        found = torch.autograd.grad(expected, list(of_torch.parameters()))
        torch.testing.assert_close(list(grads.values()), list(found))
    torch.testing.assert_close(fn(params, x), of_torch(x))


@pytest.mark.parametrize("writes", ["rows", "all", "view"])
def test_state_that_a_call_writes_into_a_tensor_of_its_own_is_an_error(writes):
    memo = {}

    def loss(w, x):
        y, before = x @ w, memo.get("h", 0)
        memo["h"] = torch.zeros(4, dtype=torch.float64)
        if writes == "rows":
            memo["h"][:2] = y.detach().sum()
        elif writes == "all":
            memo["h"].fill_(y.detach().sum())
        else:
            memo["h"].view(2, 2).T.add_(y.detach().sum())
        return (y + before).square().sum()

    with pytest.raises(TraceError, match=r"memo\['h'\]\", which .* reads, holds a tensor that"):
        ftp.shard(loss, MESH, P(None, "tp"))(*arguments())


def _losses(keep, between, lengths=(2, 2, 2)):
    """The losses of a step whose function keeps what ``keep(memo, n)`` gives, and those of torch;
    ``between(memo)`` runs after each call.
    """
    found, expected = list[torch.Tensor](), list[torch.Tensor]()
    w, _ = arguments()
    for is_step, losses in ((True, found), (False, expected)):
        memo = {}

        def loss(w, x, memo=memo):
            return (keep(memo, len(x)) * (x @ w)).square().sum()

        step = ftp.spmd(loss, MESH, (P(None, "tp"), P())) if is_step else loss
        for n in lengths:
            losses.append(step(w, torch.ones(n, 4, dtype=torch.float64)))
            between(memo)
    return found, expected


def _kept_table(memo, _):
    if "table" not in memo:
        memo["powers"] = memo.get("powers", torch.arange(4, dtype=torch.float64))
        memo["table"] = memo["powers"].cos()
    return memo["table"]


@pytest.mark.parametrize("writes_to", ["powers", "table"])
def test_a_table_is_read_as_it_is_when_a_program_runs(writes_to):
    found, expected = _losses(_kept_table, lambda memo: memo[writes_to].mul_(2))
    torch.testing.assert_close(found, expected)


def test_what_is_kept_and_not_read_may_be_of_a_captured_tensor_that_changes():
    rate, seen = torch.tensor(0.1, dtype=torch.float64), {}

    def loss(w, x):
        seen["rate"] = rate * 1
        return (x @ w).sum() * rate

    step = ftp.shard(loss, MESH, P(None, "tp"))
    w, x = arguments()
    for _ in range(3):
        assert step(w, x)[0] == (x @ w).sum() * rate
        rate.mul_(0.5)


def test_a_table_of_integers_made_under_another_default_dtype():
    def keep(memo, _):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            if "table" not in memo:
                memo["table"] = torch.ones(4) * (torch.arange(4) / 3) + torch.linspace(0, 1, 4)
        finally:
            torch.set_default_dtype(before)
        return memo["table"]

    found, expected = _losses(keep, lambda memo: None, (2, 4, 3))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_a_table_that_grows_is_not_warned_of():
    def keep(memo, n):
        if len(memo.get("table", ())) < n:
            memo["table"] = torch.arange(n, dtype=torch.float64).cos()[:, None]
        return memo["table"][:n]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = _losses(keep, lambda memo: None, (2, 4, 3, 6, 2))
    torch.testing.assert_close(found, expected)


def _appended(memo, _):
    memo.setdefault("log", []).append(torch.ones(()))
    return sum(memo["log"])


def _decayed(memo, _):
    memo["beta"] = memo.get("beta", torch.ones(())) * 0.9
    return memo["beta"]


def _counted_in_place(memo, _):
    memo.setdefault("n", torch.zeros(()))
    memo["n"] += 1
    return memo["n"]


@pytest.mark.parametrize("keep", [_appended, _decayed, _counted_in_place])
def test_state_of_calls_that_does_not_depend_on_arguments_is_an_error(keep):
    with pytest.raises(TraceError, match=r"left there for its next call|changed in place"):
        _losses(keep, lambda memo: None)


class _OfClass:
    by_class = {}  # noqa: RUF012

    def table(self):
        if not self.by_class:
            self.by_class["table"] = torch.arange(4, dtype=torch.float64)
        return self.by_class["table"]


def test_a_table_beside_one_that_no_variable_leads_to():
    _OfClass.by_class.clear()
    found, _ = _losses(lambda memo, n: _kept_table(memo, n) * _OfClass().table(), lambda memo: None)
    _OfClass.by_class.clear()
    w, _ = arguments()
    angles = torch.arange(4, dtype=torch.float64)
    expected = (angles.cos() * angles * (torch.ones(2, 4, dtype=torch.float64) @ w)).square().sum()
    torch.testing.assert_close(found, [expected] * 3)


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_what_a_step_leaves_for_its_user_is_an_error_when_it_is_used(takes_gradients):
    logs, kept, held, masks = {}, [], SimpleNamespace(h=None), {}

    def loss(w, x):
        global LEFT
        y = x @ w
        logs["mean"] = LEFT = y.detach().mean()
        kept.append((y, y.sum()))
        held.h = y * 2
        if not masks:
            masks["causal"] = torch.ones(4, 4).tril()
        return (y @ masks["causal"].double()).sum()

    if takes_gradients:
        ftp.shard(loss, MESH, P(None, "tp"))(*arguments())
    else:
        ftp.spmd(loss, MESH)(*arguments())
    left = {"logs['mean']": logs["mean"], "'LEFT'": LEFT, "held.h": held.h}
    left["kept[0][1]"] = kept[0][1]
    numpy = methodcaller("numpy")
    uses = float, torch.clone, numpy, np.asarray, pickle.dumps
    for place, x in left.items():
        for use in uses:
            with pytest.raises(TraceError, match="has_aux=True") as refused:
                use(x)
            assert place in str(refused.value) and "test_left_behind.py:" in str(refused.value)
    assert repr(LEFT) == "<float64[] of a trace, without values>"
    assert copy.deepcopy(held).h is copy.copy(held.h) is held.h
    assert torch.equal(masks["causal"], torch.ones(4, 4).tril())


class _Pair(tuple):
    """A tuple that is made of two values."""

    __slots__ = ()

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class _Closed(dict):
    """A dict that takes no values after `close`."""

    def close(self, x):
        super().__setitem__("x", x)

    def __setitem__(self, key, value):
        raise TypeError("closed")


@pytest.mark.parametrize("kind", ["pair", "closed", "defaults"])
def test_containers_that_take_no_value_keep_the_one_they_have(kind):
    kept, closed, counts = {}, _Closed(), defaultdict(int)

    def loss(w, x):
        y = (x @ w).sum()
        if kind == "pair":
            kept["pair"] = _Pair(y, 1)
        elif kind == "closed":
            closed.close(y)
        else:
            n = len(counts)
            counts.clear()
            counts[n] = y
        return y

    w, x = arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleCaptureWarning)
        step = ftp.shard(loss, MESH, P(None, "tp"))
        assert [step(w, torch.cat([x] * n))[0] for n in (1, 2, 3)] == [32, 64, 96]
    assert len(counts) <= 1


@pytest.mark.parametrize("makes", ["activations", "tables"])
def test_what_a_trace_of_dynamic_sizes_leaves_decides_no_size(makes):
    kept, (w, _) = [], arguments()

    def loss(w, x):
        kept.append(x @ w if makes == "activations" else torch.arange(x.shape[0]))
        return (x @ w * torch.arange(x.shape[0])[:, None]).sum() / x.shape[0]

    step = ftp.shard(loss, MESH, P(None, "tp"))
    for n in (2, 3, 4, 5):
        x = torch.ones(n, 4, dtype=torch.float64)
        assert step(w, x)[0] == loss(w, x)
