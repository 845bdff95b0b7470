"""Messages between the stages of a pipeline: in one process, or between processes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ftp.pipeline.buffers import RankPair
from ftp.runtime.shared_messages import MessageQueue
from ftp.runtime.stage_programs import as_bytes
from ftp.sharding.mesh import Mesh

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

    def is_expected(self, key: Key) -> bool:
        return True

    def expect(self, key: Key, like: Sequence[torch.Tensor], rank: int) -> None:
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
    """

    def __init__(
        self,
        mesh: Mesh,
        axis: str,
        tags: Mapping[Key, int],
        queues: Mapping[RankPair, MessageQueue],
    ):
        assert mesh.torch is not None
        self.tags, self.queues = tags, queues
        self.group = mesh.torch.get_group(axis)
        self.rank = self.group.rank()
        self.expected: dict[Key, tuple[MessageQueue | list[Any], list[torch.Tensor]]] = {}
        self.sending: dict[Key, list[tuple[Any, torch.Tensor]]] = {}

    def send(self, key: Key, values: Sequence[torch.Tensor], rank: int) -> None:
        if key[0] in BETWEEN_ACTIONS and (queue := self.queues.get((self.rank, rank))):
            queue.send(self.tags[key], values)
            return
        sending = self.sending[key] = []
        for i, value in enumerate(values):
            if value.numel():
                data = as_bytes(value.contiguous())
                work = dist.isend(data, group=self.group, group_dst=rank, tag=self.tags[key] + i)
                sending.append((work, data))

    def release(self, key: Key) -> None:
        """Free the tensors of a sent message that has been read."""
        for work, _ in self.sending.pop(key, ()):
            work.wait()

    def is_expected(self, key: Key) -> bool:
        return key in self.expected

    def expect(self, key: Key, like: Sequence[torch.Tensor], rank: int) -> None:
        if key[0] in BETWEEN_ACTIONS and (queue := self.queues.get((rank, self.rank))):
            self.expected[key] = queue, list(like)
            return
        works = [
            dist.irecv(as_bytes(x), group=self.group, group_src=rank, tag=self.tags[key] + i)
            for i, x in enumerate(like)
            if x.numel()
        ]
        self.expected[key] = works, list(like)

    def is_here(self, key: Key) -> bool:
        return True

    def take(self, key: Key) -> list[torch.Tensor]:
        works, values = self.expected.pop(key)
        if isinstance(works, MessageQueue):
            works.take(self.tags[key], values)
            return values
        for work in works:
            work.wait()
        return values

    def finish(self) -> None:
        """Wait until all sent messages have been received."""
        for key in list(self.sending):
            self.release(key)
