"""Global shapes of tensors, agreed by all ranks from the shards that each holds."""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ftp.errors import MismatchError, raise_all
from ftp.sharding.arguments import Shape
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import Mesh
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import PartitionSpec, Stage, known_size
from ftp.tensors.placement import placement_of
from ftp.torch_internals.fake_tensors import FakeTensor


def abstract(leaf: Any, shape: Shape | None) -> Any:
    """A leaf as the tracer takes it: of global shape; a shard is replaced by a meta tensor."""
    if not isinstance(leaf, torch.Tensor) or shape is None or tuple(leaf.shape) == shape:
        return leaf
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def global_shape(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...] | None:
    """The global shape of a leaf as far as one rank can tell: by its placement, else as if all
    shards were equal.
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
                shape[dim] *= 1 if isinstance(cut, Stage) else mesh.axes.get(cut.axis, 1)
            shape[dim] = known_size(spec, dim) or shape[dim]
    return tuple(shape)


def describe_held(
    leaf: Any, spec: PartitionSpec, mesh: Mesh | None = None, *, hashed: bool = True
) -> Any:
    """A description of this rank's part of a leaf, as JSON for the other ranks.

    Args:
        mesh: add a sample of a leaf that several of its ranks hold copies of.
        hashed: add a digest of an unplaced tensor that ``spec`` cuts, by which ranks that pass the
            full tensor are found.
    """
    if not isinstance(leaf, torch.Tensor):
        return f"{without_addresses(repr(leaf))}, {kind_of(leaf)}"
    known = placement_of(leaf)
    held = {
        "local": list(leaf.shape),
        "dtype": str(leaf.dtype).removeprefix("torch."),
        "global": None if known is None else list(known.shape),
        "hash": content_hash(leaf) if hashed and known is None and spec else None,
    }
    if mesh is not None and any(n > 1 for axis, n in mesh.axes.items() if axis not in own(spec)):
        held["sample"] = sample(leaf)
    return held


def own(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes along which ranks hold other shards, or other terms of a pending sum."""
    return (*spec.axes, *spec.unreduced)


