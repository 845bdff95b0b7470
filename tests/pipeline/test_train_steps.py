"""A whole train step over a pipeline equals one device's step with ``optim.accumulate``."""

import copy
import re
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from few_or_many import slow_after
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.api import pipelined_step, pipelined_train_step
from ftp.errors import CertificateError, InputError, TraceError
from ftp.pipeline.train_step import cut_at_means
from ftp.pipeline.value_stages import with_constant_seeds
from ftp.planning.layers import repeats
from ftp.random.draws import keyed
from tests.pipeline.test_steps import zero_with_tp
from tests.support.staged_models import Model, plan_of

PIPE = ftp.Pipeline("pp", 2)


def adamw() -> Any:
    return ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def train_step(loss: Any, opt: Any, microbatches: int | None) -> Any:
    """Clipping by the norm of all gradients, and AdamW; without a number no accumulation."""
    grad = torch.func.grad_and_value(loss)
    if microbatches is not None:
        grad = ftp.optim.accumulate(grad, microbatches)

    def step(params, state, *batch):
        grads, loss = grad(params, *batch)
        grads, norm = ftp.optim.clip_by_global_norm(grads, 0.1)
        return *opt.update(grads, state, params), loss, norm

    return step


def check_steps(one_device: Any, step: Any, args: Any, batches: Any, rtol: float = 1e-10):
    """Both from ``args`` = (params, state), each batch in turn; all numbers are equal."""
    own: Any = args
    due: Any = args
    for batch in batches:
        *own, loss, norm = step(*own, *batch)
        *due, due_loss, due_norm = one_device(*due, *batch)
        torch.testing.assert_close([loss, norm], [due_loss, due_norm], rtol=rtol, atol=1e-12)
    for a, b in zip(optree.tree_leaves(own), optree.tree_leaves(due), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-10)


@pytest.mark.parametrize(
    ("accumulates", "layers", "shape"),
    [
        pytest.param(True, 2, (2, 2, 1), id="small"),
        *slow_after(0, [(accumulates, 3, (2, 2, 2)) for accumulates in (True, False)]),
    ],
)
def test_clipping_and_adamw_inside_stages(accumulates, layers, shape):
    model, opt, pipe = Model(layers, tied=True), adamw(), ftp.Pipeline("pp", 2, "zero_bubble")
    mesh, params = ftp.simulated_mesh(shape, ("pp", "dp", "tp")), model.params()
    specs = pipe.place(params, plan_of(params, zero_with_tp), mesh)
    state_specs = opt.specs(params, specs)
    step = ftp.spmd(
        train_step(model.loss, opt, 2 if accumulates else None),
        mesh,
        (specs, state_specs, P("dp"), P("dp")),
        pipeline=pipe,
        certify=True,
        donate=(0, 1),
    )
    args = (params, opt.init(params))
    placed = ftp.device_put(args, mesh, (specs, state_specs))
    lowered: Any = step.lower(*args, *model.batch(4))
    assert {stage for own in lowered.actions for _, stage, _ in own} == {0, 1}
    check_steps(train_step(model.loss, opt, 2), step, placed, [model.batch(4)] * 3)
    # The norm is of all stages: numbers alone cross them.
    shared = [name for names in lowered.update.program.rounds.shared for name, _ in names]
    assert shared and all(lowered.update.program.values[name].shape == () for name in shared)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 8))
                for _ in range(3)
            ]
        )
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = x + F.dropout(layer(x), 0.2)
        return self.head(x)


