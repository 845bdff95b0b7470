"""The thread that answers peers while this rank computes, or waits in a collective."""

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ftp.distributed.channel import Channel
from ftp.distributed.neighbours import Neighbours
from ftp.distributed.store import Store, calls_back, cloned, wait
from ftp.distributed.waiting import LINGER, QUESTIONS
from ftp.torch_internals.gloo_workers import await_idle
from ftp.torch_internals.process_groups import get_default_group, get_default_store

_IDLE = 5.0  # seconds for gloo's workers to get a processor, on a busy machine
_LOOK_AGAIN = 0.5  # seconds between two looks at an agreement that this rank has not joined


class Watcher:
    """Sleeps until a peer notifies this rank, then answers.

    Args:
        timeout: seconds to connect to the store.
        answer: given the store, answers what peers ask; whether to look again soon.
        process_ended: called with rank and process id, when a process of this host has ended.
        leave: called when this process ends.
    """

    def __init__(
        self,
        channel: Channel,
        timeout: float,
        answer: Callable[[Store], bool],
        process_ended: Callable[[int, int], None],
        leave: Callable[[], None],
    ):
        self._channel, self._timeout = channel, timeout
        self._answer, self._process_ended, self._leave = answer, process_ended, leave
        self._neighbours: Neighbours | None = None
        self._has_met = self._is_closed = False
        self._stop = threading.Event()
        self._group = weakref.ref(
            get_default_group(), lambda _: self._wake() if not self._stop.is_set() else None
        )
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, args=(get_default_store(),), name="ftp-agreement", daemon=True
        )
        self._thread.start()
        # A daemon thread inside the store's C++ code while the interpreter goes down would abort
        # the process.
        atexit.register(self.stop)

    def watch_host(self, store: Store) -> None:
        """Watches the processes of this host, once; all ranks have connected by the end of the
        first agreement or exchange.
        """
        if self._has_met:
            return
        self._has_met = True
        if pids := self._channel.processes_here(store):
            self._neighbours = Neighbours(pids, self._notice)

    def _notice(self, rank: int, pid: int) -> None:
        if self.is_current() and not self._is_closed:
            self._process_ended(rank, pid)

    def is_current(self) -> bool:
        """Whether the default process group is that of the mesh."""
        return dist.is_initialized() and self._group() is get_default_group()

    def stop(self) -> None:
        self._stop.set()
        atexit.unregister(self.stop)
        if os.getpid() != self._pid:  # a forked process, without the threads
            return
        if self._neighbours is not None:
            self._neighbours.stop()
        if self.is_current():
            self._leave()
        else:
            self._wake()
        self._thread.join(1.0)
        await_idle(_IDLE)

    def _wake(self) -> None:
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(RuntimeError):
            self._channel.notify(self._channel.store(1.0), [self._channel.mesh.rank])

    def _run(self, shared: Any) -> None:
        channel = self._channel
        notification = channel.notification(channel.mesh.rank)
        # The process that holds the store may have ended: then nobody can be answered any more.
        with contextlib.suppress(RuntimeError):
            own = cloned(shared, self._timeout)
            polls = not calls_back(own)
            while True:
                if not wait(own, notification, self._stop):
                    continue
                while True:
                    if self._stop.is_set() or not self.is_current():
                        return
                    store = channel.store(LINGER)
                    store.delete([notification])
                    looks_again = self._answer(store)
                    if store.check(channel.key("closed")):  # by the rank that holds it
                        self._is_closed = True
                        return
                    if polls or not looks_again:
                        break
                    self._stop.wait(max(_LOOK_AGAIN, channel.mesh.size() / QUESTIONS))
