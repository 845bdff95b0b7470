"""A rank's program that sends while it computes, as a generator: it yields tensors to send, and
receives those that arrived for the yield before. It runs on a process of a group, or all ranks run
side by side in one process.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.torch_internals.process_groups import resolve_process_group


@dataclass(frozen=True)
class Send:
    """Send a tensor to the rank ``step`` places after this one, and receive one from the rank
    ``step`` places before it.

    Attributes:
        tensor: the tensor to send; None: nothing.
        arrives: shape of the tensor that arrives; None: nothing.
        like: a tensor of its dtype and device.
        most: number of elements of the largest tensor that any rank sends.
    """

    step: int
    tensor: Tensor | None
    arrives: tuple[int, ...] | None
    like: Tensor
    most: int


Sends = list[Send]
OneRank = Generator[Sends, Any, Any]


@dataclass(frozen=True)
class SendingOp:
    """An op of a rank's graph that sends while it computes. Its last argument is a group.

    Attributes:
        one_rank: the program of one rank, from the rank and the other arguments.
    """

    target: Any
    one_rank: Callable[..., OneRank]

    def by_rank(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results, from the arguments on each rank of a group."""
        return side_by_side([self.one_rank(rank, *args[:-1]) for rank, args in enumerate(calls)])


# On processes.

Arrived = list[Tensor | None]
Start = Callable[[Sends], Callable[[], Arrived]]


def run(rank: OneRank, start: Start) -> Any:
    """Run one rank and return its result. ``start`` begins exchanges and returns a function that
    waits for them.
    """
    arrived: Arrived = []
    try:
        sends = next(rank)
        while True:
            wait = start(sends)
            sends = rank.send(arrived)
            arrived = wait()
    except StopIteration as end:
        return end.value


def on_processes(op: str, one_rank: Callable[..., OneRank]) -> None:
    """Register the kernel of an op whose last argument is a group: ``one_rank``, from this rank and
    the other arguments.
    """

    @torch.library.impl(op, ("cpu", "cuda"))
    def kernel(*args: Any) -> Any:
        rank, start = over(args[-1])
        return run(one_rank(rank, *args[:-1]), start)


def over(group: Any) -> tuple[int, Start]:
    """This rank's place in a process group, and how to exchange over it."""
    found = resolve_process_group(group)
    rank, n, tags = found.rank(), found.size(), itertools.count()

    def start(sends: Sends) -> Callable[[], Arrived]:
        out: Arrived = []
        ops: list[dist.P2POp] = []
        for send in sends:
            tag = next(tags)
            out.append(None if send.arrives is None else send.like.new_empty(send.arrives))
            for op, x, places in ((dist.isend, send.tensor, 1), (dist.irecv, out[-1], -1)):
                if x is not None and x.numel():
                    peer = (rank + places * send.step) % n
                    ops.append(dist.P2POp(op, x, group=found, tag=tag, group_peer=peer))
        works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> Arrived:
            for work in works:
                work.wait()
            works.clear()
            ops.clear()
            return out

        return wait

    return rank, start


# All ranks in one process.


def side_by_side(ranks: Sequence[OneRank]) -> list[Any]:
    """The results of all ranks of a group."""
    arrived: list[list[Tensor | None]] = [[] for _ in ranks]
    under_way: list[Sends] = []
    results: list[Any] = []
    sends = [next(rank) for rank in ranks]
    while not results:
        arrived = [[] for _ in ranks]
        for column in zip(*under_way, strict=True):
            for r, one in enumerate(column):
                x = column[(r - one.step) % len(ranks)].tensor
                assert (None if x is None else x.shape) == one.arrives, "a send is received"
                arrived[r].append(x)
        under_way = sends
        sends = []
        for rank, got in zip(ranks, arrived, strict=True):
            try:
                sends.append(rank.send(got))
            except StopIteration as end:
                results.append(end.value)
    return results
