"""``device_put`` and ``device_get``: full tensors to shards, and back."""

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.distributed.calls import calls
from ftp.distributed.running import Running
from ftp.distributed.shared_errors import raise_on_all_ranks
from ftp.errors import InputError, PlacementError, SpecError, raise_all
from ftp.sharding.check_spec import check_spec
from ftp.sharding.local_pieces import Piece, cut_pieces, local_pieces
from ftp.sharding.mesh import AnyMesh, Mesh, check_rank, mesh_device, require_coordinate, resolve
from ftp.sharding.pytree import flatten, kind_of, leaf_names
from ftp.sharding.sparse_matrix import with_entries, with_tensors
from ftp.sharding.spec import PartitionSpec, Units
from ftp.tensors.placement import placed, placement_of
from ftp.tensors.replicas import compare_copies
from ftp.tensors.sharded_tree import Leaf, ShardedTree, agree_on_shapes, sharded_tree
from ftp.torch_internals.functorch import is_functorch_wrapped_tensor


def device_put(
    tree: Any,
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    src: int | None = None,
    check_inputs: bool = False,
    non_blocking: bool = False,
) -> Any:
    """Shard full tensors: copy this rank's part of each to the mesh's device.

    Args:
        tree: full tensors, equal on every rank, or with ``src`` valid on that rank only. Other
            leaves pass through, and so do tensors that are placed with this mesh and spec already.
        mesh: a torch DeviceMesh, or an ftp mesh; default that of ``ftp.use_mesh``.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``. Under a spec
            with an unreduced axis, its first rank gets the value, the others zeros. DTensor
            placements may stand for a spec, one for each axis of the mesh: ``(Shard(-1),
            Replicate())``.
        src: a rank of the world. Its tensors are broadcast to the other ranks first.
        check_inputs: raise where ranks pass different tensors, as ``ftp.check_replicas`` does;
            ignored with ``src``.
        non_blocking: as for ``torch.Tensor.to``: a copy from pinned memory to a GPU may still be
            under way when this returns, so leave that memory unchanged until the GPU has it.

    Returns:
        The tree of local shards, cut like ``torch.chunk``; on a simulated mesh copies of the full
        tensors. A shard is an autograd leaf that requires a gradient if the full tensor does; a
        Parameter stays a Parameter. Meta tensors stay on meta.

    Raises:
        SpecError: a spec that does not fit its tensor or the mesh.
        PlacementError: a tensor that is placed with another spec or on another mesh.
        InputError: a module, a sparse tensor, one of a trace, or one computed from tensors that
            require a gradient.
        MeshError: a ``src`` that is no rank of the mesh.
        ReplicaError: with ``check_inputs``, tensors that differ between ranks.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> params = ftp.device_put({"w": torch.ones(4, 2)}, mesh, ftp.P("tp"))
    >>> params["w"].shape, ftp.specs_of(params)
    (torch.Size([4, 2]), {'w': P('tp')})
    """
    m = resolve(mesh)
    is_compared = check_inputs and src is None
    is_collective = m.kind == "process" and (is_compared or src is not None)
    with raise_on_all_ranks(m) if is_collective else nullcontext():
        given = sharded_tree(with_entries(tree), m, specs, holds="full", takes_sums=True)
        _check_sources(given)
        if src is not None:
            ranks = m.ranks if m.kind == "process" else range(m.size())
            check_rank(src, ranks, "src", f"the mesh {m}")
    what = "checked device_put" if is_compared else f"device_put from rank {src}"
    sent = [_source(leaf) for leaf in given.leaves]
    with _running(what, given, sent) if is_collective else nullcontext():
        if is_compared:
            _compare_sources(given)
        return given.unflatten(_put(leaf, m, src, non_blocking) for leaf in given.leaves)


