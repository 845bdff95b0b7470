"""Sums of values whose strides differ between calls or ranks."""

import pytest
import torch
from launch import launch

import ftp
from ftp import P
from ftp.runtime import gloo_calls

pytestmark = pytest.mark.dist


def _errors(dtype: torch.dtype, is_gpu: bool) -> list[float]:
    """The largest error of each call of a step; sums are issued as on GPUs if ``is_gpu``."""
    if is_gpu:
        gloo_calls._issue = lambda node: None
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    rank, pending = mesh.get_rank(), P(unreduced="tp")
    step = ftp.spmd(lambda x, y: x + y, mesh, (pending, pending), P(), bucket=False)
    x, y = torch.randn(2, 2, 4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for turned in ((), (1,), (0, 1), (0,)):  # the ranks whose arguments are transposed

        def given(part: torch.Tensor, turned: tuple[int, ...] = turned) -> torch.Tensor:
            return part.t().contiguous().t() if rank in turned else part

        total = step(given(x[rank]), given(y[rank]))
        found.append(float((total - (x + y).sum(0)).abs().max()))
    ftp.destroy_process_group()
    return found


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_sums_are_of_elements_whatever_the_strides(dtype: torch.dtype, is_gpu: bool):
    for rank in launch(_errors, 2, dtype, is_gpu, env={"FTP_SHM": "0"}):
        assert rank.exit == 0, rank.error
        assert rank.value == pytest.approx([0.0] * 4, abs=1e-12)