@pytest.mark.parametrize("steps", slow_after(1, [3, 20]))
def test_steps_with_dropout(steps):
    """Each microbatch draws from a key of its own, the same numbers however it is cut."""
    fn, params = ftp.functionalize(Dropped().double().train())
    opt, mesh = adamw(), ftp.simulated_mesh((2, 2), ("pp", "dp"))

    def loss(params, tokens, keys):
        logits = fn(params, tokens[:, :-1], rng=keys[0])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    specs = PIPE.place(params, P(), mesh)
    state_specs = opt.specs(params, specs)
    step = ftp.spmd(
        train_step(loss, opt, None), mesh, (specs, state_specs, P("dp"), P()), pipeline=PIPE
    )
    keys = ftp.random.split(ftp.random.key(0), steps)
    batches = [(torch.randint(11, (8, 6)), ftp.random.split(key, 2)) for key in keys]
    one_device = train_step(loss, opt, 2)
    check_steps(one_device, step, (params, opt.init(params)), batches)
    # With other keys the numbers are others, so that the comparison sees them.
    same = (batches[0][0], batches[0][1].flip(0))
    losses = [one_device(params, opt.init(params), *b)[2] for b in (batches[0], same)]
    assert not torch.equal(*losses)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_each_microbatch_draws_from_its_part_of_the_key(schedule):
    """``rng=True``: the model, and random functions beside it, on any mesh."""
    fn, params = ftp.functionalize(Dropped().double().train())
    pipe = ftp.Pipeline("pp", 4, schedule)

    def loss(params, tokens):
        logits = fn(params, tokens[:, :-1])
        noisy = logits + 0.1 * torch.randn(logits.shape, dtype=logits.dtype)
        return F.cross_entropy(noisy.flatten(0, 1), tokens[:, 1:].flatten())

    def with_rows(params, tokens, keys):
        return keyed(loss)(params, tokens, keys[0])

    one_device: Any = ftp.optim.accumulate(torch.func.grad_and_value(with_rows), 4)
    tokens = torch.randint(11, (8, 6))
    mesh = ftp.simulated_mesh((2, 2), ("pp", "dp"))
    specs = pipe.place(params, P(), mesh)
    step = ftp.shard(loss, mesh, specs, batch_specs=P("dp"), pipeline=pipe, rng=True, certify=True)
    losses = []
    for seed in range(2):
        key = ftp.random.key(seed)
        due, due_loss = one_device(params, tokens, ftp.random.split(key, 4))
        found = step(params, tokens, key)
        torch.testing.assert_close(found, (due_loss, due), rtol=1e-12, atol=1e-12)
        losses.append(due_loss)
    assert not torch.equal(*losses)
    assert step.lower(params, tokens, key).memory > 0
    whole: Any = ftp.spmd(
        torch.func.grad_and_value(loss), mesh, (specs, P("dp")), pipeline=pipe, rng=True
    )
    torch.testing.assert_close(whole(params, tokens, key), (due, due_loss), rtol=1e-12, atol=1e-12)
    assert whole.lower(params, tokens, key).bubble > 0


def moe(layer, x):
    weight, expert = (x @ layer["router"]).softmax(-1).max(-1)
    order = expert.argsort(stable=True)
    ends = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
    y = F.grouped_mm(
        F.grouped_mm(x[order], layer["up"], offs=ends).relu(), layer["down"], offs=ends
    )
    return x + torch.zeros_like(x).index_add(0, order, y * weight[order][:, None])


def test_tokens_that_travel_to_experts_in_stages():
    """The layers are traced apart too, to find their experts."""
    mesh = ftp.simulated_mesh((2, 2), ("pp", "dp"))
    shapes = {"router": (8, 4), "up": (4, 8, 16), "down": (4, 16, 8)}
    params = {
        f"layers.{i}.{name}": torch.randn(shape) / 3
        for i in range(2)
        for name, shape in shapes.items()
    }

    def loss(layer, params, x):
        for i in range(2):
            x = layer({name: params[f"layers.{i}.{name}"] for name in shapes}, x)
        return x.square().mean()

    travels = ftp.plans.send_tokens(moe, "dp", token_axes=("dp",))
    specs = ftp.plan(params, {"**.router": P(), "**.up": P("dp"), "**.down": P("dp")})
    specs, opt = PIPE.place(params, specs, mesh), adamw()
    state, cut = opt.init(params), opt.specs(params, specs)
    one = train_step(lambda *args: loss(moe, *args), opt, 2)
    whole = train_step(lambda *args: loss(travels, *args), opt, 2)
    step = ftp.spmd(whole, mesh, (specs, cut, P("dp")), pipeline=PIPE)
    check_steps(one, step, (params, state), [(torch.randn(8, 8),)] * 2, rtol=1e-3)


