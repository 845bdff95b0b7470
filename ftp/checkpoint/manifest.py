"""The manifest of a checkpoint, a JSON file, and the list of complete checkpoints in a folder."""

import hashlib
import json
import re
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from ftp.checkpoint.safetensors_io import Header, is_shape, read_header
from ftp.dataclass import dataclass
from ftp.errors import CheckpointError, DamagedError
from ftp.tensors.boxes import Box, Shape, first_overlap, whole

MANIFEST = "manifest.json"
SAVING = ".saving-"  # prefix of folders that are being written
REMOVING = ".removing-"  # prefix of folders that are being removed
_FORMAT = "ftp checkpoint 1"
_NAME = re.compile(r"(\d{8,})(?:-step-(\d+))?")


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, which a file stores as one tensor, and the SHA-256 of its bytes."""

    file: str
    box: Box
    sha256: str


@dataclass(frozen=True)
class SavedTensor:
    """A tensor: dtype as torch names it, global shape, the spec it was saved with, its chunks."""

    dtype: str
    shape: Shape
    spec: str
    chunks: tuple[StoredChunk, ...]

    def problem(self, name: str) -> str | None:
        """Why the chunks do not hold each element of the tensor once; None if they do."""
        if not is_shape(self.shape):
            return f"the shape of {name!r}, {self.shape}, is not one of a tensor."
        for c in self.chunks:
            start, size = c.box.start, c.box.size
            if (
                not len(start) == len(size) == len(self.shape)
                or not is_shape((*start, *size))
                or any(a + n > whole for a, n, whole in zip(start, size, self.shape, strict=True))
            ):
                return (
                    f"{c.file} holds {list(size)} elements of {name!r} from {list(start)} on,"
                    f" which are not within shape {self.shape}."
                )
        if (at := first_overlap([c.box for c in self.chunks])) is not None:
            a, b = (self.chunks[i] for i in at)
            return (
                f"{name!r} is there twice: {a.file} holds {list(a.box.size)} elements from"
                f" {list(a.box.start)} on, and {b.file} {list(b.box.size)} from"
                f" {list(b.box.start)} on, so these are files of two saves. Remove those of the"
                " older one."
            )
        there, due = sum(c.box.numel for c in self.chunks), whole(self.shape).numel
        if there < due:
            return (
                f"only a part of {name!r} is there: {there:,} of {due:,} elements. A file is"
                " missing, or a save was cut short."
            )
        return None


@dataclass(frozen=True)
class SavedFile:
    """The size of a file's header in bytes, and its hash."""

    header: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its tensors' elements, which are in safetensors files of its folder."""

    step: int | None
    mesh: str
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    files: dict[str, SavedFile]

    def to_json(self) -> str:
        """The manifest and its hash, as JSON."""
        body = _canonical({"format": _FORMAT, **asdict(self)})
        return f'{{"sha256": "{hashlib.sha256(body.encode()).hexdigest()}",\n"checkpoint": {body}}}'

    @staticmethod
    def from_json(text: str, where: Path) -> "Manifest":
        """Parse ``text``, read from the file ``where``.

        Raises:
            DamagedError: the text is not a manifest, or was altered.
        """
        try:
            content = json.loads(text)
            body = content["checkpoint"]
            if hashlib.sha256(_canonical(body).encode()).hexdigest() != content["sha256"]:
                raise DamagedError(
                    f"{where} was altered: its contents do not have the hash that it states."
                )
            if body["format"] != _FORMAT:
                raise CheckpointError(
                    f"{where} is of format {body['format']!r}; this version reads {_FORMAT!r}."
                )
            tensors = {
                path: SavedTensor(
                    t["dtype"], tuple(t["shape"]), t["spec"], tuple(map(_chunk, t["chunks"]))
                )
                for path, t in body["tensors"].items()
            }
            files = {name: SavedFile(**f) for name, f in body["files"].items()}
            for file in (*files, *(c.file for t in tensors.values() for c in t.chunks)):
                if not is_plain_name(file):
                    raise DamagedError(
                        f"{where} names the file {file!r}, which is not one of its folder. Do not"
                        " trust it."
                    )
            return Manifest(body["step"], body["mesh"], tensors, body["values"], files)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise DamagedError(
                f"{where} is no manifest of a checkpoint: it is truncated, altered, or of another"
                " format."
            ) from e


