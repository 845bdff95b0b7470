"""One job at a time saves to a folder: who lives keeps it, who is dead or stopped loses it, and
of those who take over one wins.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from launch import launch

import ftp
from ftp.checkpoint import draft, folder_lock
from ftp.checkpoint.folder_lock import hold, release

pytestmark = pytest.mark.dist

TREE = {"w": torch.ones(4)}


def _fork(job, *args):
    """A process of its own, quick heartbeats in it; what ``job`` returns, 0 for None, is its
    exit status.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            folder_lock.BEAT = 0.1
            code = job(*args) or 0
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", flush=True)
        finally:
            os._exit(code)
    return pid


def _until(ready, limit=20.0):
    begun = time.monotonic()
    while not ready():
        assert time.monotonic() - begun < limit
        time.sleep(0.01)


def _jitter(folder, seed):
    """Every operation on the folder waits a moment first, so that processes meet in any order."""
    draw = random.Random(seed)

    def wait(event, args):
        if event.split(".")[0] in ("open", "os") and any(folder in str(a) for a in args):
            time.sleep(draw.choice((0, 0, 0.001, 0.004)))

    sys.addaudithook(wait)


def _takers(folder, rounds):
    """The exit statuses of six processes that take over from a dead one at once: 0 for the
    owner, 3 for who is told of it.
    """
    found = []
    for turn in range(rounds):
        place = Path(folder, str(turn))
        place.mkdir()
        _die_with(place)
        go = time.monotonic() + 0.2

        def take(i, place=place, go=go, turn=turn):
            _jitter(str(place), 10 * turn + i)
            time.sleep(max(0.0, go - time.monotonic()))
            try:
                hold(place, 1.0, wait=True)
            except ftp.errors.CheckpointError as e:
                Path(folder, f"said-{turn}-{i}").write_text(str(e))
                return 3
            Path(folder, f"owner-{turn}").write_text(str(os.getpid()))
            time.sleep(0.8)  # until the others have seen it alive
            return 0 if folder_lock.is_held(place) else 4

        pids = [_fork(take, i) for i in range(6)]
        found.append(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
        owner = Path(folder, f"owner-{turn}").read_text()
        assert all(
            f"process {owner} on " in said.read_text()
            for said in Path(folder).glob(f"said-{turn}-*")
        )
        assert len(list(place.iterdir())) == 1
    return found


def _die_with(place):
    """A process that is killed while it owns the folder."""

    def job():
        assert hold(place, 1.0, wait=False)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(_fork(job), 0)
    assert [path.name for path in place.iterdir()] == [".lock-00000000"]


def test_of_those_who_take_over_one_wins(tmp_path):
    (rank,) = launch(_takers, 1, str(tmp_path), 3, timeout=60)
    assert rank.exit == 0, rank.error or rank.stderr[-2000:]
    assert rank.value == [[0, 3, 3, 3, 3, 3]] * 3, rank.stdout


def _turns(folder, seconds):
    """Processes that take the folder, keep it for a moment, and give it back or die; the times
    at which each was sure to own it.
    """
    place, over, end = Path(folder, "place"), Path(folder, "over"), time.monotonic() + seconds
    place.mkdir()

    def job(i):
        _jitter(str(place), i)
        draw = random.Random(i)
        while not over.exists():
            try:
                hold(place, 1.0, wait=True)
            except ftp.errors.CheckpointError:
                continue
            begun = time.monotonic()
            time.sleep(draw.random() * 0.02)
            if folder_lock.is_held(place):
                os.write(log, f"{begun} {time.monotonic()}\n".encode())
            if draw.random() < 0.3:
                os.kill(os.getpid(), signal.SIGKILL)
            release()
            time.sleep(draw.random() * 0.01)

    log = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    pids, n = [], 0
    # A slow disk takes longer for as many turns.
    while time.monotonic() < end or Path(folder, "log").read_bytes().count(b"\n") <= 20:
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
        while len(pids) < 4:
            pids.append(_fork(job, n))
            n += 1
        time.sleep(0.02)
    over.touch()
    for pid in pids:
        os.waitpid(pid, 0)
    return sorted(
        tuple(map(float, line.split())) for line in Path(folder, "log").read_text().splitlines()
    )


def test_no_two_own_it_at_one_time(tmp_path):
    (rank,) = launch(_turns, 1, str(tmp_path), 3.0, timeout=60)
    assert rank.exit == 0, rank.error or rank.stderr[-2000:]
    assert len(rank.value) > 20
    assert all(
        end <= begin for (_, end), (begin, _) in zip(rank.value, rank.value[1:], strict=False)
    )


def _owner_is_stopped(folder):
    """A job saves and is stopped; another is refused while it beats, takes over when it does
    not, and the first is told.
    """
    mesh = ftp.simulated_mesh((2,), ("tp",))

    def first():
        ftp.save(folder, TREE, mesh, step=1)
        Path(folder, "saved").touch()
        signal.sigwait({signal.SIGUSR1})
        try:
            ftp.save(folder, TREE, mesh, step=2)
        except ftp.errors.CheckpointError as e:
            Path(folder, "told").write_text(str(e))

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    pid = _fork(first)
    folder_lock.BEAT = 0.1
    _until(Path(folder, "saved").exists)
    said = []
    for _ in range(2):
        begun = time.monotonic()
        try:
            ftp.save(folder, TREE, mesh, step=3, timeout=1.5)
            said.append("saved")
        except ftp.errors.CheckpointError as e:
            said.append(str(e))
        said.append(time.monotonic() - begun)
        os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGUSR1)
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)
    return (
        pid,
        said,
        Path(folder, "told").read_text(),
        [c.step for c in ftp.checkpoints(folder)],
        os.getpid(),
    )


