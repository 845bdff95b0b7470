"""torch's store, with a deadline for every operation.

torch waits forever for a store whose process is stopped. So requests run in a separate thread.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftp.torch_internals.process_groups import get_default_store

_LEAST = 0.5  # least number of seconds for a request, even if all time is spent
_FOREVER = timedelta(days=20)  # poll(2) counts milliseconds in 31 bits
_LOOK = 0.5  # seconds between two polls of a store that cannot call back


_Questions = queue.SimpleQueue[tuple[Future[Any], Callable[[c10d.Store], Any]] | None]


class NoAnswer(RuntimeError):
    """The process that holds the store did not answer in time."""


class Connection:
    """One connection to the default process group's store, and the thread that uses it."""

    def __init__(self, timeout: float):
        store: Any = get_default_store()
        self._questions: _Questions = queue.SimpleQueue()
        # A daemon thread, as it may wait forever. While idle it waits in Python, so that the end of
        # the interpreter stops it.
        self._thread = threading.Thread(
            target=_serve, args=(store, timeout, self._questions), name="ftp-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless the store does not answer it."""
        self._questions.put(None)
        self._thread.join(_LEAST)

    def ask(self, question: Callable[[c10d.Store], Any], seconds: float) -> Any:
        answer: Future[Any] = Future()
        self._questions.put((answer, question))
        try:
            return answer.result(seconds)
        except TimeoutError:
            answer.cancel()
            raise NoAnswer(
                f"{holder()}, which holds the store that ranks talk through, did not answer for"
                f" {seconds:.3g} s"
            ) from None


def _serve(
    store: c10d.Store,
    timeout: float,
    questions: "_Questions",
) -> None:
    own = None
    while (asked := questions.get()) is not None:
        answer, question = asked
        if not answer.set_running_or_notify_cancel():
            continue
        try:
            own = own or cloned(store, timeout)
            answer.set_result(question(own))
        except BaseException as e:
            answer.set_exception(e)
        del asked, answer, question


def cloned(store: Any, timeout: float) -> c10d.Store:
    """A separate connection, as requests queue on a shared one."""
    usual = store.timeout
    # If the rank that holds the store has ended, a new connection is retried until the store's
    # timeout, half an hour.
    store.set_timeout(timedelta(seconds=timeout))
    try:
        own = store.clone()
    finally:
        store.set_timeout(usual)
    own.set_timeout(usual)
    return own


class Store:
    """Operations on the store, which must all be answered within ``seconds`` from now."""

    def __init__(self, connection: Connection, seconds: float):
        self._connection, self._until = connection, time.monotonic() + seconds

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        return self._connection.ask(question, max(_LEAST, self._until - time.monotonic()))

    def check(self, key: str) -> bool:
        return self._ask(lambda store: store.check([key]))

    def get(self, key: str) -> str:
        """The value of a key that is there."""
        return self._ask(lambda store: store.get(key)).decode()

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        return [value.decode() for value in self._ask(lambda store: store.multi_get(list(keys)))]

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def multi_set(self, keys: Sequence[str]) -> None:
        """Sets keys to empty values."""
        self._ask(lambda store: store.multi_set(list(keys), [""] * len(keys)))

    def add(self, key: str, number: int) -> int:
        return self._ask(lambda store: store.add(key, number))

    def propose(self, key: str, value: str) -> str:
        """Sets a key unless it is set; the value that it has then."""
        return self._ask(lambda store: store.compare_set(key, "", value)).decode()

    def append(self, key: str, value: str) -> None:
        self._ask(lambda store: store.append(key, value))

    def delete(self, keys: Sequence[str]) -> None:
        self._ask(lambda store: [store.delete_key(key) for key in keys])


def wait(store: c10d.Store, key: str, stop: threading.Event) -> bool:
    """Waits for a peer to set ``key``, without polling; False if only time has passed. Raises where
    the store is gone.
    """
    if not calls_back(store):
        stop.wait(_LOOK)
        return True
    with contextlib.suppress(dist.DistStoreError):
        store.wait([key], _FOREVER)
        return True
    return False


def calls_back(store: Any) -> bool:
    """Whether the store wakes a waiting client when the key is set; a file store is polled."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return type(store).__name__ == "TCPStore"  # not among what torch exports


def holder() -> str:
    """The process that holds the store, as far as the environment tells."""
    return "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
