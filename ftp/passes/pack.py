"""Small all-reduces that are ready together, as one."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ftp.collectives import Collective
from ftp.graph import Graph, Node
from ftp.passes.alias import WAIT
from ftp.passes.copies import copied

aten = torch.ops.aten
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default

PACK_BYTES = 2 << 20  # of one tensor that is packed: copying it costs less than the latency of a collective of its own
BUCKET_BYTES = 25 << 20  # of a pack, as DistributedDataParallel's default
FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


@dataclass(frozen=True)
class Packs:
    """What goes together; decided from the plan, for ranks must agree.

    Attributes:
        groups: names of the plan's all-reduces, pack by pack.
        seeds: names of numbers made "like" another number, as a gradient starts with ``ones_like(loss)``, and what they are.
    """

    groups: tuple[tuple[str, ...], ...]
    seeds: Mapping[str, tuple[int, torch.dtype]]


def packs(graph: Graph, pack_bytes: int = PACK_BYTES, bucket_bytes: int = BUCKET_BYTES) -> Packs:
    """All-reduces over one axis of which none needs another's result, each of at most ``pack_bytes``, up to ``bucket_bytes`` together.

    A pack is issued where its last member was. It ends before a collective that needs a member, so that the order of the others stays.
    Sizes are those of the whole values. A number that another is made "like" is not needed for it.
    """
    groups: list[list[Node]] = []
    open_: dict[Any, tuple[list[Node], int]] = {}
    needs: dict[Node, frozenset[Node]] = {}  # the possible members that a node depends on
    seeds = {}

    def close(keys: Iterable[Any]) -> None:
        groups.extend(open_.pop(key)[0] for key in list(keys))

    for node in graph.nodes:
        if node.target in FILLS and node.results[0].shape == ():
            seeds[node.name] = FILLS[node.target], node.results[0].dtype
            needs[node] = frozenset()
            continue
        needs[node] = frozenset().union(*(needs[v.node] for v in node.operands))
        if node.kind == "local":  # it may have collectives of its own
            close(open_)
        if node.kind != "move" or node.target.op in ("slice", "contribute", "pad"):
            continue
        close([key for key, (members, _) in open_.items() if not needs[node].isdisjoint(members)])
        size = math.prod(node.results[0].shape) * node.results[0].dtype.itemsize
        if node.target.op != "all_reduce" or size > pack_bytes:
            continue
        key = node.target.axis, node.target.src.op, node.results[0].dtype
        if key in open_ and open_[key][1] + size > bucket_bytes:
            close([key])
        members, held = open_.get(key, ([], 0))
        open_[key] = [*members, node], held + size
        needs[node] |= {node}
    close(open_)
    return Packs(tuple(tuple(node.name for node in members) for members in groups if len(members) > 1), seeds)


def pack(graph: fx.Graph, found: Packs) -> fx.Graph:
    """The graph with the all-reduces of each group as one, of the flattened tensors in a row."""
    new, _ = copied(graph)
    like = next((node for node in new.nodes if node.op == "placeholder"), None)
    for node in list(new.nodes):
        if node.target in FILLS and like is not None and (seed := found.seeds.get(node.meta.get("origin"))) is not None:
            with new.inserting_after(like):
                number = new.call_function(aten.new_full.default, (like, [], seed[0]), {"dtype": seed[1]})
            node.replace_all_uses_with(number)
            new.erase_node(node)
    reduces = {node.meta.get("origin"): node for node in new.nodes if node.target is ALL_REDUCE}
    for group in found.groups:
        members = [reduces[name] for name in group if name in reduces]
        if len(members) > 1:
            _pack(new, members)
    return sorted_graph(new)


def _pack(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    last = members[-1]
    facts: list[Collective] = [node.meta["collective"] for node in members]
    sizes = [math.prod(fact.shape) for fact in facts]
    with graph.inserting_before(last):
        flat = [graph.call_function(aten.reshape.default, (node.args[0], [-1])) for node in members]
        row = graph.call_function(aten.cat.default, (flat,))
        reduced = graph.call_function(ALL_REDUCE, (row, *last.args[1:]))
        waited = graph.call_function(WAIT, (reduced,))
        parts = graph.call_function(aten.split_with_sizes.default, (waited, sizes))
        for i, (node, fact) in enumerate(zip(members, facts, strict=True)):
            part = graph.call_function(operator.getitem, (parts, i))
            part = graph.call_function(aten.reshape.default, (part, list(fact.shape)))
            for user in list(node.users):
                assert user.target is WAIT
                user.replace_all_uses_with(part)
                graph.erase_node(user)
            graph.erase_node(node)
    reduced.meta.update(last.meta)
    n = sum(sizes)
    reduced.meta["collective"] = replace(
        facts[-1],
        shape=(n,),
        nbytes=sum(fact.nbytes for fact in facts),
        global_shape=(n,),
        wire_nbytes=sum(fact.wire_nbytes for fact in facts),
        cause=", ".join(dict.fromkeys(fact.cause for fact in facts if fact.cause)),
    )


def sorted_graph(graph: fx.Graph) -> fx.Graph:
    """The nodes in an order in which they can run, as close to the given one as possible."""
    new: fx.Graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for wanted in graph.nodes:
        stack = [wanted]
        while stack:
            node = stack[-1]
            missing = [operand for operand in node.all_input_nodes if operand not in env]
            if missing:
                stack += missing[::-1]
            else:
                stack.pop()
                if node not in env:
                    env[node] = new.node_copy(node, env.__getitem__)
    return new
