"""What ``ftp.testing`` ships: strategies, programs against one device, and the guide to them."""

import re
import subprocess
import sys
from pathlib import Path

import own_process  # type: ignore[import-not-found]
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.rules.own import RULES
from ftp.rules.registry import make
from ftp.testing import (
    assert_equal_to_one_device,
    check_rule,
    meshes,
    op_inputs,
    shapes,
    spec_trees,
    specs,
    tensors,
)

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[2]
QUICK = settings(max_examples=30, derandomize=True, database=None)


@QUICK
@given(st.data())
def test_specs_fit_their_shapes(data: st.DataObject):
    mesh = data.draw(meshes())
    x = data.draw(tensors(shapes(min_size=0)))
    spec = data.draw(specs(x.shape, mesh))
    torch.testing.assert_close(ftp.device_get(ftp.device_put(x, mesh, spec), mesh, spec), x)
    tree = {"w": x, "n": 3}
    assert set(data.draw(spec_trees(tree, mesh))) == {"w", "n"}


@QUICK
@given(op_inputs(aten.mm.default, [((torch.ones(4, 5).double(), torch.ones(5, 3).double()), {})]))
def test_inputs_of_ops_are_calls(sample):
    (x, y), kwargs = sample
    assert x.shape[1] == y.shape[0] and not kwargs
    check_rule(aten.mm.default, [sample], ranks=[2], pairs=False)


def loss(params, batch):
    return torch.nn.functional.cross_entropy(
        (batch @ params["w"]).relu() @ params["head"], torch.arange(5) % 3
    )


PARAMS = {
    "w": torch.randn(3, 4, dtype=torch.float64),
    "head": torch.randn(4, 3, dtype=torch.float64),
}
BATCH = torch.randn(5, 3, dtype=torch.float64)


def test_a_program_equals_one_device():
    assert_equal_to_one_device(loss, (PARAMS, BATCH), examples=15)


def test_integer_results_and_static_arguments():
    assert_equal_to_one_device(
        lambda x, n: {"top": x.argmax(-1), "scaled": x * n}, (BATCH, 3), examples=8
    )


def test_given_specs_and_meshes():
    mesh = ftp.simulated_mesh((2,), ("dp",))
    assert_equal_to_one_device(
        loss, (PARAMS, BATCH), meshes=[mesh], in_specs=(P(), P("dp")), examples=2
    )


def test_a_wrong_rule_is_seen_in_a_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RULES, aten.cumsum.default, make("a b -> a b"))
    with pytest.raises(AssertionError) as error:
        assert_equal_to_one_device(
            lambda tree: {"y": tree["x"].cumsum(0)}, ({"x": BATCH},), examples=40
        )
    said = str(error.value)
    assert (
        "differs from one device on a mesh of a=2, with specs\n  args[0]['x'] (5, 3): P('a'" in said
    )
    assert re.search(
        r"result\['y'\]: max error [\d.e+-]+, at \(\d, \d\): -?[\d.]+, on one device -?[\d.]+", said
    ), said


class Doubled(torch.autograd.Function):
    """Twice its input, with a gradient that is summed along the first dim: what one device makes
    of it is right by definition.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].cumsum(0)


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch):
    def squared(x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x).square()  # so that the gradient that cumsum reads is cut as x is

    monkeypatch.setitem(RULES, aten.cumsum.default, make("a b -> a b"))
    assert_equal_to_one_device(squared, (BATCH,), examples=20, gradients=False)
    with pytest.raises(AssertionError, match=r"in\n  the gradient of args\[0\]: max error"):
        assert_equal_to_one_device(squared, (BATCH,), examples=20)


def test_rounding_is_no_difference():
    """Sums of single and half precision that cancel: fixed bounds would refuse them, by as much as
    the kernels' order of addition is another one.
    """
    big = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 1e4
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.cat([big / 4e3 if dtype is torch.float16 else big] * 2).to(dtype)
        x[4000:] *= -1

        def total(x):
            return {"sum": x.sum(), "mean": (x.square().mean() - x.square().mean()).exp()}

        assert_equal_to_one_device(total, (x.view(8, -1).roll(3, 1),), examples=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_are_seen_below_double_precision(dtype, monkeypatch: pytest.MonkeyPatch):
    x, mesh = torch.linspace(0.5, 2, 16).to(dtype), ftp.simulated_mesh((2,), ("tp",))

    def check(fn, x):
        assert_equal_to_one_device(fn, (x,), meshes=[mesh], in_specs=P("tp"), examples=2)

    check(lambda x: x.cumsum(0), x)
    monkeypatch.setitem(RULES, aten.cumsum.default, make("a -> a"))
    with pytest.raises(AssertionError, match=r"result: max error.*\n  cumsum on the rank at tp=1"):
        check(lambda x: x.cumsum(0), x)


def test_without_hypothesis():
    program = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import torch, ftp\n"
        "for use in (lambda: ftp.testing.meshes, lambda:"
        " ftp.testing.assert_equal_to_one_device(torch.sin, (torch.ones(3),))):\n"
        "    try: use()\n"
        "    except ImportError as e: print(e)\n"
    )
    done = own_process.run(program)
    assert done.stdout.count("pip install hypothesis") == 2, done.stdout


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'mesh'"):
        _ = ftp.testing.mesh


@pytest.mark.slow
def test_the_guide_runs(tmp_path: Path):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "testing.md").read_text(), flags=re.M | re.S
    )
    (tmp_path / "test_guide.py").write_text("\n".join(blocks))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=",
        "test_guide.py",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**__import__("os").environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"{len(re.findall('^def test_', chr(10).join(blocks), flags=re.M))} passed" in done.stdout
    )
