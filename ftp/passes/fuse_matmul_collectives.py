"""Fuse gathers of activations with the matmuls that read them, and matmuls with their
reduce-scatter (async TP).
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.ops.symmetric_memory import gather_matmuls, matmul_scatter
from ftp.passes.aliasing import ALL_GATHER
from ftp.passes.bucket_collectives import sort_graph
from ftp.passes.chunk_matmuls import VIEWS
from ftp.passes.copy_elimination import copied
from ftp.planning.graph import BATCH, Graph, Node, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Joint:
    """A reshard and the matmuls that it is fused with.

    Attributes:
        matmuls: names of the plan's matmuls: those that read the gather, or the one that the
            reduce-scatter sums.
        part, whole: shapes of a rank's shard and of the gathered value.
        columns: number of columns of the matmuls' first operands, over which they sum.
        before: product of the sizes of all dims before the cut dim.
        n: number of ranks.
    """

    matmuls: tuple[str, ...]
    part: tuple[int, ...]
    whole: tuple[int, ...]
    columns: int
    before: int
    n: int

    @property
    def dim(self) -> int:
        """The dim that is cut, in a tensor of shape `seen`."""
        return 0 if self.before == 1 else 1

    def seen(self, shape: Sequence[int], columns: int) -> list[int]:
        """``shape`` (``part`` or ``whole``) with ``columns`` columns, viewed so that the cut is at
        the start of a dim.
        """
        rows = math.prod(shape[:-1]) // self.before
        return [rows, columns] if self.before == 1 else [self.before, rows, columns]


def joints(graph: Graph) -> dict[str, Joint]:
    """Per reshard the matmuls that are fused with it; decided from the plan, so that ranks agree.

    A reshard is fused if it reshards an activation that is evenly cut in a dim over which the
    matmuls do not sum. A gather is fused with matmuls by weights only.
    """
    users = graph.users
    found: dict[str, Joint] = {}
    taken: set[Node] = set()
    for node in graph.nodes:
        if node.kind != "reshard" or not node.depends & BATCH:
            continue
        reshard, part, whole = node.target, node.operands[0], Value(node)
        if reshard.op == "all_gather" and reshard.dst.kind == "R":
            matmuls, cut = _readers(whole, users, whole.shape[-1:]), reshard.src
        elif reshard.op == "reduce_scatter":
            part, whole = whole, part
            matmuls, cut = _summed(node, users), reshard.dst
        else:
            continue
        here, there, outer = (
            _known(part.shape),
            _known(whole.shape),
            _known([node.sizes.get(f"o{cut.dim}")]),
        )
        factors = [_known(matmul.operands[0].shape) for matmul in matmuls]
        if (
            cut.zigzag
            or not factors
            or not taken.isdisjoint(matmuls)
            or not all([here, there, outer, *factors])
            or there[cut.dim] != reshard.n * here[cut.dim]
        ):
            continue
        if cut.dim < len(here) - 1:
            taken |= {*matmuls}
            names = tuple(matmul.name for matmul in matmuls)
            found[node.name] = Joint(
                names, here, there, factors[0][-1], math.prod(here[: cut.dim]) * outer[0], reshard.n
            )
    return found


def _known(shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape that is equal on all ranks and not empty; else None."""
    return tuple(shape) if all(isinstance(size, int) and size > 0 for size in shape) else ()


def _readers(
    value: Value, users: Mapping[Value, Sequence[tuple[Node, int]]], columns: Sequence[Any]
) -> list[Node]:
    """The matmuls with weights that read a value by rows."""
    found = []
    for user, slot in users.get(value, ()):
        if (
            user.target is aten.mm.default
            and slot == 0
            and not user.operands[1].node.depends & BATCH
        ):
            found.append(user)
        elif user.target in VIEWS and Value(user).shape[-1:] == columns:
            found += _readers(Value(user), users, columns)
    return found


