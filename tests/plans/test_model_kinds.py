"""``ftp.from_hf`` of many kinds of models: most of each is cut, and each equals one device."""

import warnings
from typing import Any

import pytest
import torch
from few_or_many import slow_unless
from model_kinds import KINDS, case_of, model_of
from torch import nn

import ftp
from ftp import P
from ftp.errors import PlanWarning
from tests.plans.test_real_models import close  # type: ignore[import-not-found]

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "tp2": ((2,), ("tp",)),
    "tp3": ((3,), ("tp",)),
    "dp2×tp2": ((2, 2), ("dp", "tp")),
    "ZeRO-3": ((2,), ("dp",)),
}


def plan_of(case: Any) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # norms are much of a model of width 16
        return ftp.from_hf(case.model)


def check_step(case: Any, step: Any, params: Any, batch: Any) -> None:
    """Loss and every gradient equal plain torch on one device."""
    expected = case.loss(lambda params, **batch: case.model(**batch))(params, batch)
    trained = {path: p for path, p in case.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(expected, list(trained.values()), allow_unused=True)
    loss, grads = step(params, batch)
    close("the loss", loss, expected.detach(), float(expected.detach().abs()), 1e-10)
    reference = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(trained.items(), found, strict=True)
    }
    largest = max(float(g.abs().max()) for g in reference.values())
    for path, grad in reference.items():
        scale = max(float(grad.abs().max()), 1e-3 * largest)
        close(f"gradient of {path}", grads[path], grad, scale, 1e-10)


def check(kind: str, mesh: str) -> None:
    """One certified step equals one device."""
    case = case_of(kind)
    (batch,) = case.batch
    shape, axes = MESHES[mesh]
    specs, constraints = plan_of(case)
    fn, params = ftp.functionalize(case.model, constraints=constraints if "tp" in axes else {})
    if mesh == "ZeRO-3":
        specs = {path: P("dp") if p.ndim else P() for path, p in params.items()}
    batch_specs = P("dp") if "dp" in axes else P()
    step = ftp.shard(
        case.loss(fn),
        ftp.simulated_mesh(shape, axes),
        specs,
        batch_specs=batch_specs,
        certify=True,
    )
    check_step(case, step, params, batch)


FEW = {("gpt_oss", "tp3"), ("deepseek_v3", "tp2")}


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(k, m, marks=() if (k, m) in FEW else pytest.mark.slow, id=f"{k} | {m}")
        for k in KINDS
        for m in MESHES
    ],
)
def test_equal_to_one_device(kind: str, mesh: str):
    pytest.importorskip("transformers")
    check(kind, mesh)


OF_TOKENS = [k for k in KINDS if KINDS[k][1] != "ForImageClassification" and k != "whisper"]
BY_LENGTH = {"mamba", "rwkv", "recurrent_gemma"}  # Python loops over the positions


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "gpt2", OF_TOKENS))
def test_lengths_share_a_plan(kind: str):
    pytest.importorskip("transformers")
    case = case_of(kind)
    (batch,) = case.batch
    size = batch["input_ids"].shape[1]
    specs, constraints = plan_of(case)
    fn, params = ftp.functionalize(case.model, constraints=constraints)
    step = ftp.shard(case.loss(fn), ftp.simulated_mesh((2,), ("tp",)), specs)
    for n in (size, size - 1, size - 2, size + 2, size + 5, size - 3):
        cut = {k: torch.cat([x, x], 1)[:, :n].contiguous() for k, x in batch.items()}
        check_step(case, step, params, cut)
    assert bool(step.shapes.one_by_one) == (kind in BY_LENGTH), step.shapes


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_of_the_layers_is_cut(kind: str):
    """But for routers, low-rank projections, positions and convolutions that mix few elements."""
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        model = model_of(kind)
        specs, _ = ftp.from_hf(model)
    assert "matmuls' work" in str(specs).splitlines()[-1]
    whole = {
        path
        for path, p in model.named_parameters()
        if not specs.get(path, P("tp"))
        and any(element.isdigit() for element in path.split("."))
        and isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Linear)
        and p.ndim == 2
    }
    assert all("_a_proj" in path or "gate" in path or "router" in path for path in whole), whole
