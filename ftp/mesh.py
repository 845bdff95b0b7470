"""Meshes: named axes, this process' place on them, and the process groups along them."""

import hashlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from ftp.errors import MeshError
from ftp.launcher import Launched, launched

DEVICE_TYPES = ("cpu", "cuda")
START_TIMEOUT = 300.0  # seconds; torchtitan's figure for the first step, which compiles and connects
STEP_TIMEOUT = 100.0  # seconds; torchtitan's figure for later ones
NCCL_LONGER = 30.0  # seconds


@dataclass(frozen=True)
class Timeouts:
    """How many seconds a rank waits for the others: to the end of a program's first run, and in any later run."""

    start: float = START_TIMEOUT
    step: float = STEP_TIMEOUT


@dataclass(frozen=True)
class AbstractMesh:
    """A mesh without processes or devices: enough to plan a program for any number of ranks.

    >>> mesh = AbstractMesh((64, 16), ("dp", "tp"), device_type="cuda")
    >>> mesh.axes, mesh.size()
    ({'dp': 64, 'tp': 16}, 1024)

    Source: JAX, ``jax.sharding.AbstractMesh``.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    device_type: str = "cpu"

    def __post_init__(self):
        object.__setattr__(self, "shape", _tuple(self.shape))
        object.__setattr__(self, "axis_names", _tuple(self.axis_names))
        _check(self.shape, self.axis_names, self.device_type, (*DEVICE_TYPES, "meta"), type(self).__name__)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by axis name, in order."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    def __getitem__(self, axis_names: str | tuple[str, ...]) -> Self:
        """The mesh of some of the axes alone, in this mesh's order, as a DeviceMesh gives it.

        >>> AbstractMesh((4, 2), ("dp", "tp"))["tp"]
        AbstractMesh(shape=(2,), axis_names=('tp',), device_type='cpu')
        """
        names = _tuple(axis_names)
        for name in names:
            if name not in self.axis_names:
                raise MeshError(f"The mesh has no axis {name!r}; its axes are {_describe(self.shape, self.axis_names)}.")
        if not names or list(names) != [name for name in self.axis_names if name in names]:
            raise MeshError(f"mesh[{axis_names!r}]: name axes of {_describe(self.shape, self.axis_names)} once each, in this order.")
        return replace(self, shape=tuple(self.axes[name] for name in names), axis_names=names)


@dataclass(frozen=True)
class SimulatedMesh(AbstractMesh):
    """A mesh whose ranks all live in this process: global arrays in, global arrays out."""


@dataclass(frozen=True)
class Mesh:
    """What the engine knows of a mesh, as a value; `resolve` makes it from any kind of mesh.

    ``ranks`` are the global ranks, row-major, and ``rank`` is this process' own; both are of process meshes only.
    Two meshes of the same ranks are equal within one life of the default process group, whatever groups they made.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    device_type: str
    kind: Literal["abstract", "simulated", "process"]
    ranks: tuple[int, ...] = ()
    rank: int = 0
    world: int = 0
    groups: tuple[str, ...] = field(default=(), compare=False, repr=False)
    torch: DeviceMesh | None = field(default=None, compare=False, repr=False)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by axis name, in order."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def coordinate(self) -> dict[str, int] | None:
        """This process' position on each axis; None without processes and for a rank outside the mesh."""
        return self.coordinates()[self.ranks.index(self.rank)] if self.rank in self.ranks else None

    def coordinates(self) -> list[dict[str, int]]:
        """The position of every rank, row-major.

        >>> resolve(simulated_mesh((1, 2), ("dp", "tp"))).coordinates()
        [{'dp': 0, 'tp': 0}, {'dp': 0, 'tp': 1}]
        """
        return [dict(zip(self.axis_names, at, strict=True)) for at in product(*map(range, self.shape))]

    def group_name(self, axis: str, *others: str) -> str:
        """The name that functional collectives along an axis take; of a process group, it differs from rank to rank.

        Of the product of several axes it is one that stands for `product_group` until a run, as making a group takes all ranks.
        """
        for name in (axis, *others):
            if name not in self.axis_names:
                raise MeshError(f"The mesh has no axis {name!r}; its axes are {_describe(self.shape, self.axis_names)}.")
        if self.kind != "process" or others:
            return f"sim:{' × '.join((axis, *others))}"
        require_coordinate(self)
        return self.groups[self.axis_names.index(axis)]

    def __str__(self) -> str:
        return f"{_describe(self.shape, self.axis_names)} on {self.device_type}"


