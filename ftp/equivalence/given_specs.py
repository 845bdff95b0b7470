"""Specs and DTensor placements that `equivalent` is given, brought to one form."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.errors import SpecError
from ftp.sharding.dtensor_placements import (
    is_dtensor,
    is_placements,
    spec_of_placements,
    specs_of_any,
)
from ftp.sharding.mesh import Mesh
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec, cuts_of


def placements_of(specs: Any, args: Any) -> list[Any]:
    """For each leaf the DTensor placements that are given for it, else None."""
    if is_placements(specs):
        return [specs if isinstance(x, Tensor) else None for x in flatten(args)[0]]
    if isinstance(specs, dict) and isinstance(args, dict):
        return [found for key in sorted(args) for found in placements_of(specs.get(key), args[key])]
    if (
        isinstance(specs, tuple | list)
        and isinstance(args, tuple | list)
        and len(specs) == len(args)
    ):
        return [found for s, a in zip(specs, args, strict=True) for found in placements_of(s, a)]
    if isinstance(args, tuple) and len(args) == 1:
        return placements_of(specs, args[0])
    return [None] * len(flatten(args)[0])


def as_specs(specs: Any, tree: Any, mesh: Mesh, where: str) -> Any:
    """A spec tree with placements replaced by specs; a Partial placement is an unreduced axis."""
    return specs_of_any(specs, tree, mesh, where, _with_sums)


def _with_sums(placements: Any, mesh: Mesh, shape: Sequence[int], where: str) -> PartitionSpec:
    from torch.distributed.tensor import Replicate

    pending = [p.is_partial("sum") for p in placements]
    plain = [Replicate() if s else p for s, p in zip(pending, placements, strict=True)]
    found = spec_of_placements(plain, mesh, shape, where)
    axes = [a for a, s in zip(mesh.axis_names, pending, strict=True) if s]
    return PartitionSpec(*found.entries, unreduced=axes)


def require_placements(
    x: Any, spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, name: str
) -> None:
    """Raise for a DTensor on ``mesh`` whose placements differ from those of its spec."""
    if not is_dtensor(x) or x.device_mesh.mesh_dim_names != mesh.axis_names:
        return
    whole = torch.empty(tuple(shape), device="meta")
    try:
        own = as_specs(x.placements, whole, mesh, name)
    except SpecError:
        own = None
    if own is None or _layout(own, len(shape), mesh) != _layout(spec, len(shape), mesh):
        raise SpecError(
            f"{name} is a DTensor with placements {tuple(x.placements)}; its spec is {spec}. Give"
            " its placements in out_specs, or redistribute it before it is returned."
        )


def _layout(spec: PartitionSpec, ndim: int, mesh: Mesh) -> Any:
    """The cuts and unreduced axes of a spec, without axes of one rank."""
    cuts = cuts_of(spec.at_rank(ndim))
    dims = [[c for c in dim if mesh.axes[c[0]] > 1] for dim in cuts]
    return dims + [[]] * (ndim - len(dims)), {a for a in spec.unreduced if mesh.axes[a] > 1}
