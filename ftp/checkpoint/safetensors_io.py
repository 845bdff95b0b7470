"""safetensors files: write and sync to the disk, check hashes, read slices."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import CheckpointError, DamagedError
from ftp.tensors.boxes import Shape

# The metadata in which torch.distributed.checkpoint's safetensors reader finds offsets of chunks.
OFFSETS = "DCP_SHARDING_INFO"
MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
_BLOCK = 4 * 2**20  # bytes hashed at a time

# safetensors' names of the dtypes that it stores and can slice.
STORED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
# Dtypes that are stored as bytes, along an extra dim.
BYTES = {torch.complex128}


@dataclass(frozen=True)
class Stored:
    """A tensor within a file: dtype as safetensors names it, shape, and the bytes (begin, end)
    after the header.
    """

    dtype: str
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file, its size in bytes and its SHA-256."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    size: int
    sha256: str


def read_header(path: Path) -> Header:
    """The header of a file. The file must have the size that the header gives.

    Raises:
        DamagedError: a file that is missing, truncated, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise DamagedError(
                    f"{path} says that its header has {length:,} bytes; safetensors files have at"
                    f" most {MAX_HEADER:,}. It is altered, or of another format."
                )
            raw = file.read(length) if length < size else b""
        content = json.loads(raw)
        metadata = content.pop("__metadata__", None) or {}
        tensors = {
            name: Stored(t["dtype"], tuple(t["shape"]), *map(int, t["data_offsets"]))
            for name, t in content.items()
        }
        if not all(is_shape(t.shape) for t in tensors.values()):
            raise ValueError("shapes")
    except OSError as e:
        raise DamagedError(f"{path} cannot be read: {e.strerror or e}.") from e
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise DamagedError(
            f"{path} has no valid safetensors header: it is truncated, altered, or of another"
            " format."
        ) from e
    due = 8 + length + max((t.end for t in tensors.values()), default=0)
    if size != due:
        raise DamagedError(
            f"{path} holds {size:,} bytes where its header says {due:,}: it is truncated or"
            " altered."
        )
    return Header(tensors, metadata, 8 + length, hashlib.sha256(raw).hexdigest())


def is_shape(value: Iterable[Any]) -> bool:
    """Whether these are sizes or offsets: ints of at least 0."""
    return all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def file_hash(path: Path, begin: int, end: int) -> str:
    """The SHA-256 of the bytes from ``begin`` to ``end`` of a file.

    Raises:
        DamagedError: a file that cannot be read, or that a later save has removed.
    """
    found = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            while begin < end:
                block = file.read(min(_BLOCK, end - begin))
                if not block:
                    break
                found.update(block)
                begin += len(block)
    except OSError as e:
        raise DamagedError(f"{path} cannot be read: {e}") from None
    return found.hexdigest()


def file_size(path: Path) -> int:
    """Bytes of a file; a DamagedError if the file is gone."""
    try:
        return path.stat().st_size
    except OSError as e:
        raise DamagedError(f"{path} cannot be read: {e}") from None


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write contiguous CPU tensors and sync them to the disk. Returns the SHA-256 of each.

    Raises:
        CheckpointError: the file system's errors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {}))
        # The library lets only the owner read the file; the folder has the user's permissions.
        os.chmod(path, path.parent.stat().st_mode & 0o666)
        sync(path)
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path} cannot be written: {e}") from e
    return {name: hashlib.sha256(raw_bytes(t)).hexdigest() for name, t in tensors.items()}


def write_text(path: Path, text: str) -> None:
    """Write a text file and sync it to the disk."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise CheckpointError(f"{path} cannot be written: {e}") from e


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class TensorFile:
    """A safetensors file, open for reading slices of its tensors."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as e:
            raise DamagedError(f"{path} cannot be read: {e}") from e

    def check(self, name: str, dtype: torch.dtype, shape: Shape) -> None:
        """Raise if a tensor has another dtype or shape."""
        from safetensors import SafetensorError

        due = (STORED.get(dtype, "U8"), [*shape, dtype.itemsize] if dtype in BYTES else list(shape))
        try:
            stored = self._file.get_slice(name)
        except SafetensorError as e:
            raise DamagedError(f"{self.path} cannot be read: {name!r}: {e}") from e
        if (held := (stored.get_dtype(), list(stored.get_shape()))) != due:
            raise DamagedError(
                f"{self.path} holds {name!r} as {held[0]} of shape {held[1]}, but {due[0]} of"
                f" shape {due[1]} should be there: it was altered."
            )

    def read(self, name: str, slices: Sequence[slice]) -> Tensor:
        from safetensors import SafetensorError

        try:
            file = self._file
            return file.get_slice(name)[tuple(slices)] if slices else file.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise DamagedError(f"{self.path} cannot be read: {name!r}: {e}") from e


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    data: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)
