"""Make a mesh over the processes that there are, or over simulated ranks."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ftp.errors import MeshError
from ftp.sharding.launcher import launched
from ftp.sharding.mesh import SimulatedMesh, as_tuple, describe_axes
from ftp.sharding.process_group import (
    DEVICE_TYPES,
    check_mesh_shape,
    default_device_type,
    init_process_group,
    require_device,
    set_group_timeout,
    timeout_of,
)
from ftp.torch_internals.process_groups import get_default_group


def make_mesh(
    shape: int | Sequence[int], axis_names: str | Sequence[str], *, device_type: str | None = None
) -> DeviceMesh | SimulatedMesh:
    """A mesh over all processes, or over simulated ranks where there are none.

    It uses the default process group if one is initialised. Where torchrun, srun or mpirun launched
    this process, it initialises one. Otherwise the mesh is simulated.

    Args:
        shape: the size of each axis, or one int; the product is the number of processes.
        axis_names: a name for each axis, or one str.
        device_type: "cpu" or "cuda"; default the process group's, or "cuda" where there is a GPU.

    Returns:
        A torch DeviceMesh, or a simulated mesh.

    Raises:
        MeshError: a shape that does not fit the processes, or a device that is not there.

    >>> make_mesh((2, 4), ("dp", "tp"), device_type="cpu").axes
    {'dp': 2, 'tp': 4}
    """
    shape, axis_names = as_tuple(shape), as_tuple(axis_names)
    device_type = device_type or default_device_type()
    check_mesh_shape(shape, axis_names, device_type, DEVICE_TYPES, "make_mesh")
    require_device(device_type, "make_mesh")
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
        # If others initialised the process group, there may be more processes than devices: they
        # share devices, which gloo allows.
        local_rank = dist.get_rank() if launch is None else launch.local_rank
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axis_names)
    # torch gives the groups of the axes its own default of half an hour, not the default group's
    # timeout.
    if dist.get_backend() != "fake":
        world_group = get_default_group()
        set_group_timeout(mesh.get_all_groups(), timeout_of(world_group))
    return mesh


def simulated_mesh(
    shape: int | Sequence[int],
    axis_names: str | Sequence[str],
    *,
    device_type: str = "cpu",
    hosts: Sequence[str] | None = None,
) -> SimulatedMesh:
    """A mesh whose ranks are all simulated in this process, under torchrun too.

    Args:
        shape: the size of each axis, or one int.
        axis_names: a name for each axis, or one str.
        device_type: "cpu" or "cuda": where all ranks' tensors are.
        hosts: as in ``AbstractMesh``: the hosts that the ranks stand for.

    Raises:
        MeshError: sizes and names that do not match, or a device that is not there.

    >>> simulated_mesh(3, "tp")
    SimulatedMesh(shape=(3,), axis_names=('tp',), device_type='cpu')
    """
    mesh = SimulatedMesh(as_tuple(shape), as_tuple(axis_names), device_type, hosts=hosts)
    require_device(device_type, "simulated_mesh")
    return mesh


def _wrong_size(shape: tuple[int, ...], axis_names: tuple[str, ...], world: int) -> str:
    need = math.prod(shape)
    mesh = describe_axes(shape, axis_names)
    message = f"The mesh {mesh} takes {need} ranks, but the world has {world}."
    for dim in reversed(range(len(shape))):
        rest = need // shape[dim]
        if world % rest == 0:
            fitting = (*shape[:dim], world // rest, *shape[dim + 1 :])
            return (
                f"{message}\n  Launch {need} processes (torchrun --nproc-per-node={need}), or"
                f" give shape {fitting}."
            )
    return (
        f"{message}\n  Launch {need} processes (torchrun --nproc-per-node={need}), or give"
        f" sizes whose product is {world}."
    )
