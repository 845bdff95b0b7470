"""``to_dtensor`` and ``from_dtensor``: placed tensors and torch's DTensors over the same memory."""

from typing import Any

import torch

from ftp.distributed.shared_errors import raise_on_all_ranks
from ftp.errors import MeshError, SpecError, raise_all
from ftp.sharding.dtensor_placements import (
    is_dtensor,
    placements_of_spec,
    spec_of_placements,
)
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import AnyMesh, require_coordinate, resolve
from ftp.sharding.pytree import flatten, leaf_names
from ftp.tensors.placement import leaf_like, placement, remember
from ftp.tensors.sharded_tree import agree_on_shapes, sharded_tree


def to_dtensor(tree: Any, mesh: AnyMesh | None = None, specs: Any = None) -> Any:
    """Wrap this rank's shards as DTensors over the same memory.

    Ranks compare the shapes of their shards through the store; no collective is issued. An autograd
    leaf stays a leaf, with its ``requires_grad``, and a Parameter a Parameter; through other
    tensors gradients flow as through ``DTensor.from_local``.

    Args:
        tree: this rank's shards, placed or not; leaves that are no tensors pass through.
        mesh: a torch DeviceMesh, as ``ftp.make_mesh`` makes under a launcher.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``. DTensor
            placements may stand for a spec.

    Returns:
        The tree of DTensors.

    Raises:
        MismatchError: on every rank, with rank and path: shards that do not belong to one tensor.
        SpecError: a spec that does not fit, or that DTensor has no placements for.
        MeshError: a mesh without processes.

    >>> import ftp
    >>> ftp.to_dtensor({"w": torch.ones(2)}, ftp.simulated_mesh((2,), ("tp",)), ftp.P("tp"))
    Traceback (most recent call last):
    ftp.errors.MeshError: DTensors need a mesh of processes; (tp 2) on cpu is simulated.
    """
    from torch.distributed.tensor import DTensor

    m = resolve(mesh)
    if m.kind != "process":
        raise MeshError(f"DTensors need a mesh of processes; {m} is {m.kind}.")
    require_coordinate(m)
    with raise_on_all_ranks(m):
        shards = sharded_tree(tree, m, specs)
    shards = agree_on_shapes(shards, "to_dtensor")
    placements = [
        None if leaf.shape is None else placements_of_spec(leaf.spec, m, leaf.shape, leaf.name)
        for leaf in shards.leaves
    ]
    out = []
    for leaf, placed_as in zip(shards.leaves, placements, strict=True):
        if placed_as is None:
            out.append(leaf.value)
            continue
        x, shape = leaf.value, torch.Size(leaf.known_shape)
        made = DTensor.from_local(
            x.detach() if x.is_leaf else x,
            m.torch,
            placed_as,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        out.append(leaf_like(made, x) if x.is_leaf else made)
    return shards.unflatten(out)


def from_dtensor(tree: Any) -> Any:
    """Unwrap DTensors to this rank's shards, placed. Nothing is sent.

    An autograd leaf stays a leaf, with its ``requires_grad``, and a Parameter a Parameter.

    Args:
        tree: DTensors; other leaves pass through.

    Returns:
        The tree of shards; ``ftp.specs_of`` gives their specs.

    Raises:
        SpecError: placements that no spec states, as pending sums, and shards that are not cut as
            ``torch.chunk`` cuts.

    >>> from_dtensor({"n": 3})
    {'n': 3}
    """
    leaves, treedef = flatten(tree)
    failures, out = [], []
    for x, name in zip(leaves, leaf_names(tree, "tree"), strict=True):
        if not is_dtensor(x):
            out.append(x)
            continue
        m = resolve(x.device_mesh)
        coordinate = require_coordinate(m)
        try:
            spec = spec_of_placements(x.placements, m, x.shape, name)
        except SpecError as e:
            failures.append(str(e))
            continue
        local = x.detach().to_local() if x.is_leaf else x.to_local()
        local = local.wait() if hasattr(local, "wait") else local
        if tuple(local.shape) != (due := local_shape(spec, x.shape, m.axes, coordinate)):
            failures.append(
                f"{name} holds {tuple(local.shape)} on rank {m.rank}, where {x.placements} of"
                f" {tuple(x.shape)} give {due}."
                " Make it with distribute_tensor, or redistribute it."
            )
            continue
        local = leaf_like(local, x) if x.is_leaf else local
        out.append(remember(local, placement(m, spec, tuple(x.shape))))
    raise_all(SpecError, failures)
    return treedef.unflatten(out)