def test_arguments_that_are_no_batch():
    """A frozen table of a stage, a number and a vector for the update are no microbatches; a
    gradient may be written to.
    """

    def step(params, frozen, x, lr, bounds):
        def loss(p, x):
            for w, f in zip(p["layers"], frozen["layers"], strict=True):
                x = (x @ w * lr + f).tanh()
            return x.square().mean(), {"peak": x.abs().amax()}

        grads, (value, aux) = torch.func.grad_and_value(loss, has_aux=True)(params, x)
        for g in grads["layers"]:
            g.clamp_(bounds[0], bounds[1])
        return optree.tree_map(lambda p, g: p - lr * g, params, grads), value, aux

    def one_device(params, frozen, x, lr, bounds):
        halves = [x[0::2], x[1::2]]
        made = []
        for half in halves:

            def loss(p, half=half):
                y = half
                for w, f in zip(p["layers"], frozen["layers"], strict=True):
                    y = (y @ w * lr + f).tanh()
                return y.square().mean(), y.abs().amax()

            made.append(torch.func.grad_and_value(loss, has_aux=True)(params))
        grads, value, peak = (
            [(a + b) / 2 for a, b in zip(made[0][0]["layers"], made[1][0]["layers"], strict=True)],
            sum(m[1][0] for m in made) / 2,
            sum(m[1][1] for m in made) / 2,
        )
        new = [
            p - lr * g.clamp(bounds[0], bounds[1])
            for p, g in zip(params["layers"], grads, strict=True)
        ]
        return {"layers": new}, value, {"peak": peak}

    mesh = ftp.simulated_mesh((2, 2), ("pp", "dp"))
    double: dict[str, Any] = {"dtype": torch.float64}
    params = {"layers": [torch.randn(4, 4, **double) for _ in range(4)]}
    frozen = {"layers": [torch.randn(4, **double) for _ in range(4)]}
    specs, of_frozen = (PIPE.place(tree, P(), mesh) for tree in (params, frozen))
    run = ftp.spmd(
        step,
        mesh,
        (specs, of_frozen, P("dp"), P(), P()),
        pipeline=PIPE,
        certify=True,
    )
    bounds = torch.tensor([-2e-3, 2e-3], **double)
    args = (params, frozen, torch.randn(8, 4, **double), torch.tensor(0.7, **double), bounds)
    torch.testing.assert_close(run(*args), one_device(*args), rtol=1e-12, atol=1e-12)
    clipped = (run(*args)[0]["layers"][0] - params["layers"][0]).abs() / 0.7
    assert (clipped > 1.99e-3).any() and clipped.max() < 2.01e-3


def test_muon_by_owners_inside_stages():
    """Matrices of a stage are orthogonalized by its ranks; none leaves the stage."""
    opt = ftp.optim.from_torch(torch.optim.Muon, lr=1e-2, owned=True)
    params = {"layers": [{k: torch.randn(8, 8) / 3 for k in ("up", "down")} for _ in range(2)]}

    def loss(params, x):
        for layer in params["layers"]:
            x = x + torch.tanh(x @ layer["up"]) @ layer["down"]
        return x.square().mean()

    def step(params, state, x):
        grads, value = ftp.optim.accumulate(torch.func.grad_and_value(loss), 2)(params, x)
        return *opt.update(grads, state, params), value

    mesh, args = ftp.simulated_mesh((2, 2), ("pp", "dp")), (params, opt.init(params))
    specs = PIPE.place(params, P("dp"), mesh)
    run: Any = ftp.spmd(step, mesh, (specs, opt.specs(params, specs), P("dp")), pipeline=PIPE)
    x = torch.randn(8, 8)
    # Muon rounds matrices to bfloat16.
    torch.testing.assert_close(run(*args, x), step(*args, x), rtol=2e-2, atol=2e-3)
    sent = run.lower(*args, x).update.collectives_of(0)
    assert [(c.op, c.axes) for c in sent] == [("all_to_all", ("dp",))] * 2


