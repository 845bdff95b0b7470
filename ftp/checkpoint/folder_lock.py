"""The lock of a folder: one job at a time saves to it. Owner, heartbeat, and takeover of a dead
owner's lock.

Locks are numbered files; the lock with the highest number owns the folder. To take over, a process
creates the next number, which the file system lets only one process do. A lock is removed only if a
higher one exists. The owner touches its file every second: the heartbeat. Before an owner completes
a checkpoint it checks that it still owns the folder, so a process that was stopped for long changes
nothing.
"""

import atexit
import contextlib
import json
import os
import random
import re
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftp.checkpoint.manifest import SAVING
from ftp.dataclass import dataclass
from ftp.errors import CheckpointError
from ftp.torch_internals.process_groups import get_default_store

LOCK = ".lock-"
BEAT = 1.0  # seconds between two heartbeats
_LEAST = 10  # an owner counts as dead after so many missed heartbeats, at the least
_NAME = re.compile(re.escape(LOCK) + r"(\d{8,})")
_SCHEDULERS = {
    "SLURM_JOB_ID": "Slurm job",
    "PBS_JOBID": "PBS job",
    "LSB_JOBID": "LSF job",
    "TORCHELASTIC_RUN_ID": "torchrun job",
}


@dataclass(frozen=True)
class Owner:
    """A process that saves, and its job.

    Attributes:
        machine: the host's boot and the process namespace; pids are unique within it.
        started: when the process started; a later process of the same pid has another time.
        job: the job's name for people.
        token: equal in all ranks and restarts of a job, different in other jobs.
    """

    host: str
    machine: str
    pid: int
    started: str
    job: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.job})"

    def is_gone(self, machine: str) -> bool:
        """Whether the process is known to have ended; only its own machine knows."""
        return self.machine == machine and _started(self.pid) != self.started


@dataclass(frozen=True)
class Lock:
    """A lock as read; it has no owner while its file is being written."""

    path: Path
    number: int
    owner: Owner | None
    beat: int


_held: dict[Path, Lock] = {}
_taking = threading.RLock()
_token = uuid.uuid4().hex


def hold(folder: Path, patience: float, *, wait: bool) -> bool:
    """Make this process the owner of a folder, until it ends or calls `release`.

    Args:
        patience: seconds without a heartbeat after which an owner counts as dead, at least ten
            heartbeats. There is no wait for an owner of this job, or one that is known to have
            ended.
        wait: watch another owner until it is known to live or to be dead. Otherwise return at once.

    Returns:
        Whether this process is the owner. False, without ``wait``: another process is the owner,
        and may be dead.

    Raises:
        CheckpointError: the owner lives.
        OSError: as the file system says.
    """
    with _taking:
        if is_held(folder):
            return True
        _held.pop(folder, None)
        me = _this_process()
        seen: Lock | None = None
        known, dead_for = 0.0, 0.0
        while True:
            top = _top(folder)
            if top is None or (
                top.owner is not None
                and (top.owner.token == me.token or top.owner.is_gone(me.machine))
            ):
                is_free = True
            elif not wait:
                return False
            elif seen is None or top.path != seen.path:
                seen, known, dead_for, is_free = top, time.monotonic(), _age(top), False
            elif top.beat != seen.beat:
                raise CheckpointError(
                    f"{folder} belongs to another job, which is alive:"
                    f" {top.owner or 'a process that does not give its name'}."
                    " Save to another folder, or end that job; its lock goes when it ends or calls"
                    " ftp.destroy_process_group()."
                )
            else:
                is_free = dead_for + time.monotonic() - known > longest_quiet(patience)
            if is_free and (lock := _take(folder, top, me)) is not None:
                _held[folder] = lock
                _Heart.start()
                return True
            time.sleep(random.uniform(0.1, 0.3) * BEAT)


def longest_quiet(patience: float) -> float:
    """Seconds without a heartbeat after which an owner counts as dead."""
    return max(patience, _LEAST * BEAT)


def is_held(folder: Path) -> bool:
    """Whether this process owns a folder."""
    lock = _held.get(folder)
    return lock is not None and max(_numbers(folder), default=None) == lock.number


def check_held(folder: Path) -> None:
    """Raise if another job has taken the folder over."""
    if is_held(folder):
        return
    top = _top(folder)
    if top is None:
        raise CheckpointError(
            f"{folder} or its lock, {LOCK}*, was removed during the save. Nothing was saved."
        )
    raise CheckpointError(
        f"{folder} was taken over by {top.owner or 'another process'}, as this process gave no sign"
        " of life for too long. Nothing was saved. End this job, or save to another folder."
    )


