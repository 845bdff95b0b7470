"""A rank is killed at some moment of a save, again and again: what was complete before stays
loadable, and what is complete is right.
"""

import os
import random
import signal
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist

SAVED, REFUSED = 0, 3
SPECS = {"w": P("tp"), "packed": P(ftp.units("tp", 1, pack=2)), "trial": P()}


def _tree(trial):
    return {
        "w": torch.full((30, 1000), float(trial)),
        "packed": torch.arange(8) + trial,
        "trial": trial,
    }


def _save(rank, port, folder, trial, dies_at, ready):
    """One rank of two; it dies before its file operation number ``dies_at``, or in the middle of
    writing a file.
    """
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    tree = ftp.device_put(_tree(trial), mesh, SPECS)
    dist.barrier()
    count = 0

    def watch(event, args):
        nonlocal count
        if event.split(".")[0] in ("open", "os", "shutil") and any(folder in str(a) for a in args):
            if count == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(watch)
    os.write(ready, b"x")
    try:
        ftp.save(folder, tree, mesh, SPECS, keep=2, wait=trial % 2 == 0, timeout=1.0).result()
    except ftp.FtpError:
        return REFUSED
    return SAVED


def _run(job, *args):
    """In a process of its own: its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = job(*args)
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def _kills(folder, trials, seed):
    draw = random.Random(seed)
    ended = []
    last = -1
    for trial in range(trials):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        victim = draw.randrange(2)
        # Every other time at a moment, otherwise at an operation; the leading rank has about 50 of
        # them. The first save is left alone.
        at = draw.randrange(55 if victim == 0 else 12) if trial % 2 else None
        read, write = os.pipe()
        pids = [
            _run(_save, rank, port, folder, trial, at if rank == victim and trial else None, write)
            for rank in range(2)
        ]
        if trial and at is None:
            os.read(read, 2)
            time.sleep(draw.random() * 0.03)
            os.kill(pids[victim], signal.SIGKILL)
        deadline = time.monotonic() + 30
        codes = {}
        while len(codes) < 2 and time.monotonic() < deadline:
            for rank, pid in enumerate(pids):
                if rank not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(found[1])
            time.sleep(0.005)
        for rank in {0, 1} - set(codes):
            os.kill(pids[rank], signal.SIGKILL)
        os.close(read)
        os.close(write)
        # Nothing hangs; the rank that lives has saved, or been told; nothing is lost; what is
        # complete is right.
        assert len(codes) == 2, f"trial {trial}: {codes}"
        assert codes[1 - victim] in (SAVED, REFUSED), f"trial {trial}: {codes}"
        assert codes[victim] in (SAVED, REFUSED, -signal.SIGKILL), f"trial {trial}: {codes}"
        like = {
            "w": torch.empty(30, 1000, device="meta"),
            "packed": torch.empty(8, dtype=torch.int64, device="meta"),
            "trial": 0,
        }
        found = ftp.load(folder, like, ftp.simulated_mesh((3,), ("tp",)), P())
        assert found["trial"] in (last, trial), f"trial {trial}: {found['trial']} after {last}"
        assert found["trial"] == trial or SAVED not in codes.values()
        due = _tree(found["trial"])
        assert torch.equal(found["w"], due["w"]) and torch.equal(found["packed"], due["packed"])
        assert len(ftp.checkpoints(folder)) <= 3
        last = found["trial"]
        ended.append((codes[victim] == -signal.SIGKILL, last == trial))
    return ended


@pytest.mark.parametrize("trials", [4, pytest.param(75, marks=pytest.mark.slow)])
def test_nothing_is_lost(tmp_path, trials):
    (rank,) = launch(_kills, 1, str(tmp_path), trials, 7, timeout=400)
    assert rank.exit == 0, rank.error or rank.stderr[-3000:]
    assert rank.value[0] == (False, True)
    killed = [is_complete for is_killed, is_complete in rank.value if is_killed]
    assert len(killed) >= (2 if trials < 10 else 50)
    if trials > 10:
        assert True in killed and False in killed  # some died before it was complete, some after
