"""Public programs: loss and every gradient of one certified step equal plain torch on one
device.
"""

import programs_table
import pytest
import torch
from public_language import LANGUAGE
from public_methods import METHODS
from public_programs import reference, specs_of
from public_recent import RECENT
from public_science import SCIENCE
from public_signals import SIGNALS
from public_solvers import SOLVERS
from public_structure import STRUCTURE
from public_unseen import UNSEEN
from public_values import VALUES
from public_vision import VISION

import ftp
from ftp import P

PROGRAMS = LANGUAGE | VISION | SCIENCE | STRUCTURE | METHODS | SIGNALS | RECENT | VALUES | UNSEEN
PROGRAMS |= SOLVERS
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "tp2": ((2,), ("tp",)),
    "tp3": ((3,), ("tp",)),
    "dp2×tp2": ((2, 2), ("dp", "tp")),
    "ZeRO-3": ((2,), ("dp",)),
}
TOLERANCE = 1e-10  # of the largest gradient, or of a parameter's own


def check(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    program = PROGRAMS[name]()
    shape, axes = MESHES[mesh]
    step = ftp.shard(
        program.loss,
        ftp.simulated_mesh(shape, axes),
        specs_of(program, axes[-1]),
        batch_specs=program.batch_specs if "dp" in axes else P(),
        certify=True,
    )
    loss, grads = step(program.params, *program.batch)
    expected, gradients = reference(program)
    assert abs(float(loss - expected)) <= TOLERANCE * max(1.0, abs(float(expected)))
    assert grads.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    assert largest > 0, "the program has no gradient"
    for path, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        error = float((grads[path] - gradient).abs().max()) / scale
        assert error <= TOLERANCE, f"the gradient of {path} is off by {error:.1e}"


FEW = {("nanoGPT", "dp2×tp2"), ("Hessian-vector product", "tp2")}


# What torch says of the programs themselves.
@pytest.mark.cases_by_default(1)
@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True:UserWarning",
    "ignore:Sparse CSR tensor support:UserWarning",
    "ignore:(.|\\n)*as a Python number:ftp.errors.ReadWarning",
)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(n, m, marks=() if (n, m) in FEW else pytest.mark.slow, id=f"{n} | {m}")
        for n in PROGRAMS
        for m in MESHES
    ],
)
def test_equal_to_one_device(name: str, mesh: str):
    check(name, mesh)


def test_the_table_of_programs():
    """``python tests/support/programs_table.py`` runs what is missing."""
    results = programs_table.read()
    assert list(results) == list(PROGRAMS)
    assert all(found == dict.fromkeys(MESHES, "equal") for found in results.values())
