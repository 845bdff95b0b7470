"""``save``: a tree of shards to a folder of safetensors files, each rank writing its part, while
training goes on if wished.

A checkpoint appears under its name at once, when every rank's files and the manifest are on the
disk.
"""

import atexit
import hashlib
import json
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftp.checkpoint.folder_lock import check_held, hold, longest_quiet, release
from ftp.checkpoint.manifest import (
    MANIFEST,
    REMOVING,
    SAVING,
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    checkpoints,
    folder_name,
)
from ftp.checkpoint.safetensors_io import (
    BYTES,
    OFFSETS,
    STORED,
    read_header,
    sync,
    write_file,
    write_text,
)
from ftp.distributed.agreement import check
from ftp.errors import CheckpointError, InputError, MeshError, MismatchError, join_failures
from ftp.sharding.mesh import AnyMesh, Mesh, require_coordinate, resolve
from ftp.sharding.process_group import endings
from ftp.sharding.pytree import kind_of
from ftp.tensors.boxes import Box, Part, holders, parts_on
from ftp.tensors.global_tree import Shards, agreed, digest, patience, shards_of, share


class Saving:
    """A save that goes on, or is done.

    >>> import tempfile, torch, ftp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = ftp.save(folder, torch.ones(2), ftp.simulated_mesh(2, "dp"), step=1, wait=False)
    ...     saving.result().name, saving.done()
    ('00000000-step-1', True)
    """

    def __init__(self, future: "Future[Path]"):
        self._future = future
        self._is_told = False

    def result(self, timeout: float | None = None) -> Path:
        """Waits for the end of it: the folder of the checkpoint, complete and on the disk.

        Raises:
            CheckpointError: the save failed, on any rank; nothing was changed. TimeoutError: not
                done after ``timeout`` seconds.
        """
        self._future.exception(timeout)  # a timeout is no failure of the save
        self._is_told = True
        return self._future.result()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._future.done()

    def _untold(self) -> BaseException | None:
        """What went wrong, if nobody has been told."""
        return self._future.exception() if self._future.done() and not self._is_told else None


def save(
    path: str | Path,
    tree: Any,
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    wait: bool = True,
    timeout: float | None = None,
) -> Saving:
    """Saves a tree as one more checkpoint in the folder ``path``; all ranks of the mesh call it,
    and each writes its part.

    What several ranks hold is written once. A failure on any rank is raised on all, and leaves
    earlier checkpoints as they are; so does a process that is killed at any moment.

    Args:
        path: a folder that all ranks see, made if need be. Each save is a folder of its own in it.
        tree: placed tensors, or local shards, in any containers; ints, floats, bools and strings
            are kept as JSON.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``.
        step: a number to find it by, as the training step.
        keep: how many of the newest checkpoints stay; default all.
        wait: return when the checkpoint is complete. Otherwise when the tensors are copied: the
            disk is written by a thread, and the result tells when it is done, ``.result()``; a
            failure that nobody asked for is raised by the next save or load, by
            `destroy_process_group`, or said at the end of the program, which then ends with status
            1.
        timeout: seconds that a rank waits for the others' parts; default that of the process group.

    Raises:
        CheckpointError: what the file system says, with path and rank. FtpError: specs or leaves
            that do not fit. MismatchError: ranks that hold different trees, or one that never came.

    >>> import tempfile, ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = ftp.save(folder, {"w": torch.ones(4), "epoch": 3}, mesh, {"w": ftp.P("tp"), "epoch": ftp.P()}, step=7)
    ...     done.result().name, ftp.load(folder, {"w": torch.empty(4, device="meta"), "epoch": 0}, mesh)
    ('00000000-step-7', {'w': tensor([1., 1., 1., 1.]), 'epoch': 3})
    """
    m = resolve(mesh)
    if m.kind == "abstract":
        raise MeshError(
            f"The mesh {m} is abstract: nothing lies on it that could be saved. Give a mesh of"
            " processes, or ftp.simulated_mesh."
        )
    draft: Path | None = None
    try:
        earlier = earlier_failure()
        _check_options(step, keep)
        shards = shards_of(tree, m, specs)
        check_leaves(shards)
        root, limit = Path(path).absolute(), patience(m, timeout)
        draft = _new_draft(root, step, limit, wait=m.kind != "process") if leads(m) else None
        given: Any = {
            "digest": digest(shards),
            "draft": draft and str(draft),
            "step": step,
            "keep": keep,
            "earlier": earlier,
        }
        given["made_by"] = shards.made_by(m)
    except Exception as e:
        given = e
    try:
        everyone = share(m, "save", given, timeout, CheckpointError)
        raise_earlier([other["earlier"] for other in everyone])
        _check_one_step([other["made_by"] for other in everyone], m)
        for rank, other in zip(m.ranks, everyone, strict=False):
            if (other["step"], other["keep"]) != (step, keep):
                raise CheckpointError(
                    f"Rank {m.rank} saves with step={step}, keep={keep}, but rank {rank} with"
                    f" step={other['step']}, keep={other['keep']}."
                )
        shards = agreed(shards, m, "save", [g["digest"] for g in everyone], timeout)
        if (folder := everyone[0]["draft"]) is None:
            # Another job has the folder. Whether it lives takes the leading rank a while to tell.
            try:
                draft = _new_draft(root, step, limit, wait=True) if leads(m) else None
                told: Any = str(draft)
            except Exception as e:
                told = e
            folder = share(m, "save/folder", told, limit + longest_quiet(limit), CheckpointError)[0]
        job = _Job(m, shards, Path(folder), step, keep, timeout)
    except BaseException:
        if draft is not None:
            _discard(draft)
        raise
    try:
        content: Any = job.gathered(copy=not wait)
        check(m)
    except Exception as e:
        content = e
    saving = Saving(_thread().submit(job.run, content))
    if wait:
        saving.result()
    else:
        _unseen.append(saving)
    return saving


