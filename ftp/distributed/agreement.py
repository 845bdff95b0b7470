"""Agreement of ranks on the program that they are about to run, through the store and before any
collective.

All ranks of a mesh give their calls, and the agreements in them, the same numbers, so that store
keys made of these numbers match. A rank joins an agreement when it changes its program; while it
runs the program of its last call it sends nothing. So a rank that begins call ``c`` without an
agreement, while another opens one at ``c``, disagrees. Its watcher, a thread, reports this, as the
rank may be waiting in a collective.
"""

import re
import threading
from collections.abc import Callable

from ftp.distributed.board import Board, Verdict
from ftp.distributed.channel import Channel
from ftp.distributed.faults import Faults
from ftp.distributed.interrupt import interrupt
from ftp.distributed.store import Store
from ftp.distributed.waiting import indented, shortened, wait_until

_USUAL = 0.25  # seconds of an agreement before the watchers of all ranks are notified


class Agreements:
    """One rank's agreements on a mesh.

    Args:
        begun: gives the number of the last call that this rank has begun, and the program of the
            last that has returned.
    """

    def __init__(
        self, channel: Channel, faults: Faults, begun: Callable[[], tuple[int, str | None]]
    ):
        self._channel, self._faults, self._begun = channel, faults, begun
        self._joined = 0  # agreements
        self._cleaned = 0  # agreements whose keys are deleted
        self._looking = threading.Lock()

    def join(
        self,
        store: Store,
        call: int,
        payload: dict[str, str] | BaseException,
        timeout: float,
        skipped: str,
        about: str,
    ) -> None:
        """Return if all ranks give equal payloads for call number ``call``; see `Calls.agree`.

        Args:
            skipped: how this rank failed in this call before, if it did and sent nothing.
            about: the arguments that this rank's call takes, for the others' messages.
        """
        # Set before anything is published, so that the watcher does not answer for this rank.
        number, self._joined = self._joined, self._joined + 1
        board = self._board(store, number)
        is_first = board.open(call, skipped, about)
        if isinstance(payload, BaseException):
            self._refuse(board, call, payload)
            return
        facets = {"call number": str(call), "calling thread": thread_name(), **payload}
        if board.enter(facets) == self._channel.mesh.size():
            board.settle(board.compare())
        self._await_verdict(board, call, timeout, is_first)
        self._learn(board)
        if self._faults.failure is not None:
            board.see()
            self._faults.check()
        verdict = board.verdict()
        board.clean()
        if verdict.why:
            board.linger()
            raise verdict.error()
        board.forget(self._cleaned)
        self._cleaned = number + 1

    def _refuse(self, board: Board, call: int, error: BaseException) -> None:
        """Tell all ranks that this one failed to plan the call."""
        text = shortened(f"{type(error).__name__}: {error}".removesuffix(": "), 2000)
        why = (
            f"Rank {board.mesh.rank} failed to plan call {call}, so no rank runs it. Its"
            f" error:\n  {indented(text)}"
        )
        board.settle(Verdict(why))
        self._channel.notify(board.store)
        board.linger()

    def _await_verdict(self, board: Board, call: int, timeout: float, is_first: bool) -> None:
        """Wait until all ranks have arrived, or the mesh has failed; else settle that some have
        not.
        """
        faults, ranks = self._faults, board.mesh.size()

        def is_over() -> bool:
            return faults.failure is not None or board.is_settled()

        def is_in_vain() -> bool:
            return bool(faults.missing) and bool(board.absent())

        if wait_until(min(_USUAL, timeout), is_over, ranks):
            return
        if is_first:
            self._channel.notify(board.store)
        wait_until(timeout - _USUAL, lambda: is_over() or is_in_vain(), ranks)
        if is_over():
            return
        if faults.missing:
            why = (
                f"Rank {board.mesh.rank} waited to agree on the program of call {call}:"
                f" {faults.missing}"
            )
        else:
            absent = board.absent()
            why = board.report_absent(absent, faults.ask(absent), call, timeout)
        board.settle(Verdict(why))

    def look(self, store: Store) -> bool:
        """Answer an agreement that peers have opened and this rank has not joined: break it off if
        this rank goes on with its program. Returns whether to look again.
        """
        with self._looking:
            if self._faults.failure is not None:
                return False
            number = self._joined
            board = self._board(store, number)
            if board.is_broken():
                if board.is_open():
                    board.see()
                self._close(board)
                return False
            if not board.is_open():
                return False
            opened_by, opened_at, why = board.opened()
            # Read in this order: a rank joins an agreement before it begins the call.
            begun, program = self._begun()
            if self._joined != number:
                return False
            if begun < opened_at:
                return True
            board.break_off(
                f"Rank {opened_by} {why}, but rank {board.mesh.rank} goes on with the program of"
                f" its last call ({shortened(program or 'none', 80)}) at call {begun}. Their"
                " process groups are closed.\n"
                "  Make the same calls with the same global shapes, in the same order, on every"
                " rank."
            )
            self._channel.notify(store)
            board.linger()
            self._close(board)
            return False

    def explain(self, store: Store) -> None:
        """Record it as the failure if ranks do not agree: a collective has failed."""
        self.look(store)
        self._learn(self._board(store, self._joined))

    def _learn(self, board: Board) -> None:
        """Take the reason of a rank that has broken off an agreement."""
        if self._faults.failure is None and board.is_broken():
            self._faults.failure = board.broken().error()

    def _close(self, board: Board) -> None:
        """Take no more calls, for the reason on ``board``, and interrupt the running one."""
        self._faults.failure = board.broken().error()
        interrupt(board.mesh)

    def _board(self, store: Store, number: int) -> Board:
        return Board(store, self._channel.prefix, number, self._channel.mesh)


def thread_name() -> str:
    """The thread's name, equal on all ranks: without the numbers that count earlier threads or the
    threads of a pool.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread() or re.search(r"_\d+$", thread.name):
        return re.sub(r"\d+", "", thread.name)
    name = re.sub(r"\d+", "#", thread.name)
    alike = [t for t in threading.enumerate() if re.sub(r"\d+", "#", t.name) == name]
    return f"{name}, {alike.index(thread)} of those alike"
