"""Pack small collectives that are ready together into one."""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ftp.dynamic_int import value_of
from ftp.partitioning.collectives import Collective, Member
from ftp.passes.aliasing import ALL_REDUCE, WAIT
from ftp.passes.branch_order import predicates_of
from ftp.passes.copy_elimination import copied, put_in_order
from ftp.passes.prefetch_parameters import LOCAL_STEPS, held_bytes, is_ahead, largest_gathered
from ftp.planning.branches import waits_for
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.layers.labels import numbered

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default

PACK_BYTES = (
    2 << 20
)  # largest tensor to pack: copying it costs less than the latency of a collective of its own
FREE_BYTES = 64 << 10  # may join any pack: sending them takes less than a collective's latency
BUCKET_BYTES = 25 << 20  # of a pack, as DistributedDataParallel's default
# The least number of packs of a kind, unless packs would be smaller than PACK_BYTES: the first are
# sent while the last are computed.
BUCKETS = 4
FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


@dataclass(frozen=True)
class Packs:
    """Which collectives are packed; decided from the plan, so that ranks agree.

    Attributes:
        groups: names of the plan's reshards, pack by pack.
        seeds: by name, value and dtype of constants made "like" another number, such as the
            ``ones_like(loss)`` with which a backward pass starts.
    """

    groups: tuple[tuple[str, ...], ...]
    seeds: Mapping[str, tuple[int, torch.dtype]]


