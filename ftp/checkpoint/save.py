"""``save``: write a tree of shards to a folder of safetensors files, each rank its part.

A checkpoint gets its name when every rank's files and the manifest are on the disk. So a process
may be killed at any moment.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ftp.checkpoint.background import Saving, earlier_failure, raise_earlier, start
from ftp.checkpoint.draft import discard, new_draft
from ftp.checkpoint.folder_lock import longest_quiet
from ftp.checkpoint.safetensors_io import BYTES, STORED
from ftp.checkpoint.write_shards import Boxes, Writing, leads
from ftp.distributed.calls import calls
from ftp.distributed.shared_errors import all_gather_object, attempt, timeout_of
from ftp.errors import CheckpointError, InputError, MeshError, MismatchError, raise_all
from ftp.sharding.mesh import AnyMesh, Mesh, resolve
from ftp.sharding.pytree import kind_of
from ftp.tensors.global_shapes import own, sample
from ftp.tensors.placement import call_of, placement_of
from ftp.tensors.replicas import check_samples
from ftp.tensors.sharded_tree import ShardedTree, sharded_tree, with_agreed_shapes

_SHARDS = (
    "If ranks hold shards of it, give its spec: the moments of an optimizer of torch have those of"
    " the parameters."
)


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
    """Save a tree as a new checkpoint in the folder ``path``. All ranks of the mesh call it, and
    each writes its part; replicas are written once.

    A failure on any rank is raised on all ranks. Earlier checkpoints stay as they are.

    Args:
        path: a folder that all ranks see; it is made if it does not exist. Each checkpoint is a
            folder in it.
        tree: shards, placed or not, in any containers; ints, floats, bools and strings are kept as
            JSON.
        mesh: default that of ``ftp.use_mesh``.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``.
        step: a number to find the checkpoint by, such as the training step.
        keep: how many of the newest checkpoints to keep; default all.
        wait: return when the checkpoint is complete. Otherwise return when the tensors are copied,
            and write in a thread. ``.result()`` raises a failure. If it is not called, the next
            save or load raises the failure, or ``ftp.destroy_process_group``; else the program
            prints it at its end, and exits with status 1.
        timeout: seconds that a rank waits for the others; default that of the process group.

    Returns:
        A ``Saving``, whose ``result()`` is the folder of the checkpoint.

    Raises:
        CheckpointError: the file system's errors, with path and rank; a folder of another job.
        SpecError, InputError, PlacementError: specs or leaves that do not fit.
        MismatchError: ranks that hold different trees or results of different calls, or a rank that
            never came.
        ReplicaError: unplaced tensors that their specs say are copies, and that are far apart.

    >>> import tempfile, torch, ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     specs = {"w": ftp.P("tp"), "epoch": ftp.P()}
    ...     done = ftp.save(folder, {"w": torch.ones(4), "epoch": 3}, mesh, specs, step=7)
    ...     like = {"w": torch.empty(4, device="meta"), "epoch": 0}
    ...     done.result().name, ftp.load(folder, like, mesh)
    ('00000000-step-7', {'w': tensor([1., 1., 1., 1.]), 'epoch': 3})
    """
    m = resolve(mesh)
    if m.kind == "abstract":
        raise MeshError(
            f"The mesh {m} is abstract: nothing is stored on it that could be saved. Give a mesh of"
            " processes, or ftp.simulated_mesh."
        )
    root, limit = Path(path).absolute(), 0.0
    draft: Path | None = None
    try:
        earlier = earlier_failure()
        _check_options(step, keep)
        shards = sharded_tree(tree, m, specs)
        check_savable(shards)
        limit = timeout_of(m, timeout)
        draft = new_draft(root, step, limit, wait=m.kind != "process") if leads(m) else None
        told: Any = {
            "digest": shards.digest(),
            "draft": draft and str(draft),
            "step": step,
            "keep": keep,
            "earlier": earlier,
            "calls": _calls_of(shards),
            "copies": _copies_in(shards),
        }
    except Exception as e:
        shards, told = None, e
    try:
        everyone = all_gather_object(m, "save", told, timeout, CheckpointError)
        assert shards is not None
        raise_earlier([other["earlier"] for other in everyone])
        _check_one_step([other["calls"] for other in everyone], m)
        _check_same_options(everyone, step, keep, m)
        digests = [other["digest"] for other in everyone]
        shards = with_agreed_shapes(shards, "save", digests, timeout)
        copies = [other["copies"] for other in everyone]
        check_samples(copies, shards.specs, shards.names, m, " at this save", _SHARDS)
        folder = everyone[0]["draft"]
        if folder is None:  # another job owns the folder: wait until it is known to live or not
            if leads(m):
                told = attempt(lambda: new_draft(root, step, limit, wait=True))
                draft = told if isinstance(told, Path) else None
            told = told if isinstance(told, Exception) else str(draft)
            longest = limit + longest_quiet(limit)
            folder = all_gather_object(m, "save/folder", told, longest, CheckpointError)[0]
        writing = Writing(shards, Path(folder), step, keep, timeout)
    except BaseException:
        if draft is not None:
            discard(draft)
        raise

    def gathered() -> list[Boxes]:
        files = writing.gather(copy=not wait)
        calls(m).check_results()
        return files

    files = attempt(gathered)
    return start(lambda: writing.run(files), wait=wait)


def _calls_of(tree: ShardedTree) -> list[int | None]:
    """The number of the latest call on the mesh that returned one of the tensors, None if none did;
    and the number of the last call that ended on this rank.
    """
    made = [call_of(leaf.value) for leaf in tree.leaves if isinstance(leaf.value, Tensor)]
    return [max((c for c in made if c is not None), default=None), calls(tree.mesh).call]


def _copies_in(tree: ShardedTree) -> list[Any]:
    """Per leaf a sample of a tensor that its spec alone says is whole on several ranks: shards,
    such as the moments of an optimizer of torch, may have been taken for it.
    """
    axes = tree.mesh.axes if tree.mesh.kind == "process" else {}
    return [
        {"sample": sample(leaf.value)}
        if isinstance(leaf.value, Tensor)
        and placement_of(leaf.value) is None
        and any(n > 1 for axis, n in axes.items() if axis not in own(leaf.spec))
        else ""
        for leaf in tree.leaves
    ]


def _check_one_step(everyone: Sequence[Sequence[int | None]], mesh: Mesh) -> None:
    """Raise if ranks hold results of different calls, as after an interrupt in different steps.

    Args:
        everyone: `_calls_of` of each rank.
    """
    # The calls that made the tensors are more certain than the last calls: an interrupt may come
    # between a call and the assignment of its result.
    made, finished = zip(*everyone, strict=True)
    held = finished if set(made) == {None} else made
    if (odd := next((i for i, call in enumerate(held) if call != held[0]), None)) is not None:
        a, b = (f"call {held[i]}" if held[i] else "no call" for i in (0, odd))
        raise MismatchError(
            f"Rank {mesh.ranks[0]} holds the state after {a} on the mesh {mesh}, but rank"
            f" {mesh.ranks[odd]} after {b}: the checkpoint would be a mix of two steps, so none is"
            " made.\n"
            "  Go on from the last checkpoint. To save when a signal comes, give the signal to the"
            " step as an input (docs/faults.md)."
        )


def _check_same_options(
    everyone: Sequence[dict[str, Any]], step: int | None, keep: int | None, mesh: Mesh
) -> None:
    for rank, other in zip(mesh.ranks, everyone, strict=False):
        if (other["step"], other["keep"]) != (step, keep):
            raise CheckpointError(
                f"Rank {mesh.rank} saves with step={step}, keep={keep}, but rank {rank} with"
                f" step={other['step']}, keep={other['keep']}."
            )


def _check_options(step: Any, keep: Any) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < least
        ):
            raise CheckpointError(f"{name}={value!r}: give an int of at least {least}, or None.")


def check_savable(tree: ShardedTree) -> None:
    """Raise for leaves that no file can hold, and for paths that are not distinct."""
    failures = []
    first: dict[str, str] = {}
    for leaf in tree.leaves:
        x, name, path = leaf.value, leaf.name, leaf.path
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
    raise_all(InputError, failures)
