"""Statements that only compute are run once for both values of their conditions."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftp
from ftp import P
from ftp.tracing.data_dependent import paths

N = 3  # decisions, which are 8 ways: more than are followed here
W = torch.linspace(0.1, 3, 24, dtype=torch.float64).cos().abs().reshape(4, 6) + 0.1
X = torch.linspace(-2, 3, 24, dtype=torch.float64).sin().abs().reshape(6, 4)


@pytest.fixture(autouse=True)
def _joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MOST_UNJOINED", 1)


def _clusters(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """A mean of no rows is nan, as is its gradient."""
    y = x @ w
    centers, total, count = torch.zeros(N, 6, dtype=x.dtype), 0.0, 0
    nearest = (y[:, 0] * 3 + at).long()
    for k in range(N):
        members = y[nearest == k]
        if len(members) > 0:
            centers[k] = members.mean(0)
            total = total + members.sum().log()
            count += 1
    return (centers @ centers.T).square().sum() + total / max(count, 1) + y.sum()


def _experts(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    chosen = (x[:, 0] * 3 + at).long()
    counts = torch.bincount(chosen.clamp(0, N - 1), minlength=N).tolist()
    out = torch.zeros_like(x @ w)
    for i in range(N):
        if counts[i] == 0:
            continue
        (at_rows,) = torch.where(chosen == i)
        out[at_rows] += torch.nn.functional.linear(x[at_rows] * w[i % 4, 0], w.T)
    return out.square().sum()


def _steps(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Writes to views, tuples, loops, calls, and statements inside statements."""
    t, y = torch.zeros((), dtype=x.dtype), x @ w
    for i in range(N):
        step = (y[:, i].sum() - at).sigmoid()
        if step > 0.4:
            t, y = t + step, y.clone()
            for j in range(2):
                y[j].narrow(0, i, 1).mul_(step)
            if t > at:
                y = _halved(y, at=i)
        y = y.tanh()
    return y.square().sum() + t


def _halved(y: Tensor, at: int) -> Tensor:
    y = y / (1 + at)
    return y.sqrt() if at < 0 else y * y


