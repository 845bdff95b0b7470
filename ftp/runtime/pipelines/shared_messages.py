"""Messages between stages through memory that two ranks share, in place of gloo's sockets.

A queue holds as many messages as can be on their way at once (`ftp.pipeline.buffers`), so that a
sender need not wait for room where the schedule runs to its end. It is read in the order of
sending.
"""

import ctypes
import itertools
import mmap
import os
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ftp.dataclass import dataclass
from ftp.distributed.interrupt import interrupts
from ftp.pipeline.buffers import RankPair
from ftp.runtime.pipelines.stage_programs import as_bytes
from ftp.runtime.shared_pages import HEADER_BYTES, failure_of, with_shared_memory
from ftp.sharding.mesh import Mesh
from ftp.sharding.process_group import releases

_LINE = 64  # bytes of a cache line: each slot begins with one


class MessageQueue:
    """Messages from one rank of a group to another one."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        pair: RankPair,
        memory: torch.Tensor,
        base: int,
        slots: tuple[int, int],
        library: ctypes.CDLL,
    ):
        """
        Args:
            memory: the queue's part of the shared memory, as bytes: the headers of sender and
                reader, then slots.
            base: address of the shared memory.
            slots: their number, and the bytes of each.
        """
        self.count = 0  # messages that this rank has sent, or read
        self._memory, self._base, self._library = memory, base, library
        self._room, self._size = slots
        self._group, self._pair = group, pair
        self._sender, self._reader = memory.data_ptr(), memory.data_ptr() + HEADER_BYTES
        self._asked: deque[Sequence[torch.Tensor]] = deque()
        own = self._sender if group.rank() == pair[0] else self._reader
        ctypes.c_int64.from_address(own + 8).value = os.getpid()

    def send(self, values: Sequence[torch.Tensor]) -> None:
        """Copy a message into the queue; waits while it is full."""
        self._wait(self._reader, self.count + 1 - self._room, self._pair[1])
        _copy(self._slot(), values, is_read=False)
        self.count += 1
        self._library.ftp_post(self._sender, self.count)

    def receive(self, values: Sequence[torch.Tensor]) -> "Receive":
        """Request the next message; it is in ``values`` after ``wait()`` of the result."""
        self._asked.append(values)
        return Receive(self, self.count + len(self._asked))

    def read(self, number: int) -> None:
        """Wait for all messages up to ``number``, and copy each to the tensors that its request
        named.
        """
        while self.count < number:
            self._wait(self._sender, self.count + 1, self._pair[0])
            _copy(self._slot(), self._asked.popleft(), is_read=True)
            self.count += 1
            self._library.ftp_post(self._reader, self.count)

    def _slot(self) -> torch.Tensor:
        at = 2 * HEADER_BYTES + self.count % self._room * self._size
        return self._memory[at : at + self._size]

    def _wait(self, header: int, number: int, peer: int) -> None:
        timeout = self._group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        found = self._library.ftp_await(header, number, self._base, timeout)
        if found:
            ctypes.c_int64.from_address(self._base).value = 1
            ranks = [dist.get_global_rank(self._group, peer)]
            raise failure_of("message between stages", found, timeout, ranks)


@dataclass(frozen=True)
class Receive:
    """A requested message."""

    queue: MessageQueue
    number: int

    def wait(self) -> None:
        """Wait until the message has arrived."""
        self.queue.read(self.number)


def _copy(slot: torch.Tensor, values: Sequence[torch.Tensor], *, is_read: bool) -> None:
    at = 0
    for value in values:
        data = as_bytes(value.contiguous())
        place = slot[at : at + len(data)]
        _ = data.copy_(place) if is_read else place.copy_(data)
        at += len(data)


def message_queues(
    mesh: Mesh, axis: str, slots: Mapping[RankPair, tuple[int, int]]
) -> dict[RankPair, MessageQueue]:
    """The queues from and to this rank of an axis; empty if a rank of the mesh cannot use shared
    memory. All ranks of the mesh call it together.

    Args:
        slots: of each queue the number of its messages, and the bytes of the largest.
    """
    assert mesh.torch is not None
    group = mesh.torch.get_group(axis)
    rounded = {pair: (n, -(-size // _LINE) * _LINE) for pair, (n, size) in slots.items()}
    sizes = [2 * HEADER_BYTES + n * size for n, size in rounded.values()]
    *starts, total = itertools.accumulate(sizes, initial=HEADER_BYTES)

    def made(_: str, memory: mmap.mmap, library: ctypes.CDLL) -> dict[RankPair, MessageQueue]:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        _memories.append(whole)
        return {
            pair: MessageQueue(
                group, pair, whole[start : start + size], whole.data_ptr(), rounded[pair], library
            )
            for pair, start, size in zip(rounded, starts, sizes, strict=True)
            if group.rank() in pair
        }

    found = with_shared_memory(mesh, {axis: group}, lambda _: total, made)
    return found.get(axis, {})


_memories: list[torch.Tensor] = []  # they begin with the word that stops
releases.append(_memories.clear)


def _stop() -> None:
    for memory in _memories:
        memory[:8].view(torch.int64).fill_(1)


interrupts.append(_stop)
