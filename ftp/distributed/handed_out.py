"""Content that the first rank of a mesh sends to ranks of other hosts, through the store."""

import base64
import contextlib
from collections.abc import Iterator

from ftp.distributed.channel import Channel
from ftp.distributed.faults import Faults
from ftp.distributed.store import Store
from ftp.distributed.waiting import wait_until
from ftp.errors import CollectiveError

_PART = 2**20  # characters of one key; a store takes 8 MiB
_PATIENCE = 30.0  # seconds that a rank waits for the content
_ANSWER = 10.0  # seconds for the store to take or to give it


class HandedOut:
    """One rank's side. No rank depends on the content: if it does not arrive, ranks make their own,
    and their agreement reports what is wrong with the first rank or the store.

    Args:
        number: of the content, equal on all ranks.
    """

    def __init__(self, channel: Channel, faults: Faults, number: int):
        self._channel, self._faults = channel, faults
        self._name = channel.key(f"handed out/{number}")
        self._parts: int | None = None  # that this rank has given

    @property
    def gives(self) -> bool:
        """Whether this rank is the one that hands out."""
        mesh = self._channel.mesh
        return mesh.rank == mesh.ranks[0]

    def give(self, content: bytes) -> None:
        """Publish the content, empty if there is none. Only the first call counts."""
        if not self.gives or self._parts is not None:
            return
        text = base64.b85encode(content).decode()
        parts = [text[at : at + _PART] for at in range(0, len(text), _PART)]
        self._parts = len(parts)
        with self._asking(_ANSWER) as store:
            for i, part in enumerate(parts):
                store.set(f"{self._name}/{i}", part)
            store.set(f"{self._name}/parts", str(len(parts)))

    def take(self) -> bytes:
        """The content; empty if the first rank has none, has ended or is late."""
        faults, count, found = self._faults, f"{self._name}/parts", b""
        with self._asking(_PATIENCE + _ANSWER) as store:

            def is_over() -> bool:
                return bool(faults.missing) or store.check(count)

            wait_until(_PATIENCE, is_over, self._channel.mesh.size())
            if store.check(count):
                keys = [f"{self._name}/{i}" for i in range(int(store.get(count)))]
                found = base64.b85decode("".join(store.get(key) for key in keys))
        return found

    def forget(self) -> None:
        """Delete the content that this rank has given, once all ranks have their program."""
        if self._parts is not None:
            names = ("parts", *range(self._parts))
            with self._asking(_ANSWER) as store:
                store.delete([f"{self._name}/{name}" for name in names])

    @contextlib.contextmanager
    def _asking(self, seconds: float) -> Iterator[Store]:
        with contextlib.suppress(CollectiveError), self._channel.asking(seconds) as store:
            yield store
