"""Write a checkpoint: each rank its part, the leading rank the manifest."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftp.checkpoint.draft import complete, discard, target_of
from ftp.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    SavedFile,
    SavedTensor,
    StoredChunk,
    checkpoints,
)
from ftp.checkpoint.safetensors_io import OFFSETS, STORED, read_header, write_file, write_text
from ftp.dataclass import dataclass
from ftp.distributed.shared_errors import all_gather_object, attempt
from ftp.errors import CheckpointError
from ftp.sharding.mesh import Mesh, require_coordinate
from ftp.tensors.boxes import Box, ShardBox, holders, parts_on
from ftp.tensors.sharded_tree import Leaf, ShardedTree

Boxes = dict[str, tuple[Box, Tensor]]  # the tensors of one file by path, boxes of global tensors


def leads(mesh: Mesh) -> bool:
    """Whether this is the mesh's first rank, which does what only one rank must do."""
    return mesh.kind != "process" or (
        require_coordinate(mesh) is not None and mesh.rank == mesh.ranks[0]
    )


@dataclass(frozen=True)
class Writing:
    """A save, when the ranks have agreed on the tree and the draft.

    Attributes:
        keep: number of the newest checkpoints that stay.
        timeout: seconds that a rank waits for the others.
    """

    tree: ShardedTree
    draft: Path
    step: int | None
    keep: int | None
    timeout: float | None

    @property
    def mesh(self) -> Mesh:
        return self.tree.mesh

    @property
    def position(self) -> int:
        """This rank's position on the mesh, row-major."""
        return self.mesh.ranks.index(self.mesh.rank) if self.mesh.kind == "process" else 0

    def gather(self, *, copy: bool) -> list[Boxes]:
        """The boxes that this rank writes, on the CPU, file by file; at most one box of a tensor in
        a file.

        Args:
            copy: to new memory, since training goes on.
        """
        files: list[Boxes] = []
        seen: set[tuple[int, int]] = set()
        for i, leaf in enumerate(self.tree.leaves):
            for nth, part in enumerate(self._parts(leaf, i)):
                if nth == len(files):
                    files.append({})
                files[nth][leaf.path] = part.box, _on_cpu(leaf.value, part, copy, seen, nth)
        return files

    def _parts(self, leaf: Leaf, turn: int) -> list[ShardBox]:
        """The parts of a leaf that this rank writes. Ranks that hold the same part take turns."""
        if leaf.shape is None:
            return []
        ranks = holders(self.mesh, leaf.spec, leaf.shape)
        return [
            part
            for part in parts_on(self.mesh, leaf.spec, leaf.shape)[self.position]
            if ranks[part.box][turn % len(ranks[part.box])] == self.position
        ]

    def run(self, files: "list[Boxes] | Exception") -> Path:
        """Write this rank's files. When all ranks have, the leading rank completes the checkpoint.
        Returns the checkpoint's folder.

        Args:
            files: the result of `gather`, or its exception, which all ranks raise.
        """
        target, is_leading = target_of(self.draft, self.step), leads(self.mesh)
        try:
            if not isinstance(files, Exception):
                files = attempt(partial(self._write, files))
            written = self._gather_outcomes("written", files)
            outcome = attempt(lambda: self._commit(written, target)) if is_leading else None
            self._gather_outcomes("committed", outcome)
        finally:
            if is_leading:
                discard(self.draft)
        return target

    def _gather_outcomes(self, what: str, outcome: Any) -> list[Any]:
        key = f"{self.draft.name}/{what}"
        return all_gather_object(self.mesh, key, outcome, self.timeout, CheckpointError)

    def _write(self, files: list[Boxes]) -> str:
        """Write this rank's files and a list of them. Returns the SHA-256 of the list."""
        if not self.draft.is_dir():
            raise CheckpointError(
                f"Rank {self.mesh.rank} does not see {self.draft}. Save to a folder that all ranks"
                " share."
            )
        table: dict[str, Any] = {"files": {}, "chunks": []}
        for nth, boxes in enumerate(files):
            name = f"rank-{self.position:05d}{f'-{nth}' if nth else ''}.safetensors"
            offsets = {
                path: {"saved_offsets": [*box.start, *(0,) * (t.ndim - len(box.start))]}
                for path, (box, t) in boxes.items()
            }
            hashes = write_file(
                self.draft / name,
                {path: t for path, (_, t) in boxes.items()},
                {"format": "pt", OFFSETS: json.dumps(offsets)},
            )
            header = read_header(self.draft / name)
            table["files"][name] = [header.size, header.sha256]
            table["chunks"] += [
                [path, name, box.start, box.size, hashes[path]] for path, (box, _) in boxes.items()
            ]
        text = json.dumps(table)
        write_text(self.draft / f"rank-{self.position:05d}.json", text)
        return hashlib.sha256(text.encode()).hexdigest()

    def _commit(self, hashes: Sequence[str], target: Path) -> None:
        """Write the manifest, and give the folder its name."""
        files: dict[str, SavedFile] = {}
        chunks: dict[str, list[StoredChunk]] = {}
        try:
            for i, expected in enumerate(hashes):
                part = self.draft / f"rank-{i:05d}.json"
                text = part.read_text(encoding="utf-8")
                if hashlib.sha256(text.encode()).hexdigest() != expected:
                    raise CheckpointError(
                        f"{part} is not what rank {i} of the mesh wrote. Save to a file system"
                        " that all ranks share."
                    )
                table = json.loads(text)
                files.update({name: SavedFile(*f) for name, f in table["files"].items()})
                for path, file, start, size, sha256 in table["chunks"]:
                    chunks.setdefault(path, []).append(
                        StoredChunk(file, Box(tuple(start), tuple(size)), sha256)
                    )
                part.unlink()
            write_text(self.draft / MANIFEST, self._manifest(files, chunks).to_json())
            complete(self.draft, target)
        except OSError as e:
            raise CheckpointError(f"{self.draft} cannot be completed: {e}.") from e
        if self.keep is not None:
            for old in checkpoints(target.parent)[: -self.keep]:
                discard(old.folder)

    def _manifest(
        self, files: dict[str, SavedFile], chunks: dict[str, list[StoredChunk]]
    ) -> Manifest:
        tensors, values = {}, {}
        for leaf in self.tree.leaves:
            if leaf.shape is None:
                values[leaf.path] = leaf.value
                continue
            held = tuple(sorted(chunks.get(leaf.path, []), key=lambda c: c.box))
            due = holders(self.mesh, leaf.spec, leaf.shape)
            if {c.box for c in held} != set(due):
                raise CheckpointError(
                    f"{leaf.path!r} is not written in whole: {len(held)} parts of {len(due)}."
                )
            tensors[leaf.path] = SavedTensor(leaf.dtype, leaf.shape, str(leaf.spec), held)
        return Manifest(self.step, str(self.mesh), tensors, values, files)


def _on_cpu(x: Tensor, part: ShardBox, copy: bool, seen: set[tuple[int, int]], file: int) -> Tensor:
    """A part of a shard for a file: contiguous, and with ``copy`` in new memory.

    Args:
        seen: (file, storage) of earlier tensors. Tensors of one file must not share memory.
    """
    own = x.detach()[part.slices(part.box)]
    own = own.to("cpu", copy=copy and own.is_contiguous()).contiguous().resolve_conj().resolve_neg()
    if (at := (file, own.untyped_storage().data_ptr())) in seen:
        own = own.clone()
    seen.add(at)
    return own if own.dtype in STORED else own.unsqueeze(-1).view(torch.uint8)
