"""Placed tensors: local shards that remember their mesh, spec and global shape; full tensors to
shards and back.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.distributed.agreement import calls
from ftp.errors import InputError, MismatchError, PlacementError, SpecError, join_failures
from ftp.sharding.dtensor_placements import check_plain, specs_of_any
from ftp.sharding.mesh import AnyMesh, Mesh, check_rank, mesh_device, require_coordinate, resolve
from ftp.sharding.pytree import broadcast_specs, check_specs, flatten, leaf_names
from ftp.sharding.spec import (
    PartitionSpec,
    Piece,
    Units,
    cut_pieces,
    known_size,
    local_pieces,
    local_shape,
)
from ftp.tensors.placement import check_alive, check_placed, placement, placement_of, remember
from ftp.tensors.replicas import compare_copies


def device_put(
    tree: Any,
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    src: int | None = None,
    check_inputs: bool = False,
    non_blocking: bool = False,
) -> Any:
    """Full tensors to this rank's local shards, as copies on the mesh's device.

    Args:
        tree: full tensors, equal on every rank, or on rank ``src`` alone; leaves that are no
            tensors pass through.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``. DTensor
            placements, one for each axis of the mesh, may stand where a spec may, as ``(Shard(-1),
            Replicate())``.
        src: the rank of the world whose tensors are broadcast to all others first.
        check_inputs: compare what the ranks give, as ``ftp.check_replicas`` does; with ``src``
            there is nothing to compare.
        non_blocking: as ``torch.Tensor.to``'s: from pinned memory to a GPU the host does not wait
            for the copy, which may still be under way when this returns. Do not write to that
            memory until the GPU has it, as a loader's ``pin_memory=True`` does not.

    Returns:
        The tree of local tensors: shape ``torch.chunk``'s. On a simulated mesh the full tensors,
        copied. They are leaves and require a gradient where the full ones do; a Parameter stays
        one, frozen or not. Meta tensors stay meta.

    Raises:
        SpecError: a spec that does not fit. PlacementError: a tensor placed otherwise already.
            InputError: a tensor of a trace, or one that was computed from tensors which require a
            gradient. MeshError: a ``src`` that is no rank of the mesh.

    >>> import ftp
    >>> ftp.device_put({"w": torch.ones(4, 2)}, ftp.simulated_mesh((2,), ("tp",)), ftp.P("tp"))["w"].shape
    torch.Size([4, 2])
    """
    m = resolve(mesh)
    is_checked = check_inputs and src is None
    with _together(m, is_due=src is not None or is_checked) as tell:
        leaves, treedef, names, leaf_specs = _checked(tree, specs, m)
        failures = [
            problem for n, leaf in zip(names, leaves, strict=True) if (problem := _unfit(leaf, n))
        ]
        if failures:
            raise InputError(join_failures(failures))
        ranks = m.ranks if m.kind == "process" else range(m.size())
        if src is not None:
            check_rank(src, ranks, "src", f"the mesh {m}")
        running = tell(
            "checked device_put" if is_checked else f"device_put from rank {src}",
            leaves,
            leaf_specs,
        )
    with running:
        if is_checked and m.kind == "process":
            full = [leaf if placement_of(leaf) is None else None for leaf in leaves]
            sources = [f"{name}, a source of device_put" for name in names]
            compare_copies(full, [PartitionSpec()] * len(full), sources, m, calls(m))
        out = []
        for leaf, spec in zip(leaves, leaf_specs, strict=True):
            if placement_of(leaf) is not None or not isinstance(leaf, torch.Tensor):
                out.append(leaf)
                continue
            full = leaf.detach()
            if m.kind == "process" and src is not None and full.device.type != "meta":
                full = _broadcast(full, m, src)
            shard = leaf_like(_shard(full, spec, m, non_blocking), leaf)
            out.append(remember(shard, placement(m, spec, tuple(leaf.shape))))
        return treedef.unflatten(out)


def specs_of(tree: Any) -> Any:
    """The spec of every placed tensor in ``tree``, as a tree; ``P()`` for leaves that are no
    tensors.

    Raises:
        PlacementError: a tensor that ftp has not placed.

    >>> import ftp
    >>> specs_of({"w": ftp.device_put(torch.ones(4), ftp.simulated_mesh((2,), ("tp",)), ftp.P("tp"))})
    {'w': P('tp')}
    """
    leaves, treedef = flatten(tree)
    found = [placement_of(leaf) for leaf in leaves]
    failures = [
        f"{name} is a tensor of shape {tuple(leaf.shape)} that was never placed. Place it with"
        " ftp.device_put(tree, mesh, specs)."
        for name, leaf, where in zip(leaf_names(tree, "tree"), leaves, found, strict=True)
        if where is None and isinstance(leaf, torch.Tensor)
    ]
    if failures:
        raise PlacementError(join_failures(failures))
    return treedef.unflatten([PartitionSpec() if where is None else where.spec for where in found])


def device_get(tree: Any, mesh: AnyMesh | None = None, specs: Any = None) -> Any:
    """The exact inverse of ``device_put``: full tensors, on every rank; all ranks of the mesh call
    it together.

    Args:
        tree: shards, with leaves that are no tensors as they are.
        mesh: default that of the surrounding ``ftp.use_mesh``.
        specs: prefix tree of specs; None takes those that ``device_put`` and steps noted.

    Raises:
        PlacementError: tensors that lie otherwise than the specs say, or that ftp has not placed.
            SpecError: specs that do not fit the tree.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> ftp.device_get(ftp.device_put(torch.arange(3), mesh, ftp.P("tp")), mesh, ftp.P("tp"))
    tensor([0, 1, 2])
    """
    m = resolve(mesh)
    with _together(m, is_due=True) as tell:
        leaves, treedef, _, leaf_specs = _checked(tree, specs, m, are_shards=True)
        running = tell("device_get", leaves, leaf_specs) if any(leaf_specs) else nullcontext()
    with running:
        return treedef.unflatten(
            [
                _gather(leaf, spec, m) if isinstance(leaf, torch.Tensor) else leaf
                for leaf, spec in zip(leaves, leaf_specs, strict=True)
            ]
        )


@contextmanager
def _together(
    mesh: Mesh, *, is_due: bool
) -> Iterator[
    Callable[[str, Sequence[Any], Sequence[PartitionSpec]], AbstractContextManager[None]]
]:
    """Inside, ranks that are about to communicate check what they were given; if one fails, all of
    them do.

    It yields what a rank calls to say what it is about to do, which has to be the same on all, and
    what it does then is inside of that.
    """
    if mesh.kind != "process" or not is_due:
        yield lambda what, leaves, specs: nullcontext()
        return
    record = calls(mesh)

    def tell(
        what: str, leaves: Sequence[Any], specs: Sequence[PartitionSpec]
    ) -> AbstractContextManager[None]:
        dtypes = [
            str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, torch.Tensor) else "static"
            for leaf in leaves
        ]
        return record.running(
            f"{what} of {', '.join(f'{d} {s}' for d, s in zip(dtypes, specs, strict=True))}"
        )

    try:
        yield tell
    except MismatchError:
        raise
    except Exception as e:
        record.agree(record.next(), e)
        raise


def local_slice(
    mesh: AnyMesh | None, spec: PartitionSpec, shape: Sequence[int]
) -> tuple[slice | torch.Tensor, ...]:
    """The part of a tensor of global ``shape`` that this rank holds, one slice a dim, for loaders;
    all of it on a simulated mesh.

    In place of a slice there is an index tensor for a packed dim (``ftp.units(..., pack=)``) of
    which this rank holds several pieces.

    Args:
        mesh: None takes that of the surrounding ``ftp.use_mesh``.
        spec: of the tensor.
        shape: the tensor's global shape.

    Raises:
        SpecError: a spec that does not fit the shape or the mesh.

    >>> import ftp
    >>> local_slice(ftp.simulated_mesh((2,), ("dp",)), ftp.P("dp"), (6, 3))
    (slice(0, 6, None), slice(0, 3, None))
    """
    m = resolve(mesh)
    check_specs([spec], [torch.empty(tuple(shape), device="meta")], ["the tensor"], m.axes)
    if m.kind != "process":
        return tuple(slice(0, s) for s in shape)
    pieces = local_pieces(spec, shape, m.axes, require_coordinate(m))
    if len(packed := [dim for dim, found in enumerate(pieces) if len(found) > 1]) > 1:
        raise SpecError(
            f"{spec} packs dims {packed}: no tuple of slices and one index is that part. Take"
            " ftp.device_put."
        )
    return tuple(
        slice(*p[0]) if len(p) == 1 else torch.cat([torch.arange(a, b) for a, b in p])
        for p in pieces
    )


def take(full: torch.Tensor, pieces: Sequence[Sequence[Piece]]) -> torch.Tensor:
    """The shard of ``full`` made of these pieces of each dim (`local_pieces`)."""
    full = full[tuple(slice(p[0][0], p[0][1]) if len(p) == 1 else slice(None) for p in pieces)]
    for dim, p in enumerate(pieces):
        if len(p) > 1:
            full = torch.cat([full.narrow(dim, a, b - a) for a, b in p], dim)
    return full


def put(full: torch.Tensor, shard: torch.Tensor, pieces: Sequence[Sequence[Piece]]) -> None:
    """Writes a shard to where ``take`` reads it."""
    starts = [list(accumulate((b - a for a, b in p), initial=0)) for p in pieces]
    for at in product(*(range(len(p)) for p in pieces)):
        there = tuple(slice(*pieces[d][k]) for d, k in enumerate(at))
        here = tuple(slice(starts[d][k], starts[d][k + 1]) for d, k in enumerate(at))
        full[there] = shard[here]


def global_shape(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...] | None:
    """The global shape of a leaf as far as one rank can tell: as placed, else as if all shards
    were equal.
    """
    if not isinstance(leaf, torch.Tensor):
        return None
    known = placement_of(leaf)
    if known is not None:
        return known.shape
    shape = list(leaf.shape)
    if mesh.kind == "process" and leaf.device.type != "meta" and not isinstance(leaf, FakeTensor):
        for dim in range(min(len(spec), leaf.ndim)):
            for cut in spec.cuts(dim):
                shape[dim] *= mesh.axes.get(cut.axis, 1)
            shape[dim] = known_size(spec, dim) or shape[dim]
    return tuple(shape)


def as_global(leaves: Sequence[Any], specs: Sequence[PartitionSpec], mesh: Mesh) -> list[Any]:
    """Shards as tensors of global shape, without storage; what is no tensor as it is."""
    shapes = [global_shape(leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]
    return [
        leaf if shape is None else torch.empty(shape, device="meta")
        for leaf, shape in zip(leaves, shapes, strict=True)
    ]


def content_hash(tensor: torch.Tensor) -> str | None:
    """A digest of a tensor's values; None where they are all one number, which says nothing."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() < 2 or bool((flat == flat[0]).all()):
        return None
    return hashlib.sha256(flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]


