"""``reduce_dtype=torch.bfloat16`` with stages: gradients' terms are rounded, and nothing else."""

from typing import Any

import pytest
import torch
from few_or_many import slow_after
from launch import launch

import ftp
from ftp import P
from ftp.errors import InputError
from tests.pipeline.test_steps import tensor_parallel, zero_with_tp
from tests.support.staged_models import Model, plan_of

BF16 = torch.bfloat16
RANKS, COUNT, ROWS, COLUMNS = 2, 2, 12, 5
SPECS = {"whole": P(), "ZeRO-3": P("dp")}


def chain(params, x):
    """A weight for each stage, of ones: the gradient of each is the sum of the rows."""
    return ((x * params["layers"][0]["w"]).clamp(min=0) * params["layers"][1]["w"]).sum()


def train_chain(params, x):
    grads, loss = torch.func.grad_and_value(chain)(params, x)
    pairs = zip(params["layers"], grads["layers"], strict=True)
    return {"layers": [{"w": own["w"] - grad["w"]} for own, grad in pairs]}, loss


def rows() -> torch.Tensor:
    """Integers of more digits than bfloat16 has, whose sums float32 holds."""
    g = torch.Generator().manual_seed(0)
    return torch.randint(1000, 3000, (ROWS, COLUMNS), generator=g).float()


def due(spec: P, ranks: int) -> torch.Tensor:
    """The mean of the gradient over microbatches, from each rank's rounded terms.

    Args:
        ranks: that sum terms of their own.
    """
    each = [own.unflatten(0, (-1, COUNT)).sum(0) for own in rows().chunk(ranks)]
    terms = torch.stack(each if spec else [own.sum(0, keepdim=True) for own in each])
    total = terms.to(BF16).float().sum(0)  # per microbatch, if that is when it is reduced
    return (total.sum(0) if spec else total[0].to(BF16).float()) / COUNT


def run(name: str, kind: str, trains: bool) -> Any:
    make = ftp.make_mesh if kind == "process" else ftp.simulated_mesh
    options = {"device_type": "cpu"} if kind == "process" else {}
    mesh = make((2, RANKS), ("pp", "dp"), **options)
    params = {"layers": [{"w": torch.ones(COLUMNS)} for _ in range(2)]}
    pipe = ftp.Pipeline("pp", COUNT)
    specs = pipe.place(params, SPECS[name], mesh)
    step = (
        ftp.spmd(train_chain, mesh, (specs, P("dp")), pipeline=pipe, reduce_dtype=BF16)
        if trains
        else ftp.shard(chain, mesh, specs, batch_specs=P("dp"), pipeline=pipe, reduce_dtype=BF16)
    )
    held, x = ftp.device_put((params, rows()), mesh, (specs, P("dp")))
    out = step(held, x)
    loss, found = out[::-1] if trains else out
    found = ftp.device_get(found, mesh, specs)
    return float(loss), [(1 - w["w"] if trains else w["w"]).numpy() for w in found["layers"]]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("trains", [False, True])
def test_each_sum_over_ranks_is_of_rounded_terms(name, trains):
    """One rank's term is the whole sum where the simulator sums microbatches of all ranks."""
    loss, grads = run(name, "simulated", trains)
    assert loss == float(rows().sum()) / COUNT
    for grad in grads:
        assert torch.equal(torch.tensor(grad), due(SPECS[name], RANKS if SPECS[name] else 1))


@pytest.mark.dist
@pytest.mark.parametrize("name", slow_after(1, SPECS))
def test_processes_round_each_term_once(name):
    for rank in launch(run, 2 * RANKS, name, "process", True, timeout=180):
        assert rank.error is None, rank.error
        loss, grads = rank.value
        assert loss == float(rows().sum()) / COUNT
        for grad in grads:
            assert torch.equal(torch.tensor(grad), due(SPECS[name], RANKS))


def test_an_update_of_its_own_takes_no_gradient():
    mesh, params = ftp.AbstractMesh((2,), ("pp",)), {"layers": [{"w": torch.ones(3)}] * 2}
    specs = ftp.Pipeline("pp", COUNT).place(params, P(), mesh)
    with pytest.raises(InputError, match=r"reduce_dtype= does not go with stages .* pipeline="):
        ftp.spmd(lambda params: params, mesh, (specs,), reduce_dtype=BF16)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("spec_of", slow_after(1, [zero_with_tp, tensor_parallel]))
def test_gradients_alone_are_narrowed(schedule, spec_of):
    model = Model(4, tied=spec_of is zero_with_tp)
    pipe = ftp.Pipeline("pp", 2, schedule)
    mesh, params = ftp.AbstractMesh((2, 2, 2), ("pp", "dp", "tp")), model.params()
    specs = pipe.place(params, plan_of(params, spec_of), mesh)

    def collectives(**options):
        step = ftp.shard(
            model.loss, mesh, specs, batch_specs=P("dp"), pipeline=pipe, bucket=False, **options
        )
        lowered: Any = step.lower(params, *model.batch(4))
        return [c for rank in range(2) for c in lowered.collectives_of(rank)]

    wide, narrow = collectives(), collectives(reduce_dtype=BF16)
    reducing = ("all_reduce", "reduce_scatter")
    # Over dp gradients and numbers are summed, over tp activations and their gradients.
    gradients = [c for c in wide if c.op in reducing and "dp" in c.axes and c.global_shape]
    sent = [c for c in narrow if c.op == "all_to_all" and c.dtype == BF16]
    assert gradients and len(sent) == len(gradients)
    others = [c for c in wide if c not in gradients]
    assert len([c for c in narrow if c.dtype != BF16]) == len(others)