def device_get(tree: Any, mesh: AnyMesh | None = None, specs: Any = None) -> Any:
    """Gather shards to full tensors on every rank: the exact inverse of ``device_put``, for every
    dtype. All ranks of the mesh call it together.

    Args:
        tree: this rank's shards, placed or not; other leaves pass through.
        mesh, specs: of the shards, as for ``device_put``; left out, those of the placed tensors,
            which must then be all or none.

    Returns:
        The tree of full tensors, copies that require no gradient.

    Raises:
        SpecError: a spec that does not fit its tensor or the mesh.
        PlacementError: a tensor that is placed with another spec or on another mesh; without
            specs, one that is not placed beside others that are.
        MismatchError: ranks that call something else, or shards that do not belong to one tensor;
            tensors that are placed on some ranks only.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> ftp.device_get(ftp.device_put(torch.arange(3), mesh, ftp.P("tp")))
    tensor([0, 1, 2])
    """
    known = next(filter(None, map(placement_of, flatten(tree)[0])), None)
    m = resolve(known.mesh if mesh is None and known is not None else mesh)
    with raise_on_all_ranks(m):
        if specs is None and known is not None:
            specs = specs_of(tree)
        shards = sharded_tree(tree, m, specs, takes_sums=True)
    if m.kind == "process" and any(map(_is_unknown, shards.leaves)):
        shards = agree_on_shapes(shards, "device_get")
    # What no rank has placed is whole. Where others hold it placed, they wait for this rank.
    is_plain = specs is None and any(isinstance(leaf.value, torch.Tensor) for leaf in shards.leaves)
    is_collective = m.kind == "process" and (is_plain or any(shards.specs))
    what = "device_get, none placed," if is_plain else "device_get"
    sent = [_kind(leaf.value) for leaf in shards.leaves]
    with _running(what, shards, sent) if is_collective else nullcontext():
        return with_tensors(shards.unflatten(_get(leaf, m) for leaf in shards.leaves))


def _is_unknown(leaf: Leaf) -> bool:
    """Whether this rank cannot gather a shard before it knows the global shape."""
    return (
        leaf.shape is None
        and bool(leaf.spec)
        and isinstance(leaf.value, torch.Tensor)
        and not leaf.value.is_meta
    )


def _running(what: str, tree: ShardedTree, sent: Sequence[str]) -> Running:
    """The call in which ranks communicate; it has the same name on all ranks that send the same.

    Args:
        sent: what is sent of each leaf.
    """
    leaves = ", ".join(f"{d} {s}" for d, s in zip(sent, tree.specs, strict=True))
    return calls(tree.mesh).running(f"{what} of {leaves}")


def _source(leaf: Leaf) -> str:
    if not isinstance(leaf.value, torch.Tensor):
        return "static"
    placed = "" if placement_of(leaf.value) is None else "placed "
    return f"{placed}{_kind(leaf.value)}{list(leaf.known_shape)}"


def _kind(value: Any) -> str:
    """A leaf's dtype; of one on meta, of which nothing is sent, that too."""
    if not isinstance(value, torch.Tensor):
        return "static"
    return f"{'meta ' if value.is_meta else ''}{str(value.dtype).removeprefix('torch.')}"


def _check_sources(tree: ShardedTree) -> None:
    """Raises for modules, for tensors without values, and for those that would lose a gradient."""
    failures = []
    for leaf in tree.leaves:
        x = leaf.value
        if isinstance(x, torch.nn.Module):
            failures.append(
                f"{leaf.name} is a module, {type(x).__name__}, whose parameters would stay where"
                " they are. Give its parameters: fn, params = ftp.functionalize(module)."
            )
        if not isinstance(x, torch.Tensor):
            continue
        if is_functorch_wrapped_tensor(x) or get_proxy_mode() is not None:
            failures.append(
                f"{leaf.name} belongs to a trace and has no values; pin values inside a function"
                " with ftp.constrain."
            )
        elif x.grad_fn is not None and placement_of(x) is None:
            failures.append(
                f"{leaf.name} is computed from tensors that require a gradient"
                f" ({type(x.grad_fn).__name__}), which placing it would cut off."
                " Pin it inside the function with ftp.constrain, or place what it is computed"
                " from, or its .detach()."
            )
    raise_all(InputError, failures)


def _compare_sources(tree: ShardedTree) -> None:
    full = [leaf.value if placement_of(leaf.value) is None else None for leaf in tree.leaves]
    names = [f"{name}, a source of device_put" for name in tree.names]
    compare_copies(full, [PartitionSpec()] * len(full), names, tree.mesh, calls(tree.mesh))


