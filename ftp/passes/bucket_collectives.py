"""Buckets: issue small collectives that are ready together as one."""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.dynamic_int import value_of
from ftp.partitioning.collectives import Collective, Member
from ftp.passes.aliasing import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from ftp.passes.branch_order import predicates_of
from ftp.passes.copy_elimination import put_in_order
from ftp.passes.prefetch_parameters import LOCAL_STEPS, collective_bytes, is_ahead, largest_gathered
from ftp.planning.branches import waits_for
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.layers.labels import numbered
from ftp.rules.call import Meta
from ftp.rules.op_kinds import is_matmul
from ftp.sharding.layout import bytes_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# The largest tensor in a bucket: copying it costs less than the latency of its own collective.
MEMBER_BYTES = 2 << 20
# A tensor that may join any bucket: sending it costs less than the latency of a collective.
FREE_BYTES = 64 << 10
BUCKET_BYTES = 25 << 20  # of a bucket, as DistributedDataParallel's default
# The least number of buckets of a kind, unless buckets would be smaller than MEMBER_BYTES: the
# first ones are sent while the last ones are computed.
BUCKETS = 4
FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


@dataclass(frozen=True)
class Buckets:
    """Which collectives are issued as one; decided from the plan, so that ranks agree.

    Attributes:
        groups: names of the plan's reshards, bucket by bucket.
        seeds: by name, value and dtype of constants made "like" another number, such as the
            ``ones_like(loss)`` with which a backward pass starts.
    """

    groups: tuple[tuple[str, ...], ...]
    seeds: Mapping[str, tuple[int, torch.dtype]]


def choose_buckets(
    graph: Graph,
    member_bytes: int = MEMBER_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    without: Collection[str] = (),
    apart: Collection[str] = (),
    ahead: int | None = None,
) -> Buckets:
    """Choose the collectives that share a bucket: those of one kind over one axis, each of at most
    ``member_bytes``, that do not need each other's results, nor a cond that needs another's.

    A bucket holds up to ``bucket_bytes``, or a quarter of all bytes of its kind. An all-reduce or
    reduce-scatter is issued at the place of the bucket's last member. A bucket ends before a
    collective that needs a member, so that the order of other collectives stays; one of all-reduces
    also where matmuls with more than ``FREE_BYTES`` of results need its members and would wait for
    the next one: a microbatch's backward pass for the next microbatch's loss. Gathers that share
    a bucket are consecutive gathers of parameters of one pass, forward or backward; `prefetch` puts
    them at the place of the first. A bucket of gathers, or of reduce-scatters, is no larger than
    the largest of: the largest parameter that is gathered, the parameters of the largest layer up
    to ``MEMBER_BYTES``, and ``FREE_BYTES``; a bucket of gathers is no larger than ``ahead``, the
    limit of `prefetch`, if given. A bucket of gathers ends before a layer that does not fit in it
    as a whole.

    Sizes are those of whole values for all-reduces, and of a rank's shards for the others. A
    constant made "like" another number does not depend on it. Reshards named in ``without`` are
    left alone; those in ``apart`` share buckets with one another only.
    """
    sizes = _BucketSizes(graph, member_bytes, bucket_bytes, apart, ahead)
    filling = _Filling()
    seeds = {}
    waits = waits_for(graph)
    for node in graph.nodes:
        if node.target in FILLS and node.results[0].shape == ():
            seeds[node.name] = FILLS[node.target], node.results[0].dtype
            filling.needs.follow(node, ())
            continue
        filling.follow(node, waits[node])
        if node.own_axes:  # per-rank code may issue collectives itself
            filling.close(list(filling.open))
        is_local = node.kind != "reshard" or node.target.op in LOCAL_STEPS
        if node.branch or not is_local:  # the ops of a cond run together, after its predicate
            filling.close_before(node)
        if is_local:
            continue
        kind = sizes.kind(node)
        if kind is None or _nbytes(node) > member_bytes or node.name in without:
            continue
        members, held = filling.open.get(kind, ([], 0))
        is_full = members and held + sizes.added(node, members[-1]) > sizes.limit(kind)
        if is_full or filling.would_wait(kind):
            filling.close([kind])
        filling.add(node, kind)
    filling.close(list(filling.open))
    groups = (tuple(node.name for node in members) for members in filling.closed)
    return Buckets(tuple(group for group in groups if len(group) > 1), seeds)


