"""``load``: a checkpoint onto any mesh and specs, each rank reading its part."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftp.checkpoint.manifest import (
    Manifest,
    SavedFile,
    SavedTensor,
    check_header,
    checkpoints,
    find,
    read_manifest,
)
from ftp.checkpoint.safetensors_io import BYTES, Header, TensorFile, file_hash, read_header
from ftp.checkpoint.save import earlier_failure, raise_earlier
from ftp.errors import (
    CheckpointError,
    DamagedError,
    MeshError,
    MismatchError,
    SpecError,
    join_failures,
)
from ftp.sharding.dtensor_placements import specs_of_any
from ftp.sharding.mesh import AnyMesh, Mesh, mesh_device, require_coordinate, resolve
from ftp.sharding.pytree import (
    broadcast_specs,
    dotted,
    flatten,
    kind_of,
    leaf_names,
    leaf_paths,
    nearest,
    tied_paths,
)
from ftp.sharding.spec import PartitionSpec, check_spec, local_shape
from ftp.tensors.boxes import Shape, parts_on
from ftp.tensors.device_put import leaf_like
from ftp.tensors.global_tree import share
from ftp.tensors.placement import placement, placement_of, remember
from ftp.tensors.transfer import Moving, move

_READ = 64 * 2**20  # bytes read, or sent, at a time
_SPREAD = (
    2**20
)  # bytes of a tensor from which on ranks that hold the same read a part each, and pass it on


def load(
    path: str | Path,
    like: Any,
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    step: int | None = None,
    verify: bool = True,
    timeout: float | None = None,
) -> Any:
    """The newest complete checkpoint in ``path``, placed on any mesh with any specs; all ranks of
    the mesh call it.

    Nothing in a checkpoint is executed. Each rank reads its part alone; what several ranks hold is
    read once and passed on.

    Args:
        path: the folder that ``save`` was given, or that of one checkpoint.
        like: the tree to load, of all that the checkpoint holds or of a part of it: tensors (meta
            ones do), or anything with a shape and a dtype, of the global shape; tensors that are
            placed already count with theirs. A leaf that is no tensor gives way to the one saved.
            Leaves that require a gradient, and Parameters, are so again.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``.
        step: which checkpoint, if not the newest.
        verify: compare the hashes of all that is asked for, each on one rank.
        timeout: seconds that a rank waits for the others; default that of the process group.

    Raises:
        CheckpointError: no complete checkpoint, a file that is truncated, altered or missing, a
            tensor that is missing, or of another shape or dtype, naming them; on every rank.

    >>> import tempfile, ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = ftp.save(folder, {"w": torch.ones(4)}, mesh)
    ...     ftp.load(folder, {"w": torch.empty(5, device="meta")}, mesh)
    Traceback (most recent call last):
    ftp.errors.CheckpointError: like['w'] has shape (5,), but the saved 'w' (4,).
    """
    m = loadable(mesh)
    try:
        # None where another rank looks.
        found: Any = [
            str(find(path, step).folder) if m.kind != "process" or m.rank == m.ranks[0] else None,
            earlier_failure(),
        ]
    except Exception as e:
        found = e
    everyone = share(m, "load", found, timeout, CheckpointError)
    raise_earlier([earlier for _, earlier in everyone])
    folder = Path(everyone[0][0])

    def advice() -> str:
        return _newest_whole(folder, m, timeout)

    return restore(
        lambda: _source(folder), like, m, specs, lambda path: path, verify, timeout, advice
    )


def _source(folder: Path) -> "Source":
    manifest: Manifest = read_manifest(folder)
    return Source(folder, manifest.tensors, manifest.values, manifest.files)


def _newest_whole(damaged: Path, mesh: Mesh, timeout: float | None) -> str:
    """What to load instead of a checkpoint that is damaged; all ranks look for it, each at its
    share of the hashes.
    """
    root = damaged.parent
    others = share(
        mesh,
        "load/others",
        [c.folder.name for c in reversed(checkpoints(root)) if c.folder != damaged],
        timeout,
    )[0]
    for name in others:
        try:
            source = _source(root / name)
            is_whole = all(t.problem(path) is None for path, t in source.tensors.items())
            _verify([*source.tensors.values()], [*source.tensors], source, mesh)
        except (CheckpointError, OSError):
            is_whole = False
        if all(share(mesh, "load/other", is_whole, timeout)):
            return (
                f"The newest whole checkpoint in {root} is {name}. Load it by its own folder:"
                f" ftp.load({str(root / name)!r}, ...)."
            )
    return f"No other checkpoint in {root} is whole."


@dataclass(frozen=True)
class Source:
    """Tensors in files of a folder, and values that are no tensors.

    ``files`` says of the headers, ``hashes`` of whole files, what is known of them.
    """

    folder: Path
    tensors: dict[str, SavedTensor]
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A leaf to load: what it is called here and where it is read, and where it shall lie."""

    leaf: Any
    name: str
    path: str
    spec: PartitionSpec

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.leaf, Tensor) or (
            hasattr(self.leaf, "shape") and hasattr(self.leaf, "dtype")
        )


