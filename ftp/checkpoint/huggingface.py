"""``load_safetensors`` and ``save_safetensors``: Hugging Face's files of whole tensors, read and
written by shards.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftp.checkpoint.manifest import SavedTensor, StoredChunk, is_plain_name
from ftp.checkpoint.restore import loadable, restore
from ftp.checkpoint.safetensors_io import (
    BYTES,
    OFFSETS,
    STORED,
    file_hash,
    is_shape,
    read_header,
    sync,
    write_file,
    write_text,
)
from ftp.checkpoint.save import check_savable
from ftp.checkpoint.source import Source
from ftp.checkpoint.write_shards import leads
from ftp.distributed.shared_errors import all_gather_object, attempt
from ftp.errors import CheckpointError, InputError, raise_all
from ftp.sharding.mesh import AnyMesh, Mesh
from ftp.sharding.patterns import listed, nearest
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.boxes import Box, Shape, whole
from ftp.tensors.sharded_tree import ShardedTree, sharded_tree, with_agreed_shapes
from ftp.tensors.transfer import ReshardedTensor, reshard_shards

INDEX = "model.safetensors.index.json"
SUMS = "SHA256SUMS"
_AT_A_TIME = 64 * 2**20  # bytes of messages at a time
_DTYPES = {name: str(dtype).removeprefix("torch.") for dtype, name in STORED.items()}

Rename = Mapping[str, str] | Callable[[str], str]


def load_safetensors(
    path: str | Path,
    like: Any,
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    rename: Rename | None = None,
    verify: bool = True,
    timeout: float | None = None,
) -> Any:
    """Load tensors from safetensors files onto a mesh. All ranks call it, and each reads only its
    slices.

    Args:
        path: a file, or a folder: with an index (``*.safetensors.index.json``), or the files alone.
            The parts that ``torch.distributed.checkpoint`` writes in this format are put together.
        like: the tree to load, as for ``ftp.load``; its paths, joined by dots, are the names in the
            files.
        mesh, specs: as for ``ftp.load``.
        rename: ``{path: name}``, or a function from path to name, where the files have other names;
            a path that is not in the dict is its own name.
        verify: compare the hashes of the files with ``SHA256SUMS``, where the folder has one, each
            on one rank. Sizes are always checked.
        timeout: seconds that a rank waits for the others; default that of the process group.

    Returns:
        A tree like ``like`` of this rank's shards, placed with ``specs``.

    Raises:
        CheckpointError: every tensor that is missing, or of another shape or dtype; on every rank.
        DamagedError: a file that is truncated, altered or missing; on every rank.

    >>> import tempfile, torch, ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ftp.save_safetensors(folder, {"w": torch.ones(4)}, mesh)
    ...     ftp.load_safetensors(folder, {"w": torch.empty(4, device="meta")}, mesh, ftp.P("tp"))
    {'w': tensor([1., 1., 1., 1.])}
    """
    return restore(
        lambda: read_folder(Path(path)),
        like,
        loadable(mesh),
        specs,
        _renamer(rename),
        verify,
        timeout,
    )


def save_safetensors(
    folder: str | Path,
    tree: Any,
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    rename: Rename | None = None,
    max_file_bytes: int = 5 * 10**9,
    timeout: float | None = None,
) -> None:
    """Save a tree of tensors as Hugging Face's libraries read it: whole tensors by path in
    safetensors files, an index if there are several files, and a list of hashes, ``SHA256SUMS``.

    All ranks call it and take turns to write files. A rank holds at most one file's tensors besides
    its shards.

    Args:
        folder: where to write; if it exists, it must hold no safetensors files.
        tree: this rank's shards, placed or not; all leaves are tensors.
        mesh: default that of ``ftp.use_mesh``.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``.
        rename: ``{path: name}``, or a function from path to name, as for ``load_safetensors``.
        max_file_bytes: bytes of tensors in a file at most; a larger tensor has a file to itself.
        timeout: seconds that a rank waits for the others; default that of the process group.

    Raises:
        CheckpointError: the file system's errors, on every rank.
        InputError, SpecError: leaves that are no tensors, specs that do not fit.

    >>> import tempfile, torch, ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ftp.save_safetensors(folder, {"layers.0.w": torch.ones(4)}, mesh)
    ...     sorted(os.listdir(folder))
    ['SHA256SUMS', 'model.safetensors']
    """
    m = loadable(mesh)
    target = Path(folder).absolute()
    draft: Path | None = None
    try:
        shards = sharded_tree(tree, m, specs)
        names = _checked_names(shards, rename)
        if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
            raise InputError(f"max_file_bytes={max_file_bytes!r}: give a positive number of bytes.")
        draft = _new_draft(target) if leads(m) else None
        told: Any = [shards.digest(), str(draft), names, max_file_bytes]
    except Exception as e:
        shards, names, told = None, [], e
    try:
        everyone = all_gather_object(m, "save_safetensors", told, timeout, CheckpointError)
        assert shards is not None
        if odd := next(
            (r for r, t in zip(m.ranks, everyone, strict=False) if t[2:] != everyone[0][2:]), None
        ):
            raise CheckpointError(
                f"Rank {odd} gives other names or another max_file_bytes than rank {m.ranks[0]}."
                " Give all ranks the same."
            )
        digests = [t[0] for t in everyone]
        shards = with_agreed_shapes(shards, "save_safetensors", digests, timeout)
        _write(shards, names, Path(everyone[0][1]), target, max_file_bytes, timeout)
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def read_folder(path: Path) -> Source:
    """The tensors of a safetensors file, or of a folder of them."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    folder, index, files = path.parent, {}, [path.name]
    if path.is_dir():
        folder, index = path, _read_index(path)
        files = sorted(set(index.values()) or (f.name for f in path.glob("*.safetensors")))
    if not files:
        raise CheckpointError(f"{path} holds no safetensors files.")
    found: dict[str, tuple[str, list[StoredChunk]]] = {}
    for file in files:
        header = read_header(folder / file)
        offsets = _offsets(header.metadata, folder / file)
        for name, stored in header.tensors.items():
            if index and index.get(name) != file:
                continue
            if name in found and name not in offsets:
                raise CheckpointError(
                    f"{name!r} is in {found[name][1][0].file} and in {file} of {folder}. Give the"
                    " one file to read."
                )
            start = offsets.get(name, (0,) * len(stored.shape))
            if len(start) != len(stored.shape):
                raise CheckpointError(
                    f"{folder / file} states offsets {list(start)} for {name!r}, a tensor of shape"
                    f" {stored.shape}: one is needed for each dim."
                )
            _, chunks = found.setdefault(name, (_DTYPES.get(stored.dtype, stored.dtype), []))
            chunks.append(StoredChunk(file, Box(start, stored.shape), ""))
    lacking = (
        f"{folder / file} holds no {name!r}, which the index says it does."
        for name, file in index.items()
        if name not in found
    )
    raise_all(CheckpointError, lacking)
    tensors = {
        name: SavedTensor(dtype, _extent(chunks), "", tuple(chunks))
        for name, (dtype, chunks) in found.items()
    }
    return Source(folder, tensors, hashes=_read_sums(folder))


