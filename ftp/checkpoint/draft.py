"""Drafts: the folders that saves write to. A complete draft is renamed to be a checkpoint."""

import os
import shutil
import uuid
from pathlib import Path

from ftp.checkpoint.folder_lock import check_held, hold
from ftp.checkpoint.manifest import REMOVING, SAVING, checkpoints, folder_name
from ftp.checkpoint.safetensors_io import sync
from ftp.errors import CheckpointError

_drafts: dict[Path, int] = {}  # this process' drafts, and their numbers
_last: dict[Path, int] = {}  # per folder the number of its last draft


def new_draft(root: Path, step: int | None, limit: float, *, wait: bool) -> Path | None:
    """A new draft in ``root``. Drafts that killed runs left there are removed.

    Args:
        limit: seconds without a heartbeat after which another job that owns ``root`` counts as
            dead.
        wait: if another job owns ``root``, wait until it is known to live or to be dead. Otherwise
            return None.
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
    """Remove a draft or a checkpoint. It is renamed first: no writer can complete it, and what is
    left of it is no checkpoint.
    """
    _drafts.pop(folder, None)
    grave = folder
    if not folder.name.startswith(REMOVING):
        grave = folder.with_name(f"{REMOVING}{folder.name}-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(folder, grave)
        except OSError:
            return  # it is gone, or the next save removes it
    shutil.rmtree(grave, ignore_errors=True)


def target_of(draft: Path, step: int | None) -> Path:
    """The folder that a draft is renamed to."""
    number = int(draft.name[len(SAVING) :].split("-")[0])
    return draft.with_name(folder_name(number, step))


def complete(draft: Path, target: Path) -> None:
    """Rename a draft whose files are on the disk, if this job still owns the folder."""
    sync(draft)
    check_held(target.parent)
    if target.exists():
        raise CheckpointError(
            f"{target} was made by someone else meanwhile. Let only one run save to a folder."
        )
    os.rename(draft, target)
    sync(target.parent)