def loadable(mesh: AnyMesh | None) -> Mesh:
    """The mesh, if something can be placed on it."""
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
    """A tree like ``like`` of what a source holds; whatever goes wrong on one rank is raised on
    all.

    Where that is a damaged file, all ranks ask for ``advice`` to give with it.
    """
    try:
        fetched = _fetch(source_of(), like, mesh, specs, rename, verify)
        told: Any = fetched.digest()
    except Exception as e:
        fetched, told = None, e
    try:
        digests = share(mesh, "load/read", told, timeout, CheckpointError)
    except Exception as e:
        # All ranks come here, unless one has not come at all.
        if advice is None or not (e is told or isinstance(e, CheckpointError)):
            raise
        if not any(share(mesh, "load/damaged", isinstance(told, DamagedError), timeout)):
            raise
        raise DamagedError(f"{e}\n  {advice()}") from e
    assert fetched is not None
    for rank, other in zip(mesh.ranks, digests, strict=False):
        if other != digests[0]:
            raise MismatchError(
                f"Rank {rank} loads another tree than rank {mesh.ranks[0]}, or with other specs."
                " Give all ranks the same."
            )
    tensors = _passed_on(fetched, mesh)
    out = []
    for w, tensor, shape in zip(fetched.wanted, tensors, fetched.shapes, strict=True):
        if shape is None:
            out.append(tensor)
            continue
        tensor = leaf_like(tensor, w.leaf) if isinstance(w.leaf, Tensor) else tensor
        out.append(remember(tensor, placement(mesh, w.spec, shape)))
    return fetched.treedef.unflatten(out)


