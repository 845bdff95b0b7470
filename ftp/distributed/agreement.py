"""Agreement of ranks on the program they are about to run, through the store and before any
collective.

A mesh's ranks number their calls, and within them their agreements, alike, so that keys made of
these numbers meet. A rank joins an agreement when it changes its program; while it goes on with the
program of its last call it sends nothing. So a rank that begins call ``c`` without an agreement,
while another opens one at ``c``, disagrees. Its watcher, a thread, says so, as the rank may wait in
a collective by then. The watcher also answers peers whose collective has failed.

Above 450 lines: a call, its agreement and its watcher are one protocol, which is read as one.
"""

import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

from ftp.distributed.board import Board, Verdict
from ftp.distributed.channel import Channel
from ftp.distributed.exchanges import Exchanges
from ftp.distributed.faults import Faults
from ftp.distributed.handed_out import HandedOut
from ftp.distributed.interrupt import interrupt
from ftp.distributed.interrupt import interrupts as interrupts  # where others look for it
from ftp.distributed.roll_call import Answer
from ftp.distributed.running import Running, thread_name
from ftp.distributed.store import Store
from ftp.distributed.unfinished import Unfinished
from ftp.distributed.waiting import RESTART, indented, shortened, wait_until
from ftp.distributed.watcher import Watcher
from ftp.errors import CollectiveError, FtpError, MismatchError
from ftp.sharding.mesh import Mesh, require_alive, require_coordinate
from ftp.sharding.process_group import (
    Timeouts,
    current_world,
    failed,
    own_timeouts,
    talks_nccl,
    timeouts,
)
from ftp.torch_internals.error_texts import has_timed_out, is_of_collective

_USUAL = 0.25  # seconds that an agreement may take before the watchers of all ranks are notified


