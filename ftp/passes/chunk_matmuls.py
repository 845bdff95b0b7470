"""Chunk matmuls that read gathered activations, or whose results are reduce-scattered, by rows: one
chunk is sent while another is computed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.passes.bucket_collectives import sort_graph
from ftp.passes.copy_elimination import copied
from ftp.planning.graph import BATCH, Graph, Node, Value

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class Chunks:
    """Which reshards are chunked; decided from the plan, so that ranks agree.

    Attributes:
        count: chunks of dim 0, of equal size.
        reshards: names of the plan's reshards.
        rows: per reduce-scatter, the rows on a rank of the matmul before it.
    """

    count: int
    reshards: tuple[str, ...]
    rows: Mapping[str, int]


def chunks(graph: Graph, count: int) -> Chunks:
    """The gathers that feed matmuls, and the reduce-scatters of matmuls, whose rows above the cut
    divide into ``count`` chunks.
    """
    users = graph.users if count > 1 else {}
    reshards: list[str] = []
    rows: dict[str, int] = {}
    for node in graph.nodes if count > 1 else ():
        if (
            node.kind != "reshard"
            or not node.depends & BATCH
            or not _is_divisible(node.sizes.get("o0", node.sizes.get("~0")), count)
        ):
            continue
        if node.target.op == "all_gather" and node.target.dst.kind == "R":
            if any(_feeds_matmul(user, slot, users) for user, slot in users.get(Value(node), ())):
                reshards.append(node.name)
        elif node.target.op == "reduce_scatter":
            matmul = node.operands[0]
            while (
                matmul.node.kind == "op" and matmul.node.target in VIEWS and len(users[matmul]) == 1
            ):
                matmul = matmul.node.operands[0]
            if (
                matmul.node.target is aten.mm.default
                and len(users[matmul]) == 1
                and _is_divisible(m := matmul.shape[0], count)
            ):
                reshards.append(node.name)
                rows[node.name] = m  # type: ignore[assignment]
    return Chunks(count, tuple(reshards), rows)


def _is_divisible(size: Any, count: int) -> bool:
    return isinstance(size, int) and size > 0 and size % count == 0


def _feeds_matmul(node: Node, slot: int, users: Mapping[Value, Sequence[tuple[Node, int]]]) -> bool:
    if node.target is aten.mm.default:
        return slot == 0
    return node.target in VIEWS and any(
        _feeds_matmul(user, at, users) for user, at in users.get(Value(node), ())
    )


def chunk_matmuls(graph: fx.Graph, found: Chunks) -> fx.Graph:
    """Chunk the matmuls on both sides of the graph's chunked reshards.

    A matmul of concatenated rows is the concatenation of matmuls; a chunk of a matmul's rows is the
    matmul of a chunk.
    """
    if not found.reshards:
        return graph
    new, _ = copied(graph)
    for name in found.reshards:
        nodes = [node for node in new.nodes if node.meta.get("origin") == name]
        if name in found.rows:
            slices = [
                node
                for node in nodes
                if node.target is aten.slice.Tensor and node.args[0] not in nodes
            ]
            if slices:
                _raise(new, slices, found.rows[name] // found.count)
        elif nodes and nodes[-1].target is aten.cat.default:
            _sink(new, nodes[-1], found.count)
    sort_graph(new)
    return new


def _sink(graph: fx.Graph, row: fx.Node, count: int) -> None:
    """Move a concatenation after the views and matmuls that read it."""
    parts: Any = row.args[0]
    for user in list(row.users):
        other: Any = user.args[1] if len(user.args) > 1 else None
        if (
            user.target is aten.reshape.default
            and other
            and -1 not in other
            and _is_divisible(other[0], count)
        ):
            other = [other[0] // count, *other[1:]]
        elif user.target is not aten.mm.default or user.args[:1] != (row,) or other is row:
            continue
        made = [_after(graph, part, user, (part, other)) for part in parts]
        joined = _after(graph, made[-1], user, (made,), aten.cat.default)
        user.replace_all_uses_with(joined)
        graph.erase_node(user)
        _sink(graph, joined, count)
    if not row.users:
        graph.erase_node(row)


def _raise(graph: fx.Graph, slices: Sequence[fx.Node], rows: int) -> None:
    """Move slices of a matmul's rows before the matmul."""
    whole: Any = slices[0].args[0]
    chain = [whole]
    while chain[-1].target is aten.reshape.default:
        chain.append(chain[-1].args[0])
    if chain[-1].target is not aten.mm.default or any(
        len(set(node.users) - set(slices)) != (at > 0) for at, node in enumerate(chain)
    ):
        return
    left, right = chain[-1].args
    count = len(slices)
    shapes: list[Any] = [node.args[1] for node in chain[:-1]]
    if any(not _is_divisible(shape[0], count) for shape in shapes):
        return
    for at, part in enumerate(slices):
        with graph.inserting_before(part):
            made = graph.call_function(aten.slice.Tensor, (left, 0, at * rows, (at + 1) * rows))
            made.meta.update(chain[-1].meta)
            made = graph.call_function(aten.mm.default, (made, right))
            made.meta.update(chain[-1].meta)
            for node, shape in zip(chain[-2::-1], shapes[::-1], strict=True):
                made = graph.call_function(
                    aten.reshape.default, (made, [shape[0] // count, *shape[1:]])
                )
                made.meta.update(node.meta)
        part.replace_all_uses_with(made)
        graph.erase_node(part)
    for node in chain:
        graph.erase_node(node)


def _after(
    graph: fx.Graph, place: fx.Node, like: fx.Node, args: tuple[Any, ...], target: Any = None
) -> fx.Node:
    with graph.inserting_after(place):
        made = graph.call_function(target or like.target, args)  # type: ignore[arg-type]
    made.meta.update(like.meta)
    return made
