"""Models of transformers, unedited, in two stages."""

from typing import Any

import pytest
import torch

import ftp
from ftp import P
from tests.support.public_language import nanogpt
from tests.support.real_models import transformer

# Experts are cut on "tp": expert parallelism inside the stages.
NAMES = {"T5": False, "Mixtral, experts": True, "GPT-2": True, "Llama": False, "ViT": False}
OFTEN = ("T5", "Mixtral, experts")


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_equals_one_device(name):
    pytest.importorskip("transformers", reason="of the extra 'models'")
    case = transformer(name, "eager")
    fn, params = ftp.functionalize(case.model)
    loss_fn, inside = case.loss(fn), NAMES[name]
    mesh = ftp.simulated_mesh((2, 2) if inside else (2,), ("pp", "tp") if inside else ("pp",))
    pipe = ftp.Pipeline("pp", 2, "zero_bubble" if inside else "1f1b")
    specs = pipe.place(params, ftp.plan(params, case.cuts) if inside else P(), mesh)
    step = ftp.shard(loss_fn, mesh, specs, pipeline=pipe, certify=True)
    loss, grads = step(params, *case.batch)
    one_device: Any = ftp.optim.accumulate(torch.func.grad_and_value(loss_fn), 2)
    due, due_loss = one_device(params, *case.batch)
    torch.testing.assert_close((loss, grads), (due_loss, due), rtol=1e-10, atol=1e-10)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_nanogpt_equals_one_device(schedule):
    """The embedding, which is the head too, is in the first and the last stage."""
    program = nanogpt()
    pipe = ftp.Pipeline("pp", 2, schedule)
    mesh = ftp.simulated_mesh(2, "pp")
    specs = pipe.place(program.params, P(), mesh)
    step = ftp.shard(program.loss, mesh, specs, pipeline=pipe, certify=True)
    one_device: Any = ftp.optim.accumulate(torch.func.grad_and_value(program.loss), 2)
    due, due_loss = one_device(program.params, *program.batch)
    found = step(program.params, *program.batch)
    torch.testing.assert_close(found, (due_loss, due), rtol=1e-12, atol=1e-12)
