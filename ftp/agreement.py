"""Agreement of ranks on the program they are about to run, through the store and before any collective.

A mesh's ranks number their calls, and within them their agreements, alike, so that keys made of these numbers meet.
A rank joins an agreement when it changes its program; while it goes on with the program of its last call it says nothing.
So a rank that has reached call ``c`` in silence, while another opens an agreement at ``c``, disagrees. A thread of its
own answers for it, as it may be waiting in a collective by then. The same thread answers when a collective of a peer has
failed, and the peer asks who is still there.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftp.errors import CollectiveError, FtpError, MismatchError
from ftp.mesh import (
    NCCL_LONGER,
    Mesh,
    Timeouts,
    own_timeouts,
    process_groups,
    require_alive,
    require_coordinate,
    restart_count,
    set_timeout,
    talks_nccl,
    timeouts,
)
from ftp.unfinished import Unfinished

_WATCH = 0.5  # seconds between two looks of the watching thread
_LINGER = 2.0  # seconds that a failing rank stays, at the most, for the others to read why
_ROLL_CALL = 3.0  # seconds for all ranks to say that they are there: a few looks of the watching thread
_AGREED = "agreed"


class Calls:
    """The calls made on one mesh, by one rank; `calls` hands it out.

    Ranks number their calls alike only if they make the same calls on the mesh, in the same order: that is the rule
    that `begin` enforces, at the price of two comparisons for a program that is the last call's.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.call = 0
        self.finished = 0  # the last call that came to its end here
        self.program: str | None = None
        self.failure: FtpError | None = None
        self._is_running = False
        self._finished: set[str] = set()
        self._agreed_call = 0
        self._joined = 0
        self._exchanges: dict[str, int] = {}
        self._looking = threading.Lock()
        self._stores: tuple[c10d.Store, c10d.Store] | None = None
        require_alive(mesh)
        if mesh.kind == "process":
            require_coordinate(mesh)
        self._alone = mesh.kind != "process" or mesh.size() == 1 or dist.get_backend() == "fake"
        self._given = None if self._alone else timeouts()
        self._timeouts = Timeouts() if self._alone else self._given or own_timeouts()
        by_nccl = not self._alone and mesh.device_type == "cuda" and talks_nccl()
        self._unfinished = Unfinished(self._end_late) if by_nccl else None

    @property
    def timeouts(self) -> Timeouts:
        """How long this rank waits for the others."""
        return self._timeouts

    def next(self) -> int:
        """The number of the call that is about to begin, the same until `begin`."""
        return self.call + 1

    def begin(self, call: int, program: str, timeout: float | None = None) -> None:
        """Notes that this rank runs ``program`` as call number ``call``; every step calls it before its collectives.

        ``program`` is a fingerprint, equal on all ranks. One that was not agreed on in this call and is not the last
        call's, as when a train and an evaluation step take turns, is agreed on here.
        """
        self._check()
        if program != self.program:
            if call != self._agreed_call:
                self.agree(call, {"program": program}, timeout)
            self.program = program
        self.call = call

    def forget(self, program: str) -> None:
        """Notes that a program was dropped: its next run is a first one again."""
        self._finished.discard(program)

    def running(self, describe: Callable[[BaseException], str] = lambda error: "") -> "_Running":
        """Around the collectives of the call that has begun: sets how long they wait, and says of one that fails what is behind it.

        Args:
            describe: what is known of the collective that raised the exception, "" if nothing.

        Raises:
            MismatchError, CollectiveError: from the exception.
        """
        return _Running(self, describe)

    def agree(self, call: int, payload: dict[str, str] | Exception, timeout: float | None = None) -> None:
        """See the function `agree`."""
        timeout = self._timeouts.start if timeout is None else timeout
        if self._alone:
            if isinstance(payload, Exception):
                raise payload
            return
        self._check()
        store, _ = self._connect(timeout)
        # Before anything is published: from here on the watching thread knows that this rank speaks for itself.
        number, self._joined = self._joined, self._joined + 1
        board = _Board(store, self._prefix(), number, self.mesh)
        board.open(call)
        if isinstance(payload, Exception):
            error = _shorten(f"{type(payload).__name__}: {payload}", 2000)
            board.settle(f"Rank {self.mesh.rank} failed to plan call {call}, so no rank runs it. Its error:\n  {_indent(error)}")
            board.linger()
            raise payload
        if board.enter({"call number": str(call), **payload}) == self.mesh.size():
            board.settle(board.compare() or _AGREED)
        if not _wait(timeout, lambda: board.is_settled() or board.is_broken()):
            board.settle(board.report_absent(call, timeout))
        if board.is_broken():
            self.failure = MismatchError(board.broken())
        verdict = board.verdict() if self.failure is None else str(self.failure)
        if verdict != _AGREED:
            board.linger()
            raise MismatchError(verdict)
        board.clean()
        self._agreed_call = call

    def exchange(self, key: str, value: str, timeout: float | None = None) -> list[str]:
        """See the function `exchange`."""
        timeout = self._timeouts.start if timeout is None else timeout
        if self._alone:
            return [value]
        self._check()
        store, _ = self._connect(timeout)
        turn = self._exchanges[key] = self._exchanges.get(key, 0) + 1
        keys = {rank: f"{self._prefix()}/exchange/{key}/{turn}/{rank}" for rank in self.mesh.ranks}
        store.set(keys[self.mesh.rank], value)
        # One key tells that all have come, so that waiting costs one question at a time, however many they are.
        done = f"{self._prefix()}/exchange/{key}/{turn}"
        if store.add(f"{done}/count", 1) == self.mesh.size():
            store.set(done, "")
        if not _wait(timeout, lambda: store.check([done])):
            absent = [rank for rank, k in keys.items() if not store.check([k])]
            raise MismatchError(f"{_ranks(absent)} never came to exchange {key!r}, in {timeout:g} s.{_ABSENT}")
        return [v.decode() for v in store.multi_get(list(keys.values()))]

    def explain(self, error: BaseException, where: str = "") -> FtpError | None:
        """What is behind a collective's failure, for the caller to raise from ``error``: a disagreement, or a rank that is missing.

        Peers that have seen a disagreement, or have ended, close their connections, which this rank sees as a lost one. It asks all
        ranks whether they are there; the first to know publishes it, and those that still wait are interrupted.

        Args:
            where: the collective and its source line, if known.
        """
        if self._alone or not isinstance(error, RuntimeError) or (self.failure is None and not _is_of_collective(error)):
            return None
        if self.failure is None:
            self.failure = self._find_out()
        if isinstance(self.failure, MismatchError):
            return MismatchError(str(self.failure))
        return CollectiveError(f"Call {self.call} on the mesh {self.mesh} failed in {where or 'a collective'}: {self.failure}")

    def _find_out(self) -> FtpError:
        try:
            store, _ = self._connect()
            self._look(store)
            board = _Board(store, self._prefix(), self._joined, self.mesh)
            if self.failure is None and board.is_broken():
                self.failure = MismatchError(board.broken())
            return self.failure or CollectiveError(_Roll(store, self._prefix(), self.mesh).call(self.call))
        except RuntimeError:
            holder = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            return self.failure or CollectiveError(f"{holder} has ended, and with it the store that ranks talk through.{_RESTART}")

    def _end_late(self, waited: float) -> None:
        """Finds out who is missing where the GPU does not end a call, and has it give up waiting."""
        if self.failure is None:
            why = str(self._find_out())
            self.failure = CollectiveError(
                f"The GPU of rank {self.mesh.rank} has not come to the end of call {self.call} on"
                f" the mesh {self.mesh} in {waited:.0f} s, and what it gives now are no results: {why}"
            )
            # The program may be blocked, and end so.
            print(f"ftp: {self.failure}", file=sys.stderr, flush=True)
        _interrupt(self.mesh)

    def _check(self) -> None:
        require_alive(self.mesh)
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def _connect(self, timeout: float | None = None) -> tuple[c10d.Store, c10d.Store]:
        """A connection for the caller and one for the watching thread, as a question waits its turn on a shared one."""
        if self._stores is None:
            store: Any = c10d._get_default_store()
            usual = store.timeout
            # Where the rank that holds the store has ended, a new connection is tried again until the store's timeout, half an hour.
            store.set_timeout(timedelta(seconds=self._timeouts.start if timeout is None else timeout))
            try:
                stores = (store.clone(), store.clone())
            finally:
                store.set_timeout(usual)
            stores[0].set_timeout(usual)
            stores[1].set_timeout(timedelta(seconds=5))
            self._stores = stores
            _Watch(self, c10d._get_default_group())
        return self._stores

    def _prefix(self) -> str:
        mesh = self.mesh
        name = zlib.crc32(repr((mesh.shape, mesh.axis_names, mesh.device_type, mesh.ranks)).encode())
        return f"ftp/agreement/{restart_count()}/{mesh.world}/{name:08x}"

    def _look(self, store: c10d.Store) -> None:
        """Answers an agreement that peers have opened and this rank has not joined."""
        with self._looking:
            if self.failure is None:
                self._answer(store)

    def _attend(self, store: c10d.Store) -> None:
        """Answers peers who ask who is there, and stops waiting for a rank that is known to be missing."""
        roll = _Roll(store, self._prefix(), self.mesh)
        if not roll.is_called():
            return
        is_in = self._is_running or self._unfinished
        roll.answer(f"is in call {self.call}" if is_in else f"has not come to it: its last call is number {self.call}")
        if roll.is_settled() and self.failure is None:
            self.failure = CollectiveError(roll.learn())
            _interrupt(self.mesh)

    def _leave(self, store: c10d.Store) -> None:
        """Says that this process ends, and why if it is known."""
        error = getattr(sys, "last_value", None)
        why = "" if error is None else f" with {_shorten(f'{type(error).__name__}: {error}', 300)}"
        _Roll(store, self._prefix(), self.mesh).answer(f"has ended after call {self.call}{why}")

    def _answer(self, store: c10d.Store) -> None:
        number = self._joined
        board = _Board(store, self._prefix(), number, self.mesh)
        if not board.is_open():
            return
        opened_by, opened_at = board.opened()
        # In this order: a rank joins before it begins, so a call seen here that was agreed on is seen as joined too.
        call, program = self.call, self.program
        if self._joined != number:
            return
        if call < opened_at:
            board.note(f"its last call is number {call}" + (f", of program {_shorten(program, 80)}" if program else ""))
            return
        board.break_off(
            f"Rank {opened_by} changes its program at call {opened_at}, but rank {self.mesh.rank} goes on with the program of its last call"
            f" ({_shorten(program or 'none', 80)}) at call {call}. Their process groups are closed.\n"
            "  Make the same calls with the same global shapes, in the same order, on every rank."
        )
        board.linger()
        self.failure = MismatchError(board.broken())
        _interrupt(self.mesh)