def _extent(chunks: Sequence[StoredChunk]) -> Shape:
    """The shape of a tensor that consists of chunks."""
    ends = [[a + n for a, n in zip(c.box.start, c.box.size, strict=True)] for c in chunks]
    return tuple(map(max, zip(*ends, strict=True)))


def _read_index(folder: Path) -> dict[str, str]:
    """``{tensor: file}`` of the folder's index; empty without an index."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} has several indexes, {', '.join(f.name for f in found)}. Keep the one to"
            " read."
        )
    if not found:
        return {}
    try:
        files = json.loads(found[0].read_text(encoding="utf-8"))["weight_map"]
        if not all(map(is_plain_name, files.values())):
            raise ValueError("names of files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(
            f"{found[0]} is no index of safetensors files: it is truncated, altered, or of another"
            " format."
        ) from e
    return files


def _offsets(metadata: Mapping[str, str], path: Path) -> dict[str, Shape]:
    """The offsets of a file's tensors in global tensors, if torch.distributed.checkpoint wrote
    them.
    """
    if OFFSETS not in metadata:
        return {}
    try:
        offsets = {
            name: tuple(info["saved_offsets"])
            for name, info in json.loads(metadata[OFFSETS]).items()
        }
        if not all(map(is_shape, offsets.values())):
            raise ValueError("offsets")
        return offsets
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(
            f"{path} has offsets of shards that cannot be read: it is altered, or of another"
            " format."
        ) from e


def _read_sums(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{folder / SUMS} cannot be read: {e}.") from e
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    if not all(len(pair) == 2 and len(pair[0]) == 64 for pair in pairs):
        raise CheckpointError(
            f"{folder / SUMS} is no list of hashes as sha256sum writes it. Mend it, or give"
            " verify=False."
        )
    return {name.removeprefix("*"): sha256 for sha256, name in pairs}


def _renamer(rename: Rename | None) -> Callable[[str], str]:
    if rename is None:
        return str
    if isinstance(rename, Mapping):
        return lambda path: rename.get(path, path)

    def renamed(path: str) -> str:
        if not isinstance(name := rename(path), str):
            raise InputError(f"rename gives {name!r} for {path!r}; it must give a name, a str.")
        return name

    return renamed


def _checked_names(shards: ShardedTree, rename: Rename | None) -> list[str]:
    check_savable(shards)
    paths = [leaf.path for leaf in shards.leaves]
    if isinstance(rename, Mapping) and (unknown := [path for path in rename if path not in paths]):
        raise InputError(
            f"rename names {listed(unknown)}, which the tree does not have; the nearest to"
            f" {unknown[0]!r} are {listed(nearest(unknown[0], paths))}."
        )
    names = list(map(_renamer(rename), paths))
    failures = [
        f"{leaf.name} is {kind_of(leaf.value)}; only tensors can be saved."
        for leaf in shards.leaves
        if not isinstance(leaf.value, Tensor)
    ]
    failures += [
        f"{leaf.name} is of dtype {leaf.value.dtype}, which safetensors files cannot hold. Convert"
        " it."
        for leaf in shards.leaves
        if isinstance(leaf.value, Tensor) and leaf.value.dtype in BYTES
    ]
    first: dict[str, str] = {}
    for leaf, name in zip(shards.names, names, strict=True):
        if first.setdefault(name, leaf) != leaf:
            failures.append(f"{first[name]} and {leaf} have one name, {name!r}. Rename one.")
    raise_all(InputError, failures)
    return names


def _new_draft(target: Path) -> Path:
    try:
        target.mkdir(parents=True, exist_ok=True)
        if there := sorted(f.name for f in target.glob("*.safetensors*")):
            raise CheckpointError(
                f"{target} holds {there[0]} already. Give another folder, or remove what is there."
            )
        draft = target / f".saving-{uuid.uuid4().hex[:8]}"
        draft.mkdir()
    except OSError as e:
        raise CheckpointError(f"Nothing can be written in {target}: {e.strerror or e}.") from e
    return draft


def _write(
    shards: ShardedTree,
    names: Sequence[str],
    draft: Path,
    target: Path,
    limit: int,
    timeout: float | None,
) -> None:
    mesh = shards.mesh
    groups = _groups(shards, limit)
    files = [
        "model.safetensors"
        if len(groups) == 1
        else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        for i in range(len(groups))
    ]
    ranks = mesh.ranks if mesh.kind == "process" else (0,)
    me = mesh.rank if mesh.kind == "process" else 0

    def write(mine: dict[str, dict[str, Tensor]]) -> dict[str, str]:
        for file, tensors in mine.items():
            write_file(draft / file, tensors, {"format": "pt"})
        return {file: file_hash(draft / file, 0, (draft / file).stat().st_size) for file in mine}

    hashes: dict[str, str] = {}
    for begin in range(0, len(groups), len(ranks)):
        mine: dict[str, dict[str, Tensor]] = {}  # at most one file
        for i, rank in zip(range(begin, len(groups)), ranks, strict=False):
            gathered = zip(groups[i], _gathered(shards, groups[i], rank), strict=True)
            if rank == me:
                mine[files[i]] = {names[j]: x for j, x in gathered if x is not None}
        told = attempt(partial(write, mine))
        key = "save_safetensors/written"
        for written in all_gather_object(mesh, key, told, timeout, CheckpointError):
            hashes |= written
    told = None
    if leads(mesh):
        told = attempt(lambda: _finish(shards, names, groups, files, hashes, draft, target))
    all_gather_object(mesh, "save_safetensors/done", told, timeout, CheckpointError)


def _groups(shards: ShardedTree, limit: int) -> list[list[int]]:
    """The leaves of each file."""
    groups: list[list[int]] = [[]]
    room = limit
    for i in range(len(shards.leaves)):
        nbytes = _nbytes(shards, i)
        if nbytes > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append(i)
        room -= nbytes
    return groups


def _nbytes(shards: ShardedTree, i: int) -> int:
    leaf = shards.leaves[i]
    return whole(leaf.known_shape).numel * leaf.value.dtype.itemsize


def _gathered(shards: ShardedTree, group: Sequence[int], rank: int) -> list[Tensor | None]:
    """A group's global tensors, on the CPU of one rank; None on the others."""
    mesh, leaves = shards.mesh, [shards.leaves[i] for i in group]
    ranks = (rank,) if mesh.ranks else ()
    one = Mesh((1,), ("file",), mesh.device_type, mesh.kind, ranks, mesh.rank, mesh.world)
    tensors = [
        ReshardedTensor(x.known_shape, x.value.dtype, x.spec, PartitionSpec()) for x in leaves
    ]
    given = [leaf.value.detach() for leaf in leaves]
    return reshard_shards(tensors, given, mesh, one, _AT_A_TIME, torch.device("cpu"))


def _finish(
    shards: ShardedTree,
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    files: Sequence[str],
    hashes: Mapping[str, str],
    draft: Path,
    target: Path,
) -> None:
    """Rename the files into place, the hashes and the index last."""
    write_text(draft / SUMS, "".join(f"{hashes[file]}  {file}\n" for file in files))
    last = [SUMS]
    if len(files) > 1:
        total = sum(_nbytes(shards, i) for group in groups for i in group)
        weights = {names[i]: file for group, file in zip(groups, files, strict=True) for i in group}
        write_text(
            draft / INDEX,
            json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2) + "\n",
        )
        last.append(INDEX)
    try:
        for name in (*files, *last):
            os.replace(draft / name, target / name)
        sync(target)
    except OSError as e:
        raise CheckpointError(f"{target} cannot be completed: {e}.") from e
