"""Collectives over gloo by calls of their process group, without torch's functional ops: those keep
each call in a table until it is waited for, which takes longer than the call itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed import ReduceOp
from torch.nn.functional import pad

from ftp.partitioning.collectives import OVER_GLOO
from ftp.passes.aliasing import WAIT
from ftp.torch_internals.process_groups import (
    AllgatherOptions,
    AllreduceOptions,
    DebugLevel,
    get_debug_level,
    resolve_process_group,
)

UnderWay = tuple[torch.Tensor, Any]
"""The result of an issued collective, and torch's work to wait for before it is read, if any."""

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
    if work is not None:
        work.wait()
    return result


WAITS = (WAIT, arrived)


def _issue(node: fx.Node) -> Callable[..., UnderWay] | None:
    """A function that issues a node's collective; None if none is known."""
    if node.target is OVER_GLOO:
        return _gather
    if node.args[1] not in _OPS or node.meta["collective"].dtype.is_complex:
        return None
    options, is_crowded = AllreduceOptions(), node.meta.get("is_crowded", False)
    # There torch counts messages too, and compares the ranks' counts at the next collective.
    goes_to_first = is_crowded and get_debug_level() != DebugLevel.DETAIL
    options.reduceOp = _OPS[node.args[1]]

    def reduce(x: torch.Tensor, op: str, group: Any) -> UnderWay:
        y, of = x.clone(memory_format=torch.contiguous_format), resolve_process_group(group)
        if goes_by_parts(y, op, of.size()):
            reduce_many = reduce_at_first if goes_to_first else reduce_by_parts
            reduce_many(y, op, of)
            return y, None
        return y, of.allreduce([y], options)

    return reduce


_MANY = 8  # ranks, from which gloo's ring is slower
_SMALL = 2**20  # bytes, up to which the number of messages counts, not their size
_TINY = 2**16  # bytes of all ranks' values, up to which each rank joins all of them
_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
_JOINS: dict[str, Callable[..., Any]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


def goes_by_parts(x: torch.Tensor, op: str, ranks: int) -> bool:
    """Whether ranks use `reduce_by_parts`; all ranks of a group know what it depends on."""
    return ranks >= _MANY and op in _JOINS and x.dtype in _DTYPES and 0 < x.nbytes <= _SMALL


def reduce_by_parts(x: torch.Tensor, op: str, group: Any) -> None:
    """All-reduce a value in place among many ranks: each rank gets its part from all others at
    once, joins what it got, and sends the result to all of them. In gloo's ring a rank sends
    ``4 (n - 1)`` messages, each after the one before has arrived; here ``n - 1`` at once, twice.

    A part is joined by one rank, or in the same order by all: replicas are equal. It is done when
    it returns, so that the group's collectives keep the order in which a program issues them.
    """
    join, n, flat = _JOINS[op], group.size(), x.view(-1)
    is_whole = n * x.nbytes <= _TINY
    given = flat.expand(n, -1).contiguous() if is_whole else pad(flat, (0, -len(flat) % n))
    given = given.view(n, -1)
    parts = torch.empty_like(given)
    group.alltoall_base(parts, given, [], []).wait()
    result, *others = parts
    for part in others:  # in this order on any processor
        join(result, part, out=result)
    if not is_whole:
        sent, parts = result.expand_as(given).contiguous(), given
        group.alltoall_base(parts, sent, [], []).wait()
        result = parts.view(-1)
    flat.copy_(result[: len(flat)])


def reduce_at_first(x: torch.Tensor, op: str, group: Any) -> None:
    """All-reduce a value in place at the group's first rank, which gets it from all others and
    sends them the result: a message of each rank there, and one back.

    For ranks that share a core. They send as many bytes as by parts, and what counts is how often
    a rank must be woken for a message; ranks with a core each would wait for the first one.
    """
    join, flat, ranks = _JOINS[op], x.view(-1), range(1, group.size())
    backend = group._get_backend(x.device)
    timeout = backend.options._timeout  # a message alone would wait as long as at the group's start
    if group.rank():
        backend.send([flat], 0, _TAG).wait(timeout)
        backend.recv([flat], 0, _TAG).wait(timeout)
        return
    others = flat.new_empty(len(ranks), len(flat)).unbind()
    for work in [backend.recv([y], i, _TAG) for i, y in zip(ranks, others, strict=True)]:
        work.wait(timeout)
    for other in others:  # in this order, whichever comes first
        join(flat, other, out=flat)
    for work in [backend.send([flat], i, _TAG) for i in ranks]:
        work.wait(timeout)


_TAG = 2**21  # of messages that are parts of a collective

_GATHERED = AllgatherOptions()


def _gather(shard: torch.Tensor, n: int, group: Any) -> UnderWay:
    whole = shard.new_empty([n * shard.shape[0], *shard.shape[1:]])
    return whole, resolve_process_group(group)._allgather_base(whole, shard, _GATHERED)
