"""The ops that send while they compute, each with its program of one rank: attention that passes
keys and values around a ring, and the exchange of halos.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ftp.dataclass import dataclass
from ftp.ops import attention_flex_ring, attention_ring, attention_varlen_ring
from ftp.ops.attention_flex_ring import FLEX_RING, FLEX_RING_BACKWARD
from ftp.ops.attention_ring import RING, RING_BACKWARD
from ftp.ops.attention_varlen_ring import VARLEN_RING, VARLEN_RING_BACKWARD
from ftp.ops.ring_pieces import Needs
from ftp.ops.sends import SendingOp
from ftp.ops.windows import HALO, HALO_EXCHANGE


@dataclass(frozen=True)
class RingOp(SendingOp):
    """Attention in a ring.

    Attributes:
        at: position of the queries among the arguments; keys and values follow.
        needs_of: gives each rank's needs from the arguments named in ``known`` and ``returns``.
    """

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
SENDING: dict[Any, SendingOp] = {**RINGS, HALO_EXCHANGE: HALO}
