"""A soak: a small train job on 4 gloo ranks is killed, stopped, interrupted, left without disk
space and started twice, at random.

    python tests/dist/soak.py --seed 0 --minutes 60

A round trains to its last step in a folder of its own, in as many attempts as it takes. After every
event it is checked that
- every checkpoint in the folder is whole, and bit for bit the state of an undisturbed run after
  that step;
- no checkpoint is gone of which any rank was told that it is saved, but those that ``keep`` allows
  to go;
- every loss that any attempt computed is that of the undisturbed run, bit for bit;
- every process has gone on or ended, with an error of ftp's if with any, before ``--bound`` seconds
  were over.

The disk that fills is a tmpfs where that can be mounted (root); else the write of a file raises
what a full disk does. Events are drawn from the seed; the moments at which they strike depend on
the machine. Prints a line an event, and exits with 1 at the first claim that fails.
"""

import argparse
import contextlib
import errno
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import ftp
from ftp import P
from ftp.checkpoint.manifest import Checkpoint
from ftp.sharding.mesh import Mesh
from ftp.tensors.boxes import parts_on

RANKS, STEPS, EVERY, KEEP = 4, 1000, 20, 4
TIMEOUT, STEP_TIMEOUT = 20.0, 5.0  # seconds
DONE, FAILED, REFUSED, INTERRUPTED = 0, 3, 4, 5  # exit statuses
SPECS = {"u": P(None, "tp"), "d": P("tp"), "mu": P(None, "tp"), "md": P("tp"), "step": P()}


# The job.


def full_state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    u, d = torch.randn(8, 32, generator=g) / 3, torch.randn(32, 8, generator=g) / 6
    return {
        "u": u,
        "d": d,
        "mu": torch.zeros_like(u),
        "md": torch.zeros_like(d),
        "step": torch.tensor(0),
    }


def train_step(state, x, stops):
    """SGD with momentum; all ranks learn whether any of them is to stop."""

    def loss_fn(p):
        return ((x @ p["u"]).relu() @ p["d"] - x.sin()).square().mean()

    grads, loss = torch.func.grad_and_value(loss_fn)({"u": state["u"], "d": state["d"]})
    mu, md = 0.9 * state["mu"] + grads["u"], 0.9 * state["md"] + grads["d"]
    new = {
        "u": state["u"] - 0.01 * mu,
        "d": state["d"] - 0.01 * md,
        "mu": mu,
        "md": md,
        "step": state["step"] + 1,
    }
    return new, loss, stops.amax()


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist()) for x in tensors)
    ).hexdigest()[:16]


def note(path: Path, text: str) -> None:
    """One line, at once and whole, whatever happens to the process next."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def job(
    rank: int, folder: Path, notes: Path, keep: int | None, donate: bool, is_reference: bool = False
) -> int:
    """One rank of an attempt, which goes on from the newest checkpoint; its exit status."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    # A shell that starts the soak in the background has its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state: dict[str, torch.Tensor] = {}
    mesh = None
    try:
        ftp.init_process_group(timeout=TIMEOUT, step_timeout=STEP_TIMEOUT)
        mesh = ftp.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
        if not is_reference and newest(folder):
            state = ftp.load(folder, full_state(), mesh, SPECS)
        else:
            state = ftp.device_put(full_state(), mesh, SPECS)
        step = ftp.spmd(
            train_step,
            mesh,
            (SPECS, P("dp"), P(("dp", "tp"))),
            (SPECS, P(), P()),
            donate=(0,) if donate else (),
            data_axes=("dp",),
        )
        saving = None
        for n in range(int(state["step"]), STEPS):
            x = ftp.device_put(
                torch.randn(8, 8, generator=torch.Generator().manual_seed(n)), mesh, P("dp")
            )
            state, loss, stops = step(state, x, torch.full((1,), float(len(signals))))
            note(notes / "losses", f"{n} {loss.item().hex()}")
            if is_reference:
                note(notes / f"shards-{rank}", f"{n + 1} {digest([state[name] for name in SPECS])}")
                continue
            is_stopped = stops.item() > 0
            if (n + 1) % EVERY == 0 or is_stopped or n + 1 == STEPS:
                try:
                    if saving is not None:
                        acknowledge(notes, saving.result())
                    saving = None
                    saving = ftp.save(
                        folder,
                        state,
                        mesh,
                        SPECS,
                        step=n + 1,
                        keep=keep,
                        wait=is_stopped or n % (2 * EVERY) > EVERY,
                    )
                except ftp.errors.CheckpointError as e:
                    note(notes / "said", f"{rank}: {e}")
                    if "belongs to another job" in str(e) or "was taken over" in str(e):
                        return REFUSED
                    if (
                        is_stopped or n + 1 == STEPS
                    ):  # the disk is full: what is saved already will do
                        return DONE
            if is_stopped:
                break
        if saving is not None:
            acknowledge(notes, saving.result())
        ftp.destroy_process_group()
        return DONE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if mesh is not None and state:
            with contextlib.suppress(ftp.FtpError):
                acknowledge(notes, ftp.save(folder, state, mesh, SPECS, keep=keep).result())
        return INTERRUPTED