def _put(leaf: Leaf, mesh: Mesh, src: int | None, non_blocking: bool) -> Any:
    if not isinstance(leaf.value, torch.Tensor) or placement_of(leaf.value) is not None:
        return leaf.value
    full = leaf.value.detach()
    if mesh.kind == "process" and src is not None and not full.is_meta:
        full = _broadcast(full, mesh, src)
    shard = _shard(full, leaf.spec, mesh, non_blocking)
    return placed(shard, leaf.value, mesh, leaf.spec, leaf.known_shape)


def specs_of(tree: Any) -> Any:
    """The spec of every placed tensor in ``tree``, as a tree; ``P()`` for other leaves.

    Args:
        tree: what ``device_put``, ``from_dtensor``, ``load``, ``reshard`` or a step returned.

    Raises:
        PlacementError: a tensor that ftp has not placed.

    >>> import ftp
    >>> w = ftp.device_put(torch.ones(4), ftp.simulated_mesh((2,), ("tp",)), ftp.P("tp"))
    >>> ftp.specs_of({"w": w, "step": 3})
    {'w': P('tp'), 'step': P()}
    """
    leaves, treedef = flatten(tree)
    found = [placement_of(leaf) for leaf in leaves]
    failures = [
        f"{name} is a tensor of shape {tuple(leaf.shape)} that was never placed. Place it with"
        " ftp.device_put(tree, mesh, specs)."
        for name, leaf, where in zip(leaf_names(tree, "tree"), leaves, found, strict=True)
        if where is None and isinstance(leaf, torch.Tensor)
    ]
    raise_all(PlacementError, failures)
    return treedef.unflatten([PartitionSpec() if where is None else where.spec for where in found])


def local_slice(
    mesh: AnyMesh | None, spec: PartitionSpec, shape: Sequence[int]
) -> tuple[slice | torch.Tensor, ...]:
    """The slices of a global tensor that this rank holds, for data loaders; the whole tensor on a
    simulated mesh.

    Args:
        mesh: default that of ``ftp.use_mesh``.
        spec: how the mesh cuts the tensor.
        shape: the global shape.

    Returns:
        One slice per dim. A packed dim (``ftp.units(..., pack=)``) or a zigzag of which this rank
        holds several pieces has an index tensor instead.

    Raises:
        SpecError: a spec that does not fit the shape or the mesh, or that packs several dims.

    >>> import ftp
    >>> local_slice(ftp.simulated_mesh((2,), ("dp",)), ftp.P("dp"), (6, 3))
    (slice(0, 6, None), slice(0, 3, None))
    """
    m = resolve(mesh)
    if not isinstance(spec, PartitionSpec):
        raise SpecError(f"local_slice takes a spec such as P('dp'), not {spec!r}, {kind_of(spec)}.")
    shape = _checked_shape(shape)
    raise_all(SpecError, check_spec(spec, shape, m.axes, "the tensor"))
    if m.kind != "process":
        return tuple(slice(0, s) for s in shape)
    pieces = local_pieces(spec, shape, m.axes, require_coordinate(m))
    if len(packed := [dim for dim, found in enumerate(pieces) if len(found) > 1]) > 1:
        raise SpecError(
            f"{spec} packs dims {packed}: slices and one index tensor cannot select that part. Use"
            " ftp.device_put."
        )
    return tuple(
        slice(*p[0]) if len(p) == 1 else torch.cat([torch.arange(a, b) for a, b in p])
        for p in pieces
    )


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        sizes = (-1,)
    if min(sizes, default=0) < 0:
        raise SpecError(f"local_slice takes a shape, a tuple of sizes from 0 on, not {shape!r}.")
    return sizes


def take(full: torch.Tensor, pieces: Sequence[Sequence[Piece]]) -> torch.Tensor:
    """The shard of ``full`` made of these pieces of each dim (`local_pieces`)."""
    full = full[tuple(slice(p[0][0], p[0][1]) if len(p) == 1 else slice(None) for p in pieces)]
    for dim, p in enumerate(pieces):
        if len(p) > 1:
            full = torch.cat([full.narrow(dim, a, b - a) for a, b in p], dim)
    return full


