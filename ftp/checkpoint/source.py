"""The source of a load: tensors in the files of a folder, and the check of the files' hashes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ftp.checkpoint.manifest import SavedFile, SavedTensor, check_header
from ftp.checkpoint.safetensors_io import Header, file_hash, file_size, read_header
from ftp.dataclass import dataclass
from ftp.errors import DamagedError, raise_all
from ftp.sharding.mesh import Mesh


@dataclass(frozen=True)
class Source:
    """Tensors in files of a folder, and values that are no tensors.

    Attributes:
        files: the headers of files, if a manifest states them.
        hashes: the SHA-256 of whole files, if a list states them.
    """

    folder: Path
    tensors: dict[str, SavedTensor]
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


def verify_hashes(tensors: Mapping[str, SavedTensor], source: Source, mesh: Mesh) -> None:
    """Compare the hashes of tensors, by their names in the files, and of the files' headers. Ranks
    divide the work.

    Raises:
        DamagedError: every file that was altered.
    """
    me, n = (
        (mesh.ranks.index(mesh.rank), mesh.size())
        if mesh.kind == "process" and dist.get_backend() != "fake"
        else (0, 1)
    )
    chunks = [(name, chunk) for name, tensor in tensors.items() for chunk in tensor.chunks]
    headers: dict[str, Header] = {}
    failures = []
    for name, chunk in _share_of(chunks, lambda c: c[1].box.numel, me, n):
        path = source.folder / chunk.file
        if chunk.file not in headers:
            headers[chunk.file] = header = read_header(path)
            if (due := source.files.get(chunk.file)) is not None:
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
    for name in _share_of(sorted(whole), lambda name: file_size(source.folder / name), me, n):
        path = source.folder / name
        if file_hash(path, 0, file_size(path)) != source.hashes[name]:
            failures.append(
                f"{path} was altered: it does not have the sha256 that is stated for it."
            )
    raise_all(DamagedError, failures)


def _share_of(items: Sequence[Any], size: Callable[[Any], int], me: int, n: int) -> Iterator[Any]:
    """The items of rank ``me`` of ``n``: consecutive ones, about an ``n``-th of the total size."""
    sizes = [max(1, size(item)) for item in items]
    before, total = 0, sum(sizes)
    for item, s in zip(items, sizes, strict=True):
        if before * n // total == me:
            yield item
        before += s
