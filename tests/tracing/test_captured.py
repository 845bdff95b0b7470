"""A tensor that a function captured, and that is another object at a later call, is told of;
nothing else is.
"""

import functools
import random
import sys
import warnings

import numpy
import pytest
import torch
from torch import nn

import ftp
from ftp import P
from ftp.errors import InputError, StaleCaptureWarning, TraceError
from ftp.tracing.captured import places_of

MESH = ftp.simulated_mesh((2,), ("tp",))
SCALE = torch.ones(3)


class Holder:
    def __init__(self):
        self.tensor = torch.ones(3)
        self.others = [torch.ones(3), {"deep": torch.ones(3)}]

    def loss(self, w, x):
        return (x @ w * self.tensor * self.others[0] * self.others[1]["deep"]).sum()


def scaled(x):
    return x * SCALE


def arguments():
    return torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)


def test_another_tensor_in_a_variable():
    mask = torch.ones(3)

    def loss(w, x):
        return (scaled(x @ w) * mask).sum()

    step, (w, x) = ftp.shard(loss, MESH, P("tp")), arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before, _ = step(w, x)
        mask.copy_(torch.ones(3))
        step(w, x)
        step(w, x[:1])
    mask = torch.zeros(3)
    line = loss.__code__.co_firstlineno
    with pytest.warns(StaleCaptureWarning) as caught:
        after, _ = step(w, x)
    assert torch.equal(before, after)
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message) == (
        f"'mask', which loss (tests/tracing/test_captured.py:{line}) reads, is another object now,"
        " a tensor of"
        " shape (3,). The step still uses"
        " the tensor of shape (3,) that it captured when it was traced. Pass a tensor that"
        " changes as an argument of the step, or make the step anew."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(w, x)
        step(w, torch.randn(3, 4, dtype=torch.float64))  # traced anew, with the new one
    with pytest.warns(StaleCaptureWarning):
        step(w, x[:1])


def test_a_train_loop_whose_calls_are_known_at_a_glance():
    mask = torch.ones(4, dtype=torch.float64)
    step = ftp.spmd(lambda w: (w * mask, w.sum()), MESH, (P("tp"),), (P("tp"), P()))
    w = torch.randn(4, dtype=torch.float64)
    for _ in range(4):
        w, _ = step(w)
    assert step._last is not None and step._last[1].is_likely
    mask = mask * 2
    with pytest.warns(StaleCaptureWarning, match="'mask', which <lambda> "):
        step(w)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("'self.tensor', which loss ", lambda held: setattr(held, "tensor", torch.zeros(3))),
        ("'self.others[0]', which loss ", lambda held: held.others.__setitem__(0, None)),
        (
            "\"self.others[1]['deep']\", which loss ",
            lambda held: held.others[1].update(deep=torch.zeros(2)),
        ),
    ],
)
def test_another_tensor_in_an_attribute_or_a_container(name, change):
    held, (w, x) = Holder(), arguments()
    step = ftp.shard(held.loss, MESH, P("tp"))
    step(w, x)
    change(held)
    with pytest.warns(StaleCaptureWarning) as caught:
        step(w, x)
    assert len(caught) == 1 and str(caught[0].message).startswith(name)


def test_a_global_of_a_helper(monkeypatch):
    step, (w, x) = ftp.shard(lambda w, x: scaled(x @ w).sum(), MESH, P("tp")), arguments()
    step(w, x)
    monkeypatch.setitem(globals(), "SCALE", torch.zeros(3))
    with pytest.warns(StaleCaptureWarning, match="'SCALE', which scaled "):
        step(w, x)


@pytest.mark.parametrize(
    "read",
    [int, float, bool, torch.Tensor.item, torch.Tensor.tolist, lambda k: len(SCALE[:k])],
    ids=["int", "float", "bool", "item", "tolist", "slice"],
)
def test_numbers_of_a_captured_tensor_that_is_filled_later_are_an_error(read):
    k = torch.tensor(2)
    step, (w, x) = ftp.shard(lambda w, x: (x @ w).sum() * read(k), MESH, P("tp")), arguments()
    for _ in range(3):
        torch.testing.assert_close(step(w, x)[0], (x @ w).sum() * read(k))
    k.fill_(1)
    with pytest.raises(InputError, match=r"'k', which <lambda> .* was read as Python numbers when"):
        step(w, x)
    other = ftp.shard(lambda w, x: (x @ w).sum() * read(k), MESH, P("tp"))
    torch.testing.assert_close(other(w, x)[0], (x @ w).sum() * read(k))


def test_numbers_of_a_buffer_that_is_filled_later_are_an_error():
    class Scaled(nn.Linear):
        scale: torch.Tensor

        def __init__(self):
            super().__init__(4, 3, dtype=torch.float64)
            self.register_buffer("scale", torch.tensor(2))

        def forward(self, input):
            return super().forward(input) * int(self.scale)

    model, (_, x) = Scaled(), arguments()
    fn, params = ftp.functionalize(model)
    step = ftp.spmd(fn, MESH, (P("tp"), P()), P())
    torch.testing.assert_close(step(params, x), model(x))
    model.scale.fill_(3)
    with pytest.raises(InputError, match=r"tensor of shape \(\), was read as Python numbers"):
        step(params, x)


