"""Agreement of ranks on the program they are about to run, through the store and before any
collective.

A mesh's ranks number their calls, and within them their agreements, alike, so that keys made of
these numbers meet. A rank joins an agreement when it changes its program; while it goes on with the
program of its last call it says nothing. So a rank that has reached call ``c`` in silence, while
another opens an agreement at ``c``, disagrees. A thread of its own answers for it, as it may be
waiting in a collective by then. The same thread answers when a collective of a peer has failed, and
the peer asks who is still there. It sleeps until a peer sets a key of this rank's, its bell.
"""

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftp.distributed.board import ABSENT, AGREED, Board, packed, unpacked
from ftp.distributed.neighbours import Neighbours, host
from ftp.distributed.roll_call import RollCall
from ftp.distributed.store import Line, NoAnswer, Store, calls_back, cloned, holder, wait
from ftp.distributed.unfinished import Unfinished
from ftp.distributed.waiting import (
    LINGER,
    QUESTIONS,
    RESTART,
    indented,
    named_ranks,
    shortened,
    wait_until,
)
from ftp.errors import CollectiveError, FtpError, InputError, MismatchError, ReplicaError
from ftp.sharding.mesh import Mesh, process_groups, require_alive, require_coordinate, set_timeout
from ftp.sharding.process_group import (
    NCCL_LONGER,
    Timeouts,
    own_timeouts,
    restart_count,
    talks_nccl,
    timeouts,
)

# Seconds between two looks of the watching thread, while an agreement that this rank has not joined
# is open.
_WATCH = 0.5
_USUAL = (
    0.25  # seconds that an agreement may take before the threads of all ranks are woken to look
)
_ROLL_CALL = (
    2.5  # seconds for all ranks to say that they are there, in worlds that ask little of the store
)
_PER_RANK = 10  # questions that a rank asks to answer a ring, or to agree
_SILENT = "does not answer: killed, stopped, or cut off"