AnyMesh = DeviceMesh | AbstractMesh | Mesh

_current: ContextVar[Mesh | None] = ContextVar("ftp.mesh", default=None)
_resolved: dict[DeviceMesh, Mesh] = {}
_products: dict[tuple[Mesh, tuple[str, ...]], dist.ProcessGroup] = {}
_worlds: list[weakref.ref] = []
_timeouts: dict[int, Timeouts] = {}
endings: list[Callable[[], None]] = []
"""What gives back that without which no process group ends."""


def make_mesh(shape: int | Sequence[int], axis_names: str | Sequence[str], *, device_type: str | None = None) -> DeviceMesh | SimulatedMesh:
    """A mesh over all processes, or over simulated ranks where there are none.

    It uses the default process group if one is initialised; else, where torchrun, srun or mpirun launched this process,
    it initialises one; else the mesh is simulated. ``device_type`` defaults to the process group's, or to
    the accelerator if there is one.

    >>> make_mesh((2, 4), ("dp", "tp"), device_type="cpu").axes
    {'dp': 2, 'tp': 4}
    """
    shape, axis_names = _tuple(shape), _tuple(axis_names)
    device_type = device_type or _default_device_type()
    _check(shape, axis_names, device_type, DEVICE_TYPES, "make_mesh")
    _require_device(device_type, "make_mesh")
    launch = launched()
    if dist.is_initialized():
        world = dist.get_world_size()
    elif launch is not None:
        world = launch.world
    else:
        return SimulatedMesh(shape, axis_names, device_type)
    if math.prod(shape) != world:
        raise MeshError(_wrong_size(shape, axis_names, world))
    if not dist.is_initialized():
        init_process_group(device_type=device_type)
    if device_type == "cuda" and not torch.cuda.is_initialized():
        # Of a process group that others initialised: processes beyond the devices share them, which gloo allows.
        local_rank = dist.get_rank() if launch is None else launch.local_rank
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axis_names)
    # torch gives the groups of the axes its own default of half an hour, not the default group's timeout.
    if dist.get_backend() != "fake":
        world_group = c10d._get_default_group()
        _set_timeout(mesh.get_all_groups(), _timeout_of(world_group))
    return mesh


def simulated_mesh(shape: int | Sequence[int], axis_names: str | Sequence[str], *, device_type: str = "cpu") -> SimulatedMesh:
    """A mesh whose ranks are all simulated in this process, also under torchrun.

    >>> simulated_mesh(3, "tp")
    SimulatedMesh(shape=(3,), axis_names=('tp',), device_type='cpu')
    """
    mesh = SimulatedMesh(_tuple(shape), _tuple(axis_names), device_type)
    _require_device(device_type, "simulated_mesh")
    return mesh


@contextmanager
def use_mesh(mesh: AnyMesh) -> Iterator[AnyMesh]:
    """Supplies ``mesh`` to every call inside that is not given one.

    >>> with use_mesh(simulated_mesh((2,), ("tp",))):
    ...     resolve(None).axes
    {'tp': 2}
    """
    token = _current.set(resolve(mesh))
    try:
        yield mesh
    finally:
        _current.reset(token)


def resolve(mesh: AnyMesh | None) -> Mesh:
    """The engine's view of a mesh; ``None`` takes that of the surrounding `use_mesh`."""
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        current = _current.get()
        if current is None:
            raise MeshError(
                "No mesh is given. Pass one, as ftp.make_mesh((2, 4), ('dp', 'tp')), or call inside `with ftp.use_mesh(mesh):`."
            )
        return current
    if isinstance(mesh, AbstractMesh):
        return Mesh(mesh.shape, mesh.axis_names, mesh.device_type, "simulated" if isinstance(mesh, SimulatedMesh) else "abstract")
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"A mesh is a torch DeviceMesh, an ftp.AbstractMesh, or what ftp.make_mesh or simulated_mesh made, not a {type(mesh).__name__}."
        )
    known = _resolved.get(mesh)
    if known is None or known.world != _world():
        known = _resolved[mesh] = _resolve_device_mesh(mesh)
    return known


