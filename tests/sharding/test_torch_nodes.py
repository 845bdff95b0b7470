"""Containers that torch's pytree knows, as arguments, specs and results of steps."""

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import ftp
from ftp import P

MESH = ftp.simulated_mesh((4,), ("dp",))
W = torch.randn(3, 2)


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any
    mask: Any = None


class Pair:
    def __init__(self, first: Tensor, second: Tensor):
        self.first, self.second = first, second


@dataclasses.dataclass
class Unregistered:
    x: Any


torch.export.register_dataclass(Batch)
_pytree.register_pytree_node(
    Pair, lambda p: ([p.first, p.second], ["a list"]), lambda children, _: Pair(*children)
)


def outputs(w: Tensor, batch: Batch) -> Batch:
    return dataclasses.replace(batch, x=batch.x @ w)


def loss(w: Tensor, batch: Batch) -> Tensor:
    out = outputs(w, batch)
    return (out.x[:, 0] - out.y).square().mean()


def test_a_dataclass_that_torch_knows():
    step = ftp.shard(loss, MESH, P(), batch_specs=Batch(P("dp"), P("dp")))
    forward = ftp.spmd(outputs, MESH, (P(), P("dp")))
    for rows in (6, 9):
        batch = Batch(torch.randn(rows, 3), torch.randn(rows))
        torch.testing.assert_close(step(W, batch)[::-1], torch.func.grad_and_value(loss)(W, batch))
        out = forward(W, batch)
        assert isinstance(out, Batch) and out.mask is None
        torch.testing.assert_close(out.x, batch.x @ W)
    assert "%batch.x: f32[9@dp, 3]" in str(step.lower(W, batch))
    with pytest.raises(ftp.errors.SpecError, match=r"batch\.y has spec"):
        ftp.shard(loss, MESH, P(), batch_specs=Batch(P("dp"), P(None, "dp")))(W, batch)


def test_a_class_that_torch_knows_without_names():
    step = ftp.spmd(lambda w, pair: Pair(pair.second, pair.first @ w), MESH, (P(), P("dp")))
    given = Pair(torch.randn(5, 3), torch.randn(5))
    for _ in range(2):
        out = step(W, given)
        torch.testing.assert_close(out.second, given.first @ W)
        assert out.first.equal(given.second)


class Scaled:
    def __init__(self, x: Tensor, scales: list[float]):
        self.x, self.scales = x, scales


def test_a_class_that_is_registered_late_with_a_list_that_changes():
    passing = type("Passing", (), {})
    _pytree.register_pytree_node(passing, lambda _: ([], None), lambda _, __: passing())
    step = ftp.spmd(lambda scaled: scaled.x * scaled.scales[0], MESH, P("dp"))
    ftp.spmd(torch.neg, MESH, P())(W)
    _pytree._deregister_pytree_node(passing)
    _pytree.register_pytree_node(
        Scaled, lambda s: ([s.x], s.scales), lambda x, scales: Scaled(next(iter(x)), scales)
    )
    given = Scaled(W[:2], [2.0])
    for given.scales[0] in (2.0, 5.0):
        torch.testing.assert_close(step(given), W[:2] * given.scales[0])


def test_what_the_errors_of_other_containers_say():
    step = ftp.spmd(lambda w, batch: batch["x"] @ w, MESH, (P(), P()))
    with pytest.raises(
        ftp.errors.InputError, match=r"torch\.export\.register_dataclass\(Unregistered\)"
    ):
        step(W, Unregistered(W))
    with pytest.raises(ftp.errors.InputError, match=r"Give a plain dict"):
        step(W, UserDict(x=W.T))
    step(W, dict(UserDict(x=W.T)))


class Cache:
    """As transformers' caches: made of tensors, which it looks into, and held in layers."""

    def __init__(self, pairs: Any):
        self.layers = [Pair(torch.cat([k[:0], k]), v.to(v.dtype)) for k, v in pairs]


def test_a_class_that_takes_tensors_only():
    _pytree.register_pytree_node(
        Cache,
        lambda c: ([(x.first, x.second) for x in c.layers], None),
        lambda pairs, _: Cache(pairs),
    )

    def grown(cache: Cache, x: Tensor) -> tuple[Cache, Tensor]:
        pairs = [(torch.cat([c.first, x], 1), c.second + x.sum(1)) for c in cache.layers]
        return Cache(pairs), sum(second.sum() for _, second in pairs)  # pyright: ignore

    step = ftp.spmd(grown, MESH, (P("dp"), P("dp")))
    cache = expected = Cache([(torch.randn(6, 2), torch.randn(6)) for _ in range(2)])
    for _ in range(4):
        x = torch.randn(6, 1)
        (cache, total), (expected, of_one) = step(cache, x), grown(expected, x)
        torch.testing.assert_close(total, of_one)
        torch.testing.assert_close(_pytree.tree_leaves(cache), _pytree.tree_leaves(expected))
    assert step.shapes.one_by_one == ()


class Held:
    def __init__(self, x: Tensor):
        self.layers = [{"keys": Pair(x, x)}]


def test_tensors_deep_inside_of_an_object_are_no_constants():
    step = ftp.spmd(lambda w, held: w + held.layers[0]["keys"].first, MESH, (P(), P()))
    with pytest.raises(ftp.errors.InputError, match=r"holds tensors \(layers\)"):
        step(W, Held(W))
    with pytest.raises(ftp.errors.TraceError, match=r"holds tensors \(layers\)"):
        ftp.spmd(Held, MESH, P())(W)
