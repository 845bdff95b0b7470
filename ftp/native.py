"""C sources of the package, compiled where they are first needed and kept in ftp's cache; without a compiler callers do without them."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_PATIENCE = 60.0  # seconds that a compiler may take


def cache_folder() -> Path:
    """``$FTP_CACHE``, else ``ftp`` in the user's cache folder."""
    given = os.environ.get("FTP_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ftp"


@cache
def compiled(name: str) -> ctypes.CDLL | None:
    """The library of ``ftp/<name>.c``, known by the hash of its source; None where it cannot be built, kept or loaded."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        folder = cache_folder() / "compiled"
        built = folder / f"{name}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
        if not built.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=folder)
            os.close(handle)
            subprocess.run(
                [compiler, "-O3", "-shared", "-fPIC", "-o", draft, str(source)], capture_output=True, check=True, timeout=_PATIENCE
            )
            os.replace(draft, built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError):
        return None
