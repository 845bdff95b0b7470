"""Placed tensors to torch's DTensor and back: the same local shards under either name, without
communication.
"""

import json
from typing import Any

import torch

from ftp.distributed.agreement import calls
from ftp.errors import FtpError, MeshError, SpecError, join_failures
from ftp.sharding.dtensor_placements import (
    is_dtensor,
    placements_of_spec,
    spec_of_placements,
    specs_of_any,
)
from ftp.sharding.mesh import AnyMesh, require_coordinate, resolve
from ftp.sharding.pytree import broadcast_specs, flatten, leaf_names
from ftp.sharding.spec import PartitionSpec, check_spec, local_shape
from ftp.tensors.device_put import global_shape, leaf_like
from ftp.tensors.global_shapes import agreed_shapes, describe_held
from ftp.tensors.placement import check_alive, check_placed, placement, remember


def to_dtensor(tree: Any, mesh: AnyMesh | None = None, specs: Any = None) -> Any:
    """This rank's shards as DTensors over the same memory; leaves that are no tensors pass through.

    Ranks tell each other the shapes that they hold, through the store: no collective is issued. A
    leaf stays a leaf, with its ``requires_grad``; a Parameter stays one; through anything else
    gradients flow as through ``DTensor.from_local``.

    Args:
        tree: local shards, as ``device_put``, a step or ``DTensor.from_local``'s callers hold them.
        mesh: a torch DeviceMesh, as ``ftp.make_mesh`` makes under a launcher.
        specs: a spec tree, a prefix of one, or one ``P`` for all; DTensor placements where a spec
            may stand.

    Raises:
        MismatchError: shards that are not those of one tensor, with the rank and the path, on every
            rank.
        SpecError: a spec that DTensor has no placements for.

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
    record = calls(m)
    number = record.next()
    try:
        leaves, treedef = flatten(tree)
        names = leaf_names(tree, "tree")
        specs = specs_of_any(PartitionSpec() if specs is None else specs, tree, m)
        leaf_specs = broadcast_specs(specs, tree, "tree")
        leaf_specs = [
            s.at_rank(x.ndim) if isinstance(x, torch.Tensor) else s
            for s, x in zip(leaf_specs, leaves, strict=True)
        ]
        check_alive(leaves, names)
        check_placed(leaves, leaf_specs, names, m)
        failures = [
            f"{name} is {'a DTensor already' if is_dtensor(x) else 'no tensor'}, and has spec"
            f" {spec}."
            for name, x, spec in zip(names, leaves, leaf_specs, strict=True)
            if is_dtensor(x) or (spec and not isinstance(x, torch.Tensor))
        ]
        for name, x, spec in zip(names, leaves, leaf_specs, strict=True):
            failures += check_spec(spec, None, m.axes, name)
            if isinstance(x, torch.Tensor) and len(spec) > x.ndim:
                failures.append(
                    f"{name} has spec {spec} of {len(spec)} entries, but its shape"
                    f" {tuple(x.shape)} has {x.ndim} dims."
                )
        if failures:
            raise SpecError(join_failures(failures))
        held = json.dumps([_held(x, spec) for x, spec in zip(leaves, leaf_specs, strict=True)])
    except FtpError as e:
        record.agree(number, e)
        raise
    record.agree(number, {"specs of to_dtensor": str(dict(zip(names, leaf_specs, strict=True)))})
    everyone = [json.loads(text) for text in record.exchange("dtensor", held)]
    is_alone = len(everyone) < m.size()  # a process group that only pretends to have other ranks
    shapes = (
        [global_shape(x, spec, m) for x, spec in zip(leaves, leaf_specs, strict=True)]
        if is_alone
        else agreed_shapes(everyone, leaf_specs, names, m)
    )
    for shape, spec, name in zip(shapes, leaf_specs, names, strict=True):
        failures += [] if shape is None else check_spec(spec, shape, m.axes, name)
    if failures:
        raise SpecError(join_failures(failures))
    placed = [
        None if shape is None else placements_of_spec(spec, m, shape, name)
        for shape, spec, name in zip(shapes, leaf_specs, names, strict=True)
    ]
    out = []
    for x, placements, shape in zip(leaves, placed, shapes, strict=True):
        if shape is None or placements is None:
            out.append(x)
            continue
        stride = torch.empty(shape, device="meta").stride()
        local = x.detach() if x.is_leaf else x
        made = DTensor.from_local(
            local, m.torch, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        out.append(leaf_like(made, x) if x.is_leaf else made)
    return treedef.unflatten(out)


def from_dtensor(tree: Any) -> Any:
    """DTensors as this rank's shards, which remember mesh, spec and global shape; other leaves pass
    through. Nothing is sent.

    The specs are what ``ftp.specs_of`` reads from the result. A leaf stays a leaf, with its
    ``requires_grad``; a Parameter stays one.

    Args:
        tree: any tree with DTensors.

    Raises:
        SpecError: placements that no spec states: pending sums, shards that are not
            ``torch.chunk``'s.

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
    if failures:
        raise SpecError(join_failures(failures))
    return treedef.unflatten(out)


def _held(x: Any, spec: PartitionSpec) -> Any:
    held = describe_held(x, spec)
    if isinstance(held, dict):
        held["hash"] = None  # equal contents are no fault here
    return held
