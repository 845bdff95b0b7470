"""Python values that a caller changes between calls of a step: told of once, where the function
would compute something else, and nowhere else.
"""

import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ftp
from ftp import P
from ftp.errors import StaleCaptureWarning

MESH = ftp.simulated_mesh((2,), ("tp",))
X = torch.arange(8.0).reshape(2, 4)
SCALE = 2.0


class Trainer:
    def __init__(self):
        self.steps, self.scale, self.history = 0, 2.0, []

    def loss(self, x):
        return x * self.scale

    def count(self, by: float = 0.0):
        self.steps += 1
        self.history.append(self.steps)
        self.scale += by


def called(step: Any, change: Any, times: int = 4) -> list[str]:
    """The warnings of some calls, each after a change."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            step(X)
            change()
    assert all(w.category is StaleCaptureWarning and w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def spmd(fn: Any) -> Any:
    return ftp.spmd(fn, MESH, P("tp"), P("tp"))


def of_item():
    held = {"lr": 1.0}
    return (lambda x: x * held["lr"]), lambda: held.update(lr=held["lr"] + 1), "'held['lr']'"


def of_list():
    scales = [1.0]
    return (lambda x: x * sum(scales)), lambda: scales.append(1.0), "from 1 items to "


def of_array():
    scales = np.array([1.0, 2.0])
    return (lambda x: x * float(scales[1])), lambda: np.add(scales, 1, scales), "'scales', which "


def of_array_as_tensor():
    held = {"scale": np.array(1.0)}
    fn = lambda x: x * torch.as_tensor(held["scale"])  # noqa: E731
    return fn, lambda: np.add(held["scale"], 1, held["scale"]), "held['scale']"


def of_tuple():
    held: dict[str, Any] = {"scales": (1.0, 2.0)}
    fn = lambda x: x * (held["scales"] or (5.0,))[0]  # noqa: E731
    return fn, lambda: held.update(scales=None), "held['scales'][0]"


def of_attribute():
    held = types.SimpleNamespace(scale=1.0)
    return (lambda x: x * held.scale), lambda: setattr(held, "scale", held.scale + 1), "held.scale"


def of_method():
    trainer = Trainer()
    return trainer.loss, lambda: trainer.count(1.0), "'self.scale', which loss "


def of_global():
    def change():
        global SCALE
        SCALE += 1

    return (lambda x: x * SCALE), change, "'SCALE', which <lambda> "


FORMS = (
    *(of_item, of_list, of_array, of_array_as_tensor, of_tuple),
    *(of_attribute, of_method, of_global),
)


@pytest.mark.parametrize("made", FORMS)
def test_a_value_that_the_caller_changes(made: Any):
    fn, change, name = made()
    (message,) = called(spmd(fn), change)
    assert name.strip("'") in message and "the step still computes what it did then" in message


def test_a_gradient_and_a_value_of_another_shape():
    held = {"lr": 1.0}
    step = ftp.shard(lambda w, x: (x @ w).sum() * held["lr"], MESH, P(None, "tp"))
    w, found = torch.ones(4, 2), []

    def call(x):
        found.append(float(step(w, x)[0]))

    (message,) = called(call, lambda: held.update(lr=held["lr"] + 1), times=3)
    assert "went from 1.0 to " in message and found[0] == found[1] == found[2]
    step(w, X[:1])  # a program of its own, with the value of now
    assert float(step(w, X[:1])[0]) == held["lr"] * float((X[:1] @ w).sum())


def test_a_models_own_names_take_no_turns():
    """A change is told of within a few calls, however many parameters a model has."""
    fn, params = ftp.functionalize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))))
    held, calls = {"lr": 1.0}, []
    step = ftp.spmd(lambda p, x: fn(p, x) * held["lr"], MESH, (P(), P()), P())

    def change():
        calls.append(1)
        held["lr"] = 2.0 if len(calls) > 3 else 1.0

    assert len(called(lambda x: step(params, x), change, times=12)) == 1


def test_values_that_do_not_matter():
    """Counters of another method, a list that the function refills, a flag of equal effect, a dict
    as a cache, and values that come back.
    """
    trainer, log, held = Trainer(), [], {"level": 1}
    memo: dict[Any, float] = {}

    def refills(x):
        log.clear()
        log.append(2.0)
        return x * log[0]

    def flagged(x):
        return x * 2 if held["level"] > 0 else x

    def cached(x):
        return x * memo.setdefault(tuple(x.shape), 2.0)

    assert called(spmd(trainer.loss), trainer.count) == []
    assert called(spmd(refills), lambda: log.append(3.0)) == []
    assert called(spmd(flagged), lambda: held.update(level=held["level"] + 1)) == []
    assert called(spmd(cached), lambda: memo.update({(1,): 1.0})) == []
    assert called(spmd(lambda x: x * held["level"]), lambda: held.update(level=held["level"])) == []
    assert held["level"] == 5 and log[-1] == 3.0 and trainer.steps == 4


def test_a_value_is_put_back_after_it_was_compared():
    held, runs = {"lr": 1.0, "other": 1.0}, []

    def fn(x):
        runs.append(held["lr"])
        return x * held["lr"]

    step = spmd(fn)
    assert len(called(step, lambda: held.update(lr=5.0), times=2)) <= 1
    assert held == {"lr": 5.0, "other": 1.0}