def test_what_accumulate_is_not_given_is_of_the_whole_batch():
    """A size, and the batch itself where the loss finds it outside of its arguments."""
    double: dict[str, Any] = {"dtype": torch.float64}
    params = {"layers": [torch.randn(4, 4, **double) for _ in range(4)]}

    def step(params, x, table):
        rows, outer = x.shape[0], x

        def loss(p, x, again):
            for w in p["layers"]:
                x = (x @ w).tanh()
            return (x * again - outer.mean(0)).square().sum() / rows

        grads, loss_ = ftp.optim.accumulate(torch.func.grad_and_value(loss), 2)(params, x, x)
        grads = optree.tree_map(lambda g: g * rows, grads)
        return optree.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss_, table

    mesh = ftp.simulated_mesh((2, 2), ("pp", "dp"))
    in_specs = (PIPE.place(params, P(), mesh), P("dp"), P())
    run = ftp.spmd(step, mesh, in_specs, pipeline=PIPE, certify=True)
    args = (params, torch.randn(8, 4, **double), torch.randn(2))
    torch.testing.assert_close(run(*args), step(*args), rtol=1e-12, atol=1e-12)


def test_report():
    model, opt, mesh = Model(4), adamw(), ftp.AbstractMesh((2, 2), ("pp", "dp"))
    params: Any = model.params()
    specs = PIPE.place(params, P(), mesh)
    in_specs = (specs, opt.specs(params, specs), P("dp"), P("dp"))
    step = ftp.spmd(train_step(model.loss, opt, None), mesh, in_specs, pipeline=PIPE)
    args = (params, opt.init(params), *model.batch(8))
    lowered: Any = step.lower(*args)
    assert lowered.ideal_bubble == 1 / 3 and "then, once a step: program of stages" in str(lowered)
    ops = [c.op for c in lowered.collectives_of(0)]
    assert ops.index("send") < ops.index("all_reduce") < ops.index("broadcast")
    alone: Any = ftp.shard(model.loss, mesh, specs, batch_specs=P("dp"), pipeline=PIPE)
    of_gradient = alone.lower(params, *model.batch(8))
    held = sum(x.numel() * x.itemsize for x in optree.tree_leaves(params)) // 2
    for whole, part in zip(lowered.memory_by_rank, of_gradient.memory_by_rank, strict=True):
        assert whole > part + held  # two moments of the stage's parameters, near enough
    assert lowered.out_specs[0] == specs and lowered.cost() > of_gradient.cost()


