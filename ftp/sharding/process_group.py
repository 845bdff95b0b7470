"""The default process group: its start, its end and its timeouts."""

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from ftp.dataclass import dataclass
from ftp.errors import CollectiveError, FtpError, MeshError
from ftp.sharding.launcher import Launched, launched
from ftp.torch_internals.process_groups import get_default_group, set_pg_timeout

DEVICE_TYPES = ("cpu", "cuda")
# Seconds; torchtitan's figures for the first step, which compiles and connects, and for later ones.
START_TIMEOUT = 300.0
STEP_TIMEOUT = 100.0
NCCL_LONGER = 30.0  # seconds
_TOLD = 1.0  # seconds after a failed barrier, in which another rank may say why


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a rank waits for the others: until the end of a program's first run, and in
    later runs.
    """

    start: float = START_TIMEOUT
    step: float = STEP_TIMEOUT


resolved_meshes: dict[DeviceMesh, Any] = {}
product_groups: dict[tuple[Any, tuple[str, ...]], dist.ProcessGroup] = {}
_worlds: list[weakref.ref] = []
_timeouts: dict[int, Timeouts] = {}
endings: list[Callable[[], None]] = []
"""Called before the default process group ends, to release objects that would keep it alive."""
releases: list[Callable[[], None]] = [resolved_meshes.clear, product_groups.clear]
"""Called before the default process group ends, or when the next one is first met, to release what
belongs to it: threads, connections, groups, memory.
"""
failed: list[Callable[[], tuple[bool, FtpError | None]]] = []
"""Called when the default process group ends. Each returns whether a mesh has failed, so that ranks
cannot wait for each other, and the reason if no exception has been raised for it.
"""


def init_process_group(
    *,
    timeout: float = START_TIMEOUT,
    step_timeout: float | None = None,
    device_type: str | None = None,
) -> None:
    """Initialise the default process group from the environment of torchrun, srun or mpirun.
    ``make_mesh`` does it with the defaults.

    Each restart by a launcher uses its own keys in the launcher's store, so that it does not find
    the addresses of processes that have ended.

    Args:
        timeout: seconds that a rank waits for a missing one until the first run of a program has
            ended, while ranks trace, compile and connect.
        step_timeout: seconds that it waits in later runs; default 100, or ``timeout`` if less.
        device_type: "cuda" uses NCCL, and the device of the local rank, or the only one that the
            process sees; "cpu" uses gloo. Default: "cuda" where there is a GPU.

    Raises:
        MeshError: no launcher's environment, a default process group that is there already, no GPU
            for each process, or timeouts that are not positive.

    >>> init_process_group(timeout=600.0)  # without a launcher
    Traceback (most recent call last):
    ftp.errors.MeshError: RANK and WORLD_SIZE are not in the environment. Launch with torchrun ...
    """
    device_type = device_type or default_device_type()
    check_mesh_shape((1,), ("world",), device_type, DEVICE_TYPES, "init_process_group")
    require_device(device_type, "init_process_group")
    if dist.is_initialized():
        raise MeshError(
            f"The default process group is already initialised, with {dist.get_world_size()}"
            " ranks; nothing is left to do."
        )
    launch = launched()
    if launch is None:
        raise MeshError(
            "RANK and WORLD_SIZE are not in the environment. Launch with torchrun"
            " --nproc-per-node=N, srun or mpirun,"
            " or simulate: ftp.simulated_mesh."
        )
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(_own_device(launch))
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    if min(timeout, timeout if step_timeout is None else step_timeout) <= 0:
        raise MeshError(
            f"init_process_group: timeouts are seconds above 0, not {timeout} and {step_timeout}."
        )
    wait = timedelta(seconds=timeout)
    store, rank, world_size = next(rendezvous(launch.meets_at, timeout=wait))
    # After a restart the agent's store still has the last attempt's keys, with the addresses of
    # processes that have ended.
    store = c10d.PrefixStore(f"ftp/attempt{restart_count()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=wait)
    _timeouts[current_world()] = Timeouts(
        timeout, min(timeout, STEP_TIMEOUT) if step_timeout is None else step_timeout
    )
    if device_type == "cuda" and talks_nccl():
        _require_own_gpus()


def destroy_process_group() -> None:
    """Wait for saves and for all ranks, then destroy the default process group. Without one, as in
    a simulation, wait for saves only.

    A process that ends without this call may end the store that others still use.

    After a failure that a call has raised, it does not wait for other ranks. The
    process group is destroyed in any case.

    Raises:
        CheckpointError: a save failed whose result was never asked for.
        CollectiveError, MismatchError: a rank has ended or failed, and no call has raised it.

    >>> destroy_process_group()
    """
    failures: list[Exception] = []
    for end in endings:
        try:
            end()
        except Exception as e:
            failures.append(e)
    if dist.is_initialized():
        failures += _wait_for_all()
        _release()
        dist.destroy_process_group()
    if failures:
        raise failures[0]


def _release() -> None:
    for release in releases:
        release()


def _wait_for_all() -> list[Exception]:
    """Wait for all ranks. Returns the errors why some do not come that no call has raised."""
    found = [end() for end in failed]
    if not any(has_failed for has_failed, _ in found):
        try:
            dist.barrier(device_ids=[torch.cuda.current_device()] if talks_nccl() else None)
        except RuntimeError as e:
            until = time.monotonic() + _TOLD
            while not any(has_failed for has_failed, _ in found) and time.monotonic() < until:
                time.sleep(0.05)
                found = [end() for end in failed]
            if not any(has_failed for has_failed, _ in found):
                why = CollectiveError(
                    "A rank has ended, or has destroyed its process group, before it came to"
                    f" destroy_process_group, where rank {dist.get_rank()} waited for it: {e}"
                )
                why.__cause__ = e
                return [why]
    return [failure for _, failure in found if failure is not None]


def timeouts() -> Timeouts | None:
    """The timeouts given to ftp's `init_process_group`; None where torch's was called."""
    return _timeouts.get(current_world())


def own_timeouts() -> Timeouts:
    """The timeouts of a process group that torch's ``init_process_group`` made."""
    seconds = timeout_of(get_default_group()).total_seconds()
    return Timeouts(seconds, seconds)


