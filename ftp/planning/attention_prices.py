"""Work and traffic of attention whose queries one mesh axis may cut, on the busiest rank. Masked
pairs are left out if the mask is known when the plan is made.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from ftp.ops.attention import pieces_of
from ftp.ops.key_ring import EVERY, Needs, Ring, Sees
from ftp.planning.cost import Hardware, collective_seconds
from ftp.planning.graph import Node
from ftp.planning.reachable_cuts import Cut
from ftp.sharding.layout import estimated, pieces

TILES = 256  # tiles of queries, for each of which the keys are counted
MOST_TILE = 1024  # most queries of a tile

# One axis' cut of queries: ``[outer, size, inner]``, number of ranks, whether in zigzag.
_CutKey = tuple[int, int, int, int, bool]


def computed_share(node: Node, cut: Cut | None, n: int, axes: Mapping[str, int]) -> float:
    """The pairs of a query and a key that the busiest rank of an axis computes, as a share of all
    pairs, masked or not, on the axis' ranks.

    Args:
        cut: the factor that the axis of ``n`` ranks cuts; None: none.
        axes: sizes of the axes planned before.
    """
    ((rows, keys),) = node.rule.ring
    cuts, share = _cuts_of(node, rows, axes), 1.0
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
    """Seconds of an op that computes while keys and values travel around the ranks of an axis, and
    in a backward pass their gradients travel back.

    Args:
        cuts: how the axis of ``n`` ranks cuts queries and keys.
        axes: sizes of the axes planned before.
        computed: seconds of the work alone.
        of_key: bytes of one key and its value.
    """
    rows, keys = cuts
    queries, length = (estimated(node.rule.sizes[cut.factor]) for cut in cuts)
    of_queries = *_cuts_of(node, rows.factor, axes), _of_cut(node, rows, n)
    returns = any(rows.factor in pending for pending in node.rule.pending)
    sent, steps = _traffic(node.rule.sees, of_queries, queries, length, keys.zigzag, returns)
    link = hardware.link
    travel = collective_seconds("ring", sent * of_key, n, link)
    travel += max(steps - 1, 0) * link.latency  # of the messages of each step
    held_up = (1 - link.hidden) * travel
    return max(computed + held_up, travel) + steps * hardware.ring_step


def _cuts_of(node: Node, factor: str, axes: Mapping[str, int]) -> tuple[_CutKey, ...]:
    return tuple(
        (estimated(c.outer), estimated(c.extent), estimated(c.inner), axes[c.axis], c.zigzag)
        for c in node.cuts
        if c.factor == factor
    )


def _of_cut(node: Node, cut: Cut, n: int) -> _CutKey:
    outer, inner = estimated(cut.outer), estimated(cut.inner)
    return outer, estimated(node.sizes[cut.factor]) // (outer * inner), inner, n, cut.zigzag


def _ranks(cuts: Sequence[_CutKey]) -> Iterator[list[int]]:
    """The parts of the queries that each rank holds, as in `ftp.ops.attention`."""
    groups = []
    for outer, size, inner, n, is_zigzag in cuts:
        held = [pieces(size, n, rank, is_zigzag) for rank in range(n)]
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
    cuts: tuple[_CutKey, ...],
    queries: int,
    keys: int,
    is_zigzag: bool,
    returns: bool,
) -> tuple[int, int]:
    """The number of keys that the busiest rank sends or receives, and the number of steps."""
    *before, (*_, n, of_queries) = cuts
    ring = Ring(keys, n, is_zigzag, len(before), of_queries)
    most, steps = 0, 0
    for rows in _ranks(before):
        outer, size, inner, _, _ = cuts[-1]
        here = pieces(size, n, 0, of_queries)
        rows += [outer, size, inner, len(here), *(number for piece in here for number in piece)]
        needs = Needs.of(ring, rows, sees or (lambda *_: [EVERY]))
        most, steps = max(most, *needs.traffic(returns)), max(steps, needs.steps)
    return most, steps