def _chunk(chunk: dict[str, Any]) -> StoredChunk:
    box = Box(tuple(chunk["box"]["start"]), tuple(chunk["box"]["size"]))
    return StoredChunk(chunk["file"], box, chunk["sha256"])


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, number in the order of saving, and step, if any."""

    folder: Path
    number: int
    step: int | None

    @cached_property
    def damage(self) -> str | None:
        """The first fault of the manifest, or of the files' names, sizes and headers, as text; None
        without a fault. It does not read values.
        """
        try:
            manifest = read_manifest(self.folder)
            for name, due in manifest.files.items():
                check_header(read_header(self.folder / name), due, self.folder / name)
            problems = (t.problem(path) for path, t in manifest.tensors.items())
            return next(filter(None, problems), None)
        except CheckpointError as e:
            return str(e)


def check_header(header: Header, due: SavedFile, path: Path) -> None:
    """Raise if a file's header is not the one that the manifest states."""
    if (header.size, header.sha256) != (due.header, due.sha256):
        raise DamagedError(
            f"{path} was altered: its header does not have the sha256 that the manifest states."
        )


def is_plain_name(name: Any) -> bool:
    """Whether a name is that of a file in a folder, and cannot lead out of the folder.

    >>> [is_plain_name(name) for name in ("a.safetensors", "../a", "/a", "..", "")]
    [True, False, False, False, False]
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def folder_name(number: int, step: int | None) -> str:
    """
    >>> folder_name(7, 300)
    '00000007-step-300'
    """
    return f"{number:08d}" + ("" if step is None else f"-step-{step}")


def checkpoints(path: str | Path) -> list[Checkpoint]:
    """List the complete checkpoints in a folder, oldest first; none if there is no folder.

    Each has ``folder``, ``number``, ``step`` (None if saved without) and ``damage``: its first
    fault as text, None without a fault. The files are read when ``damage`` is asked for.

    Args:
        path: the folder that ``ftp.save`` was given.

    Raises:
        CheckpointError: a folder that cannot be listed.

    >>> import tempfile, torch, ftp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = ftp.save(folder, torch.ones(4), ftp.simulated_mesh(2, "tp"), step=7)
    ...     [(c.step, c.damage) for c in ftp.checkpoints(folder)]
    [(7, None)]
    """
    try:
        entries = sorted(Path(path).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise CheckpointError(f"{path} cannot be listed: {e.strerror or e}.") from e
    found = []
    for entry in entries:
        named = _NAME.fullmatch(entry.name)
        if named and (entry / MANIFEST).is_file():
            step = None if named[2] is None else int(named[2])
            found.append(Checkpoint(entry, int(named[1]), step))
    return sorted(found, key=lambda c: c.number)


def find(path: str | Path, step: int | None = None) -> Checkpoint:
    """The newest complete checkpoint in a folder, of ``step`` if given; or the checkpoint at
    ``path``.

    Raises:
        CheckpointError: there is none; the checkpoint at ``path`` is of another step.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        named = _NAME.fullmatch(path.name)
        own = read_manifest(path).step if step is not None else None
        if own != step:
            raise CheckpointError(
                f"{path} is the checkpoint of {'no step' if own is None else f'step {own}'}, not of"
                f" step {step}. Give the folder that ftp.save was given, or no step."
            )
        return Checkpoint(path, int(named[1]) if named else 0, own)
    complete = checkpoints(path)
    if not complete:
        what = "does not exist" if not path.exists() else "holds no complete checkpoint"
        raise CheckpointError(f"{path} {what}. ftp.save(path, tree, mesh, specs) makes one.")
    wanted = [c for c in complete if step is None or c.step == step]
    if not wanted:
        steps = sorted({c.step for c in complete if c.step is not None})
        raise CheckpointError(
            f"{path} holds no checkpoint of step {step}; it has"
            f" {f'steps {steps}' if steps else 'none with a step'}."
        )
    return wanted[-1]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DamagedError(f"{folder / MANIFEST} cannot be read: {e}.") from e
    return Manifest.from_json(text, folder / MANIFEST)


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