class Calls:
    """The calls made on one mesh, by one rank; `calls` hands it out.

    Ranks number their calls alike only if they make the same calls on the mesh, in the same order:
    that is the rule that `running` enforces, at the price of a few comparisons for a program that
    is the last call's.

    Attributes:
        call: the number of the last call that returned, 0 before the first. Ranks of equal numbers
            hold results of one call.
        failure: why the mesh takes no more calls, if so.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.call = 0
        self.program: str | None = None
        self.failure: FtpError | None = None
        self._in_call = threading.RLock()
        self._holder: int | None = None  # the thread that took it
        self._thread: int | None = None  # the thread that is inside a call
        self._caller: int | None = None  # the thread that made the last one
        self._is_overlapped = False
        # How this rank failed in the call after number `call` before it sent anything, if so.
        self._skipped = ""
        self._finished: set[str] = set()
        self._agreed_call = 0
        self._joined = 0
        self._exchanges: dict[str, int] = {}
        self._looking, self._connecting = threading.Lock(), threading.Lock()
        self._missing = ""  # which rank is known to have ended, if one is
        self._is_on_roll = self._has_learned = self._has_met = False
        self._cleaned = 0
        self._roll_call = _ROLL_CALL + _PER_RANK * mesh.size() / QUESTIONS
        self._line: Line | None = None
        self._watch: _Watch | None = None
        require_alive(mesh)
        if mesh.kind == "process":
            require_coordinate(mesh)
        self._alone = mesh.kind != "process" or mesh.size() == 1 or dist.get_backend() == "fake"
        self._host = None if self._alone else host()
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

    def forget(self, program: str) -> None:
        """Notes that a program was dropped: its next run is a first one again."""
        self._finished.discard(program)

    def running(
        self,
        program: str,
        describe: Callable[[BaseException], str] = lambda error: "",
        has_issued: Callable[[BaseException], bool] = lambda error: True,
        timeout: float | None = None,
    ) -> "_Running":
        """Around the collectives of the next call: agrees on its program if need be, and says of
        one that fails what is behind it.

        An exception in the call is raised as it is. If it came before the call's first collective,
        the call counts as not made, and the next one is agreed on. If it came later, peers may be
        in any collective of the call: the mesh takes no more calls, on all ranks.

        Args:
            program: a fingerprint, equal on all ranks. One that was not agreed on in this call and
                is not the last call's, as when a train and an evaluation step take turns, is agreed
                on.
            describe: what is known of the collective that raised the exception, "" if nothing.
            has_issued: whether this rank may have come to the call's first collective when it
                raised the exception.
            timeout: seconds to wait for the others to agree.

        Raises:
            MismatchError, CollectiveError: from an exception that another rank caused; a call from
                two threads at once.
        """
        return _Running(self, program, describe, has_issued, timeout)

    def _begin(self, program: str, thread: int, timeout: float | None) -> None:
        """Agrees on a call that is not like the last one."""
        if self.next() != self._agreed_call:
            self.agree(self.next(), {"program": program}, timeout)
        self.program, self._caller = program, thread

    def _refuse_overlap(self, thread: int) -> None:
        """Raises where the last call has not returned."""
        first, names = self._holder, {t.ident: t.name for t in threading.enumerate()}
        if first == thread or first not in names:  # it was interrupted as it was about to
            self.fail(KeyboardInterrupt(), True)
        else:
            why = (
                f"Thread {names[thread]!r} of rank {self.mesh.rank} called on the mesh while"
                f" thread {names.get(first, 'another')!r}"
                f" was in call {self.next()}, so that ranks may have paired the collectives of"
                " different calls.\n"
                "  Make all calls on a mesh from one thread, or one after another in the same"
                " order on every rank."
            )
            self.failure, self._is_overlapped = MismatchError(why), True
            self._give_up(why, MismatchError)
        self._check()

    def fail(self, error: BaseException, has_issued: bool) -> None:
        """Notes that an exception of this rank's own ended a call."""
        if self.failure is not None:
            return
        said = shortened(f"{type(error).__name__}: {error}".removesuffix(": "), 300)
        if has_issued:
            self._give_up(
                f"Rank {self.mesh.rank} left call {self.next()} on the mesh {self.mesh} in its"
                f" midst, with {said}. Later calls would pair"
                f" their collectives with those of this one, so the mesh takes no more.{RESTART}"
            )
        else:
            self.program, self._skipped = (
                None,
                f"failed in call {self.next()} before its first collective, with {said}",
            )

    def _give_up(self, why: str, kind: type[FtpError] = CollectiveError) -> None:
        """Takes no more calls, and tells the other ranks."""
        self.failure = kind(why)
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that held it
            store = self._connect(self._roll_call)
            roll = self._roll(store)
            self._learn(roll, roll.settle(why, is_missing=False))
            self._ring(store)
            roll.linger(self.mesh.size())

    def agree(
        self, call: int, payload: dict[str, str] | Exception, timeout: float | None = None
    ) -> None:
        """See the function `agree`."""
        timeout = self._timeouts.start if timeout is None else timeout
        if self._alone:
            if isinstance(payload, Exception):
                raise payload
            return
        self._check()
        try:
            if not self._in_call.acquire(False):
                self._refuse_overlap(threading.get_ident())
            try:
                self._holder = threading.get_ident()
                with self._asking(timeout) as store:
                    self._agree(store, call, payload, timeout)
            finally:
                self._in_call.release()
        finally:
            if isinstance(payload, Exception):
                raise payload

    def _agree(
        self, store: Store, call: int, payload: dict[str, str] | Exception, timeout: float
    ) -> None:
        # Before anything is published: from here on the watching thread knows that this rank speaks
        # for itself.
        number, self._joined = self._joined, self._joined + 1
        board = Board(store, self._prefix(), number, self.mesh)
        is_first = board.open(call, self._skipped)
        if isinstance(payload, Exception):
            error = shortened(f"{type(payload).__name__}: {payload}", 2000)
            board.settle(
                f"Rank {self.mesh.rank} failed to plan call {call}, so no rank runs it. Its"
                f" error:\n  {indented(error)}"
            )
            self._ring(store)
            board.linger()
            return
        if (
            board.enter({"call number": str(call), "calling thread": _thread_name(), **payload})
            == self.mesh.size()
        ):
            board.settle(board.compare() or AGREED)

        def is_over() -> bool:
            return self.failure is not None or board.is_settled()

        if not wait_until(min(_USUAL, timeout), is_over, self.mesh.size()):
            if is_first:
                self._ring(store)
            if not wait_until(timeout - _USUAL, is_over, self.mesh.size()):
                absent = board.absent()
                board.settle(board.report_absent(absent, self._said_of(absent), call, timeout))
        if self.failure is None and board.is_broken():
            self.failure = MismatchError(board.broken())
        if self.failure is not None:
            board.see()
            self._check()
        verdict = board.verdict()
        board.clean()
        if verdict != AGREED:
            board.linger()
            raise MismatchError(verdict)
        board.forget(self._cleaned)
        self._cleaned, self._agreed_call, self._skipped = number + 1, call, ""
        self._meet(store)

    def exchange(self, key: str, value: str, timeout: float | None = None) -> list[str]:
        """See the function `exchange`."""
        timeout = self._timeouts.start if timeout is None else timeout
        if self._alone:
            return [value]
        if self._missing:
            raise CollectiveError(self._missing)
        with self._asking(timeout) as store:
            turn = self._exchanges[key] = self._exchanges.get(key, 0) + 1
            name = f"{self._prefix()}/exchange/{key}/{turn}"
            keys = {rank: f"{name}/{rank}" for rank in self.mesh.ranks}
            store.set(keys[self.mesh.rank], value)
            # The last to come puts what all have said into one key: every rank asks for that, and
            # not for as many as there are ranks.
            if store.add(f"{name}/count", 1) == self.mesh.size():
                store.set(f"{name}/all", packed(store.multi_get(list(keys.values()))))
            if not wait_until(
                timeout, lambda: store.check(f"{name}/all") or bool(self._missing), self.mesh.size()
            ):
                absent = [rank for rank, k in keys.items() if not store.check(k)]
                said = self._said_of(absent)
                raise MismatchError(
                    f"{named_ranks(absent)} never came to exchange {key!r}, in {timeout:g}"
                    f" s.{said}{ABSENT}"
                )
            if self._missing and not store.check(f"{name}/all"):
                raise CollectiveError(
                    f"Rank {self.mesh.rank} waited in exchange {key!r}: {self._missing}"
                )
            everyone = unpacked(store.get(f"{name}/all"))
            store.delete([keys[self.mesh.rank]])
            if store.add(f"{name}/read", 1) == self.mesh.size():
                store.delete([f"{name}/{part}" for part in ("all", "count", "read")])
            self._meet(store)
            return everyone

    def explain(self, error: BaseException, where: str = "") -> FtpError | None:
        """What is behind a collective's failure, for the caller to raise from ``error``: a
        disagreement, or a rank that is missing.

        Peers that have seen a disagreement, or have ended, close their connections, which this rank
        sees as a lost one. It asks all ranks whether they are there; the first to know publishes
        it, and those that still wait are interrupted.

        Args:
            where: the collective and its source line, if known.
        """
        if (
            self._alone
            or not isinstance(error, RuntimeError)
            or (self.failure is None and not _is_of_collective(error))
        ):
            return None
        if self.failure is None:
            self.failure = self._find_out(
                self._waited() if "timed out" in str(error).lower() else ""
            )
        if isinstance(self.failure, MismatchError):
            return MismatchError(str(self.failure))
        return CollectiveError(
            f"Call {self.next()} on the mesh {self.mesh} failed in {where or 'a collective'}:"
            f" {self.failure}"
        )

    def _waited(self) -> str:
        start, step = self._options()
        is_first = self._given is not None and self.program not in self._finished
        seconds, option = (self._timeouts.start, start) if is_first else (self._timeouts.step, step)
        return f". Rank {self.mesh.rank} waited {seconds:g} s for it, as long as {option} says"

    def _options(self) -> tuple[str, str]:
        """What the user calls the timeouts."""
        if self._given is None:
            theirs = "timeout= of torch.distributed.init_process_group"
            return theirs, theirs
        return "timeout= of ftp.init_process_group", "step_timeout= of ftp.init_process_group"

    def _find_out(self, waited: str) -> FtpError:
        try:
            with self._asking(self._roll_call) as store:
                self._look(store)
                board = Board(store, self._prefix(), self._joined, self.mesh)
                if self.failure is None and board.is_broken():
                    self.failure = MismatchError(board.broken())
                if self.failure is None:
                    roll = self._roll(store)
                    self._sign(roll)
                    if is_first := roll.call():
                        self._ring(store)
                    self._learn(
                        roll,
                        roll.verdict(
                            self.next(),
                            waited,
                            self._roll_call - 0.2 if is_first else self._roll_call + 1.0,
                        ),
                    )
                    if is_first:
                        self._ring(store)
                    roll.linger()
        except CollectiveError as e:
            return self.failure or e
        assert self.failure is not None
        return self.failure

    @contextlib.contextmanager
    def _asking(self, seconds: float) -> Iterator[Store]:
        """The store, for as long."""
        try:
            yield self._connect(seconds)
        except RuntimeError as e:
            if isinstance(e, NoAnswer):
                raise CollectiveError(f"{e}: it is stopped, or cut off.{RESTART}") from e
            raise CollectiveError(
                f"{holder()} has ended, and with it the store that ranks talk through.{RESTART}"
            ) from e

    def _end_late(self, waited: float) -> None:
        """Finds out who is missing where the GPU does not end a call, and has it give up
        waiting.
        """
        if self.failure is None:
            why = str(self._find_out(""))
            self.failure = CollectiveError(
                f"The GPU of rank {self.mesh.rank} has not come to the end of call"
                f" {self.call + (self._thread is not None)} on"
                f" the mesh {self.mesh} in {waited:.0f} s, and what it gives now are no results:"
                f" {why}"
            )
            # The program may be blocked, and end so.
            print(f"ftp: {self.failure}", file=sys.stderr, flush=True)
        _interrupt(self.mesh)

    def _check(self) -> None:
        require_alive(self.mesh)
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def _connect(self, seconds: float) -> Store:
        with self._connecting:
            if self._line is None:
                self._line = Line(self._timeouts.start)
                # Ranks on one host find each other here; a store that is a file has no lists.
                if self._host is not None:
                    with contextlib.suppress(RuntimeError):
                        Store(self._line, seconds).append(
                            f"{self._prefix()}/host/{self._host}",
                            f"{self.mesh.rank} {os.getpid()},",
                        )
                self._watch = _Watch(self, c10d._get_default_group())
            return Store(self._line, seconds)

    def _meet(self, store: Store) -> None:
        """Watches the processes of this host; all ranks have connected by the end of the first
        agreement or exchange.
        """
        if self._has_met or self._host is None or self._watch is None:
            return
        self._has_met = True
        key = f"{self._prefix()}/host/{self._host}"
        if store.check(key):
            pids = {
                int(rank): int(pid)
                for rank, pid in (entry.split() for entry in store.get(key).split(",") if entry)
            }
            pids.pop(self.mesh.rank)
            self._watch.neighbours = Neighbours(pids, self._notice) if pids else None

    def _notice(self, rank: int, pid: int) -> None:
        """A process of this host has ended: if it has not said so itself, all ranks are told."""
        if self._watch is None or not self._watch.is_current() or self.failure is not None:
            return
        why = (
            f"Rank {rank} has been killed, or has ended without a word: its process, {pid} on"
            f" {socket.gethostname()}, is gone.{RESTART}"
        )
        try:
            store = self._connect(1.0)
            roll = self._roll(store)
            if roll.has_signed(rank):
                return
            self._learn(roll, roll.settle(why, is_missing=True))
            self._ring(store)
        except RuntimeError:  # it held the store, so nobody else can be told
            self._learn(None, (why, True))
        _interrupt(self.mesh)

    def _prefix(self) -> str:
        mesh = self.mesh
        name = zlib.crc32(
            repr((mesh.shape, mesh.axis_names, mesh.device_type, mesh.ranks)).encode()
        )
        return f"ftp/agreement/{restart_count()}/{mesh.world}/{name:08x}"

    def bell(self, rank: int) -> str:
        """The key that wakes a rank's watching thread."""
        return f"{self._prefix()}/bell/{rank}"

    def _ring(self, store: Store, ranks: Sequence[int] | None = None) -> None:
        store.multi_set([self.bell(rank) for rank in (self.mesh.ranks if ranks is None else ranks)])

    def _roll(self, store: Store) -> "RollCall":
        return RollCall(store, self._prefix(), self.mesh)

    def _sign(self, roll: "RollCall", text: str = "") -> None:
        if not self._is_on_roll:
            self._is_on_roll = True
            roll.sign(text or self._where())

    def _learn(self, roll: "RollCall | None", verdict: tuple[str, bool]) -> None:
        why, is_missing = verdict
        if is_missing:
            self._missing = why
        self.failure = self.failure or CollectiveError(why)
        if roll is not None and not self._has_learned:
            self._has_learned = True
            roll.see()

    def _where(self) -> str:
        if self._thread is not None:
            return f"is in call {self.next()}"
        if self._unfinished:  # the GPU is, which the call did not wait for
            return f"is in call {self.call}"
        return (
            "has not come to it: its last call is number"
            f" {self.call}{self._skipped and f'; it {self._skipped}'}"
        )

    def _said_of(self, absent: Sequence[int]) -> str:
        """What the watching threads of ranks that did not come say of them, in seconds."""
        if not absent:
            return ""
        with self._asking(self._roll_call) as store:
            keys = {rank: f"{self._prefix()}/asked/{rank}" for rank in absent}
            before = {rank: store.add(f"{key}/answers", 0) for rank, key in keys.items()}

            def answered(rank: int) -> bool:
                return store.add(f"{keys[rank]}/answers", 0) > before[rank]

            self._ring(store, absent)
            wait_until(self._roll_call - 0.5, lambda: all(map(answered, absent)), self.mesh.size())
            said = {
                rank: store.get(key) if answered(rank) else _SILENT for rank, key in keys.items()
            }
        return "".join(f"\n  Rank {rank} {text}." for rank, text in list(said.items())[:8])

    def _look(self, store: Store) -> bool:
        """Answers an agreement that peers have opened and this rank has not joined; whether it
        may have to look again.
        """
        with self._looking:
            return self.failure is None and self._answer(store)

    def _attend(self, store: Store) -> None:
        """Answers peers who ask who is there, and stops waiting for a rank that is known to be
        missing.
        """
        asked = f"{self._prefix()}/asked/{self.mesh.rank}"
        if store.check(f"{asked}/answers"):
            store.set(
                asked,
                self._where()
                + (f", of program {shortened(self.program, 80)}" if self.program else ""),
            )
            store.add(f"{asked}/answers", 1)
        roll = self._roll(store)
        if roll.is_settled():
            if self.failure is None or not self._missing:
                is_new = self.failure is None
                self._learn(roll, roll.learn())
                if is_new:
                    _interrupt(self.mesh)
        elif roll.is_called():
            self._sign(roll)

    def leave(self) -> None:
        """Says that this process ends, and why if it is known."""
        error = getattr(sys, "last_value", None)
        why = "" if error is None else f" with {shortened(f'{type(error).__name__}: {error}', 300)}"
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that held it
            store = self._connect(1.0)
            self._sign(self._roll(store), f"has ended after call {self.call}{why}")
            # What holds the store takes it along: threads that wait at it end first.
            is_holder = holder() == f"rank {self.mesh.rank}"
            if is_holder:
                store.set(f"{self._prefix()}/closed", "")
            self._ring(store, self.mesh.ranks if is_holder else [self.mesh.rank])

    def _answer(self, store: Store) -> bool:
        number = self._joined
        board = Board(store, self._prefix(), number, self.mesh)
        if board.is_broken():
            self.failure = MismatchError(board.broken())
            if board.is_open():
                board.see()
            _interrupt(self.mesh)
            return False
        if not board.is_open():
            return False
        opened_by, opened_at, why = board.opened()
        # In this order: a rank joins before it begins, so a call seen here that was agreed on is
        # seen as joined too.
        begun, program = self.call + (self._thread is not None), self.program
        if self._joined != number:
            return False
        if begun < opened_at:
            return True
        board.break_off(
            f"Rank {opened_by} {why}, but rank {self.mesh.rank} goes on with the program of its"
            " last call"
            f" ({shortened(program or 'none', 80)}) at call {begun}. Their process groups are"
            " closed.\n"
            "  Make the same calls with the same global shapes, in the same order, on every rank."
        )
        self._ring(store)
        board.linger()
        self.failure = MismatchError(board.broken())
        _interrupt(self.mesh)
        return False


