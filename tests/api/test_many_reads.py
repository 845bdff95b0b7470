"""Functions that read many values as Python numbers: plain ops compute the values in one trace. The
results are those of one device, and a later call with other values takes its own way.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import InputError
from ftp.tracing import input_values

pytestmark = pytest.mark.filterwarnings("ignore:.*:ftp.errors.ReadWarning")
W = torch.linspace(-1, 2, 16, dtype=torch.float64).sin().reshape(4, 4)
X = torch.linspace(-2, 3, 12, dtype=torch.float64).cos().reshape(3, 4)
MESH = ftp.simulated_mesh((2,), ("tp",))


def _expected(fn: Callable[..., Tensor], w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    w = w.clone().requires_grad_()
    loss = fn(w, x)
    return loss.detach(), torch.autograd.grad(loss, w)[0]


OPS = st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(1, 5))


def _run(ops: list[tuple[int, int, int]], w: Tensor, x: Tensor) -> Tensor:
    """Reads between ops and writes: each of ``ops`` names one of them, and two numbers."""
    y, held = x @ w, torch.zeros(4, dtype=x.dtype)
    views, before = [held[1:], held.view(2, 2)], held
    for kind, i, j in ops:
        if kind == 0:
            y = (y @ w).sin() if y.sum() > 0 else y.cos() * j
        elif kind == 1:
            held[i] = y.detach().sum() * j
        elif kind == 2:
            views[i % 2].mul_(-0.5)
            views[i % 2][0] += x[0, i]
        elif kind == 3:
            y = y * (1 + int((held > 0).sum())) + float(i)
        elif kind == 4:
            before = held + 1
        elif kind == 5:
            steps = 0
            while y.detach().norm() > j and steps < 3:
                y, steps = y * 0.7, steps + 1
        elif before[i] > held[i] or bool((before == 1).all()):
            y = y[: max(int(before.abs().max()) % 3, 1)].exp().clamp(max=3)
    return y.square().mean() + y.sum() * held.sum()


@pytest.mark.parametrize("most", [input_values._MOST, 6])
@settings(max_examples=3, deadline=None)
@given(ops=st.lists(OPS, min_size=2, max_size=6))
def test_random_programs(most: int, ops: list[tuple[int, int, int]]):
    """Where inputs are not small, the values have programs, one after another."""
    _check_random(most, ops, [X, -X])


@pytest.mark.slow
@pytest.mark.parametrize("most", [input_values._MOST, 6])
@settings(max_examples=60, deadline=None)
@given(ops=st.lists(OPS, min_size=2, max_size=20))
def test_more_random_programs(most: int, ops: list[tuple[int, int, int]]):
    _check_random(most, ops[: 20 if most > 6 else 8], [X, -X, X, 2 * X])


def _check_random(most: int, ops: list[tuple[int, int, int]], batches: list[Tensor]) -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return _run(ops, w, x)

    step = ftp.shard(fn, MESH, P("tp"))
    before, input_values._MOST = input_values.InputValues.most, most
    input_values.InputValues.most = most
    try:
        for x in batches:
            torch.testing.assert_close(step(W, x), _expected(fn, W, x), rtol=1e-9, atol=1e-9)
    finally:
        input_values._MOST = input_values.InputValues.most = before


def _decides(n: int, runs: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        runs.append(1)
        for _ in range(n):
            x = (x @ w).sin()
            if int((x > 0).sum()) > 6:
                x = x * 0.7
            else:
                x = x + 0.1
        return x.square().sum()

    return fn


def test_the_function_runs_as_often_for_many_reads_as_for_few():
    counts = []
    for n in (8, 60):
        runs: list[int] = []
        fn = _decides(n, runs)
        step = ftp.shard(fn, MESH, P("tp"))
        found = step(W, X)
        counts.append(len(runs))
        torch.testing.assert_close(found, _expected(fn, W, X), rtol=1e-9, atol=1e-9)
        runs.clear()
        step(W, X)
        assert not runs  # the values are the same: nothing is traced
    assert counts[0] == counts[1] < 6


def _until_small(w: Tensor, x: Tensor) -> Tensor:
    y, steps, sizes = x @ w, 0, []
    while y.detach().abs().sum() > 2.5:
        y = y * (0.9 - 0.2 * y.square().mean().sigmoid())
        sizes.append(int(y.detach().abs().sum()))
        steps += 1
        if steps > 40:
            break
    return y.sin().sum() * (1 + steps) + sum(sizes)


def test_another_way_is_noticed():
    """Calls whose loops have the same values up to a step."""
    step = ftp.shard(_until_small, MESH, P("tp"), certify=True, check_inputs=True)
    for scale in (3.0, 1.0, 3.1, 3.0, 0.01):
        torch.testing.assert_close(
            step(W, scale * X), _expected(_until_small, W, scale * X), rtol=1e-9, atol=1e-9
        )


def test_captured_tensors_have_their_values_of_each_call():
    limit = torch.tensor(4.0, dtype=torch.float64)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        y = x @ w
        for _ in range(40):
            if y.detach().sum() > limit:
                break
            y = y + 0.1
        return y.square().sum()

    step = ftp.shard(fn, MESH, P("tp"))
    for value in (4.0, 2.0, 9.0, 4.0):
        limit.fill_(value)
        torch.testing.assert_close(step(W, X), _expected(fn, W, X), rtol=1e-9, atol=1e-9)


def test_what_plain_ops_compute_may_lead_to_a_program():
    """The second value depends on an input that is too large to be whole."""
    large = torch.linspace(-1, 1, 2**21, dtype=torch.float64)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        n = int((w[:3].detach() * 4).sum().abs())
        m = int((x[:: n + 1] > 0.5).sum()) % 5
        return (w[: int(w.detach().sum().abs()) + 1].sum() * x[: m + 1]).sum() * n

    step = ftp.shard(fn, MESH, P("tp"))
    w = torch.linspace(0.2, 1, 8, dtype=torch.float64)
    for args in ((w, large), (w, large.abs()), (w * 2, large)):
        torch.testing.assert_close(step(*args), _expected(fn, *args), rtol=1e-9, atol=1e-9)


def test_only_what_values_depend_on_is_gathered():
    def fn(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
        total = w.new_zeros(())
        for i in range(40):  # of a tensor that is whole
            total = total + int(k[i])
        n = int(((x @ w).detach() > 0).sum())  # gathers w
        return (x @ w).sin().sum() * n + total * int(k.max())

    k = torch.arange(40) % 7
    step = ftp.spmd(fn, MESH, (P("tp"), P(), P()))
    for x in (X, -X):
        torch.testing.assert_close(step(W, x, k), fn(W, x, k), rtol=1e-9, atol=1e-9)
    steps = [step, *step._by_values._steps.values()]
    used = [planned for each in steps for planned in each._cache.used]
    assert [planned.asked and planned.asked.inputs for planned in used] == [(2,), (0, 1, 2)]


@pytest.mark.slow
def test_too_many_reads_are_refused():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        for i in range(1100):
            w = w * int((x + i).abs().max())
        return w.sum()

    with pytest.raises(ftp.errors.TraceError, match="more than 1024 values"):
        ftp.spmd(fn, MESH, (P("tp"), P()))(W, X)


def test_an_error_of_an_op_on_values_is_the_functions_own():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        k = int(x[0, 0].abs() * 100)
        return w[: int(torch.arange(4)[torch.tensor([k]) + (x[0] * 0).long()].sum()) + 1].sum()

    step: Any = ftp.spmd(fn, MESH, (P("tp"), P()))
    with pytest.raises((IndexError, InputError), match="out of"):
        step(W, X)
    torch.testing.assert_close(step(W, X * 0.01), fn(W, X * 0.01))