def restart_count() -> int:
    """The number of times that the launcher has restarted the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def current_world() -> int:
    """The number of the default process group, counted from 0 in this process. Names of groups are
    valid within one default process group.
    """
    if not dist.is_initialized():
        raise MeshError(
            "The process group of this DeviceMesh is destroyed. Make the mesh anew after"
            " init_process_group."
        )
    group = get_default_group()
    if not _worlds or _worlds[-1]() is not group:
        _worlds.append(weakref.ref(group))
        _release()
    return len(_worlds) - 1


def check_mesh_shape(
    shape: tuple[int, ...],
    axis_names: tuple[str, ...],
    device_type: str,
    supported: Sequence[str],
    where: str,
) -> None:
    given = f"{where}: shape {shape} with axis names {axis_names}"
    if not all(isinstance(s, int) and not isinstance(s, bool) for s in shape) or not all(
        isinstance(n, str) and n for n in axis_names
    ):
        raise MeshError(
            f"{given}: a mesh takes ints for its shape and non-empty strings for its axis names,"
            " as (2, 4), ('dp', 'tp')."
        )
    if len(shape) != len(axis_names):
        raise MeshError(
            f"{given}: {len(shape)} sizes but {len(axis_names)} names. Give each axis one size and"
            " one name."
        )
    repeated = sorted({n for n in axis_names if axis_names.count(n) > 1})
    if repeated:
        raise MeshError(
            f"{given}: axis name {repeated[0]!r} is used {axis_names.count(repeated[0])} times."
            " Give each axis its own name."
        )
    for name, size in zip(axis_names, shape, strict=True):
        if size < 1:
            raise MeshError(f"{given}: axis {name!r} has size {size}. A size is at least 1.")
    if device_type not in supported:
        hint = (
            " ('meta' is for ftp.AbstractMesh, which plans without devices)"
            if device_type == "meta"
            else ""
        )
        raise MeshError(
            f"{where}: device type {device_type!r} is not supported{hint}. Supported are"
            f" {', '.join(map(repr, supported))}."
        )


def require_device(device_type: str, where: str) -> None:
    if device_type == "cuda" and not torch.cuda.is_available():
        raise MeshError(
            f"{where}: device type 'cuda', but no CUDA device is visible. Use 'cpu', or plan"
            " without devices: ftp.AbstractMesh."
        )


def talks_nccl() -> bool:
    """Whether collectives on GPU tensors use NCCL."""
    return "nccl" in c10d.get_backend_config()


def default_device_type() -> str:
    if dist.is_initialized():
        return "cuda" if talks_nccl() and torch.cuda.is_available() else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_uuid(index: int) -> str:
    """A GPU's id, equal in all processes even if they index it differently."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _own_device(launch: Launched) -> int:
    devices = torch.cuda.device_count()
    if launch.local_rank < devices:
        return launch.local_rank
    if devices == 1:  # as srun --gpus-per-task=1 shows each process its own
        return 0
    raise MeshError(
        f"LOCAL_RANK is {launch.local_rank}, but this host shows {devices} CUDA devices. Launch at"
        f" most {devices} processes on it, or"
        " have them share devices, slowly: torch.distributed.init_process_group('gloo') first."
    )


def _require_own_gpus() -> None:
    """Raise on every rank if several ranks use one GPU, which NCCL refuses; destroys the process
    group then.
    """
    uuid = gpu_uuid(torch.cuda.current_device()).encode()
    name = int.from_bytes(hashlib.blake2b(uuid, digest_size=7).digest())
    names = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(names, torch.tensor([name]))
    ranks: dict[int, list[int]] = {}
    for rank, held in enumerate(names):
        ranks.setdefault(int(held), []).append(rank)
    if shared := [held for held in ranks.values() if len(held) > 1]:
        dist.destroy_process_group()
        raise MeshError(
            f"Ranks {', '.join(map(str, shared[0]))} have one GPU. Launch at most one process for"
            " each"
            " GPU, or have them share it, slowly: torch.distributed.init_process_group('gloo')"
            " first."
        )


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(group._device_types[0]).options._timeout


def set_group_timeout(groups: Sequence[dist.ProcessGroup], timeout: timedelta) -> None:
    for group in groups:
        set_pg_timeout(timeout, group)