def _scaled_in_place(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Where it is not taken, a factor is infinite."""
    y = x @ w
    for i in range(N):
        left = (y[:, i].sum() - 10 * at).clamp(min=0)
        if left > 0:
            y.mul_(1 / left)
    return y.square().sum()


JOINED = [_clusters, _experts, _steps, _scaled_in_place]


def _appended(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    kept = [w.sum()]
    for i in range(3):
        if (x[i] @ w).sum() > at:
            kept.append((x[i] @ w).sum())
    return torch.stack(kept).mean() if len(kept) == 1 else sum(kept, at * 0) / len(kept)


def _in_a_call(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    seen: list[int] = []

    def noted(i: int) -> Tensor:
        seen.append(i)
        return (x[i] @ w).square().sum()

    total = w.sum()
    for i in range(3):
        if (x[i] @ w).sum() > at:
            total = total + noted(i)
    return total / (1 + len(seen))


def _best(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    best = None
    for i in range(3):
        score = (x[i] @ w).sum()
        if score > at:
            best = score
    return w.sum() if best is None else best


def _last(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """A row of another length in each way, used after the statement."""
    last = x[:1] @ w
    for i in range(3):
        if (x[i] @ w).sum() > at:
            last = x[: i + 2] @ w
    return last.square().sum()


def _caught(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    seen: list[int] = []
    total = w.sum()
    for i in range(3):
        try:
            if (x[i] @ w).sum() > at:
                total = total + (seen.append(i) or x[i].sum())
        except:  # noqa: E722
            total = total * 3
    return total * (1 + len(seen))


def _of_calls(note: Callable[[Any, int], Any], new: Callable[[], Any]) -> Callable[..., Tensor]:
    """A function that notes in a Python object, in calls, which statements it takes."""

    def fn(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
        seen, total = new(), w.sum()

        def noted(i: int) -> Tensor:
            note(seen, i)
            return (x[i] @ w).square().sum()

        for i in range(3):
            if (x[i] @ w).sum() > at:
                total = total + noted(i)
        return total / (5 + len(seen))

    return fn


def _extend(seen: list[int], i: int) -> None:
    seen += [i]


def _delete(seen: dict[int, int], i: int) -> None:
    del seen[i]


def _set_by_name(seen: Any, i: int) -> None:
    setattr(seen, "size", i + 1)  # noqa: B010


class _Sized:
    size = 0

    def __len__(self) -> int:
        return self.size


NOTED = [
    _of_calls(lambda seen, i: seen.add(i), set),
    _of_calls(_extend, list),
    _of_calls(_delete, lambda: {0: 0, 1: 1, 2: 2}),
    _of_calls(_set_by_name, _Sized),
    _of_calls(lambda seen, i: next(seen.items), lambda: _Drawn()),
]


class _Drawn:
    def __init__(self) -> None:
        self.items = iter(range(9))

    def __len__(self) -> int:
        return next(self.items)


def _alias(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """A write to a name of two tensors, one of which has another name."""
    y = x @ w
    h = y
    for i in range(3):
        if (x[i] @ w).sum() > at:
            h = h * 2
    h += 1
    return (h * y).square().sum()


def _alias_written(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    y = x @ w
    h = y
    for i in range(3):
        if (x[i] @ w).sum() > at:
            h = h * 2
    y += 1
    return (h * y).square().sum()


def _view(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    y = x @ w
    row = y[0]
    for i in range(3):
        if (x[i] @ w).sum() > at:
            row = y[i + 1]
    row += 1
    return y.square().sum()


def _view_in_it(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Functions that return their operand or a view of it."""
    y = x @ w
    for i in range(3):
        if (x[i] @ w).sum() > at:
            torch.hsplit(y, 2)[0].mul_(3)
            h = nn.functional.dropout(y, 0.5, training=False)
            h += 1
    return y.square().sum()


class _Mode(enum.Enum):
    A = 1
    B = 2


def _identity(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    mode, y = _Mode.A, w.square()
    z = y
    for i in range(3):
        if (x[i] @ w).sum() > at:
            mode, z = _Mode.B, z * 2
    return y.sum() * (3 if mode is _Mode.B else 1) + z.sum() * (1 if z is y else 5)


def _items(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    found: dict[int, Tensor] = {}

    def put(i: int, is_taken: Tensor) -> None:
        if is_taken:
            found[i] = (x[i] @ w).square().sum()

    for i in range(3):
        put(i, (x[i] @ w).sum() > at)
    return w.sum() + sum(found.values(), at * 0)


class _Cached:
    def __init__(self, w: Tensor) -> None:
        self.w = w

    @functools.cached_property
    def norm(self) -> Tensor:
        return self.w.square().sum()


def _cached(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    kept, total = _Cached(w), w.sum()
    for i in range(3):
        if (x[i] @ w).sum() > at:
            total = total + kept.norm
    return total * kept.norm


def _caught_after_a_binding(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    total, found = w.sum(), {0: 0}
    for i in range(3):
        try:
            if (x[i] @ w).sum() > at:
                total = total * 2
                total = total + found[i]
        except KeyError:
            pass
    return total


FOLLOWED = [_appended, _in_a_call, _best, _last, _caught]
SOUND = [
    _alias, _alias_written, _view, _view_in_it, _identity, _items, _cached, _caught_after_a_binding,
]  # fmt: skip


def _equals_one_device(fn: Callable[..., Tensor], mesh: Any, spec: P) -> None:
    step = ftp.shard(fn, mesh, spec, certify=True)
    for at in map(torch.tensor, (-30.0, -1.2, 0.1, 1.5, 3.0, 30.0)):
        at = at.double()
        w = W.clone().requires_grad_()
        expected = fn(w, X, at)
        (grad,) = torch.autograd.grad(expected, w)
        value, found = step(W, X, at)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("fn", JOINED)
def test_equal_to_one_device_whichever_statements_are_taken(
    fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(paths, "MOST", 3)
    _equals_one_device(fn, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"))


@pytest.mark.slow
@pytest.mark.parametrize("fn", JOINED)
def test_on_two_axes(fn: Callable[..., Tensor]):
    _equals_one_device(fn, ftp.simulated_mesh((2, 2), ("dp", "tp")), P("dp", "tp"))


@pytest.mark.parametrize("fn", FOLLOWED)
def test_statements_that_do_more_are_followed_in_each_way(fn: Callable[..., Tensor]):
    _equals_one_device(fn, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"))


@pytest.mark.cases_by_default(8)
@pytest.mark.parametrize("fn", [*NOTED, *SOUND])
def test_what_a_statement_shares_with_others_is_followed_in_each_way(fn: Callable[..., Tensor]):
    step = ftp.shard(fn, ftp.simulated_mesh((1,), ("tp",)), P())
    for at in map(torch.tensor, (3.0, 30.0)):
        w = W.clone().requires_grad_()
        expected = fn(w, X, at.double())
        (grad,) = torch.autograd.grad(expected, w)
        value, found = step(W, X, at.double())
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, grad, rtol=1e-11, atol=1e-11)


def test_draws_are_those_of_one_device_whichever_statements_are_taken():
    class Noisy(nn.Module):
        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            for i in range(3):
                if x[i].sum() > at + i:
                    x = x + torch.randn_like(x)
            return x + torch.randn_like(x)

    fn, params = ftp.functionalize(Noisy())
    mesh, key = ftp.simulated_mesh((1,), ("tp",)), ftp.random.key(0)
    step = ftp.spmd(lambda *args: fn(params, *args, rng=key), mesh, (P(), P()))
    for at in map(torch.tensor, (-30.0, 1.0, 30.0)):
        at = at.double()
        torch.testing.assert_close(step(X, at), fn(params, X, at, rng=key))


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(3)])

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for i, norm in enumerate(self.norms):
            if x[:, i].sum() > at:
                x = norm(x)
        return x.square().sum() + x[0].sum()


def test_statistics_are_written_where_a_statement_is_taken():
    fn, params, buffers = ftp.functionalize(_Norms().double(), buffers=True)
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), (P(), P(), P("tp"), P()))
    for at in (-30.0, 0.5, 30.0):
        given = X, torch.tensor(at, dtype=torch.float64)
        torch.testing.assert_close(step(params, buffers, *given), fn(params, buffers, *given))


def test_claims_are_made_where_a_statement_is_taken():
    def loss(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
        total = (x @ w).sum()
        for i in range(3):
            if at > i:
                total = total + _checked(x[i] @ w, at)
        return total

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"), check_inputs=True)
    low, high = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64)
    torch.testing.assert_close(step(W, X, low)[0], loss(W, X, low))
    (claim,) = step.lower(W, X, low).assumptions
    assert "(at < 2).all() is True, where " in claim and "if at > i" in claim
    with pytest.raises(ftp.errors.InputError, match="does not hold"):
        step(W, X, high)


def _checked(y: Tensor, at: Tensor) -> Tensor:
    assert (at < 2).all()
    return y.sum()
