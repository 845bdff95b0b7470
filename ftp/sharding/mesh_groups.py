"""The process groups of a mesh: along its axes, over products of axes, and their timeouts."""

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
        longer = NCCL_LONGER if mesh.device_type == "cuda" and talks_nccl() else 0.0
        set_group_timeout(process_groups(mesh), timedelta(seconds=seconds + longer))


def process_groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """This rank's groups along the axes, and over the products of axes that have a group."""
    assert mesh.torch is not None
    return [
        *mesh.torch.get_all_groups(),
        *(group for (of, _), group in product_groups.items() if of == mesh),
    ]


def product_group(mesh: Mesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """This rank's group over the product of some axes. The first call makes the group; all ranks of
    the mesh make it together.
    """
    key = mesh, tuple(axes)
    if key not in product_groups:
        here = require_coordinate(mesh)
        at = zip(mesh.ranks, mesh.coordinates(), strict=True)
        ranks = [
            rank
            for rank, there in at
            if all(there[a] == here[a] for a in mesh.axis_names if a not in axes)
        ]
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup) and mesh.torch is not None
        if dist.get_backend() != "fake":
            set_group_timeout([group], timeout_of(mesh.torch.get_group(axes[0])))
        product_groups[key] = group
    return product_groups[key]
