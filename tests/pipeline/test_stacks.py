"""Stacks of layers that ``ftp.scan`` runs, cut over the ranks of a pipeline."""

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from few_or_many import few_or_many
from hypothesis import strategies as st
from torch import fx

import ftp
from ftp import P
from ftp.errors import CertificateError, SpecError
from ftp.pipeline import check_stacks
from tests.pipeline.test_train_steps import adamw, check_steps, train_step

WIDTH, VOCABULARY = 6, 9


def params_of(layers: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(layers)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) / 3

    stack = {
        "up": draw(layers, WIDTH, 8),
        "down": draw(layers, 8, WIDTH),
        "norm": draw(layers, WIDTH),
    }
    return {"emb": draw(VOCABULARY, WIDTH), "layers": stack, "head": draw(WIDTH, VOCABULARY)}


def block(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x * layer["norm"] @ layer["up"]) @ layer["down"]


def loss(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    x = ftp.scan(block, params["layers"], params["emb"][tokens])
    # Decay reads the stack as it is.
    decay = sum(p.square().sum() for p in params["layers"].values())
    logits = x @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 1e-2 * decay


def batch_of(rows: int) -> Any:
    return tuple(torch.randint(VOCABULARY, (2, rows, 3)))


def specs_of(cut: str | None) -> Any:
    stack = {"up": P("pp", None, cut), "down": P("pp", cut), "norm": P("pp")}
    return {"emb": P(), "layers": stack, "head": P()}


@few_or_many(
    layers=st.integers(2, 5),
    ranks=st.integers(2, 3),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero_bubble"]),
    inside=st.sampled_from([None, "dp", "tp"]),
    microbatches=st.integers(1, 3),
    few=2,
    many=30,
)
def test_a_stack_over_the_stages(layers, ranks, schedule, inside, microbatches):
    layers = max(layers, ranks)
    params, pipe = params_of(layers), ftp.Pipeline("pp", microbatches, schedule)
    axes = ("pp",) if inside is None else ("pp", inside)
    mesh = ftp.simulated_mesh((ranks, 2)[: len(axes)], axes)
    specs = pipe.place(params, specs_of("tp" if inside == "tp" else None), mesh)
    rows = P("dp") if inside == "dp" else P()
    step = ftp.shard(loss, mesh, specs, batch_specs=rows, pipeline=pipe, certify=True)
    placed, batch = ftp.device_put(params, mesh, specs), batch_of(2 * microbatches)
    found, grads = step(placed, *batch)
    one_device: Any = ftp.optim.accumulate(torch.func.grad_and_value(loss), microbatches)
    due, due_loss = one_device(params, *batch)
    torch.testing.assert_close((found, grads), (due_loss, due), rtol=1e-12, atol=1e-12)
    assert ftp.specs_of(grads) == specs


def test_training_stacks():
    """AdamW and clipping run on each rank's layers; the norm alone crosses the ranks."""
    params, opt, pipe = params_of(5), adamw(), ftp.Pipeline("pp", 2)
    mesh = ftp.simulated_mesh((2, 2), ("pp", "tp"))
    specs = pipe.place(params, specs_of("tp"), mesh)
    state_specs = opt.specs(params, specs)
    step = ftp.spmd(
        train_step(loss, opt, None), mesh, (specs, state_specs, P(), P()), pipeline=pipe,
        certify=True,
    )  # fmt: skip
    args = (params, opt.init(params))
    check_steps(train_step(loss, opt, 2), step, args, [batch_of(4) for _ in range(3)])
    lowered: Any = step.lower(*args, *batch_of(4))
    values = lowered.update.program.values
    shared = [name for names in lowered.update.program.rounds.shared for name, _ in names]
    assert shared and all(values[name].shape == () for name in shared)
    # Of the decay, too, numbers alone go on, and no parameter.
    sent = {c.global_shape for c in lowered.collectives_of(0) if c.op == "send"}
    assert sent == {(2, 3, WIDTH), ()}
    # A rank holds its layers alone: 3 of 5 and the embedding, or 2 of 5 and the head.
    first, last = lowered.memory_by_rank
    assert first > last


def mutants(graph: fx.Graph) -> Iterator[str]:
    """Change one operand, one layer's number, or the order of two results; undo it after each."""
    before: list[fx.Node] = []
    for node in graph.nodes:
        args = node.args
        if node.op == "output":
            for i in range(len(before) and len(args[0]) - 1):
                own = list(args[0])
                own[i], own[i + 1] = own[i + 1], own[i]
                node.args = (tuple(own),)
                yield f"results {i} and {i + 1}"
        elif node.target is operator.getitem:
            count = len(args[0].meta["val"])
            node.args = (args[0], (args[1] + 1) % count)
            yield f"{node} takes another layer"
        for operand in node.all_input_nodes if node.op == "call_function" else ():
            for other in [n for n in before if alike(n, operand)][-1:]:
                node.args = args
                node.replace_input_with(operand, other)
                yield f"{node} reads {other} for {operand}"
        node.args = args
        before.append(node)


def alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    if isinstance(x, list | tuple) or isinstance(y, list | tuple):
        return a is not b and isinstance(x, list) and isinstance(y, list) and len(x) == len(y)
    return a is not b and x.shape == y.shape and x.dtype == y.dtype


@pytest.mark.slow
def test_a_wrong_layer_is_not_certified(monkeypatch):
    """Of graphs with one changed operand the check refuses all that compute other numbers: of a
    microbatch's gradient, and of AdamW's update with clipping.
    """
    seen: list[Any] = []
    for module in ("pipelined_step", "staged_step"):
        monkeypatch.setattr(
            f"ftp.api.{module}.check_parts_of_stacks", lambda *args: seen.append(args)
        )
    params, opt, pipe = params_of(4), adamw(), ftp.Pipeline("pp", 2)
    mesh = ftp.AbstractMesh((2,), ("pp",))
    specs = pipe.place(params, specs_of(None), mesh)
    step = ftp.spmd(
        train_step(loss, opt, None), mesh, (specs, opt.specs(params, specs), P(), P()),
        pipeline=pipe,
    )  # fmt: skip
    step.lower(params, opt.init(params), *batch_of(4))
    assert len(seen) == 2
    for graphs in seen:
        check_mutants(*graphs)


def check_mutants(traced: fx.Graph, graph: fx.Graph, *sizes: Any) -> None:
    check_stacks.check_parts_of_stacks(traced, graph, *sizes)
    run = fx.Interpreter(graph.owning_module, garbage_collect_values=False, graph=graph).run
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            if val.is_floating_point():
                inputs.append(torch.rand(val.shape, dtype=val.dtype) + 0.1)
            else:
                inputs.append(torch.randint(1, VOCABULARY, val.shape, dtype=val.dtype))
    due, wrong, missed = run(*inputs), 0, []
    assert all(x.isfinite().all() for x in due)
    for mutant in mutants(graph):
        try:
            found = run(*inputs)
        except (RuntimeError, IndexError):
            continue  # its shapes do not fit
        is_same = [a.shape for a in found] == [b.shape for b in due] and all(
            torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, due, strict=True)
        )
        if is_same:
            continue
        wrong += 1
        try:
            check_stacks.check_parts_of_stacks(traced, graph, *sizes)
            missed.append(mutant)
        except CertificateError:
            pass
    assert wrong > 100 and not missed
    check_stacks.check_parts_of_stacks(traced, graph, *sizes)


def test_errors():
    params, mesh = params_of(3), ftp.simulated_mesh((2, 2), ("pp", "tp"))
    pipe = ftp.Pipeline("pp", 2, "interleaved", chunks=2)
    with pytest.raises(SpecError, match="layers that follow each other, and chunks=2"):
        pipe.place(params, specs_of(None), mesh)
    with pytest.raises(SpecError, match="a stack of 3 layers for 4 stages"):
        ftp.Pipeline("pp", 2).place(params, specs_of(None), ftp.AbstractMesh((4,), ("pp",)))
    with pytest.raises(SpecError, match="has 'pp' alone on dim 0"):
        ftp.Pipeline("pp", 2).place(params, P(None, "pp"), mesh)
    by_pattern = ftp.Pipeline("pp", 2, stages=[[], ["emb", "head"]])
    placed = by_pattern.place(params, specs_of(None), mesh)
    assert placed["layers"]["up"] == P("pp") and repr(placed["emb"]) == "P(stage('pp', 1))"