class _Running:
    """See `Calls.running`; a class, as every call of every step enters it."""

    __slots__ = ("calls", "describe", "is_first", "program")

    def __init__(self, calls: Calls, describe: Callable[[BaseException], str]):
        self.calls, self.describe, self.program = calls, describe, calls.program or ""
        self.is_first = calls._given is not None and self.program not in calls._finished

    def __enter__(self) -> None:
        if self.is_first:
            set_timeout(self.calls.mesh, self.calls._timeouts.start)
        self.calls._is_running = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.calls._is_running = False
        if isinstance(error, RuntimeError) and (explained := self.calls.explain(error, self.describe(error))) is not None:
            raise explained from error
        if error is None:
            self.calls.finished = self.calls.call
        if error is None and self.calls._unfinished is not None:
            self.calls._check()
            seconds = self.calls._timeouts.start if self.is_first else self.calls._timeouts.step
            if self.calls._given is None:  # NCCL ends the process after that time
                seconds = max(seconds - NCCL_LONGER, seconds / 2)
            self.calls._unfinished.given(seconds)
        if error is None and self.is_first:
            self.calls._finished.add(self.program)
            set_timeout(self.calls.mesh, self.calls._timeouts.step)


@dataclass(frozen=True)
class _Board:
    """The keys of one agreement. Whoever comes last compares; whoever knows of a failure says so at once."""

    store: c10d.Store
    prefix: str
    number: int
    mesh: Mesh

    def key(self, name: str | int) -> str:
        return f"{self.prefix}/{self.number}/{name}"

    def open(self, call: int) -> None:
        self.store.compare_set(self.key("open"), "", f"{self.mesh.rank} {call}")

    def is_open(self) -> bool:
        return self.store.check([self.key("open")])

    def opened(self) -> tuple[int, int]:
        rank, call = self.store.get(self.key("open")).split()
        return int(rank), int(call)

    def enter(self, payload: dict[str, str]) -> int:
        """Publishes this rank's side; the number of ranks that have by now."""
        self.store.set(self.key(self.mesh.rank), zlib.compress(json.dumps(payload).encode(), 1).hex())
        return self.store.add(self.key("count"), 1)

    def compare(self) -> str | None:
        """The first difference from the lowest rank, if any."""
        ranks = sorted(self.mesh.ranks)
        texts = self.store.multi_get([self.key(rank) for rank in ranks])
        if all(t == texts[0] for t in texts):
            return None
        lowest, *others = (json.loads(zlib.decompress(bytes.fromhex(t.decode()))) for t in texts)
        for rank, payload in zip(ranks[1:], others, strict=True):
            for facet in dict.fromkeys((*lowest, *payload)):
                a, b = (p.get(facet, "(absent)") for p in (lowest, payload))
                if a != b:
                    return _describe_difference(facet, (ranks[0], a), (rank, b), lowest.get("call number", "?"))
        return None

    def settle(self, verdict: str) -> None:
        self.store.compare_set(self.key("verdict"), "", verdict)

    def break_off(self, verdict: str) -> None:
        """Settles that a rank has gone on; its groups are closed, so the mesh is of no use from here on."""
        self.settle(verdict)
        self.store.compare_set(f"{self.prefix}/broken", "", self.verdict())

    def is_broken(self) -> bool:
        return self.store.check([f"{self.prefix}/broken"])

    def broken(self) -> str:
        return self.store.get(f"{self.prefix}/broken").decode()

    def is_settled(self) -> bool:
        return self.store.check([self.key("verdict")])

    def verdict(self) -> str:
        return self.store.get(self.key("verdict")).decode()

    def linger(self) -> None:
        """Stays until all ranks know of the failure: this one may hold the store, and its end closes their connections."""
        with contextlib.suppress(RuntimeError):  # whoever holds it has seen all, and has left
            self.store.add(self.key("seen"), 1)
            _wait(_LINGER, lambda: self.store.add(self.key("seen"), 0) >= self.mesh.size())

    def note(self, text: str) -> None:
        self.store.set(self.key(f"note/{self.mesh.rank}"), text)

    def report_absent(self, call: int, timeout: float) -> str:
        absent = [rank for rank in sorted(self.mesh.ranks) if not self.store.check([self.key(rank)])]
        notes = [(rank, self.key(f"note/{rank}")) for rank in absent]
        known = [f"\n  Rank {rank}: {self.store.get(k).decode()}." for rank, k in notes if self.store.check([k])]
        who = _ranks(absent) if absent else "The rank that compares"
        waiting = f"rank {self.mesh.rank} waited {timeout:g} s to agree on the program of call {call}"
        return f"{who} never arrived: {waiting}.{''.join(known)}{_ABSENT}"

    def clean(self) -> None:
        """Drops this rank's text, which nobody reads after an agreement."""
        self.store.delete_key(self.key(self.mesh.rank))


