"""All-reduces among many ranks, which go by parts, or by the first rank where ranks share cores:
results, equal replicas, a rank that fails.
"""

import pytest
import torch
from launch import launch

import ftp
from ftp import P
from ftp.api import step as step_module
from ftp.runtime import gloo_calls

pytestmark = [pytest.mark.dist, pytest.mark.slow]
RANKS = 8


def _reduced(is_crowded: bool, fails: bool) -> tuple[int, list[float]]:
    torch.distributed.set_debug_level_from_env()  # torch was imported before this process was
    step_module.are_crowded = lambda cores: is_crowded
    name = "reduce_at_first" if is_crowded else "reduce_by_parts"
    made, reduce_many = [], getattr(gloo_calls, name)
    setattr(gloo_calls, name, lambda *given: made.append(1) or reduce_many(*given))
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
            setattr(gloo_calls, name, ends)
    found = step(*given)
    errors = [float((a - b).abs().max()) for a, b in zip(found, fn(x, y), strict=True)]
    ftp.check_replicas(found, mesh, P())
    ftp.destroy_process_group()
    return len(made), errors


@pytest.mark.parametrize("is_crowded", [False, True])
def test_results_and_replicas(is_crowded: bool):
    for rank in launch(_reduced, RANKS, is_crowded, False, env={"FTP_SHM": "0"}):
        assert rank.exit == 0, rank.error
        count, errors = rank.value
        assert count >= 2 and errors == pytest.approx([0.0] * 3, abs=1e-9)


def test_detailed_debugging_compares_the_ranks_counts_of_messages():
    """So no rank sends more of them than another."""
    env = {"FTP_SHM": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    for rank in launch(_reduced, RANKS, True, False, env=env):
        assert rank.exit == 0, rank.error
        count, errors = rank.value
        assert count == 0 and errors == pytest.approx([0.0] * 3, abs=1e-9)


@pytest.mark.parametrize("is_crowded", [False, True])
def test_a_rank_that_fails_within_one_is_named(is_crowded: bool):
    ranks = launch(_reduced, RANKS, is_crowded, True, env={"FTP_SHM": "0"})
    for number, rank in enumerate(ranks):
        said = "a rank that fails" if number == 3 else "Rank 3 left call 2"
        assert rank.exit != 0 and said in rank.error, rank.error