class _BucketSizes:
    """The kinds of collectives that may share a bucket, and the largest bucket of each kind."""

    def __init__(
        self,
        graph: Graph,
        member_bytes: int,
        bucket_bytes: int,
        apart: Collection[str],
        ahead: int | None,
    ):
        self._bucket_bytes, self._apart = bucket_bytes, apart
        self._layers = _layers(graph)
        self._of_kind: dict[Any, int] = {}
        for node in graph.reshards.values():
            if (kind := self.kind(node)) and (nbytes := _nbytes(node)) <= member_bytes:
                self._of_kind[kind] = self._of_kind.get(kind, 0) + nbytes
        self._of_layer: dict[Any, int] = {}
        for node, layer in self._layers.items():
            key = self.kind(node), layer
            self._of_layer[key] = self._of_layer.get(key, 0) + _nbytes(node)
        largest_layer = min(max(self._of_layer.values(), default=0), MEMBER_BYTES)
        self._largest = max(largest_gathered(graph), largest_layer, FREE_BYTES)
        self._ahead = self._largest if ahead is None else ahead

    def kind(self, node: Node) -> tuple[Any, ...] | None:
        found = _kind(node)
        return found and (*found, node.name in self._apart)

    def limit(self, kind: Any) -> int:
        """Bytes of the largest bucket of a kind."""
        limit = bucket_limit(self._of_kind[kind], self._bucket_bytes)
        if kind[0] == "all_reduce":
            return limit
        return min(limit, self._largest, *([self._ahead] if kind[0] == "all_gather" else ()))

    def added(self, node: Node, last: Node) -> int:
        """Bytes that a bucket needs room for to take ``node`` after its last member: of the whole
        layer where a gather begins one.
        """
        if node in self._layers and self._layers[node] != self._layers[last]:
            return self._of_layer[self.kind(node), self._layers[node]]
        return _nbytes(node)


