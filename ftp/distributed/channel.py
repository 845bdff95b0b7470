"""A rank's channel to the other ranks of a mesh: the mesh's keys in the store, and notifications
that wake a peer's watcher.
"""

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence

from ftp.distributed.neighbours import host
from ftp.distributed.store import Connection, NoAnswer, Store, holder
from ftp.distributed.waiting import QUESTIONS, RESTART
from ftp.errors import CollectiveError
from ftp.sharding.mesh import Mesh
from ftp.sharding.process_group import restart_count

_ANSWER = 2.5  # seconds for all ranks to answer, in small worlds
_PER_RANK = 10  # requests of a rank to the store to answer a notification, or to agree


class Channel:
    """One rank's side.

    Args:
        timeout: seconds to connect to the store.
        connected: called once, when this rank has connected.

    Attributes:
        answer_time: seconds to wait for the answers of all ranks to a notification.
    """

    def __init__(self, mesh: Mesh, timeout: float, connected: Callable[[], None]):
        self.mesh = mesh
        self.answer_time = _ANSWER + _PER_RANK * mesh.size() / QUESTIONS
        self._timeout, self._connected = timeout, connected
        self._connecting = threading.Lock()
        self._connection: Connection | None = None
        self._host: str | None = None

    @property
    def prefix(self) -> str:
        """The start of the mesh's keys; unique to the mesh, process group and attempt."""
        mesh = self.mesh
        name = zlib.crc32(
            repr((mesh.shape, mesh.axis_names, mesh.device_type, mesh.ranks)).encode()
        )
        return f"ftp/agreement/{restart_count()}/{mesh.world}/{name:08x}"

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def store(self, seconds: float) -> Store:
        """The store, which must answer all requests within ``seconds``."""
        with self._connecting:
            if self._connection is None:
                self._connection = Connection(self._timeout)
                self._host = host()
                # Ranks on one host find each other here; a store that is a file has no lists.
                if self._host is not None:
                    with contextlib.suppress(RuntimeError):
                        Store(self._connection, seconds).append(
                            self.key(f"host/{self._host}"), f"{self.mesh.rank} {os.getpid()},"
                        )
                self._connected()
            return Store(self._connection, seconds)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @contextlib.contextmanager
    def asking(self, seconds: float) -> Iterator[Store]:
        """`store`; raises CollectiveError if the process that holds it does not answer."""
        try:
            yield self.store(seconds)
        except RuntimeError as e:
            if isinstance(e, NoAnswer):
                raise CollectiveError(f"{e}: it is stopped, or cut off.{RESTART}") from e
            raise CollectiveError(
                f"{holder()} has ended, and with it the store that ranks talk through.{RESTART}"
            ) from e

    def notification(self, rank: int) -> str:
        """The key that wakes a rank's watcher when it is set."""
        return self.key(f"notify/{rank}")

    def notify(self, store: Store, ranks: Sequence[int] | None = None) -> None:
        """Wake the watchers of these ranks; default all."""
        ranks = self.mesh.ranks if ranks is None else ranks
        store.multi_set([self.notification(rank) for rank in ranks])

    def processes_here(self, store: Store) -> dict[int, int]:
        """The process ids of the other ranks on this host that have connected, by rank."""
        key = self.key(f"host/{self._host}")
        if self._host is None or not store.check(key):
            return {}
        entries = [entry.split() for entry in store.get(key).split(",") if entry]
        pids = {int(rank): int(pid) for rank, pid in entries}
        pids.pop(self.mesh.rank)
        return pids
