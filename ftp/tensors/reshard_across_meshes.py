"""Live trees from one mesh to another: the ranks of both agree on what moves, then send each
other the boxes that differ.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.errors import InputError, MeshError, MismatchError, SpecError, join_failures
from ftp.sharding.dtensor_placements import specs_of_any
from ftp.sharding.mesh import Mesh
from ftp.sharding.pytree import broadcast_specs, dotted, flatten, kind_of, leaf_names, leaf_paths
from ftp.sharding.spec import PartitionSpec, check_spec
from ftp.tensors.boxes import Shape
from ftp.tensors.device_put import leaf_like, mesh_device
from ftp.tensors.global_tree import Shards, agreed, digest, shards_of, share
from ftp.tensors.placement import placement, remember
from ftp.tensors.transfer import ALIGNMENT, Moving, move


def relocate(
    tree: Any, old: Mesh, new: Mesh, before: Any, after: Any, max_bytes: int | None
) -> Any:
    """``ftp.reshard`` between meshes, or with a bound."""
    both = _both(old, new)
    is_here = old.kind != "process" or old.coordinate is not None
    try:
        _check_bytes(max_bytes)
        shards = shards_of(tree, old, before) if is_here else _awaited(tree, before, old)
        targets = _targets(tree, after, shards, new)
        if meta := [
            n
            for n, x in zip(shards.names, shards.leaves, strict=True)
            if is_here and isinstance(x, Tensor) and x.is_meta
        ]:
            raise InputError(
                f"{', '.join(meta[:8])}: on the meta device there are no values to move."
            )
        told: Any = digest(shards) if is_here else None
    except Exception as e:
        shards, targets, told = None, [], e
    digests = share(both, "reshard", told, None)
    assert shards is not None
    try:
        if is_here:
            shards = agreed(shards, old, "reshard", [d for d in digests if d is not None], None)
        _check_fit(shards, targets, new)
        facts: Any = _facts(shards, targets)
    except Exception as e:
        facts = e
    _check_equal(facts, shards.names, both, max_bytes)
    at = [i for i, shape in enumerate(shards.shapes) if shape is not None]
    moving = [
        Moving(_shape(shards, i), shards.leaves[i].dtype, shards.specs[i], targets[i]) for i in at
    ]
    given = [shards.leaves[i].detach() if is_here else None for i in at]
    moved = move(
        moving,
        given,
        old,
        new,
        tuple(sorted(both.ranks)) or (0,),
        both.rank,
        mesh_device(new),
        max_bytes,
    )
    out = list(shards.leaves)
    for i, m, tensor in zip(at, moving, moved, strict=True):
        leaf = out[i]
        if tensor is None:
            out[i] = torch.empty(m.shape, dtype=m.dtype, device="meta")
            continue
        tensor = leaf_like(tensor, leaf) if isinstance(leaf, Tensor) else tensor
        out[i] = remember(tensor, placement(new, m.new, m.shape))
    return shards.treedef.unflatten(out)


def _both(old: Mesh, new: Mesh) -> Mesh:
    """The ranks of two meshes, as one on which they agree; a simulated mesh is in every process."""
    for mesh in (old, new):
        if mesh.kind == "abstract":
            raise MeshError(
                f"The mesh {mesh} is abstract: nothing lies on it. Give a mesh of processes, or"
                " ftp.simulated_mesh."
            )
    if old.device_type != new.device_type:
        raise MeshError(
            f"The mesh {old} and the new one {new} are of different devices. Move the tensors with"
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


def _awaited(tree: Any, specs: Any, mesh: Mesh) -> Shards:
    """What a rank outside the old mesh says of the tree that comes: leaves with the global shape
    and dtype.
    """
    leaves, treedef = flatten(tree)
    names = leaf_names(tree, "tree")
    given = broadcast_specs(
        specs_of_any(PartitionSpec() if specs is None else specs, tree, mesh), tree, "tree"
    )
    shapes = [
        tuple(x.shape) if hasattr(x, "shape") and hasattr(x, "dtype") else None for x in leaves
    ]
    return Shards(treedef, leaves, names, [dotted(p) for p in leaf_paths(tree)], given, shapes)


def _targets(tree: Any, specs: Any, shards: Shards, mesh: Mesh) -> list[PartitionSpec]:
    given = broadcast_specs(
        specs_of_any(PartitionSpec() if specs is None else specs, tree, mesh), tree, "tree"
    )
    misfits = [
        f"{name} has spec {spec}, but is {kind_of(x)}; only a tensor can be cut. Give P()."
        for name, x, spec in zip(shards.names, shards.leaves, given, strict=True)
        if spec and not hasattr(x, "shape")
    ]
    for name, spec in zip(shards.names, given, strict=True):
        misfits += check_spec(spec, None, mesh.axes, name)
    if misfits:
        raise SpecError(join_failures(misfits))
    return given


def _check_fit(shards: Shards, targets: Sequence[PartitionSpec], mesh: Mesh) -> None:
    misfits = []
    for name, spec, shape in zip(shards.names, targets, shards.shapes, strict=True):
        misfits += [] if shape is None else check_spec(spec, shape, mesh.axes, name)
    if misfits:
        raise SpecError(join_failures(misfits))


def _facts(shards: Shards, targets: Sequence[PartitionSpec]) -> list[str]:
    return [
        f"{x!r}"
        if shape is None
        else f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(shape)}, from {old} to {new}"
        for x, shape, old, new in zip(
            shards.leaves, shards.shapes, shards.specs, targets, strict=True
        )
    ]


def _check_equal(
    facts: list[str] | Exception, names: Sequence[str], both: Mesh, max_bytes: int | None
) -> None:
    """Raises on all ranks where they would not move the same."""
    is_error = isinstance(facts, Exception)
    told = (
        facts
        if is_error
        else hashlib.sha256(json.dumps([names, facts, max_bytes]).encode()).hexdigest()
    )
    digests = share(both, "reshard/facts", told, None)
    if is_error or len(set(digests)) == 1:
        return
    everyone = share(both, "reshard/all", [[*names, "max_bytes"], [*facts, str(max_bytes)]], None)
    for rank, other in zip(both.ranks, everyone, strict=True):
        for i, (a, b) in enumerate(
            zip(zip(*everyone[0], strict=True), zip(*other, strict=True), strict=False)
        ):
            if a != b:
                raise MismatchError(
                    f"Ranks would move different trees, at leaf {i}: rank {both.ranks[0]} has"
                    f" {a[0]}: {a[1]}; rank {rank} {b[0]}: {b[1]}."
                    " Give all ranks the same; those outside the old mesh meta tensors of the"
                    " global shapes."
                )
    raise MismatchError("Ranks would move trees of different sizes. Give all ranks the same.")


def _check_bytes(max_bytes: Any) -> None:
    if max_bytes is not None and (
        not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < ALIGNMENT
    ):
        raise InputError(f"max_bytes={max_bytes!r}: give an int of at least {ALIGNMENT}, or None.")


def _shape(shards: Shards, i: int) -> Shape:
    shape = shards.shapes[i]
    assert shape is not None
    return shape
