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
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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


def read_loaded(path: Path) -> bytes:
    """A library that this process has loaded; under a loose umask its compiler has left it to be
    written by others. They have had their code run, so they can make this user's files already,
    and from now on they cannot write to this one.

    Raises:
        OSError: there is no file, or another user owns it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(handle, "rb") as file:
        os.fchmod(handle, stat.S_IMODE(os.fstat(handle).st_mode) & ~_BY_OTHERS)
        if why := _not_own(os.fstat(handle)):
            raise PermissionError(f"{path} {why}")
        return file.read()


def open_whole(path: Path) -> tuple[int, bytes] | None:
    """A descriptor of a file of the cache whose name ends in the hash of its content, and the
    content; None if there is no such file of this user's own.
    """
    try:
        handle = open_own(path)
    except OSError:
        return None
    with open(handle, "rb", closefd=False) as file:
        content = file.read()
    if path.stem.rpartition("-")[2] == digest(content):
        return handle, content
    os.close(handle)
    return None


def write_whole(folder: Path, stem: str, content: bytes) -> Path:
    """Write a file for `open_whole`, named ``stem``, hash, ``.so``; whole or not at all."""
    path = folder / f"{stem}-{digest(content)}.so"
    replace_file(path, content)
    return path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of this user's own, whole or not at all."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def trim(folder: Path, limit: int) -> None:
    """Delete the least recently used files of a folder until the rest fits ``limit`` bytes."""
    with suppress(OSError):
        found = [(e.stat().st_mtime, e.stat().st_size, e.path) for e in os.scandir(folder)]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= limit:
                break
            os.unlink(path)
            total -= size


def path_of(handle: int, path: Path) -> str:
    """A path for the loader of libraries to an open file. The descriptor stays open, as the loader
    identifies libraries by name.
    """
    own = f"/proc/self/fd/{handle}"
    return own if os.path.exists(own) else str(path)


@cache
def compiled(source: Path, *symbols: str) -> ctypes.CDLL | None:
    """The library of a C source with these functions; None if it cannot be built or loaded.

    Its file name has the hashes of its source and of its content: a damaged file is built
    again.
    """
    stem = f"{source.stem}-{digest(source.read_bytes() + ' '.join(_FLAGS).encode())}"
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
                built = write_whole(place or Path(scratch), stem, draft.read_bytes())
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
    found = open_whole(path)
    if found is None:
        return None
    # Load through the checked descriptor.
    with suppress(OSError):
        library = ctypes.CDLL(path_of(found[0], path))
        return library if all(hasattr(library, symbol) for symbol in symbols) else None
    os.close(found[0])
    return None


def digest(content: bytes) -> str:
    """A hash for file names."""
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
    if found.st_mode & _BY_OTHERS:
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""
