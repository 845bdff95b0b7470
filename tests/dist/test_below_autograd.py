"""Steps on processes run below autograd, but not where that would change a result."""

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch.autograd import forward_ad

import ftp
from ftp import P

pytestmark = pytest.mark.dist


def _of_kernel():
    """An op whose kernel calls autograd, as a backward op does that computes its forward anew."""
    library = torch.library.Library("tests_below", "DEF")
    library.define("derivative(Tensor x, Tensor g) -> Tensor")

    def derivative(x, g):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.sin() * x, x, g)[0]

    library.impl("derivative", derivative, "CompositeExplicitAutograd")
    torch.library.register_fake("tests_below::derivative", lambda x, g: torch.empty_like(x))
    op = torch.ops.tests_below.derivative
    ftp.rule(op.default, "a b, a b -> a b", linear=[(1,)])
    mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    step = ftp.spmd(lambda x: op(x, x).sum(), mesh, P("dp"), P())
    error = float(abs(step(ftp.device_put(x, mesh, P("dp"))) - op(x, x).sum()))
    library._destroy()
    dist.barrier()
    ftp.destroy_process_group()
    return error


def _of_tangents():
    mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    step = ftp.spmd(lambda x: (x.sin() * x, x.sum()), mesh, P("dp"), (P("dp"), P()))
    own = ftp.device_put(x, mesh, P("dp"))
    step(own)
    with forward_ad.dual_level():
        made = step(forward_ad.make_dual(own, torch.ones_like(own)))[0]
        tangent = forward_ad.unpack_dual(made).tangent
    error = float((tangent - (own.cos() * own + own.sin())).abs().max())
    dist.barrier()
    ftp.destroy_process_group()
    return error


@pytest.mark.parametrize("run", [_of_kernel, _of_tangents])
def test_results_are_those_of_autograd(run):
    for rank in launch(run, 2, timeout=120):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        assert rank.value < 1e-14
