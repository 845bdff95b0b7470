"""The roll call after a failed collective: which ranks still answer."""

import contextlib
import json

from ftp.dataclass import dataclass
from ftp.distributed.store import Store
from ftp.distributed.waiting import LINGER, RESTART, named_ranks, wait_until
from ftp.sharding.mesh import Mesh


@dataclass(frozen=True)
class Answer:
    """A rank's answer: the call that it is in.

    Attributes:
        text: words that follow the rank's name.
        call: the number of the call that it is in; None if it is in none.
        has_ended: whether its process ends.
    """

    text: str
    call: int | None = None
    has_ended: bool = False

    def as_text(self) -> str:
        """
        >>> Answer.from_text(Answer("is in call 3", 3).as_text())
        Answer(text='is in call 3', call=3, has_ended=False)
        """
        return json.dumps([self.text, self.call, self.has_ended])

    @classmethod
    def from_text(cls, text: str) -> "Answer":
        return cls(*json.loads(text))


@dataclass(frozen=True)
class RollCall:
    """A question to all ranks, asked once, by the first rank that sees a collective fail. Each
    rank's first answer is final, and so is the first verdict.
    """

    store: Store
    prefix: str
    mesh: Mesh

    def key(self, name: str | int) -> str:
        return f"{self.prefix}/roll/{name}"

    def call(self) -> bool:
        """Ask all ranks; returns whether this rank is the first to ask."""
        return self.store.propose(self.key("called"), str(self.mesh.rank)) == str(self.mesh.rank)

    def is_called(self) -> bool:
        return self.store.check(self.key("called"))

    def sign(self, answer: Answer) -> None:
        self.store.set(self.key(self.mesh.rank), answer.as_text())
        self.store.add(self.key("count"), 1)

    def has_signed(self, rank: int) -> bool:
        return self.store.check(self.key(rank))

    def answer_of(self, rank: int) -> Answer | None:
        """A rank's answer; None if it has not answered."""
        return Answer.from_text(self.store.get(self.key(rank))) if self.has_signed(rank) else None

    def lose(self, why: str) -> str:
        """Publish that a rank has ended, after the verdict or after its own answer; returns the
        first such text.
        """
        return self.store.propose(self.key("lost"), why)

    def lost(self) -> str:
        """The text that `lose` has published; "" if none."""
        return self.store.get(self.key("lost")) if self.store.check(self.key("lost")) else ""

    def is_settled(self) -> bool:
        return self.store.check(self.key("verdict"))

    def settle(self, why: str, *, is_missing: bool, gone: int = 0) -> tuple[str, bool]:
        """Publish the fault, whether a rank is missing, and how many ranks cannot read it because
        their processes are gone; returns the first verdict.
        """
        verdict = [why, is_missing, self.mesh.size() - gone]
        self.store.propose(self.key("verdict"), json.dumps(verdict))
        return self.learn()

    def learn(self) -> tuple[str, bool]:
        why, is_missing, _ = json.loads(self.store.get(self.key("verdict")))
        return why, is_missing

    def see(self) -> None:
        """Count this rank as one that knows the verdict."""
        self.store.add(self.key("seen"), 1)

    def linger(self) -> None:
        """Wait until all ranks that can read the verdict know it: this rank may hold the store."""
        with contextlib.suppress(RuntimeError):
            *_, readers = json.loads(self.store.get(self.key("verdict")))
            wait_until(
                LINGER,
                lambda: self.store.add(self.key("seen"), 0) >= readers,
                self.mesh.size(),
            )

    def verdict(self, call: int, waited: str, patience: float) -> tuple[str, bool]:
        """The verdict, from the answers of all ranks, or of those that answer in ``patience``
        seconds.

        Args:
            waited: for how long this rank waited in its collective, for the message.
        """
        wait_until(
            patience,
            lambda: self.is_settled() or self.store.add(self.key("count"), 0) >= self.mesh.size(),
            self.mesh.size(),
        )
        if self.is_settled():
            return self.learn()
        answers = {
            rank: answer
            for rank in sorted(self.mesh.ranks)
            if (answer := self.answer_of(rank)) is not None
        }
        why, is_missing = self._describe(call, answers, waited)
        living = sum(not answer.has_ended for answer in answers.values())
        return self.settle(why, is_missing=is_missing, gone=self.mesh.size() - living)

    def _describe(self, call: int, answers: dict[int, Answer], waited: str) -> tuple[str, bool]:
        silent = [rank for rank in sorted(self.mesh.ranks) if rank not in answers]
        found = (
            [
                f"{named_ranks(silent)} {'do' if len(silent) > 1 else 'does'} not answer: killed,"
                " stopped, or cut off"
            ]
            if silent
            else []
        )
        found += [
            f"{named_ranks([rank])} {answer.text}"
            for rank, answer in answers.items()
            if answer.call is None
        ]
        found = found or [
            f"{named_ranks([rank])} {answer.text}"
            for rank, answer in answers.items()
            if answer.call != call
        ]
        is_missing = bool(silent) or any(answer.has_ended for answer in answers.values())
        why = (
            ". ".join(found)
            or "all ranks are in it, so a connection between them failed or was too slow"
        )
        return f"{why}{waited}.{RESTART}", is_missing
