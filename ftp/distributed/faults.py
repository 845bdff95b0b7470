"""Faults of a mesh: what has failed, and which rank is missing, as found by the other ranks."""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from ftp.distributed.channel import Channel
from ftp.distributed.interrupt import interrupt
from ftp.distributed.roll_call import Answer, RollCall
from ftp.distributed.store import Store, holder
from ftp.distributed.waiting import RESTART, indented, shortened, wait_until
from ftp.errors import CollectiveError, FtpError
from ftp.sharding.mesh import require_alive

_SILENT = "does not answer: killed, stopped, or cut off"


class _Once:
    """Lets one of a rank's threads, its program's and its watcher's, do what counts the rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def is_first(self) -> bool:
        return self._lock.acquire(blocking=False)


class Faults:
    """One rank's knowledge of what has failed on a mesh.

    Args:
        where: gives the call that this rank is in, for the others to read.

    Attributes:
        failure: why the mesh takes no more calls, if it does not. Set once, as the program may read
            it at any time.
        is_told: whether an exception has reported `failure` to the program.
        late: the work that this rank's GPU has not finished, if that showed the failure; it starts
            the failure's message.
        missing: the rank that is known to have ended, if any, in words. No rank waits for it any
            more, even if the mesh takes no more calls for another reason, and ranks save.
    """

    def __init__(self, channel: Channel, where: Callable[[], Answer]):
        self._failure: FtpError | None = None
        self.is_told = False
        self.late = ""
        self.missing = ""
        self._channel, self._where = channel, where
        self._to_sign, self._to_see = _Once(), _Once()

    @property
    def failure(self) -> FtpError | None:
        return self._failure

    @failure.setter
    def failure(self, failure: FtpError) -> None:
        if failure is not self._failure:
            self._failure = type(failure)(f"{self.late}: {failure}") if self.late else failure

    def check(self) -> None:
        """Raise if the mesh takes no more calls."""
        require_alive(self._channel.mesh)
        if self.failure is not None:
            text, was_told, self.is_told = str(self.failure), self.is_told, True
            if was_told and RESTART not in text:
                text = f"The mesh has failed, and takes no more calls.{RESTART}\n  {indented(text)}"
            raise type(self.failure)(text)

    def give_up(self, why: str, kind: type[FtpError] = CollectiveError) -> None:
        """Take no more calls, and tell the other ranks."""
        self.failure = kind(why)
        with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
            store = self._channel.store(self._channel.answer_time)
            roll = self._roll(store)
            self._learn(roll, roll.settle(why, is_missing=False))
            self._channel.notify(store)
            roll.linger()

    def call_roll(self, store: Store, call: int, waited: str) -> None:
        """Ask all ranks whether they are alive; the first to know the missing rank publishes it.

        Args:
            call: the number of the call that failed here.
            waited: the time that this rank waited in it, for the message.
        """
        seconds = self._channel.answer_time
        roll = self._roll(store)
        self._sign(roll)
        if is_first := roll.call():
            self._channel.notify(store)
        verdict = roll.verdict(call, waited, seconds - 0.2 if is_first else seconds + 1.0)
        self._learn(roll, verdict)
        if is_first:
            self._channel.notify(store)
        roll.linger()

    def linger(self) -> None:
        """Wait until the others know why the mesh has failed, if the store ends with this rank."""
        if not self._holds_store():
            return
        with contextlib.suppress(RuntimeError):
            roll = self._roll(self._channel.store(1.0))
            if roll.is_settled():
                roll.linger()

    def answer(self, store: Store, program: str | None) -> None:
        """Answer peers that ask for this rank's call; interrupt its collectives if a rank is known
        to be missing.
        """
        asked = self._channel.key(f"asked/{self._channel.mesh.rank}")
        if store.check(f"{asked}/answers"):
            of = f", of program {shortened(program, 80)}" if program else ""
            store.set(asked, self._where().text + of)
            store.add(f"{asked}/answers", 1)
        roll = self._roll(store)
        self.missing = self.missing or roll.lost()
        if roll.is_settled():
            if self.failure is None or not self.missing:
                is_new = self.failure is None
                self._learn(roll, roll.learn())
                if is_new:
                    interrupt(self._channel.mesh)
        elif roll.is_called():
            self._sign(roll)

    def ask(self, ranks: Sequence[int]) -> str:
        """The answers of watchers of ranks that did not arrive: a line for each rank."""
        if not ranks:
            return ""
        channel = self._channel
        with channel.asking(channel.answer_time) as store:
            keys = {rank: channel.key(f"asked/{rank}") for rank in ranks}
            before = {rank: store.add(f"{key}/answers", 0) for rank, key in keys.items()}

            def answered(rank: int) -> bool:
                return store.add(f"{keys[rank]}/answers", 0) > before[rank]

            channel.notify(store, ranks)
            seconds = channel.answer_time - 0.5
            wait_until(seconds, lambda: all(map(answered, ranks)), channel.mesh.size())
            said = {
                rank: store.get(key) if answered(rank) else _SILENT for rank, key in keys.items()
            }
        return "".join(f"\n  Rank {rank} {text}." for rank, text in list(said.items())[:8])

    def process_ended(self, rank: int, pid: int) -> None:
        """Tell all ranks that a process of this host has ended, unless it has done so itself."""
        text = f"its process, {pid} on {socket.gethostname()}, is gone.{RESTART}"
        try:
            store = self._channel.store(1.0)
            roll = self._roll(store)
            answer = roll.answer_of(rank)
            if self.failure is not None or answer is not None:
                what = answer.text if answer is not None and answer.has_ended else "has ended"
                self._lose(store, roll, f"Rank {rank} {what}: {text}")
                return
            why = f"Rank {rank} has been killed, or has ended without a word: {text}"
            self._learn(roll, roll.settle(why, is_missing=True, gone=1))
            self._channel.notify(store)
        except RuntimeError:  # without the store no other rank can be told
            why = (
                f"Rank {rank} has been killed, or has ended, and the store does not answer: {text}"
            )
            self._learn(None, (why, True))
        interrupt(self._channel.mesh)

    def give_up_on(self, store: Store, why: str) -> None:
        """Take no more calls, as a rank comes to none; tell all ranks, and end what this one waits
        in.
        """
        roll = self._roll(store)
        self._learn(roll, roll.settle(why, is_missing=True))
        self._channel.notify(store)
        roll.linger()
        interrupt(self._channel.mesh)

    def leave(self, call: int) -> None:
        """Tell the others that this process ends after call number ``call``, and why, if known."""
        error = getattr(sys, "last_value", None)
        why = "" if error is None else f" with {shortened(f'{type(error).__name__}: {error}', 300)}"
        channel = self._channel
        with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
            store = channel.store(1.0)
            answer = Answer(f"has ended after call {call}{why}", has_ended=True)
            self._sign(self._roll(store), answer)
            # The store ends with the process that holds it: end threads that wait for it first.
            if is_holder := self._holds_store():
                store.set(channel.key("closed"), "")
            channel.notify(store, channel.mesh.ranks if is_holder else [channel.mesh.rank])

    def _holds_store(self) -> bool:
        return holder() == f"rank {self._channel.mesh.rank}"

    def _roll(self, store: Store) -> RollCall:
        return RollCall(store, self._channel.prefix, self._channel.mesh)

    def _sign(self, roll: RollCall, answer: Answer | None = None) -> None:
        if self._to_sign.is_first():
            roll.sign(answer or self._where())

    def _lose(self, store: Store, roll: RollCall, why: str) -> None:
        """Record that a rank has ended: for all ranks, if the mesh has failed before; for this rank
        alone, if the other is on this host and has ended normally.
        """
        self.missing = self.missing or why
        if self.failure is not None and roll.lose(why) == why:
            self._channel.notify(store)

    def _learn(self, roll: RollCall | None, verdict: tuple[str, bool]) -> None:
        why, is_missing = verdict
        if is_missing:
            self.missing = why
        if self.failure is None:
            self.failure = CollectiveError(why)
        if roll is not None and self._to_see.is_first():
            roll.see()