@dataclass(frozen=True)
class _Roll:
    """Who is still there, asked once by whoever sees a collective fail; each rank's first answer stands, and so does the first verdict."""

    store: c10d.Store
    prefix: str
    mesh: Mesh

    def key(self, name: str | int) -> str:
        return f"{self.prefix}/roll/{name}"

    def is_called(self) -> bool:
        return self.store.check([self.key("called")])

    def answer(self, text: str) -> None:
        self.store.compare_set(self.key(self.mesh.rank), "", text)

    def is_settled(self) -> bool:
        return self.store.check([self.key("verdict")])

    def learn(self) -> str:
        """The verdict; the others see that this rank has it."""
        verdict = self.store.get(self.key("verdict")).decode()
        self.store.set(self.key(f"seen/{self.mesh.rank}"), "")
        return verdict

    def call(self, call: int) -> str:
        """Asks all ranks, waits for their answers, and gives the verdict of the first that had them."""
        self.answer(f"is in call {call}")
        self.store.compare_set(self.key("called"), "", "")
        keys = {rank: self.key(rank) for rank in sorted(self.mesh.ranks)}
        _wait(_ROLL_CALL, lambda: self.is_settled() or self.store.check(list(keys.values())))
        if not self.is_settled():
            said = {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}
            self.store.compare_set(self.key("verdict"), "", self._describe(call, said))
        # Whoever holds the store stays until all that are there know.
        verdict = self.learn()
        with contextlib.suppress(RuntimeError):
            there = [self.key(f"seen/{rank}") for rank, key in keys.items() if self.store.check([key])]
            _wait(_LINGER, lambda: self.store.check(there))
        return verdict

    def _describe(self, call: int, said: dict[int, str]) -> str:
        silent = [rank for rank in sorted(self.mesh.ranks) if rank not in said]
        found = [f"{_ranks(silent)} {'do' if len(silent) > 1 else 'does'} not answer: killed, stopped, or cut off"] if silent else []
        found += [f"{_ranks([rank])} {text}" for rank, text in said.items() if not text.startswith("is in call")]
        found = found or [f"{_ranks([rank])} {text}" for rank, text in said.items() if text != f"is in call {call}"]
        return f"{'. '.join(found) or 'all ranks are in it, so a connection between them failed or was too slow'}.{_RESTART}"