class _Running:
    """See `Calls.running`; a class, as every call of every step enters it."""

    __slots__ = ("calls", "describe", "has_issued", "is_first", "program", "timeout")

    def __init__(
        self,
        calls: Calls,
        program: str,
        describe: Callable[[BaseException], str],
        has_issued: Callable[[BaseException], bool],
        timeout: float | None,
    ):
        self.calls, self.program, self.describe, self.has_issued, self.timeout = (
            calls,
            program,
            describe,
            has_issued,
            timeout,
        )
        self.is_first = calls._given is not None and program not in calls._finished

    def __enter__(self) -> None:
        calls, thread = self.calls, threading.get_ident()
        calls._check()
        if not calls._alone:
            if not calls._in_call.acquire(False) or calls._thread is not None:
                calls._refuse_overlap(thread)
            calls._holder = thread
        if self.program != calls.program or thread != calls._caller:
            try:
                calls._begin(self.program, thread, self.timeout)
            except BaseException:
                if not calls._alone:
                    calls._in_call.release()
                raise
        if self.is_first:
            set_timeout(calls.mesh, calls._timeouts.start)
        calls._thread = thread

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        calls = self.calls
        if error is not None and not isinstance(
            error, ReplicaError | InputError
        ):  # which all ranks raise
            try:
                if (
                    isinstance(error, RuntimeError)
                    and (explained := calls.explain(error, self.describe(error))) is not None
                ):
                    raise explained from error
                if not calls._alone:
                    calls.fail(error, self.has_issued(error))
            finally:
                calls._thread = None
                if not calls._alone:
                    calls._in_call.release()
            return
        calls._thread = None
        if not calls._alone:
            calls._in_call.release()
            if calls._is_overlapped:
                calls._check()
        calls.call += 1
        if calls._unfinished is not None:
            calls._check()
            seconds = calls._timeouts.start if self.is_first else calls._timeouts.step
            if calls._given is None:  # NCCL ends the process after that time
                seconds = max(seconds - NCCL_LONGER, seconds / 2)
            calls._unfinished.given(seconds)
        if self.is_first:
            calls._finished.add(self.program)
            set_timeout(calls.mesh, calls._timeouts.step)


