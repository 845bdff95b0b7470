"""Folders that a save writes in: made, named as a checkpoint when complete, or removed."""

import os
import shutil
import uuid
from pathlib import Path

from ftp.checkpoint.folder_lock import check_held, hold
from ftp.checkpoint.manifest import REMOVING, SAVING, checkpoints, folder_name
from ftp.checkpoint.safetensors_io import sync
from ftp.errors import CheckpointError

_drafts: dict[Path, int] = {}  # the folders that this process is writing, and their numbers
_last: dict[Path, int] = {}  # the number of the last draft in a folder


def new_draft(root: Path, step: int | None, limit: float, *, wait: bool) -> Path | None:
    """A new folder in ``root`` to write in; drafts that killed runs left there are removed.

    Args:
        limit: seconds without a heartbeat after which another job that owns ``root`` counts as
            dead.
        wait: wait until it is known whether that job lives. Otherwise return None.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not hold(root, limit, wait=wait):
            return None
        for entry in root.iterdir():
            if entry.name.startswith((SAVING, REMOVING)) and entry not in _drafts:
                discard(entry)
        number = max([c.number for c in checkpoints(root)] + [_last.get(root, -1)]) + 1
        draft = root / f"{SAVING}{folder_name(number, step)}-{uuid.uuid4().hex[:8]}"
        draft.mkdir()
    except OSError as e:
        raise CheckpointError(f"No checkpoint can be written in {root}: {e.strerror or e}.") from e
    _last[root] = _drafts[draft] = number
    return draft


def discard(folder: Path) -> None:
    """Removes a folder. It is renamed first, so that a writer cannot complete it, and a part of it
    is no checkpoint.
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


def target_of(draft: Path, step: int | None) -> Path:
    """The folder that a draft becomes."""
    number = int(draft.name[len(SAVING) :].split("-")[0])
    return draft.with_name(folder_name(number, step))


def complete(draft: Path, target: Path) -> None:
    """Gives a draft that is on the disk its name, if this job still owns the folder."""
    sync(draft)
    check_held(target.parent)
    if target.exists():
        raise CheckpointError(
            f"{target} was made by someone else meanwhile. Let only one run save to a folder."
        )
    os.rename(draft, target)
    sync(target.parent)
