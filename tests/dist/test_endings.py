"""How ranks end: their loops at different steps, their processes on a busy machine."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after
from launch import free_port, launch

import ftp
from ftp import P
from ftp.distributed.calls import Calls
from ftp.distributed.faults import Faults

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


def _the_store_ends_early():
    """Rank 2 fails in its second call. Rank 0, which holds the store, is told first and raises;
    rank 1 asks late.
    """
    ftp.init_process_group(timeout=60.0, step_timeout=60.0, device_type="cpu")
    mesh, rank = ftp.make_mesh((3,), ("dp",), device_type="cpu"), dist.get_rank()
    specs = P("dp"), P("dp")
    rows = torch.arange(12.0).reshape(6, 2)

    def looked_up(table, ids):
        return torch.nn.functional.embedding(ids, table).sum(0)

    step = ftp.spmd(looked_up, mesh, specs, P())
    table = ftp.device_put(rows, mesh, specs[0])
    step(table, ftp.device_put(torch.arange(6), mesh, specs[1]))
    explain, answer = Calls.explain, Faults.answer
    late = {0: 0.2, 1: 0.6, 2: 0.0}[rank]
    Calls.explain = lambda *given: (time.sleep(late), explain(*given))[1]
    if rank == 1:
        Faults.answer = lambda *given: (time.sleep(late), answer(*given))[1]
    ids = torch.arange(6) + 100 * (rank == 2)
    step(table, ftp.device_put(ids, mesh, specs[1]))


def test_the_rank_that_holds_the_store_stays_until_others_know_why():
    errors = [run.error for run in launch(_the_store_ends_early, 3)]
    assert all("Rank 2 left call 2" in error for error in errors[:2]), errors
    assert "index out of range" in errors[2]


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


# gloo's workers run only when nothing else wants the one processor, as may be on a busy machine.
_STARVE = """
workers, tasks = [], [int(task) for task in os.listdir("/proc/self/task")]
while len(workers) < 2:  # each names itself when it starts
    workers = [t for t in tasks if "pt_gloo_runloop" in open(f"/proc/self/task/{t}/comm").read()]
for task in tasks:
    os.sched_setaffinity(task, {min(os.sched_getaffinity(0))})
for worker in workers:
    os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
"""
_STEPS = f"""
import os, torch, ftp
from ftp import P

mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
step = ftp.spmd(lambda x: x * 2, mesh, P("dp"), P())
x = ftp.device_put(torch.ones(12), mesh, P("dp"))
step(x)
{_STARVE}
for _ in range(3):
    y = step(x)
"""
_WORKERS = f"""
import os, torch
import torch.distributed as dist
from ftp.torch_internals.gloo_workers import await_idle

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{_STARVE}
outs = [torch.empty(12) for _ in range(200)]
for out in outs:
    dist.all_gather_into_tensor(out, torch.ones(12), async_op=True)
assert await_idle(60.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "ranks", "times"), [(_STEPS, 2, 3), (_WORKERS, 1, 4)])
def test_processes_end_well_where_workers_wait_for_a_processor(program, ranks, times):
    for _ in range(times):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                env={
                    **os.environ,
                    **address,
                    "WORLD_SIZE": str(ranks),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate(timeout=120)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * ranks, said


def _worlds(ports):
    """Threads and open files in each of a few worlds, the second of which torch's
    `destroy_process_group` ends, the others ftp's; the error of the first world's step
    in each later one; and ftp's threads at the end.
    """
    counts, errors, first = [], [], None
    for world, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        ftp.init_process_group(device_type="cpu")
        mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
        step = ftp.spmd(lambda x: (x * 2, x.sum()), mesh, (P("dp"),), (P(), P()))
        x = ftp.device_put(torch.arange(12.0), mesh, P("dp"))
        assert step(x)[1] == 66.0
        if first is None:
            first = step, x
        else:
            with pytest.raises(ftp.FtpError) as error:
                first[0](first[1])
            errors.append(str(error.value))
        gc.collect()
        counts.append([len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")])
        if world == 1:
            dist.barrier()
            dist.destroy_process_group()
        else:
            ftp.destroy_process_group()
        del mesh, step, x
    return counts, errors, [t.name for t in threading.enumerate() if t.name.startswith("ftp")]


@pytest.mark.slow
def test_the_end_of_a_world_ends_its_threads_and_closes_its_files():
    ports = [free_port() for _ in range(4)]
    for run in launch(_worlds, 2, ports, env={"FTP_SHM": "1"}):
        assert run.error is None, run.error
        counts, errors, threads = run.value
        # The first world's step is held all the time, and with it the groups of its mesh.
        assert counts[1] == counts[2] == counts[3], counts
        assert len(errors) == 3 and all("is destroyed" in error for error in errors), errors
        assert threads == []
