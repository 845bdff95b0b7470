"""The ops that pass keys and values around a ring, each with its program of one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ftp.ops import attention_flex_ring, attention_ring, attention_varlen_ring
from ftp.ops.attention_flex_ring import FLEX_RING, FLEX_RING_BACKWARD
from ftp.ops.attention_ring import RING, RING_BACKWARD, Needs, Ring
from ftp.ops.attention_varlen_ring import VARLEN_RING, VARLEN_RING_BACKWARD
from ftp.ops.sends import OneRank, side_by_side


@dataclass(frozen=True)
class RingOp:
    """An op whose last argument is a group.

    Attributes:
        one_rank: from a rank and the other arguments.
        at: which argument the queries are; keys and values follow.
        columns: the name of the argument that is a `Ring`.
    """

    target: Any
    one_rank: Callable[..., OneRank]
    at: int
    columns: str = "columns"

    @property
    def returns(self) -> bool:
        """Whether gradients of keys and values go back."""
        return self.at > 0

    def argument(self, args: Sequence[Any], name: str) -> Any:
        """An argument by its name; None for one that the op does not have."""
        names = [a.name for a in self.target._schema.arguments]
        return args[names.index(name)] if name in names else None

    def ring(self, args: Sequence[Any]) -> tuple[Ring, Needs]:
        """How keys are cut, and who needs which."""
        ring = Ring.of(self.argument(args, self.columns))
        rows, is_causal = (self.argument(args, name) for name in ("rows", "is_causal"))
        return ring, ring.sends(rows, bool(is_causal))

    def by_rank(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results, from the arguments on each rank of a group."""
        return side_by_side([self.one_rank(rank, *args[:-1]) for rank, args in enumerate(calls)])


_ALL = (
    RingOp(RING, attention_ring.one_rank, 0, "keys"),
    RingOp(RING_BACKWARD, attention_ring.one_rank_backward, 1, "keys"),
    RingOp(FLEX_RING, attention_flex_ring.one_rank, 0),
    RingOp(FLEX_RING_BACKWARD, attention_flex_ring.one_rank_backward, 1),
    RingOp(VARLEN_RING, attention_varlen_ring.one_rank, 0),
    RingOp(VARLEN_RING_BACKWARD, attention_varlen_ring.one_rank_backward, 1),
)
RINGS = {op.target: op for op in _ALL}