class _Watch:
    """The thread that looks, every half second, whether peers have opened an agreement or ask who is there."""

    def __init__(self, calls: Calls, group: dist.ProcessGroup):
        self._calls = calls
        self._group = weakref.ref(group)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftp-agreement", daemon=True)
        self._thread.start()
        # A daemon thread inside the store's C++ code while the interpreter goes down would abort the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._is_current():
            with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that held it
                self._calls._leave(self._calls._connect()[1])

    def _is_current(self) -> bool:
        return dist.is_initialized() and self._group() is c10d._get_default_group()

    def _run(self) -> None:
        store = self._calls._connect()[1]
        while not self._stop.wait(_WATCH):
            if self._calls.failure is not None or not self._is_current():
                return
            try:
                self._calls._look(store)
                self._calls._attend(store)
            except RuntimeError:  # the rank that held the store has left: there is nobody to answer any more
                return


_calls: dict[Mesh, Calls] = {}
interrupts: list[Callable[[], None]] = []
"""What else makes collectives raise, those that are not torch's."""

_RESTART = "\n  Restart from the last checkpoint: torchrun --max-restarts=N does, where the program resumes by itself."
_ABSENT = "\n  See what it does: it may have failed before this call, run other code, or still be starting (then allow a longer timeout)."


def calls(mesh: Mesh) -> Calls:
    """The record of this rank's calls on ``mesh``, one for the life of the default process group.

    >>> from ftp.mesh import resolve, simulated_mesh
    >>> record = calls(resolve(simulated_mesh((2,), ("tp",))))
    >>> record.begin(record.next(), "a program")
    """
    record = _calls.get(mesh)
    if record is None:
        record = _calls[mesh] = Calls(mesh)
    return record