def test_a_live_owner_is_named_and_a_stopped_one_loses_the_folder(tmp_path):
    (rank,) = launch(_owner_is_stopped, 1, str(tmp_path), timeout=60)
    assert rank.exit == 0, rank.error or rank.stderr[-2000:]
    pid, (live, soon, taken, late), told, steps, me = rank.value
    assert (
        live.startswith(f"{tmp_path} belongs to another job, which is alive: process {pid} on ")
        and soon < 10
    )
    assert taken == "saved" and 1.0 < late < 20
    assert f"belongs to another job, which is alive: process {me} on " in told
    assert steps == [1, 3]


@pytest.mark.parametrize(
    "who", ["another machine", "this job", "a later process of that number", "unreadable"]
)
def test_how_long_a_dead_owner_is_waited_for(tmp_path, monkeypatch, who):
    monkeypatch.setattr(folder_lock, "BEAT", 0.05)
    me = folder_lock._this_process()
    owner = replace(me, pid=2**22 + 1, token="other")
    owner = {
        "another machine": replace(owner, machine="elsewhere"),
        "this job": replace(owner, machine="elsewhere", token=me.token),
        "a later process of that number": replace(me, started="0", token="other"),
        "unreadable": owner,
    }[who]
    lock = tmp_path / ".lock-00000007"
    lock.write_text("{" if who == "unreadable" else json.dumps(asdict(owner)))
    is_known = who in ("this job", "a later process of that number")
    assert hold(tmp_path, 0.8, wait=False) == is_known
    if not is_known:
        # The last heartbeat was a while ago, by the clock of the file system.
        now = time.time()
        os.utime(lock, (now, now - 0.4))
        assert hold(tmp_path, 0.8, wait=True)
        assert 0.2 < time.time() - now < 10
    assert [path.name for path in tmp_path.iterdir()] == [".lock-00000008"]
    release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("meanwhile", ["00000000", "00000009"])