def packs(
    graph: Graph,
    pack_bytes: int = PACK_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    without: Collection[str] = (),
    apart: Collection[str] = (),
) -> Packs:
    """Decide which collectives are packed: those of one kind over one axis, each of at most
    ``pack_bytes``, that do not need each other's results.

    A pack holds up to ``bucket_bytes``, or a quarter of all bytes of its kind. An all-reduce or
    reduce-scatter is issued at the place of the pack's last member. A pack ends before a collective
    that needs a member, so that the order of other collectives stays. Packed gathers are
    consecutive gathers of parameters of one pass, forward or backward; `prefetch` puts them at the
    place of the first. A pack of gathers, or of reduce-scatters, is no larger than the largest of:
    the largest parameter that is gathered, the parameters of the largest layer up to
    ``PACK_BYTES``, and ``FREE_BYTES``. A pack of gathers ends before a layer that does not fit in
    it as a whole.

    Sizes are those of whole values for all-reduces, and of a rank's shards for the others. A
    constant made "like" another number does not depend on it. Reshards named in ``without`` are
    left alone; those in ``apart`` are packed with one another only.
    """
    groups: list[list[Node]] = []
    open_: dict[Any, tuple[list[Node], int]] = {}
    needs = _Members()  # the possible members that a node depends on
    seeds = {}
    of_kind: dict[Any, int] = {}

    def kind(node: Node) -> tuple[Any, ...] | None:
        found = _kind(node)
        return found and (*found, node.name in apart)

    for node in graph.nodes:
        if (key := kind(node)) and _nbytes(node) <= pack_bytes:
            of_kind[key] = of_kind.get(key, 0) + _nbytes(node)
    layers = _layers(graph)
    of_layer: dict[Any, int] = {}
    for node, layer in layers.items():
        of_layer[kind(node), layer] = of_layer.get((kind(node), layer), 0) + _nbytes(node)
    of_largest = min(max(of_layer.values(), default=0), PACK_BYTES)
    largest = max(largest_gathered(graph), of_largest, FREE_BYTES)

    def limit(key: Any) -> int:
        found = min(bucket_bytes, max(-(-of_kind[key] // BUCKETS), PACK_BYTES))
        return found if key[0] == "all_reduce" else min(found, largest)

    def close(keys: Iterable[Any]) -> None:
        groups.extend(open_.pop(key)[0] for key in list(keys))

    def close_needed(key: Any, by: Node) -> None:
        members, held = open_.pop(key)
        needed = [node for node in members if needs.any_of(by, [node])]
        rest = held - sum(map(_nbytes, needed))
        # Do not copy one large tensor to send a few bytes with it.
        is_large = len(needed) == 1 and held - rest > FREE_BYTES
        if rest <= FREE_BYTES and not is_large:
            groups.append(members)
        else:
            groups.append(needed)
            open_[key] = [node for node in members if node not in needed], rest

    waits = waits_for(graph)
    for node in graph.nodes:
        if node.target in FILLS and node.results[0].shape == ():
            seeds[node.name] = FILLS[node.target], node.results[0].dtype
            needs.follow(node, ())
            continue
        needs.follow(node, waits[node])
        if node.own_axes:  # per-rank code may have collectives of its own
            close(open_)
        if node.kind != "reshard" or node.target.op in LOCAL_STEPS:
            continue
        # A pack of gathers is issued with its first member, any other with its last, before
        # anything that needs one of them.
        for key, (members, _) in list(open_.items()):
            if needs.any_of(node, members):
                if key[0] != "all_gather":
                    close_needed(key, node)
                elif is_ahead(node):
                    close([key])
        key = kind(node)
        if key is None or _nbytes(node) > pack_bytes or node.name in without:
            continue
        if key in open_:
            members, held = open_[key]
            begins = node in layers and layers[node] != layers[members[-1]]
            if held + (of_layer[key, layers[node]] if begins else _nbytes(node)) > limit(key):
                close([key])
        members, held = open_.get(key, ([], 0))
        open_[key] = [*members, node], held + _nbytes(node)
        needs.add(node)
    close(open_)
    return Packs(
        tuple(tuple(node.name for node in members) for members in groups if len(members) > 1), seeds
    )


def in_order_of(graph: Graph, found: Packs) -> Packs:
    """The packs for a graph whose nodes were reordered since packing: members in the order of
    ``graph``, and each pack ended before a collective that needs a member.

    Otherwise the order of collectives would follow the dependencies of values, which differ on a
    rank with an empty shard.
    """
    group_of = {name: number for number, group in enumerate(found.groups) for name in group}
    open_: dict[int, list[Node]] = {}
    ended: list[tuple[str, ...]] = []
    needs = _Members()  # that a node depends on
    left = {number: len(group) for number, group in enumerate(found.groups)}

    def end(number: int) -> None:
        ended.append(tuple(node.name for node in open_.pop(number)))

    waits = waits_for(graph)
    for node in graph.nodes:
        is_seed = node.name in found.seeds
        needs.follow(node, () if is_seed else waits[node])
        if node.kind != "reshard" or node.target.op in LOCAL_STEPS:
            continue
        for number, members in list(open_.items()):
            if needs.any_of(node, members):
                end(number)
        if (number := group_of.get(node.name)) is not None:
            open_.setdefault(number, []).append(node)
            needs.add(node)
            left[number] -= 1
            if not left[number]:
                end(number)
    return replace(found, groups=tuple(group for group in ended if len(group) > 1))


class _Members:
    """The pack members that each node depends on, itself included, as bit sets: there are many
    nodes and many members.
    """

    def __init__(self) -> None:
        self._bit: dict[Node, int] = {}
        self._needs: dict[Node, int] = {}

    def follow(self, node: Node, operands: Iterable[Value]) -> None:
        """Record that a node depends on all members that its operands depend on."""
        found = 0
        for value in operands:
            found |= self._needs[value.node]
        self._needs[node] = found

    def add(self, node: Node) -> None:
        """Record a node as a member."""
        self._bit[node] = 1 << len(self._bit)
        self._needs[node] |= self._bit[node]

    def any_of(self, node: Node, members: Iterable[Node]) -> bool:
        """Whether a node needs any of some members."""
        needed = self._needs[node]
        return any(needed & self._bit[member] for member in members)


def _layers(graph: Graph) -> dict[Node, Any]:
    """Per gather of a parameter its layer, or its module if it is in no layer."""
    names = {node: node.name for node in graph.inputs}
    numbers = numbered(names)
    found: dict[Node, Any] = {}
    for node in graph.nodes:
        if is_ahead(node) and node.target.op == "all_gather":
            origin = node
            while origin.operands:
                origin = origin.operands[0].node
            found[node] = numbers.get(origin, _module(origin.name))
    return found


def _module(path: str) -> str:
    """The path without its last element: ``params['head`` for ``params['head.weight']``."""
    return path[: max(path.rfind("."), path.rfind("["))]


def _kind(node: Node) -> tuple[Any, ...] | None:
    """The properties that members of a pack share; None for a node that is not packed."""
    if node.kind != "reshard":
        return None
    reshard, dtype = node.target, node.results[0].dtype
    match reshard.op:
        case "all_reduce":
            return reshard.op, reshard.axis, dtype, reshard.src.op
        case "reduce_scatter":
            return reshard.op, reshard.axis, dtype
        case "all_gather" if reshard.dst.kind == "R" and is_ahead(node):
            return reshard.op, reshard.axis, dtype, node.phase
    return None


def _nbytes(node: Node) -> int:
    if node.target.op == "all_reduce":
        return math.prod(map(value_of, node.results[0].shape)) * node.results[0].dtype.itemsize
    return held_bytes(node) * (node.target.n if node.target.op == "reduce_scatter" else 1)


def pack(graph: fx.Graph, found: Packs) -> fx.Graph:
    """The graph with the collectives of each group as one, on the concatenated flat tensors."""
    if not (found.groups or found.seeds):
        return graph
    new, _ = copied(graph)
    like = next((node for node in new.nodes if node.op == "placeholder"), None)
    for node in list(new.nodes):
        if (
            node.target in FILLS
            and like is not None
            and (seed := found.seeds.get(node.meta.get("origin"))) is not None
        ):
            with new.inserting_after(like):
                number = new.call_function(
                    aten.new_full.default, (like, [], seed[0]), {"dtype": seed[1]}
                )
            node.replace_all_uses_with(number)
            new.erase_node(node)
    issued = {
        node.meta.get("origin"): node
        for node in new.nodes
        if node.target in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
    }
    for group in found.groups:
        members = [issued[name] for name in group if name in issued]
        if len(members) > 1:
            _pack(new, members)
    sort_graph(new)
    return new


def _pack(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Replace collectives by one on their concatenated operands, and slice its result."""
    last = members[-1]
    facts: list[Collective] = [node.meta["collective"] for node in members]
    gathers, scatters = last.target is ALL_GATHER, last.target is REDUCE_SCATTER
    n: int = last.args[-2] if gathers or scatters else 1  # type: ignore[assignment]
    sizes = [math.prod(fact.shape) // n for fact in facts]
    with graph.inserting_before(last):
        # The data for one rank, or for all ranks, is contiguous.
        shapes = [[n, size] if scatters else [size] for size in sizes]
        rows = [
            graph.call_function(aten.reshape.default, (node.args[0], shape))
            for node, shape in zip(members, shapes, strict=True)
        ]
        row = graph.call_function(aten.cat.default, (rows, 1 if scatters else 0))
        row = (
            graph.call_function(aten.reshape.default, (row, [n * sum(sizes)])) if scatters else row
        )
        bucket = graph.call_function(last.target, (row, *last.args[1:]))  # type: ignore[arg-type]
        arrived = graph.call_function(WAIT, (bucket,))
        arrived = (
            graph.call_function(aten.reshape.default, (arrived, [n, sum(sizes)]))
            if gathers
            else arrived
        )
        parts = graph.call_function(
            aten.split_with_sizes.default, (arrived, sizes, 1 if gathers else 0)
        )
        for i, (node, fact) in enumerate(zip(members, facts, strict=True)):
            part = graph.call_function(operator.getitem, (parts, i))
            shape = [fact.shape[0] // n, *fact.shape[1:]] if scatters else list(fact.shape)
            part = graph.call_function(aten.reshape.default, (part, shape))
            for user in list(node.users):
                assert user.target is WAIT
                user.replace_all_uses_with(part)
                graph.erase_node(user)
            graph.erase_node(node)
    bucket.meta.update(last.meta)
    count = sum(sizes) * n
    bucket.meta["collective"] = replace(
        facts[-1],
        shape=(count,),
        nbytes=sum(fact.nbytes for fact in facts),
        global_shape=(sum(math.prod(fact.global_shape) for fact in facts),),
        wire_nbytes=sum(fact.wire_nbytes for fact in facts),
        cause=facts[0].cause,
        members=tuple(
            Member(node.meta["origin"], fact.nbytes, fact.cause)
            for node, fact in zip(members, facts, strict=True)
        ),
    )


def sort_graph(graph: fx.Graph) -> None:
    """Put the nodes of a graph that the caller has copied in an order in which they can run: each
    at its place, or after its last operand and the predicates of its branches.
    """
    _sort(graph, {})
    if predicates := predicates_of(graph):  # of a graph in order
        _sort(graph, predicates)


def _sort(graph: fx.Graph, predicates: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    nodes = list(graph.nodes)
    place: dict[fx.Node, int] = {}
    position = {node: at for at, node in enumerate(nodes)}
    for wanted in nodes:
        stack = [wanted]
        while stack:
            node = stack[-1]
            needed = [*node.all_input_nodes, *predicates.get(node, ())]
            missing = [one for one in needed if one not in place]
            if missing:
                stack += missing[::-1]
            else:
                stack.pop()
                place.setdefault(node, max([position[node], *(place[one] for one in needed)]))
    put_in_order(sorted(place, key=place.__getitem__))
