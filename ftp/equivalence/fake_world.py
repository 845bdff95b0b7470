"""A world of fake processes: one rank's view of ``torch.distributed``, without communication."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ftp.errors import MeshError, TraceError
from ftp.sharding.mesh import AnyMesh, Mesh, standing_in
from ftp.source import user_line


@contextmanager
def as_rank(mesh: AnyMesh, resolved: Mesh, rank: int) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh within the block.

    Args:
        mesh: as the user gave it; a DeviceMesh becomes that of the rank.
        resolved: its axes.

    Raises:
        MeshError: this process belongs to a real process group.
    """
    outer = _outer_world()
    if outer is not None:
        dist.destroy_process_group()
    of_mesh: Any = mesh.__dict__ if isinstance(mesh, DeviceMesh) else None
    try:
        made = _device_mesh(resolved.shape, resolved.axis_names, rank)
        if isinstance(mesh, DeviceMesh):
            of_mesh.update(made.__dict__)
            made = mesh
        with standing_in(made), made, _without_polling():
            _forget_dtensor_plans()
            yield made
    finally:
        _forget_dtensor_plans()
        if dist.is_initialized():  # the program may have destroyed it, as a script does
            dist.destroy_process_group()
        if outer is not None:
            again = _device_mesh(resolved.shape, resolved.axis_names, outer)
            if of_mesh is not None:
                of_mesh.update(again.__dict__)


def _forget_dtensor_plans() -> None:
    """Clear DTensor's caches by mesh: the ranks' meshes are equal, their coordinates are not."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


@contextmanager
def _without_polling() -> Iterator[None]:
    """Refuse polling whether a collective has ended: a loop that polls would not end here."""

    def refuse(work: Any) -> bool:
        raise TraceError(
            f"{user_line()}\n  The program asks whether a collective has ended (is_completed), and"
            " the answer depends on time. Wait for it with wait()."
        )

    own = dist.Work.is_completed
    dist.Work.is_completed = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.is_completed = own


def _outer_world() -> int | None:
    """The rank in a fake world that the caller set up; None without a process group."""
    if not dist.is_initialized():
        return None
    if dist.get_backend() != "fake":
        raise MeshError(
            "ftp.equivalent runs the program as every rank in turn, in a fake world, and"
            f" this process belongs to a {dist.get_backend()} process group. Call it in a process"
            " without one, as `python -m ftp prove` and a test do."
        )
    return dist.get_rank()


def _device_mesh(shape: Sequence[int], names: Sequence[str], rank: int) -> DeviceMesh:
    # Import it now: its functions have the world at import time as their default group, and the
    # program may import it while this world, which ends, exists.
    import torch.distributed.nn  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Any = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=math.prod(shape), store=store)
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
