"""The arguments of a call, flat and named: what keys a program, what is wrong with them, and their global shapes, agreed by all ranks."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import optree
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from ftp.errors import DonationError, InputError, MismatchError, SpecError, join_failures
from ftp.mesh import Mesh
from ftp.placement import Placement, content_hash, known_of, mesh_device, placement, placement_of
from ftp.placements import check_plain, is_dtensor
from ftp.spec import PartitionSpec, known_size, local_shape
from ftp.tree import broadcast_specs, flatten, kind_of, leaf_names

Shape = tuple[int, ...]


class Arguments:
    """Positional arguments of a step, flat.

    Attributes:
        key: equal for calls that the same program serves and whose tensors are as fit for it: tree, static leaves, and of each tensor
            its shape, dtype, and what is remembered of it or else its dispatch keys (device, layout, wrappers).
    """

    def __init__(self, args: tuple[Any, ...], roots: Sequence[str] = ()):
        self.args = args
        self.roots = roots
        self.leaves, self.treedef = flatten(args)
        self.key = (self.treedef, *map(_describe, self.leaves))

    @cached_property
    def names(self) -> list[str]:
        roots = [self.roots[i] if i < len(self.roots) else f"args[{i}]" for i in range(len(self.args))]
        return [name for arg, root in zip(self.args, roots, strict=True) for name in leaf_names(arg, root)]

    @cached_property
    def positions(self) -> list[int]:
        """Per leaf the position of its argument."""
        return [i for i, child in enumerate(self.treedef.children()) for _ in range(child.num_leaves)]

    def is_like(self, key: tuple[Any, ...], shapes: Sequence[Shape | None], specs: Sequence[PartitionSpec], mesh: Mesh) -> bool:
        """Whether the program that was made for arguments of ``key`` and global ``shapes`` serves these, as far as this rank can tell."""
        treedef, *described = key
        if self.treedef != treedef:
            return False
        return all(
            _is_alike(leaf, shape, dtype, None if known is None else placement(mesh, spec, known), mesh)
            for leaf, (shape, dtype, *_), known, spec in zip(self.leaves, described, shapes, specs, strict=True)
        )


def _is_alike(leaf: Any, shape: Any, dtype: Any, due: Placement | None, mesh: Mesh) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return _describe(leaf) == (shape, dtype)
    if leaf.shape != shape or leaf.dtype != dtype or known_of(leaf) not in (None, due):
        return False
    return leaf.layout is torch.strided and leaf.device.type == mesh.device_type and not (_is_traced(leaf) or is_dtensor(leaf))


_dispatch_keys = torch._C._dispatch_keys


def _describe(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        # What is remembered of a tensor says where it is; to ask for the keys of every one would take longer than all the rest.
        known = known_of(leaf)
        return leaf.shape, leaf.dtype, known if known is not None else _dispatch_keys(leaf).raw_repr()
    # 0.0 equals -0.0, and 1 equals True.
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def _is_traced(leaf: torch.Tensor) -> bool:
    return isinstance(leaf, FakeTensor) or is_functorch_wrapped_tensor(leaf)


def check_static(call: Arguments) -> None:
    """Raises for leaves that are neither plain tensors nor values that can tell programs apart."""
    check_plain(call.leaves, call.names)
    failures = []
    for leaf, name in zip(call.leaves, call.names, strict=True):
        if isinstance(leaf, np.ndarray):
            failures.append(f"{name} is a numpy array of shape {leaf.shape}. Give a tensor: torch.from_numpy(array).")
        elif not _is_hashable(leaf):
            failures.append(
                f"{name} is {kind_of(leaf)}: neither a tensor, nor a container that optree knows, nor a hashable static value."
                " Register the class with optree.register_pytree_node(..., namespace='ftp'), or pass its tensors in a dict."
            )
    if failures:
        raise InputError(join_failures(failures))


def nones(call: Arguments) -> list[str]:
    """What each None among the arguments is called."""
    found = []
    for i, arg in enumerate(call.args):
        root = call.roots[i] if i < len(call.roots) else f"args[{i}]"
        accessors = optree.tree_accessors(arg, none_is_leaf=True, namespace="ftp")
        leaves = optree.tree_leaves(arg, none_is_leaf=True, namespace="ftp")
        found += [accessor.codify(root) for accessor, leaf in zip(accessors, leaves, strict=True) if leaf is None]
    return found


def check_values(call: Arguments, mesh: Mesh) -> None:
    """Raises for tensors that have no values, or not on the mesh's devices."""
    check_plain(call.leaves, call.names)
    failures = []
    for leaf, name in zip(call.leaves, call.names, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        if _is_traced(leaf):
            failures.append(
                f"{name} belongs to a trace or a transform of torch.func, past or going on, and has no values. A step takes plain tensors;"
                " inside another function call the function itself, not its step."
            )
        elif leaf.device.type == "meta":
            failures.append(f"{name} is on the meta device and has no values. step.lower takes it; to run the step, load real ones.")
        elif leaf.device.type != mesh.device_type:
            failures.append(
                f"{name} is on {leaf.device}, the mesh on {mesh.device_type}."
                f" Move it with .to({mesh.device_type!r}), or place it with ftp.device_put."
            )
        elif mesh.kind == "process" and leaf.device.type != "cpu" and leaf.device != (here := mesh_device(mesh)):
            failures.append(f"{name} is on {leaf.device}, but this process computes on {here}. Place it with ftp.device_put.")
    if failures:
        raise InputError(join_failures(failures))


def check_signature(fn: Callable[..., Any], args: Sequence[Any], step: str) -> None:
    """Raises where ``fn`` does not take this many arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as e:
        name = getattr(fn, "__name__", kind_of(fn))
        raise InputError(f"{name}{signature} does not take the {len(args)} arguments of {step}: {e}.") from None


def check_donated_once(call: Arguments, donate: Sequence[int]) -> None:
    """Raises for a donated tensor that is a second leaf as well."""
    if beyond := [position for position in donate if not 0 <= position < len(call.args)]:
        raise DonationError(f"donate names argument {beyond[0]}, but the step is called with {len(call.args)} arguments, 0 the first.")
    tensors = [id(leaf) for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    if len(set(tensors)) == len(tensors):
        return
    first: dict[int, int] = {}
    for i, leaf in enumerate(call.leaves):
        j = first.setdefault(id(leaf), i) if isinstance(leaf, torch.Tensor) else i
        if i != j and (call.positions[i] in donate or call.positions[j] in donate):
            a, b = call.names[j], call.names[i]
            raise DonationError(
                f"{a} and {b} are one tensor, and it is donated, so that its memory would be reused twice. Clone one of them."
            )


def argument_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """What a function calls its positional arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def takes_by_name(fn: Callable[..., Any]) -> list[str]:
    """The keyword-only arguments of a function."""
    try:
        return [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]
    except (TypeError, ValueError):
        return []


def argument_specs(specs: Any, args: tuple[Any, ...], roots: Sequence[str], where: str) -> list[PartitionSpec]:
    """A spec per leaf, from a prefix tree of the tuple of arguments; of a single argument it may be that argument's own tree."""
    names = [roots[i] if i < len(roots) else f"args[{i}]" for i in range(len(args))]
    if isinstance(specs, PartitionSpec):
        return [specs] * len(flatten(args)[0])
    if len(args) == 1 and not (isinstance(specs, tuple) and len(specs) == 1):
        return broadcast_specs(specs, args[0], names[0])
    if not isinstance(specs, tuple | list):
        raise SpecError(
            f"{where} is {kind_of(specs)}, for the {len(args)} arguments {', '.join(names)}. Give a tuple of specs, or one P for all."
        )
    if len(specs) != len(args):
        listed = f" ({', '.join(names)})" if names else ""
        raise SpecError(f"{where} has {len(specs)} entries for {len(args)} arguments{listed}. Give one for each, or one P for all.")
    return [spec for given, arg, name in zip(specs, args, names, strict=True) for spec in broadcast_specs(given, arg, name)]


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


# Global shapes.


def abstract(leaf: Any, shape: Shape | None) -> Any:
    """A leaf as the tracer takes it: of global shape, without storage where that differs from what it is."""
    if not isinstance(leaf, torch.Tensor) or shape is None or tuple(leaf.shape) == shape:
        return leaf
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def describe_held(leaf: Any, spec: PartitionSpec) -> Any:
    """What this rank holds of a leaf, for the others to read."""
    if not isinstance(leaf, torch.Tensor):
        return f"{without_addresses(repr(leaf))}, {kind_of(leaf)}"
    known = placement_of(leaf)
    return {
        "local": list(leaf.shape),
        "dtype": str(leaf.dtype).removeprefix("torch."),
        "global": None if known is None else list(known.shape),
        "hash": content_hash(leaf) if known is None and spec else None,
    }


def without_addresses(text: str) -> str:
    """Text that is equal on all ranks, whatever the addresses of objects in it.

    >>> without_addresses("<function f at 0x7f00d0>")
    '<function f>'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def agreed_shapes(
    everyone: Sequence[Sequence[Any]], specs: Sequence[PartitionSpec], names: Sequence[str], mesh: Mesh, loaded: Collection[int] = ()
) -> list[Shape | None]:
    """The global shape of every leaf, from what all ranks hold; the same, or the same error, on every rank.

    ``loaded`` are the leaves of which a loader gives each rank its part, as of a batch.
    """
    shapes: list[Shape | None] = []
    failures: list[str] = []
    for i, (spec, name) in enumerate(zip(specs, names, strict=True)):
        shapes.append(_agreed_shape([held[i] for held in everyone], spec, name, mesh, failures, i in loaded))
    if failures:
        raise MismatchError(join_failures(failures))
    return shapes


def _agreed_shape(held: Sequence[Any], spec: PartitionSpec, name: str, mesh: Mesh, failures: list[str], is_loaded: bool) -> Shape | None:
    tensors = [h for h in held if isinstance(h, dict)]
    if len(tensors) < len(held):
        told = [h if isinstance(h, str) else "a tensor" for h in held]
        if odd := _first_odd(told):
            failures.append(
                f"{name} is {told[0]} on rank {mesh.ranks[0]}, but {told[odd]} on rank {mesh.ranks[odd]}. Give all ranks one value."
            )
        return None
    if odd := _first_odd([h["dtype"] for h in tensors]):
        failures.append(f"{name} is {tensors[0]['dtype']} on rank {mesh.ranks[0]}, but {tensors[odd]['dtype']} on rank {mesh.ranks[odd]}.")
        return None
    known = next((h["global"] for h in tensors if h["global"] is not None), None)
    shape = tuple(known if known is not None else _assembled([h["local"] for h in tensors], spec, mesh))
    for rank, (h, coordinate) in enumerate(zip(tensors, mesh.coordinates(), strict=True)):
        due = local_shape(spec, shape, mesh.axes, coordinate) if len(shape) == len(h["local"]) else None
        if due != tuple(h["local"]):
            failures.append(_no_shards(tensors, spec, name, mesh, shape, rank, due, is_loaded))
            return shape
    hashes = {h["hash"] for h in tensors}
    if tuple(tensors[0]["local"]) != shape and len(hashes) == 1 and None not in hashes:
        failures.append(
            f"{name} has the same contents on all ranks, of shape {tuple(tensors[0]['local'])}, though its spec {spec} cuts it: it looks"
            " like a full tensor where a shard is due. Place it with ftp.device_put(tree, mesh, specs)."
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
    # What is assembled from the first ranks fits rank 0 itself; name one that differs from it.
    other = rank or next((r for r, h in enumerate(held) if h["local"] != held[0]["local"]), 0)
    given = f"rank {mesh.ranks[0]} holds {tuple(held[0]['local'])}, rank {mesh.ranks[other]} {tuple(held[other]['local'])}"
    right = f" Of a global {shape}, rank {mesh.ranks[rank]} should hold {due}." if due is not None else ""
    todo = "Place it with ftp.device_put(tree, mesh, specs)."
    if is_loaded:
        todo = "Give each rank the part of one batch that ftp.local_slice(mesh, spec, shape) says; drop or pad a short last batch."
    return f"{name}, of spec {spec}, is not the shards of one tensor: {given}.{right} {todo}"


def _first_odd(values: Sequence[Any]) -> int:
    """The first that differs from the one at 0; 0 if none does."""
    return next((i for i, value in enumerate(values) if value != values[0]), 0)


def _assembled(locals_: Sequence[Sequence[int]], spec: PartitionSpec, mesh: Mesh) -> list[int]:
    """What the shards along each cut dim add up to."""
    shape = list(locals_[0])
    for dim in range(min(len(spec), len(shape))):
        axes = {cut.axis for cut in spec.cuts(dim)}
        along = [
            local[dim]
            for local, at in zip(locals_, mesh.coordinates(), strict=True)
            if len(local) == len(shape) and all(i == 0 for axis, i in at.items() if axis not in axes)
        ]
        if axes:
            shape[dim] = known_size(spec, dim) or sum(along)
    return shape
