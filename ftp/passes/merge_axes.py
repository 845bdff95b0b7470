"""Merge a value's reshards over several axes into one over their product."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ftp.dynamic_int import is_dynamic
from ftp.planning.cost import DEFAULT, Hardware, collective_seconds
from ftp.planning.graph import Graph, Node, Reshard, Value, rewired, with_operands
from ftp.planning.graph_passes import live
from ftp.planning.insert_reshards import reshard_rule
from ftp.sharding.layout import R, estimated, shard


def merge_axes(
    graph: Graph,
    axes: Mapping[str, int],
    without: Collection[str] = (),
    hardware: Hardware = DEFAULT,
) -> Graph:
    """The graph in which two consecutive reshards of one kind are merged, where nothing else reads
    the value between them.

    Candidates are all-reduces, and gathers that give a whole dim or reduce-scatters that cut one,
    if sizes divide and the parts are in the order of the ranks. Over links of one speed a ring over
    the product sends as many bytes as two rings and saves one ring's latency. Over a fast and a
    slow link reshards are merged if that is estimated to be faster.

    Args:
        axes: sizes by name, in the order of the ranks of a product.
        without: names of reshards that stay as they are.
        hardware: with the link of each axis.
    """
    read = [v for node in graph.nodes for v in node.operands if v.node.kind == "reshard"]
    uses = Counter([*read, *graph.outputs])
    new: dict[Node, Node] = {}

    def now(value: Value) -> Value:
        return Value(new[value.node], value.index)

    for node in graph.nodes:
        if (
            node.kind == "reshard"
            and node.name not in without
            and node.operands[0].node.kind == "reshard"
            and node.operands[0].node.branch == node.branch
            and uses[node.operands[0]] == 1
        ):
            first = now(node.operands[0]).node
            reshard = _product(first, node, axes)
            if reshard is not None and _is_no_slower(first, node, reshard, hardware):
                made = new[node] = with_operands(node, first.operands)
                made.target = reshard
                if reshard.op != "all_reduce":
                    made.rule, made.sizes = reshard_rule(reshard)
                continue
        new[node] = rewired(node, new)
    return live(Graph(list(new.values()), list(map(now, graph.outputs))))


def _is_no_slower(first: Node, second: Node, merged: Reshard, hardware: Hardware) -> bool:
    """Whether one collective over the product is estimated to take no longer than both."""

    def seconds(reshard: Reshard, *ends: Value) -> float:
        size = max(math.prod(map(estimated, value.shape)) for value in ends)
        nbytes = size * second.results[0].dtype.itemsize
        return collective_seconds(reshard.op, nbytes, reshard.n, hardware.link_of(reshard.axes))

    begin, between, end = first.operands[0], Value(first), Value(second)
    apart = seconds(first.target, begin, between) + seconds(second.target, between, end)
    return seconds(merged, begin, end) <= apart * (1 + 1e-9)


def _product(first: Node, second: Node, axes: Mapping[str, int]) -> Reshard | None:
    """Both reshards as one; None where no single reshard is equal to both."""
    a, b = first.target, second.target
    together = tuple(axis for axis in axes if axis in (*a.axes, *b.axes))
    n = a.n * b.n
    if any(layout.zigzag for reshard in (a, b) for layout in (reshard.src, reshard.dst)):
        return None  # its chunks are not in the order of the ranks
    if a.op != b.op or len(together) != len(a.axes) + len(b.axes):
        return None
    if a.op == "all_reduce":
        is_one = a.src == b.src
        return Reshard(" × ".join(together), n, a.src, R, b.shape, together) if is_one else None
    before, after = first.operands[0].shape, Value(second).shape
    whole = after if a.op == "all_gather" else before
    part = before if a.op == "all_gather" else after
    gathers = a.dst.kind == b.dst.kind == "R"
    dims = {(reshard.src if a.op == "all_gather" else reshard.dst).dim for reshard in (a, b)}
    if (
        a.op not in ("all_gather", "reduce_scatter")
        or gathers != (a.op == "all_gather")
        or len(dims) > 1
    ):
        return None
    (d,) = dims
    length, size = part[d], whole[d]
    if not isinstance(length, int) or not isinstance(size, int) or not size or size != n * length:
        return None
    # In the order in which gathers undo the cuts.
    if not _follow_one_another(
        [first, second] if gathers else [second, first], d, together, axes, length
    ):
        return None
    cut = shard(d, 1, size, 1, n)
    src, dst = (cut, R) if gathers else (a.src, cut)
    return Reshard(" × ".join(together), n, src, dst, whole, together)


def _follow_one_another(
    reshards: Sequence[Node], d: int, together: Sequence[str], axes: Mapping[str, int], length: int
) -> bool:
    """Whether two gathers of dim ``d`` bring its parts, of ``length`` each, into the order of
    the ranks.
    """
    sizes = [(reshard.sizes[f"o{d}"], reshard.sizes[f"i{d}"]) for reshard in reshards]
    if is_dynamic(length):  # parts that stay whole are in an order that does not depend on it
        if any(outer != 1 for outer, _ in sizes):
            return False
        length, sizes = 1, [(1, 1) for _ in sizes]
    counts = [axes[axis] for axis in together]
    order = [together.index(axis) for reshard in reshards for axis in reshard.target.axes]
    parts = (
        np.arange(int(np.prod(counts)) * length)
        .reshape(*counts, length)
        .transpose(*order, len(counts))
    )
    parts = parts.reshape(*(reshard.target.n for reshard in reshards), length)
    for reshard, (outer, inner) in zip(reshards, sizes, strict=True):
        *rest, held = parts.shape[1:]
        if not isinstance(outer, int) or not isinstance(inner, int) or held % (outer * inner):
            return False
        # Each rank has [outer, g, inner], all together [outer, n, g, inner].
        parts = np.moveaxis(
            parts.reshape(reshard.target.n, *rest, outer, -1, inner), 0, -3
        ).reshape(*rest, held * reshard.target.n)
    return bool((parts == np.arange(parts.size)).all())
