"""What a block of remat can reach by Python's ways: globals, classes, slots, generators, errors. It
finds each as it was, and what it sets there has gradients; what cannot be put back is an error.
"""

import functools
import random
import threading
import types
from collections import ChainMap, Counter
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

import ftp
from ftp import P

D = torch.float64
Again = Callable[[Callable[..., Any]], Callable[..., Any]]
Loss = tuple[Tensor, Any]  # with what Python holds at the end
CASES: dict[str, Callable[[Again, Tensor, Tensor], Loss]] = {}
REFUSED: dict[str, tuple[str, Callable[[Again, Tensor, Tensor], Tensor]]] = {}

step: Any = 0
held: Any = None
helper: Any = types.ModuleType("helper")


def case(fn: Any) -> Any:
    CASES[fn.__name__] = fn
    return fn


def refused(message: str) -> Callable[[Any], Any]:
    def add(fn: Any) -> Any:
        REFUSED[fn.__name__] = message, fn
        return fn

    return add


def three(block: Callable[..., Tensor], x: Tensor) -> Tensor:
    return block(block(block(x)))


@case
def global_number(again: Again, w: Tensor, x: Tensor) -> Loss:
    global step
    step = 0

    def block(h: Tensor) -> Tensor:
        global step
        step += 1
        return (h @ w * step).sin()

    return three(again(block), x).sum(), step


@case
def global_tensor(again: Again, w: Tensor, x: Tensor) -> Loss:
    global held
    held = None

    def block(h: Tensor) -> Tensor:
        global held
        y = (h @ w).sin()
        held = y.mean(0) if held is None else held * y.mean(0)
        return y * held

    loss = (three(again(block), x) * held).sum()
    held = None
    return loss, None


@case
def an_array_that_is_written_to(again: Again, w: Tensor, x: Tensor) -> Loss:
    scale = np.ones(3)

    def block(h: Tensor) -> Tensor:
        scale[0] += 1
        return (h @ w * torch.tensor(scale)).sin()

    return three(again(block), x).sum(), scale.tolist()


@case
def global_of_another_module(again: Again, w: Tensor, x: Tensor) -> Loss:
    helper.n, helper.t = 0, w

    def block(h: Tensor) -> Tensor:
        helper.n += 1
        helper.t = (h @ w * helper.n).sin()
        return helper.t * 2

    loss = (three(again(block), x) * helper.t).sum()
    return loss, helper.n


class Owner:
    count: int = 0
    last: Any = None
    made: ClassVar[dict[int, Tensor]] = {}

    def __call__(self, h: Tensor) -> Tensor:
        type(self).count += 1
        y = (h @ self.w * Owner.count).sin()  # type: ignore[attr-defined]
        Owner.last = y.mean(0) if Owner.last is None else Owner.last * y.mean(0)
        self.made[len(self.made)] = y
        return y + step


class Child(Owner):
    pass


@case
def class_attributes(again: Again, w: Tensor, x: Tensor) -> Loss:
    global step
    Owner.count, Owner.last, step = 0, None, 1
    Owner.made.clear()
    owner = Owner()
    owner.w = w  # type: ignore[attr-defined]
    block = again(owner)
    x = block(x)
    step = 2
    loss = (block(x) * Owner.last * Owner.made[0]).sum()
    count, Owner.last, step = Owner.count, None, 0
    Owner.made.clear()
    return loss, count


@case
def inherited_attributes(again: Again, w: Tensor, x: Tensor) -> Loss:
    Owner.count = 0

    def block(h: Tensor) -> Tensor:
        Owner.count += 1
        return (h @ w * Child.count).sin()

    return three(again(block), x).sum(), Child.count


class Slots:
    __slots__ = ("__hidden", "open")

    def next(self, factor: Tensor) -> Tensor:
        found = self.__hidden
        self.__hidden = found * factor
        return found

    def start(self, x: Tensor) -> "Slots":
        self.__hidden = x
        return self


@case
def slots(again: Again, w: Tensor, x: Tensor) -> Loss:
    of = Slots().start(w)

    def block(h: Tensor) -> Tensor:
        of.open = (h @ of.next(w)).sin()
        return of.open * 2

    return (three(again(block), x) * of.open).sum(), None


@case
def variables_of_functions(again: Again, w: Tensor, x: Tensor) -> Loss:
    n: int = 0
    last: Any = None

    def inner(h: Tensor, seen: list[int] = [0], *, by: dict[str, Tensor] = {"w": w * 2}) -> Tensor:  # noqa: B006
        seen[0] += 1
        by["w"] = by["w"] * seen[0]
        return h @ by["w"]

    def block(h: Tensor, factor: float = 1.0) -> Tensor:
        nonlocal n, last
        n += 1
        last = (inner(h) * n * factor).sin()
        block.calls += 1  # type: ignore[attr-defined]
        return last * block.calls  # type: ignore[attr-defined]

    block.calls = 0  # type: ignore[attr-defined]
    run = again(block)
    x = run(x)
    block.__defaults__ = (0.5,)
    loss = (run(x) * last).sum()
    return loss, (n, block.calls)  # type: ignore[attr-defined]


