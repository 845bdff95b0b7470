"""Windows of a dim, and their halo exchange: a rank that computes one window has most of it, and
gets the rest, the halo, from the ranks that hold it.

Window j has ``size`` elements from ``start + j * step`` on, with zeros before the first element of
the dim and after its last.
"""

import functools
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.ops.define import define, register_fake
from ftp.ops.sends import OneRank, Send, SendingOp, on_processes

WINDOWS = define("windows(Tensor x, int dim, int n, int start, int step, int size) -> Tensor")
JOIN_WINDOWS = define("join_windows(Tensor x, int dim, int length) -> Tensor")
# One window on each rank of a group; ``whole`` is the size of the dim over all ranks.
HALO_EXCHANGE = define(
    "halo_exchange"
    "(Tensor x, int dim, int n, int start, int step, int size, int whole, str group) -> Tensor"
)


@dataclass(frozen=True)
class Exchange:
    """What ranks send where the windows and the elements of a dim are on one axis.

    Attributes:
        n: the number of windows, and of ranks.
        most: the most elements of the dim that a rank receives or sends.
        places: how many ranks further the receivers are.
    """

    n: int
    most: int
    places: tuple[int, ...]


class Windows(NamedTuple):
    """A dim of ``whole`` elements in chunks, one for each of ``n`` ranks, and its windows."""

    whole: int
    n: int
    start: int
    step: int
    size: int

    @property
    def chunk(self) -> int:
        return -(-self.whole // self.n)

    def held(self, rank: int) -> tuple[int, int]:
        """First and last of a rank's chunk, the last excluded."""
        return min(rank * self.chunk, self.whole), min((rank + 1) * self.chunk, self.whole)

    def part(self, owner: int, reader: int) -> tuple[int, int]:
        """What a rank holds of another one's window: first and length."""
        (begin, end), first = self.held(owner), self.start + reader * self.step
        begin, end = max(begin, first), min(end, first + self.size)
        return begin, max(end - begin, 0)


@functools.lru_cache(256)
def exchange_of(cut: Windows) -> Exchange:
    """What the ranks send one another for their windows.

    >>> exchange_of(Windows(whole=8, n=2, start=-1, step=4, size=6))
    Exchange(n=2, most=1, places=(1,))
    """
    sent, received, places = Counter[int](), Counter[int](), set[int]()
    chunk = max(cut.chunk, 1)
    for reader in range(cut.n):
        first = cut.start + reader * cut.step
        for owner in range(max(first // chunk, 0), min((first + cut.size - 1) // chunk + 1, cut.n)):
            _, length = cut.part(owner, reader)
            if length and owner != reader:
                sent[owner] += length
                received[reader] += length
                places.add((reader - owner) % cut.n)
    most = max((*sent.values(), *received.values()), default=0)
    return Exchange(cut.n, most, tuple(sorted(places)))


@torch.library.impl("ftp::windows", "CompositeExplicitAutograd")
def _windows(x: Tensor, dim: int, n: int, start: int, step: int, size: int) -> Tensor:
    """All windows, stacked along a new first dim.

    >>> WINDOWS(torch.tensor([1, 2, 3, 4, 5]), 0, 2, -1, 3, 4)
    tensor([[0, 1, 2, 3],
            [3, 4, 5, 0]])
    """
    out = x.new_zeros([n, *x.shape[:dim], size, *x.shape[dim + 1 :]])
    whole = Windows(x.shape[dim], 1, start, step, size)
    for j in range(n):
        begin, length = whole.part(0, j)
        if length:
            into = out[j].narrow(dim, begin - start - j * step, length)
            into.copy_(x.narrow(dim, begin, length))
    return out


@torch.library.impl("ftp::join_windows", "CompositeExplicitAutograd")
def _join_windows(x: Tensor, dim: int, length: int) -> Tensor:
    """The first elements of windows one after another.

    >>> JOIN_WINDOWS(torch.tensor([[1, 2, 3], [4, 5, 6]]), 0, 5)
    tensor([1, 2, 3, 4, 5])
    """
    return torch.cat(x.unbind(), dim).narrow(dim, 0, length).contiguous()


@register_fake("ftp::join_windows")
def _joined_shape(x: Tensor, dim: int, length: int) -> Tensor:
    return x.new_empty([*x.shape[1 : dim + 1], length, *x.shape[dim + 2 :]])


@register_fake("ftp::windows")
@register_fake("ftp::halo_exchange")
def _shape(x: Tensor, dim: int, n: int, start: int, step: int, size: int, *of: object) -> Tensor:
    return x.new_empty([1 if of else n, *x.shape[:dim], size, *x.shape[dim + 1 :]])


def one_rank(
    rank: int, x: Tensor, dim: int, n: int, start: int, step: int, size: int, whole: int
) -> OneRank:
    """One rank's window."""
    cut = Windows(whole, n, start, step, size)
    out = x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])
    each = out.numel() // max(size, 1) * x.element_size()
    exchange, first = exchange_of(cut), start + rank * step

    def sent(reader: int) -> Tensor | None:
        begin, length = cut.part(rank, reader)
        if not length * each:
            return None
        part = x.narrow(dim, begin - cut.held(rank)[0], length)
        return part.contiguous().reshape(-1).view(torch.uint8)

    owners = [(rank - places) % n for places in exchange.places]
    arriving = [cut.part(owner, rank) for owner in owners]
    yield [
        Send(
            places,
            sent((rank + places) % n),
            (length * each,) if length * each else None,
            x.new_empty([0], dtype=torch.uint8),
            exchange.most * each,
        )
        for places, (_, length) in zip(exchange.places, arriving, strict=True)
    ]
    before = min(max(-first, 0), size)
    after = min(max(first + size - whole, 0), size - before)
    out.narrow(dim, 0, before).zero_()
    out.narrow(dim, size - after, after).zero_()
    begin, length = cut.part(rank, rank)
    if length:
        out.narrow(dim, begin - first, length).copy_(
            x.narrow(dim, begin - cut.held(rank)[0], length)
        )
    arrived = yield []
    for part, (begin, length) in zip(arrived, arriving, strict=True):
        if part is not None:
            into = out.narrow(dim, begin - first, length)
            into.copy_(part.view(x.dtype).view(into.shape))
    return out.unsqueeze(0)


on_processes("ftp::halo_exchange", one_rank)
HALO = SendingOp(HALO_EXCHANGE, one_rank)
