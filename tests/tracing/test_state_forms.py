"""State in Python of every form: a step computes what plain torch does, or tells of it."""

import random
import warnings
from collections import defaultdict, deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from state_forms import HARMLESS, STATEFUL, Frozen, Slots, one
from torch import nn

import ftp
from ftp import P
from ftp.errors import FtpError, StaleCaptureWarning

MESH = ftp.simulated_mesh((2,), ("tp",))


def losses(make, by_step, sizes=(4, 4, 4), between=lambda keep: None, **options):
    """The results and gradients of calls of a function that keeps state."""
    keep, w, found = make(), torch.eye(4, dtype=torch.float64) + 0.1, list[torch.Tensor]()

    def loss(w, x):
        y = keep(x @ w)
        return y.square().sum(), y

    step = ftp.shard(loss, MESH, P(), has_aux=True, **options)
    torch.manual_seed(0)
    for n in sizes:
        x = torch.randn(n, 4, dtype=torch.float64)
        if by_step:
            (_, y), gradient = step(w, x)
        else:
            of_torch = w.clone().requires_grad_()
            value, y = loss(of_torch, x)
            (gradient,) = torch.autograd.grad(value, of_torch)
        found += [y.detach(), gradient]
        between(keep)
    return found


def are_close(a, b):
    return all(x.shape == y.shape and torch.allclose(x, y) for x, y in zip(a, b, strict=True))


def is_told_or_equal(run):
    """Whether a step refuses a function, warns of its state or computes what torch does."""
    expected = run(False)
    assert not are_close(expected[:2], expected[2:4]) or len(expected) < 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run(True)
        except FtpError:
            return True
    is_told = any(w.category is StaleCaptureWarning for w in caught)
    return is_told or are_close(found, expected)


@pytest.mark.parametrize("form", STATEFUL)
def test_state_is_told_of(form):
    assert is_told_or_equal(lambda by_step: losses(STATEFUL[form], by_step))


@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 4, 3, 2, 6, 4, 6)], ids=["one", "many"])
@pytest.mark.parametrize("form", HARMLESS)
def test_what_is_kept_and_does_no_harm(form, sizes):
    expected = losses(HARMLESS[form], False, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleCaptureWarning)
        found = losses(HARMLESS[form], True, sizes)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", HARMLESS)
def test_what_is_kept_under_dynamic_sizes(form):
    sizes, dims = (2, 4, 3, 2, 6, 4, 6), {0: torch.export.Dim("S", max=64)}
    expected = losses(HARMLESS[form], False, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that sizes are planned one by one
        warnings.simplefilter("error", StaleCaptureWarning)
        found = losses(HARMLESS[form], True, sizes, dynamic_shapes=dims)
    torch.testing.assert_close(found, expected)


def _pair(of):
    """Keeps two tensors that share memory."""
    memo = {}

    def keep(y):
        if not memo:
            memo["a"], memo["b"] = of()
        return y * memo["a"] * memo["b"].sum()

    keep.memo = memo
    return keep


@pytest.mark.parametrize("writes_to", ["a", "b"])
@pytest.mark.parametrize("view", [lambda a: a[:2], lambda a: a.view(2, 2).T, lambda a: a])
def test_kept_tensors_that_share_memory_still_do(view, writes_to):
    def run(by_step):
        def make():
            return _pair(lambda: (a := one(), view(a)))

        return losses(make, by_step, between=lambda keep: keep.memo[writes_to].mul_(2))

    torch.testing.assert_close(run(True), run(False))


def test_a_kept_view_of_a_captured_tensor_shares_its_memory():
    def run(by_step):
        whole = torch.arange(8, dtype=torch.float64)

        def between(_):
            whole.mul_(2)

        return losses(lambda: _pair(lambda: (whole[:4], whole[4:])), by_step, between=between)

    torch.testing.assert_close(run(True), run(False))


def test_a_table_that_is_made_anew_for_each_size_is_planned_again_once():
    def make():
        held = SimpleNamespace(t=one()[:1])

        def keep(y):
            if len(held.t) != len(y):
                held.t = torch.arange(len(y), dtype=torch.float64)[:, None]
                traces.append(len(y))
            return y * held.t

        return keep

    traces = []
    sizes = (2, 4, 2, 4, 2, 4, 2, 4, 2, 4)
    found = losses(make, True, sizes, dynamic_shapes={})
    count = len(traces)
    torch.testing.assert_close(found, losses(make, False, sizes))
    assert count <= 12


class Model(nn.Module):
    """A model that keeps ``attributes`` as ``keep(model, y)`` says."""

    def __init__(self, keep, attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, dtype=torch.float64) + 0.1)
        self.keeps = (keep,)
        for name, make in attributes.items():
            setattr(self, name, make())

    def forward(self, x):
        return self.keeps[0](self, x @ self.weight)


