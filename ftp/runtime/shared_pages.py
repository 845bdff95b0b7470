"""Memory that the processes of one host share, and the library that works in it.

The ranks of a mesh agree once, through the store, whether all of them can use it: they must be on
one host, have a C compiler, and reserve the memory. If one cannot, none uses it, and all warn. The
memory has no name in a file system, so none is left over, however the ranks end.
"""

import ctypes
import json
import mmap
import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ftp.distributed.calls import exchange
from ftp.ops.native import compiled
from ftp.sharding.mesh import Mesh

HEADER_BYTES = 128
Made = TypeVar("Made")


def with_shared_memory(
    mesh: Mesh,
    groups: Mapping[str, dist.ProcessGroup],
    size: Callable[[str], int],
    make: Callable[[str, mmap.mmap, ctypes.CDLL], Made],
) -> dict[str, Made]:
    """Allocate shared memory for each group, and return the result of ``make`` for each; empty if a
    rank of the mesh cannot use shared memory. All ranks of the mesh call it together.

    Args:
        groups: of this rank, by names that are equal on all ranks.
        size: bytes of a group's memory, equal on its ranks.
        make: from a group's name, its memory, opened and zero, and the library.
    """
    if not is_asked_for() or mesh.device_type != "cpu":
        return {}
    library = _library() if hasattr(os, "memfd_create") else None
    lack = (
        "" if library is not None else f"has no C compiler, or runs on {sys.platform}, not on Linux"
    )
    hosts = _from_all(mesh, "hosts", socket.gethostname(), lack)
    if hosts is None or library is None:
        return {}
    if len(set(hosts)) > 1:
        _say(mesh, f"its ranks are on the hosts {', '.join(sorted(set(hosts)))}")
        return {}
    handles: dict[str, int] = {}
    places: dict[str, MemoryHandle] = {}
    found: dict[str, Made] = {}
    try:
        try:
            for key, group in groups.items():
                if group.rank() == 0:
                    name = f"ftp-{os.urandom(8).hex()}"
                    handles[key] = os.memfd_create(name)
                    places[key] = os.getpid(), handles[key], name
                    # Reserve it: otherwise the first use of a page that the system does not have
                    # is a SIGBUS.
                    os.posix_fallocate(handles[key], 0, size(key))
        except OSError as error:
            lack = f"has no memory to share ({error})"
        offered = _from_all(mesh, "shared memory", places, lack)
        if offered is None:
            return {}
        try:
            for key, group in groups.items():
                memory = _opened(offered[mesh.ranks.index(dist.get_global_rank(group, 0))][key])
                found[key] = make(key, memory, library)
        except (OSError, ValueError) as error:
            lack = f"cannot open the memory of another ({error})"
        if _from_all(mesh, "shared memory is open", None, lack) is None:
            return {}
    finally:
        for handle in handles.values():
            os.close(handle)
    return found


# A process, its descriptor of the memory, and the memory's name.
MemoryHandle = tuple[int, int, str]


def _opened(place: MemoryHandle) -> mmap.mmap:
    pid, descriptor, name = place
    path = f"/proc/{pid}/fd/{descriptor}"
    if name not in (target := os.readlink(path)):  # process ids differ between containers
        raise ValueError(f"{path} is {target}")
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, 0)
    finally:
        os.close(handle)


def _from_all(mesh: Mesh, key: str, value: Any, lack: str) -> list[Any] | None:
    """Every rank's value; None on every rank, with a warning, if one rank lacks something."""
    everyone = [json.loads(text) for text in exchange(mesh, key, json.dumps([value, lack]))]
    lacks = [
        f"rank {rank} {of_rank}"
        for rank, (_, of_rank) in zip(mesh.ranks, everyone, strict=True)
        if of_rank
    ]
    if lacks:
        _say(mesh, "; ".join(lacks))
        return None
    return [value for value, _ in everyone]


def _say(mesh: Mesh, why: str) -> None:
    warnings.warn(
        f"FTP_SHM=1, but the collectives of the mesh {mesh} stay with gloo: {why}.", stacklevel=2
    )


def is_asked_for() -> bool:
    """Whether ``FTP_SHM=1``; ranks compare their environments before they run a program."""
    return os.environ.get("FTP_SHM") == "1"


def failure_of(
    what: str, found: int, timeout: float, ranks: Sequence[int]
) -> dist.DistBackendError:
    """The error for a code of the library.

    Args:
        ranks: the global ranks that the code may name.
    """
    if found == -1:
        why = f"a rank did not come within {timedelta(seconds=timeout)}"
    elif found == -2:
        why = "another rank failed, or was told to stop"
    else:
        why = f"rank {ranks[-16 - found]} has ended"
    # torch's own collectives raise this type: `Calls.explain` recognises it, and asks which rank is
    # missing.
    return dist.DistBackendError(f"The {what} through shared memory failed: {why}.")


@cache
def _library() -> ctypes.CDLL | None:
    source = Path(__file__).with_name("shared_memory.c")
    library = compiled(source, "ftp_collective", "ftp_post", "ftp_await")
    if library is None:
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ftp_collective.argtypes = [
        pointer,
        number,
        number,
        size,
        pointer,
        pointer,
        size,
        number,
        number,
        number,
        ctypes.c_double,
    ]
    library.ftp_collective.restype = number
    library.ftp_post.argtypes = [pointer, ctypes.c_int64]
    library.ftp_await.argtypes = [pointer, ctypes.c_int64, pointer, ctypes.c_double]
    library.ftp_await.restype = number
    return library
