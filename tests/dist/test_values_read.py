"""Values read as Python numbers on processes: the first rank's hold, and a rank that fails with one
is an error on all, after which the step goes on.
"""

import os
import warnings

import pytest
import torch
from launch import launch

import ftp
from ftp import P
from ftp.errors import FtpError, ReadWarning

pytestmark = pytest.mark.dist
SIZES = [(1, 2), (1, 2), (2, 2), (1, 1), (2, 1)]  # of rank 0 and of rank 1


def _sizes():
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore", ReadWarning)
    ftp.init_process_group(device_type="cpu")
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")

    def fn(w, k):
        n = int(k.sum())
        if rank and n == 6:
            raise ValueError("a rank's own")
        return (w[:n] * int((w > 0).sum())).sum()

    step = ftp.spmd(fn, mesh, (P("tp"), P()), P())
    w = torch.arange(12.0)
    held, found = ftp.device_put(w, mesh, P("tp")), []
    with warnings.catch_warnings():
        if rank:
            warnings.simplefilter("error", ReadWarning)
        for warned in (True, False):
            with pytest.raises(ReadWarning if rank else FtpError) if warned else _nothing():
                found.append(float(step(held, torch.tensor([3, 0]))))
            warnings.simplefilter("ignore", ReadWarning)
    with pytest.raises(ValueError if rank else FtpError, match="a rank's own"):
        step(held, torch.tensor([3, 3]))
    for sizes in SIZES:
        found.append(float(step(held, torch.tensor([sizes[rank], 3]))))
    return found, [33.0, *(11.0 * sum(range(first + 3)) for first, _ in SIZES)]


def _nothing():
    return warnings.catch_warnings()


def test_values_on_processes():
    for rank in launch(_sizes, 2, timeout=60):
        assert rank.error is None, rank.error
        found, due = rank.value
        assert found == due
