"""Meshes: named axes, this process' coordinate on them, and the process groups along them."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from itertools import product
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.errors import MeshError
from ftp.sharding.launcher import known_hosts
from ftp.sharding.process_group import (
    DEVICE_TYPES,
    check_mesh_shape,
    current_world,
    resolved_meshes,
)


@dataclass(frozen=True)
class AbstractMesh:
    """A mesh without processes or devices, to plan programs for any number of ranks.

    Args:
        shape: the size of each axis, or one int.
        axis_names: a name for each axis, or one str.
        device_type: what programs are planned for: "cpu", "cuda" or "meta".
        hosts: the name of each rank's host, row-major: axes that leave a host are planned with the
            network's link. None: all ranks are on one host.

    Raises:
        MeshError: sizes and names that do not match, names used twice, an unknown device type,
            hosts that are not one per rank.

    >>> mesh = AbstractMesh((64, 16), ("dp", "tp"), device_type="cuda")
    >>> mesh.axes, mesh.size()
    ({'dp': 64, 'tp': 16}, 1024)

    Source: JAX, ``jax.sharding.AbstractMesh``.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    device_type: str = "cpu"
    hosts: Sequence[str] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "shape", as_tuple(self.shape))
        object.__setattr__(self, "axis_names", as_tuple(self.axis_names))
        check_mesh_shape(
            self.shape,
            self.axis_names,
            self.device_type,
            (*DEVICE_TYPES, "meta"),
            type(self).__name__,
        )
        if self.hosts is not None:
            object.__setattr__(self, "hosts", tuple(self.hosts))
            if len(self.hosts) != self.size():
                raise MeshError(
                    f"hosts names {len(self.hosts)}, but the mesh"
                    f" {describe_axes(self.shape, self.axis_names)} has {self.size()} ranks. Give"
                    " the host of each rank, row-major."
                )

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by axis name, in order."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    def __getitem__(self, axis_names: str | tuple[str, ...]) -> Self:
        """The submesh of some axes, in this mesh's order, like a DeviceMesh's.

        >>> AbstractMesh((4, 2), ("dp", "tp"))["tp"]
        AbstractMesh(shape=(2,), axis_names=('tp',), device_type='cpu')
        """
        names = as_tuple(axis_names)
        _require_axes(names, self.shape, self.axis_names)
        if not names or list(names) != [name for name in self.axis_names if name in names]:
            raise MeshError(
                f"mesh[{axis_names!r}]: name axes of"
                f" {describe_axes(self.shape, self.axis_names)} once each, in this order."
            )
        kept = [
            host
            for host, at in zip(self.hosts or (), resolve(self).coordinates(), strict=False)
            if not any(index for axis, index in at.items() if axis not in names)
        ]
        return replace(
            self,
            shape=tuple(self.axes[name] for name in names),
            axis_names=names,
            hosts=kept or None,
        )

    # In a rank program under ftp.equivalent the mesh stands for the rank's DeviceMesh.

    def get_group(self, axis_name: str | None = None) -> dist.ProcessGroup:
        """The process group along an axis, like a DeviceMesh's; only in a rank program under
        ``ftp.equivalent``.
        """
        return self._stand_in.get_group(axis_name)

    def get_local_rank(self, axis_name: str | None = None) -> int:
        """This rank's index along an axis, like a DeviceMesh's; only in a rank program under
        ``ftp.equivalent``.
        """
        return self._stand_in.get_local_rank(axis_name)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The rank's DeviceMesh; only in a rank program under ``ftp.equivalent``."""
        return self._stand_in

    @property
    def _stand_in(self) -> DeviceMesh:
        found = _standing_in.get()
        if found is None:
            raise MeshError(
                f"{describe_axes(self.shape, self.axis_names)} has no process groups: it is a mesh"
                f" without processes. It has them only in a program that ftp.equivalent runs."
            )
        return found[self.axis_names] if self.axis_names != found.mesh_dim_names else found


@dataclass(frozen=True)
class SimulatedMesh(AbstractMesh):
    """A mesh whose ranks are all simulated in this process: global tensors in, global tensors
    out.
    """


