"""All-reduces of ranks on one machine through memory that they share, in place of gloo's sockets; with ``FTP_SHM=1``.

The ranks of a mesh agree once, through the store, whether all of them can: on one host, with a C compiler, and all asked to. The memory has
no name any more by then, so that nothing is left of it, however the ranks end. A rank that dies, is late, or is told to stop makes the
others raise.
"""

import ctypes
import hashlib
import json
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from ftp.agreement import exchange, interrupts
from ftp.discovery import cache_folder
from ftp.mesh import START_TIMEOUT, Mesh
from ftp.passes.alias import WAIT
from ftp.passes.copies import copied
from ftp.passes.pack import ALL_REDUCE

SLOT_BYTES = 4 << 20  # of a part of a tensor; two slots a rank
_HEADER_BYTES = 128
_KINDS = {torch.float32: 0, torch.float64: 1, torch.int64: 2}
_OPS = {"sum": 0, "max": 1, "min": 2}
_SOURCE = Path(__file__).with_suffix(".c")


class SharedGroup:
    """The memory of one process group, and this rank's place in it."""

    def __init__(self, group: dist.ProcessGroup, path: str, library: ctypes.CDLL):
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self._run = library.ftp_all_reduce
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.c_int64.from_address(self._base + _HEADER_BYTES * (1 + self.rank) + 8).value = os.getpid()

    def stop(self) -> None:
        """Makes every rank's all-reduces fail, one that is under way included."""
        ctypes.c_int64.from_address(self._base).value = 1

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        nbytes = x.numel() * x.element_size()
        if not nbytes:
            return out
        timeout = self.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        kind = _KINDS[x.dtype]
        found = self._run(self._base, self.ranks, self.rank, SLOT_BYTES, x.data_ptr(), out.data_ptr(), nbytes, kind, _OPS[op], timeout)
        if found:
            self.stop()
            raise RuntimeError(f"An all-reduce through shared memory failed: {self._why(found, timeout)}.")
        return out

    def _why(self, found: int, timeout: float) -> str:
        if found == -1:
            return f"a rank did not come within {timedelta(seconds=timeout)}"
        return "another rank failed, or was told to stop" if found == -2 else f"rank {-16 - found} of the group has ended"


_groups: dict[str, SharedGroup] = {}


def shared_groups(mesh: Mesh) -> dict[str, SharedGroup]:
    """By the name of its process group each axis' memory; empty where a rank of the mesh cannot. All ranks of the mesh call it together."""
    assert mesh.torch is not None
    if not is_asked_for():
        return {}
    library = _library()
    here = socket.gethostname() if library is not None and mesh.device_type == "cpu" else None
    if any(host != here or host is None for host in map(json.loads, exchange(mesh, "hosts", json.dumps(here), START_TIMEOUT))):
        return {}
    assert library is not None
    found, paths = {}, {}
    for axis in mesh.axis_names:
        group = mesh.torch.get_group(axis)
        size = _HEADER_BYTES * (1 + group.size()) + 2 * SLOT_BYTES * group.size()
        if group.rank() == 0:
            handle, paths[axis] = tempfile.mkstemp(prefix="ftp-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            os.truncate(handle, size)
            os.close(handle)
    made = [json.loads(text) for text in exchange(mesh, "shared memory", json.dumps(paths), START_TIMEOUT)]
    for axis in mesh.axis_names:
        group = mesh.torch.get_group(axis)
        first = mesh.ranks.index(dist.get_global_rank(group, 0))
        found[mesh.group_name(axis)] = SharedGroup(group, made[first][axis], library)
    exchange(mesh, "shared memory is open", "", START_TIMEOUT)
    for path in paths.values():
        os.unlink(path)
    _groups.update(found)
    return found


def is_asked_for() -> bool:
    """Read from the environment, which must be the same for all ranks."""
    return os.environ.get("FTP_SHM") == "1"


def stop() -> None:
    """Makes this process' all-reduces through shared memory raise, and those of its peers."""
    for group in _groups.values():
        group.stop()


interrupts.append(stop)


def through_memory(graph: fx.Graph, groups: dict[str, SharedGroup]) -> fx.Graph:
    """The graph with all-reduces over these groups done in shared memory, of the dtypes that it knows."""
    new, _ = copied(graph)
    for node in list(new.nodes):
        if node.target is ALL_REDUCE and node.args[2] in groups and node.args[1] in _OPS and node.meta["collective"].dtype in _KINDS:
            node.target = torch.ops.ftp.all_reduce_in_memory.default
            for user in list(node.users):
                if user.target is WAIT:
                    user.replace_all_uses_with(node)
                    new.erase_node(user)
    return new


@torch.library.custom_op("ftp::all_reduce_in_memory", mutates_args=())
def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _groups[group].all_reduce(x, op)


@_all_reduce.register_fake
def _(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled code, kept by the hash of its source; None without a C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    source = _SOURCE.read_bytes()
    folder = cache_folder() / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    built = folder / f"shared_memory-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not built.exists():
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        if subprocess.run([compiler, "-O3", "-shared", "-fPIC", "-o", name, str(_SOURCE)], capture_output=True).returncode:
            return None
        os.replace(name, built)
    library = ctypes.CDLL(str(built))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.ftp_all_reduce.argtypes = [
        pointer,
        ctypes.c_int,
        ctypes.c_int,
        size,
        pointer,
        pointer,
        size,
        *[ctypes.c_int] * 2,
        ctypes.c_double,
    ]
    library.ftp_all_reduce.restype = ctypes.c_int
    return library
