"""Turns: where a host has more ranks than cores, only as many as cores do long work in Python at
once, and the others wait.

Ranks that share a core by time slices empty its caches for each other: the traces of 16 ranks on
two cores take a fifth more processor time side by side than one after another. And a rank that is
early plans while others still trace.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist

_PATIENCE = 10.0  # seconds that a rank waits for a turn; after that it takes none any more
_PAUSE = 0.025  # seconds between two looks
_PLACE = "\0ftp-turn"  # of a socket without a file, which the kernel frees when the process ends
_takes_turns = True
_has_turn = False


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """A block that runs in a turn of this rank, and waits for no other rank: if it does, or if a
    rank is stopped in its turn, the others wait ``_PATIENCE`` once.
    """
    global _has_turn
    cores = _cores()
    if _has_turn or not _takes_turns or not cores or _ranks() <= len(cores):
        yield
        return
    with _free_place(cores) or contextlib.nullcontext():
        _has_turn = True
        try:
            yield
        finally:
            _has_turn = False


def own_cores() -> tuple[int, int]:
    """The first core that this process may use, and their number; zeros where it cannot tell."""
    cores = _cores()
    return min(cores, default=0), len(cores)


def are_crowded(cores: Sequence[tuple[int, int]]) -> bool:
    """Whether ranks of one host are more than the cores that they may use.

    Args:
        cores: `own_cores` of each rank.

    >>> are_crowded([(0, 2)] * 4), are_crowded([(0, 2)] * 2), are_crowded([(0, 1), (1, 1)])
    (True, False, False)
    """
    return len(cores) > sum(number for _, number in set(cores)) > 0


def _ranks() -> int:
    """The ranks of this host, or of all hosts if a process cannot tell."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if here.isdigit():
        return int(here)
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _cores() -> set[int]:
    """The cores that this process may use; none where sockets need a file."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _free_place(cores: Iterable[int]) -> socket.socket | None:
    """The place of one of these cores, once one is free; None if that takes too long."""
    global _takes_turns
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        for core in cores:
            place = socket.socket(socket.AF_UNIX)
            try:
                place.bind(f"{_PLACE}-{os.getuid()}-{core}")
                return place
            except OSError as e:
                place.close()
                if e.errno != errno.EADDRINUSE:
                    _takes_turns = False
                    return None
        time.sleep(_PAUSE)
    _takes_turns = False
    return None
