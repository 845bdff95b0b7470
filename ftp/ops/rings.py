"""The ops that pass keys and values around a ring, each with its program of one rank."""

from collections.abc import Callable, Sequence
from typing import Any

from ftp.dataclass import dataclass
from ftp.ops import attention_flex_ring, attention_ring, attention_varlen_ring
from ftp.ops.attention_flex_ring import FLEX_RING, FLEX_RING_BACKWARD
from ftp.ops.attention_ring import RING, RING_BACKWARD
from ftp.ops.attention_varlen_ring import VARLEN_RING, VARLEN_RING_BACKWARD
from ftp.ops.ring_pieces import Needs
from ftp.ops.sends import OneRank, side_by_side


@dataclass(frozen=True)
class RingOp:
    """An op whose last argument is a group.

    Attributes:
        one_rank: the program of one rank, from the rank and the other arguments.
        at: position of the queries among the arguments; keys and values follow.
        needs_of: gives each rank's needs from the arguments named in ``known`` and ``returns``.
    """

    target: Any
    one_rank: Callable[..., OneRank]
    at: int
    needs_of: Callable[..., Needs]
    known: tuple[str, ...]

    @property
    def returns(self) -> bool:
        """Whether gradients of keys and values are sent back."""
        return self.at > 0

    def argument(self, args: Sequence[Any], name: str) -> Any:
        """An argument by its name; None for one that the op does not have."""
        names = [a.name for a in self.target._schema.arguments]
        return args[names.index(name)] if name in names else None

    def needs(self, args: Sequence[Any]) -> Needs:
        """The keys that each rank needs, from a call's arguments."""
        return self.needs_of(*(self.argument(args, name) for name in self.known), self.returns)

    def by_rank(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results, from the arguments on each rank of a group."""
        return side_by_side([self.one_rank(rank, *args[:-1]) for rank, args in enumerate(calls)])


_OPS = (
    (attention_ring, (RING, RING_BACKWARD), ("keys", "rows", "is_causal")),
    (
        attention_flex_ring,
        (FLEX_RING, FLEX_RING_BACKWARD),
        ("columns", "rows", "block", "known"),
    ),
    (
        attention_varlen_ring,
        (VARLEN_RING, VARLEN_RING_BACKWARD),
        ("columns", "rows", "left", "right", "is_self"),
    ),
)
RINGS = {
    target: RingOp(target, body, at, module.needs_of, known)
    for module, targets, known in _OPS
    for at, (target, body) in enumerate(
        zip(targets, (module.one_rank, module.one_rank_backward), strict=True)
    )
}
