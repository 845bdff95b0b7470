"""Calls recorded from memory give the graph that tracing each of them would: the same program
with nothing to remember is the reference.
"""

from collections.abc import Callable

import models
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp.sharding.pytree import flatten, leaf_names
from ftp.tracing.call_cache import Recall
from ftp.tracing.gradient import grad_and_value
from ftp.tracing.trace import trace


def traced(fn: Callable, *args) -> list[tuple]:
    leaves, tree = flatten(args)
    gm = trace(fn, leaves, tree, "cpu", names=leaf_names(args, "args")).gm
    lines = []
    for node in gm.graph.nodes:
        vals = node.meta.get("val", ())
        known = [
            (tuple(v.shape), v.dtype, v.stride())
            for v in (vals if isinstance(vals, tuple | list) else [vals])
        ]
        facts = [node.meta.get(key) for key in ("source", "phase")]
        lines.append(
            (node.op, str(node.target), str(node.args), str(dict(node.kwargs)), known, facts)
        )
    return lines


def lm(cfg: models.LlamaConfig | models.GPT2Config):
    fn, params = ftp.functionalize(models.build(cfg))
    return grad_and_value(models.lm_loss(fn)), (params, models.lm_batch(cfg))


def repeated_writes(xs: list[Tensor]) -> list[Tensor]:
    """In place, on fresh values and on views of them, twice each."""
    found = []
    for x in xs:
        y = x * 2
        y.add_(1).mul_(0.5)
        y[0].fill_(3.0)
        y.view(-1)[1:].sub_(1)
        y.t_()
        z = y * 2
        z.unsqueeze_(0)
        found.append(z + 1)
    return found


def repeated_changes_of_shape(xs: list[Tensor]) -> list[Tensor]:
    """A value that is written to, and then gets another shape in place."""
    found = []
    for x in xs:
        y = x.sum(1, keepdim=True)
        y.lerp_(x.amax(1, keepdim=True), 0.5).squeeze_(1)
        found += [y, torch.quantile(x, 0.3, dim=0)]
    return found


def repeated_parts(xs: list[Tensor]) -> list[Tensor]:
    """Several results, views, constants, a dtype that the default decides, and -0.0 beside 0.0."""
    found = []
    for x in xs:
        a, b = x.split(2, dim=0)
        top, at = x.topk(2)
        norm = F.layer_norm(x, (4,))
        found += [
            a + b.flip(0),
            top,
            at,
            norm,
            x.addmm(x, x.t() @ x),
            x.mean(0),
            torch.arange(4) / 3 + x,
            x * torch.tensor(2.0),
        ]
        found += [torch.full((2,), 0.0), torch.full((2,), -0.0), x.std(), x.where(x > 0, -0.0)]
    return found


XS = [torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(-2, 3, 16).reshape(4, 4)]
PROGRAMS = {
    "llama": lambda: lm(models.LlamaConfig(layers=3, kv_heads=2)),
    "gpt2": lambda: lm(models.GPT2Config(layers=2, qkv="fused")),
    "writes": lambda: (repeated_writes, (XS,)),
    "changes of shape": lambda: (repeated_changes_of_shape, (XS,)),
    "parts": lambda: (repeated_parts, (XS,)),
    "code per rank": lambda: (grad_and_value(layers_by_rank(3)), (XS[0],)),
}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    fn, args = PROGRAMS[name]()
    remembered = traced(fn, *args)
    monkeypatch.setattr(Recall, "again", lambda *_: None)
    assert remembered == traced(fn, *args)


@pytest.mark.parametrize("fn", [repeated_writes, repeated_changes_of_shape, repeated_parts])
def test_the_program_gives_what_torch_gives(fn: Callable):
    expected = fn([x.clone() for x in XS])
    found = ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), certify=True)(XS)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(torch.signbit(a), torch.signbit(b))


def layers_by_rank(depth: int) -> Callable[[Tensor], Tensor]:
    """Layers that are traced apart, each with per-rank code of its own."""
    mesh = ftp.simulated_mesh((2,), ("dp",))

    def layer(i: int) -> Callable[[Tensor], Tensor]:
        def of_rank(x: Tensor) -> Tensor:
            return (x.softmax(1) @ x.t() @ x).relu() * (i + 1)

        return ftp.local(of_rank, mesh, ftp.P("dp"), ftp.P("dp"))

    def fn(x: Tensor) -> Tensor:
        for i in range(depth):
            x = layer(i)(x)
        return x.square().sum()

    return fn


def test_layers_of_code_per_rank_remember_each_other(monkeypatch: pytest.MonkeyPatch):
    missed: list[int] = []
    foresee = Recall.foresee

    def counted(*args):
        missed[-1] += 1
        return foresee(*args)

    monkeypatch.setattr(Recall, "foresee", counted)
    for depth in (1, 6):
        missed.append(0)
        traced(grad_and_value(layers_by_rank(depth)), XS[0])
    assert missed[1] < 2 * missed[0]  # each layer has a factor of its own


def test_most_of_a_deep_model_is_from_memory(monkeypatch: pytest.MonkeyPatch):
    counts = {True: 0, False: 0}
    again = Recall.again

    def counted(*args):
        found = again(*args)
        counts[found is not None] += 1
        return found

    monkeypatch.setattr(Recall, "again", counted)
    fn, args = lm(models.LlamaConfig(layers=8))
    traced(fn, *args)
    assert counts[True] > 5 * counts[False]