@dataclass(frozen=True)
class Mesh:
    """A mesh of any kind as a value; `resolve` makes it.

    Two meshes of the same ranks are equal until the default process group ends, whatever groups
    they made.

    Attributes:
        ranks: the global ranks, row-major; empty without processes.
        rank: this process' global rank.
        world: the number of the default process group, counted in this process.
        groups: the names of this rank's process groups, one for each axis.
        hosts: the host of each rank, row-major; empty if all ranks are on one.
        is_crowded: all ranks are on one host, and are known to be more than the cores that they
            may use.
        is_ascending: whether the ranks ascend, as programs that merge axes need; of one stage of a
            pipeline, whether they do on all stages.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    device_type: str
    kind: Literal["abstract", "simulated", "process"]
    ranks: tuple[int, ...] = ()
    rank: int = 0
    world: int = 0
    groups: tuple[str, ...] = field(default=(), compare=False, repr=False)
    hosts: tuple[str, ...] = field(default=(), compare=False, repr=False)
    is_crowded: bool = field(default=False, compare=False, repr=False)
    is_ascending: bool = field(default=True, compare=False, repr=False)
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
        """This process' index on each axis; None without processes, or outside the mesh."""
        return self.coordinates()[self.ranks.index(self.rank)] if self.rank in self.ranks else None

    def coordinates(self) -> list[dict[str, int]]:
        """The index of every rank on each axis, row-major.

        >>> resolve(SimulatedMesh((1, 2), ("dp", "tp"))).coordinates()
        [{'dp': 0, 'tp': 0}, {'dp': 0, 'tp': 1}]
        """
        return [
            dict(zip(self.axis_names, at, strict=True)) for at in product(*map(range, self.shape))
        ]

    def hosts_along(self, *axes: str) -> list[list[str]]:
        """The hosts of each line of ranks that differ in these axes only, row-major; empty if all
        ranks are on one host.

        >>> mesh = AbstractMesh((2, 2), ("dp", "tp"), hosts=["a", "a", "b", "b"])
        >>> resolve(mesh).hosts_along("dp")
        [['a', 'b'], ['a', 'b']]
        """
        lines: dict[tuple[int, ...], list[str]] = {}
        for host, at in zip(self.hosts, self.coordinates() if self.hosts else (), strict=True):
            lines.setdefault(tuple(i for a, i in at.items() if a not in axes), []).append(host)
        return list(lines.values())

    def group_name(self, axis: str, *others: str) -> str:
        """The group name for functional collectives along an axis; it may differ from rank to rank.
        For the product of several axes it is a placeholder until all ranks make the group before
        the run (`product_group`).
        """
        _require_axes((axis, *others), self.shape, self.axis_names)
        if self.kind != "process" or others:
            return f"sim:{' × '.join((axis, *others))}"
        require_coordinate(self)
        return self.groups[self.axis_names.index(axis)]

    def __str__(self) -> str:
        return f"{describe_axes(self.shape, self.axis_names)} on {self.device_type}"


AnyMesh = DeviceMesh | AbstractMesh | Mesh
_standing_in: ContextVar[DeviceMesh | None] = ContextVar("ftp.sharding.stand_in", default=None)


def standing_in(mesh: DeviceMesh) -> AbstractContextManager[DeviceMesh]:
    """Within the block, meshes without processes stand for ``mesh``."""
    return set_within(_standing_in, mesh)


_current: ContextVar[Mesh | None] = ContextVar("ftp.sharding.mesh", default=None)


@contextmanager
def use_mesh(mesh: AnyMesh) -> Iterator[AnyMesh]:
    """A context in which ``mesh`` is the default of every call that takes a mesh.

    Args:
        mesh: a torch DeviceMesh, or a mesh of ftp.

    Raises:
        MeshError: ``mesh`` is no mesh.

    >>> with use_mesh(SimulatedMesh((2,), ("tp",))):
    ...     resolve(None).axes
    {'tp': 2}
    """
    with set_within(_current, resolve(mesh)):
        yield mesh


def current_mesh() -> Mesh | None:
    """The mesh of the surrounding `use_mesh`, if any."""
    return _current.get()


def resolve(mesh: AnyMesh | None) -> Mesh:
    """A mesh of any kind as a `Mesh`; ``None`` is that of the surrounding `use_mesh`."""
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        current = _current.get()
        if current is None:
            raise MeshError(
                "No mesh is given. Pass one, as ftp.make_mesh((2, 4), ('dp', 'tp')), or call"
                " inside `with ftp.use_mesh(mesh):`."
            )
        return current
    if isinstance(mesh, AbstractMesh):
        return Mesh(
            mesh.shape,
            mesh.axis_names,
            mesh.device_type,
            "simulated" if isinstance(mesh, SimulatedMesh) else "abstract",
            hosts=tuple(mesh.hosts or ()),
        )
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            "A mesh is a torch DeviceMesh, an ftp.AbstractMesh, or what ftp.make_mesh or"
            f" simulated_mesh made, not a {type(mesh).__name__}."
        )
    known = resolved_meshes.get(mesh)
    if known is None or known.world != current_world():
        known = resolved_meshes[mesh] = _resolve_device_mesh(mesh)
    return known