def sample(tensor: torch.Tensor) -> list[float] | None:
    """Sixteen evenly spaced elements of a floating-point tensor, to three digits; all of a smaller
    one. None of other tensors, and on meta.

    >>> sample(torch.arange(40.0))
    [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0, 27.0, 30.0, 33.0, 36.0, 39.0]
    """
    packed = tensor.dtype is torch.float4_e2m1fn_x2  # two numbers in one element
    if not tensor.is_floating_point() or packed or tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    flat = tensor.detach()
    step = -(-flat.numel() // 16) | 1  # odd: not one column of a matrix alone
    if flat.is_contiguous():
        few = flat.view(-1)[::step]
    else:  # reshape would copy all of it
        at = torch.arange(0, flat.numel(), step, device=flat.device)
        few = flat[torch.unravel_index(at, flat.shape)]
    return [float(f"{x:.3g}") for x in few.double().tolist()]


def without_addresses(text: str) -> str:
    """The text without addresses of objects, so that it is equal on all ranks.

    >>> without_addresses("<function f at 0x7f00d0>")
    '<function f>'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def content_hash(tensor: torch.Tensor) -> str | None:
    """A digest of a tensor's values; None if all values are equal, such as zeros on every rank."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() < 2 or bool((flat == flat[0]).all()):
        return None
    return hashlib.sha256(flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]


def agreed_shapes(
    everyone: Sequence[Sequence[Any]],
    specs: Sequence[PartitionSpec],
    names: Sequence[str],
    mesh: Mesh,
    loaded: Collection[int] = (),
) -> list[Shape | None]:
    """The global shape of every leaf; the same, or the same error, on every rank.

    Args:
        everyone: `describe_held` of each leaf, for each rank.
        loaded: leaves of a batch, whose shards a loader gives to each rank.
    """
    shapes: list[Shape | None] = []
    failures: list[str] = []
    dues: dict[tuple[PartitionSpec, Shape], list[Shape]] = {}

    def due(spec: PartitionSpec, shape: Shape) -> list[Shape]:
        """Each rank's shape, once for leaves that are alike."""
        if (spec, shape) not in dues:
            axes, places = mesh.axes, mesh.coordinates()
            dues[spec, shape] = [local_shape(spec, shape, axes, at) for at in places]
        return dues[spec, shape]

    for i, (spec, name) in enumerate(zip(specs, names, strict=True)):
        held = [of_rank[i] for of_rank in everyone]
        shapes.append(_agreed_shape(held, spec, name, mesh, failures, i in loaded, due))
    raise_all(MismatchError, failures)
    return shapes


def _agreed_shape(
    held: Sequence[Any],
    spec: PartitionSpec,
    name: str,
    mesh: Mesh,
    failures: list[str],
    is_loaded: bool,
    due: Callable[[PartitionSpec, Shape], list[Shape]],
) -> Shape | None:
    tensors = [h for h in held if isinstance(h, dict)]
    if len(tensors) < len(held):
        told = [h if isinstance(h, str) else "a tensor" for h in held]
        if odd := _first_odd(told):
            failures.append(
                f"{name} is {told[0]} on rank {mesh.ranks[0]}, but {told[odd]} on rank"
                f" {mesh.ranks[odd]}. Give all ranks one value."
            )
        return None
    if odd := _first_odd([h["dtype"] for h in tensors]):
        failures.append(
            f"{name} is {tensors[0]['dtype']} on rank {mesh.ranks[0]}, but {tensors[odd]['dtype']}"
            f" on rank {mesh.ranks[odd]}."
        )
        return None
    known = next((h["global"] for h in tensors if h["global"] is not None), None)
    shape = tuple(
        known if known is not None else _assembled([h["local"] for h in tensors], spec, mesh)
    )
    dues = due(spec, shape) if any(len(shape) == len(h["local"]) for h in tensors) else ()
    for rank, h in enumerate(tensors):
        wanted = dues[rank] if len(shape) == len(h["local"]) else None
        if wanted != tuple(h["local"]):
            failures.append(_no_shards(tensors, spec, name, mesh, shape, rank, wanted, is_loaded))
            return shape
    hashes = {h["hash"] for h in tensors}
    if tuple(tensors[0]["local"]) != shape and len(hashes) == 1 and None not in hashes:
        failures.append(
            f"{name} has the same contents on all ranks, of shape {tuple(tensors[0]['local'])},"
            f" though its spec {spec} cuts it: it looks"
            " like a full tensor where a shard is due. Place it with ftp.device_put(tree, mesh,"
            " specs)."
        )
    return shape


def _no_shards(
    held: Sequence[Mapping[str, Any]],
    spec: PartitionSpec,
    name: str,
    mesh: Mesh,
    shape: Shape,
    rank: int,
    due: Shape | None,
    is_loaded: bool,
) -> str:
    # Rank 0 fits the shape assembled from the first ranks: name a rank that differs.
    other = rank or next((r for r, h in enumerate(held) if h["local"] != held[0]["local"]), 0)
    given = f"rank {mesh.ranks[0]} holds {tuple(held[0]['local'])}"
    if other:
        given += f", rank {mesh.ranks[other]} {tuple(held[other]['local'])}"
    right = (
        f" Of a global {shape}, rank {mesh.ranks[rank]} should hold {due}."
        if due is not None
        else ""
    )
    todo = "Place it with ftp.device_put(tree, mesh, specs)."
    if is_loaded:
        todo = (
            "Give each rank the part of one batch that ftp.local_slice(mesh, spec, shape) says;"
            " drop or pad a short last batch."
        )
    return f"{name}, of spec {spec}, is not the shards of one tensor: {given}.{right} {todo}"


def _first_odd(values: Sequence[Any]) -> int:
    """The position of the first value that differs from the first one; 0 if none does."""
    return next((i for i, value in enumerate(values) if value != values[0]), 0)


def _assembled(locals_: Sequence[Sequence[int]], spec: PartitionSpec, mesh: Mesh) -> list[int]:
    """The global shape: along each cut dim the sum of the shards, of one stage if it has one."""
    shape = list(locals_[0])
    for dim in range(min(len(spec), len(shape))):
        cuts = spec.cuts(dim)
        axes, staged = {cut.axis for cut in cuts}, [c.axis for c in cuts if isinstance(c, Stage)]
        lengths: dict[tuple[int, ...], int] = {}
        for local, at in zip(locals_, mesh.coordinates(), strict=True):
            if len(local) == len(shape) and all(
                i == 0 for axis, i in at.items() if axis not in axes
            ):
                stage = tuple(at[axis] for axis in staged)
                lengths[stage] = lengths.get(stage, 0) + local[dim]
        if axes:
            shape[dim] = known_size(spec, dim) or max(lengths.values())
    return shape
