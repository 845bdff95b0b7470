"""Messages between the stages of a pipeline: in one process, or between processes.

A rank requests the messages of another in the order of sending, whichever it reads first: NCCL
pairs sends with receives only by their order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ftp.pipeline.buffers import RankPair
from ftp.runtime.pipelines.shared_messages import MessageQueue
from ftp.runtime.pipelines.stage_programs import as_bytes
from ftp.sharding.mesh import Mesh, mesh_device
from ftp.sharding.mesh_groups import pair_group, uses_nccl

Key = tuple[str, int, int, int]  # kind, from stage, to stage, microbatch or leaf
BETWEEN_ACTIONS = ("F", "B")  # kinds; others are one message a step


class Mailbox:
    """Messages between simulated ranks; ``count`` counts sent and taken messages."""

    def __init__(self):
        self.sent: dict[Key, list[torch.Tensor]] = {}
        self.count = 0

    def send(self, key: Key, values: Sequence[torch.Tensor], rank: int) -> None:
        assert key not in self.sent
        self.sent[key] = list(values)
        self.count += 1

    def expect(self, key: Key, rank: int) -> None:
        pass

    def is_here(self, key: Key) -> bool:
        return key in self.sent

    def release(self, key: Key) -> None:
        pass

    def take(self, key: Key) -> list[torch.Tensor]:
        self.count += 1
        return self.sent.pop(key)


class Messages:
    """Messages between processes: between actions through shared memory where there is a queue,
    all others by torch.distributed's point-to-point calls.

    Args:
        order: per pair of ranks the messages from one to the other, in the order of sending.
        empty: new tensors for the values of a message.
        queues, groups: of pairs that have a queue in shared memory, or a process group of their
            own; others send over the group of the axis.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis: str,
        order: Mapping[RankPair, Sequence[Key]],
        empty: Callable[[Key], list[torch.Tensor]],
        queues: Mapping[RankPair, MessageQueue],
        groups: Mapping[RankPair, dist.ProcessGroup],
    ):
        assert mesh.torch is not None
        self.axis_group = mesh.torch.get_group(axis)
        self.ranks = dist.get_process_group_ranks(self.axis_group)
        self.rank = self.axis_group.rank()
        self.empty, self.queues, self.groups = empty, queues, groups
        # Messages not yet sent or requested, the next one last; those of queues are kept apart.
        self.left: dict[tuple[RankPair, bool], list[Key]] = {}
        for pair, keys in order.items():
            for key in reversed(keys) if self.rank in pair else ():
                self.left.setdefault((pair, self._is_queued(key, pair)), []).append(key)
        self.arriving: dict[Key, tuple[list[Any], list[torch.Tensor]]] = {}
        self.sending: dict[Key, list[tuple[Any, torch.Tensor]]] = {}

    def _is_queued(self, key: Key, pair: RankPair) -> bool:
        return key[0] in BETWEEN_ACTIONS and pair in self.queues

    def send(self, key: Key, values: Sequence[torch.Tensor], rank: int) -> None:
        pair = self.rank, rank
        is_queued = self._is_queued(key, pair)
        following = self.left[pair, is_queued].pop()
        assert following == key, f"{key} is sent before {following}"
        if is_queued:
            self.queues[pair].send(values)
            return
        group, to = self.groups.get(pair, self.axis_group), self.ranks[rank]
        sending = self.sending[key] = []
        for value in values:
            if value.numel():
                data = as_bytes(value.contiguous())
                sending.append((dist.isend(data, to, group=group), data))

    def release(self, key: Key) -> None:
        """Free the tensors of a sent message that has been read."""
        for work, _ in self.sending.pop(key, ()):
            work.wait()

    def expect(self, key: Key, rank: int) -> None:
        """Ask for a message, and for those that are sent before it."""
        pair = rank, self.rank
        is_queued = self._is_queued(key, pair)
        left, group = self.left[pair, is_queued], self.groups.get(pair, self.axis_group)
        while key in left:
            coming = left.pop()
            values = self.empty(coming)
            if is_queued:
                works = [self.queues[pair].receive(values)]
            else:
                full = [as_bytes(x) for x in values if x.numel()]
                works = [dist.irecv(x, self.ranks[rank], group=group) for x in full]
            self.arriving[coming] = works, values

    def is_here(self, key: Key) -> bool:
        return True

    def take(self, key: Key) -> list[torch.Tensor]:
        works, values = self.arriving.pop(key)
        for work in works:
            work.wait()
        return values

    def finish(self) -> None:
        """Wait until all sent messages have been received."""
        for key in list(self.sending):
            self.release(key)


def groups_of_pairs(
    mesh: Mesh, axis: str, pairs: Collection[RankPair]
) -> dict[RankPair, dist.ProcessGroup]:
    """With NCCL, a process group for each pair of ranks and direction. A group runs its operations
    in order, so with a shared group a message would wait for those in the other direction. Empty
    for other backends. All ranks of the mesh call it together.
    """
    assert mesh.torch is not None
    if not uses_nccl(mesh):
        return {}
    rank, found = mesh.torch.get_group(axis).rank(), {}
    for pair in sorted(pairs):
        group = pair_group(mesh, axis, pair)
        if rank in pair:
            found[pair] = group
            # NCCL connects two ranks at their first message, and the host waits until both are
            # there: here in one order on all ranks.
            byte = torch.zeros(1, dtype=torch.uint8, device=mesh_device(mesh))
            if rank == pair[0]:
                dist.send(byte, group=group, group_dst=pair[1])
            else:
                dist.recv(byte, group=group, group_src=pair[0])
    return found