def _checked(
    tree: Any, specs: Any, mesh: Mesh, *, are_shards: bool = False
) -> tuple[list[Any], Any, list[str], list[PartitionSpec]]:
    """Leaves, tree, names and specs; every leaf alive, and placed as its spec says if it is
    placed.
    """
    leaves, treedef = flatten(tree)
    names = leaf_names(tree, "tree")
    given = specs_of_any(PartitionSpec() if specs is None else specs, tree, mesh)
    leaf_specs = broadcast_specs(given, tree, "tree")
    check_plain(leaves, names)
    check_alive(leaves, names)
    check_placed(leaves, leaf_specs, names, mesh)
    full = as_global(leaves, leaf_specs, mesh)
    full = [
        g if are_shards or placement_of(leaf) is not None else leaf
        for leaf, g in zip(leaves, full, strict=True)
    ]
    check_specs(leaf_specs, full, names, mesh.axes)
    return leaves, treedef, names, leaf_specs


def leaf_like(tensor: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """A fresh tensor that requires a gradient where ``old`` does, and is a Parameter where it is
    one.
    """
    if isinstance(old, nn.Parameter):
        return nn.Parameter(tensor, old.requires_grad)
    return tensor.requires_grad_() if old.requires_grad else tensor


def _unfit(leaf: Any, name: str) -> str | None:
    """Why a leaf cannot be placed, if so."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if is_functorch_wrapped_tensor(leaf) or get_proxy_mode() is not None:
        return (
            f"{name} belongs to a trace and has no values; pin values inside a function with"
            " ftp.constrain."
        )
    if leaf.grad_fn is not None and placement_of(leaf) is None:
        return (
            f"{name} is computed from tensors that require a gradient"
            f" ({type(leaf.grad_fn).__name__}), which placing it would cut off."
            " Pin it inside the function with ftp.constrain, or place what it is computed from, or"
            " its .detach()."
        )
    return None


def _shard(full: torch.Tensor, spec: PartitionSpec, mesh: Mesh, non_blocking: bool) -> torch.Tensor:
    if mesh.kind == "abstract":
        return full if full.device.type == "meta" else full.clone()
    if mesh.kind == "process":
        full = take(full, local_pieces(spec, full.shape, mesh.axes, require_coordinate(mesh)))
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
    # Along one axis after another: each time, the ranks that have it already hand it to all of
    # their group.
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


def _gather(local: torch.Tensor, spec: PartitionSpec, mesh: Mesh) -> torch.Tensor:
    if local.device.type == "meta":
        known = placement_of(local)
        return torch.empty(
            local.shape if known is None else known.shape, dtype=local.dtype, device="meta"
        )
    if mesh.kind != "process":
        return local.detach().clone()
    coordinate = require_coordinate(mesh)
    known = placement_of(local)
    shape = known.shape if known is not None else _exchange_shape(local, spec, mesh)
    full = local.detach().contiguous().clone()
    for dim in range(min(len(spec), local.ndim)):
        lengths = [shape[dim]]
        for cut in spec.cuts(dim):
            lengths.append(
                _length(cut_pieces(lengths[-1], mesh.axes[cut.axis], coordinate[cut.axis], cut))
            )
        for cut, length in reversed(list(zip(spec.cuts(dim), lengths, strict=False))):
            full = _gather_dim(full, dim, length, mesh, cut)
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


def _exchange_shape(local: torch.Tensor, spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The global shape of a shard that nobody has placed: what its spec tells, else what the
    ranks along each cut hold together.
    """
    assert mesh.torch is not None
    shape = list(local.shape)
    for dim in range(min(len(spec), local.ndim)):
        for cut in reversed(spec.cuts(dim)):
            held = [
                torch.zeros(1, dtype=torch.int64, device=mesh_device(mesh))
                for _ in range(mesh.axes[cut.axis])
            ]
            dist.all_gather(
                held,
                torch.tensor([shape[dim]], device=mesh_device(mesh)),
                group=mesh.torch.get_group(cut.axis),
            )
            shape[dim] = sum(int(h) for h in held)
        shape[dim] = known_size(spec, dim) or shape[dim]
    if local_shape(spec, shape, mesh.axes, require_coordinate(mesh)) != tuple(local.shape):
        raise SpecError(
            f"A tensor of local shape {tuple(local.shape)} is no shard of {tuple(shape)} under"
            f" {spec}."
        )
    return tuple(shape)
