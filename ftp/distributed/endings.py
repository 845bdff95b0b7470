"""Ranks that make no more calls, while others wait for them."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping

from ftp.distributed.channel import Channel
from ftp.distributed.faults import Faults
from ftp.distributed.store import Store
from ftp.distributed.waiting import LINGER


class Endings:
    """Finds that a rank has come to ``ftp.destroy_process_group`` before a call that this rank
    waits in. The first rank that comes to it says after which call; the others' watchers look.
    """

    def __init__(self, channel: Channel, faults: Faults):
        self._channel, self._faults = channel, faults
        self._waits, self._since = "", 0.0

    def announce(self, call: int, turns: Mapping[str, int]) -> None:
        """Say that this rank makes no more calls after number ``call``, and after so many exchanges
        of each key.
        """
        channel = self._channel
        with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
            store = channel.store(1.0)
            mine = json.dumps([channel.mesh.rank, call, dict(turns)])
            if store.propose(channel.key("ending"), mine) == mine:
                channel.notify(store)

    def look(self, store: Store, waits_in: Callable[[], int], exchanges: Mapping[str, int]) -> bool:
        """Give up what this rank waits in if a rank that has ended does not come to it. Returns
        whether to look again.

        Args:
            waits_in: the number of the call in which this rank waits for others; 0 if there is
                none.
            exchanges: those that it is in, by key.
        """
        key = self._channel.key("ending")
        if self._faults.failure is not None or not store.check(key):
            return False
        rank, last, turns = json.loads(store.get(key))
        call = waits_in()
        waits = [f"in call {call}"] if call > last else []
        waits += [f"in exchange {k!r}" for k, turn in exchanges.items() if turn > turns.get(k, 0)]
        if ", ".join(waits) != self._waits:
            self._waits, self._since = ", ".join(waits), time.monotonic()
        if not waits or time.monotonic() - self._since < LINGER:
            return True
        self._faults.give_up_on(
            store,
            f"Rank {rank} has called ftp.destroy_process_group after call {last}, and rank"
            f" {self._channel.mesh.rank} is {self._waits}: a loop has ended earlier on rank {rank},"
            " as where its data loader has fewer batches. Give all ranks as many.",
        )
        return False
