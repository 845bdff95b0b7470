"""All-reduces among many ranks, which go by parts: results, equal replicas, a rank that fails."""

import pytest
import torch
from launch import launch

import ftp
from ftp import P
from ftp.runtime import gloo_calls

pytestmark = [pytest.mark.dist, pytest.mark.slow]
RANKS = 8


def _reduced(fails: bool) -> tuple[int, list[float]]:
    made, by_parts = [], gloo_calls.reduce_by_parts
    gloo_calls.reduce_by_parts = lambda *given: made.append(1) or by_parts(*given)
    mesh = ftp.make_mesh((RANKS,), ("tp",), device_type="cpu")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RANKS * 3, 700, generator=generator, dtype=torch.float64)
    y = torch.randn(16, RANKS * 3, generator=generator, dtype=torch.float64)

    def fn(x, y):
        logits = y @ x  # 16 x 700, summed over ranks; the sum of squares is one number
        return logits, logits.square().sum(), torch.logsumexp(y, 1)

    specs = P("tp"), P(None, "tp")
    step = ftp.spmd(fn, mesh, specs, P(), bucket=False)
    given = ftp.device_put((x, y), mesh, specs)
    if fails:
        step(*given)

        def ends(*given):
            raise ValueError("a rank that fails")

        if torch.distributed.get_rank() == 3:
            gloo_calls.reduce_by_parts = ends
    found = step(*given)
    errors = [float((a - b).abs().max()) for a, b in zip(found, fn(x, y), strict=True)]
    ftp.check_replicas(found, mesh, P())
    ftp.destroy_process_group()
    return len(made), errors


def test_results_and_replicas():
    for rank in launch(_reduced, RANKS, False, env={"FTP_SHM": "0"}):
        assert rank.exit == 0, rank.error
        count, errors = rank.value
        assert count >= 2 and errors == pytest.approx([0.0] * 3, abs=1e-9)


def test_a_rank_that_fails_within_one_is_named():
    for number, rank in enumerate(launch(_reduced, RANKS, True, env={"FTP_SHM": "0"})):
        said = "a rank that fails" if number == 3 else "Rank 3 left call 2"
        assert rank.exit != 0 and said in rank.error, rank.error