def put(full: torch.Tensor, shard: torch.Tensor, pieces: Sequence[Sequence[Piece]]) -> None:
    """Write a shard to the places that ``take`` reads it from."""
    starts = [list(accumulate((b - a for a, b in p), initial=0)) for p in pieces]
    for at in product(*(range(len(p)) for p in pieces)):
        there = tuple(slice(*pieces[d][k]) for d, k in enumerate(at))
        here = tuple(slice(starts[d][k], starts[d][k + 1]) for d, k in enumerate(at))
        full[there] = shard[here]


def _shard(full: torch.Tensor, spec: PartitionSpec, mesh: Mesh, non_blocking: bool) -> torch.Tensor:
    if mesh.kind == "abstract":
        return full if full.device.type == "meta" else full.clone()
    if mesh.kind == "process":
        coordinate = require_coordinate(mesh)
        full = take(full, local_pieces(spec, full.shape, mesh.axes, coordinate))
        if any(coordinate[axis] for axis in spec.unreduced):
            full = torch.zeros_like(full)  # the first rank of the axis has the value
    if full.device.type == "meta":
        return torch.empty(full.shape, dtype=full.dtype, device="meta")
    return full.to(
        mesh_device(mesh),
        copy=True,
        memory_format=torch.contiguous_format,
        non_blocking=non_blocking,
    )


def _broadcast(full: torch.Tensor, mesh: Mesh, src: int) -> torch.Tensor:
    assert mesh.torch is not None
    at = mesh.coordinates()[mesh.ranks.index(src)]
    data = full.to(mesh_device(mesh), copy=True, memory_format=torch.contiguous_format)
    # Along one axis after another: ranks that have the tensor broadcast it to their group.
    for axis in mesh.axis_names:
        group = mesh.torch.get_group(axis)
        dist.broadcast(_bytes(data), dist.get_global_rank(group, at[axis]), group=group)
    return data


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.reshape(-1).to(torch.uint8)
    )


def _get(leaf: Leaf, mesh: Mesh) -> Any:
    local, spec = leaf.value, leaf.spec
    if not isinstance(local, torch.Tensor):
        return local
    if local.is_meta:
        shape = local.shape if leaf.shape is None else leaf.shape
        return torch.empty(shape, dtype=local.dtype, device="meta")
    if mesh.kind != "process":
        return local.detach().clone()
    coordinate = require_coordinate(mesh)
    full = local.detach().contiguous().clone()
    for dim in range(min(len(spec), local.ndim)):
        if not spec.cuts(dim):
            continue
        lengths = [leaf.known_shape[dim]]
        for cut in spec.cuts(dim):
            lengths.append(
                _length(cut_pieces(lengths[-1], mesh.axes[cut.axis], coordinate[cut.axis], cut))
            )
        for cut, length in reversed(list(zip(spec.cuts(dim), lengths, strict=False))):
            full = _gather_dim(full, dim, length, mesh, cut)
    for axis in spec.unreduced:
        assert mesh.torch is not None
        dist.all_reduce(full, group=mesh.torch.get_group(axis))
    return full


def _length(pieces: Sequence[Piece]) -> int:
    return sum(b - a for a, b in pieces)


def _gather_dim(local: torch.Tensor, dim: int, length: int, mesh: Mesh, cut: Units) -> torch.Tensor:
    assert mesh.torch is not None
    n = mesh.axes[cut.axis]
    held = [cut_pieces(length, n, i, cut) for i in range(n)]
    rows = local.movedim(dim, 0).contiguous()
    padded = rows.new_zeros((max(map(_length, held)), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in range(n)]
    if padded.numel():
        dist.all_gather(
            [_bytes(p) for p in parts], _bytes(padded), group=mesh.torch.get_group(cut.axis)
        )
    full = rows.new_empty((length, *rows.shape[1:]))
    for part, pieces in zip(parts, held, strict=True):
        put(full, part, [pieces, *([(0, size)] for size in rows.shape[1:])])
    return full.movedim(0, dim).contiguous()
