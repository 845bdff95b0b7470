"""Load a source's tensors as a tree on a mesh: check, read on all ranks, and place."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.checkpoint.manifest import SavedTensor
from ftp.checkpoint.read_shards import exchange_parts, read_shards, with_reading_specs
from ftp.checkpoint.source import Source, verify_hashes
from ftp.dataclass import dataclass
from ftp.distributed.shared_errors import all_gather_object, attempt
from ftp.errors import (
    CheckpointError,
    DamagedError,
    MeshError,
    MismatchError,
    SpecError,
    raise_all,
)
from ftp.sharding.check_spec import check_spec
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import AnyMesh, Mesh, require_coordinate, resolve
from ftp.sharding.patterns import dotted, nearest
from ftp.sharding.pytree import cut_value, kind_of, leaf_paths, tied_paths
from ftp.tensors.placement import placed, placement_of
from ftp.tensors.sharded_tree import Leaf, ShardedTree, flatten_with_specs


def loadable(mesh: AnyMesh | None) -> Mesh:
    """The mesh, if tensors can be placed on it."""
    m = resolve(mesh)
    if m.kind == "abstract":
        raise MeshError(
            f"The mesh {m} is abstract: nothing can be loaded onto it. Give a mesh of processes,"
            " or ftp.simulated_mesh."
        )
    if m.kind == "process":
        require_coordinate(m)
    return m


def restore(
    source_of: Callable[[], Source],
    like: Any,
    mesh: Mesh,
    specs: Any,
    rename: Callable[[str], str],
    verify: bool,
    timeout: float | None,
    advice: Callable[[], str] | None = None,
) -> Any:
    """A tree like ``like`` from a source. A failure on one rank is raised on all.

    Args:
        source_of: opens the source.
        rename: from a path of ``like`` to a name in the source.
        advice: text for the error if a file is damaged; all ranks call it.
    """
    fetched = attempt(lambda: _fetch(source_of(), like, mesh, specs, rename, verify))
    told = attempt(fetched.digest) if isinstance(fetched, _Fetched) else fetched
    try:
        digests = all_gather_object(mesh, "load/read", told, timeout, CheckpointError)
    except Exception as e:
        # All ranks raise here, except when a rank never came.
        if advice is None or not (e is told or isinstance(e, CheckpointError)):
            raise
        is_damaged = isinstance(told, DamagedError)
        if not any(all_gather_object(mesh, "load/damaged", is_damaged, timeout)):
            raise
        raise DamagedError(f"{e}\n  {advice()}") from e
    for rank, other in zip(mesh.ranks, digests, strict=False):
        if other != digests[0]:
            raise MismatchError(
                f"Rank {rank} loads another tree than rank {mesh.ranks[0]}, or with other specs."
                " Give all ranks the same."
            )
    return _place(fetched)


@dataclass(frozen=True)
class _Fetched:
    """The values that this rank has read.

    Attributes:
        wanted: the result's tree, with the shapes in the source.
        paths: per leaf, its path in the source.
        reading: the tree with the specs of ``values``.
    """

    wanted: ShardedTree
    paths: list[str]
    reading: ShardedTree
    values: list[Any]

    def digest(self) -> str:
        told = [
            [path, str(leaf.spec), str(read.spec), leaf.shape]
            for path, leaf, read in zip(
                self.paths, self.wanted.leaves, self.reading.leaves, strict=True
            )
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _fetch(
    source: Source, like: Any, mesh: Mesh, specs: Any, rename: Callable[[str], str], verify: bool
) -> _Fetched:
    wanted = flatten_with_specs(like, mesh, specs, "like")
    paths = _paths_in(source, wanted, like, rename)
    _check(wanted, paths, source)
    saved = [source.tensors.get(path) for path in paths]
    wanted = wanted.with_shapes(None if s is None else s.shape for s in saved)
    if verify:
        tensors = {path: s for path, s in zip(paths, saved, strict=True) if s is not None}
        verify_hashes(tensors, source, mesh)
    reading = with_reading_specs(wanted)
    return _Fetched(wanted, paths, reading, read_shards(reading, paths, source))


def _paths_in(
    source: Source, wanted: ShardedTree, like: Any, rename: Callable[[str], str]
) -> list[str]:
    """The path of each leaf in the source, which holds a tied weight under one of its paths."""
    known = source.tensors.keys() | source.values.keys()
    paths = []
    for leaf, path in zip(wanted.leaves, leaf_paths(like), strict=True):
        names = [rename(dotted(p) or "tree") for p in tied_paths(leaf.value, path)]
        paths.append(next((name for name in names if name in known), names[0]))
    return paths


def _place(fetched: _Fetched) -> Any:
    wanted = fetched.wanted
    values = exchange_parts(fetched.reading, wanted.specs, fetched.values)
    return wanted.unflatten(
        value
        if leaf.shape is None
        else placed(value, leaf.value, wanted.mesh, leaf.spec, leaf.shape)
        for leaf, value in zip(wanted.leaves, values, strict=True)
    )


def _check(wanted: ShardedTree, paths: Sequence[str], source: Source) -> None:
    """Raise for leaves that are missing, of another shape or dtype, or whose specs do not fit."""
    damages, failures, misfits = [], [], []
    axes = wanted.mesh.axes
    for leaf, path in zip(wanted.leaves, paths, strict=True):
        if path in source.tensors:
            saved = source.tensors[path]
            if (problem := saved.problem(path)) is not None:
                damages.append(f"{source.folder}: {problem}")
                continue
            failures += _unlike(leaf, path, saved, wanted.mesh)
            if leaf.is_tensor:
                misfits += check_spec(leaf.spec, saved.shape, axes, leaf.name)
        elif path in source.values:
            failures += _unlike_value(leaf, path, source.values[path])
            if leaf.spec:
                misfits.append(cut_value(leaf.name, leaf.value, leaf.spec))
        else:
            close = ", ".join(map(repr, nearest(path, [*source.tensors, *source.values])))
            close = f" The nearest are {close}." if close else ""
            failures.append(f"{leaf.name} is missing: {source.folder} holds no {path!r}.{close}")
    raise_all(DamagedError, damages)
    raise_all(CheckpointError, failures)
    raise_all(SpecError, misfits)


def _unlike(leaf: Leaf, path: str, saved: SavedTensor, mesh: Mesh) -> list[str]:
    if not leaf.is_tensor:
        return [
            f"{leaf.name} is {kind_of(leaf.value)}, but the saved {path!r} a tensor of shape"
            f" {saved.shape}, {saved.dtype}."
        ]
    shape, dtype = tuple(leaf.value.shape), leaf.dtype
    if (known := placement_of(leaf.value)) is not None:
        shape = known.shape
    elif _is_shard(leaf, saved, mesh):
        shape = saved.shape
    failures = []
    if shape != saved.shape:
        failures.append(f"{leaf.name} has shape {shape}, but the saved {path!r} {saved.shape}.")
    if dtype != saved.dtype:
        advice = f" Load it as {saved.dtype}, and convert it with .to(torch.{dtype})."
        advice = advice if hasattr(torch, dtype) else ""
        failures.append(f"{leaf.name} is {dtype}, but the saved {path!r} {saved.dtype}.{advice}")
    return failures


def _is_shard(leaf: Leaf, saved: SavedTensor, mesh: Mesh) -> bool:
    """Whether a tensor that is not placed has the shape of this rank's shard, as the state of an
    optimizer that was made from shards does.
    """
    if (
        mesh.kind != "process"
        or not isinstance(leaf.value, Tensor)
        or leaf.value.device.type == "meta"
    ):
        return False
    fits = not check_spec(leaf.spec, saved.shape, mesh.axes, leaf.name)
    return fits and tuple(leaf.value.shape) == local_shape(
        leaf.spec, saved.shape, mesh.axes, require_coordinate(mesh)
    )


def _unlike_value(leaf: Leaf, path: str, saved: Any) -> list[str]:
    if leaf.is_tensor:
        return [f"{leaf.name} is a tensor, but the saved {path!r} is {saved!r}, {kind_of(saved)}."]
    are_numbers = all(
        isinstance(x, int | float) and not isinstance(x, bool) for x in (leaf.value, saved)
    )
    if are_numbers or type(leaf.value) is type(saved):
        return []
    return [
        f"{leaf.name} is {kind_of(leaf.value)}, but the saved {path!r} is {saved!r},"
        f" {kind_of(saved)}."
    ]