@case
def partials(again: Again, w: Tensor, x: Tensor) -> Loss:
    kept: dict[str, Any] = {"h": None}

    def block(kept: dict[str, Any], w: Tensor, h: Tensor, *, by: dict[str, Tensor]) -> Tensor:
        y = (h @ w @ by["w"]).sin()
        kept["h"] = y if kept["h"] is None else kept["h"] * y
        return y * 2

    run = again(functools.partial(functools.partial(block, kept), w * 2, by={"w": w}))
    return (three(run, x) * kept["h"]).sum(), None


class Counts(dict):
    """Has methods of its own."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.changes = getattr(self, "changes", 0) + 1


@case
def containers_of_other_classes(again: Again, w: Tensor, x: Tensor) -> Loss:
    counts, calls, maps = Counts(n=0, t=None), Counter(), ChainMap({"n": 0})
    owner = Owner()
    owner.n, known = 0, ref(owner)  # type: ignore[attr-defined]

    def block(h: Tensor) -> Tensor:
        counts["n"], maps["n"] = counts["n"] + 1, maps["n"] + 1
        calls["block"] += 1
        known().n += 1  # type: ignore[union-attr]
        n = counts["n"] * calls["block"] * maps["n"] * owner.n  # type: ignore[attr-defined]
        counts["t"] = (h @ w * n).sin()
        return counts["t"] * 2

    loss = (three(again(block), x) * counts["t"]).sum()
    return loss, (dict(calls), maps["n"], counts["n"], counts.changes)


@case
def values_of_a_thread(again: Again, w: Tensor, x: Tensor) -> Loss:
    own = threading.local()
    own.n, own.t = 0, w

    def block(h: Tensor) -> Tensor:
        own.n += 1
        own.t = (h @ w * own.n).sin()
        return own.t * 2

    return (three(again(block), x) * own.t).sum(), own.n


@case
def random_generators(again: Again, w: Tensor, x: Tensor) -> Loss:
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    own = [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)]

    def block(h: Tensor) -> Tensor:
        drawn = random.random() + np.random.rand() + own[0].random() + own[1].random()
        y = torch.dropout((h @ w * drawn).sin(), 0.5, True)
        return y + torch.rand(3, dtype=D, generator=own[2]) * y

    loss = three(again(block), x).sum()
    return loss, (random.random(), np.random.rand(), own[0].random(), torch.rand(1).item())


@case
def sets_of_new_tensors(again: Again, w: Tensor, x: Tensor) -> Loss:
    kept: set[Tensor] = set()

    def block(h: Tensor) -> set[Tensor]:
        kept.update((h @ w * i).sin() for i in range(1, 5))
        return {(h @ w * i).cos() for i in range(1, 5)}

    given = again(block)(x)
    return sum((y * float(y.detach().sum()) for y in (*given, *kept)), x).sum(), None


@case
def what_is_given_comes_back(again: Again, w: Tensor, x: Tensor) -> Loss:
    given = [x]

    def block(xs: list[Tensor], same: list[Tensor], h: Tensor) -> Any:
        xs.append((xs[-1] @ w).sin())
        return xs, same[-1], {"h": h}, xs[-1]

    out, last, named, again_last = again(block)(given, given, x)
    given.append(last * 2)
    return (out[-1] * named["h"]).sum(), (out is given, last is again_last, named["h"] is x)


@case
def objects_that_are_returned(again: Again, w: Tensor, x: Tensor) -> Loss:
    def block(h: Tensor) -> Any:
        y = (h @ w).sin()
        found = types.SimpleNamespace(y=y, ys=[y * 2])
        return found, functools.partial(torch.mul, y.cos()), lambda z: z * y

    found, times, also = again(block)(x)
    return also(times(found.y * found.ys[0])).sum(), None


class Left(Exception):
    __slots__ = ("slot",)

    def __init__(self, x: Tensor) -> None:
        self.slot, self.attribute = x * 2, types.SimpleNamespace(x=[x])


@case
def tensors_of_errors(again: Again, w: Tensor, x: Tensor) -> Loss:
    seen: list[Any] = []

    def fails(h: Tensor) -> Tensor:
        try:
            raise Left((h @ w).sin())
        except Left as left:
            seen.append(left)
            raise StopIteration((h @ w).cos()) from left

    try:
        again(fails)(x)
    except StopIteration as stop:
        cause: Any = stop.__cause__
        loss = (stop.value * cause.slot * cause.attribute.x[0] * seen[0].slot).sum()
        return loss, cause is seen[0]
    raise AssertionError


@case
def constants_that_the_first_run_caches(again: Again, w: Tensor, x: Tensor) -> Loss:
    @functools.lru_cache
    def table(n: int) -> Tensor:
        return torch.arange(n, dtype=D).cos()

    def block(h: Tensor) -> Tensor:
        return (h @ w * table(3)).sin()

    return three(again(block), x).sum(), None


@case
def a_function_with_a_context(again: Again, w: Tensor, x: Tensor) -> Loss:
    def block(h: Tensor) -> Tensor:
        inner = torch.func.grad(lambda h: (h @ w).sin().sum())(h)
        return inner + torch.vmap(lambda row: (row @ w).cos())(h)

    return three(again(block), x).sum(), None


@refused("computes other values when it runs again.* It depends on")
def a_generator(again: Again, w: Tensor, x: Tensor) -> Tensor:
    def counts() -> Any:
        n = 1.0
        while True:
            yield n
            n += 1

    by = counts()
    return three(again(lambda h, w=w: (h @ w * next(by)).sin()), x).sum()


@refused("computes other values when it runs again at its call")
def an_iterator_that_ends(again: Again, w: Tensor, x: Tensor) -> Tensor:
    by = iter([1.0, 2.0, 3.0])
    return three(again(lambda h: (h @ w * next(by)).sin()), x).sum()


@refused("computes other values")
def a_view_of_what_is_written_to_later(again: Again, w: Tensor, x: Tensor) -> Tensor:
    table = torch.ones(2, 3, dtype=D)
    row = table[0]
    y = again(lambda h: (h @ w * row.clone()).sin())(x)
    table.add_(1.0)
    return y.sum()


@refused("computes other values")
def another_default_dtype(again: Again, w: Tensor, x: Tensor) -> Tensor:
    torch.set_default_dtype(D)
    try:
        return again(lambda h: (h @ w * torch.tensor(1.1)).sin())(x).sum()
    finally:
        torch.set_default_dtype(torch.float32)


@refused("computes other values")
def a_change_within_a_nested_block(again: Again, w: Tensor, x: Tensor) -> Tensor:
    by = iter(range(1, 100))

    def inner(h: Tensor, w: Tensor) -> Tensor:
        return (h @ w * next(by)).sin()

    run = again(inner)
    return again(lambda h, w: run(h, w).cos())(x, w).sum()


@refused("returns a generator over tensors, which would have no gradient")
def a_generator_that_is_returned(again: Again, w: Tensor, x: Tensor) -> Tensor:
    y = again(lambda h: ((h @ w).sin() for _ in range(2)))(x)
    return sum(y, x).sum()


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, 3, dtype=D, generator=generator) for n in (3, 4))
    return w, x


def by_autograd(loss: Any, again: Again) -> Any:
    w, x = drawn()
    value, state = loss(again, w.requires_grad_(), x)
    return value.detach(), *torch.autograd.grad(value, w), state


def by_func(loss: Any, again: Again) -> Any:
    w, x = drawn()
    states: list[Any] = []

    def value_of(w: Tensor) -> Tensor:
        value, state = loss(again, w, x)
        states.append(state)
        return value

    grad, value = torch.func.grad_and_value(value_of)(w)
    (state,) = states
    return value, grad, state


def nested(fn: Callable[..., Any]) -> Callable[..., Any]:
    return ftp.remat(ftp.remat(fn))


@pytest.mark.parametrize("again", [ftp.remat, nested], ids=["once", "nested"])
@pytest.mark.parametrize("name", CASES)
def test_as_plain_torch(name: str, again: Again):
    value, grad, state = by_autograd(CASES[name], lambda fn: fn)
    for way in (by_autograd, by_func):
        found, found_grad, found_state = way(CASES[name], again)
        torch.testing.assert_close((found, found_grad), (value, grad), rtol=1e-10, atol=1e-12)
        assert found_state == state


IN_A_STEP = [
    *("global_number", "global_tensor", "class_attributes", "slots", "partials"),
    *("variables_of_functions", "objects_that_are_returned", "tensors_of_errors"),
]


@pytest.mark.cases_by_default(3)
@pytest.mark.parametrize("name", IN_A_STEP)
def test_in_a_step(name: str):
    value, grad, _ = by_autograd(CASES[name], lambda fn: fn)
    w, x = drawn()
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(lambda w, x: CASES[name](ftp.remat, w, x)[0], mesh, P("tp"), batch_specs=P())
    torch.testing.assert_close(step(w, x), (value, grad), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str):
    message, loss = REFUSED[name]
    for way in (by_autograd, by_func):
        with pytest.raises(ftp.FtpError, match=message):
            way(lambda again, w, x: (loss(again, w, x), None), ftp.remat)


def test_a_cast_that_does_nothing():
    """``x.to(x.dtype)`` is ``x``, of which a transform makes another object."""
    w, x = (torch.randn(3, 3, dtype=torch.float64) for _ in range(2))

    def loss(again: Any, w: Tensor) -> Tensor:
        def block(h: Tensor) -> Tensor:
            return (h + h.to(h.dtype) @ w.to(h.dtype)).sin()

        return again(block)(x).sum()

    due = torch.func.grad(lambda w: loss(lambda fn: fn, w))(w)
    torch.testing.assert_close(torch.func.grad(lambda w: loss(ftp.remat, w))(w), due)