class Calls:
    """The calls made on one mesh, by one rank; `calls` hands it out.

    Ranks number their calls alike only if they make the same calls on the mesh, in the same order:
    that is the rule that `running` enforces, at the price of a few comparisons for a program that
    is the last call's.

    Attributes:
        call: the number of the last call that returned, 0 before the first. Ranks of equal numbers
            hold results of one call.
        program: the fingerprint of the last call's program.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.call = 0
        self.program: str | None = None
        self._in_call = threading.RLock()
        self._holder: int | None = None  # the thread that took it
        self._thread: int | None = None  # the thread that is inside a call
        self._caller: int | None = None  # the thread that made the last one
        self._is_overlapped = False
        self._is_told = False  # whether an exception has told the program of `failure`
        self._skipped = ""  # how this rank failed in the call after `call` before it sent anything
        self._finished: set[str] = set()  # programs that have run once
        self._agreed_call = 0
        self._joined = 0  # agreements
        self._cleaned = 0  # agreements whose keys are deleted
        self._looking = threading.Lock()
        require_alive(mesh)
        if mesh.kind == "process":
            require_coordinate(mesh)
        self._alone = mesh.kind != "process" or mesh.size() == 1 or dist.get_backend() == "fake"
        self._given = None if self._alone else timeouts()
        self._timeouts = Timeouts() if self._alone else self._given or own_timeouts()
        self._channel = Channel(mesh, self._timeouts.start, self._start_watcher)
        self._faults = Faults(self._channel, self._where)
        self._exchanges = Exchanges(self._channel, self._faults)
        self._handed_out = 0
        self._watcher: Watcher | None = None
        by_nccl = not self._alone and mesh.device_type == "cuda" and talks_nccl()
        self._unfinished = Unfinished(self._end_late) if by_nccl else None

    def _start_watcher(self) -> None:
        self._watcher = Watcher(
            self._channel,
            self._timeouts.start,
            self._answer_peers,
            self._faults.process_ended,
            lambda: self._faults.leave(self.call),
        )

    @property
    def failure(self) -> FtpError | None:
        """Why the mesh takes no more calls, if so."""
        return self._faults.failure

    @failure.setter
    def failure(self, failure: FtpError) -> None:
        self._faults.failure = failure

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
    ) -> Running:
        """A context for the collectives of the next call. It agrees on the program where it is not
        the last call's, and explains a collective that fails.

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
        return Running(self, program, describe, has_issued, timeout)

    def _begin(self, program: str, thread: int, timeout: float | None) -> None:
        """Agrees on a call of another program, or from another thread, than the last one."""
        if self.next() != self._agreed_call:
            self.agree(self.next(), {"program": program}, timeout)
        self.program, self._caller = program, thread

    def _refuse_overlap(self, thread: int) -> None:
        """Raises where the last call has not returned."""
        first, names = self._holder, {t.ident: t.name for t in threading.enumerate()}
        if first == thread or first not in names:  # interrupted before it could release the lock
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
            self._faults.give_up(why, MismatchError)
        self._check()

    def fail(self, error: BaseException, has_issued: bool) -> None:
        """Notes that an exception of this rank's own ended a call."""
        if self.failure is not None:
            return
        self._is_told = True
        said = shortened(f"{type(error).__name__}: {error}".removesuffix(": "), 300)
        if has_issued:
            self._faults.give_up(
                f"Rank {self.mesh.rank} left call {self.next()} on the mesh {self.mesh} in its"
                f" midst, with {said}. Later calls would pair"
                f" their collectives with those of this one, so the mesh takes no more.{RESTART}"
            )
        else:
            self.program, self._skipped = (
                None,
                f"failed in call {self.next()} before its first collective, with {said}",
            )

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
                with self._channel.asking(timeout) as store:
                    self._agree(store, call, payload, timeout)
            finally:
                self._in_call.release()
        finally:
            if isinstance(payload, Exception):
                raise payload

    def _agree(
        self, store: Store, call: int, payload: dict[str, str] | Exception, timeout: float
    ) -> None:
        # Before anything is published, so that the watcher does not answer for this rank.
        number, self._joined = self._joined, self._joined + 1
        board = Board(store, self._channel.prefix, number, self.mesh)
        is_first = board.open(call, self._skipped)
        if isinstance(payload, Exception):
            error = shortened(f"{type(payload).__name__}: {payload}", 2000)
            why = (
                f"Rank {self.mesh.rank} failed to plan call {call}, so no rank runs it. Its"
                f" error:\n  {indented(error)}"
            )
            board.settle(Verdict(why))
            self._channel.notify(store)
            board.linger()
            return
        if (
            board.enter({"call number": str(call), "calling thread": thread_name(), **payload})
            == self.mesh.size()
        ):
            board.settle(board.compare())

        def is_over() -> bool:
            return self.failure is not None or board.is_settled()

        def is_in_vain() -> bool:
            return bool(self._faults.missing) and bool(board.absent())

        if not wait_until(min(_USUAL, timeout), is_over, self.mesh.size()):
            if is_first:
                self._channel.notify(store)
            wait_until(timeout - _USUAL, lambda: is_over() or is_in_vain(), self.mesh.size())
            if not is_over():
                absent = board.absent()
                why = (
                    f"Rank {self.mesh.rank} waited to agree on the program of call {call}:"
                    f" {missing}"
                    if (missing := self._faults.missing)
                    else board.report_absent(absent, self._faults.ask(absent), call, timeout)
                )
                board.settle(Verdict(why))
        if self.failure is None and board.is_broken():
            self.failure = board.broken().error()
        if self.failure is not None:
            board.see()
            self._check()
        verdict = board.verdict()
        board.clean()
        if verdict.why:
            board.linger()
            raise verdict.error()
        board.forget(self._cleaned)
        self._cleaned, self._agreed_call, self._skipped = number + 1, call, ""
        self._watch_host(store)

    def exchange(self, key: str, value: str, timeout: float | None = None) -> list[str]:
        """See the function `exchange`."""
        if self._alone:
            return [value]
        timeout = self._timeouts.start if timeout is None else timeout
        return self._exchanges.run(key, value, timeout, self._watch_host)

    def hand_out(self) -> HandedOut | None:
        """What the first rank hands out next, where there are others; all ranks call it in one
        order.
        """
        if self._alone:
            return None
        self._handed_out += 1
        return HandedOut(self._channel, self._faults, self._handed_out)

    def explain(self, error: BaseException, where: str = "") -> FtpError | None:
        """Why a collective failed, for the caller to raise from ``error``: ranks disagree, or one
        is missing. None for other errors.

        A peer that raised, or has ended, closes its connections: that is all this rank sees. So it
        asks all ranks whether they are there. The first to know the cause publishes it, and ranks
        that still wait are interrupted.

        Args:
            where: the collective and its source line, if known.
        """
        if (
            self._alone
            or not isinstance(error, RuntimeError)
            or (self.failure is None and not is_of_collective(error))
        ):
            return None
        if self.failure is None:
            self.failure = self._find_out(self._waited() if has_timed_out(error) else "")
        self._is_told = True
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
        """Why a collective failed on this rank."""
        try:
            with self._channel.asking(self._channel.answer_time) as store:
                self._look(store)
                board = Board(store, self._channel.prefix, self._joined, self.mesh)
                if self.failure is None and board.is_broken():
                    self.failure = board.broken().error()
                if self.failure is None:
                    self._faults.call_roll(store, self.next(), waited)
        except CollectiveError as e:
            return self.failure or e
        assert self.failure is not None
        return self.failure

    def _end_late(self, waited: float) -> None:
        """Finds out who is missing where the GPU does not finish a call, and aborts the call."""
        if self.failure is None:
            self._faults.late = (
                f"The GPU of rank {self.mesh.rank} has not come to the end of call"
                f" {self.call + (self._thread is not None)} on"
                f" the mesh {self.mesh} in {waited:.0f} s, and what it gives now are no results"
            )
            self.failure = self._find_out("")
            # The program may be blocked, and end so.
            print(f"ftp: {self.failure}", file=sys.stderr, flush=True)
        interrupt(self.mesh)

    def check_results(self) -> None:
        """Raises where what calls have returned may be no results: the mesh has failed, and calls
        return before a GPU has done their work, which an abort ends.
        """
        require_alive(self.mesh)
        if self._unfinished is not None:
            self._check()

    def end(self) -> tuple[bool, FtpError | None]:
        """Whether ranks cannot wait for each other any more, and why if nobody has been told."""
        return self.failure is not None, None if self._is_told else self.failure

    def _check(self) -> None:
        require_alive(self.mesh)
        if self.failure is not None:
            self._is_told = True
            raise type(self.failure)(str(self.failure))

    def _watch_host(self, store: Store) -> None:
        if self._watcher is not None:
            self._watcher.watch_host(store)

    def _where(self) -> Answer:
        # Of an unfinished call the GPU is in it, which the call did not wait for.
        is_calling = self._thread is not None
        if is_calling or self._unfinished:
            at = self.next() if is_calling else self.call
            return Answer(f"is in call {at}", at)
        return Answer(
            "has not come to it: its last call is number"
            f" {self.call}{self._skipped and f'; it {self._skipped}'}"
        )

    def _answer_peers(self, store: Store) -> bool:
        """What the watcher does when a peer notifies this rank; whether to look again soon."""
        looks_again = self._look(store)
        self._faults.answer(store, self.program)
        return looks_again

    def _look(self, store: Store) -> bool:
        """Answers an agreement that peers have opened and this rank has not joined: breaks it off
        where this rank goes on with its program. Whether to look again.
        """
        with self._looking:
            if self.failure is not None:
                return False
            board = Board(store, self._channel.prefix, number := self._joined, self.mesh)
            if board.is_broken():
                if board.is_open():
                    board.see()
                self._close(board)
                return False
            if not board.is_open():
                return False
            opened_by, opened_at, why = board.opened()
            # Read in this order: a rank joins an agreement before it begins the call.
            begun, program = self.call + (self._thread is not None), self.program
            if self._joined != number:
                return False
            if begun < opened_at:
                return True
            board.break_off(
                f"Rank {opened_by} {why}, but rank {self.mesh.rank} goes on with the program of its"
                f" last call ({shortened(program or 'none', 80)}) at call {begun}. Their process"
                " groups are closed.\n"
                "  Make the same calls with the same global shapes, in the same order, on every"
                " rank."
            )
            self._channel.notify(store)
            board.linger()
            self._close(board)
            return False

    def _close(self, board: Board) -> None:
        """Takes no more calls, as ``board`` says, and interrupts the one that goes on."""
        self.failure = board.broken().error()
        interrupt(self.mesh)


_calls: dict[Mesh, Calls] = {}


def calls(mesh: Mesh) -> Calls:
    """The record of this rank's calls on ``mesh``, one for the life of the default process group.

    >>> from ftp.sharding.make_mesh import simulated_mesh
    >>> from ftp.sharding.mesh import resolve
    >>> record = calls(resolve(simulated_mesh((2,), ("tp",))))
    >>> with record.running("a program"):
    ...     record.next() == record.call + 1
    True
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


def _end() -> tuple[bool, FtpError | None]:
    """`Calls.end` of all meshes of the default process group."""
    ends = [record.end() for mesh, record in _calls.items() if mesh.world == current_world()]
    untold = next((failure for _, failure in ends if failure is not None), None)
    return any(has_failed for has_failed, _ in ends), untold


failed.append(_end)