def test_who_is_slow_to_take_over_takes_nothing_from_a_later_owner(
    tmp_path, monkeypatch, meanwhile
):
    """Between the look at a dead lock and the taking of it, others took it, left, and one has
    come since.
    """
    me, there = folder_lock._this_process(), tmp_path / ".lock-00000003"
    there.write_text(json.dumps(asdict(replace(me, started="0", token="dead"))))
    later = json.dumps(asdict(replace(me, token="later")))
    create = os.open

    def slow(path, *args):
        there.unlink()
        (tmp_path / f".lock-{meanwhile}").write_text(later)
        return create(path, *args)

    seen = folder_lock._top(tmp_path)
    monkeypatch.setattr(folder_lock.os, "open", slow)
    assert folder_lock._take(tmp_path, seen, me) is None
    assert [path.name for path in tmp_path.iterdir()] == [f".lock-{meanwhile}"]


def _two_jobs(folder, is_locked):
    """Two jobs save for a while, longer on a slow disk: how often each was told that it has, and
    which of these saves do not load.
    """
    mesh, begun = ftp.simulated_mesh((2,), ("tp",)), time.monotonic()
    like = {name: torch.empty(256, 16, device="meta") for name in "abcd"}
    told = Path(folder).parent / "told"  # the number of a job for each of its saves
    told.touch()

    def is_enough():
        counts = [told.read_text().count(str(which)) for which in range(2)]
        is_seen = max(counts) > 5 and (is_locked or min(counts) > 0)
        return time.monotonic() - begun > (2.0 if is_seen else 30.0)

    def job(which):
        if not is_locked:
            draft.hold = lambda *args, **options: True
            draft.check_held = lambda folder: None
        done = []
        while not is_enough():
            state = {name: torch.full((256, 16), float(len(done))) for name in like}
            with suppress(ftp.errors.CheckpointError):
                saved = ftp.save(folder, state, mesh, step=1000 * which + len(done)).result()
                done.append((len(done), saved))
                with told.open("a") as file:
                    file.write(str(which))
        time.sleep(1.0)
        lost = []
        for value, saved in done:
            try:
                if not all((x == value).all() for x in ftp.load(saved, like, mesh).values()):
                    lost.append(f"{saved} holds other values")
            except ftp.errors.CheckpointError as e:
                lost.append(str(e))
        Path(folder, f"job-{which}").write_text(json.dumps([len(done), lost]))

    for pid in [_fork(job, which) for which in range(2)]:
        os.waitpid(pid, 0)
    return [json.loads(Path(folder, f"job-{which}").read_text()) for which in range(2)]


@pytest.mark.parametrize("is_locked", [True, False])
def test_what_two_jobs_were_told_is_saved_is_there(tmp_path, is_locked):
    """Without the lock too: a folder that is to be deleted loses its name first, so that nobody
    can complete it meanwhile.
    """
    (tmp_path / "saves").mkdir()
    (rank,) = launch(_two_jobs, 1, str(tmp_path / "saves"), is_locked, timeout=120)
    assert rank.exit == 0, rank.error or rank.stderr[-2000:]
    saved = sorted(count for count, _ in rank.value)
    assert saved[1] > 5 and (saved[0] == 0) == is_locked
    assert [lost for _, lost in rank.value] == [[], []]


def _hand_over(folder):
    """Two ranks own the folder one after the other, the second while the first lives."""
    ftp.init_process_group(timeout=60)
    rank, begun = int(os.environ["RANK"]), time.monotonic()
    mine = []
    for turn in range(2):
        if rank == turn:
            mine.append(hold(Path(folder), 60.0, wait=False))
        torch.distributed.barrier()
        mine.append(folder_lock.is_held(Path(folder)))
        torch.distributed.barrier()
    ftp.destroy_process_group()
    return mine, time.monotonic() - begun


def test_ranks_of_one_job_hand_the_folder_over(tmp_path):
    ranks = launch(_hand_over, 2, str(tmp_path))
    assert [r.exit for r in ranks] == [0, 0], ranks
    assert [r.value[0] for r in ranks] == [[True, True, False], [False, True, True]]
    assert list(tmp_path.iterdir()) == []
