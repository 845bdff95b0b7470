"""The sharding rule of one call: how its tensors' dims share factors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from ftp.dataclass import dataclass
from ftp.ops.ring_pieces import Sees
from ftp.ops.windows import Exchange
from ftp.rules.call import Call
from ftp.rules.notation import Dims, Notation

LocalHook = Callable[[Any], Any]


@dataclass(frozen=True)
class Rule:
    """How one call's dims share factors.

    Attributes:
        notation: the factors.
        linear: groups of operand indices that may be pending sums together, giving a pending sum.
        local: emits the op's local form, if that is more than the op itself (see
            ``local_op.LocalOp``).
        sizes: sizes of factors that cannot be found from the shapes.
        decompose: whether to replace the op by primitives where an axis may cut a factor that it
            keeps whole.
        ring: pairs of factors that one axis may cut together; the second is never cut by itself.
            The local form then passes parts around the ranks of the axis.
        sees: for attention, the most keys that given queries see, as far as the trace knows
            (`ftp.ops.ring_pieces.Sees`). None: all.
        resized: factors that are whole dims whose size the op changes, so that each rank's chunk
            changes too. ``sizes`` has the result's size; an operand's chunks follow its own size.
        together: pairs of whole dims of different sizes, of an operand and of a result, that one
            axis may cut together where the ranks' chunks of both start alike.
        exchange: where an axis of so many ranks may cut such a pair though chunks differ: what its
            ranks send, in elements of the operand's dim.
    """

    notation: Notation
    linear: tuple[tuple[int, ...], ...] = ()
    local: LocalHook | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    decompose: bool = True
    ring: tuple[tuple[str, str], ...] = ()
    sees: Sees | None = None
    resized: frozenset[str] = frozenset()
    together: tuple[tuple[str, str], ...] = ()
    exchange: Exchange | None = None

    def __str__(self) -> str:
        return str(self.notation)


@dataclass(frozen=True)
class BoundRule:
    """A rule fitted to a call: one factor list per dim, all sizes known.

    Attributes:
        is_found: whether the rule was found by trial rather than stated.
        call: the call, for local hooks; None for a rule that is not from the registry.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str]
    pending: tuple[Mapping[str, str], ...]
    linear: tuple[tuple[int, ...], ...]
    sizes: Mapping[str, int]
    local: LocalHook | None
    decompose: bool
    is_found: bool = False
    ring: tuple[tuple[str, str], ...] = ()
    sees: Sees | None = field(default=None, compare=False, repr=False)
    call: Call | None = field(default=None, compare=False, repr=False)
    together: tuple[tuple[str, str], ...] = ()
    exchange: Exchange | None = None

    def may_cut_together(self, pair: tuple[str, str], sizes: Sequence[Any], n: int) -> bool:
        """Whether ``n`` ranks may cut such a pair, of these sizes."""
        if self.exchange is not None:
            return self.exchange.n == n and list(sizes) == [self.sizes[f] for f in pair]
        chunks = [-(-size // n) for size in sizes if type(size) is int]
        return len(chunks) == 2 and chunks[0] == chunks[1]

    @property
    def dims(self) -> tuple[Dims, ...]:
        """The dims of the operands, then of the results."""
        return (*self.operands, *self.results)

    def __str__(self) -> str:
        pending = tuple(tuple(p.items()) for p in self.pending)
        return str(Notation(self.operands, self.results, self.whole, pending))