def bucket_limit(total: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Bytes of the largest bucket of a kind whose members have ``total`` bytes together."""
    return min(bucket_bytes, max(-(-total // BUCKETS), MEMBER_BYTES))


class _Filling:
    """Buckets while they are filled: one open bucket per kind, and the closed ones."""

    def __init__(self) -> None:
        self.open: dict[Any, tuple[list[Node], int]] = {}  # members and their bytes
        self.closed: list[list[Node]] = []
        self.needs = MemberNeeds()
        self._read: dict[Any, int] = {}  # bytes of matmuls that need members of open all-reduces

    def follow(self, node: Node, operands: Iterable[Value]) -> None:
        """Record what a node depends on, and that a matmul would wait for a bucket."""
        self.needs.follow(node, operands)
        if not is_matmul(node.target):
            return
        nbytes = sum(map(_result_bytes, node.results))
        for kind, (members, _) in self.open.items():
            if kind[0] == "all_reduce" and self.needs.any_of(node, members):
                self._read[kind] = self._read.get(kind, 0) + nbytes

    def would_wait(self, kind: Any) -> bool:
        """Whether large matmuls before this place are computed from members, such as those of a
        microbatch's backward pass from its loss: a later member would make them wait.
        """
        return self._read.get(kind, 0) > FREE_BYTES

    def add(self, node: Node, kind: Any) -> None:
        members, held = self.open.get(kind, ([], 0))
        self.open[kind] = [*members, node], held + _nbytes(node)
        self.needs.add(node)

    def close(self, kinds: Iterable[Any]) -> None:
        for kind in kinds:
            self.closed.append(self.open.pop(kind)[0])
            self._read.pop(kind, None)

    def close_before(self, node: Node) -> None:
        """Close the buckets that must be issued before a collective: those with members that it
        needs. A bucket of gathers is issued with its first member, any other with its last.
        """
        for kind, (members, _) in list(self.open.items()):
            if self.needs.any_of(node, members):
                if kind[0] != "all_gather":
                    self._close_needed(kind, node)
                elif is_ahead(node):
                    self.close([kind])

    def _close_needed(self, kind: Any, by: Node) -> None:
        """Close a bucket; members that ``by`` does not need stay open if they are large."""
        members, held = self.open.pop(kind)
        self._read.pop(kind, None)
        needed = [node for node in members if self.needs.any_of(by, [node])]
        rest = held - sum(map(_nbytes, needed))
        # Do not copy one large tensor to send a few bytes with it.
        is_large = len(needed) == 1 and held - rest > FREE_BYTES
        if rest <= FREE_BYTES and not is_large:
            self.closed.append(members)
        else:
            self.closed.append(needed)
            self.open[kind] = [node for node in members if node not in needed], rest


def reordered(graph: Graph, buckets: Buckets) -> Buckets:
    """The buckets for a graph whose nodes were reordered since they were chosen: members in the
    order of ``graph``, and each bucket ended before a collective that needs a member.

    Otherwise the order of collectives would follow the dependencies of values, which differ on a
    rank with an empty shard.
    """
    if not buckets.groups:
        return buckets
    number_of = {name: number for number, group in enumerate(buckets.groups) for name in group}
    open_: dict[int, list[Node]] = {}
    ended: list[tuple[str, ...]] = []
    needs = MemberNeeds()
    left = {number: len(group) for number, group in enumerate(buckets.groups)}

    def end(number: int) -> None:
        ended.append(tuple(node.name for node in open_.pop(number)))

    waits = waits_for(graph)
    for node in graph.nodes:
        is_seed = node.name in buckets.seeds
        needs.follow(node, () if is_seed else waits[node])
        if node.kind != "reshard" or node.target.op in LOCAL_STEPS:
            continue
        for number, members in list(open_.items()):
            if needs.any_of(node, members):
                end(number)
        if (number := number_of.get(node.name)) is not None:
            open_.setdefault(number, []).append(node)
            needs.add(node)
            left[number] -= 1
            if not left[number]:
                end(number)
    return replace(buckets, groups=tuple(group for group in ended if len(group) > 1))


class MemberNeeds:
    """The bucket members that each node depends on, itself included, as bit sets: there are many
    nodes and many members.
    """

    def __init__(self) -> None:
        self._bit: dict[Node, int] = {}
        self._needs: dict[Node, int] = {}

    def follow(self, node: Node, operands: Iterable[Value]) -> None:
        """Record that a node depends on all members that its operands depend on."""
        needed = 0
        for value in operands:
            needed |= self._needs[value.node]
        self._needs[node] = needed

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
    for node in graph.reshards.values():
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
    """The properties that members of a bucket share; None for a node that joins no bucket."""
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


def _result_bytes(value: Meta) -> int:
    return bytes_of(value.shape, value.dtype, value_of)


def _nbytes(node: Node) -> int:
    if node.target.op == "all_reduce":
        return _result_bytes(node.results[0])
    return collective_bytes(node)


def bucket_collectives_in(graph: fx.Graph, buckets: Buckets) -> None:
    """Issue one collective per bucket, on the concatenated flat tensors of its members, in a graph
    that the caller owns.
    """
    if not (buckets.groups or buckets.seeds):
        return
    _fill_seeds(graph, buckets.seeds)
    if not buckets.groups and not predicates_of(graph):
        return  # its nodes are in order
    issued = {
        node.meta.get("origin"): node
        for node in graph.nodes
        if node.target in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
    }
    for group in buckets.groups:
        members = [issued[name] for name in group if name in issued]
        if len(members) > 1:
            _merge(graph, members)
    sort_graph(graph)


def _fill_seeds(graph: fx.Graph, seeds: Mapping[str, tuple[int, torch.dtype]]) -> None:
    """Make each constant that is made "like" a computed number from an input of the graph instead,
    so that it does not wait for the number.
    """
    like = next((node for node in graph.nodes if node.op == "placeholder"), None)
    for node in list(graph.nodes):
        seed = seeds.get(node.meta.get("origin"))
        if node.target not in FILLS or like is None or seed is None:
            continue
        value, dtype = seed
        with graph.inserting_after(like):
            number = graph.call_function(aten.new_full.default, (like, [], value), {"dtype": dtype})
        node.replace_all_uses_with(number)
        graph.erase_node(node)


def _merge(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
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
        if scatters:
            row = graph.call_function(aten.reshape.default, (row, [n * sum(sizes)]))
        bucket = graph.call_function(last.target, (row, *last.args[1:]))  # type: ignore[arg-type]
        arrived = graph.call_function(WAIT, (bucket,))
        if gathers:
            arrived = graph.call_function(aten.reshape.default, (arrived, [n, sum(sizes)]))
        parts = graph.call_function(
            aten.split_with_sizes.default, (arrived, sizes, 1 if gathers else 0)
        )
        for i, (node, fact) in enumerate(zip(members, facts, strict=True)):
            part = graph.call_function(operator.getitem, (parts, i))
            shape = [fact.shape[0] // n, *fact.shape[1:]] if scatters else list(fact.shape)
            shaped = graph.call_function(aten.reshape.default, (part, shape))
            for user in list(node.users):
                assert user.target is WAIT
                for reader in list(user.users) if gathers else ():
                    is_own = reader.meta.get("origin") == node.meta["origin"]
                    if is_own and reader.target is aten.reshape.default:
                        reader.update_arg(0, part)  # to copy it once, not twice
                user.replace_all_uses_with(shaped)
                graph.erase_node(user)
            if not shaped.users:
                graph.erase_node(shaped)
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
    """Put the nodes of a graph, which the caller has copied, in an order in which they can run:
    each at its place, or after its last operand and the predicates of its branches.
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
                if node not in place:
                    place[node] = max([position[node], *[place[one] for one in needed]])
    put_in_order(sorted(place, key=place.__getitem__))
