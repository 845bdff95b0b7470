"""Values that all ranks of a mesh send each other through the store."""

from collections.abc import Callable

from ftp.distributed.board import ABSENT, packed, unpacked
from ftp.distributed.channel import Channel
from ftp.distributed.faults import Faults
from ftp.distributed.store import Store
from ftp.distributed.waiting import named_ranks, wait_until
from ftp.errors import CollectiveError, MismatchError


class Exchanges:
    """The exchanges of one rank; those under one key have the same numbers on all ranks.

    Attributes:
        turns: the number of exchanges that have begun, by key.
        waits: those that this rank waits in.
    """

    def __init__(self, channel: Channel, faults: Faults):
        self._channel, self._faults = channel, faults
        self.turns: dict[str, int] = {}
        self.waits: dict[str, int] = {}

    def run(self, key: str, value: str, timeout: float, met: Callable[[Store], None]) -> list[str]:
        """Every rank's ``value``; ``met`` is called when all have arrived.

        Raises:
            MismatchError: ranks that did not come in ``timeout`` seconds.
            CollectiveError: a rank that has ended.
        """
        mesh, faults = self._channel.mesh, self._faults
        if faults.missing:
            raise CollectiveError(faults.missing)
        with self._channel.asking(timeout) as store:
            turn = self.turns[key] = self.turns.get(key, 0) + 1
            name = self._channel.key(f"exchange/{key}/{turn}")
            keys = {rank: f"{name}/{rank}" for rank in mesh.ranks}
            store.set(keys[mesh.rank], value)
            # The last rank joins all values in one key, so that each rank reads one key rather than
            # one per rank.
            if store.add(f"{name}/count", 1) == mesh.size():
                store.set(f"{name}/all", packed(store.multi_get(list(keys.values()))))

            def is_over() -> bool:
                return store.check(f"{name}/all") or bool(faults.missing)

            self.waits[key] = turn
            try:
                has_come = wait_until(timeout, is_over, mesh.size())
            finally:
                del self.waits[key]
            if not has_come:
                absent = [rank for rank, k in keys.items() if not store.check(k)]
                raise MismatchError(
                    f"{named_ranks(absent)} never came to exchange {key!r}, in {timeout:g}"
                    f" s.{faults.ask(absent)}{ABSENT}"
                )
            if faults.missing and not store.check(f"{name}/all"):
                raise CollectiveError(
                    f"Rank {mesh.rank} waited in exchange {key!r}: {faults.missing}"
                )
            everyone = unpacked(store.get(f"{name}/all"))
            store.delete([keys[mesh.rank]])
            if store.add(f"{name}/read", 1) == mesh.size():
                store.delete([f"{name}/{part}" for part in ("all", "count", "read")])
            met(store)
            return everyone