def release() -> None:
    """Release all folders of this process."""
    with _taking:
        while _held:
            _, lock = _held.popitem()
            with contextlib.suppress(OSError):
                lock.path.unlink()


def _take(folder: Path, seen: Lock | None, me: Owner) -> Lock | None:
    """Take the lock after ``seen``, whose owner is dead; None if another process was first."""
    number = 0 if seen is None else seen.number + 1
    path = folder / f"{LOCK}{number:08d}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return None
    try:
        with os.fdopen(file, "w", encoding="utf-8") as f:
            f.write(json.dumps(asdict(me)))
        # If the dead owner's lock is gone, another process has taken and released the folder since.
        others = [n for n in _numbers(folder) if n != number]
        judged = None if seen is None else _read(seen.path, seen.number)
        is_first = all(n < number for n in others)
        if is_first and (
            not others if seen is None else judged is not None and judged.owner == seen.owner
        ):
            for n in others:
                with contextlib.suppress(OSError):
                    (folder / f"{LOCK}{n:08d}").unlink()
            return Lock(path, number, me, 0)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    path.unlink(missing_ok=True)
    return None


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(found[1]) for name in os.listdir(folder) if (found := _NAME.fullmatch(name))]
    except FileNotFoundError:
        return []


def _top(folder: Path) -> Lock | None:
    """The lock with the highest number."""
    while numbers := _numbers(folder):
        if (lock := _read(folder / f"{LOCK}{max(numbers):08d}", max(numbers))) is not None:
            return lock
    return None


def _read(path: Path, number: int) -> Lock | None:
    """A lock, None if it is gone. Opening it makes network file systems read its time."""
    try:
        with path.open(encoding="utf-8") as file:
            beat, text = os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None
    try:
        owner = Owner(**json.loads(text))
    except (ValueError, TypeError):
        owner = None
    return Lock(path, number, owner, beat)


def _age(lock: Lock) -> float:
    """Seconds since the last heartbeat, by the file system's clock, as hosts' clocks differ."""
    probe = lock.path.with_name(f"{SAVING}now-{uuid.uuid4().hex[:8]}")
    try:
        probe.mkdir()
        now = probe.stat().st_mtime_ns
        probe.rmdir()
    except OSError:
        return 0.0
    return max(0, now - lock.beat) / 1e9


class _Heart:
    """The heartbeat thread: touches the locks that this process holds."""

    _thread: threading.Thread | None = None

    @classmethod
    def start(cls) -> None:
        if cls._thread is None:
            cls._thread = threading.Thread(target=cls._run, name="ftp-folder-lock", daemon=True)
            cls._thread.start()

    @staticmethod
    def _run() -> None:
        while True:
            time.sleep(BEAT)
            for lock in list(_held.values()):
                # An error means that the folder is gone or was taken over: the next save raises.
                with contextlib.suppress(OSError):
                    os.utime(lock.path)

    @classmethod
    def forget(cls) -> None:
        """Forget all locks in a forked process, which owns none."""
        global _taking, _token
        cls._thread, _taking, _token = None, threading.RLock(), uuid.uuid4().hex
        _held.clear()


def _this_process() -> Owner:
    jobs = [
        f"{name} {value}"
        for key, name in _SCHEDULERS.items()
        if (value := os.environ.get(key)) not in (None, "", "none")
    ]
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    job = ", ".join(filter(None, [*jobs[:1], program])) or "no job known"
    host, pid = socket.gethostname(), os.getpid()
    boot = _line("/proc/sys/kernel/random/boot_id") or host
    machine = f"{boot}/{_link('/proc/self/ns/pid')}"
    return Owner(host, machine, pid, _started(pid), job, _job_token())


def _job_token() -> str:
    """A token that all ranks and restarts of a job share, by the launcher's store."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return _token
    store = get_default_store()
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    try:
        return store.compare_set("ftp/job", "", _token).decode()
    except RuntimeError:
        return _token


def _started(pid: int) -> str:
    """When a process started; "" if there is none, or a zombie."""
    stat = _line(f"/proc/{pid}/stat")
    if stat:
        state, *rest = stat[stat.rindex(")") + 2 :].split()
        return "" if state in "ZX" else rest[18]
    if os.path.exists("/proc/self/stat"):
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "unknown"


def _line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


os.register_at_fork(after_in_child=_Heart.forget)
atexit.register(release)
