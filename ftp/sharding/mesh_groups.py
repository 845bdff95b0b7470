"""The process groups of a mesh: along its axes, over products of axes, of pairs of ranks, and their
timeouts.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ftp.sharding.mesh import Mesh, require_coordinate
from ftp.sharding.process_group import (
    NCCL_LONGER,
    product_groups,
    set_group_timeout,
    talks_nccl,
    timeout_of,
)


def set_timeout(mesh: Mesh, seconds: float) -> None:
    """Sets how long a collective on the mesh waits for a missing rank.

    NCCL's watchdog ends the process after its timeout. It gets a longer one, so that ranks first
    find out which rank is missing.
    """
    if mesh.torch is not None and mesh.groups and dist.get_backend() != "fake":
        longer = NCCL_LONGER if uses_nccl(mesh) else 0.0
        set_group_timeout(process_groups(mesh), timedelta(seconds=seconds + longer))


def uses_nccl(mesh: Mesh) -> bool:
    """Whether processes on the mesh talk by NCCL."""
    return mesh.device_type == "cuda" and talks_nccl()


def process_groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """This rank's groups along the axes, and those made for products of axes and pairs of ranks."""
    assert mesh.torch is not None
    return [
        *mesh.torch.get_all_groups(),
        *(group for (of, _), group in product_groups.items() if of == mesh),
    ]


def product_group(mesh: Mesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """This rank's group over the product of some axes. The first call makes the group; all ranks of
    the mesh make it together.
    """
    here = require_coordinate(mesh)
    at = zip(mesh.ranks, mesh.coordinates(), strict=True)
    ranks = [
        rank
        for rank, there in at
        if all(there[a] == here[a] for a in mesh.axis_names if a not in axes)
    ]
    return _made_once(mesh, axes[0], tuple(axes), ranks)


def pair_group(mesh: Mesh, axis: str, pair: tuple[int, int]) -> dist.ProcessGroup:
    """A group along an axis for what one rank sends to another one. The first call makes the group;
    all ranks along the axis make it together: torch names a group by how many a process has.
    """
    assert mesh.torch is not None
    along = dist.get_process_group_ranks(mesh.torch.get_group(axis))
    return _made_once(mesh, axis, (axis, *map(str, pair)), along)


def _made_once(
    mesh: Mesh, axis: str, name: tuple[str, ...], ranks: Sequence[int]
) -> dist.ProcessGroup:
    key = mesh, name
    if key not in product_groups:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup) and mesh.torch is not None
        if dist.get_backend() != "fake":
            set_group_timeout([group], timeout_of(mesh.torch.get_group(axis)))
        product_groups[key] = group
    return product_groups[key]