class _Watch:
    """The thread that sleeps until peers ring, because they wait in an agreement or ask who is
    there, and then looks.
    """

    def __init__(self, calls: Calls, group: dist.ProcessGroup):
        self.neighbours: Neighbours | None = None
        self._calls = calls
        self._group = weakref.ref(
            group, lambda _: self._wake() if not self._stop.is_set() else None
        )
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._store: Any = c10d._get_default_store()
        self._thread = threading.Thread(target=self._run, name="ftp-agreement", daemon=True)
        self._thread.start()
        # A daemon thread inside the store's C++ code while the interpreter goes down would abort
        # the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        self._stop.set()
        if os.getpid() != self._pid:  # a forked process, without the threads
            return
        if self.neighbours is not None:
            self.neighbours.stop()
        if self.is_current():
            self._calls.leave()
        else:
            self._wake()
        self._thread.join(1.0)

    def is_current(self) -> bool:
        return dist.is_initialized() and self._group() is c10d._get_default_group()

    def _wake(self) -> None:
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(RuntimeError):
            self._calls._ring(self._calls._connect(1.0), [self._calls.mesh.rank])

    def _run(self) -> None:
        calls, bell = self._calls, self._calls.bell(self._calls.mesh.rank)
        try:
            own = cloned(self._store, calls._timeouts.start)
            looks_always = not calls_back(own)
            while True:
                if not wait(own, bell, self._stop):
                    continue
                while True:
                    if self._stop.is_set() or not self.is_current():
                        return
                    store = calls._connect(LINGER)
                    store.delete([bell])
                    may_change = calls._look(store)
                    calls._attend(store)
                    if store.check(f"{calls._prefix()}/closed"):
                        return
                    if looks_always or not may_change:
                        break
                    self._stop.wait(max(_WATCH, calls.mesh.size() / QUESTIONS))
        except (
            RuntimeError
        ):  # the rank that held the store has left: there is nobody to answer any more
            return