def acknowledge(notes: Path, folder: Path) -> None:
    note(notes / "acknowledged", folder.name)


def newest(folder: Path) -> Checkpoint | None:
    return next(reversed(ftp.checkpoints(folder)), None)


# Processes.


def forked(run: Callable[[], int], log: Path) -> int:
    """A process of its own: its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            try:
                code = run()
            except ftp.FtpError:
                code = FAILED
                traceback.print_exc()
        except KeyboardInterrupt:  # also one that comes while an error is printed
            code = INTERRUPTED
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


class Attempt:
    """The ranks of one start of the job, and the process that holds their store, as torchrun
    does.
    """

    def __init__(
        self,
        folder: Path,
        notes: Path,
        keep: int | None,
        donate: bool,
        full: Path | None,
        is_reference: bool = False,
    ):
        self.codes: dict[int, int] = {}
        self.log = notes / f"log-{time.monotonic_ns()}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.store = forked(lambda: hold_store(port), self.log)
        env = {
            "WORLD_SIZE": RANKS,
            "LOCAL_WORLD_SIZE": RANKS,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}

        def run(rank: int) -> int:
            os.environ.update(
                {
                    key: str(value)
                    for key, value in (env | {"RANK": rank, "LOCAL_RANK": rank}).items()
                }
            )
            torch.set_num_threads(1)
            if full is not None:
                fail_when_full(full)
            return job(rank, folder, notes, keep, donate, is_reference)

        self.pids = [
            forked(lambda rank=rank: run(rank), self.log.with_name(f"{self.log.name}-{rank}"))
            for rank in range(RANKS)
        ]

    def poll(self) -> dict[int, int]:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[rank] = os.waitstatus_to_exitcode(found[1])
        if len(self.codes) == len(self.pids) and self.store:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
            self.store = 0
        return self.codes

    @property
    def is_over(self) -> bool:
        return len(self.poll()) == len(self.pids)

    def signal(self, rank: int, number: int) -> None:
        if rank not in self.poll():
            os.kill(self.pids[rank], number)

    def end(self) -> None:
        for rank in range(RANKS):
            self.signal(rank, signal.SIGKILL)
        while not self.is_over:
            time.sleep(0.01)

    def tail(self) -> str:
        logs = sorted(self.log.parent.glob(f"{self.log.name}-*"))
        return "\n".join(
            f"--- {log.name[-1]}: exit"
            f" {self.codes.get(int(log.name[-1]))}\n{log.read_text()[-3000:]}"
            for log in logs
        )


def hold_store(port: int) -> int:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while os.getppid() != 1 and store is not None:
        time.sleep(0.5)
    return 0


def fail_when_full(flag: Path) -> None:
    """Without a disk that can be filled, the writing of files fails while the flag is there."""
    from ftp.checkpoint import write_shards as checkpoint

    write = checkpoint.write_file

    def write_file(path, *args):
        if flag.exists():
            raise ftp.errors.CheckpointError(
                f"{path} cannot be written: {os.strerror(errno.ENOSPC)}"
            )
        return write(path, *args)

    checkpoint.write_file = write_file


# The soak.


class Wrong(Exception):
    """A claim that does not hold."""


class Soak:
    def __init__(self, seed: int, bound: float, root: Path):
        self.draw, self.bound, self.root = random.Random(seed), bound, root
        self.counts: Counter[str] = Counter()
        self.interrupted = 0  # attempts that ended as Ctrl-C ends them
        self.disk = root / "disk"
        self.disk.mkdir()
        mounted = os.geteuid() == 0 and shutil.which("mount")
        self.is_mounted = (
            bool(mounted)
            and not subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=16m", "soak", self.disk],
                check=False,
                capture_output=True,
            ).returncode
        )
        self.full = None if self.is_mounted else root / "full"
        self.begun = time.monotonic()

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", self.disk], check=False)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begun:7.1f} s  {text}", flush=True)

    def until(self, ready: Callable[[], bool], what: str, *attempts: Attempt) -> None:
        begun = time.monotonic()
        while not ready():
            if time.monotonic() - begun > self.bound:
                raise Wrong(
                    f"a hang: {what} took more than {self.bound:g} s\n"
                    + "\n".join(a.tail() for a in attempts)
                )
            time.sleep(0.02)

    def reference(self) -> None:
        """The losses and the states of an undisturbed run."""
        notes = self.root / "reference"
        notes.mkdir()
        attempt = Attempt(self.disk / "none", notes, None, False, None, is_reference=True)
        while not attempt.is_over:
            time.sleep(0.1)
        if set(attempt.codes.values()) != {DONE}:
            raise Wrong(f"the undisturbed run failed\n{attempt.tail()}")
        self.losses = dict(line.split() for line in (notes / "losses").read_text().splitlines())
        self.shards = [
            dict(line.split() for line in (notes / f"shards-{rank}").read_text().splitlines())
            for rank in range(RANKS)
        ]
        self.say(
            f"{STEPS} undisturbed steps; the disk is"
            f" {'a tmpfs' if self.is_mounted else 'made to fail'}"
        )

    def round(self, number: int, end: float) -> None:
        self.folder, self.notes = self.disk / f"round-{number}", self.root / f"notes-{number}"
        self.notes.mkdir()
        self.keep = self.draw.choice((None, KEEP))
        self.whole: set[str] = set()
        self.read: dict[Path, int] = {}
        while time.monotonic() < end:
            attempt = self.start()
            while not attempt.is_over and time.monotonic() < end:
                self.event(attempt)
                self.check(attempt)
            if (
                attempt.is_over
                and set(attempt.codes.values()) == {DONE}
                and (last := newest(self.folder))
                and last.step == STEPS
            ):
                left = sorted(
                    path.name
                    for path in self.folder.iterdir()
                    if not path.name.isdigit() and "-step-" not in path.name
                )
                if left:
                    raise Wrong(f"a round that ended well left {left}")
                self.say(f"round {number} ends: {len(self.whole)} checkpoints were whole")
                break
            if not attempt.is_over:
                attempt.end()
                self.check(attempt)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> Attempt:
        """Starts the job and waits until it trains."""
        attempt = Attempt(self.folder, self.notes, self.keep, self.draw.random() < 0.5, self.full)
        self.progress(attempt, "a start")
        return attempt

    def progress(self, attempt: Attempt, what: str) -> None:
        """Waits for some more steps, or for the end of the job."""
        before = self.size("losses")
        self.until(lambda: self.size("losses") > before + 2000 or attempt.is_over, what, attempt)

    def size(self, name: str) -> int:
        path = self.notes / name
        return path.stat().st_size if path.exists() else 0

    def event(self, attempt: Attempt) -> None:
        time.sleep(self.draw.random() * 1.5)
        kinds = [
            "kill",
            "stop",
            "pause",
            "interrupt",
            "interrupt one",
            "terminate",
            "full disk",
            "second job",
        ]
        kind, victim = self.draw.choice(kinds), self.draw.randrange(RANKS)
        offsets = [self.draw.choice((0, 0.001, 0.01)) for _ in range(RANKS)]
        if attempt.is_over:
            return
        begun = time.monotonic()
        if kind == "kill":
            attempt.signal(victim, signal.SIGKILL)
            self.until(lambda: attempt.is_over, f"the end after rank {victim} was killed", attempt)
        elif kind == "stop":
            # Long, so that it is missed; its job is started again, and then it wakes.
            attempt.signal(victim, signal.SIGSTOP)
            self.until(
                lambda: len(attempt.poll()) >= RANKS - 1,
                f"the end of the others after rank {victim} was stopped",
                attempt,
            )
            later = self.start()
            attempt.signal(victim, signal.SIGCONT)
            self.until(lambda: attempt.is_over, f"the end of rank {victim}, which woke", attempt)
            self.progress(later, "the job after one that woke")
            later.end()
            self.judge(later)
        elif kind == "pause":
            attempt.signal(victim, signal.SIGSTOP)
            time.sleep(0.5)
            attempt.signal(victim, signal.SIGCONT)
            self.progress(attempt, f"going on after rank {victim} was stopped for a moment")
        elif kind.startswith("interrupt"):
            for rank in range(RANKS) if kind == "interrupt" else [victim]:
                attempt.signal(rank, signal.SIGINT)
                time.sleep(offsets[rank])
            self.until(lambda: attempt.is_over, f"the end after {kind}", attempt)
            self.interrupted += INTERRUPTED in attempt.codes.values()
        elif kind == "terminate":
            attempt.signal(victim, signal.SIGTERM)
            self.until(lambda: attempt.is_over, "the end after SIGTERM", attempt)
        elif kind == "full disk":
            self.fill()
            self.progress(attempt, "going on with a full disk")
            self.empty()
            self.progress(attempt, "going on after the disk was full")
        elif kind == "second job":
            before = self.size("acknowledged")
            self.until(
                lambda: self.size("acknowledged") > before or attempt.is_over, "a save", attempt
            )
            if attempt.is_over:
                return
            second = Attempt(self.folder, self.notes, self.keep, False, self.full)
            self.until(
                lambda: second.is_over or attempt.is_over,
                "the end of a second job",
                attempt,
                second,
            )
            if attempt.is_over:  # the first came to its end, and leaves the folder to the second
                self.until(lambda: second.is_over, "the end of a second job", second)
            elif REFUSED not in second.codes.values():
                raise Wrong(f"a second job was not refused\n{second.tail()}")
            self.judge(second)
        self.counts[kind] += 1
        codes = ", ".join(f"{rank}: {code}" for rank, code in sorted(attempt.poll().items()))
        self.say(
            f"{kind} ({victim}), {time.monotonic() - begun:.1f} s; ended {{{codes}}}; step"
            f" {self.last_step()}"
        )

    def fill(self) -> None:
        if self.full is not None:
            self.full.touch()
            return
        with contextlib.suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        (self.full or self.disk / "filler").unlink(missing_ok=True)

    def last_step(self) -> int | None:
        last = newest(self.folder)
        return None if last is None else last.step

    def judge(self, attempt: Attempt) -> None:
        odd = {
            code
            for code in attempt.codes.values()
            if code not in (DONE, FAILED, REFUSED, INTERRUPTED, -signal.SIGKILL)
        }
        if odd:
            raise Wrong(f"ended otherwise than with an error of ftp: {odd}\n{attempt.tail()}")

    def check(self, attempt: Attempt) -> None:
        self.judge(attempt)
        for path in self.notes.glob("losses"):
            with path.open() as file:
                file.seek(self.read.get(path, 0))
                lines = file.read().rpartition("\n")[0]
            self.read[path] = self.read.get(path, 0) + len(lines)
            for line in lines.split("\n"):
                if line and self.losses[line.split()[0]] != line.split()[1]:
                    raise Wrong(
                        f"the loss of step {line} is {self.losses[line.split()[0]]} in the"
                        " undisturbed run"
                    )
        # What is there is right. The job goes on meanwhile, and may remove its oldest.
        for checkpoint in ftp.checkpoints(self.folder):
            if checkpoint.folder.name not in self.whole:
                try:
                    found = ftp.load(
                        checkpoint.folder, full_state(), ftp.simulated_mesh((1,), ("all",))
                    )
                except ftp.errors.CheckpointError as e:
                    if checkpoint.folder.exists():
                        raise Wrong(f"{checkpoint.folder} is listed and does not load: {e}") from e
                    continue
                self.compare(checkpoint.folder.name, found)
                self.whole.add(checkpoint.folder.name)
        # What was acknowledged is there, unless as many newer ones as are to be kept are.
        acknowledged = (
            set((self.notes / "acknowledged").read_text().split())
            if self.size("acknowledged")
            else set()
        )
        there = {c.folder.name for c in ftp.checkpoints(self.folder)}
        for name in acknowledged - there:
            newer = sum(other > name for other in there)
            if self.keep is None or newer < self.keep:
                raise Wrong(f"{name} was acknowledged and is gone; there are {sorted(there)}")

    def compare(self, name: str, state: dict[str, torch.Tensor]) -> None:
        step = str(int(state["step"]))
        mesh = Mesh((2, 2), ("dp", "tp"), "cpu", "process", tuple(range(RANKS)), 0)
        for rank in range(RANKS) if step != "0" else ():
            parts = {
                key: parts_on(mesh, SPECS[key], tuple(x.shape))[rank][0].box
                for key, x in state.items()
            }
            shards = [state[key][parts[key].slices((0,) * state[key].ndim)] for key in SPECS]
            if digest(shards) != self.shards[rank][step]:
                raise Wrong(
                    f"{name} is not the state of the undisturbed run after step {step}, as"
                    f" rank {rank} had it"
                )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument(
        "--bound", type=float, default=90.0, help="seconds that nothing may take longer than"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(args.seed, args.bound, root)
    try:
        soak.reference()
        end, number = time.monotonic() + 60 * args.minutes, 0
        while time.monotonic() < end:
            soak.round(number, end)
            number += 1
        if soak.counts["interrupt"] + soak.counts["interrupt one"] > 4 and not soak.interrupted:
            raise Wrong("Ctrl-C reached no rank")
    except Wrong as e:
        soak.say(f"WRONG, seed {args.seed}: {e}\nnotes are in {root}")
        return 1
    finally:
        soak.close()
    soak.say(
        f"nothing lost, nothing wrong, no hang, seed {args.seed}: {sum(soak.counts.values())}"
        f" events, {dict(soak.counts)}"
    )
    shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