@pytest.mark.slow
def test_errors():
    model, mesh = Model(2), ftp.simulated_mesh((2,), ("pp",))
    params = model.params()
    specs = PIPE.place(params, P(), mesh)
    grad = torch.func.grad_and_value(model.loss)

    def refused(fn, error, text, *args, **options):
        step = ftp.spmd(fn, mesh, (specs, *[P()] * len(args)), pipeline=PIPE, **options)
        with pytest.raises(error, match=re.escape(text)):
            step(params, *args)

    batch = model.batch(4)
    tokens, _ = batch
    refused(model.loss, InputError, "takes no gradient", *batch)
    refused(lambda p, *b: (grad(p, *b), grad(p, *b)), InputError, "takes 2 gradients", *batch)
    other = ftp.optim.accumulate(grad, 4)
    refused(other, InputError, "accumulate(grad_fn, 4) in a step with a pipeline of 2", *batch)
    cut = ftp.optim.accumulate(grad, 2)
    shifted = lambda p, x, y: cut(p, x + 0, y)  # noqa: E731
    refused(shifted, InputError, "accumulate is given a tensor that the step computes", *batch)
    reads = lambda p, x, y: (grad(p, x, y), x.sum())  # noqa: E731
    refused(reads, TraceError, "is a batch argument that the step also reads outside", *batch)
    counts = lambda p, x, y: (grad(p, x, y)[1] / x.shape[0], x.shape[0])  # noqa: E731
    refused(counts, InputError, "depends on the size of the batch", *batch)
    cast = lambda p, x, y: grad(optree.tree_map(lambda w: 2 * w, p), x, y)  # noqa: E731
    refused(cast, InputError, "is of a tensor that the step computes", *batch)

    def rows(p, x):
        return torch.func.vmap(lambda row: torch.func.grad(model.loss)(p, row[None], row[None]))(x)

    refused(rows, TraceError, "within torch.func.vmap or another transform", tokens)
    whole = torch.func.grad_and_value(lambda p, *b: (model.loss(p, *b), b[0].sum()), has_aux=True)
    refused(whole, InputError, "returns a tensor of torch.int64", *batch)
    gradients = lambda p, *b: grad(p, *b)[0]  # noqa: E731
    refused(ftp.optim.accumulate(gradients, 2), InputError, "returns only gradients", *batch)
    odd = model.batch(3)
    refused(grad, InputError, "do not divide into 2 microbatches", *odd)
    key = ftp.random.key(0)
    drawn = ftp.spmd(cut, mesh, (specs, P(), P()), pipeline=PIPE, rng=True)
    with pytest.raises(InputError, match="microbatches draw from one key in turn"):
        drawn(params, *batch, key)
    dropped = lambda p, *b: model.loss(p, *b) * torch.rand(())  # noqa: E731
    of_dropped = torch.func.grad_and_value(dropped)
    noisy = lambda p, *b: (of_dropped(p, *b), torch.randn(2))  # noqa: E731
    drawn = ftp.spmd(noisy, mesh, (specs, P(), P()), pipeline=PIPE, rng=True)
    with pytest.raises(TraceError, match="is a batch argument that the step also reads"):
        drawn(params, *batch, key)
    draws = ftp.shard(model.loss, mesh, specs, pipeline=PIPE, rng=True)
    with pytest.raises(InputError, match="takes a key"):
        draws(params, *batch, torch.ones(2))


def filled_with_two(gm):
    made = with_constant_seeds(gm)
    for node in made.graph.nodes:
        if node.target is torch.ops.aten.full.default and node.args == ([], 1):
            node.args = ([], 2)
    return made


def with_means(parts):
    return replace(parts, means=parts.means[::-1])


def with_leaves(parts):
    return replace(parts, leaves=parts.leaves[::-1])


def with_update(parts):
    graph = copy.deepcopy(parts.update.graph)
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    node.args = (node.args[0], node.args[0])
    return replace(parts, update=torch.fx.GraphModule({}, graph))


def with_microbatch(parts):
    graph = copy.deepcopy(parts.microbatch.graph)
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
    node.args = node.args[::-1]
    return replace(parts, microbatch=torch.fx.GraphModule({}, graph))


