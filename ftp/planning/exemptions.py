"""Values that are exempt from the placement constraints: the planner may reshard them."""

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

from ftp.planning.graph import BATCH, Node, Value
from ftp.planning.lookups import movable
from ftp.planning.problem import Problem
from ftp.planning.reachable_cuts import factor_of, is_cut_again, reach
from ftp.rules.op_kinds import BY_SLICE, LOOKUPS, ONE_BY_ONE, PARTS, is_matmul
from ftp.rules.windows import SCANS

_TAKING = LOOKUPS | ONE_BY_ONE | PARTS


class Exemptions(NamedTuple):
    """Values that placement constraints bind less.

    Attributes:
        free: values that none binds.
        after_conflict: values that none binds until the next matmul.
        rows: rows of tables for which they may be moved, and what is linear in them: their sums
            over ranks are cut as the batch is, not replicated.
        of_sums: ops on sums over the batch alone, such as gradients and batch norm's statistics.
    """

    free: set[Value]
    after_conflict: set[Value]
    rows: set[Value]
    of_sums: set[Node]


def exemptions(problem: Problem, required: Mapping[Value, object]) -> Exemptions:
    """Values that no placement constraint binds, and values that none binds until the next matmul.

    A conflict matmul is one of experts, attention to keys that the batch cuts, or one whose
    operands the batch cuts on different factors, as context parallelism cuts q and k. No
    constraint binds:

    - values with a required layout;
    - operands of conflict matmuls that feed no other matmul;
    - on other axes than data axes, keys and values of attention that are cut along the sequence;
    - ids that are sliced along a dim that the batch cuts;
    - operands of scans of one element for each rank, as the totals of windows;
    - ids, and gradients of their rows, of tables for which the rows may be moved (`movable`);
    - operands and results of per-rank code and of functions of slices.

    The result of a conflict matmul may be cut otherwise than the batch cuts it (Ulysses cuts heads,
    experts their own dim), and may be resharded until the next matmul. So may rows of a table,
    which its cut of features cuts.
    """
    free, after, rows = set(required), set[Value](), set[Value]()
    matmuls = dict.fromkeys(n for n in problem.graph.nodes if is_matmul(n.target))
    conflicts: set[Node] = set()
    if problem.is_data_axis:
        conflicts = {n for n in matmuls if _is_conflict(problem, n)} | _of_experts(problem, matmuls)
    lookups = movable(problem)
    of_sums = _of_sums(problem)
    free |= lookups.operands
    statistics = _before_activations(problem)
    free.update(value for node in of_sums - statistics for value in node.values)
    for node in problem.batch_reach.blocked:
        if is_cut_again(node):
            free.update(node.operands)
    for node in problem.graph.nodes:
        if not problem.is_data_axis:
            free.update(_cut_keys(problem, node))
        if node.target in SCANS and (node.shape() or (1,))[node.args[1]] == problem.n:
            free.update(node.operands)
        if node.kind == "constrain" and node in problem.pinned:
            free.add(node.operands[0])
        elif problem.axis in node.own_axes or node.target in BY_SLICE:
            free.update((*node.operands, *node.values))
        read = () if node in matmuls else node.operands
        if node in lookups.forward or _passes_sums_on(node, rows):
            rows.update(node.values)
        if node in conflicts or node in lookups.forward or any(v in after for v in read):
            after.update(node.values)
    free |= _feeding_only(conflicts, matmuls, problem.graph.nodes)
    return Exemptions(free, after, rows, of_sums)


def _of_sums(problem: Problem) -> set[Node]:
    """The ops whose operands that depend on the batch are sums over it, or computed from such
    sums. Rows that are taken from the batch are no sums.
    """
    found: set[Node] = set()
    if not problem.is_data_axis:
        return found
    reaches = (problem.batch_reach, problem.parts)
    cuts = {node for reached in reaches for node in reached.cuts}
    rows = {value for reached in reaches for value in reached.layouts}
    rows.update(value for node in cuts if node.target in _TAKING for value in node.values)
    for node in problem.graph.nodes:
        if node.kind == "input" or node in cuts:
            continue
        read = [value for value in node.operands if value.node.depends & BATCH]
        if read and all(v.node in found or (v.node in cuts and v not in rows) for v in read):
            found.add(node)
    return found


