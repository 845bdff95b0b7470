"""The calls of ranks on a mesh: equal on all of them, one after another, and ended on all if one
fails.
"""

import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

from ftp.distributed.agreement import Agreements
from ftp.distributed.channel import Channel
from ftp.distributed.endings import Endings
from ftp.distributed.exchanges import Exchanges
from ftp.distributed.faults import Faults
from ftp.distributed.handed_out import HandedOut
from ftp.distributed.interrupt import interrupt
from ftp.distributed.roll_call import Answer
from ftp.distributed.running import Running
from ftp.distributed.store import Store
from ftp.distributed.unfinished import Unfinished
from ftp.distributed.waiting import RESTART, shortened
from ftp.distributed.watcher import Watcher
from ftp.errors import CollectiveError, FtpError, MismatchError
from ftp.sharding.mesh import Mesh, require_alive, require_coordinate
from ftp.sharding.process_group import (
    Timeouts,
    current_world,
    failed,
    own_timeouts,
    releases,
    talks_nccl,
    timeouts,
)
from ftp.torch_internals.error_texts import has_timed_out, is_of_collective


class Calls:
    """The calls that one rank makes on one mesh; see the function `calls`.

    All ranks must make the same calls on the mesh, in the same order, so that equal calls have
    equal numbers. `running` enforces this; for the program of the last call it costs a few
    comparisons.

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
        self._communicates: Callable[[], bool] = lambda: True  # whether that call waits for others
        self._caller: int | None = None  # the thread that made the last one
        self._is_overlapped = False
        self._skipped = ""  # how this rank failed in the call after `call`, before it sent anything
        self._finished: set[str] = set()  # programs that have run once
        self._agreed_call = self._agrees_on = 0
        require_alive(mesh)
        if mesh.kind == "process":
            require_coordinate(mesh)
        self._alone = mesh.kind != "process" or mesh.size() == 1 or dist.get_backend() == "fake"
        self._given = None if self._alone else timeouts()
        self._timeouts = Timeouts() if self._alone else self._given or own_timeouts()
        self._channel = Channel(mesh, self._timeouts.start, self._start_watcher)
        self._faults = Faults(self._channel, self._where)
        self._agreements = Agreements(self._channel, self._faults, self._begun)
        self._exchanges = Exchanges(self._channel, self._faults)
        self._endings = Endings(self._channel, self._faults)
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
        """The reason why the mesh takes no more calls; None if it does."""
        return self._faults.failure

    @property
    def timeouts(self) -> Timeouts:
        """The times that this rank waits for the others."""
        return self._timeouts

    def next(self) -> int:
        """The number of the next call."""
        return self.call + 1

    def forget(self, program: str) -> None:
        """Record that a program was dropped: its next run is a first run again."""
        self._finished.discard(program)

    def running(
        self,
        program: str,
        describe: Callable[[BaseException], str] = lambda error: "",
        has_issued: Callable[[BaseException], bool] = lambda error: True,
        communicates: Callable[[], bool] = lambda: True,
        timeout: float | None = None,
    ) -> Running:
        """A context for the collectives of the next call. It agrees on the program if it is not the
        last call's, and explains a collective that fails.

        An exception in the call is raised unchanged. If it came before the call's first collective,
        the call does not count, and ranks agree on the next one. If it came later, peers may be in
        any collective of the call: the mesh takes no more calls, on all ranks.

        Args:
            program: a fingerprint, equal on all ranks. Ranks agree on it unless it is the last
                call's, or was agreed on in this call; so they do if a train and an evaluation step
                take turns.
            describe: describes the collective that raised the exception; "" if unknown.
            has_issued: whether this rank may have reached the call's first collective when it
                raised the exception.
            communicates: whether the call waits for other ranks.
            timeout: seconds to wait for the others to agree.

        Raises:
            MismatchError, CollectiveError: from an exception that another rank caused; a call from
                two threads at once.
        """
        return Running(self, program, describe, has_issued, communicates, timeout)

    def _begin(self, program: str, thread: int, timeout: float | None) -> None:
        """Agree if the call's program or thread differs from the last call's."""
        if self.next() != self._agreed_call:
            self.agree(self.next(), {"program": program}, timeout)
        self.program, self._caller = program, thread

    def _refuse_overlap(self, thread: int) -> None:
        """Raise if the last call has not returned."""
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
            self._faults.failure, self._is_overlapped = MismatchError(why), True
            self._faults.give_up(why, MismatchError)
        self.check()

    def fail(self, error: BaseException, has_issued: bool) -> None:
        """Record that an exception on this rank ended a call."""
        if self.failure is not None:
            return
        self._faults.is_told = True
        said = shortened(f"{type(error).__name__}: {error}".removesuffix(": "), 300)
        if has_issued:
            self._faults.give_up(
                f"Rank {self.mesh.rank} left call {self.next()} on the mesh {self.mesh} in its"
                f" midst, with {said}. Later calls would pair"
                f" their collectives with those of this one, so the mesh takes no more.{RESTART}"
            )
        else:
            self.program = None
            self._skipped = f"failed in call {self.next()} before its first collective, with {said}"

    def agree(
        self,
        call: int,
        payload: dict[str, str] | BaseException,
        timeout: float | None = None,
        *,
        about: str = "",
    ) -> None:
        """Return if all ranks of the mesh give equal payloads for call number ``call``; else raise
        on every rank.

        Every rank calls it before it first runs a program; `running` calls it whenever the program
        changes. It ends within milliseconds of the last rank's arrival. Without processes, or with
        one rank, it returns at once.

        Args:
            payload: values by facet ("library version", "input shapes", "program"), compared in
                order, as strings. If this rank failed to plan: the exception, which is raised
                again.
            timeout: seconds to wait for the last rank; default that of `init_process_group`.
            about: the call's arguments, for the message of ranks that go on with an old program.

        Raises:
            MismatchError: naming the rank and the first facet that differ from the lowest rank's,
                with both values; or the rank that failed to plan, that goes on with an old program,
                or that never arrived.
        """
        timeout = self._timeouts.start if timeout is None else timeout
        if self._alone:
            if isinstance(payload, BaseException):
                raise payload
            return
        self.check()
        try:
            if not self._in_call.acquire(False):
                self._refuse_overlap(threading.get_ident())
            try:
                self._holder, self._agrees_on = threading.get_ident(), call
                with self._channel.asking(timeout) as store:
                    self._agreements.join(store, call, payload, timeout, self._skipped, about)
                    # What failed on all ranks runs no program: the next one is to be agreed on.
                    self._agreed_call = 0 if isinstance(payload, BaseException) else call
                    self._skipped = ""
                    self._watch_host(store)
            finally:
                self._agrees_on = 0
                self._in_call.release()
        finally:
            if isinstance(payload, BaseException):
                raise payload

    def exchange(self, key: str, value: str, timeout: float | None = None) -> list[str]:
        """See the function `exchange`."""
        if self._alone:
            return [value]
        timeout = self._timeouts.start if timeout is None else timeout
        return self._exchanges.run(key, value, timeout, self._watch_host)

    def hand_out(self) -> HandedOut | None:
        """The next `HandedOut` of the first rank; None without other ranks. All ranks call it in
        the same order.
        """
        if self._alone:
            return None
        self._handed_out += 1
        return HandedOut(self._channel, self._faults, self._handed_out)

    def explain(self, error: BaseException, where: str = "") -> FtpError | None:
        """The reason why a collective failed, to be raised from ``error``: ranks disagree, or one
        is missing. None for other errors.

        If a peer raised or ended, this rank only sees closed connections. So it asks all ranks
        whether they are alive. The first to know the cause publishes it, and ranks that still wait
        are interrupted.

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
            waited = self._waited() if has_timed_out(error) else ""
            self._faults.failure = self._find_out(waited)
        else:  # the watcher has learned it
            self._faults.linger()
        self._faults.is_told = True
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
        """The options by which the user sets the timeouts."""
        if self._given is None:
            theirs = "timeout= of torch.distributed.init_process_group"
            return theirs, theirs
        return "timeout= of ftp.init_process_group", "step_timeout= of ftp.init_process_group"

    def _find_out(self, waited: str) -> FtpError:
        """Why a collective failed on this rank."""
        try:
            with self._channel.asking(self._channel.answer_time) as store:
                self._agreements.explain(store)
                if self.failure is None:
                    self._faults.call_roll(store, self.next(), waited)
        except CollectiveError as e:
            return self.failure or e
        assert self.failure is not None
        return self.failure

    def _end_late(self, waited: float) -> None:
        """Find the missing rank if the GPU does not finish a call, and abort the call."""
        if self.failure is None:
            self._faults.late = (
                f"The GPU of rank {self.mesh.rank} has not come to the end of call"
                f" {self.call + (self._thread is not None)} on"
                f" the mesh {self.mesh} in {waited:.0f} s, and what it gives now are no results"
            )
            self._faults.failure = self._find_out("")
            # The program may be blocked; this lets it end.
            print(f"ftp: {self.failure}", file=sys.stderr, flush=True)
        interrupt(self.mesh)

    def check_results(self) -> None:
        """Raise if calls may have returned wrong results: the mesh has failed, and calls return
        before a GPU has finished their work, which an abort ends.
        """
        require_alive(self.mesh)
        if self._unfinished is not None:
            self.check()

    def end(self) -> tuple[bool, FtpError | None]:
        """Whether ranks can no longer wait for each other, and the reason if no call raised it.
        Others that wait for this rank in a call are told that it makes none.
        """
        if self._watcher is not None and self.failure is None:
            self._endings.announce(self.call, self._exchanges.turns)
        return self.failure is not None, None if self._faults.is_told else self.failure

    def close(self) -> None:
        """End this rank's threads and connections, once there are no more calls."""
        if self._unfinished is not None:
            self._unfinished.stop()
        if self._watcher is not None:
            self._watcher.stop()
        self._channel.close()

    def check(self) -> None:
        """Raise if the mesh takes no more calls."""
        self._faults.check()

    def _watch_host(self, store: Store) -> None:
        if self._watcher is not None:
            self._watcher.watch_host(store)

    def _begun(self) -> tuple[int, str | None]:
        return self.call + (self._thread is not None), self.program

    def _where(self) -> Answer:
        # The GPU is still in a call that it has not finished, though the call has returned.
        is_calling = self._thread is not None
        if is_calling or self._unfinished:
            at = self.next() if is_calling else self.call
            return Answer(f"is in call {at}", at)
        return Answer(
            "has not come to it: its last call is number"
            f" {self.call}{self._skipped and f'; it {self._skipped}'}"
        )

    def _answer_peers(self, store: Store) -> bool:
        """Handle a peer's notification, in the watcher; returns whether to look again soon."""
        looks_again = self._agreements.look(store)
        self._faults.answer(store, self.program)
        waits = self._exchanges.waits.copy()
        return self._endings.look(store, self._waits_in, waits) or looks_again

    def _waits_in(self) -> int:
        """The number of the call in which this rank waits for others; 0 if there is none."""
        is_waiting = self._thread is not None and self._communicates()
        return self._agrees_on or (self.next() if is_waiting else 0)


_calls: dict[Mesh, Calls] = {}


def calls(mesh: Mesh) -> Calls:
    """This rank's record of calls on ``mesh``; one object until the default process group ends.

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


def _close() -> None:
    for mesh in [mesh for mesh in _calls if mesh.kind == "process"]:
        _calls.pop(mesh).close()


failed.append(_end)
releases.append(_close)
