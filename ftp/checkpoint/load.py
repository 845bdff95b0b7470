"""``load``: read a checkpoint onto any mesh with any specs, each rank its part."""

from functools import partial
from pathlib import Path
from typing import Any

from ftp.checkpoint.background import earlier_failure, raise_earlier
from ftp.checkpoint.manifest import checkpoints, find, read_manifest
from ftp.checkpoint.restore import loadable, restore
from ftp.checkpoint.source import Source, verify_hashes
from ftp.distributed.shared_errors import all_gather_object, attempt
from ftp.errors import CheckpointError
from ftp.sharding.mesh import AnyMesh, Mesh


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
    """Load the newest complete checkpoint in ``path`` onto any mesh with any specs. All ranks call
    it, and each reads its part; a replica is read once and sent on.

    Nothing in a checkpoint is executed.

    Args:
        path: the folder that ``save`` was given, or that of one checkpoint.
        like: the tree to load, all of the checkpoint or a part of it. A leaf is a tensor of the
            global shape (on meta, say), anything with a shape and a dtype, or a placed tensor,
            which stands for its global one. Any other leaf is replaced by the saved value. Results
            are parameters, or require a gradient, where the leaves do.
        mesh: default that of ``ftp.use_mesh``.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``.
        step: load the newest checkpoint of this step.
        verify: compare the hashes of everything that is loaded; ranks divide the work.
        timeout: seconds that a rank waits for the others; default that of the process group.

    Returns:
        A tree like ``like`` of this rank's shards, placed with ``specs``.

    Raises:
        CheckpointError: no complete checkpoint; every leaf that is missing, or of another shape or
            dtype. This and the errors below are raised on every rank.
        DamagedError: a file that is truncated, altered or missing.
        SpecError: specs that do not fit.
        MismatchError: ranks that load different trees, or one that never came.

    >>> import tempfile, torch, ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = ftp.save(folder, {"w": torch.ones(4)}, mesh)
    ...     ftp.load(folder, {"w": torch.empty(5, device="meta")}, mesh)
    Traceback (most recent call last):
    ftp.errors.CheckpointError: like['w'] has shape (5,), but the saved 'w' (4,).
    """
    m = loadable(mesh)
    is_first = m.kind != "process" or m.rank == m.ranks[0]  # this rank looks for the checkpoint
    found = attempt(lambda: [str(find(path, step).folder) if is_first else "", earlier_failure()])
    everyone = all_gather_object(m, "load", found, timeout, CheckpointError)
    raise_earlier([earlier for _, earlier in everyone])
    folder = Path(everyone[0][0])
    advice = partial(_newest_whole, folder, m, timeout)
    return restore(partial(_source, folder), like, m, specs, str, verify, timeout, advice)


def _source(folder: Path) -> Source:
    manifest = read_manifest(folder)
    return Source(folder, manifest.tensors, manifest.values, manifest.files)


def _newest_whole(damaged: Path, mesh: Mesh, timeout: float | None) -> str:
    """Advice to load the newest checkpoint whose hashes all match. All ranks call it; they divide
    the work.
    """
    root = damaged.parent
    others = all_gather_object(
        mesh,
        "load/others",
        [c.folder.name for c in reversed(checkpoints(root)) if c.folder != damaged],
        timeout,
    )[0]
    for name in others:
        try:
            source = _source(root / name)
            is_whole = all(t.problem(path) is None for path, t in source.tensors.items())
            verify_hashes(source.tensors, source, mesh)
        except (CheckpointError, OSError):
            is_whole = False
        if all(all_gather_object(mesh, "load/other", is_whole, timeout)):
            return (
                f"The newest whole checkpoint in {root} is {name}. Load it by its own folder:"
                f" ftp.load({str(root / name)!r}, ...)."
            )
    return f"No other checkpoint in {root} is whole."
