"""``reshard``: placed tensors to other specs, and to other meshes."""

from functools import lru_cache
from typing import Any

import torch

from ftp.api.shard import spmd
from ftp.api.step import Step
from ftp.distributed.shared_errors import raise_on_all_ranks
from ftp.sharding.mesh import AnyMesh, Mesh, resolve
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.device_put import device_put
from ftp.tensors.placement import placed, placement, placement_of, remember
from ftp.tensors.reshard_across_meshes import relocate
from ftp.tensors.sharded_tree import Leaf, check_placement, fitted_tree


def reshard(
    tree: Any,
    mesh: AnyMesh | None,
    old: Any,
    new: Any,
    *,
    new_mesh: AnyMesh | None = None,
    max_bytes: int | None = None,
) -> Any:
    """Reshard tensors from specs ``old`` to specs ``new``, on one mesh or to another.

    On one mesh, each tensor takes the cheapest collectives, one tensor after another. To another
    mesh, or with ``max_bytes``, ranks send each other the parts that they lack. All ranks of either
    mesh call it.

    Args:
        tree: this rank's shards, placed or not; other leaves pass through. On a rank outside
            ``mesh``: meta tensors of the global shapes, or anything with a shape and a dtype.
        mesh: where the tensors are; None is that of ``ftp.use_mesh``.
        old, new: spec trees, prefixes of one, or one ``P`` for all.
        new_mesh: where the tensors are to be, if elsewhere: a DeviceMesh of any ranks of the same
            world, or a simulated mesh, which every process that calls holds whole.
        max_bytes: the most bytes of messages that a rank holds at a time; at least 16.

    Returns:
        The tree with shards under ``new``, placed. A rank outside ``new_mesh`` gets meta tensors of
        the global shapes.

    Raises:
        SpecError: specs that do not fit.
        PlacementError: tensors that are placed with other specs than ``old``.
        MismatchError: ranks that reshard different trees. All before anything is sent.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> w = ftp.device_put(torch.arange(4), mesh, ftp.P("tp"))
    >>> ftp.reshard(w, mesh, ftp.P("tp"), ftp.P())
    tensor([0, 1, 2, 3])
    """
    m = resolve(mesh)
    other = m if new_mesh is None else resolve(new_mesh)
    if other != m or max_bytes is not None:
        return relocate(tree, m, other, old, new, max_bytes)
    with raise_on_all_ranks(m):
        before = fitted_tree(tree, m, old)
        after = before.with_specs(m, new)
        check_placement(before)
    # One leaf at a time: each has its own order of the axes, and only one is in flight.
    return before.unflatten(
        _resharded(source, target.spec, m)
        for source, target in zip(before.leaves, after.leaves, strict=True)
    )


def _resharded(leaf: Leaf, spec: PartitionSpec, mesh: Mesh) -> Any:
    if not isinstance(leaf.value, torch.Tensor):
        return leaf.value
    resharded = _by_program(leaf.value, mesh, leaf.spec, spec)
    if resharded is leaf.value or not (
        leaf.value.requires_grad or isinstance(leaf.value, torch.nn.Parameter)
    ):
        return resharded
    where = placement_of(resharded)
    assert where is not None
    return placed(resharded, leaf.value, mesh, where.spec, where.shape)


def _by_program(
    leaf: torch.Tensor, mesh: Mesh, old: PartitionSpec, new: PartitionSpec
) -> torch.Tensor:
    if old == new and mesh.kind != "abstract":
        return device_put(leaf, mesh, new) if mesh.kind == "simulated" else leaf
    if mesh.kind != "abstract" and leaf.dtype not in _SENT_AS_IS:
        return _resharded_as_bytes(leaf, mesh, old, new)
    return _reshard_step(mesh, _shortest(old), _shortest(new))(leaf)


# Dtypes that every backend can send, and that every op which only moves elements has a kernel for.
_SENT_AS_IS = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def _resharded_as_bytes(
    leaf: torch.Tensor, mesh: Mesh, old: PartitionSpec, new: PartitionSpec
) -> torch.Tensor:
    raw = leaf.detach().contiguous().unsqueeze(-1).view(torch.uint8)
    if (known := placement_of(leaf)) is not None:
        remember(raw, placement(mesh, old, (*known.shape, leaf.dtype.itemsize)))
    raw = _by_program(raw, mesh, old, new)
    arrived = placement_of(raw)
    assert arrived is not None
    return remember(
        raw.contiguous().view(leaf.dtype).squeeze(-1), placement(mesh, new, arrived.shape[:-1])
    )


def _shortest(spec: PartitionSpec) -> PartitionSpec:
    """The spec without trailing ``None``, so that one step serves tensors of any rank."""
    cut = [dim for dim, entry in enumerate(spec) if entry is not None]
    return PartitionSpec(*list(spec)[: cut[-1] + 1]) if cut else PartitionSpec()


@lru_cache(maxsize=1024)
def _reshard_step(mesh: Mesh, old: PartitionSpec, new: PartitionSpec) -> Step:
    step = spmd(lambda tree: tree.clone(), mesh, (old,), new, bucket=False)
    step._cache.expects_many = True
    return step
