"""What processes on GPUs do that are not there: gloo's collectives in place of NCCL's, and fakes
of what torch asks of a device.
"""

import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch

import ftp
from ftp import P
from ftp.checkpoint.write_shards import Writing
from ftp.distributed.calls import calls
from ftp.distributed.interrupt import interrupt
from ftp.distributed.unfinished import Unfinished
from ftp.sharding.mesh import resolve
from ftp.sharding.mesh_groups import set_timeout

pytestmark = pytest.mark.dist


# Launchers.


def _under_slurm(uuids: list[str]) -> Any:
    """A process that sees one GPU, as under srun --gpus-per-task=1, and the rank and device it
    takes.
    """
    rank, world = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ |= {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": os.environ.pop("LOCAL_RANK"),
        "SLURM_STEP_NUM_TASKS": world,
    }
    os.environ["SLURM_STEP_NODELIST"] = "elsewhere[1-2]"  # MASTER_ADDR is given
    taken: list[int] = []
    dist.is_nccl_available = lambda: False  # a build that has it asks for GPUs
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = taken.append
    ftp.sharding.process_group.talks_nccl = lambda: True
    ftp.sharding.process_group.gpu_uuid = lambda index: uuids[int(rank)]
    try:
        ftp.init_process_group(device_type="cuda", timeout=30)
    except ftp.errors.MeshError as error:
        return str(error)
    return dist.get_rank(), dist.get_world_size(), taken


def test_one_visible_gpu_a_process_under_slurm():
    ranks = launch(_under_slurm, 2, ["GPU-a", "GPU-b"])
    assert [rank.value for rank in ranks] == [(0, 2, [0]), (1, 2, [0])], [
        rank.error for rank in ranks
    ]


def test_processes_with_one_gpu_between_them_are_told():
    for rank in launch(_under_slurm, 2, ["GPU-a", "GPU-a"]):
        assert rank.value == (
            "Ranks 0, 1 have one GPU. Launch at most one process for each GPU, or have them share"
            " it, slowly:"
            " torch.distributed.init_process_group('gloo') first."
        ), rank.error


# A rank that is missing, where no collective says so.


def _reads_after_a_peer_is_gone(folder: str) -> Any:
    """Its GPU never comes to the end of the third call, as NCCL's collectives wait for ever;
    none raises on the host. The peer is stopped: one that has ended is noticed at once.
    """
    ftp.init_process_group(device_type="cpu", timeout=30, step_timeout=3)
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    record = calls(resolve(mesh))
    reached = [True]
    record._unfinished = Unfinished(record._end_late, lambda: lambda: reached[0])
    learn = record._faults._learn

    def slow(*verdict: Any) -> None:  # the program reads why the mesh failed as soon as it is known
        learn(*verdict)
        time.sleep(0.5)

    record._faults._learn = slow
    w, x = torch.ones(3), torch.ones(3)
    step = ftp.shard(lambda w, x: (w * x).sum(), mesh, P())
    for _ in range(2):
        step(w, x)
    time.sleep(3.2)  # longer than a step may take
    assert record.failure is None
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    reached[0] = False
    step(w, x)
    before = time.monotonic()
    while record.failure is None and time.monotonic() - before < 20:
        time.sleep(0.05)
    errors = []
    for call in (lambda: step(w, x), lambda: ftp.save(folder, {"w": w}, mesh, P())):
        try:
            call()
        except (ftp.errors.CollectiveError, ftp.errors.CheckpointError) as error:
            errors.append(str(error))
    os.kill(pids[1], signal.SIGCONT)
    return errors, ftp.checkpoints(folder)


@pytest.mark.slow
def test_a_missing_rank_is_named_where_the_gpu_waits_for_it(tmp_path: Path):
    rank, _ = launch(_reads_after_a_peer_is_gone, 2, str(tmp_path))
    assert rank.exit == 0, rank.error
    (first, second), saved = rank.value
    assert re.match(
        r"The GPU of rank 0 has not come to the end of call 3 on the mesh \(tp 2\) on cpu in \d s,"
        r" and what it gives now are no results: Rank 1 does not answer",
        first,
    )
    assert second.startswith("Rank 1 does not answer") and not saved
    assert f"ftp: {first.splitlines()[0]}" in rank.stderr


def test_a_save_is_given_up_where_the_mesh_fails_while_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A read of a GPU's memory returns, and what it gives is what the interrupted collectives
    left.
    """
    mesh = ftp.simulated_mesh((2,), ("tp",))
    record, gathered = calls(resolve(mesh)), Writing.gather
    monkeypatch.setattr(record, "_unfinished", Unfinished(record._end_late, lambda: lambda: False))

    def fails(job: Writing, *, copy: bool) -> Any:
        found = gathered(job, copy=copy)
        monkeypatch.setattr(record._faults, "failure", ftp.errors.CollectiveError("rank 1 is gone"))
        return found

    monkeypatch.setattr(Writing, "gather", fails)
    with pytest.raises(ftp.errors.FtpError, match="rank 1 is gone"):
        ftp.save(tmp_path, ftp.device_put({"w": torch.ones(4)}, mesh, P("tp")), mesh, P("tp"))
    assert not ftp.checkpoints(tmp_path)


def test_an_abort_that_waits_keeps_no_other_from_ending(monkeypatch: pytest.MonkeyPatch):
    """NCCL's waits for recordings."""
    blocked, aborted = threading.Event(), threading.Event()
    backends = [SimpleNamespace(abort=lambda: blocked.wait(20)), SimpleNamespace(abort=aborted.set)]
    groups = [
        SimpleNamespace(_get_backend=lambda device, b=b: b, _device_types=["cuda"])
        for b in backends
    ]
    monkeypatch.setattr("ftp.distributed.interrupt.process_groups", lambda mesh: groups)
    began = time.monotonic()
    interrupt(SimpleNamespace(torch=True))  # type: ignore[arg-type]
    assert aborted.wait(5) and time.monotonic() - began < 10
    blocked.set()


def test_nccl_waits_longer_than_a_step_before_it_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr("ftp.sharding.mesh_groups.process_groups", lambda mesh: [])
    monkeypatch.setattr(
        "ftp.sharding.mesh_groups.set_group_timeout",
        lambda groups, timeout: seen.append(timeout.total_seconds()),
    )
    monkeypatch.setattr("ftp.sharding.mesh_groups.dist.get_backend", lambda: "")
    for kind in (True, False):
        monkeypatch.setattr("ftp.sharding.mesh_groups.talks_nccl", lambda kind=kind: kind)
        set_timeout(SimpleNamespace(torch=True, groups=["0"], device_type="cuda"), 100.0)
    assert seen == [130.0, 100.0]
