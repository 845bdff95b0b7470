"""Agreement of ranks on the program they are about to run, through the store and before any collective.

A mesh's ranks number their calls, and within them their agreements, alike, so that keys made of these numbers meet.
A rank joins an agreement when it changes its program; while it goes on with the program of its last call it says nothing.
So a rank that has reached call ``c`` in silence, while another opens an agreement at ``c``, disagrees. A thread of its
own answers for it, as it may be waiting in a collective by then.
"""

import atexit
import contextlib
import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftp.errors import FtpError, MismatchError
from ftp.mesh import START_TIMEOUT, Mesh, require_coordinate, restart_count

_WATCH = 0.5  # seconds between two looks of the watching thread
_LINGER = 2.0  # seconds that a failing rank stays, at the most, for the others to read why
_AGREED = "agreed"


class Calls:
    """The calls made on one mesh, by one rank; `calls` hands it out.

    Ranks number their calls alike only if they make the same calls on the mesh, in the same order: that is the rule
    that `begin` enforces, at the price of two comparisons for a program that is the last call's.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.call = 0
        self.program: str | None = None
        self.failure: str | None = None
        self._agreed_call = 0
        self._joined = 0
        self._exchanges: dict[str, int] = {}
        self._looking = threading.Lock()
        self._stores: tuple[c10d.Store, c10d.Store] | None = None
        if mesh.kind == "process":
            require_coordinate(mesh)
        self._alone = mesh.kind != "process" or mesh.size() == 1 or dist.get_backend() == "fake"

    def next(self) -> int:
        """The number of the call that is about to begin, the same until `begin`."""
        return self.call + 1

    def begin(self, call: int, program: str, timeout: float = START_TIMEOUT) -> None:
        """Notes that this rank runs ``program`` as call number ``call``; every step calls it before its collectives.

        ``program`` is a fingerprint, equal on all ranks. One that was not agreed on in this call and is not the last
        call's, as when a train and an evaluation step take turns, is agreed on here.
        """
        if self.failure is not None:
            raise MismatchError(self.failure)
        if program != self.program:
            if call != self._agreed_call:
                self.agree(call, {"program": program}, timeout)
            self.program = program
        self.call = call

    def agree(self, call: int, payload: dict[str, str] | Exception, timeout: float) -> None:
        """See the function `agree`."""
        if self._alone:
            if isinstance(payload, Exception):
                raise payload
            return
        if self.failure is not None:
            raise MismatchError(self.failure)
        store, _ = self._connect()
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
            self.failure = board.broken()
        verdict = self.failure or board.verdict()
        if verdict != _AGREED:
            board.linger()
            raise MismatchError(verdict)
        board.clean()
        self._agreed_call = call

    def exchange(self, key: str, value: str, timeout: float) -> list[str]:
        """See the function `exchange`."""
        if self._alone:
            return [value]
        if self.failure is not None:
            raise MismatchError(self.failure)
        store, _ = self._connect()
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

    def explain(self, error: BaseException) -> FtpError | None:
        """The disagreement behind a collective's failure, if it is one; the caller raises it from ``error``.

        Peers that have seen a disagreement leave their process groups, which this rank sees as a lost connection.
        """
        if not self._alone and self.failure is None and isinstance(error, RuntimeError) and self._stores is not None:
            try:
                self._look(self._stores[0])
                board = _Board(self._stores[0], self._prefix(), self._joined, self.mesh)
                if self.failure is None and board.is_broken():
                    self.failure = board.broken()
            except RuntimeError:  # the store is gone with the rank that held it: nothing to learn
                return None
        return None if self.failure is None else MismatchError(self.failure)

    def _connect(self) -> tuple[c10d.Store, c10d.Store]:
        """A connection for the caller and one for the watching thread, as a question waits its turn on a shared one."""
        if self._stores is None:
            store: Any = c10d._get_default_store()
            self._stores = (store.clone(), store.clone())
            self._stores[1].set_timeout(timedelta(seconds=5))
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
        self.failure = board.broken()
        _interrupt(self.mesh)


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


class _Watch:
    """The thread that looks, every half second, whether peers have opened an agreement."""

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

    def _run(self) -> None:
        store = self._calls._connect()[1]
        while not self._stop.wait(_WATCH):
            if self._calls.failure is not None or not dist.is_initialized() or self._group() is not c10d._get_default_group():
                return
            try:
                self._calls._look(store)
            except RuntimeError:  # the rank that held the store has left: there is nobody to answer any more
                return


_calls: dict[Mesh, Calls] = {}

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


def agree(mesh: Mesh, call: int, payload: dict[str, str] | Exception, timeout: float) -> None:
    """Returns if all ranks of the mesh give equal payloads for call number ``call``; raises on every rank if not.

    Every rank calls it before it first runs a program, and `Calls.begin` whenever the program changes. It is over
    within milliseconds of the last arrival. Without processes, and on a mesh of one rank, there is nobody to ask.

    Args:
        payload: values by facet ("library version", "input shapes", "program"); compared in order, as strings. The
            exception instead, where this rank failed to plan; it is raised again.
        timeout: seconds to wait for the last rank.

    Raises:
        MismatchError: naming the rank and the first facet that differ from the lowest rank's, with both values; or
            the rank that failed to plan, that goes on with an old program, or that never arrived.
    """
    calls(mesh).agree(call, payload, timeout)


def exchange(mesh: Mesh, key: str, value: str, timeout: float) -> list[str]:
    """Every rank's ``value``, in the order of the mesh's ranks, through the store; all ranks call it with one ``key``."""
    return calls(mesh).exchange(key, value, timeout)


def _interrupt(mesh: Mesh) -> None:
    """Makes the collectives of this rank on the mesh raise, one that it is waiting in included."""
    assert mesh.torch is not None
    for group in mesh.torch.get_all_groups():
        backends: dict[int, Any] = {id(b): b for b in map(group._get_backend, group._device_types)}
        for backend in backends.values():
            if not isinstance(backend, c10d.ProcessGroupGloo):
                backend.abort()
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