_calls: dict[Mesh, Calls] = {}
interrupts: list[Callable[[], None]] = []
"""What else makes collectives raise, those that are not torch's."""


def calls(mesh: Mesh) -> Calls:
    """The record of this rank's calls on ``mesh``, one for the life of the default process group.

    >>> from ftp.sharding.mesh import resolve, simulated_mesh
    >>> record = calls(resolve(simulated_mesh((2,), ("tp",))))
    >>> with record.running("a program"):
    ...     record.next()
    1
    """
    record = _calls.get(mesh)
    if record is None:
        record = _calls[mesh] = Calls(mesh)
    return record


def agree(
    mesh: Mesh, call: int, payload: dict[str, str] | Exception, timeout: float | None = None
) -> None:
    """Returns if all ranks of the mesh give equal payloads for call number ``call``; raises on
    every rank if not.

    Every rank calls it before it first runs a program, and `Calls.begin` whenever the program
    changes. It is over within milliseconds of the last arrival. Without processes, and on a mesh of
    one rank, there is nobody to ask.

    Args:
        payload: values by facet ("library version", "input shapes", "program"); compared in order,
            as strings. The exception instead, where this rank failed to plan; it is raised again.
        timeout: seconds to wait for the last rank; default that of `init_process_group`.

    Raises:
        MismatchError: naming the rank and the first facet that differ from the lowest rank's, with
            both values; or the rank that failed to plan, that goes on with an old program, or that
            never arrived.
    """
    calls(mesh).agree(call, payload, timeout)