def _doubled(module, args, out):
    return 2 * out


def _set(name, read, step):
    """Read an attribute, then set it to another value."""

    def keep(m, y):
        out = y * read(getattr(m, name))
        setattr(m, name, step(getattr(m, name), y))
        return out

    return keep


def _changed(name, read, change):
    def keep(m, y):
        out = y * read(getattr(m, name))
        change(getattr(m, name))
        return out

    return keep


def _identity(x):
    return x


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "average": (_set("c", _identity, lambda c, y: c * 0.9 + y.detach().mean(0)), {"c": one}),
    "by Parameter": (
        _set("c", lambda c: nn.Parameter(c, requires_grad=False), lambda c, y: c * 0.9),
        {"c": one},
    ),
    "set_": (_changed("c", _identity, lambda c: c.set_(c * 0.9)), {"c": one}),
    "numpy": (_set("a", torch.from_numpy, lambda a, y: a * 0.9), {"a": lambda: np.ones(4)}),
    "numpy in place": (
        _changed("a", torch.tensor, lambda a: a.__imul__(0.9)),
        {"a": lambda: np.ones(4)},
    ),
    "list": (_changed("log", sum, lambda log: log.append(1.0)), {"log": lambda: [1.0]}),
    "list bound anew": (_set("log", sum, lambda log, y: [*log, 1.0]), {"log": lambda: [1.0]}),
    "nested": (
        _changed("log", lambda log: sum(log[0]), lambda log: log[0].append(1.0)),
        {"log": lambda: [[1.0]]},
    ),
    "default": (
        _changed("d", lambda d: d["n"] + 1, lambda d: d.update(n=d["n"] + 1)),
        {"d": lambda: defaultdict(int)},
    ),
    "number": (_set("n", _identity, lambda n, y: n * 2), {"n": lambda: 1}),
    "flag": (_set("n", lambda n: 1 if n else 2, lambda n, y: False), {"n": lambda: True}),
    "text": (_set("n", lambda n: 1 if n == "a" else 2, lambda n, y: "b"), {"n": lambda: "a"}),
    "none": (_set("n", lambda n: 1 if n is None else 2, lambda n, y: 1), {"n": lambda: None}),
    "tuple": (_set("n", lambda n: n[0], lambda n, y: (n[0] + 1,)), {"n": lambda: (1,)}),
    "set": (_changed("s", len, lambda s: s.add(len(s))), {"s": lambda: {0}}),
    "deque": (_changed("q", sum, lambda q: q.append(1.0)), {"q": lambda: deque([1.0])}),
    "iterator": (_changed("g", next, _identity), {"g": lambda: iter([1.0, *range(2, 9)])}),
    "random": (_changed("r", lambda r: r.random(), _identity), {"r": lambda: random.Random(0)}),
    "frozen": (_set("d", lambda d: d.n, lambda d, y: Frozen(d.n / 2)), {"d": Frozen}),
    "slots": (_changed("d", lambda d: d.n, lambda d: setattr(d, "n", d.n / 2)), {"d": Slots}),
    "class": (
        lambda m, y: (y * m.total, setattr(type(m), "total", m.total * 0.5))[0],
        {},
    ),
    "hooks": (lambda m, y: (y, m.register_forward_hook(_doubled))[0], {}),
}


@pytest.mark.parametrize("form", MODELS)
def test_state_of_models_is_told_of(form):
    def run(by_step):
        Model.total = 1.0  # pyright: ignore[reportAttributeAccessIssue]
        model, found = Model(*MODELS[form]), []
        fn, params = ftp.functionalize(model)
        step = ftp.spmd(fn, MESH, (P(), P()), P())
        for n in (1, 2, 3):
            x = torch.full((2, 4), float(n), dtype=torch.float64)
            found.append((step(params, x) if by_step else model(x).detach()) / n)
        return found

    expected = run(False)
    assert not torch.allclose(expected[0], expected[1])
    assert is_told_or_equal(run)


