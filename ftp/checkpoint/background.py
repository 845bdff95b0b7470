"""Saves in the background: one after another, in a thread.

``Saving.result`` raises a save's failure. If nobody calls it, the next save or load raises the
failure, or ``ftp.destroy_process_group``, or the program prints it at its end.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from ftp.checkpoint.folder_lock import release
from ftp.errors import CheckpointError
from ftp.sharding.process_group import endings


class Saving:
    """A save that is running or has ended; ``ftp.save`` returns it.

    >>> import tempfile, torch, ftp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = ftp.save(folder, torch.ones(4), ftp.simulated_mesh(2, "tp"), wait=False)
    ...     saving.result().name, saving.done()
    ('00000000', True)
    """

    def __init__(self, future: "Future[Path]"):
        self._future = future
        self._is_told = False  # whether the caller knows of the save's failure

    def result(self, timeout: float | None = None) -> Path:
        """The folder of the checkpoint, once it is complete and on the disk.

        Args:
            timeout: seconds to wait; default no limit.

        Raises:
            CheckpointError: the save failed, on any rank; earlier checkpoints are unchanged.
            TimeoutError: the save is still running after ``timeout``.
        """
        self._future.exception(timeout)  # a timeout is no failure of the save
        self._is_told = True
        return self._future.result()

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._future.done()

    def _untold(self) -> BaseException | None:
        """The failure, if no caller knows of it."""
        return self._future.exception() if self._future.done() and not self._is_told else None


_unasked: list[Saving] = []


def start(run: Callable[[], Path], *, wait: bool) -> Saving:
    """Run a save in the thread; with ``wait``, return when it has ended."""
    saving = Saving(_thread().submit(run))
    if wait:
        saving.result()
    else:
        _unasked.append(saving)
    return saving


@cache
def _thread() -> ThreadPoolExecutor:
    """The thread that runs saves in order; the interpreter waits for it at its end."""
    return ThreadPoolExecutor(1, "ftp-save")


def earlier_failure() -> str | None:
    """The failure of an ended save that no caller knows of, for `raise_earlier`."""
    _unasked[:] = [s for s in _unasked if s._untold() is not None or not s.done()]
    return next((str(e) for s in _unasked if (e := s._untold()) is not None), None)


def raise_earlier(told: Sequence[str | None]) -> None:
    """Raise if a save failed on any rank and no caller knows of it.

    Args:
        told: `earlier_failure` of each rank.
    """
    if (known := next(filter(None, told), None)) is not None:
        failure = _settle()
        raise CheckpointError(f"{_FAILED}: {failure or known}") from failure


_FAILED = "An earlier save, of which nobody has asked the result, failed"


def _settle() -> BaseException | None:
    """Wait for all saves; the first failure that no caller knew of. Callers know of all failures
    now.
    """
    # A caller may learn of a failure while this waits: whether one has is asked afterwards.
    waited = [(saving._future.exception(), saving) for saving in _unasked]
    failures = [e for e, saving in waited if e is not None and not saving._is_told]
    for saving in _unasked:
        saving._is_told = True
    _unasked.clear()
    return next(iter(failures), None)


def _end() -> None:
    """Before the process group ends: finish saves, release folders, raise a failure."""
    failure = _settle()
    release()
    if failure is not None:
        raise CheckpointError(f"{_FAILED}: {failure}") from failure


def _exit() -> None:
    try:
        _end()
    except CheckpointError as e:
        print(f"ftp: the program ends with status 1. {type(e).__name__}: {e}", file=sys.stderr)
        # An exit handler has no other way to change the status.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _forget() -> None:
    """Forget the thread and its saves in a forked process, which has neither."""
    _unasked.clear()
    _thread.cache_clear()


endings.append(_end)
atexit.register(_exit)
os.register_at_fork(after_in_child=_forget)
