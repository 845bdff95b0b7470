"""Work and traffic of attention whose queries one mesh axis may cut, on the busiest rank. Masked
pairs are left out if the mask is known when the plan is made.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from ftp.ops.attention import pieces_of
from ftp.ops.ring_pieces import EVERY, Needs, Ring, RingAxis, Sees
from ftp.planning.cost import Hardware, collective_seconds
from ftp.planning.graph import FactorCut, Node
from ftp.planning.reachable_cuts import Cut
from ftp.sharding.layout import estimated, pieces

TILES = 256  # tiles of queries; the keys that a tile sees are counted once per tile
MOST_TILE = 1024  # most queries of a tile

# One axis' cut of queries: ``[outer, size, inner]``, number of ranks, whether in zigzag.
_CutKey = tuple[int, int, int, int, bool]


def computed_share(node: Node, cut: Cut | None, n: int, axes: Mapping[str, int]) -> float:
    """The busiest rank's share of the (query, key) pairs of an axis: pairs that it computes, over
    all pairs, masked ones included.

    Args:
        cut: the factor that the axis of ``n`` ranks cuts; None: none.
        axes: sizes of the axes planned before.
    """
    ((rows, keys),) = node.rule.ring
    cuts, share = _cuts_of(node.cuts, rows, axes), 1.0
    if cut is not None and cut.factor == rows:
        cuts = (*cuts, _of_cut(node, cut, n))
    elif cut is not None:
        _, extent, *_ = _of_cut(node, cut, n)
        held = sum(length for _, length in pieces(extent, n, 0, cut.zigzag))
        share = held / max(extent, 1)
    queries, length = estimated(node.rule.sizes[rows]), estimated(node.rule.sizes[keys])
    most = _most_pairs(node.rule.sees, cuts, queries, length)
    return share * most / max(estimated(node.sizes[rows]) * length, 1)


def ring_seconds(
    node: Node,
    cuts: tuple[Cut, Cut],
    n: int,
    axes: Mapping[str, int],
    hardware: Hardware,
    computed: float,
    of_key: float,
) -> float:
    """Seconds of ring attention: an op computes while keys and values travel around the ranks of an
    axis, and in a backward pass their gradients travel back. If the ring also runs over axes
    planned before, only the seconds that this axis adds.

    Args:
        cuts: how the axis of ``n`` ranks cuts queries and keys.
        axes: sizes of the axes planned before.
        computed: seconds of the work, without communication.
        of_key: bytes of one key and its value.
    """
    rows, keys = cuts
    queries, length = (estimated(node.rule.sizes[cut.factor]) for cut in cuts)
    of_queries = *_cuts_of(node.cuts, rows.factor, axes), _of_cut(node, rows, n)
    of_keys = *_cuts_of(node.cuts, keys.factor, axes), _of_cut(node, keys, n)
    ringed = {cut.axis for cut in node.cuts if cut.factor == keys.factor}
    on = [cut.axis in ringed for cut in node.cuts if cut.factor == rows.factor]
    sent, steps = _traffic(
        node.rule.sees, of_queries, of_keys, (*on, True), queries, length, _returns(node)
    )
    link = hardware.link
    travel = collective_seconds("ring", sent * of_key, n, link)
    travel += max(steps - 1, 0) * link.latency  # of the messages of each step
    held_up = (1 - link.hidden) * travel
    return max(computed + held_up, travel) + steps * hardware.ring_step


def ring_costs(node: Node, axes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield, for each axis of the ring of an op that all axes have cut: (axis, number of keys that
    the busiest rank sends or receives over it, steps that it adds to the axes before).
    """
    ((rows, keys),) = node.rule.ring
    queries, length = (estimated(node.rule.sizes[factor]) for factor in (rows, keys))
    ringed = {cut.axis for cut in node.cuts if cut.factor == keys}
    for last, axis in [(i, c.axis) for i, c in enumerate(node.cuts) if c.factor == keys]:
        until = node.cuts[: last + 1]
        of_queries, of_keys = (_cuts_of(until, factor, axes) for factor in (rows, keys))
        on = tuple(cut.axis in ringed for cut in until if cut.factor == rows)
        yield (
            axis,
            *_traffic(node.rule.sees, of_queries, of_keys, on, queries, length, _returns(node)),
        )


