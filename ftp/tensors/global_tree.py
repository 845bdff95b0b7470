"""A tree of tensors as the shards that all ranks hold, its global shapes agreed by them; and
failures that all of them share.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftp.distributed.agreement import calls
from ftp.errors import (
    CollectiveError,
    FtpError,
    InputError,
    MismatchError,
    SpecError,
    join_failures,
)
from ftp.sharding.dtensor_placements import check_plain, specs_of_any
from ftp.sharding.mesh import Mesh
from ftp.sharding.pytree import broadcast_specs, dotted, flatten, kind_of, leaf_names, leaf_paths
from ftp.sharding.spec import PartitionSpec, check_spec
from ftp.tensors.boxes import Shape
from ftp.tensors.device_put import global_shape
from ftp.tensors.global_shapes import agreed_shapes, describe_held
from ftp.tensors.placement import call_of, check_alive, check_placed, placement_of

_LINGER = 2.0  # seconds that a failing rank stays, at the most, for the others to read why


@dataclass(frozen=True)
class Shards:
    """A tree, flat, as one rank knows it: what it calls its leaves, how they lie, and of the
    tensors among them the global shape.

    A shape is None for a leaf that is no tensor, and for a tensor that nobody has placed until
    `agreed` finds it.
    """

    treedef: Any
    leaves: list[Any]
    names: list[str]
    paths: list[str]
    specs: list[PartitionSpec]
    shapes: list[Shape | None]

    def made_by(self, mesh: Mesh) -> list[int | None]:
        """The number of the latest call on the mesh that made one of them, None if no call did;
        and of the last that has ended here.
        """
        made = [
            call for x in self.leaves if isinstance(x, Tensor) and (call := call_of(x)) is not None
        ]
        return [max(made, default=None), calls(mesh).call]

    def facts(self) -> list[list[Any]]:
        """Per leaf what has to be equal on all ranks."""
        return [
            [
                name,
                *(
                    ("tensor", str(x.dtype), str(spec))
                    if isinstance(x, Tensor)
                    else ("value", type(x).__name__, repr(x))
                ),
            ]
            for name, x, spec in zip(self.names, self.leaves, self.specs, strict=True)
        ]


def patience(mesh: Mesh, timeout: float | None) -> float:
    """Seconds to wait for others: ``timeout``, or what the process group waits at its start."""
    return calls(mesh).timeouts.start if timeout is None else timeout


def share(
    mesh: Mesh, key: str, value: Any, timeout: float | None, failed: type[FtpError] = MismatchError
) -> list[Any]:
    """Every rank's ``value``, as JSON, in the order of the mesh's ranks; all ranks call it.

    A rank whose work failed gives the exception: it is raised again there, and an error of type
    ``failed`` that names the rank elsewhere.
    """
    is_error = isinstance(value, BaseException)
    text = json.dumps(
        {"error": f"{type(value).__name__}: {value}"[:4000]} if is_error else {"value": value}
    )
    try:
        everyone = [json.loads(t) for t in calls(mesh).exchange(key, text, timeout)]
    except CollectiveError as e:
        raise (value if is_error else failed(str(e))) from e
    ranks = mesh.ranks or (0,)
    errors = {
        rank: given["error"]
        for rank, given in zip(ranks, everyone, strict=False)
        if "error" in given
    }
    if errors:
        # This rank may hold the store, and its end would close the connections of those that still
        # read.
        with contextlib.suppress(MismatchError, CollectiveError):
            calls(mesh).exchange(f"{key}/seen", "", _LINGER)
    if is_error:
        raise value
    if errors:
        raise failed(
            join_failures(
                f"Rank {rank} failed, so no rank goes on. Its error:\n  {e}"
                for rank, e in list(errors.items())[:8]
            )
        )
    return [given["value"] for given in everyone]


def shards_of(tree: Any, mesh: Mesh, specs: Any, root: str = "tree") -> Shards:
    """What this rank can tell of a tree of local shards.

    Raises:
        FtpError: specs that do not fit, tensors donated, placed otherwise, or of a kind that has no
            values here.
    """
    leaves, treedef = flatten(tree)
    names = leaf_names(tree, root)
    paths = [dotted(path) or root for path in leaf_paths(tree)]
    leaf_specs = broadcast_specs(
        specs_of_any(PartitionSpec() if specs is None else specs, tree, mesh), tree, root
    )
    leaf_specs = [
        s.at_rank(x.ndim) if isinstance(x, Tensor) else s
        for s, x in zip(leaf_specs, leaves, strict=True)
    ]
    check_alive(leaves, names)
    check_placed(leaves, leaf_specs, names, mesh)
    check_plain(leaves, names)
    failures = [
        problem for name, x in zip(names, leaves, strict=True) if (problem := _unfit(x, name))
    ]
    if failures:
        raise InputError(join_failures(failures))
    shapes: list[Shape | None] = []
    for x, spec, name in zip(leaves, leaf_specs, names, strict=True):
        known = placement_of(x)
        shape = (
            known.shape
            if known is not None
            else tuple(x.shape)
            if isinstance(x, Tensor) and mesh.kind != "process"
            else None
        )
        shapes.append(shape)
        if isinstance(x, Tensor):
            failures += check_spec(spec, shape, mesh.axes, name)
        elif spec:
            failures.append(
                f"{name} has spec {spec}, but is {kind_of(x)}; only a tensor can be cut. Give P()."
            )
    if failures:
        raise SpecError(join_failures(failures))
    return Shards(treedef, leaves, names, paths, leaf_specs, shapes)


def digest(shards: Shards) -> str:
    """What tells whether ranks hold shards of the same tree, as far as each knows."""
    return hashlib.sha256(json.dumps([shards.facts(), shards.shapes]).encode()).hexdigest()


def agreed(
    shards: Shards, mesh: Mesh, key: str, digests: Sequence[str], timeout: float | None
) -> Shards:
    """The same, with every tensor's global shape; ``digests`` are those of all ranks, which tell
    whether more has to be said.

    Raises:
        MismatchError: the first leaf in which ranks differ, or shards that are not those of one
            tensor; on every rank.
    """
    is_known = all(
        s is not None or not isinstance(x, Tensor)
        for s, x in zip(shards.shapes, shards.leaves, strict=True)
    )
    if is_known and len(set(digests)) == 1:
        return shards
    held = [describe_held(x, spec) for x, spec in zip(shards.leaves, shards.specs, strict=True)]
    everyone = share(mesh, f"{key}/held", [shards.facts(), held], timeout)
    for rank, (facts, _) in zip(mesh.ranks, everyone, strict=False):
        if facts != everyone[0][0]:
            raise MismatchError(_difference(everyone[0][0], facts, mesh.ranks[0], rank))
    if len(everyone) < mesh.size():  # a process group that only pretends to have other ranks
        shapes = [
            global_shape(x, spec, mesh) for x, spec in zip(shards.leaves, shards.specs, strict=True)
        ]
    else:
        shapes = agreed_shapes([held for _, held in everyone], shards.specs, shards.names, mesh)
    failures = []
    for shape, spec, name in zip(shapes, shards.specs, shards.names, strict=True):
        failures += [] if shape is None else check_spec(spec, shape, mesh.axes, name)
    if failures:
        raise SpecError(join_failures(failures))
    return Shards(shards.treedef, shards.leaves, shards.names, shards.paths, shards.specs, shapes)


def _difference(first: list[list[str]], other: list[list[str]], a: int, b: int) -> str:
    for x, y in zip(first, other, strict=False):
        if x != y:
            what = [
                f"{name} is a tensor of {rest[0]}, spec {rest[1]}"
                if kind == "tensor"
                else f"{name} is {rest[1]}"
                for name, kind, *rest in (x, y)
            ]
            return (
                f"Ranks hold different trees: on rank {a} {what[0]}; on rank {b} {what[1]}."
                " Give every rank the same tree and specs."
            )
    longer = first if len(first) > len(other) else other
    return (
        f"Ranks hold different trees: {longer[min(len(first), len(other))][0]} is on rank"
        f" {a if longer is first else b} only."
    )


def _unfit(leaf: Any, name: str) -> str | None:
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        return (
            f"{name} is of layout {leaf.layout}; only strided tensors can be cut. Give .to_dense()."
        )
    return None