@dataclass(frozen=True)
class _Fetched:
    """What this rank has read: shards under the specs ``reading``, which may cut more than is
    wanted.
    """

    treedef: Any
    wanted: list[Wanted]
    shapes: list[Shape | None]
    reading: list[PartitionSpec]
    leaves: list[Any]

    def digest(self) -> str:
        told = [
            [w.path, str(w.spec), str(r), s]
            for w, r, s in zip(self.wanted, self.reading, self.shapes, strict=True)
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _fetch(
    source: Source, like: Any, mesh: Mesh, specs: Any, rename: Callable[[str], str], verify: bool
) -> _Fetched:
    leaves, treedef = flatten(like)
    known = source.tensors.keys() | source.values.keys()
    paths = []
    for leaf, path in zip(leaves, leaf_paths(like), strict=True):
        # A tied weight is saved under one of its paths.
        names = [rename(dotted(p) or "tree") for p in tied_paths(leaf, path)]
        paths.append(next((name for name in names if name in known), names[0]))
    leaf_specs = broadcast_specs(
        specs_of_any(PartitionSpec() if specs is None else specs, like, mesh), like, "like"
    )
    wanted = [
        Wanted(*w) for w in zip(leaves, leaf_names(like, "like"), paths, leaf_specs, strict=True)
    ]
    _check(wanted, source, mesh)
    saved = [source.tensors[w.path] if w.is_tensor else None for w in wanted]
    reading = [
        w.spec if s is None else _reading_spec(w.spec, s, mesh)
        for w, s in zip(wanted, saved, strict=True)
    ]
    if verify:
        _verify(
            [s for s in saved if s is not None],
            [w.path for w, s in zip(wanted, saved, strict=True) if s is not None],
            source,
            mesh,
        )
    files: dict[str, TensorFile] = {}
    read = [
        source.values[w.path] if s is None else _read(w, s, spec, source, mesh, files)
        for w, s, spec in zip(wanted, saved, reading, strict=True)
    ]
    return _Fetched(treedef, wanted, [None if s is None else s.shape for s in saved], reading, read)


def _check(wanted: Sequence[Wanted], source: Source, mesh: Mesh) -> None:
    """Raises for all that the source lacks or has otherwise, and for specs that do not fit."""
    damages, failures, misfits = [], [], []
    for w in wanted:
        if w.path in source.tensors:
            if (problem := source.tensors[w.path].problem(w.path)) is not None:
                damages.append(f"{source.folder}: {problem}")
                continue
            failures += _unlike(w, source.tensors[w.path], mesh)
            if w.is_tensor:
                misfits += check_spec(w.spec, source.tensors[w.path].shape, mesh.axes, w.name)
        elif w.path in source.values:
            failures += _unlike_value(w, source.values[w.path])
            if w.spec:
                misfits.append(
                    f"{w.name} has spec {w.spec}, but is {kind_of(w.leaf)}; only a tensor can be"
                    " cut. Give P()."
                )
        else:
            known = [*source.tensors, *source.values]
            close = (
                f" The nearest are {', '.join(map(repr, nearest(w.path, known)))}." if known else ""
            )
            failures.append(f"{w.name} is missing: {source.folder} holds no {w.path!r}.{close}")
    if damages:
        raise DamagedError(join_failures(damages))
    if failures:
        raise CheckpointError(join_failures(failures))
    if misfits:
        raise SpecError(join_failures(misfits))


def _unlike(w: Wanted, saved: SavedTensor, mesh: Mesh) -> list[str]:
    if not w.is_tensor:
        return [
            f"{w.name} is {kind_of(w.leaf)}, but the saved {w.path!r} a tensor of shape"
            f" {saved.shape}, {saved.dtype}."
        ]
    shape, dtype = tuple(w.leaf.shape), str(w.leaf.dtype).removeprefix("torch.")
    if (known := placement_of(w.leaf)) is not None:
        shape = known.shape
    elif _is_shard(w, saved, mesh):
        shape = saved.shape
    failures = []
    if shape != saved.shape:
        failures.append(f"{w.name} has shape {shape}, but the saved {w.path!r} {saved.shape}.")
    if dtype != saved.dtype:
        way_out = (
            f" Load it as {saved.dtype}, and convert it with .to(torch.{dtype})."
            if hasattr(torch, dtype)
            else ""
        )
        failures.append(f"{w.name} is {dtype}, but the saved {w.path!r} {saved.dtype}.{way_out}")
    return failures


def _is_shard(w: Wanted, saved: SavedTensor, mesh: Mesh) -> bool:
    """Whether a tensor that nobody has placed, such as what an optimizer made of shards, is as
    large as this rank's shard.
    """
    if mesh.kind != "process" or not isinstance(w.leaf, Tensor) or w.leaf.device.type == "meta":
        return False
    fits = not check_spec(w.spec, saved.shape, mesh.axes, w.name)
    return fits and tuple(w.leaf.shape) == local_shape(
        w.spec, saved.shape, mesh.axes, require_coordinate(mesh)
    )


def _unlike_value(w: Wanted, saved: Any) -> list[str]:
    if w.is_tensor:
        return [f"{w.name} is a tensor, but the saved {w.path!r} is {saved!r}, {kind_of(saved)}."]
    are_numbers = all(
        isinstance(x, int | float) and not isinstance(x, bool) for x in (w.leaf, saved)
    )
    if are_numbers or type(w.leaf) is type(saved):
        return []
    return [
        f"{w.name} is {kind_of(w.leaf)}, but the saved {w.path!r} is {saved!r}, {kind_of(saved)}."
    ]


# Reading.


@lru_cache(maxsize=4096)
def _spread(spec: PartitionSpec, shape: Shape, mesh: Mesh) -> PartitionSpec:
    """The spec cut further, over the axes that it leaves alone, along the dim where that leaves
    the least.
    """
    free = [axis for axis, n in mesh.axes.items() if axis not in spec.axes and n > 1]
    held = local_shape(spec, shape, mesh.axes)
    for dim in sorted(range(len(shape)), key=lambda d: -held[d]):
        entries: list[Any] = [*spec, *(None,) * (len(shape) - len(spec))]
        entries[dim] = (*(c.axis if c.is_plain else c for c in spec.cuts(dim)), *free)
        further = PartitionSpec(*entries)
        if free and held[dim] > 1 and not check_spec(further, shape, mesh.axes, ""):
            return further
    return spec


def _reading_spec(spec: PartitionSpec, saved: SavedTensor, mesh: Mesh) -> PartitionSpec:
    shape, dtype = saved.shape, getattr(torch, saved.dtype)
    if (
        mesh.kind != "process"
        or torch.Size(shape).numel() * dtype.itemsize < _SPREAD
        or dist.get_backend() == "fake"
    ):
        return spec
    return _spread(spec, shape, mesh)


def _read(
    w: Wanted,
    saved: SavedTensor,
    spec: PartitionSpec,
    source: Source,
    mesh: Mesh,
    files: dict[str, TensorFile],
) -> Tensor:
    """This rank's shard under ``spec``, on the mesh's device."""
    me = mesh.ranks.index(mesh.rank) if mesh.kind == "process" else 0
    dtype: torch.dtype = getattr(torch, saved.dtype)
    shape = (
        local_shape(spec, saved.shape, mesh.axes, mesh.coordinates()[me])
        if mesh.kind == "process"
        else saved.shape
    )
    shard = torch.empty(shape, dtype=dtype)
    for part in parts_on(mesh, spec, saved.shape)[me]:
        for chunk in saved.chunks:
            if (met := chunk.box.meet(part.box)) is None:
                continue
            if chunk.file not in files:
                files[chunk.file] = TensorFile(source.folder / chunk.file)
            files[chunk.file].check(w.path, dtype, chunk.box.size)
            for box in met.split(max(1, _READ // dtype.itemsize)):
                shard[part.slices(box)] = _slice(
                    files[chunk.file], w.path, box.slices(chunk.box.start), dtype
                )
    return shard.to(mesh_device(mesh))


def _slice(file: TensorFile, name: str, slices: Sequence[slice], dtype: torch.dtype) -> Tensor:
    if dtype in BYTES:
        # Cloned, as bytes may begin anywhere in a file.
        return file.read(name, (*slices, slice(0, dtype.itemsize))).clone().view(dtype).squeeze(-1)
    return file.read(name, slices)


def _passed_on(fetched: _Fetched, mesh: Mesh) -> list[Any]:
    """The leaves under the specs wanted: what was read in more parts than that goes to all that
    hold it.
    """
    at = [i for i, w in enumerate(fetched.wanted) if fetched.reading[i] != w.spec]
    out = list(fetched.leaves)
    if at:
        shards = [out[i] for i in at]
        moving = [
            Moving(
                tuple(fetched.shapes[i] or ()), x.dtype, fetched.reading[i], fetched.wanted[i].spec
            )
            for i, x in zip(at, shards, strict=True)
        ]
        moved = move(
            moving,
            shards,
            mesh,
            mesh,
            tuple(sorted(mesh.ranks)),
            mesh.rank,
            mesh_device(mesh),
            _READ,
        )
        for i, tensor in zip(at, moved, strict=True):
            out[i] = tensor
    return out


# Hashes.


def _verify(saved: Sequence[SavedTensor], names: Sequence[str], source: Source, mesh: Mesh) -> None:
    """Compares the hashes of all that is to be read, a fair share on this rank; the headers of
    its files too.
    """
    me, n = (
        (mesh.ranks.index(mesh.rank), mesh.size())
        if mesh.kind == "process" and dist.get_backend() != "fake"
        else (0, 1)
    )
    chunks = [
        (name, chunk) for name, tensor in zip(names, saved, strict=True) for chunk in tensor.chunks
    ]
    headers: dict[str, Header] = {}
    failures = []
    for name, chunk in _share_of(chunks, lambda c: c[1].box.numel, me, n):
        path = source.folder / chunk.file
        if chunk.file not in headers:
            headers[chunk.file] = header = read_header(path)
            due = source.files.get(chunk.file)
            if due is not None:
                check_header(header, due, path)
        header = headers[chunk.file]
        if name not in header.tensors:
            failures.append(f"{path} holds no tensor {name!r}, which should be there.")
        elif chunk.sha256:
            at = header.tensors[name]
            if file_hash(path, header.size + at.begin, header.size + at.end) != chunk.sha256:
                failures.append(
                    f"{path} was altered: tensor {name!r} does not have the sha256 that the"
                    " manifest states."
                )
    whole = {chunk.file for _, chunk in chunks} & set(source.hashes)
    for name in _share_of(sorted(whole), lambda name: (source.folder / name).stat().st_size, me, n):
        path = source.folder / name
        if file_hash(path, 0, path.stat().st_size) != source.hashes[name]:
            failures.append(
                f"{path} was altered: it does not have the sha256 that is stated for it."
            )
    if failures:
        raise DamagedError(join_failures(failures))


def _share_of(items: Sequence[Any], size: Callable[[Any], int], me: int, n: int) -> Iterator[Any]:
    """The run of ``items`` that begins in this rank's part of their sizes."""
    sizes = [max(1, size(item)) for item in items]
    before = 0
    for item, s in zip(items, sizes, strict=True):
        if before * n // sum(sizes) == me:
            yield item
        before += s
