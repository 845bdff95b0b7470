"""The version of ftp."""

import hashlib
import os
from collections.abc import Iterator
from functools import cache

__version__ = "0.1.0"


@cache
def own_code() -> str:
    """A digest of ftp's own code, for what is kept in its cache."""
    found = hashlib.sha256()
    for path in sorted(_sources(os.path.dirname(os.path.abspath(__file__)))):
        handle = os.open(path, os.O_RDONLY)  # half the time of `open`
        try:
            found.update(os.read(handle, os.fstat(handle).st_size))
        finally:
            os.close(handle)
    return found.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    """The files of code in a folder; `os.walk` takes four times as long."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _sources(entry.path)
