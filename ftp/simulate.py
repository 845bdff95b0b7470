"""Run the per-rank graphs of a program for all ranks in one process, node by node in lockstep.

A rank's program is a straight line, so every rank stands at the same node; a collective is done on the list of the ranks' tensors.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from ftp.partition import LocalProgram

c10d = torch.ops._c10d_functional

Group = list[int]


def simulate(programs: Sequence[LocalProgram], inputs: Sequence[Sequence[Any]], groups: Mapping[str, Sequence[Group]]) -> list[tuple[torch.Tensor, ...]]:
    """Run every rank's program on its inputs (local tensors, then offsets).

    Args:
        groups: per mesh axis the groups of ranks that differ in that axis only, in order along it.

    Returns:
        Per rank its local outputs.
    """
    lines = [list(p.gm.graph.nodes) for p in programs]
    assert len({len(line) for line in lines}) == 1, "programs of one plan have as many nodes on every rank"
    last_use = _last_uses(lines[0])
    envs: list[dict[fx.Node, Any]] = [{} for _ in programs]
    feeds = [iter(i) for i in inputs]
    for at, nodes in enumerate(zip(*lines, strict=True)):
        node = nodes[0]
        if node.op == "placeholder":
            for env, own, feed in zip(envs, nodes, feeds, strict=True):
                env[own] = next(feed)
        elif node.op == "output":
            return [tuple(fx.node.map_arg(own.args[0], env.__getitem__)) for env, own in zip(envs, nodes, strict=True)]
        else:
            arguments = [_arguments(own, env) for own, env in zip(nodes, envs, strict=True)]
            for env, own, value in zip(envs, nodes, _run(node, arguments, groups, nodes), strict=True):
                env[own] = value
        for dead in last_use.get(at, ()):
            for env, line in zip(envs, lines, strict=True):
                env.pop(line[dead], None)
    raise AssertionError("a graph without an output")


def _arguments(node: fx.Node, env: Mapping[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    return args, kwargs


def _run(node: fx.Node, arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], groups: Mapping[str, Sequence[Group]], nodes: Sequence[fx.Node]) -> list[Any]:
    if node.target is c10d.wait_tensor.default:
        return [args[0] for args, _ in arguments]
    collective = COLLECTIVES.get(node.target)
    if collective is None:
        return [own.target(*args, **kwargs) for own, (args, kwargs) in zip(nodes, arguments, strict=True)]  # type: ignore[operator]
    results: list[Any] = [None] * len(nodes)
    for group in groups[node.meta["axis"]]:
        tensors = [arguments[rank][0][0] for rank in group]
        for rank, result in zip(group, collective(tensors, *arguments[group[0]][0][1:-1]), strict=True):
            results[rank] = result
    return results


def _last_uses(nodes: Sequence[fx.Node]) -> dict[int, list[int]]:
    position = {node: at for at, node in enumerate(nodes)}
    last: dict[int, list[int]] = {}
    for node, at in position.items():
        if node.op != "output":
            last.setdefault(max((position[u] for u in node.users), default=at), []).append(at)
    return last


_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"sum": operator.add, "max": torch.maximum, "min": torch.minimum}


def _all_reduce(tensors: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    total = reduce(_REDUCE[op], tensors)
    return [total] * len(tensors)


def _all_gather(tensors: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    return [torch.cat(tensors)] * n


def _reduce_scatter(tensors: list[torch.Tensor], op: str, n: int) -> list[torch.Tensor]:
    return list(reduce(_REDUCE[op], tensors).chunk(n))


def _all_to_all(tensors: list[torch.Tensor], outputs: list[int], inputs: list[int]) -> list[torch.Tensor]:
    parts = [t.split(inputs) for t in tensors]
    return [torch.cat([p[rank] for p in parts]) for rank in range(len(tensors))]


COLLECTIVES: dict[Any, Callable[..., list[torch.Tensor]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
}