def test_numbers_that_per_rank_code_reads_are_read_anew_in_a_new_step():
    k, x = torch.tensor(2), torch.ones(4)
    per_rank = ftp.local(lambda x: x * int(k), MESH, P("tp"), P("tp"))

    def made():
        return ftp.spmd(lambda x: per_rank(x) + 1, MESH, P("tp"), P("tp"))

    first, second = made(), made()
    assert first(x).tolist() == second(x).tolist() == [3.0] * 4
    k.fill_(3)
    for step in (first, second):
        with pytest.raises(InputError, match="was read as Python numbers"):
            step(x)
    assert made()(x).tolist() == [4.0] * 4
    assert per_rank(x).tolist() == [3.0] * 4


@pytest.mark.parametrize("is_trained", [False, True])
def test_data_of_a_captured_tensor_in_a_loss(is_trained):
    """peft's adapters read ``layer.weight.data`` of frozen layers."""
    frozen = torch.nn.Parameter(torch.rand(4, 4, dtype=torch.float64), requires_grad=is_trained)

    def loss(w, x):
        return (x @ (frozen.data @ w)).square().sum()

    w, x = torch.rand(4, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    mesh = ftp.simulated_mesh((2,), ("tp",))
    value, grad = ftp.shard(loss, mesh, P(None, "tp"))(w, x)
    leaf = w.clone().requires_grad_()
    torch.testing.assert_close(value, loss(w, x))
    torch.testing.assert_close(grad, torch.autograd.grad(loss(leaf, x), leaf)[0])

    def written(w, x):
        frozen.data.mul_(2)
        return loss(w, x)

    with pytest.raises(TraceError, match="a captured tensor in place"):
        ftp.shard(written, mesh, P(None, "tp"))(w, x)


def test_where_tensors_are_found():
    tensors = [torch.ones(2) for _ in range(6)]
    module, holder = nn.Linear(2, 2), Holder()
    holder.tensor, kept = tensors[0], {"k": [tensors[1]]}
    of_partial = functools.partial(lambda x, y: x * y, y=tensors[2])

    class Callable:
        def __call__(self, x):
            return holder.tensor * kept["k"][0] * of_partial(x) * module(x)

    found = places_of(Callable(), [*tensors, module.weight])
    assert {id(place.value) for place in found} == {id(t) for t in (*tensors[:3], module.weight)}
    assert [place.name.split(",")[0] for place in found if place.value is module.weight] == [
        "'module.weight'"
    ]
    kept.clear()
    assert all(place.now() is place.value for place in found)  # what is gone is not another object


def _python(x):
    return x * random.random()


def _numpy(x):
    return x + float(numpy.random.normal()) if x.ndim else x


def _unseeded(x):
    return x * numpy.random.default_rng(0).random() * numpy.random.default_rng(seed=None).random()


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (_python, "random.random"),
        (_numpy, "numpy.random.normal"),
        (_unseeded, "numpy.random.default_rng"),
    ],
)
def test_a_line_that_draws_pythons_numbers_while_it_is_traced_is_warned_of(fn, name):
    step = ftp.spmd(fn, ftp.simulated_mesh(2, "dp"), P("dp"), P("dp"))
    with pytest.warns(StaleCaptureWarning, match=rf"return x .* draws numbers with {name}\. They"):
        first = step(torch.ones(4))
    assert torch.equal(step(torch.ones(4)), first)
    assert random.random.__name__ == "random"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ftp.spmd(lambda x: x + 1, ftp.simulated_mesh(2, "dp"), P("dp"), P("dp"))(torch.ones(4))


def test_numpys_draws_are_warned_of_where_it_loads_them_in_the_trace(monkeypatch):
    monkeypatch.delattr(numpy, "random")
    monkeypatch.delitem(sys.modules, "numpy.random")
    step = ftp.spmd(_numpy, ftp.simulated_mesh(2, "dp"), P("dp"), P("dp"))
    with pytest.warns(StaleCaptureWarning, match=r"draws numbers with numpy\.random\.normal"):
        step(torch.ones(4))


def test_functions_made_by_cython_around_a_function():
    draw = numpy.random.default_rng  # its class' class has a descriptor as __module__

    def fn(x):
        return x * draw(0).random()

    x = torch.ones(4)
    step = ftp.spmd(fn, ftp.simulated_mesh(2, "dp"), P("dp"), P("dp"))
    assert torch.equal(step(x), fn(x))


def _swap(x):
    torch.utils.swap_tensors(x, torch.zeros(3))


def _assign_data(x):
    x.data = torch.zeros(3)


class OfModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(3)

    def forward(self, x):
        return x * self.mask


@pytest.mark.parametrize("change", [_swap, _assign_data])
@pytest.mark.parametrize("where", ["variable", "model"])
def test_a_tensor_that_gets_the_memory_of_another(change, where):
    """The object is the same one; the program keeps the values that it had."""
    if where == "variable":
        mask = torch.ones(3)
        step, args = ftp.spmd(lambda x: x * mask, MESH, P(), P()), (torch.ones(2, 3),)
    else:
        model = OfModel()
        fn, params = ftp.functionalize(model)
        mask, args = model.mask, (params, torch.ones(2, 3))
        step = ftp.spmd(lambda p, x: fn(p, x), MESH, (P(), P()), P())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*args)
        mask.mul_(2)
        assert torch.equal(step(*args), torch.full((2, 3), 2.0))
    change(mask)
    with pytest.warns(StaleCaptureWarning, match="has other memory now, a tensor of shape"):
        step(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*args)  # it is told once
