"""Tensors that a step's function leaves behind for its next call."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

import ftp
from ftp import P
from ftp.errors import TraceError

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
