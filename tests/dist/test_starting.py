"""Programs from files on gloo processes: every rank starts the one that was saved, or none does."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import launch

import ftp
from ftp import P
from ftp.errors import FtpError

pytestmark = pytest.mark.dist
SPECS = {"up": P("tp"), "down": P(None, "tp")}


def _loss(params, x):
    return ((x @ params["up"].T).relu() @ params["down"].T).square().mean()


def _arguments():
    generator = torch.Generator().manual_seed(0)
    params = {
        "up": torch.randn(7, 5, dtype=torch.float64, generator=generator),
        "down": torch.randn(3, 7, dtype=torch.float64, generator=generator),
    }
    return params, torch.randn(4, 5, dtype=torch.float64, generator=generator)


def _step(mesh, **options):
    return ftp.shard(_loss, mesh, SPECS, bucket=True, **options)


def _run(simulated: str, folder: str):
    """A program that was saved without processes; one that processes save; one compiled ahead."""
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    (params, x), rank = _arguments(), dist.get_rank()
    own = ftp.device_put(params, mesh, SPECS)
    step = _step(mesh)
    loss, grads = step(own, x)
    found = []
    path = Path(folder) / f"rank {rank}"
    step.lower(own, x).save(path)
    for run in (
        ftp.load_program(simulated),
        ftp.load_program(path, mesh),
        step.lower(own, x).compile(),
    ):
        for _ in range(2):
            got, of = run(own, x)
            found.append(
                torch.equal(got, loss) and all(torch.equal(of[k], grads[k]) for k in grads)
            )
    expected, value = torch.func.grad_and_value(_loss)(params, x)
    full = ftp.device_get(grads, mesh, SPECS)
    error = max(float((full[k] - expected[k]).abs().max()) for k in full)
    dist.barrier()
    ftp.destroy_process_group()
    return found, error, float(abs(loss - value))


def test_every_rank_starts_the_saved_program(tmp_path: Path):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    _step(mesh).lower(*_arguments()).save(tmp_path / "simulated")
    ranks = launch(_run, 2, str(tmp_path / "simulated"), str(tmp_path), timeout=120)
    for rank in ranks:
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        found, error, of_loss = rank.value
        assert found == [True] * 6
        assert error < 1e-14 and of_loss < 1e-14


def _first_call(mark: str):
    """How many plans this rank has made for its first call, and its error. The first to plan is
    killed, where there is no file ``mark`` yet.
    """
    from ftp.planning import prepare

    made, real = [], prepare.make_plan

    def make_plan(*args, **kwargs):
        made.append(1)
        if not os.path.exists(mark):
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    prepare.make_plan = make_plan
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    params, x = _arguments()
    loss, grads = _step(mesh)(ftp.device_put(params, mesh, SPECS), x)
    full = ftp.device_get(grads, mesh, SPECS)
    expected, value = torch.func.grad_and_value(_loss)(params, x)
    error = max(float((full[k] - expected[k]).abs().max()) for k in full)
    dist.barrier()
    ftp.destroy_process_group()
    return len(made), error + float(abs(loss - value))


def test_ranks_of_a_host_plan_once(tmp_path: Path):
    """A rank that is killed while it plans leaves the plan to the others, and is named: as killed,
    or as rank 0, which has ended and with it the store.
    """
    env = {"FTP_CACHE": str(tmp_path)}
    mark = str(tmp_path / "mark")
    ranks = launch(_first_call, 2, mark, timeout=60, env=env)
    killed = min((0, 1), key=lambda rank: ranks[rank].exit or 0)
    error = ranks[1 - killed].error or ""
    assert ranks[killed].exit == -signal.SIGKILL
    ways = ["has been killed"] + ["has ended, and with it the store"] * (not killed)
    assert any(f"rank {killed} {way}" in error.lower() for way in ways), error
    for plan in tmp_path.glob("plans/*.ftp"):
        plan.unlink()
    for plans in (1, 0):
        ranks = launch(_first_call, 2, mark, timeout=60, env=env)
        assert [rank.exit for rank in ranks] == [0, 0], [r.error or r.stderr[-2000:] for r in ranks]
        assert sum(rank.value[0] for rank in ranks) == plans
        assert max(rank.value[1] for rank in ranks) < 1e-14


def _compile(path: str):
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    params, x = _arguments()
    own = ftp.device_put(params, mesh, SPECS)
    step = _step(mesh, compile=True)
    lowered = step.lower(own, x)
    if not dist.get_rank():
        lowered.save(path)
    dist.barrier()
    wanted, grads = step(own, x)
    loaded = ftp.load_program(path, mesh)
    loaded.prepare()
    found = []
    for run in (lowered.compile(), loaded):
        got, of = run(own, x)
        found.append(torch.equal(got, wanted) and all(torch.equal(of[k], grads[k]) for k in grads))
    dist.barrier()
    ftp.destroy_process_group()
    return found


@pytest.mark.slow
def test_every_rank_compiles_the_saved_program(tmp_path: Path):
    ranks = launch(_compile, 2, str(tmp_path / "program"), timeout=300)
    assert [rank.exit for rank in ranks] == [0, 0], [r.error or r.stderr[-2000:] for r in ranks]
    assert [rank.value for rank in ranks] == [[True, True]] * 2


def _compile_once():
    """The bits of a compiled step, and whether it took inductor."""
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    params, x = _arguments()
    loss, grads = _step(mesh, compile=True)(ftp.device_put(params, mesh, SPECS), x)
    dist.barrier()
    ftp.destroy_process_group()
    bits = [value.numpy().tobytes() for value in (loss, grads["up"], grads["down"])]
    return bits, "torch._inductor.graph" in sys.modules


@pytest.mark.slow
def test_a_second_start_takes_the_code_that_the_first_has_compiled(tmp_path: Path):
    env = {"FTP_CACHE": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    starts = [launch(_compile_once, 2, timeout=300, env=env) for _ in range(2)]
    for rank in (rank for start in starts for rank in start):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
    first, second = ([rank.value for rank in start] for start in starts)
    assert [bits for bits, _ in first] == [bits for bits, _ in second]
    assert [took for _, took in first + second] == [True, True, False, False]


def _disagree(first: str, second: str):
    """What the ranks raise: another file on each, another batch on one, a full tensor as shard."""
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    (params, x), rank = _arguments(), dist.get_rank()
    own = ftp.device_put(params, mesh, SPECS)
    told = []

    def attempt(run, *args):
        try:
            run(*args)
            told.append("")
        except FtpError as e:
            told.append(f"{type(e).__name__}: {e}")

    attempt(ftp.load_program(second if rank else first), own, x)
    run = ftp.load_program(first)
    attempt(run, own, x[:2] if rank else x)
    attempt(run, params, x)
    attempt(run, own, x)
    dist.barrier()
    ftp.destroy_process_group()
    return told


def test_ranks_that_differ_are_told_before_any_collective(tmp_path: Path):
    mesh, (params, x) = ftp.simulated_mesh((2,), ("tp",)), _arguments()
    _step(mesh).lower(params, x).save(tmp_path / "first")
    ftp.shard(lambda p, x: 2 * _loss(p, x), mesh, SPECS).lower(params, x).save(tmp_path / "second")
    ranks = launch(_disagree, 2, str(tmp_path / "first"), str(tmp_path / "second"), timeout=120)
    assert [rank.exit for rank in ranks] == [0, 0], [r.error or r.stderr[-2000:] for r in ranks]
    (files, batch, full, fine), (files1, batch1, full1, fine1) = (rank.value for rank in ranks)
    assert "MismatchError" in files and files == files1 and "disagree on the program" in files
    assert "Rank 1 failed to plan call" in batch and "x is float64[2, 5]" in batch
    assert batch1.startswith("InputError: x is float64[2, 5]")
    assert all("params['up'] is float64[7, 5]" in text for text in (full, full1))
    assert fine == fine1 == ""
    assert os.listdir(tmp_path)


def _on_hosts(folder: str, mishap: str):
    """Ranks of which torchrun has put the last on a host of its own: how many plans each has made
    for two programs, and the errors of both.
    """
    from ftp.distributed import handed_out
    from ftp.planning import prepare

    rank, made, real = int(os.environ["RANK"]), [], prepare.make_plan
    host = os.environ["GROUP_RANK"] = str(rank // 2)
    os.environ["FTP_CACHE"] = folder if mishap == "shared" else f"{folder}/{host}"
    handed_out._PATIENCE = 0.5 if mishap == "late" else 60.0
    if mishap == "off" and not rank:
        os.environ["FTP_PLANS"] = "0"

    def make_plan(*args, **kwargs):
        made.append(1)
        mark = Path(folder, "mark")
        if mishap == "killed" and host == "0" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while mishap == "late" and host == "0" and not plans_there():
            time.sleep(0.05)
        return real(*args, **kwargs)

    def plans_there() -> bool:
        return len([*Path(folder, "1", "plans").glob("*.ftp")]) == len(calls)

    prepare.make_plan = make_plan
    if mishap == "damaged" and not rank:
        give = handed_out.HandedOut.give
        handed_out.HandedOut.give = lambda self, content: give(self, content[:-9])
    mesh = ftp.make_mesh((3,), ("tp",), device_type="cpu")
    params, x = _arguments()
    own, step = ftp.device_put(params, mesh, SPECS), _step(mesh)
    error, calls = 0.0, []
    for rows in (x, x[:2]):
        calls.append(1)
        loss, grads = step(own, rows)
        full = ftp.device_get(grads, mesh, SPECS)
        expected, value = torch.func.grad_and_value(_loss)(params, rows)
        error = max(error, *(float((full[k] - expected[k]).abs().max()) for k in full))
        error = max(error, float(abs(loss - value)))
    dist.barrier()
    ftp.destroy_process_group()
    return len(made), error


@pytest.mark.parametrize(
    ("mishap", "plans"),
    [
        ("", (2, 0)),
        pytest.param("shared", (2, 0), marks=pytest.mark.slow),
        pytest.param("off", (4, 2), marks=pytest.mark.slow),
        pytest.param("late", (2, 2), marks=pytest.mark.slow),
        pytest.param("damaged", (2, 2), marks=pytest.mark.slow),
    ],
)
def test_the_first_rank_plans_for_other_hosts(tmp_path: Path, mishap: str, plans: tuple[int, int]):
    """Of the first host, and of the second: what does not come there is planned there."""
    first, beside, last = launch(_on_hosts, 3, str(tmp_path), mishap, timeout=90)
    for rank in (first, beside, last):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        assert rank.value[1] < 1e-14
    assert first.value[0] + beside.value[0] == plans[0]
    assert last.value[0] == plans[1]


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_plans_for_other_hosts_is_named(tmp_path: Path):
    first, beside, last = launch(_on_hosts, 3, str(tmp_path), "killed", timeout=90)
    assert sorted((first.exit or 0, beside.exit or 0))[0] == -signal.SIGKILL
    killed = 0 if first.exit == -signal.SIGKILL else 1
    assert last.exit and f"ank {killed}" in (last.error or ""), last


OF_ROWS = {"table": P("tp"), "out": P(None, "tp")}


def _of_rows(params, ids):
    """Code that reads a rank's offset (rows of a table), and a maximum over ranks."""
    rows = (params["table"][ids] + 1).tanh() @ params["out"]
    return (rows - rows.amax(-1, keepdim=True)).exp().sum(-1).log().mean()


