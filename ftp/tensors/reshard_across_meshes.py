"""``reshard`` between meshes: the ranks of both agree on the transfers, then exchange boxes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.distributed.shared_errors import all_gather_object
from ftp.errors import InputError, MeshError, MismatchError
from ftp.sharding.mesh import Mesh
from ftp.tensors.placement import placed
from ftp.tensors.sharded_tree import ShardedTree, check_fit, sharded_tree, with_agreed_shapes
from ftp.tensors.transfer import ALIGNMENT, ReshardedTensor, reshard_shards


def relocate(
    tree: Any, old: Mesh, new: Mesh, before: Any, after: Any, max_bytes: int | None
) -> Any:
    """``ftp.reshard`` between meshes, or with a bound on memory."""
    both = _both(old, new)
    is_here = old.kind != "process" or old.coordinate is not None
    try:
        _check_bytes(max_bytes)
        sources = sharded_tree(tree, old, before, holds="shards" if is_here else "shapes")
        targets = sources.with_specs(new, after)
        _check_values(sources, is_here)
        told: Any = sources.digest() if is_here else None
    except Exception as e:
        sources, targets, told = None, None, e
    digests = all_gather_object(both, "reshard", told, None)
    assert sources is not None and targets is not None
    try:
        if is_here:
            known = [d for d in digests if d is not None]
            sources = with_agreed_shapes(sources, "reshard", known, None)
            targets = targets.with_shapes(leaf.shape for leaf in sources.leaves)
            check_fit(targets)
        facts: Any = _facts(sources, targets)
    except Exception as e:
        facts = e
    _check_equal(facts, sources.names, both, max_bytes)
    return targets.unflatten(_sent(sources, targets, is_here, max_bytes))


def _sent(
    sources: ShardedTree, targets: ShardedTree, is_here: bool, max_bytes: int | None
) -> list[Any]:
    """The leaves on the new mesh. All ranks agree before anything is sent."""
    pairs = zip(sources.leaves, targets.leaves, strict=True)
    tensors = [(i, a, b) for i, (a, b) in enumerate(pairs) if a.shape is not None]
    given = [ReshardedTensor(a.known_shape, a.value.dtype, a.spec, b.spec) for _, a, b in tensors]
    shards = [a.value.detach() if is_here else None for _, a, _ in tensors]
    out = sources.values
    resharded = reshard_shards(given, shards, sources.mesh, targets.mesh, max_bytes)
    for (i, leaf, target), shard in zip(tensors, resharded, strict=True):
        shape = leaf.known_shape
        if shard is None:
            out[i] = torch.empty(shape, dtype=leaf.value.dtype, device="meta")
        else:
            out[i] = placed(shard, leaf.value, targets.mesh, target.spec, shape)
    return out


def _both(old: Mesh, new: Mesh) -> Mesh:
    """A mesh of the ranks of two meshes, for agreement; a simulated mesh is in every process."""
    for mesh in (old, new):
        if mesh.kind == "abstract":
            raise MeshError(
                f"The mesh {mesh} is abstract: nothing is stored on it. Give a mesh of processes,"
                " or ftp.simulated_mesh."
            )
    if old.device_type != new.device_type:
        raise MeshError(
            f"The mesh {old} and the new one {new} are of different devices. Copy the tensors with"
            " .to() first."
        )
    processes = [mesh for mesh in (old, new) if mesh.kind == "process"]
    if not processes:
        return Mesh((1,), ("ranks",), old.device_type, "simulated")
    ranks = tuple(sorted({rank for mesh in processes for rank in mesh.ranks}))
    first = processes[0]
    if first.rank not in ranks:
        raise MeshError(
            f"Rank {first.rank} is on neither mesh, {old} and {new}. Call reshard on the ranks of"
            " the two only."
        )
    return Mesh(
        (len(ranks),), ("ranks",), first.device_type, "process", ranks, first.rank, first.world
    )


def _check_values(tree: ShardedTree, is_here: bool) -> None:
    meta = [
        leaf.name
        for leaf in tree.leaves
        if is_here and isinstance(leaf.value, Tensor) and leaf.value.is_meta
    ]
    if meta:
        raise InputError(
            f"{', '.join(meta[:8])}: on the meta device there are no values to reshard."
        )


def _facts(sources: ShardedTree, targets: ShardedTree) -> list[str]:
    """A text per leaf that must be equal on all ranks."""
    return [
        f"{leaf.value!r}"
        if leaf.shape is None
        else f"{leaf.dtype} of shape {leaf.shape}, from {leaf.spec} to {target.spec}"
        for leaf, target in zip(sources.leaves, targets.leaves, strict=True)
    ]


def _check_equal(
    facts: list[str] | Exception, names: Sequence[str], both: Mesh, max_bytes: int | None
) -> None:
    """Raise on all ranks if they would reshard different trees."""
    is_error = isinstance(facts, Exception)
    told = (
        facts
        if is_error
        else hashlib.sha256(json.dumps([names, facts, max_bytes]).encode()).hexdigest()
    )
    digests = all_gather_object(both, "reshard/facts", told, None)
    if is_error or len(set(digests)) == 1:
        return
    everyone = all_gather_object(
        both, "reshard/all", [[*names, "max_bytes"], [*facts, str(max_bytes)]], None
    )
    for rank, other in zip(both.ranks, everyone, strict=True):
        for i, (a, b) in enumerate(
            zip(zip(*everyone[0], strict=True), zip(*other, strict=True), strict=False)
        ):
            if a != b:
                raise MismatchError(
                    f"Ranks would reshard different trees, at leaf {i}: rank {both.ranks[0]} has"
                    f" {a[0]}: {a[1]}; rank {rank} {b[0]}: {b[1]}."
                    " Give all ranks the same; those outside the old mesh meta tensors of the"
                    " global shapes."
                )
    raise MismatchError("Ranks would reshard trees of different sizes. Give all ranks the same.")


def _check_bytes(max_bytes: Any) -> None:
    if max_bytes is not None and (
        not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < ALIGNMENT
    ):
        raise InputError(f"max_bytes={max_bytes!r}: give an int of at least {ALIGNMENT}, or None.")
