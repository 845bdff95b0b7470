"""Divide work among processes of a host that share a cache: each does what no other is doing, and
finds the rest in the cache.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TryLock = Callable[[int], AbstractContextManager[bool]]

_PATIENCE = 60.0  # seconds that a process waits for what another one is doing
_PAUSE = 0.005  # seconds between two looks


def divided(keys: Sequence[str], folder: Path, do: Callable[[str], T]) -> dict[str, T]:
    """``do`` of each key, in any order. No other process with the same ``folder`` does a key
    meanwhile, unless it takes longer than ``_PATIENCE``.
    """
    made: dict[str, T] = {}
    places = {key: int.from_bytes(hashlib.sha256(key.encode()).digest()[:7]) for key in keys}
    with _locks(folder) as lock:
        until = time.monotonic() + _PATIENCE
        while len(made) < len(keys):
            for key in keys:
                if key in made:
                    continue
                with lock(places[key]) as is_free:
                    if is_free or time.monotonic() > until:
                        made[key] = do(key)
                        until = time.monotonic() + _PATIENCE
            if len(made) < len(keys):
                time.sleep(_PAUSE)
    return {key: made[key] for key in keys}


@contextmanager
def _locks(folder: Path) -> Iterator[TryLock]:
    """A lock for each place: a byte of one file, which the kernel frees when a process ends."""
    try:
        import fcntl

        handle = os.open(folder / "ftp.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except (ImportError, OSError):
        yield lambda at: nullcontext(True)
        return

    @contextmanager
    def lock(at: int) -> Iterator[bool]:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except (BlockingIOError, PermissionError):
            yield False
            return
        except OSError:  # a file system without locks
            yield True
            return
        try:
            yield True
        finally:
            fcntl.lockf(handle, fcntl.LOCK_UN, 1, at)

    try:
        yield lock
    finally:
        os.close(handle)