def _arguments_of_rows():
    generator = torch.Generator().manual_seed(0)
    params = {
        "table": torch.randn(7, 6, generator=generator),
        "out": torch.randn(6, 5, generator=generator),
    }
    return params, torch.tensor([0, 6, 3, 3])


def _start_with_code(path: str):
    from ftp.runtime import compile as compiling

    torch.set_num_threads(1)
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    params, ids = _arguments_of_rows()
    own = ftp.device_put(params, mesh, OF_ROWS)
    with warnings.catch_warnings(), mock.patch.object(compiling, "by_inductor") as by_inductor:
        warnings.simplefilter("error")
        got, of = ftp.load_program(path, mesh, trust_code=True)(own, ids)
    loss, grads = ftp.shard(_of_rows, mesh, OF_ROWS, compile=True)(own, ids)
    expected, value = torch.func.grad_and_value(_of_rows)(params, ids)
    full = ftp.device_get(of, mesh, OF_ROWS)
    error = max(float((full[k] - expected[k]).abs().max()) for k in full)
    dist.barrier()
    ftp.destroy_process_group()
    is_same = torch.equal(got, loss) and all(torch.equal(of[k], grads[k]) for k in grads)
    return by_inductor.called, is_same, error + float(abs(got - value))


@pytest.mark.slow
def test_every_rank_starts_with_the_saved_code(tmp_path: Path):
    """One process compiles for ranks of unequal shapes and offsets."""
    mesh, path = ftp.simulated_mesh((2,), ("tp",)), tmp_path / "program"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    step = ftp.shard(_of_rows, mesh, OF_ROWS, compile=True)
    step.lower(*_arguments_of_rows()).compile().save(path)
    torch.set_num_threads(before)
    env = {name: str(tmp_path / name) for name in ("FTP_CACHE", "TORCHINDUCTOR_CACHE_DIR")}
    ranks = launch(_start_with_code, 2, str(path), timeout=300, env=env)
    for rank in ranks:
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        is_compiled, is_same, error = rank.value
        assert not is_compiled and is_same and error < 1e-6
