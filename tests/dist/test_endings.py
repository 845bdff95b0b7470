"""Ranks whose loops end at different steps, on gloo processes."""

import time

import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist


def _one_loop_ends_earlier(folder, then):
    """Rank 1 has a batch less, and comes to the end while rank 0 waits for it in a call."""
    ftp.init_process_group(timeout=60.0, step_timeout=60.0, device_type="cpu")
    mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
    step = ftp.spmd(lambda w, x: w + (w * x).sum(), mesh, (P(), P("dp")), P())
    w, x = torch.ones(4), ftp.device_put(torch.ones(4), mesh, P("dp"))
    w = step(w, x)
    if dist.get_rank() == 0:
        begun = time.monotonic()
        calls = {
            "steps": lambda: step(w, x),
            "saves": lambda: ftp.save(folder, w, mesh, P()),
            "agrees": lambda: step(w[:2], x[:2]),
        }
        with pytest.raises(ftp.FtpError) as error:
            calls[then]()
        return f"{type(error.value).__name__}: {error.value}", time.monotonic() - begun
    with pytest.raises(ftp.FtpError) as error:
        ftp.destroy_process_group()
    return str(error.value), 0.0


@pytest.mark.parametrize("then", slow_after(1, ["steps", "saves", "agrees"]))
def test_a_rank_that_comes_to_the_end_is_not_waited_for(tmp_path, then):
    (error, seconds), (other, _) = (
        run.value for run in launch(_one_loop_ends_earlier, 2, str(tmp_path), then)
    )
    assert "Rank 1 has called ftp.destroy_process_group after call" in error, error
    assert "Give all ranks as many" in other and seconds < 15.0, (other, seconds)
    assert not list(tmp_path.glob("0*"))


def _a_rank_works_on_alone(size):
    """A step without collectives, which rank 0 calls alone for longer than the others are told:
    many times, or for matrices once.
    """
    mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
    step = ftp.spmd(lambda w: w @ w / size @ w / size @ w / size @ w / size, mesh, P(), P())
    w = step(torch.ones(size, size, dtype=torch.float64))
    if dist.get_rank() == 0:
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            w = step(w)
    ftp.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 2600])
def test_a_rank_may_end_while_another_works_alone(size):
    runs = launch(_a_rank_works_on_alone, 2, size)
    assert [run.error for run in runs] == [None, None]