def _before_activations(problem: Problem) -> set[Node]:
    """The ops whose results reach values that the batch cuts; an optimizer's updates do not."""
    found: set[Node] = set()
    for node in reversed(problem.graph.nodes):
        if node in found or node in problem.batch_reach.cuts:
            found.update(value.node for value in node.operands)
    return found


def _passes_sums_on(node: Node, values: Container[Value]) -> bool:
    """Whether a node is linear in one of the values."""
    slots = {slot for group in node.rule.linear for slot in group}
    return any(slot in slots and value in values for slot, value in enumerate(node.operands))


def _feeding_only(
    conflicts: Container[Node], matmuls: Container[Node], nodes: Sequence[Node]
) -> set[Value]:
    """The values that feed conflict matmuls and no other matmul."""
    feeds: dict[Value, int] = {}  # bit 1: a conflict matmul, bit 2: any other
    for node in reversed(nodes):
        kind = 0
        if node in matmuls:
            kind = 1 if node in conflicts else 2
        else:
            for value in node.values:
                kind |= feeds.get(value, 0)
        for value in node.operands:
            feeds[value] = feeds.get(value, 0) | kind
    return {value for value, kind in feeds.items() if kind == 1}


def _is_conflict(problem: Problem, node: Node) -> bool:
    cuts = set()
    for value, dims in zip(node.operands, node.rule.operands, strict=True):
        for layout in problem.batch_reach.layouts.get(value, ()):
            cut = factor_of(dims, node.sizes, layout, problem.n)
            if cut is not None:
                cuts.add(cut[0])
    return len(cuts) > 1 or bool(_cut_keys(problem, node))


def _cut_keys(problem: Problem, node: Node) -> list[Value]:
    """The operands of attention that the axis cuts along the keys. Every query sees all keys, so
    keys may be resharded whatever they are computed from.
    """
    reached = problem.batch_reach if problem.is_data_axis else problem.reach
    return [
        value
        for _, keys in node.rule.ring
        for value, dims in zip(node.operands, node.rule.operands, strict=True)
        for layout in reached.layouts.get(value, ())
        if (cut := factor_of(dims, node.sizes, layout, problem.n)) and cut[0] == keys
    ]


def _of_experts(problem: Problem, matmuls: Collection[Node]) -> set[Node]:
    """The matmuls of experts: matmuls of batch data with parameters that are cut on a factor which
    both share with the result, and the matmuls that this cut reaches. On an axis that cuts the
    batch and the experts, tokens are sent to the experts and back, forward and backward; experts
    are not gathered.
    """
    seeds = []
    for node in matmuls:
        if all(value.node.depends & BATCH for value in node.operands):
            continue
        for value, dims in zip(node.operands, node.rule.operands, strict=True):
            if value.node.depends & BATCH:
                continue
            for layout in problem.reach.layouts.get(value, ()):
                cut = factor_of(dims, node.sizes, layout, problem.n)
                if (
                    cut
                    and _is_shared(node, cut[0])
                    and layout not in problem.batch_reach.layouts.get(value, ())
                ):
                    seeds.append((value, layout))
    if not seeds:
        return set()
    cuts = reach(problem.graph, problem.axis, problem.n, seeds, problem.pinned).cuts
    by_batch = problem.batch_reach.cuts
    return {
        n
        for n in matmuls
        if n in by_batch
        and any(_is_shared(n, f) and c not in by_batch[n] for c in cuts.get(n, ()) for f in c[:1])
    }


def _is_shared(node: Node, factor: str) -> bool:
    return all(any(factor in dim for dim in dims) for dims in node.rule.dims)
