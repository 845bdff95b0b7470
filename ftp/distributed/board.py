"""The keys of one agreement in the store: each rank's payload, and the verdict."""

import base64
import contextlib
import json
import zlib
from typing import NamedTuple

from ftp.dataclass import dataclass
from ftp.distributed.store import Store
from ftp.distributed.waiting import LINGER, named_ranks, shortened, wait_until
from ftp.errors import MismatchError
from ftp.sharding.mesh import Mesh


class Verdict(NamedTuple):
    """The end of an agreement: why it failed, or "" if all ranks agree; and the facet in which
    ranks differ, if that is the reason.
    """

    why: str = ""
    facet: str | None = None

    def error(self) -> MismatchError:
        error = MismatchError(self.why)
        error.facet = self.facet
        return error


@dataclass(frozen=True)
class Board:
    """The keys of one agreement. The last rank to arrive compares all payloads; a rank that fails
    publishes it at once. The first verdict is final.
    """

    store: Store
    prefix: str
    number: int
    mesh: Mesh

    def key(self, name: str | int) -> str:
        return f"{self.prefix}/{self.number}/{name}"

    def open(self, call: int, skipped: str, about: str = "") -> bool:
        """Open the agreement, for arguments ``about``; returns whether this rank is the first."""
        mine = json.dumps(
            [
                self.mesh.rank,
                call,
                f"{skipped}, and makes it anew"
                if skipped
                else f"changes its program at call {call}{about and f', which takes {about}'}",
            ]
        )
        return self.store.propose(self.key("open"), mine) == mine

    def is_open(self) -> bool:
        return self.store.check(self.key("open"))

    def opened(self) -> tuple[int, int, str]:
        rank, call, why = json.loads(self.store.get(self.key("open")))
        return rank, call, why

    def enter(self, payload: dict[str, str]) -> int:
        """Publish this rank's payload; returns the number of ranks that have published."""
        self.store.set(
            self.key(self.mesh.rank), zlib.compress(json.dumps(payload).encode(), 1).hex()
        )
        return self.store.add(self.key("count"), 1)

    def compare(self) -> Verdict:
        """The first difference from the lowest rank, if any."""
        ranks = sorted(self.mesh.ranks)
        texts = self.store.multi_get([self.key(rank) for rank in ranks])
        if all(t == texts[0] for t in texts):
            return Verdict()
        lowest, *others = (json.loads(zlib.decompress(bytes.fromhex(t))) for t in texts)
        for rank, payload in zip(ranks[1:], others, strict=True):
            for facet in dict.fromkeys((*lowest, *payload)):
                a, b = (p.get(facet, "(absent)") for p in (lowest, payload))
                if a != b:
                    call = lowest.get("call number", "?")
                    why = _describe_difference(facet, (ranks[0], a), (rank, b), call)
                    return Verdict(why, facet)
        return Verdict()

    def settle(self, verdict: Verdict) -> None:
        self.store.propose(self.key("verdict"), json.dumps(verdict))

    def break_off(self, why: str) -> None:
        """Publish that a rank runs another program: the mesh takes no more calls."""
        self.settle(Verdict(why))
        self.store.propose(f"{self.prefix}/broken", json.dumps(self.verdict()))

    def is_broken(self) -> bool:
        return self.store.check(f"{self.prefix}/broken")

    def broken(self) -> Verdict:
        return Verdict(*json.loads(self.store.get(f"{self.prefix}/broken")))

    def is_settled(self) -> bool:
        return self.store.check(self.key("verdict"))

    def verdict(self) -> Verdict:
        return Verdict(*json.loads(self.store.get(self.key("verdict"))))

    def linger(self) -> None:
        """Wait until all ranks know of the failure: this rank may hold the store, and its end would
        close their connections.
        """
        with contextlib.suppress(RuntimeError):  # the rank that holds the store has ended
            self.see()
            wait_until(
                LINGER,
                lambda: self.store.add(self.key("seen"), 0) >= self.mesh.size(),
                self.mesh.size(),
            )

    def see(self) -> int:
        """Count this rank as one that knows the verdict; returns the number of these."""
        return self.store.add(self.key("seen"), 1)

    def absent(self) -> list[int]:
        return [rank for rank in sorted(self.mesh.ranks) if not self.store.check(self.key(rank))]

    def report_absent(self, absent: list[int], said: str, call: int, timeout: float) -> str:
        who = named_ranks(absent) if absent else "The rank that compares"
        waiting = (
            f"rank {self.mesh.rank} waited {timeout:g} s to agree on the program of call {call}"
        )
        return f"{who} never arrived: {waiting}.{said}{ABSENT}"

    def clean(self) -> None:
        """Delete this rank's payload, which no rank reads after the verdict."""
        self.store.delete([self.key(self.mesh.rank)])

    def forget(self, since: int) -> None:
        """Delete the keys of this agreement, and of failed ones before it, after all ranks know the
        verdict.
        """
        if self.see() == self.mesh.size():
            names = ("open", "count", "verdict", "seen")
            self.store.delete(
                [
                    f"{self.prefix}/{number}/{name}"
                    for number in range(since, self.number + 1)
                    for name in names
                ]
            )


ABSENT = (
    "\n  See what it does: it may have failed before this call, run other code, or still be"
    " starting (then allow a longer timeout)."
)


def packed(values: list[str]) -> str:
    """All ranks' values as one text, which is short if most are equal."""
    distinct = {value: i for i, value in enumerate(dict.fromkeys(values))}
    text = json.dumps([list(distinct), [distinct[value] for value in values]])
    return base64.b85encode(zlib.compress(text.encode(), 1)).decode()


def unpacked(text: str) -> list[str]:
    """
    >>> unpacked(packed(["a", "b", "a"]))
    ['a', 'b', 'a']
    """
    distinct, indices = json.loads(zlib.decompress(base64.b85decode(text)))
    return [distinct[i] for i in indices]


def _describe_difference(
    facet: str, lowest: tuple[int, str], other: tuple[int, str], call: str
) -> str:
    (first, a), (rank, b) = lowest, other
    start = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    shown = [f"\n  rank {r}: {shortened(text, 160, start)}" for r, text in ((first, a), (rank, b))]
    return (
        f"Ranks disagree on the {facet} of call {call}: rank {rank} differs from rank {first}, so"
        f" no rank runs it.{''.join(shown)}\n"
        "  Give every rank the same program, specs and global shapes."
    )
