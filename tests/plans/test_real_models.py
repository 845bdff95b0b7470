"""Loss and every gradient of models that others wrote, on simulated meshes, against plain torch
on one device.
"""

import itertools
from typing import Any

import model_table
import pytest
import torch
from few_or_many import slow_unless
from real_models import (
    MODULES,
    RESNET_CUTS,
    Case,
    OldDouble,
    ResNet,
    float64,
    randn,
    tokens,
    transformer,
    with_function,
)
from torch.nn import functional as F

import ftp
from ftp import P

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "tp2": ((2,), ("tp",)),
    "tp3": ((3,), ("tp",)),
    "tp4": ((4,), ("tp",)),
    "dp2×tp2": ((2, 2), ("dp", "tp")),
}


def check(case: Case, mesh: str) -> None:
    fn, params = ftp.functionalize(case.model)
    expected = case.loss(lambda params, *args, **kwargs: case.model(*args, **kwargs))(
        params, *case.batch
    )
    trained = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(expected, list(trained.values()), allow_unused=True)
    shape, axes = MESHES[mesh]
    plan = ftp.plan(params, case.cuts)
    batch_specs = case.batch_specs if "dp" in axes else P()
    step = ftp.shard(case.loss(fn), ftp.simulated_mesh(shape, axes), plan, batch_specs=batch_specs)
    loss, grads = step(params, *case.batch)
    assert grads.keys() == trained.keys()
    close("the loss", loss, expected.detach(), float(expected.detach().abs()), case.tolerance)
    reference = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(trained.items(), found, strict=True)
    }
    largest = max(float(g.abs().max()) for g in reference.values())
    for name, grad in reference.items():
        close(
            f"gradient of {name}",
            grads[name],
            grad,
            max(float(grad.abs().max()), 1e-3 * largest),
            case.tolerance,
        )


def close(
    what: str, found: torch.Tensor, expected: torch.Tensor, scale: float, tolerance: float
) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    error = float((found - expected).abs().max()) / scale
    assert error <= tolerance, f"{what} is off by {error:.1e}"


@pytest.mark.cases_by_default(6)
@pytest.mark.parametrize(
    ("name", "mesh"),
    slow_unless(
        lambda name, mesh: mesh == ("tp3", "dp2×tp2")[list(MODULES).index(name) % 2],
        itertools.product(MODULES, MESHES),
    ),
)
def test_modules(name: str, mesh: str):
    check(MODULES[name](), mesh)


def test_a_function_with_ctx_in_forward():
    check(with_function(OldDouble), "tp2")


RESNET_MESHES = MESHES | {"dp3": ((3,), ("dp",)), "dp3×tp2": ((3, 2), ("dp", "tp"))}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("mesh", slow_unless(lambda mesh: mesh in MESHES, RESNET_MESHES))
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_resnet_with_its_buffers(train: bool, mesh: str):
    """Seven images, which no mesh divides."""
    model = float64(ResNet()).train(train)
    x, y = randn(7, 3, 8, 8), tokens(7, 7)
    fn, params, buffers = ftp.functionalize(model, buffers=True)
    buffers = {name: b.clone() for name, b in buffers.items()}

    def loss(params: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits, new = fn(params, buffers, x)
        return F.cross_entropy(logits, y), new

    shape, axes = RESNET_MESHES[mesh]
    cut = P("dp") if "dp" in axes else P()
    plan = ftp.plan(params, RESNET_CUTS if "tp" in axes else {})
    step = ftp.shard(
        loss, ftp.simulated_mesh(shape, axes), plan, batch_specs=(P(), cut, cut), has_aux=True
    )
    (value, new), grads = step(params, buffers, x, y)
    expected = F.cross_entropy(model(x), y)
    found = torch.autograd.grad(expected, list(model.parameters()))
    close("the loss", value, expected.detach(), float(expected.detach()), 1e-10)
    largest = max(float(g.abs().max()) for g in found)
    for (name, _), grad in zip(model.named_parameters(), found, strict=True):
        close(
            f"gradient of {name}",
            grads[name],
            grad,
            max(float(grad.abs().max()), 1e-3 * largest),
            1e-10,
        )
    for name, buffer in model.named_buffers():
        close(f"buffer {name}", new[name], buffer, max(float(buffer.abs().max()), 1.0), 1e-10)


# Two tiny models on the mesh where nothing divides; the table is slow.
FEW = {("Llama", "sdpa", "tp3"), ("BERT", "eager", "tp3")}
TABLE = [(name, attention, mesh) for name, attention in model_table.forms() for mesh in MESHES]


@pytest.mark.parametrize(
    ("name", "attention", "mesh"),
    [
        pytest.param(*row, marks=() if row in FEW else pytest.mark.slow, id=" | ".join(row))
        for row in TABLE
    ],
)
def test_transformers(name: str, attention: str, mesh: str):
    pytest.importorskip("transformers")
    check(transformer(name, attention), mesh)


def test_the_table_of_models():
    """``python tests/support/model_table.py`` runs what is missing and writes both files."""
    results = model_table.read()
    assert set(results.values()) == {model_table.EQUAL}
    assert list(results) == list(model_table.rows())
    assert model_table.DOCS.read_text() == model_table.document()
