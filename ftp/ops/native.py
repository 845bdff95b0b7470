"""The package's C sources, compiled on first use, and the cache folder for them and other data.

Code in the cache is run and its data are trusted, so it must be this user's own: folders and files
that another user owns or can write to are ignored. Without a compiler callers use no compiled code.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

_PATIENCE = 60.0  # seconds that a compiler may take
_FLAGS = ("-O3", "-shared", "-fPIC")


def cache_folder(part: str = "") -> Path:
    """A folder of ftp's cache: in ``$FTP_CACHE``, else in ``ftp`` of the user's cache folder.

    If that folder is not the user's own, a private folder in the system's temporary folder.
    """
    given, usual = os.environ.get("FTP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return _own_folder(
        Path(given) if given else Path(usual or os.path.expanduser("~/.cache"), "ftp"), part
    )


def open_own(path: Path) -> int:
    """A descriptor of a file of the cache. The descriptor is checked rather than the path, which
    may name another file later.

    Raises:
        OSError: there is no file, or another user owns it or can write to it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(handle)
    if why := _not_own(found) or ("is no file" if not stat.S_ISREG(found.st_mode) else ""):
        os.close(handle)
        raise PermissionError(f"{path} {why}")
    return handle


def read_own(path: Path) -> bytes:
    """A file of the cache; raises as `open_own` does."""
    with open(open_own(path), "rb") as file:
        return file.read()


@cache
def compiled(source: Path, *symbols: str) -> ctypes.CDLL | None:
    """The library of a C source with these functions; None if it cannot be built or loaded.

    Its file name has the hashes of its source and of its content: a damaged file is built
    again.
    """
    stem = f"{source.stem}-{_digest(source.read_bytes() + ' '.join(_FLAGS).encode())}"
    folder = cache_folder("compiled")
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if (library := _load(path, symbols)) is not None:
            return library
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    for place in (folder, None):  # where the folder cannot be written to or executed from: None
        try:
            with tempfile.TemporaryDirectory(dir=place) as scratch:
                draft = Path(scratch) / "draft.so"
                command = [compiler, *_FLAGS, "-o", str(draft), str(source)]
                subprocess.run(command, capture_output=True, check=True, timeout=_PATIENCE)
                draft.chmod(0o600)
                name = f"{stem}-{_digest(draft.read_bytes())}.so"
                built = (folder if place else Path(scratch)) / name
                os.replace(draft, built)
                if (library := _load(built, symbols)) is not None:
                    return library
        except subprocess.SubprocessError:
            return None
        except OSError:
            continue
    return None


def _load(path: Path, symbols: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library at a path that ends in the hash of its content; None if the hash differs or a
    function is missing.
    """
    try:
        handle = open_own(path)
    except OSError:
        return None
    with open(handle, "rb", closefd=False) as file:
        is_whole = path.stem.rpartition("-")[2] == _digest(file.read())
    # Load through the checked descriptor. It stays open, as the loader identifies libraries by
    # name.
    own = f"/proc/self/fd/{handle}"
    with suppress(OSError):
        if is_whole:
            library = ctypes.CDLL(own if os.path.exists(own) else str(path))
            return library if all(hasattr(library, symbol) for symbol in symbols) else None
    os.close(handle)
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@cache
def _own_folder(base: Path, part: str) -> Path:
    why = _refused(base) or _refused(base / part)
    if not why:
        return base / part
    private = Path(tempfile.gettempdir()) / f"ftp-{os.geteuid()}"
    if _refused(private) or _refused(private / part):
        private = Path(tempfile.mkdtemp(prefix="ftp-"))
        (private / part).mkdir(mode=0o700, exist_ok=True)
    if not why.startswith(_ABSENT):
        warnings.warn(
            f"ftp's cache {why}, so that others could plant code in it; {private} is used instead."
            " Set FTP_CACHE to a folder that only you can write to, or mend that one.",
            stacklevel=2,
        )
    return private / part


_ABSENT = "cannot be made"


def _refused(folder: Path) -> str:
    """Why a folder cannot hold the cache; empty if it can, and then the folder exists."""
    if str(folder).startswith("~"):
        return f"{_ABSENT}: this user has no home"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = _not_own(folder.stat())
    except OSError as error:
        return f"{_ABSENT}: {error}"
    return why and f"{folder} {why}"


def _not_own(found: os.stat_result) -> str:
    """Why a file or folder is not the user's own. Root's are allowed: root can run code anyway."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}, not to {os.geteuid()} who runs this"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""
