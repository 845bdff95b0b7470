"""Read a rank's shards from the files of a source.

Ranks that hold the same shard of a large tensor read a part each and exchange the parts, so that
every byte is read once.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftp.checkpoint.manifest import SavedTensor
from ftp.checkpoint.safetensors_io import BYTES, TensorFile
from ftp.checkpoint.source import Source
from ftp.sharding.check_spec import check_spec
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import Mesh, mesh_device
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.boxes import Shape, parts_on
from ftp.tensors.sharded_tree import Leaf, ShardedTree
from ftp.tensors.transfer import ReshardedTensor, reshard_shards

_READ = 64 * 2**20  # bytes read or sent at a time
_SPREAD = 2**20  # bytes; replicas of a smaller tensor each read all of it


def with_reading_specs(tree: ShardedTree) -> ShardedTree:
    """The tree with the specs for reading, under which replicas are cut further."""
    leaves = tuple(
        leaf if leaf.shape is None else replace(leaf, spec=_reading_spec(leaf, tree.mesh))
        for leaf in tree.leaves
    )
    return replace(tree, leaves=leaves)


def _reading_spec(leaf: Leaf, mesh: Mesh) -> PartitionSpec:
    nbytes = torch.Size(leaf.known_shape).numel() * torch_dtype(leaf).itemsize
    if mesh.kind != "process" or nbytes < _SPREAD or dist.get_backend() == "fake":
        return leaf.spec
    return _spread(leaf.spec, leaf.known_shape, mesh)


def torch_dtype(leaf: Leaf) -> torch.dtype:
    return getattr(torch, leaf.dtype)


@lru_cache(maxsize=4096)
def _spread(spec: PartitionSpec, shape: Shape, mesh: Mesh) -> PartitionSpec:
    """``spec`` with the axes that it does not use added to the largest dim that they can cut."""
    free = [axis for axis, n in mesh.axes.items() if axis not in spec.axes and n > 1]
    held = local_shape(spec, shape, mesh.axes)
    for dim in sorted(range(len(shape)), key=lambda d: -held[d]):
        entries: list[Any] = [*spec, *(None,) * (len(shape) - len(spec))]
        entries[dim] = (*(c.axis if c.is_plain else c for c in spec.cuts(dim)), *free)
        further = PartitionSpec(*entries)
        if free and held[dim] > 1 and not check_spec(further, shape, mesh.axes, ""):
            return further
    return spec


def read_shards(tree: ShardedTree, paths: Sequence[str], source: Source) -> list[Any]:
    """This rank's shards, on the mesh's device, and the values that are no tensors.

    Args:
        paths: per leaf, its path in the source.
    """
    files: dict[str, TensorFile] = {}
    return [
        source.values[path]
        if leaf.shape is None
        else _read(leaf, path, source.tensors[path], source, tree.mesh, files)
        for leaf, path in zip(tree.leaves, paths, strict=True)
    ]


def _read(
    leaf: Leaf,
    path: str,
    saved: SavedTensor,
    source: Source,
    mesh: Mesh,
    files: dict[str, TensorFile],
) -> Tensor:
    me = mesh.ranks.index(mesh.rank) if mesh.kind == "process" else 0
    dtype, shape = torch_dtype(leaf), saved.shape
    if mesh.kind == "process":
        shape = local_shape(leaf.spec, saved.shape, mesh.axes, mesh.coordinates()[me])
    shard = torch.empty(shape, dtype=dtype)
    for part in parts_on(mesh, leaf.spec, saved.shape)[me]:
        for chunk in saved.chunks:
            if (met := chunk.box.meet(part.box)) is None:
                continue
            if chunk.file not in files:
                files[chunk.file] = TensorFile(source.folder / chunk.file)
            files[chunk.file].check(path, dtype, chunk.box.size)
            for box in met.split(max(1, _READ // dtype.itemsize)):
                shard[part.slices(box)] = _slice(
                    files[chunk.file], path, box.slices(chunk.box.start), dtype
                )
    return shard.to(mesh_device(mesh))


def _slice(file: TensorFile, name: str, slices: Sequence[slice], dtype: torch.dtype) -> Tensor:
    if dtype in BYTES:
        # Cloned, as bytes may begin anywhere in a file.
        return file.read(name, (*slices, slice(0, dtype.itemsize))).clone().view(dtype).squeeze(-1)
    return file.read(name, slices)


def exchange_parts(
    read: ShardedTree, wanted: Sequence[PartitionSpec], shards: Sequence[Any]
) -> list[Any]:
    """Reshard shards from the specs of ``read`` to the specs ``wanted``."""
    at = [i for i, leaf in enumerate(read.leaves) if leaf.spec != wanted[i]]
    out = list(shards)
    if at:
        given = [
            ReshardedTensor(leaf.known_shape, out[i].dtype, leaf.spec, wanted[i])
            for i in at
            for leaf in (read.leaves[i],)
        ]
        resharded = reshard_shards(given, [out[i] for i in at], read.mesh, read.mesh, _READ)
        for i, tensor in zip(at, resharded, strict=True):
            out[i] = tensor
    return out
