"""Reach: which factors of which ops one mesh axis may cut. Cuts come from specs and constraints,
and pass from op to op through the rules.

If every op could be cut along every dim, plain tensor parallelism would become sequence
parallelism.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import NamedTuple

import torch

from ftp.dataclass import dataclass
from ftp.ops.stack import STACK
from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.rules.notation import Dims
from ftp.rules.op_kinds import (
    LOOKUPS,
    LOOKUPS_BACKWARD,
    ONE_BY_ONE,
    ONTO_FIRST,
    PARTS,
    VIEWS,
    is_matmul,
)
from ftp.sharding.layout import Layout, R, Size, div, mul, nominal, prod, shard

_STACKS = (torch.ops.aten.stack.default, STACK)
_NEVER_MOVED = VIEWS | LOOKUPS | LOOKUPS_BACKWARD | ONTO_FIRST
MOST_LAYOUTS = 12  # of one value on one axis; real programs stay below 5


# From the number of ranks, a node, and a factor that it keeps whole.
WindowOf = Callable[[int, Node, str], int | None]


class Cut(NamedTuple):
    """A factor viewed as ``[outer, f, inner]``, of which an axis cuts ``f``."""

    factor: str
    outer: Size = 1
    inner: Size = 1
    zigzag: bool = False


@dataclass
class Reach:
    """The cuts that one axis may make.

    Attributes:
        layouts: per value the cuts it may have.
        cuts: per node the factors it may be cut on.
        blocked: per node the factors that its rule keeps whole and that some layout cuts.
        rings: per node the second factors of the rule's ``ring`` that the axis may cut too.
        across: nodes with a layout that cuts several factors of a dim as one.
        windows: per blocked node the dim along which it may be an op on windows, if any; empty
            unless asked for.
    """

    n: int = 1
    layouts: dict[Value, list[Layout]] = field(default_factory=dict)
    cuts: dict[Node, list[Cut]] = field(default_factory=dict)
    blocked: dict[Node, list[str]] = field(default_factory=dict)
    rings: dict[Node, list[Cut]] = field(default_factory=dict)
    across: dict[Node, None] = field(default_factory=dict)
    windows: dict[Node, int | None] = field(default_factory=dict)

    def with_cuts(self, other: "Reach") -> "Reach":
        """With the layouts and cuts of another one too."""
        if not other.layouts:
            return self
        layouts, cuts = dict(self.layouts), dict(self.cuts)
        for value, found in other.layouts.items():
            layouts[value] = list(dict.fromkeys([*layouts.get(value, ()), *found]))
        for node, made in other.cuts.items():
            cuts[node] = list(dict.fromkeys([*cuts.get(node, ()), *made]))
        return replace(self, layouts=layouts, cuts=cuts)


def reach(
    graph: Graph,
    axis: str,
    n: int,
    seeds: Iterable[tuple[Value, Layout]],
    pinned: Mapping[Node, Layout],
    window_of: WindowOf | None = None,
) -> Reach:
    """Close ``seeds`` through the rules in both directions; nothing passes through ``pinned`` nodes
    (inputs, constraints) or per-rank code.

    Args:
        window_of: pass also through ops that may be ops on windows, as if they were.
    """
    closing = _Closing(graph, axis, n, pinned, window_of)
    for value, layout in seeds:
        if layout.kind == "S":
            closing.add(value, layout)
    return closing.run()


class _Closing:
    """The closure in progress: ``work`` holds layouts of values that are not followed yet."""

    def __init__(
        self,
        graph: Graph,
        axis: str,
        n: int,
        pinned: Mapping[Node, Layout],
        window_of: WindowOf | None,
    ):
        self.found, self.users, self.followed = Reach(n), graph.users, graph.followed
        self.axis, self.n, self.pinned, self.window_of = axis, n, pinned, window_of
        self.work: list[tuple[Value, Layout]] = []

    def add(self, value: Value, layout: Layout) -> None:
        known = self.found.layouts.setdefault(value, [])
        if layout not in known and len(known) < MOST_LAYOUTS:
            known.append(layout)
            self.work.append((value, layout))

    def run(self) -> Reach:
        while self.work:
            value, layout = self.work.pop()
            self._visit(value.node, len(value.node.operands) + value.index, layout)
            for user, slot in self.users.get(value, ()):
                self._visit(user, slot, layout)
        return self.found

    def _visit(self, node: Node, place: int, layout: Layout) -> None:
        """Cut a node as ``layout`` cuts the tensor at ``place`` among its operands and results, if
        its rule may.
        """
        if node in self.pinned or self.axis in node.own_axes or self.axis in node.rank_axes:
            return
        key = id(node.rule), id(node.sizes), place, layout, self.n
        if (cuts := self.followed.get(key)) is None:
            cut = factor_of(node.rule.dims[place], node.sizes, layout, self.n)
            both = cut and cut_together(node, cut, self.n)
            cuts = self.followed[key] = both or (cut, None)
        cut, of_result = cuts
        if cut is None:
            self.found.across[node] = None
        elif of_result is None and cut.factor in node.rule.whole:
            self._block(node, cut, layout)
        else:
            self._cut(node, cut, of_result)

    def _block(self, node: Node, cut: Cut, layout: Layout) -> None:
        """Record that a rule keeps whole the factor that ``cut`` would cut."""
        if any(cut.factor == second for _, second in node.rule.ring):
            rings = self.found.rings.setdefault(node, [])
            if cut not in rings:
                rings.append(cut)
        blocked = self.found.blocked.setdefault(node, [])
        if cut.factor not in blocked:
            blocked.append(cut.factor)
            if is_cut_again(node) and layout.outer == layout.inner == 1:
                self.add(Value(node), layout)
            if self.window_of is not None:
                self._pass_windows(node, self.window_of(self.n, node, cut.factor), layout)

    def _pass_windows(self, node: Node, dim: int | None, layout: Layout) -> None:
        """Pass a cut on as an op on windows would, or leave that for when it is one: a slice of few
        elements looks them up.
        """
        known = self.found.windows.get(node)
        self.found.windows[node] = dim if known is None else known
        if dim is None or layout != Layout("S", dim):
            return
        ends = [v for v in (node.operands[0], Value(node)) if dim < v.meta.ndim]
        sizes = [nominal(v.meta.shape[dim]) for v in ends]
        if 4 * min(sizes) > max(sizes):
            for value in ends:
                self.add(value, layout)

    def _cut(self, node: Node, cut: Cut, of_result: Cut | None = None) -> None:
        """Record a cut of a node, and the layouts that it gives the node's operands and results.

        Args:
            of_result: the cut of the result's dim where the op changes the dim's size.
        """
        cuts = self.found.cuts.setdefault(node, [])
        if cut in cuts:
            return
        cuts.append(cut)
        key = id(node.rule), id(node.sizes), cut, of_result, self.n
        if (layouts := self.followed.get(key)) is None:
            layouts = self.followed[key] = []
            for dims in node.rule.dims:
                layout = layout_of(dims, node.sizes, cut, self.n)
                if layout is R and of_result is not None:
                    layout = layout_of(dims, node.sizes, of_result, self.n)
                layouts.append(layout)
        for value, layout in zip((*node.operands, *node.values), layouts, strict=True):
            if layout is not R:
                self.add(value, layout)


def cut_together(node: Node, cut: Cut, n: int) -> tuple[Cut, Cut] | None:
    """The cuts of an operand's and of a result's dim in an op that changes the dim's size, if
    ``cut`` is one of them. None if it is not, or the ranks' chunks of the two do not start alike.

    A slice from 0 keeps chunks of 3: of 8 elements 3, 3 and 2, of the first 7 3, 3 and 1. Windows
    may be cut with the dim that they are of, as many as there are ranks.
    """
    for pair in node.rule.together:
        if cut.factor in pair and cut[1:] == (1, 1, False):
            sizes = [node.sizes[f] for f in pair]
            if node.rule.may_cut_together(pair, sizes, n):
                return Cut(pair[0]), Cut(pair[1])
    return None


def is_cut_again(node: Node) -> bool:
    """Whether an op needs a dim whole and its result may be cut on that dim again: ops on ids
    (slices, padding, concatenation). Ids take few bytes to gather, and ops on them take long.
    """
    result = node.results[0]
    return (
        node.kind == "op"
        and len(node.results) == 1
        and bool(node.operands)
        and not result.dtype.is_floating_point
        and not result.dtype.is_complex
        and all(
            value.meta.dtype == result.dtype and value.meta.ndim == result.ndim
            for value in node.operands
        )
    )


def seeds_of_parts(found: Reach) -> list[tuple[Value, Layout]]:
    """For each split whose operand the axis cuts between the parts, such as chunks of the flattened
    batch or its rows one by one, cuts within the parts. Without them a part is computed on the rank
    that holds it, or on all ranks.
    """
    within = [
        (Value(node, index), dims, there[-1])
        for node in dict.fromkeys((*found.blocked, *found.across))
        if node.target in PARTS
        for index, dims in enumerate(node.rule.results)
        for dim, there in zip(node.rule.operands[0], dims, strict=True)
        if len(dim) > 1
    ]
    within += [
        (Value(node, index), dims, dims[0][-1])
        for node in dict.fromkeys((*found.blocked, *found.cuts))
        if node.target in ONE_BY_ONE and _is_cut_between(node, found)
        for index, dims in enumerate(node.rule.results)
        if len(dims) > 1
    ]
    return _seeds(within, found.n)


def seeds_of_entries(found: Reach) -> list[tuple[Value, Layout]]:
    """For each entry of a parameter that the axis cuts between the entries, such as experts that a
    loop computes one by one, cuts within it. Without them all ranks compute with each entry.
    """
    within = [
        (Value(node, index), dims, dim[-1])
        for node in dict.fromkeys((*found.blocked, *found.cuts))
        if node.target in ONE_BY_ONE and not node.depends & BATCH and _is_cut_between(node, found)
        for index, dims in enumerate(node.rule.results)
        for dim in dims
    ]
    return _seeds(within, found.n)


def seeds_of_moves(found: Reach) -> list[tuple[Value, Layout]]:
    """For each op that needs the dim whole that the axis cuts, a cut of another dim. To there the
    axis' cut may move by an all-to-all: without it the dim is gathered, and all ranks run the op.
    """
    return [
        (value, layout_of(dims, node.sizes, Cut(factor), found.n))
        for node, factors in found.blocked.items()
        if (factor := shared_factor(node, factors, found.n)) is not None
        for value, dims in zip((*node.operands, *node.values), node.rule.dims, strict=True)
        if any(factor in dim for dim in dims)
    ]


def shared_factor(node: Node, whole: Collection[str], n: int) -> str | None:
    """A factor that ``n`` ranks may cut of all operands that have one of the ``whole`` factors, and
    of all results; the first that they cut evenly, or else the largest. None where there is none,
    where the whole factors have one element for each rank, as totals of chunks, for dynamic sizes,
    for matmuls, and for lookups, which `ftp.planning.lookups` knows.
    """
    sizes = {f: size for f, size in node.sizes.items() if type(size) is int}
    is_op = node.kind == "op" and node.target not in _NEVER_MOVED and not is_matmul(node.target)
    if not is_op or len(sizes) < len(node.sizes) or all(sizes.get(f, 0) <= n for f in whole):
        return None
    cut = [dims for dims in node.rule.operands if any(f in dim for dim in dims for f in whole)]
    shared = [
        dim[0]
        for dim in (cut or node.rule.results)[0]
        if len(dim) == 1
        and dim[0] not in node.rule.whole
        and sizes[dim[0]] >= n
        and all(dim in dims for dims in (*cut, *node.rule.results))
    ]
    even = (f for f in shared if sizes[f] % n == 0)
    return next(even, max(shared, key=sizes.__getitem__, default=None))


def _seeds(within: Iterable[tuple[Value, Dims, str]], n: int) -> list[tuple[Value, Layout]]:
    return [
        (value, layout_of(dims, value.node.sizes, Cut(factor), n))
        for value, dims, factor in within
        if nominal(value.node.sizes[factor]) >= n
    ]


def _is_cut_between(node: Node, found: Reach) -> bool:
    """Whether the axis cuts the dim whose elements become parts."""
    cuts = {*found.blocked.get(node, ()), *(c.factor for c in found.cuts.get(node, ()))}
    return any(cuts.intersection(dim) for dim in node.rule.operands[0]) and not all(
        any(cut in dim for dim in node.rule.results[0]) for cut in cuts
    )


def seeds_of_stacks(graph: Graph, of_batch: Reach, n: int) -> list[tuple[Value, Layout]]:
    """For each stack of at least ``n`` matrices that the batch does not cut, such as gradients that
    an optimizer orthogonalizes, the cut between them: each rank may compute some of them, whole.
    """
    stacks = [node for node in graph.nodes if node.target in _STACKS and node.depends & BATCH]
    found: list[tuple[Value, Layout]] = []
    for value in map(Value, stacks):
        dim = value.node.args[1] % value.meta.ndim if len(value.node.args) > 1 else 0
        is_of_matrices = value.meta.ndim > 2 and nominal(value.shape[dim]) >= n
        if is_of_matrices and value not in of_batch.layouts:
            found.append((value, Layout("S", dim)))
    return found


def factor_of(dims: Dims, sizes: Mapping[str, Size], layout: Layout, n: int) -> Cut | None:
    """The factor whose cut gives ``layout`` in a tensor of these dims; None if the cut runs through
    several factors.
    """
    dim = dims[layout.dim]
    if len(dim) == 1 and div(sizes[dim[0]], mul(layout.outer, layout.inner)) is not None:
        return Cut(dim[0], layout.outer, layout.inner, layout.zigzag)
    before: Size = 1
    for at, factor in enumerate(dim):
        outer = div(layout.outer, before)
        if outer is not None:
            within = div(layout.inner, prod(sizes[f] for f in dim[at + 1 :]))
            for inner in (1,) if within in (None, 1) else (within, 1):
                extent = div(sizes[factor], mul(outer, inner))
                if (
                    extent
                    and extent != 1
                    and layout_of(dims, sizes, Cut(factor, outer, inner, layout.zigzag), n)
                    == layout
                ):
                    named = shard(0, outer, extent, inner, n, layout.zigzag)
                    return Cut(factor, named.outer, named.inner, named.zigzag)
        before = mul(before, sizes[factor])
    return None


def layout_of(dims: Dims, sizes: Mapping[str, Size], cut: Cut, n: int) -> Layout:
    """The layout of a tensor of these dims under ``cut``; ``R`` if it does not have the factor."""
    factor, outer, inner, zigzag = cut
    for d, dim in enumerate(dims):
        if factor in dim:
            if len(dim) == 1:
                return Layout("S", d, outer, inner, zigzag=zigzag)
            at = dim.index(factor)
            extent = div(sizes[factor], mul(outer, inner))
            assert extent is not None, (factor, cut, sizes)
            before, after = prod(sizes[f] for f in dim[:at]), prod(sizes[f] for f in dim[at + 1 :])
            return shard(d, mul(before, outer), extent, mul(inner, after), n, zigzag)
    return R
