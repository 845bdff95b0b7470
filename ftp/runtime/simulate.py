"""Run the graphs of all ranks in one process. A rank runs up to its next collective, which is done
once all ranks of its group have come to it; it is a function of the list of their tensors.
"""

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from ftp.ops.choose import number_of
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS, exchanged
from ftp.ops.kernel_strides import kernel_of
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.rings import SENDING
from ftp.ops.symmetric_memory import gather_matmuls, matmul_scatter
from ftp.partitioning.local_program import LocalProgram
from ftp.passes.branch_order import branches
from ftp.passes.transport import pads_as_kernels_take

c10d = torch.ops._c10d_functional

GroupMembers = list[int]
Outputs = tuple[torch.Tensor, ...]
IssuedNode = tuple[fx.Node, tuple[Any, ...]]


def simulate(
    programs: Sequence[LocalProgram],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[GroupMembers]],
) -> list[Outputs]:
    """Run every rank's program on its inputs (local tensors, then offsets).

    Args:
        groups: per mesh axis the groups of ranks that differ in that axis only, in order along it.

    Returns:
        Per rank its local outputs.
    """
    ranks = [
        _rank(pads_as_kernels_take(p.gm.graph), given)
        for p, given in zip(programs, inputs, strict=True)
    ]
    ended: dict[int, Outputs] = {}
    arrived: dict[int, IssuedNode] = {}
    results: dict[int, Any] = dict.fromkeys(range(len(ranks)))
    while results:
        for rank, result in results.items():
            try:
                arrived[rank] = ranks[rank].send(result)
            except StopIteration as end:
                ended[rank] = end.value
        results = {}
        for group in _complete(arrived, groups):
            found = _run([arrived.pop(rank) for rank in group])
            results.update(zip(group, found, strict=True))
    assert not arrived, "ranks of one group issue the same collectives in the same order"
    return [ended[rank] for rank in range(len(ranks))]


def _complete(
    arrived: Mapping[int, IssuedNode], groups: Mapping[str, Sequence[GroupMembers]]
) -> list[GroupMembers]:
    """The groups whose ranks have all come to one collective."""
    kinds = {
        rank: (n.target, n.meta["axis"], n.meta.get("branch")) for rank, (n, _) in arrived.items()
    }
    return [
        group
        for kind in dict.fromkeys(kinds.values())
        for group in groups[kind[1]]
        if all(kinds.get(rank) == kind for rank in group)
    ]


def _rank(graph: fx.Graph, inputs: Sequence[Any]) -> Generator[IssuedNode, Any, Outputs]:
    """One rank's run: yields each collective's node and arguments, is sent its result."""
    nodes = list(graph.nodes)
    last_use = _last_uses(nodes)
    env: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    found = branches(graph)
    predicates = {number_of(n.target, n.args): n.args[0] for n in nodes if n.args}

    def takes(number: int) -> bool:
        return bool(env[predicates[number]])

    for at, node in enumerate(nodes):
        if any(takes(number) != side for number, side in found.get(node, ())):
            env[node] = None  # of the branch not taken
        elif (number := number_of(node.target, node.args)) >= 0:
            env[node] = env[node.args[1 if takes(number) else 2]]
        elif node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "output":
            break
        else:
            args, kwargs = mapped_arguments(node, env.__getitem__)
            if node.target is c10d.wait_tensor.default:
                env[node] = args[0]
            elif node.target in COLLECTIVES or node.target in BY_RANK:
                env[node] = yield node, args
            else:
                env[node] = kernel_of(node.target)(*args, **kwargs)
            del args, kwargs
        for dead in last_use.get(at, ()):
            del env[dead]
    return tuple(fx.node.map_arg(nodes[-1].args[0], env.__getitem__))  # type: ignore[arg-type]


def _run(issued: Sequence[IssuedNode]) -> list[Any]:
    node, args = issued[0]
    if (by_rank := BY_RANK.get(node.target)) is not None:
        return by_rank([args for _, args in issued])
    return COLLECTIVES[node.target]([args[0] for _, args in issued], *args[1:-1])


def _last_uses(nodes: Sequence[fx.Node]) -> dict[int, list[fx.Node]]:
    used: dict[fx.Node, int] = {}
    for at, node in enumerate(nodes):
        if node.op != "output":
            used[node] = at
        used.update(dict.fromkeys(node.all_input_nodes, at))
    last: dict[int, list[fx.Node]] = {}
    for node, at in used.items():
        last.setdefault(at, []).append(node)
    return last


_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": operator.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _all_reduce(tensors: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    total = reduce(_REDUCE[op], tensors)
    return [total] * len(tensors)


def _all_gather(tensors: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    return [torch.cat(tensors)] * n


def _reduce_scatter(tensors: list[torch.Tensor], op: str, n: int) -> list[torch.Tensor]:
    return list(reduce(_REDUCE[op], tensors).chunk(n))


def _all_to_all(calls: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    parts = [t.split(sent) for t, _, sent, _ in calls]
    return [torch.cat([p[rank] for p in parts]) for rank in range(len(calls))]


def _gather_matmuls(calls: list[tuple[Any, ...]]) -> list[list[torch.Tensor]]:
    _, _, dim, keeps, *_ = calls[0]
    whole = torch.cat([shard for shard, *_ in calls], dim)
    return [
        [*([whole] if keeps else []), *(whole @ weight for weight in weights)]
        for _, weights, *_ in calls
    ]


def _matmul_scatter(calls: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    total = reduce(operator.add, [left @ right for left, right, *_ in calls])
    return [part.contiguous() for part in total.chunk(len(calls), calls[0][2])]


COLLECTIVES: dict[Any, Callable[..., list[torch.Tensor]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
}
# Collectives whose ranks differ in more arguments than the tensor: functions of all arguments.
BY_RANK: dict[Any, Callable[[list[tuple[Any, ...]]], list[Any]]] = {
    ALL_TO_ALL_ROWS: exchanged,
    c10d.all_to_all_single.default: _all_to_all,
    **{target: op.by_rank for target, op in SENDING.items()},
    gather_matmuls: _gather_matmuls,
    matmul_scatter: _matmul_scatter,
}