def _summed(node: Node, users: Mapping[Value, Sequence[tuple[Node, int]]]) -> list[Node]:
    value = node.operands[0]
    columns = value.shape[-1:]
    while (
        value.node.target in VIEWS
        and len(users[value]) == 1
        and value.node.operands[0].shape[-1:] == columns
    ):
        value = value.node.operands[0]
    is_matmul = (
        value.node.target is aten.mm.default
        and value.shape[-1:] == columns
        and len(users[value]) == 1
    )
    return [value.node] if is_matmul else []


def fuse_matmuls(graph: fx.Graph, found: Mapping[str, Joint]) -> fx.Graph:
    """The graph with each reshard and its matmuls as one op, which issues its collective."""
    if not found:
        return graph
    new, _ = copied(graph)
    made: dict[str, list[fx.Node]] = {}
    for node in new.nodes:
        made.setdefault(node.meta.get("origin", ""), []).append(node)
    for name, joint in found.items():
        reshard = made[name]
        (issued,) = (node for node in reshard if "collective" in node.meta)
        matmuls = [
            node for of in joint.matmuls for node in made[of] if node.target is aten.mm.default
        ]
        with new.inserting_before(issued):
            if issued.target is ALL_GATHER:
                last = _gathered(new, joint, reshard, issued, matmuls)
            else:
                last = _scattered(new, joint, reshard, matmuls[0], issued)
        last.meta["collective"], last.meta["axis"] = issued.meta["collective"], issued.meta["axis"]
        for node in reversed([*matmuls, *reshard]):
            _erase(node)
    sort_graph(new)
    return new


def _gathered(
    graph: fx.Graph,
    joint: Joint,
    reshard: Sequence[fx.Node],
    issued: fx.Node,
    matmuls: Sequence[fx.Node],
) -> fx.Node:
    last = reshard[-1]
    read = {view for matmul in matmuls for view in _views(matmul.args[0], last)}
    keeps = any(user not in read and user not in matmuls for node in read for user in node.users)
    shard = _emit(
        graph,
        issued,
        aten.reshape.default,
        reshard[0].args[0],
        joint.seen(joint.part, joint.columns),
    )
    weights = [matmul.args[1] for matmul in matmuls]
    made = _emit(
        graph, issued, gather_matmuls, shard, weights, joint.dim, keeps, joint.n, issued.args[-1]
    )
    if keeps:
        whole = _emit(graph, issued, operator.getitem, made, 0)
        last.replace_all_uses_with(
            _emit(graph, issued, aten.reshape.default, whole, list(joint.whole))
        )
    for i, matmul in enumerate(matmuls):
        result = _emit(graph, matmul, operator.getitem, made, i + keeps)
        rows = _emit(graph, matmul, aten.reshape.default, result, [math.prod(joint.whole[:-1]), -1])
        matmul.replace_all_uses_with(rows)
    return made


def _scattered(
    graph: fx.Graph, joint: Joint, reshard: Sequence[fx.Node], matmul: fx.Node, issued: fx.Node
) -> fx.Node:
    left, right = matmul.args
    seen = _emit(graph, matmul, aten.reshape.default, left, joint.seen(joint.whole, joint.columns))
    made = _emit(graph, issued, matmul_scatter, seen, right, joint.dim, joint.n, issued.args[-1])
    reshard[-1].replace_all_uses_with(
        _emit(graph, issued, aten.reshape.default, made, list(joint.part))
    )
    return made


def _emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    made.meta.update({key: like.meta[key] for key in ("source", "origin") if key in like.meta})
    return made


def _views(node: Any, of: fx.Node) -> list[fx.Node]:
    """A chain of views: the node, its operand, and so on to the tensor that they all view."""
    found = [node]
    while found[-1] is not of:
        found.append(found[-1].args[0])
    return found


def _erase(node: fx.Node) -> None:
    """Erase a node without users, and then its operands without users."""
    if node.users or node._erased:
        return
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        if operand.op == "call_function":
            _erase(operand)
