"""Rules found by trial on processes: every rank finds the same, and ranks that do not all fail."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist


@torch.library.custom_op("ftp_tests_dist::rows", mutates_args=())
def rows(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


@rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _divided(switched_off: str):
    rank = int(os.environ["RANK"])
    if str(rank) == switched_off:
        os.environ["FTP_DISCOVERY"] = "0"
    mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
    x = torch.arange(15.0).reshape(5, 3).sin()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = ftp.spmd(lambda x: torch.ops.ftp_tests_dist.rows(x), mesh, P("dp"), P("dp"))
        local = step(ftp.device_put(x, mesh, P("dp")))
    torch.testing.assert_close(ftp.device_get(local, mesh, P("dp")), x.softmax(-1))
    dist.barrier()
    dist.destroy_process_group()
    return [w.category.__name__ for w in caught]


def test_every_rank_finds_the_same(tmp_path):
    ranks = launch(_divided, 2, "none", env={"FTP_CACHE": str(tmp_path)})
    assert [r.error for r in ranks] == [None, None]
    assert all("DiscoveryWarning" in r.value for r in ranks)


def test_ranks_that_find_different_rules_all_fail(tmp_path):
    ranks = launch(_divided, 2, "1", env={"FTP_CACHE": str(tmp_path)})
    for error in (rank.error or "" for rank in ranks):
        assert "MismatchError: Ranks disagree on the rules found by trial" in error
        assert (
            "ftp_tests_dist.rows.default: ~0 [~1]" in error
            or "rows.default: a [b] -> a [c]" in error
        )
