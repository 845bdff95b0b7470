"""The result of each kind of exchange, as a function of the tensors that its group sends."""

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

from ftp.dataclass import dataclass

SENDS = ("send", "recv")


class Mismatch(Exception):
    """The exchanges that the ranks of a group issue do not fit each other."""


@dataclass(frozen=True)
class Issued:
    """An exchange as a rank issues it.

    Attributes:
        sent: copies of the tensors that the rank sends.
        ranks: of the group, in order.
        option: the reduction, or the tag of a send.
        sizes: rows for and from each rank where they are unequal; or the root, or the peer.
    """

    kind: str
    sent: Sequence[Any]
    ranks: tuple[int, ...]
    option: str
    sizes: tuple[int, ...]

    @property
    def title(self) -> str:
        option = f"({self.option})" if self.option else ""
        return f"{self.kind}{option} over ranks {list(self.ranks)}"


def delivered(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    """Per rank of the group, the values that it receives.

    Raises:
        Mismatch: ranks issue different collectives, or sizes that do not fit.
    """
    first = issued[0]
    for other in issued[1:]:
        if (other.kind, other.option) != (first.kind, first.option):
            raise Mismatch(f"{first.title} on one rank, {other.title} on another")
    kinds = [[domain.dtype(x) for x in i.sent[:1]] for i in issued]
    for kind in kinds[1:]:
        if kind and kinds[0] and kind != kinds[0]:
            raise Mismatch(f"{first.title} of {kinds[0][0]} on one rank, {kind[0]} on another")
    shapes = [[tuple(x.shape) for x in i.sent] for i in issued]
    if first.kind in ("all_reduce", "all_gather", "reduce_scatter", "gather", "reduce"):
        for shape in shapes[1:]:
            if shape != shapes[0]:
                raise Mismatch(
                    f"{first.title} of shapes {shapes[0]} on one rank, {shape} on another"
                )
    if first.kind in ("broadcast", "scatter", "reduce", "gather"):
        roots = sorted({i.sizes[:1] for i in issued})
        if len(roots) > 1:
            raise Mismatch(
                f"{first.title} with root {roots[0][0]} on one rank, {roots[1][0]} on another"
            )
    return _KINDS[first.kind](domain, issued)


def _reduced(domain: Any, option: str, parts: Sequence[Any]) -> Any:
    if option in ("sum", "avg"):
        total = reduce(domain.add, parts)
        return total if option == "sum" else domain.scaled(total, Fraction(1, len(parts)))
    by = {"max": domain.larger, "min": domain.smaller, "product": domain.multiply}
    if option not in by:
        raise Mismatch(f"a reduction by {option!r} is not known")
    return reduce(by[option], parts)


def _all_reduce(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    columns = zip(*(i.sent for i in issued), strict=True)
    totals = [_reduced(domain, issued[0].option, column) for column in columns]
    return [[domain.separate(t) for t in totals] for _ in issued]


def _reduce(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    found = _all_reduce(domain, issued)
    root = issued[0].sizes[0]
    return [
        f if at == root else list(i.sent)
        for at, (f, i) in enumerate(zip(found, issued, strict=True))
    ]


def _all_gather(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    """Per tensor that is sent, the ranks' tensors one after another."""
    count = len(issued[0].sent)
    return [[domain.separate(i.sent[at]) for at in range(count) for i in issued] for _ in issued]


def _gather(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    found, root = _all_gather(domain, issued), issued[0].sizes[0]
    return [f if at == root else [] for at, f in enumerate(found)]


def _reduce_scatter(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    """Each rank sends a tensor for each rank of the group, and so on for each packed call."""
    n = len(issued)
    columns = list(zip(*(i.sent for i in issued), strict=True))
    totals = [_reduced(domain, issued[0].option, column) for column in columns]
    return [[domain.separate(totals[i]) for i in range(at, len(totals), n)] for at in range(n)]


def _all_to_all(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    return [[domain.separate(i.sent[at]) for i in issued] for at in range(len(issued))]


def _broadcast(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    root = issued[0].sizes[0]
    return [[domain.separate(x) for x in issued[root].sent] for _ in issued]


def _scatter(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    root = issued[0].sizes[0]
    if len(issued[root].sent) != len(issued):
        raise Mismatch(f"{issued[root].title} of {len(issued[root].sent)} tensors")
    return [[domain.separate(issued[root].sent[at])] for at in range(len(issued))]


def _barrier(domain: Any, issued: Sequence[Issued]) -> list[list[Any]]:
    return [[] for _ in issued]


_KINDS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "barrier": _barrier,
}