_unseen: list[Saving] = []
_drafts: dict[Path, int] = {}  # the folders that this process is writing, and their numbers
_last: dict[Path, int] = {}


@cache
def _thread() -> ThreadPoolExecutor:
    """One save after another, in the order in which they were asked for; the interpreter waits
    for them before it ends.
    """
    return ThreadPoolExecutor(1, "ftp-save")


def earlier_failure() -> str | None:
    """How a save failed of which nobody has asked the result, as far as it is known; it is told
    by `raise_earlier`, on all ranks.
    """
    _unseen[:] = [saving for saving in _unseen if saving._untold() is not None or not saving.done()]
    return next((str(e) for saving in _unseen if (e := saving._untold()) is not None), None)


def raise_earlier(told: Sequence[str | None]) -> None:
    """Raises where any rank knows of such a failure, given what each knows; on each of them it
    counts as told.
    """
    if (known := next(filter(None, told), None)) is not None:
        failures = _settled()
        raise CheckpointError(f"{_FAILED}: {failures[0] if failures else known}") from (
            failures[0] if failures else None
        )


_FAILED = "An earlier save, of which nobody has asked the result, failed"


def _settled() -> list[BaseException]:
    """Waits for the saves that go on; the failures of which nobody has been told, who are told
    hereby.
    """
    waited = [(saving, saving._future.exception()) for saving in _unseen]
    failures = [e for saving, e in waited if e is not None and not saving._is_told]
    for saving in _unseen:
        saving._is_told = True
    _unseen.clear()
    return failures


def _end() -> None:
    """Before the process group ends: saves that go on are finished, folders are free, and
    failures are said.
    """
    failures = _settled()
    release()
    if failures:
        raise CheckpointError(f"{_FAILED}: {failures[0]}") from failures[0]


def _exit() -> None:
    try:
        _end()
    except CheckpointError as e:
        print(f"ftp: the program ends with status 1. {type(e).__name__}: {e}", file=sys.stderr)
        # What is registered for the end can change the status in no other way.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _forget() -> None:
    """In a forked process, which has neither the thread nor its saves."""
    _unseen.clear()
    _thread.cache_clear()


endings.append(_end)
atexit.register(_exit)
os.register_at_fork(after_in_child=_forget)


def _check_one_step(everyone: Sequence[Sequence[int | None]], mesh: Mesh) -> None:
    """Raises where ranks hold results of different calls, as after an interrupt, which reaches
    each of them somewhere else.
    """
    # What the tensors tell is surer than the number of calls: an interrupt may come between a call
    # and the assignment of its result.
    held = (
        [made for made, _ in everyone]
        if any(made is not None for made, _ in everyone)
        else [finished for _, finished in everyone]
    )
    if (odd := next((i for i, call in enumerate(held) if call != held[0]), None)) is not None:
        a, b = (f"call {held[i]}" if held[i] else "no call" for i in (0, odd))
        raise MismatchError(
            f"Rank {mesh.ranks[0]} holds the state after {a} on the mesh {mesh}, but rank"
            f" {mesh.ranks[odd]} after {b}: the checkpoint"
            " would be a mix of two steps, so none is made.\n"
            "  Go on from the last checkpoint. To save when a signal comes, give the signal to the"
            " step as an input (docs/faults.md)."
        )