def agree(mesh: Mesh, call: int, payload: dict[str, str] | Exception, timeout: float | None = None) -> None:
    """Returns if all ranks of the mesh give equal payloads for call number ``call``; raises on every rank if not.

    Every rank calls it before it first runs a program, and `Calls.begin` whenever the program changes. It is over
    within milliseconds of the last arrival. Without processes, and on a mesh of one rank, there is nobody to ask.

    Args:
        payload: values by facet ("library version", "input shapes", "program"); compared in order, as strings. The
            exception instead, where this rank failed to plan; it is raised again.
        timeout: seconds to wait for the last rank; default that of `init_process_group`.

    Raises:
        MismatchError: naming the rank and the first facet that differ from the lowest rank's, with both values; or
            the rank that failed to plan, that goes on with an old program, or that never arrived.
    """
    calls(mesh).agree(call, payload, timeout)


def exchange(mesh: Mesh, key: str, value: str, timeout: float | None = None) -> list[str]:
    """Every rank's ``value``, in the order of the mesh's ranks, through the store; all ranks call it with one ``key``."""
    return calls(mesh).exchange(key, value, timeout)


def check(mesh: Mesh) -> None:
    """Raises where the mesh has failed: what its interrupted collectives left are no results."""
    calls(mesh)._check()


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether a collective raised it, rather than an op on local tensors."""
    # Gloo names itself by the path of its source in all messages but that of a connection which a time-out has closed.
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "pair closure" in str(error)


def _interrupt(mesh: Mesh) -> None:
    """Makes the collectives of this rank on the mesh raise, one that it is waiting in included."""
    assert mesh.torch is not None
    for interrupt in interrupts:
        interrupt()
    for group in process_groups(mesh):
        backends: dict[int, Any] = {id(b): b for b in map(group._get_backend, group._device_types)}
        for backend in backends.values():
            if not isinstance(backend, c10d.ProcessGroupGloo):
                # It waits for graphs that hold its collectives, which keeps no other from ending.
                threading.Thread(target=backend.abort, name="ftp-abort", daemon=True).start()
            elif group.size() > 1:
                # Gloo has no abort, but a receive that runs out of time closes the connections of its group.
                source, tag = (group.rank() + 1) % group.size(), 2**20 + group.rank()
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], source, tag).wait(timedelta(milliseconds=1))


def _wait(timeout: float, ready: Callable[[], bool]) -> bool:
    """Whether it became ready in time; asks rarely when it waits long, and can be interrupted from the keyboard."""
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        time.sleep(min(0.1, max(0.0005, waited / 8)))
    return True


def _describe_difference(facet: str, lowest: tuple[int, str], other: tuple[int, str], call: str) -> str:
    (first, a), (rank, b) = lowest, other
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    shown = [f"\n  rank {r}: {_shorten(text, 160, start)}" for r, text in ((first, a), (rank, b))]
    return (
        f"Ranks disagree on the {facet} of call {call}: rank {rank} differs from rank {first}, so no rank runs it.{''.join(shown)}\n"
        "  Give every rank the same program, specs and global shapes."
    )


def _shorten(text: str, width: int, around: int = 0) -> str:
    """At most ``width`` characters of a text, from a little before position ``around``.

    >>> _shorten("abcdefghijklmnop", 6, around=12)
    '...klmnop'
    """
    start = max(0, min(around - width // 3, len(text) - width))
    end = start + width
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


def _indent(text: str) -> str:
    return text.replace("\n", "\n  ")


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"Rank{'s' if len(ranks) > 1 else ''} {names}"
