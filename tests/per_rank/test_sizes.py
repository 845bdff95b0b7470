"""Per-rank code on dynamic sizes: planned once, and every size is what one device computes."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.api.families import ShapeCounts
from ftp.axis import all_gather, all_reduce, all_to_all, axis_index, ppermute, reduce_scatter

DIMS = {0: torch.export.Dim("S", max=64)}
MESHES = {  # and the axes that cut the rows
    "2": ({"a": 2}, ("a",)),
    "3": ({"a": 3}, ("a",)),
    "2x2": ({"a": 2, "b": 2}, ("a", "b")),
    "one of 2x2": ({"a": 2, "b": 2}, ("a",)),
}


@dataclass(frozen=True)
class Case:
    """Code of one rank, and what it computes of the parts of all.

    Attributes:
        code: takes this rank's rows, weights and the mesh axes.
        whole: takes all ranks' rows and weights; None for the code itself on the whole.
        rows: the result is cut as the argument is.
        even: only equal parts have a meaning.
        over: takes the code as a function of whole tensors; gives the function that is tested.
    """

    code: Callable[..., Any]
    whole: Callable[..., Any] | None = None
    rows: bool = False
    even: bool = False
    over: Callable[..., Any] = lambda f: f


def turned(n):
    return [(i, (i + 1) % n) for i in range(n)]


def swapped(x, w, a):
    y = all_to_all(x @ w, a[0], 1, 0)
    return all_reduce((y * (1 + torch.arange(y.shape[0]))[:, None]).square().sum(), a)


def sent_on(x, w, a):
    n = ftp.axis.axis_size(a[0])
    counts = (torch.arange(n) == (axis_index(a[0]) + 1) % n) * x.shape[0]
    return all_to_all(x @ w, a[0], send_counts=counts, bound=x.shape[0] + 1)[: x.shape[0]] * x


def of_rank_before(xs, w):
    return torch.cat([(xs[i - 1 - (len(xs) > 3)] @ w) * x for i, x in enumerate(xs)])


def gathered(x, w, a):
    y = all_gather(x @ w, a)
    return (y * (1 + torch.arange(y.shape[0]))[:, None]).sum(0)


def of_sizes(x, w, a):
    k = x.shape[0] * 2
    return all_reduce((x @ w).sum(0) / (k + 1) + x.shape[0] ** 0.5, a)


def reshaped(x, w, a):
    y = (x @ w).view(-1, 2, 2).transpose(0, 1).reshape(2, -1)
    return all_reduce(torch.cat([y, y * 2], 1)[:, 1:].square().sum(1), a)


def hessian(f):
    def of(x, w):
        grad = torch.func.grad(lambda w: f(x, w).square().sum())(w)
        return grad * w + torch.func.grad(lambda x: f(x, w).sum())(x).sum(0)

    return of


def total(x, w, a=None):
    y = (x @ w).tanh().sum(0)
    return y if a is None else all_reduce(y, a)


CASES = {
    "rows": Case(lambda x, w, a: (x @ w).tanh(), lambda xs, w: (torch.cat(xs) @ w).tanh(), True),
    "sum": Case(total, lambda xs, w: total(torch.cat(xs), w)),
    "second derivative": Case(total, lambda xs, w: total(torch.cat(xs), w), over=hessian),
    "mean": Case(
        lambda x, w, a: total(x, w, a) / all_reduce(torch.ones_like(x[:, 0]).sum(), a),
        lambda xs, w: (torch.cat(xs) @ w).tanh().mean(0),
    ),
    "index": Case(
        lambda x, w, a: all_reduce((x @ w).sum(0) * (1 + axis_index(a)), a),
        lambda xs, w: sum((x @ w).sum(0) * (1 + i) for i, x in enumerate(xs)),
    ),
    "all_gather": Case(
        gathered,
        lambda xs, w: (
            (torch.cat(xs) @ w) * (1 + torch.arange(sum(map(len, xs))))[:, None]
        ).sum(0),
    ),
    "all_to_all": Case(
        swapped,
        lambda xs, w: (
            (torch.cat(xs) @ w) * (1 + torch.arange(sum(map(len, xs))))[:, None]
        ).square().sum(),
        even=True,
    ),
    "ppermute": Case(
        lambda x, w, a: ppermute(x @ w, a[0], turned(ftp.axis.axis_size(a[0]))) * x,
        of_rank_before,
        rows=True,
        even=True,
    ),
    "send_counts": Case(sent_on, of_rank_before, rows=True, even=True),
    "reduce_scatter": Case(
        lambda x, w, a: reduce_scatter(all_gather(x @ w, a) * (1 + axis_index(a)), a),
        lambda xs, w: torch.cat(xs) @ w * sum(range(len(xs) + 1)),
        rows=True,
        even=True,
    ),
    "sizes": Case(
        of_sizes,
        lambda xs, w: sum((x @ w).sum(0) / (2 * len(x) + 1) + len(x) ** 0.5 for x in xs),
        even=True,
    ),
    "views": Case(
        reshaped,
        lambda xs, w: sum(
            torch.cat([y, y * 2], 1)[:, 1:].square().sum(1)
            for x in xs
            for y in [(x @ w).view(-1, 2, 2).transpose(0, 1).reshape(2, -1)]
        ),
        even=True,
    ),
    "an if": Case(
        lambda x, w, a: all_reduce((x @ w).sum(0) * (3 if x.shape[0] > 5 else 1), a),
        lambda xs, w: sum((x @ w).sum(0) * (3 if len(x) > 5 else 1) for x in xs),
        even=True,
    ),
    "squeeze": Case(
        lambda x, w, a: all_reduce((x @ w).squeeze().cumsum(0).square().sum(), a),
        lambda xs, w: sum((x @ w).squeeze().cumsum(0).square().sum() for x in xs),
        even=True,
    ),
    "vmap": Case(
        total,
        lambda xs, w: total(torch.cat(xs), w),
        over=lambda f: lambda x, w: torch.vmap(f, (None, 0))(x, torch.stack([w, w.T])),
    ),
    "vmap beside": Case(
        total,
        lambda xs, w: total(torch.cat(xs), w),
        over=lambda f: lambda x, w: torch.vmap(f, (1, None))(torch.stack([x, x * 2], 1), w),
    ),
}  # fmt: skip


def parts(x, n):
    size = max(1, -(-x.shape[0] // n))
    return [x[i * size : (i + 1) * size] for i in range(n)]


@cache
def losses(name: str, on: str):
    """The step of a case, its loss on one device, and the number of ranks that cut the rows."""
    case, (axes, a) = CASES[name], MESHES[on]
    mesh, n = ftp.simulated_mesh(tuple(axes.values()), tuple(axes)), math.prod(axes[b] for b in a)
    results = P(a) if case.rows else P()
    per_rank = ftp.local(
        lambda x, w: case.code(x, w, a), mesh, (P(a), P()), results, a, check=name != "all_gather"
    )

    def loss_of(f):
        def loss(w, x):
            y = case.over(f)(x, w)
            return (y * torch.arange(1.0, 1.0 + y.shape[-1])).square().sum() if y.ndim else y

        return loss

    whole: Any = case.whole
    reference = loss_of(lambda x, w: whole(parts(x, n), w))
    step = ftp.shard(loss_of(per_rank), mesh, P(), batch_specs=P(a), dynamic_shapes=DIMS)
    return step, reference, n


def check(step, reference, size):
    generator = torch.Generator().manual_seed(size)
    x, w = (torch.randn(s, 4, generator=generator, dtype=torch.float64) for s in (size, 4))
    want_grad, want = torch.func.grad_and_value(reference)(w, x)
    loss, grad = step(w, x)
    torch.testing.assert_close(loss, want, rtol=1e-11, atol=1e-11, equal_nan=True)
    torch.testing.assert_close(grad, want_grad, rtol=1e-11, atol=1e-11, equal_nan=True)


def check_case(name, on, sizes):
    step, reference, n = losses(name, on)
    for size in sizes:
        # A dim that two axes cut has equal parts.
        is_even = on == "2x2" or CASES[name].even
        check(step, reference, size - size % n if is_even else size)
    if name == "vmap beside":
        return  # vmap compares numbers of rows with others: some sizes are planned alone
    traces, plans = (3, 6) if name in ("an if", "squeeze") else (2, 4)
    assert step.shapes.traces <= traces and step.shapes.plans <= plans
    assert not step.shapes.one_by_one


def test_a_plan_for_sizes_that_the_ranks_divide_and_one_for_others():
    check_case("rows", "3", (12, 7, 9, 1, 8))
    assert losses("rows", "3")[0].shapes == ShapeCounts(2, 2)


def test_rows_that_travel_have_room_for_a_dynamic_number():
    check_case("send_counts", "2", (8, 12))


@pytest.mark.slow
@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_a_size_is_what_one_device_computes(name, on, sizes):
    if name == "all_to_all" and on in ("3", "2x2"):
        return  # 3 does not divide the weights' 4 columns; over one of two axes rows change places
    with warnings.catch_warnings():
        if name == "vmap beside":
            warnings.simplefilter("ignore", UserWarning)
        check_case(name, on, sizes)


def step_of(fn, on="2", dims=DIMS, **options):
    axes, a = MESHES[on]
    mesh = ftp.simulated_mesh(tuple(axes.values()), tuple(axes))
    return ftp.spmd(fn, mesh, (P(a), P()), P(), dynamic_shapes=(dims, None), **options)


@pytest.mark.slow
@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("options", [{"certify": True}, {"compile": True}], ids=str)
def test_programs_of_all_sizes_are_certified_and_compiled(options, on):
    def code(x, w):
        y = (x @ w).tanh()
        return all_gather(y, "a"), all_reduce(y.sum(0), MESHES[on][1])

    axes, a = MESHES[on]
    specs = (P(a[1:] or None), P())
    mesh = ftp.simulated_mesh(tuple(axes.values()), tuple(axes))
    per_rank = ftp.local(code, mesh, (P(a), P()), specs, a)
    step = ftp.spmd(per_rank, mesh, (P(a), P()), specs, dynamic_shapes=(DIMS, None), **options)
    for size in (8, 12, 7, 1, 24):
        size -= size % 4 if on == "2x2" else 0
        x, w = torch.randn(size, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
        rows, sums = step(x, w)
        if on != "2x2":
            torch.testing.assert_close(rows, (x @ w).tanh())
        torch.testing.assert_close(sums, total(x, w))
    assert step.shapes.traces == (1 if on == "2x2" else 2) and not step.shapes.one_by_one


def test_a_loop_over_a_shards_rows_is_planned_for_each_size():
    def code(x, w):
        total: Any = sum(x[i] @ w / (i + 1) for i in range(x.shape[0]))
        return all_reduce(total, "a")

    step = step_of(ftp.local(code, None, (P("a"), P()), P()))
    w = torch.randn(4, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"asks for sizes: .*range\(x\.shape\[0\]\)"):
        step(torch.zeros(6, 4, dtype=torch.float64), w)
    for size in (8, 6):
        x = torch.randn(size, 4, dtype=torch.float64)
        want = sum(row @ w / (i % (size // 2) + 1) for i, row in enumerate(x))
        torch.testing.assert_close(step(x, w), want)


def test_each_step_keeps_the_conditions_of_its_own_trace():
    """The code and its gradient are traced for each step: their conditions are the step's."""

    def code(x, w):
        return all_reduce((x @ w).square().sum(0) * (3 if x.shape[0] > 5 else 1), "a")

    per_rank = ftp.local(code, None, (P("a"), P()), P())

    def grad(x, w):
        return torch.func.grad(lambda w: per_rank(x, w).sum())(w)

    for sizes in ((6, 16), (16, 6)):
        step = step_of(grad)
        for size in sizes:
            x, w = torch.randn(size, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
            want = torch.func.grad(lambda w: (x @ w).square().sum())(w)  # noqa: B023
            torch.testing.assert_close(step(x, w), want * (3 if size > 10 else 1))
        assert step.shapes.traces == 2


@pytest.mark.slow
@settings(max_examples=12)
@given(sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=5))
def test_two_dynamic_dims(sizes):
    def code(x, w):
        y = (x.T @ x).tanh()  # (T, T)
        return all_reduce(y * x.shape[1] + w.sum(), "a"), x * 2

    dims = {0: torch.export.Dim("S", max=64), 1: torch.export.Dim("T", max=64)}
    mesh = ftp.simulated_mesh((2,), ("a",))
    per_rank = ftp.local(code, mesh, (P("a"), P()), (P(), P("a")))
    step = TWO.setdefault(
        "step",
        ftp.spmd(per_rank, mesh, (P("a"), P()), (P(), P("a")), dynamic_shapes=(dims, None)),
    )
    for s, t in sizes:
        x, w = torch.randn(2 * s, t, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        made, rows = step(x, w)
        want = sum((part.T @ part).tanh() * t + 2 for part in parts(x, 2))
        torch.testing.assert_close(made, want)
        torch.testing.assert_close(rows, x * 2)
    assert step.shapes.traces <= 2 and not step.shapes.one_by_one


TWO: dict[str, Any] = {}


def test_no_rows_on_two_axes():
    step = losses("rows", "2x2")[0]
    for size in (8, 0, 4):
        loss, _ = step(torch.eye(4, dtype=torch.float64), torch.ones(size, 4, dtype=torch.float64))
        assert bool(loss) == bool(size)
    assert step.shapes.plans == 2 and not step.shapes.one_by_one
