"""Registry of ops on windows, and the helpers that they share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.ops.windows import JOIN_WINDOWS, WINDOWS, Windows, exchange_of
from ftp.rules.call import tensors
from ftp.torch_internals.op_types import OpOverload

MOST_PACKS = 16  # in a dim, such as queries, keys and values, each of which is cut by itself


class FarApart(Exception):
    """An op has no windows along a dim, or ones that are mostly of elements that others hold."""


# From the number of ranks, the dim that they cut, and the op's arguments.
WINDOWED: dict[OpOverload, Callable[..., Any]] = {}


def windowed(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that computes ops on windows."""

    def register(by: Callable[..., Any]) -> Callable[..., Any]:
        WINDOWED.update((op, by) for op in ops)
        return by

    return register


@functools.cache
def by_windows(target: OpOverload, n: int, dim: int) -> Callable[..., Any]:
    """An op on windows, for ``n`` ranks that cut ``dim``; one function for equal arguments.

    Raises:
        FarApart: when the function is called, also where its tensors have no such dim.
    """

    def on_windows(*args: Any, **kwargs: Any) -> Any:
        if next(tensors(args, Tensor)).ndim <= dim:
            raise FarApart
        return WINDOWED[target](n, dim, *args, **kwargs)

    return on_windows


def split(x: Tensor, dim: int, n: int, start: int, step: int, size: int) -> Tensor:
    """The windows of a dim as a new first dim.

    Raises:
        FarApart: a rank would receive more than it has, or windows have no elements.
    """
    cut = Windows(x.shape[dim], n, start, step, size)
    if size < 1 or exchange_of(cut).most > cut.chunk:
        raise FarApart
    return WINDOWS(x, dim, n, start, step, size)


def places(x: Tensor, dim: int, start: int, step: int) -> Tensor:
    """Where in their dim the elements of windows are, in a shape that broadcasts to theirs."""
    n, size = x.shape[0], x.shape[1 + dim]
    first = torch.arange(n, device=x.device).unsqueeze(1) * step + start
    place = first + torch.arange(size, device=x.device)
    return place.reshape([n, *[1] * dim, size, *[1] * (x.ndim - 2 - dim)])


def joined(x: Tensor, dim: int, length: int) -> Tensor:
    """The first ``length`` elements of windows that do not overlap, as one dim."""
    n, size, chunk = x.shape[0], x.shape[1 + dim], -(-length // x.shape[0])
    if chunk == size:
        return JOIN_WINDOWS(x, dim, length)
    # Chunks of the result are shorter: what is joined is cut anew.
    whole = JOIN_WINDOWS(x, dim, n * size)
    return JOIN_WINDOWS(split(whole, dim, n, 0, chunk, chunk), dim, length)