class Idle(nn.Module):
    """Sets attributes that it does not read, and one that has no effect."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4, dtype=torch.float64)
        self.shape, self.mode, self.seen, self.told = (), "a", {}, None

    def forward(self, x):
        self.shape, self.seen["n"], self.told = tuple(x.shape), len(x), "yes"
        self.mode = "b" if self.mode == "a" else "a"
        return self.up(x)


class Hooked(Idle):
    """Registers its hooks at its first call, as models of Hugging Face do."""

    is_hooked = False

    def forward(self, x):
        if not self.is_hooked:
            self.up.register_forward_hook(_doubled)
            self.up.register_forward_pre_hook(lambda m, args, kwargs: None, with_kwargs=True)
            self.is_hooked = True
        return super().forward(x)


class Handle(Idle):
    """Knows by the handle that its hook is registered."""

    handle = None

    def forward(self, x):
        if self.handle is None:
            self.handle = self.up.register_forward_hook(_doubled)
        return super().forward(x)


class Handles(Idle):
    def __init__(self):
        super().__init__()
        self.handles = []

    def forward(self, x):
        if not self.handles:
            self.handles.append(self.up.register_forward_hook(_doubled))
        return super().forward(x)


class Flag(Hooked):
    def __init__(self):
        super().__init__()
        self.is_hooked = False


@pytest.mark.parametrize("kind", [Idle, Hooked, Handle, Handles, Flag])
def test_attributes_that_change_no_program_are_left_alone(kind):
    model = kind()
    fn, params = ftp.functionalize(model)
    x = torch.ones(2, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind is Flag:  # told of as a number
            warnings.filterwarnings("ignore", "Flag changes attribute 'is_hooked'")
        found = ftp.spmd(fn, MESH, (P(), P()), P())(params, x)
    torch.testing.assert_close(found, model(x).detach())


class Removes(Idle):
    """Removes a hook in its call, and may register it again."""

    def __init__(self, again):
        super().__init__()
        self.again, self.handle = again, self.up.register_forward_hook(_doubled)
        self.up.register_forward_hook(lambda module, args, out: out + 1)

    def forward(self, x):
        self.handle.remove()
        y = super().forward(x)
        if self.again:
            self.handle = self.up.register_forward_hook(_doubled)
        return y


@pytest.mark.parametrize("again", [False, True])
def test_hooks_that_a_call_removes(again):
    model = Removes(again)
    fn, params = ftp.functionalize(model)
    hooks = dict(model.up._forward_hooks)
    x = torch.ones(2, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = ftp.spmd(fn, MESH, (P(), P()), P())
        found = [step(params, x) for _ in range(2)]
    assert hooks == model.up._forward_hooks
    torch.testing.assert_close(found, [model(x).detach() for _ in range(2)])


def _first_call(fn):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    with pytest.warns(ftp.errors.StaleCaptureWarning, match="computes something else"):
        ftp.shard(fn, mesh, P("tp"))(torch.ones(4, 3), torch.ones(2, 4))


def test_a_trace_takes_no_more_of_an_iterator_than_a_call_does():
    items = iter([torch.ones(()) * k for k in range(5)])
    _first_call(lambda w, x: (x @ w).sum() * next(items))
    assert [int(k) for k in items] == [1, 2, 3, 4]


def test_a_generator_that_holds_itself():
    def numbers():
        own = generator  # noqa: F841
        yield from (1.0, 2.0, 3.0)

    generator = numbers()
    _first_call(lambda w, x: (x @ w).sum() * next(generator))
    assert next(generator) == 2.0


def test_a_change_in_a_long_list_of_constants():
    counts = list(range(5000))

    def fn(w, x):
        counts[3] += 1
        return (x @ w).sum() * counts[3]

    _first_call(fn)
    assert counts[:5] == [0, 1, 2, 4, 4]


class _Duration(timedelta):
    """Its days and seconds are read-only attributes of the class that it is made from."""


def test_an_object_with_read_only_attributes_beside_one_that_changes():
    held = [_Duration(milliseconds=200), 0]

    def fn(w, x):
        held[1] += 1
        return (x @ w).sum() * held[1] * held[0].total_seconds()

    _first_call(fn)
    assert held[1] == 1