@pytest.mark.parametrize(
    "mutant", [filled_with_two, with_means, with_leaves, with_update, with_microbatch]
)
def test_a_wrong_rewrite_of_the_traced_step_is_refused(mutant, monkeypatch):
    """The seeds of gradients, and the cut between the microbatches and what follows."""
    if mutant is filled_with_two:
        monkeypatch.setattr(pipelined_step, "with_constant_seeds", mutant)
    else:
        monkeypatch.setattr(
            pipelined_train_step, "cut_at_means", lambda *args: mutant(cut_at_means(*args))
        )
    params = {"layers": [{"w": torch.randn(4, 4)} for _ in range(2)]}

    def loss(params, x):
        for layer in params["layers"]:
            x = x @ layer["w"]
        return x.square().mean()

    def update(params, x):
        grads, loss_ = torch.func.grad_and_value(loss)(params, x)
        return optree.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss_

    mesh = ftp.simulated_mesh((2,), ("pp",))
    step: Any = ftp.spmd(update, mesh, (PIPE.place(params, P(), mesh), P()), pipeline=PIPE)
    with pytest.raises(CertificateError):
        step.lower(params, torch.randn(4, 4))


def programs_of(lowered: Any) -> dict[Any, Any]:
    return {**lowered._program.subgraphs, **lowered.update.program.subgraphs}


def of_18_layers(shape: tuple[int, ...], axes: tuple[str, ...], spec_of: Any) -> Any:
    """A step of two stages with nine layers each, its arguments and batch, and one device's."""
    model, opt = Model(18), adamw()
    mesh, params = ftp.simulated_mesh(shape, axes), model.params()
    specs = PIPE.place(params, plan_of(params, spec_of), mesh)
    of_batch = P("dp" if "dp" in axes else None)
    in_specs = (specs, opt.specs(params, specs), of_batch, of_batch)
    one_device = train_step(model.loss, opt, 2)
    step = ftp.spmd(one_device, mesh, in_specs, pipeline=PIPE)
    return step, (params, opt.init(params)), model.batch(4), one_device


def test_equal_layers_of_stages_are_planned_as_one():
    """Also in backward passes and updates, whose inputs have no layer in their names."""
    step, args, batch, _ = of_18_layers((2,), ("pp",), lambda _: P())
    for (kind, _), program in programs_of(step.lower(*args, *batch)).items():
        assert program.plan.alike > 2 or kind not in ("F", "B", 0)


@pytest.mark.slow
def test_stages_planned_as_one_layer_equal_one_device(monkeypatch: pytest.MonkeyPatch):
    step, args, batch, one_device = of_18_layers((2, 2, 2), ("pp", "dp", "tp"), zero_with_tp)
    folded: Any = step.lower(*args, *batch)
    check_steps(one_device, step, args, [batch])
    monkeypatch.setattr(repeats, "FEWEST", 10**9)
    again, *_ = of_18_layers((2, 2, 2), ("pp", "dp", "tp"), zero_with_tp)
    whole = again.lower(*args, *batch)
    for key, program in programs_of(whole).items():
        assert not program.plan.alike
        assert programs_of(folded)[key].plan.cost == pytest.approx(program.plan.cost, rel=1e-12)
    assert folded.memory_by_rank == whole.memory_by_rank


def test_stages_of_equal_layers_share_the_programs_of_their_updates():
    """Layers 9 and 10 too: a clipped norm has layer 9 before layer 10, parameters are sorted by
    name.
    """
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12)]
    fn, params = ftp.functionalize(nn.Sequential(*blocks).double())
    opt, mesh = adamw(), ftp.simulated_mesh((4,), ("pp",))
    inner = [[f"{i}.**" for i in own] for own in (range(7), (7, 8), (9, 10), (11,))]
    pipe = ftp.Pipeline("pp", 4, stages=inner)
    specs = pipe.place(params, P(), mesh)
    step: Any = ftp.spmd(
        train_step(lambda p, x: fn(p, x).square().mean(), opt, 4),
        mesh,
        (specs, opt.specs(params, specs), P()),
        pipeline=pipe,
    )
    x = torch.ones(4, 4, dtype=torch.float64)
    programs = programs_of(step.lower(params, opt.init(params), x))
    for key in ("F", 1), ("B", 1), (0, 1), (1, 1):
        assert programs[key] is programs[key[0], 2], key
