"""Errors that one rank of a mesh finds and every rank raises."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from ftp.distributed.calls import calls
from ftp.distributed.waiting import LINGER
from ftp.errors import CollectiveError, FtpError, MismatchError, join_failures
from ftp.sharding.mesh import Mesh


@contextlib.contextmanager
def raise_on_all_ranks(mesh: Mesh) -> Iterator[None]:
    """An exception inside the block fails the next call on the mesh: peers that wait to agree on
    the call raise a MismatchError with its text. No effect without processes.
    """
    try:
        yield
    except BaseException as e:
        if mesh.kind == "process":
            record = calls(mesh)
            record.agree(record.next(), e)
        raise


def attempt(run: Callable[[], Any]) -> Any:
    """The result of ``run``, or the exception that it raised: a value for `all_gather_object`."""
    try:
        return run()
    except Exception as e:
        return e


def all_gather_object(
    mesh: Mesh, key: str, value: Any, timeout: float | None, failed: type[FtpError] = MismatchError
) -> list[Any]:
    """Every rank's ``value``, sent as JSON through the store, in the order of the mesh's ranks.

    All ranks call it with one ``key``. A rank whose work failed passes the exception as ``value``
    and raises it again here; every other rank raises ``failed``, which names the rank.

    Args:
        timeout: seconds to wait for the other ranks; default that of the process group.
    """
    is_error = isinstance(value, BaseException)
    text = json.dumps(
        {"error": f"{type(value).__name__}: {value}"[:4000]} if is_error else {"value": value}
    )
    try:
        everyone = [json.loads(t) for t in calls(mesh).exchange(key, text, timeout)]
    except CollectiveError as e:
        raise (value if is_error else failed(str(e))) from e
    ranks = mesh.ranks or (0,)
    errors = {
        rank: given["error"]
        for rank, given in zip(ranks, everyone, strict=False)
        if "error" in given
    }
    if errors:
        # This rank may hold the store, so it stays until the others have read the errors.
        with contextlib.suppress(MismatchError, CollectiveError):
            calls(mesh).exchange(f"{key}/seen", "", LINGER)
    if is_error:
        raise value
    if errors:
        raise failed(
            join_failures(
                f"Rank {rank} failed, so no rank goes on. Its error:\n  {e}"
                for rank, e in list(errors.items())[:8]
            )
        )
    return [given["value"] for given in everyone]


def timeout_of(mesh: Mesh, timeout: float | None) -> float:
    """Seconds to wait for other ranks: ``timeout``, or the process group's for a first call."""
    return calls(mesh).timeouts.start if timeout is None else timeout
