"""Reduce gradients in a narrower dtype on the wire: an all-to-all of the terms, and a float32 sum
at the receiver.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import fx

from ftp.partitioning.collectives import Collective
from ftp.passes.aliasing import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from ftp.passes.copy_elimination import copied
from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.rules.op_kinds import VIEWS_AND_COPIES

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
REDUCING = (ALL_REDUCE, REDUCE_SCATTER)


def gradient_reductions(graph: Graph, gradients: Collection[int] | None = None) -> frozenset[str]:
    """The names of the plan's reshards that sum gradients over ranks.

    The terms come from a backward pass, and no op of that pass reads the sum: it is returned, or
    read by the optimizer. The sum of an activation's gradient is read by the backward pass.

    Args:
        gradients: in a part of a step, the outputs that are gradients, or sums of them over
            microbatches; another part may read the other outputs.
    """
    users = graph.users
    sums = [
        node
        for node in graph.nodes
        if node.kind == "reshard"
        and node.target.op in ("all_reduce", "reduce_scatter")
        and node.target.src.op == "sum"
        and node.depends & BATCH
        and node.results[0].dtype.is_floating_point
    ]
    if gradients is not None:
        ends = {graph.outputs[i] for i in gradients}
        read = set(graph.outputs) - ends
        return frozenset(n.name for n in sums if _ends_in(Value(n), ends, read, users))
    found = set()
    for node in sums:
        phases = {source.phase for source in _sources(node.operands[0], node.target.axes)}
        if all(phase % 2 for phase in phases) and _leaves(Value(node), max(phases), users):
            found.add(node.name)
    return frozenset(found)


def _sources(value: Value, axes: Sequence[str]) -> Iterator[Node]:
    """The ops that produce the pending sums over the axes that ``value`` carries."""
    queue, seen = [value], {value.node}
    for at in queue:
        pending = [v for v in at.node.operands if _is_pending(v, axes)]
        if not pending:
            yield at.node
        for before in pending:
            if before.node not in seen:
                seen.add(before.node)
                queue.append(before)


def _is_pending(value: Value, axes: Sequence[str]) -> bool:
    if value.node.kind == "reshard":
        reshard = value.node.target
        if reshard.dst.kind == "P" or not set(axes).isdisjoint(reshard.axes):
            return reshard.dst.kind == "P"
        return _is_pending(value.node.operands[0], axes)
    return any(axis in axes for axis, _ in value.node.pending.get(value.index, ()))


def _leaves(value: Value, phase: int, users: dict[Value, list[tuple[Node, int]]]) -> bool:
    """Whether a value, or a view or cast of it, leaves the backward pass."""
    for user, _ in users.get(value, ()):
        if user.phase > phase:
            continue
        if not _passes_on(user) or not all(_leaves(value, phase, users) for value in user.values):
            return False
    return True


def _ends_in(
    value: Value, ends: Set[Value], read: Set[Value], users: dict[Value, list[tuple[Node, int]]]
) -> bool:
    """Whether every use of a value, through views and casts, is an output in ``ends`` or its
    addition to such an output.
    """
    return value not in read and all(
        (user.target is aten.add.Tensor and Value(user) in ends)
        or (_passes_on(user) and all(_ends_in(value, ends, read, users) for value in user.values))
        for user, _ in users.get(value, ())
    )


def _passes_on(node: Node) -> bool:
    return node.kind in ("reshard", "constrain") or node.target in VIEWS_AND_COPIES


def narrow_reductions(
    graph: fx.Graph, names: Collection[str], dtype: torch.dtype, axes: Mapping[str, int]
) -> fx.Graph:
    """The graph with the reductions of these reshards as all-to-alls in ``dtype``, summed in
    float32, or in their own dtype if it is wider.

    An all-reduce then gathers the sums in ``dtype``, so that all ranks hold equal ones.

    Args:
        axes: the mesh's, with their sizes.
    """
    new, _ = copied(graph)
    for node in list(new.nodes):
        if node.target not in REDUCING or node.meta.get("origin") not in names:
            continue
        record: Collective = node.meta["collective"]
        if record.dtype.itemsize < dtype.itemsize:
            continue
        (wait,) = [user for user in node.users if user.target is WAIT]
        with new.inserting_before(wait):
            n = math.prod(axes[axis] for axis in record.axes)
            out = _narrowed(new, node, n, dtype)
        wait.replace_all_uses_with(out)
        new.erase_node(wait)
        new.erase_node(node)
    return new


def _narrowed(graph: fx.Graph, node: fx.Node, n: int, dtype: torch.dtype) -> fx.Node:
    """Emit one reduction over ``n`` ranks with terms in ``dtype``; returns the node of its sum."""
    record: Collective = node.meta["collective"]
    emit, x, group = graph.call_function, node.args[0], node.args[-1]
    gathers = node.target is ALL_REDUCE
    count = math.prod(record.shape)
    part = max(1, -(-count // n)) if gathers else count // n
    whole = torch.promote_types(torch.float32, record.dtype)

    def issue(target: object, x: fx.Node, *args: object, op: str) -> fx.Node:
        made = emit(target, (x, *args, group))  # type: ignore[arg-type]
        made.meta.update(node.meta)
        nbytes = n * part * dtype.itemsize
        made.meta["collective"] = replace(
            record,
            op=op,
            shape=(n * part,),
            dtype=dtype,
            nbytes=nbytes,
            wire_nbytes=nbytes * (n - 1) // n,
            members=tuple(
                replace(m, nbytes=m.nbytes * dtype.itemsize // record.dtype.itemsize)
                for m in record.members
            ),
        )
        return emit(WAIT, (made,))

    def cast(x: fx.Node, to: torch.dtype) -> fx.Node:
        return emit(aten._to_copy.default, (x,), {"dtype": to})

    x = emit(aten.reshape.default, (x, [count]))
    x = x if record.dtype is dtype else cast(x, dtype)
    if n * part != count:
        x = emit(aten.constant_pad_nd.default, (x, [0, n * part - count], 0.0))
    x = issue(c10d.all_to_all_single.default, x, [part] * n, [part] * n, op="all_to_all")
    x = cast(emit(aten.reshape.default, (x, [n, part])), whole)
    x = emit(aten.sum.dim_IntList, (x, [0]))
    if gathers:
        x = issue(ALL_GATHER, cast(x, dtype), n, op="all_gather")
        x = emit(aten.slice.Tensor, (x, 0, 0, count)) if n * part != count else x
    shape = list(record.shape)
    if not gathers:
        shape[0] //= n
    x = emit(aten.reshape.default, (x, shape))
    held = dtype if gathers else whole
    return x if held is record.dtype else cast(x, record.dtype)