def require_coordinate(mesh: Mesh) -> dict[str, int]:
    """This process' position on a mesh of processes; an error if it has none."""
    if mesh.kind != "process":
        raise MeshError(f"The mesh {mesh} is {mesh.kind}: it has no processes, so no rank has a place on it.")
    coordinate = mesh.coordinate
    if coordinate is None:
        raise MeshError(
            f"Rank {mesh.rank} is not on the mesh {mesh}, which holds ranks {_shortened(mesh.ranks)}."
            f" Call the step on those ranks only, or make a mesh that includes rank {mesh.rank}."
        )
    return coordinate


def require_alive(mesh: Mesh) -> None:
    """An error for a mesh of processes whose process group is destroyed, and perhaps replaced."""
    if mesh.kind == "process" and (not dist.is_initialized() or _world() != mesh.world):
        raise MeshError(
            f"The process group of the mesh {mesh} is destroyed. Make the mesh, and the steps on it, anew after init_process_group."
        )


def init_process_group(*, timeout: float = START_TIMEOUT, step_timeout: float | None = None, device_type: str | None = None) -> None:
    """Initialises the default process group from a launcher's environment; `make_mesh` does it with the defaults.

    Every attempt of a launcher that restarts its workers gets keys of its own in the launcher's store, so that none meets the
    addresses of processes that are gone.

    Args:
        timeout: seconds that a rank waits for a missing one, until a program has run once: ranks trace, compile and connect then.
        step_timeout: the same for later runs; default 100, or ``timeout`` where that is less.
        device_type: "cuda" talks NCCL and takes the device of the local rank, or the only one that the process sees; "cpu" talks gloo;
            default: what there is.

    Raises:
        MeshError: without a launcher's environment, with a default process group already there, without a GPU for each process.
    """
    device_type = device_type or _default_device_type()
    _check((1,), ("world",), device_type, DEVICE_TYPES, "init_process_group")
    _require_device(device_type, "init_process_group")
    if dist.is_initialized():
        raise MeshError(f"The default process group is already initialised, with {dist.get_world_size()} ranks; nothing is left to do.")
    launch = launched()
    if launch is None:
        raise MeshError(
            "RANK and WORLD_SIZE are not in the environment. Launch with torchrun --nproc-per-node=N, srun or mpirun,"
            " or simulate: ftp.simulated_mesh."
        )
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(_own_device(launch))
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    if min(timeout, timeout if step_timeout is None else step_timeout) <= 0:
        raise MeshError(f"init_process_group: timeouts are seconds above 0, not {timeout} and {step_timeout}.")
    wait = timedelta(seconds=timeout)
    store, rank, world_size = next(rendezvous(launch.meets_at, timeout=wait))
    # A restarted attempt finds the agent's store as the last one left it, with the addresses of processes that are gone.
    store = c10d.PrefixStore(f"ftp/attempt{restart_count()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=wait)
    _timeouts[_world()] = Timeouts(timeout, min(timeout, STEP_TIMEOUT) if step_timeout is None else step_timeout)
    if device_type == "cuda" and talks_nccl():
        _require_own_gpus()


def destroy_process_group() -> None:
    """Waits for saves and for all ranks, then ends the default process group; where there is none, as in a simulation, for saves.

    A process that ends without it may take a store with it that others still talk to.

    Raises:
        CheckpointError: a save failed of which nobody has asked the result; the process group has ended.

    >>> destroy_process_group()
    """
    failures: list[Exception] = []
    for end in endings:
        try:
            end()
        except Exception as e:
            failures.append(e)
    if dist.is_initialized():
        dist.barrier(device_ids=[torch.cuda.current_device()] if talks_nccl() else None)
        dist.destroy_process_group()
    if failures:
        raise failures[0]


def timeouts() -> Timeouts | None:
    """What `init_process_group` was given; None for a process group that others initialised, whose timeouts are theirs."""
    return _timeouts.get(_world())


def own_timeouts() -> Timeouts:
    """Those of a process group that others initialised."""
    seconds = _timeout_of(c10d._get_default_group()).total_seconds()
    return Timeouts(seconds, seconds)


def set_timeout(mesh: Mesh, seconds: float) -> None:
    """Sets how long a collective on the mesh waits for a missing rank.

    NCCL's own thread ends the process after that time: it waits longer, so that ranks find out first
    who is missing.
    """
    if mesh.torch is not None and mesh.groups and dist.get_backend() != "fake":
        longer = NCCL_LONGER if mesh.device_type == "cuda" and talks_nccl() else 0.0
        _set_timeout(process_groups(mesh), timedelta(seconds=seconds + longer))


def mesh_device(mesh: Mesh) -> torch.device:
    """The device that this process computes on, with its number where it is a GPU that is there."""
    if mesh.device_type == "cuda" and mesh.kind != "abstract" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def check_rank(rank: Any, ranks: Sequence[int], name: str, where: str) -> int:
    """``rank``, one of ``ranks``; True and 1.0 are none, though they equal one."""
    is_int = hasattr(rank, "__index__") and not isinstance(rank, bool)
    if not is_int or rank not in ranks:
        kind = "" if is_int else f", a {type(rank).__name__},"
        raise MeshError(f"{name}={rank!r}{kind} is no rank of {where}, which holds ranks {ranks[0]} to {ranks[-1]}.")
    return int(rank)


def process_groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """This rank's groups along the axes, and over those products of axes for which there is one."""
    assert mesh.torch is not None
    return [*mesh.torch.get_all_groups(), *(group for (of, _), group in _products.items() if of == mesh)]


def product_group(mesh: Mesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """This rank's group over the product of some axes; all ranks of the mesh ask for it together when it is first made."""
    key = mesh, tuple(axes)
    if key not in _products:
        here = require_coordinate(mesh)
        at = zip(mesh.ranks, mesh.coordinates(), strict=True)
        ranks = [rank for rank, there in at if all(there[a] == here[a] for a in mesh.axis_names if a not in axes)]
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup) and mesh.torch is not None
        if dist.get_backend() != "fake":
            _set_timeout([group], _timeout_of(mesh.torch.get_group(axes[0])))
        _products[key] = group
    return _products[key]


def restart_count() -> int:
    """How often the launcher has restarted the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _resolve_device_mesh(mesh: DeviceMesh) -> Mesh:
    names = mesh.mesh_dim_names
    if names is None:
        example = ("dp", "tp", "pp", "cp", "ep")[: mesh.ndim]
        raise MeshError(
            f"The DeviceMesh of shape {tuple(mesh.shape)} has no axis names. Make it with mesh_dim_names={example}, one for each dim."
        )
    shape, device_type = tuple(mesh.shape), mesh.device_type
    _check(shape, names, device_type, DEVICE_TYPES, "DeviceMesh")
    ranks = tuple(mesh.mesh.flatten().tolist())
    resolved = Mesh(shape, tuple(names), device_type, "process", ranks, mesh.get_rank(), _world(), (), mesh)
    coordinate = resolved.coordinate
    if coordinate is None:
        return resolved
    groups = []
    for dim, name in enumerate(names):
        line = mesh.mesh[tuple(slice(None) if d == dim else coordinate[n] for d, n in enumerate(names))].tolist()
        group = mesh.get_group(dim)
        if (order := dist.get_process_group_ranks(group)) != line:
            raise MeshError(
                f"Along axis {name!r} the DeviceMesh holds ranks {line}, but their process group has them as {order}, so that"
                " gathered shards would come out of order. Make the mesh of ranks that ascend along each axis."
            )
        groups.append(group.group_name)
    return Mesh(shape, tuple(names), device_type, "process", ranks, resolved.rank, resolved.world, tuple(groups), mesh)


def _world() -> int:
    """Which default process group this is, counted from 0 in this process; names of groups die with it."""
    if not dist.is_initialized():
        raise MeshError("The process group of this DeviceMesh is destroyed. Make the mesh anew after init_process_group.")
    group = c10d._get_default_group()
    if not _worlds or _worlds[-1]() is not group:
        _resolved.clear()
        _products.clear()
        _worlds.append(weakref.ref(group))
    return len(_worlds) - 1


def _check(shape: tuple[int, ...], axis_names: tuple[str, ...], device_type: str, supported: Sequence[str], where: str) -> None:
    given = f"{where}: shape {shape} with axis names {axis_names}"
    if not all(isinstance(s, int) and not isinstance(s, bool) for s in shape) or not all(isinstance(n, str) and n for n in axis_names):
        raise MeshError(f"{given}: a mesh takes ints for its shape and non-empty strings for its axis names, as (2, 4), ('dp', 'tp').")
    if len(shape) != len(axis_names):
        raise MeshError(f"{given}: {len(shape)} sizes but {len(axis_names)} names. Give each axis one size and one name.")
    repeated = sorted({n for n in axis_names if axis_names.count(n) > 1})
    if repeated:
        raise MeshError(
            f"{given}: axis name {repeated[0]!r} is used {axis_names.count(repeated[0])} times. Give each axis a name of its own."
        )
    for name, size in zip(axis_names, shape, strict=True):
        if size < 1:
            raise MeshError(f"{given}: axis {name!r} has size {size}. A size is at least 1.")
    if device_type not in supported:
        hint = " ('meta' is for ftp.AbstractMesh, which plans without devices)" if device_type == "meta" else ""
        raise MeshError(f"{where}: device type {device_type!r} is not supported{hint}. Supported are {', '.join(map(repr, supported))}.")


def _require_device(device_type: str, where: str) -> None:
    if device_type == "cuda" and not torch.cuda.is_available():
        raise MeshError(
            f"{where}: device type 'cuda', but no CUDA device is visible. Use 'cpu', or plan without devices: ftp.AbstractMesh."
        )


def _wrong_size(shape: tuple[int, ...], axis_names: tuple[str, ...], world: int) -> str:
    need = math.prod(shape)
    message = f"The mesh {_describe(shape, axis_names)} takes {need} ranks, but the world has {world}."
    for dim in reversed(range(len(shape))):
        rest = need // shape[dim]
        if world % rest == 0:
            fitting = (*shape[:dim], world // rest, *shape[dim + 1 :])
            return f"{message}\n  Launch {need} processes (torchrun --nproc-per-node={need}), or give shape {fitting}."
    return f"{message}\n  Launch {need} processes (torchrun --nproc-per-node={need}), or give sizes whose product is {world}."


def talks_nccl() -> bool:
    """Whether tensors on GPUs go through NCCL, as without a backend given where it is there."""
    return "nccl" in c10d.get_backend_config()


def _default_device_type() -> str:
    if dist.is_initialized():
        return "cuda" if talks_nccl() and torch.cuda.is_available() else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_uuid(index: int) -> str:
    """What names a GPU in every process, whichever of them it sees."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _own_device(launch: Launched) -> int:
    devices = torch.cuda.device_count()
    if launch.local_rank < devices:
        return launch.local_rank
    if devices == 1:  # as srun --gpus-per-task=1 shows each process its own
        return 0
    raise MeshError(
        f"LOCAL_RANK is {launch.local_rank}, but this host shows {devices} CUDA devices. Launch at most {devices} processes on it, or"
        " have them share devices, slowly: torch.distributed.init_process_group('gloo') first."
    )


def _require_own_gpus() -> None:
    """Raises on every rank where several have one GPU, which NCCL refuses; ends the process group."""
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
            f"Ranks {', '.join(map(str, shared[0]))} have one GPU. Launch at most one process for each"
            " GPU, or have them share it, slowly: torch.distributed.init_process_group('gloo') first."
        )


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(group._device_types[0]).options._timeout


def _set_timeout(groups: Sequence[dist.ProcessGroup], timeout: timedelta) -> None:
    for group in groups:
        c10d._set_pg_timeout(timeout, group)


def _describe(shape: Sequence[int], axis_names: Sequence[str]) -> str:
    return "(" + ", ".join(f"{name} {size}" for name, size in zip(axis_names, shape, strict=True)) + ")"


def _shortened(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"[{', '.join(map(str, ranks[:8]))}, ..., {ranks[-1]}]"


def _tuple(given) -> tuple:
    return (given,) if isinstance(given, int | str) else tuple(given)