def exchange(mesh: Mesh, key: str, value: str, timeout: float | None = None) -> list[str]:
    """Every rank's ``value``, in the order of the mesh's ranks, through the store; all ranks
    call it with one ``key``.
    """
    return calls(mesh).exchange(key, value, timeout)


def check(mesh: Mesh) -> None:
    """Raises where the mesh has failed: what its interrupted collectives left are no results."""
    calls(mesh)._check()


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether a collective raised it, rather than an op on local tensors."""
    # Gloo names itself by the path of its source in all messages but that of a connection which a
    # time-out has closed.
    return (
        isinstance(error, dist.DistError)
        or "gloo" in str(error).lower()
        or "pair closure" in str(error)
    )


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
                # Gloo has no abort, but a receive that runs out of time closes the connections of
                # its group.
                source, tag = (group.rank() + 1) % group.size(), 2**20 + group.rank()
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], source, tag).wait(timedelta(milliseconds=1))


def _thread_name() -> str:
    """What this thread is called on all ranks alike: numbers are those of threads that came
    before, and of no interest in a pool.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread() or re.search(r"_\d+$", thread.name):
        return re.sub(r"\d+", "", thread.name)
    name = re.sub(r"\d+", "#", thread.name)
    alike = [t for t in threading.enumerate() if re.sub(r"\d+", "#", t.name) == name]
    return f"{name}, {alike.index(thread)} of those alike"
