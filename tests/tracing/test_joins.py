"""Statements that only compute are run once for both values of their conditions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftp
from ftp import P
from ftp.tracing import paths

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


JOINED = [_clusters, _experts, _steps]


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


FOLLOWED = [_appended, _in_a_call, _best, _last, _caught]


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