def _returns(node: Node) -> bool:
    """Whether an op gives gradients of keys, which travel back."""
    ((rows, _),) = node.rule.ring
    return any(rows in pending for pending in node.rule.pending)


def _cuts_of(
    cuts: Sequence[FactorCut], factor: str, axes: Mapping[str, int]
) -> tuple[_CutKey, ...]:
    return tuple(
        (estimated(c.outer), estimated(c.extent), estimated(c.inner), axes[c.axis], c.zigzag)
        for c in cuts
        if c.factor == factor
    )


def _of_cut(node: Node, cut: Cut, n: int) -> _CutKey:
    outer, inner = estimated(cut.outer), estimated(cut.inner)
    return outer, estimated(node.sizes[cut.factor]) // (outer * inner), inner, n, cut.zigzag


def _ranks(cuts: Sequence[_CutKey], is_first: Sequence[bool] = ()) -> Iterator[list[int]]:
    """The parts of the queries that each rank holds, as in `ftp.ops.attention`.

    Args:
        is_first: per cut, whether only the first rank of its axis is wanted.
    """
    groups = []
    for (outer, size, inner, n, is_zigzag), first in itertools.zip_longest(cuts, is_first):
        held = [pieces(size, n, rank, is_zigzag) for rank in range(1 if first else n)]
        numbers = [[number for piece in of for number in piece] for of in held]
        groups.append([[outer, size, inner, len(x) // 2, *x] for x in numbers])
    for found in itertools.product(*groups):
        yield [number for group in found for number in group]


@functools.lru_cache(1024)
def _most_pairs(sees: Sees | None, cuts: tuple[_CutKey, ...], queries: int, keys: int) -> int:
    """How many pairs the busiest rank computes."""
    tile = min(max(queries // TILES, 1), MOST_TILE)
    most = 0
    for rows in _ranks(cuts):
        held = pieces_of(rows, queries)
        if sees is None:
            most = max(most, keys * sum(length for _, length in held))
            continue
        total = 0
        for first, length in held:
            for start in range(first, first + length, tile):
                stop = min(start + tile, first + length)
                runs = ((max(a, 0), min(b, keys)) for a, b in sees(start, stop))
                total += (stop - start) * sum(max(b - a, 0) for a, b in runs)
        most = max(most, total)
    return most


@functools.lru_cache(1024)
def _traffic(
    sees: Sees | None,
    of_queries: tuple[_CutKey, ...],
    of_keys: tuple[_CutKey, ...],
    is_ringed: tuple[bool, ...],
    queries: int,
    keys: int,
    returns: bool,
) -> tuple[int, int]:
    """(number of keys that the busiest rank sends or receives over the last axis, steps that the
    last axis adds to the ring over the axes before).

    Args:
        is_ringed: per cut of queries, whether its axis is one of the ring.
    """
    places = [i for i, is_on in enumerate(is_ringed) if is_on]
    is_last = places[0] == len(is_ringed) - len(places)
    axes: list[RingAxis] = []
    for place, (outer, _, inner, n, is_zigzag) in zip(places, of_keys, strict=True):
        axes = [axis._replace(stride=axis.stride * n) for axis in axes]
        group, of = place if is_last else -1, of_queries[place][4]
        axes.append(RingAxis(n, outer, inner, int(is_zigzag), group, int(of)))
    ring, fewer = (Ring(keys, tuple(x), returns) for x in (axes, axes[:-1]))
    most, steps = 0, 0
    for rows in _ranks(of_queries, is_ringed):
        needs = [Needs.of(x, rows, sees or (lambda *_: [EVERY])) for x in (ring, fewer) if x.axes]
        most = max(most, *needs[0].traffic(axes[-1].n))
        steps = max(steps, needs[0].steps - sum(x.steps for x in needs[1:]))
    return most, steps
