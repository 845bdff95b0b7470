"""Functions of placed arguments, an optimizer's update above all, equal one device's."""

from typing import Any

import optree
import pytest
import torch

import ftp
from ftp import P
from ftp.errors import CertificateError, InputError, SpecError
from ftp.pipeline import rounds
from ftp.pipeline.rounds import Rounds
from tests.pipeline.test_steps import zero_with_tp
from tests.support.staged_models import Model, plan_of


def optimizer() -> Any:
    return ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def updated(opt: Any):
    """Clipping by the norm of all gradients, and AdamW."""

    def update(params, grads, state):
        grads, norm = ftp.optim.clip_by_global_norm(grads, 0.1)
        params, state = opt.update(grads, state, params)
        return params, state, norm

    return update


def train(mesh, specs, batch_spec, pipe, model, steps: int, rows: int) -> Any:
    opt = optimizer()
    params = ftp.device_put(model.params(), mesh, specs)
    state_specs = opt.specs(model.params(), specs)
    state = ftp.device_put(opt.init(model.params()), mesh, state_specs)
    step = ftp.shard(model.loss, mesh, specs, batch_specs=batch_spec, pipeline=pipe)
    update = ftp.spmd(updated(opt), mesh, (specs, specs, state_specs), certify=True)
    batch = ftp.device_put(model.batch(rows), mesh, batch_spec)
    norms = []
    for _ in range(steps):
        loss, grads = step(params, *batch)
        params, state, norm = update(params, grads, state)
        norms.append(norm)
    assert ftp.specs_of(params) == specs
    return loss, params, norms, update.lower(params, grads, state)


def on_one_device(model, microbatches: int, steps: int, rows: int) -> Any:
    opt = optimizer()
    params, state = model.params(), opt.init(model.params())
    grad_fn = ftp.optim.accumulate(torch.func.grad_and_value(model.loss), microbatches)
    norms = []
    for _ in range(steps):
        grads, loss = grad_fn(params, *model.batch(rows))
        params, state, norm = updated(opt)(params, grads, state)
        norms.append(norm)
    return loss, params, norms


@pytest.mark.slow  # tests/pipeline/test_train_steps.py has the same as one step
@pytest.mark.parametrize("case", ["pp", "pp × ZeRO-3 × tp"])
def test_training_with_clipping_and_adamw(case):
    model = Model(3, tied=True, scaled=case == "pp")
    shape, axes = ((3,), ("pp",)) if case == "pp" else ((2, 2, 2), ("pp", "dp", "tp"))
    mesh, pipe = ftp.simulated_mesh(shape, axes), ftp.Pipeline("pp", 2)
    plan = plan_of(model.params(), zero_with_tp if len(axes) > 1 else lambda name: P())
    specs = pipe.place(model.params(), plan, mesh)
    batch_spec = P("dp") if len(axes) > 1 else P()
    loss, params, norms, lowered = train(mesh, specs, batch_spec, pipe, model, 4, 4)
    due_loss, due, due_norms = on_one_device(model, 2, 4, 4)
    torch.testing.assert_close([loss, *norms], [due_loss, *due_norms], rtol=1e-11, atol=1e-11)
    for a, b in zip(optree.tree_leaves(params), optree.tree_leaves(due), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    # Between stages nothing but numbers goes.
    shared = [name for names in lowered.program.rounds.shared for name, _ in names]
    assert shared and all(lowered.program.values[name].shape == () for name in shared)


def test_a_rank_initializes_its_stage_alone():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    mesh, key = ftp.simulated_mesh((2,), ("pp",)), ftp.random.key(0)
    _, params = ftp.functionalize(model)
    specs = ftp.Pipeline("pp", 2).place(params, P(), mesh)
    placed = ftp.init_params(model, key, mesh, specs)
    whole = ftp.init_params(model, key, mesh, P())
    for name, x in whole.items():
        assert torch.equal(placed[name], x) and ftp.specs_of(placed)[name] == specs[name]


def test_a_broken_round_is_not_certified(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr("ftp.api.staged_step.check_rounds", lambda *args: seen.append(args))
    model, mesh, opt = Model(2), ftp.AbstractMesh((2,), ("pp",)), optimizer()
    specs = ftp.Pipeline("pp", 2).place(model.params(), P(), mesh)
    params = model.params()
    state_specs = opt.specs(params, specs)
    update = ftp.spmd(updated(opt), mesh, (specs, specs, state_specs))
    update.lower(params, params, opt.init(params))
    traced, made, due, ranks = seen[0]
    rounds.check_rounds(traced, made, due, ranks)
    broken = [Rounds(made.subgraphs, (), made.results)]
    broken += [
        Rounds(made.subgraphs, tuple(s[1:] for s in made.shared), made.results),
        Rounds(made.subgraphs, made.shared, (made.results[1], made.results[0], *made.results[2:])),
    ]
    broken += [
        Rounds(
            tuple({k: p for k, p in own.items() if k != rank} for own in made.subgraphs),
            made.shared,
            made.results,
        )
        for rank in range(2)
    ]
    for mutant in broken:
        with pytest.raises((CertificateError, ValueError)):
            rounds.check_rounds(traced, mutant, due, ranks)


def test_specs_of_results():
    """As of every other program: a result twice has its spec twice, and a static one ``P()``."""
    mesh, pipe = ftp.AbstractMesh((2,), ("pp",)), ftp.Pipeline("pp", microbatches=2)
    params = {"layers": [torch.empty(4, 4, device="meta") for _ in range(2)]}
    specs = pipe.place(params, P(), mesh)

    def doubled(params):
        total = sum(x.sum() for x in params["layers"])
        return total, {"layers": [2 * x for x in params["layers"]]}, total, 3

    lowered = ftp.spmd(doubled, mesh, (specs,)).lower(params)
    assert lowered.out_specs == (P(), specs, P(), P())


def test_errors():
    mesh = ftp.simulated_mesh((2, 2), ("pp", "dp"))
    params = {"layers": [torch.ones(4, 2)] * 2}
    specs = ftp.Pipeline("pp", 2).place(params, P(), mesh)
    double = ftp.spmd(lambda p, x: (p, x), mesh, (specs, P(None, "pp")))
    with pytest.raises(SpecError, match="whose ranks are stages of a pipeline"):
        double(params, torch.ones(2, 2))
    with pytest.raises(InputError, match="check_inputs= does not go with stages"):
        ftp.spmd(lambda p: p, mesh, specs, check_inputs=True)
    other = ftp.Pipeline("dp", 2).place(params, P(), mesh)
    mixed = ftp.spmd(lambda p, q: (p, q), mesh, (specs, other))
    with pytest.raises(SpecError, match="give stages over dp and pp"):
        mixed(params, params)


def test_results_share_no_memory_with_arguments_or_each_other():
    mesh, params = ftp.simulated_mesh((2,), ("pp",)), [{"w": torch.randn(3, 4)} for _ in range(2)]
    specs = ftp.Pipeline("pp", microbatches=1).place(params, P(), mesh)

    def views(params):
        views = [layer["w"].t() for layer in params]
        norm = sum(layer["w"].sum() for layer in params)
        return views, params, [2 * x for x in views], [2 * x for x in views], norm, norm.view(1)

    found = ftp.spmd(views, mesh, (specs,))(params)
    leaves = torch.utils._pytree.tree_leaves((params, found))
    torch.testing.assert_close(found, views(params))
    assert len({x.untyped_storage().data_ptr() for x in leaves}) == len(leaves) == 12
