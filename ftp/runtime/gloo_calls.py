"""Collectives over gloo by calls of their process group, without torch's functional ops: those keep
each call in a table until it is waited for, which takes longer than the call itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed import ReduceOp

from ftp.partitioning.collectives import OVER_GLOO
from ftp.passes.aliasing import WAIT
from ftp.torch_internals.process_groups import (
    AllgatherOptions,
    AllreduceOptions,
    resolve_process_group,
)

UnderWay = tuple[torch.Tensor, Any]
"""The result of an issued collective, and torch's work to wait for before it is read."""

_OPS: dict[Any, Any] = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


def call_directly(graph: fx.Graph) -> None:
    """Replace the collectives of a graph that are marked ``direct``, and the waits for them. A
    direct call writes to none of its operands.
    """
    for node in graph.nodes:
        issue = _issue(node) if node.meta.get("direct") else None
        if issue is not None and all(user.target is WAIT for user in node.users):
            node.target = issue
            for wait in node.users:
                wait.target = arrived


def arrived(issued: UnderWay) -> torch.Tensor:
    """The result of an issued collective, once it is there."""
    result, work = issued
    work.wait()
    return result


WAITS = (WAIT, arrived)


def _issue(node: fx.Node) -> Callable[..., UnderWay] | None:
    """A function that issues a node's collective; None if none is known."""
    if node.target is OVER_GLOO:
        return _gather
    if node.args[1] not in _OPS or node.meta["collective"].dtype.is_complex:
        return None
    options = AllreduceOptions()
    options.reduceOp = _OPS[node.args[1]]

    def reduce(x: torch.Tensor, op: str, group: Any) -> UnderWay:
        y = x.clone(memory_format=torch.contiguous_format)
        return y, resolve_process_group(group).allreduce([y], options)

    return reduce


_GATHERED = AllgatherOptions()


def _gather(shard: torch.Tensor, n: int, group: Any) -> UnderWay:
    whole = shard.new_empty([n * shard.shape[0], *shard.shape[1:]])
    return whole, resolve_process_group(group)._allgather_base(whole, shard, _GATHERED)