def _check_options(step: Any, keep: Any) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < least
        ):
            raise CheckpointError(f"{name}={value!r}: give an int of at least {least}, or None.")


def check_leaves(shards: Shards) -> None:
    """Raises for leaves that no file can hold, or that cannot be told apart in one."""
    failures = []
    first: dict[str, str] = {}
    for x, name, path in zip(shards.leaves, shards.names, shards.paths, strict=True):
        if path in first:
            failures.append(
                f"{first[path]} and {name} have one path, {path!r}. Rename one: dots inside a key"
                " separate elements."
            )
        first.setdefault(path, name)
        if path == "__metadata__":
            failures.append(
                f"{name} has the path '__metadata__', which safetensors files use themselves."
                " Rename it."
            )
        if not isinstance(x, Tensor):
            if not isinstance(x, bool | int | float | str):
                failures.append(
                    f"{name} is {kind_of(x)}: a checkpoint holds tensors, ints, floats, bools and"
                    " strings. Give one of these."
                )
        elif x.device.type == "meta":
            failures.append(f"{name} is on the meta device and has no values to save.")
        elif x.dtype not in STORED and x.dtype not in BYTES:
            failures.append(
                f"{name} is of dtype {x.dtype}, which safetensors files cannot hold. Convert it."
            )
    if failures:
        raise InputError(join_failures(failures))


def leads(mesh: Mesh) -> bool:
    """Whether this rank does what is done once."""
    return mesh.kind != "process" or (
        require_coordinate(mesh) is not None and mesh.rank == mesh.ranks[0]
    )


