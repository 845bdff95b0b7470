"""Strategies of an op on one mesh axis."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ftp.planning.graph import Node, Value
from ftp.planning.reachable_cuts import Cut, cut_together, factor_of, layout_of
from ftp.rules.notation import Dims
from ftp.rules.op_kinds import VIEWS, VIEWS_AND_COPIES
from ftp.sharding.layout import PARTIAL, Layout, R, partial

# Replicated because a shard was gathered; views, casts and ops that widen it keep this layout.
GATHERED = Layout("R", op="gathered")
WHOLE = Layout("R", op="whole")  # an operand that may be replicated or gathered
PASS_ON = 1e-9  # seconds per op that passes a pending sum on; a tie-breaker, to reduce early


class Strategy(NamedTuple):
    """One way to run an op on one axis: the layouts of operands and results; the factor that is
    cut, or the operands that are pending sums.

    Attributes:
        ring_cut: a second factor that the axis cuts, whose parts travel around the ranks in a ring.
        aligned_cut: a second factor that the axis cuts, whose parts start where the first's do.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    cut: Cut | None = None
    pending: tuple[int, ...] | None = None
    ring_cut: Cut | None = None
    aligned_cut: Cut | None = None


def passes_gathered(node: Node) -> bool:
    """Whether a node's result counts as gathered if its operand does: a view, a cast, a constraint
    on other axes, or a reshard of another axis without a reduction.
    """
    return (
        node.target in VIEWS_AND_COPIES
        or node.kind == "constrain"
        or (node.kind == "reshard" and node.target.src.kind != "P")
    )


def strategies(
    node: Node,
    cuts: Sequence[Cut],
    n: int,
    pinned: Layout | None,
    may_pend: Iterable[Value] = (),
    *,
    widens: bool = False,
    is_cut_again: bool = False,
    is_fixed: bool = False,
    rings: Sequence[Cut] = (),
) -> list[Strategy]:
    """All strategies of an op on an axis of ``n`` ranks that may cut it on ``cuts``.

    Args:
        widens: the result has more bytes than the operands, so that gathered operands are accepted.
        is_cut_again: the op needs a dim whole that is cut before and after it, so that gathered
            operands are accepted.
        is_fixed: the op has no strategies but its one cut, or replicated if it has none.
        rings: second factors that the axis may cut together with a first one.
    """
    if pinned is not None:
        cut = factor_of(node.rule.results[0], node.sizes, pinned, n) if pinned.kind == "S" else None
        return [Strategy((pinned,) * len(node.operands), (pinned,) * len(node.results), cut)]
    slots, results = len(node.operands), len(node.results)
    found = [] if is_fixed and cuts else [Strategy((R,) * slots, (R,) * results)]
    if is_cut_again:
        found = [Strategy((WHOLE,) * slots, (GATHERED,) * results)]
    elif cuts and not is_fixed and (widens or passes_gathered(node)):
        need = WHOLE if widens and node.target not in VIEWS else GATHERED
        found.append(Strategy((need,) * slots, (GATHERED,) * results))
    for cut in cuts:
        if (both := cut_together(node, cut, n)) is not None:
            found.append(_of_two(node, *both, n)._replace(aligned_cut=both[1]))
            continue
        needs = tuple(layout_of(dims, node.sizes, cut, n) for dims in node.rule.operands)
        gives = tuple(
            partial(pending[cut[0]])
            if cut[0] in pending and not any(cut[0] in dim for dim in dims)
            else layout_of(dims, node.sizes, cut, n)
            for dims, pending in zip(node.rule.results, node.rule.pending, strict=True)
        )
        found.append(Strategy(needs, gives, cut))
        for ring in rings:
            if (cut.factor, ring.factor) in node.rule.ring:
                found.append(_of_two(node, cut, ring, n)._replace(ring_cut=ring))
    for group in () if is_fixed else node.rule.linear:
        if any(node.operands[i] in may_pend for i in group):
            needs = tuple(PARTIAL if i in group else R for i in range(slots))
            found.append(Strategy(needs, (PARTIAL,) * results, None, group))
    return found


def _of_two(node: Node, cut: Cut, second: Cut, n: int) -> Strategy:
    """The strategy that cuts two factors; no tensor has both."""

    def layout(dims: Dims) -> Layout:
        held = layout_of(dims, node.sizes, cut, n)
        return layout_of(dims, node.sizes, second, n) if held is R else held

    needs = tuple(map(layout, node.rule.operands))
    gives = tuple(
        partial(pending[cut.factor]) if cut.factor in pending and held is R else held
        for held, pending in zip(map(layout, node.rule.results), node.rule.pending, strict=True)
    )
    return Strategy(needs, gives, cut)