def require_coordinate(mesh: Mesh) -> dict[str, int]:
    """This process' coordinate on a mesh of processes; an error if it is not on the mesh."""
    if mesh.kind != "process":
        raise MeshError(
            f"The mesh {mesh} is {mesh.kind}: it has no processes, so no rank has a place on it."
        )
    coordinate = mesh.coordinate
    if coordinate is None:
        raise MeshError(
            f"Rank {mesh.rank} is not on the mesh {mesh}, which holds ranks"
            f" {_shortened(mesh.ranks)}."
            f" Call the step on those ranks only, or make a mesh that includes rank {mesh.rank}."
        )
    return coordinate


def require_alive(mesh: Mesh) -> None:
    """Raises for a mesh whose process group is destroyed, or replaced."""
    if mesh.kind == "process" and (not dist.is_initialized() or current_world() != mesh.world):
        raise MeshError(
            f"The process group of the mesh {mesh} is destroyed. Make the mesh, and the steps on"
            " it, anew after init_process_group."
        )


def mesh_device(mesh: Mesh) -> torch.device:
    """The device that this process computes on; a GPU with its index, where there is one."""
    if mesh.device_type == "cuda" and mesh.kind != "abstract" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def check_rank(rank: Any, ranks: Sequence[int], name: str, where: str) -> int:
    """``rank``, checked to be an int in ``ranks``; True and 1.0 are refused."""
    is_int = hasattr(rank, "__index__") and not isinstance(rank, bool)
    if not is_int or rank not in ranks:
        kind = "" if is_int else f", a {type(rank).__name__},"
        raise MeshError(
            f"{name}={rank!r}{kind} is no rank of {where}, which holds ranks {ranks[0]} to"
            f" {ranks[-1]}."
        )
    return int(rank)


def _resolve_device_mesh(mesh: DeviceMesh) -> Mesh:
    names = mesh.mesh_dim_names
    if names is None:
        example = ("dp", "tp", "pp", "cp", "ep")[: mesh.ndim]
        raise MeshError(
            f"The DeviceMesh of shape {tuple(mesh.shape)} has no axis names. Make it with"
            f" mesh_dim_names={example}, one for each dim."
        )
    shape, device_type = tuple(mesh.shape), mesh.device_type
    check_mesh_shape(shape, names, device_type, DEVICE_TYPES, "DeviceMesh")
    ranks = tuple(mesh.mesh.flatten().tolist())
    resolved = Mesh(
        shape,
        tuple(names),
        device_type,
        "process",
        ranks,
        mesh.get_rank(),
        current_world(),
        is_ascending=list(ranks) == sorted(ranks),
        torch=mesh,
    )
    for dim, name in enumerate(names):
        lines = mesh.mesh.movedim(dim, -1).reshape(-1, shape[dim]).tolist()
        for line in lines if len(lines) > 1 else ():  # the others' too, so that all ranks raise
            _check_order(name, line, sorted(line))
    coordinate = resolved.coordinate
    if coordinate is None:
        return resolved
    groups = []
    for dim, name in enumerate(names):
        line = mesh.mesh[
            tuple(slice(None) if d == dim else coordinate[n] for d, n in enumerate(names))
        ].tolist()
        group = mesh.get_group(dim)
        _check_order(name, line, dist.get_process_group_ranks(group))
        groups.append(group.group_name)
    hosts = known_hosts(ranks, dist.get_world_size())
    return replace(resolved, groups=tuple(groups), hosts=hosts)


def _check_order(axis: str, line: list[int], held: list[int]) -> None:
    """Raise if the process group of ranks along an axis has them in another order than the mesh;
    torch sorts them.
    """
    if held != line:
        raise MeshError(
            f"Along axis {axis!r} the DeviceMesh holds ranks {line}, but their process group"
            f" has them as {held}, so that gathered shards would come out of order. Make the mesh"
            " of ranks that ascend along each axis."
        )


def describe_axes(shape: Sequence[int], axis_names: Sequence[str]) -> str:
    axes = (f"{name} {size}" for name, size in zip(axis_names, shape, strict=True))
    return f"({', '.join(axes)})"


def _require_axes(names: Sequence[str], shape: Sequence[int], axis_names: Sequence[str]) -> None:
    for name in names:
        if name not in axis_names:
            raise MeshError(
                f"The mesh has no axis {name!r}; its axes are {describe_axes(shape, axis_names)}."
            )


def _shortened(ranks: Sequence[int]) -> str:
    if len(ranks) <= 16:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:8]))}, ..., {ranks[-1]}]"


def as_tuple(given) -> tuple:
    return (given,) if isinstance(given, int | str) else tuple(given)