def _new_draft(root: Path, step: int | None, limit: float, *, wait: bool) -> Path | None:
    """A fresh folder to write in, on the file system where it will stay; what killed runs have left
    is removed.

    None, only without ``wait``: the folder is another job's, which may be dead.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not hold(root, limit, wait=wait):
            return None
        for entry in root.iterdir():
            if entry.name.startswith((SAVING, REMOVING)) and entry not in _drafts:
                _discard(entry)
        number = max([c.number for c in checkpoints(root)] + [_last.get(root, -1)]) + 1
        draft = root / f"{SAVING}{folder_name(number, step)}-{uuid.uuid4().hex[:8]}"
        draft.mkdir()
    except OSError as e:
        raise CheckpointError(f"No checkpoint can be written in {root}: {e.strerror or e}.") from e
    _last[root] = _drafts[draft] = number
    return draft


def _discard(folder: Path) -> None:
    """Removes a folder. It loses its name first: whoever writes in it cannot complete it, and
    what is left of it is no checkpoint.
    """
    _drafts.pop(folder, None)
    grave = folder
    if not folder.name.startswith(REMOVING):
        grave = folder.with_name(f"{REMOVING}{folder.name}-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(folder, grave)
        except OSError:
            return  # it is gone, or the next save tries again
    shutil.rmtree(grave, ignore_errors=True)


class _Job:
    """What is left of a save when its tensors are at hand."""

    def __init__(
        self,
        mesh: Mesh,
        shards: Shards,
        draft: Path,
        step: int | None,
        keep: int | None,
        timeout: float | None,
    ):
        self.mesh, self.shards, self.draft, self.step, self.keep, self.timeout = (
            mesh,
            shards,
            draft,
            step,
            keep,
            timeout,
        )
        self.me = mesh.ranks.index(mesh.rank) if mesh.kind == "process" else 0

    def gathered(self, *, copy: bool) -> "list[dict[str, tuple[Box, Tensor]]]":
        """The boxes that this rank writes, by path, on the CPU; of one tensor at most one for
        each of its files.
        """
        files: list[dict[str, tuple[Box, Tensor]]] = []
        seen: set[tuple[int, int]] = set()
        for i, (x, path, spec, shape) in enumerate(
            zip(
                self.shards.leaves,
                self.shards.paths,
                self.shards.specs,
                self.shards.shapes,
                strict=True,
            )
        ):
            if shape is None:
                continue
            who = holders(self.mesh, spec, shape)
            mine = [
                p
                for p in parts_on(self.mesh, spec, shape)[self.me]
                if who[p.box][i % len(who[p.box])] == self.me
            ]
            for nth, part in enumerate(mine):
                if nth == len(files):
                    files.append({})
                files[nth][path] = (part.box, _on_cpu(x, part, copy, seen, nth))
        return files

    def run(self, content: Any) -> Path:
        """Writes this rank's files; the leading rank makes a checkpoint of them when all have
        done so.
        """
        target = self.draft.with_name(
            folder_name(int(self.draft.name[len(SAVING) :].split("-")[0]), self.step)
        )
        is_leading = leads(self.mesh)
        try:
            try:
                if isinstance(content, Exception):
                    raise content
                outcome: Any = self._write(content)
            except Exception as e:
                outcome = e
            told = share(
                self.mesh, f"{self.draft.name}/written", outcome, self.timeout, CheckpointError
            )
            try:
                outcome = self._commit(told, target) if is_leading else None
            except Exception as e:
                outcome = e
            share(self.mesh, f"{self.draft.name}/committed", outcome, self.timeout, CheckpointError)
        finally:
            if is_leading:
                _discard(self.draft)
        return target

    def _write(self, files: "list[dict[str, tuple[Box, Tensor]]]") -> str:
        """This rank's files and the list of them; the hash of that."""
        if not self.draft.is_dir():
            raise CheckpointError(
                f"Rank {self.mesh.rank} does not see {self.draft}. Save to a folder that all ranks"
                " share."
            )
        table: dict[str, Any] = {"files": {}, "chunks": []}
        for nth, boxes in enumerate(files):
            name = f"rank-{self.me:05d}{f'-{nth}' if nth else ''}.safetensors"
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
        write_text(self.draft / f"rank-{self.me:05d}.json", text)
        return hashlib.sha256(text.encode()).hexdigest()

    def _commit(self, hashes: Sequence[str], target: Path) -> None:
        """Writes the manifest, and gives the folder its name."""
        files: dict[str, SavedFile] = {}
        chunks: dict[str, list[Chunk]] = {}
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
                        Chunk(file, Box(tuple(start), tuple(size)), sha256)
                    )
                part.unlink()
            write_text(self.draft / MANIFEST, self._manifest(files, chunks).to_json())
            sync(self.draft)
            check_held(target.parent)
            if target.exists():
                raise CheckpointError(
                    f"{target} was made by someone else meanwhile. Let only one run save to a"
                    " folder."
                )
            os.rename(self.draft, target)
            sync(target.parent)
        except OSError as e:
            raise CheckpointError(f"{self.draft} cannot be completed: {e}.") from e
        if self.keep is not None:
            for old in checkpoints(target.parent)[: -self.keep]:
                _discard(old.folder)

    def _manifest(self, files: dict[str, SavedFile], chunks: dict[str, list[Chunk]]) -> Manifest:
        tensors, values = {}, {}
        s = self.shards
        for x, path, spec, shape in zip(s.leaves, s.paths, s.specs, s.shapes, strict=True):
            if shape is None:
                values[path] = x
                continue
            held = tuple(sorted(chunks.get(path, []), key=lambda c: c.box))
            if {c.box for c in held} != set(holders(self.mesh, spec, shape)):
                raise CheckpointError(
                    f"{path!r} is not written in whole: {len(held)} parts of"
                    f" {len(holders(self.mesh, spec, shape))}."
                )
            tensors[path] = SavedTensor(str(x.dtype).removeprefix("torch."), shape, str(spec), held)
        return Manifest(self.step, str(self.mesh), tensors, values, files)


def _on_cpu(x: Tensor, part: Part, copy: bool, seen: set[tuple[int, int]], file: int) -> Tensor:
    """A part of a shard as a file holds it, contiguous; with ``copy`` in memory of its own."""
    own = x.detach()[part.slices(part.box)]
    own = own.to("cpu", copy=copy and own.is_contiguous()).contiguous().resolve_conj().resolve_neg()
    # Tensors of one file must not share memory.
    if (at := (file, own.untyped_storage().data_ptr())) in seen:
        own = own.clone()
    seen.add(at)
    return own if own.dtype in STORED else own.unsqueeze(-1).view(torch.uint8)
