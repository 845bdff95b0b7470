"""Compiled C and the folder that keeps it: only what is this user's own and whole is loaded."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from few_or_many import slow_after

from ftp.ops import native, philox
from ftp.ops.native import cache_folder, read_own

SYMBOLS = ("ftp_random_bits", "ftp_random_block")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder; temporary files go beside it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("FTP_CACHE", str(tmp_path / "cache"))
    native._own_folder.cache_clear()
    return tmp_path / "cache"


def compiled() -> ctypes.CDLL | None:
    return native.compiled.__wrapped__(Path(philox.__file__).with_name("philox.c"), *SYMBOLS)


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def works(library: ctypes.CDLL | None) -> bool:
    return library is not None and all(hasattr(library, symbol) for symbol in SYMBOLS)


@needs_compiler
def test_what_is_kept_is_loaded_again_and_without_a_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    assert works(compiled())
    (kept,) = files(cache)
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert works(compiled())


def empty(kept: Path, whole: bytes) -> None:
    kept.write_bytes(b"")


def cut_short(kept: Path, whole: bytes) -> None:
    """Loaded, such a file ends the process by SIGBUS."""
    kept.write_bytes(whole[:8192])


def of_another_program(kept: Path, whole: bytes) -> None:
    source = kept.with_suffix(".c")
    source.write_text("int other(void) { return 1; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(kept), str(source)], check=True)
    source.unlink()
    digest = native.digest(kept.read_bytes())
    kept.rename(kept.with_name(f"{kept.stem.rpartition('-')[0]}-{digest}.so")).chmod(0o600)


def writable_by_all(kept: Path, whole: bytes) -> None:
    kept.write_bytes(whole)
    kept.chmod(0o666)


def a_link(kept: Path, whole: bytes) -> None:
    kept.with_name("elsewhere").write_bytes(whole)
    kept.symlink_to("elsewhere")


def a_pipe(kept: Path, whole: bytes) -> None:
    os.mkfifo(kept, 0o600)


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    slow_after(3, [cut_short, of_another_program, a_link, empty, writable_by_all, a_pipe]),
)
def test_what_is_damaged_or_not_ones_own_is_built_again(cache: Path, damage):
    assert works(compiled())
    (kept,) = files(cache)
    whole = kept.read_bytes()
    kept.unlink()  # it is loaded: what replaces it is another file
    damage(kept, whole)
    assert works(compiled())
    assert kept.read_bytes() == whole and not kept.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o600


@needs_compiler
@needs_root
def test_anothers_library_is_built_again(cache: Path):
    assert works(compiled())
    (kept,) = files(cache)
    os.chown(kept, 65534, 65534)
    assert works(compiled())
    assert kept.stat().st_uid == 0


def test_a_compiler_that_fails_leaves_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "false")
    assert compiled() is None
    assert files(cache.parent) == []
    assert os.listdir(cache / "compiled") == []


def test_a_folder_that_others_can_write_to_is_not_used(cache: Path):
    for refused in (cache, cache / "compiled"):
        refused.mkdir()
        refused.chmod(0o777)
        native._own_folder.cache_clear()
        said = (
            f"ftp's cache {refused} can be written by others \\(mode 777\\), so that others"
            " could plant code in it"
        )
        with pytest.warns(UserWarning, match=said):
            folder = cache_folder("compiled")
        assert folder == cache.parent / "temporary" / f"ftp-{os.geteuid()}" / "compiled"
        assert folder.stat().st_mode & 0o777 == 0o700
        refused.chmod(0o700)
    native._own_folder.cache_clear()
    assert cache_folder("compiled") == cache / "compiled"


@pytest.mark.slow
@needs_root
def test_anothers_folder_is_not_used(cache: Path):
    cache.mkdir()
    os.chown(cache, 65534, 65534)
    private = cache.parent / "temporary" / "ftp-0"
    private.mkdir()
    os.chown(private, 65534, 65534)  # that one too
    with pytest.warns(UserWarning, match="belongs to user 65534, not to 0 who runs this"):
        folder = cache_folder("discovery")
    assert (
        folder.stat().st_uid == 0 and private not in folder.parents and cache not in folder.parents
    )


@needs_compiler
def test_where_no_cache_can_be_it_is_built_all_the_same(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    cache.touch()  # no folder can be made there
    assert works(compiled())
    (kept,) = files(cache.parent / "temporary")
    assert kept.parent == cache.parent / "temporary" / f"ftp-{os.geteuid()}" / "compiled"
    monkeypatch.delenv("FTP_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    assert cache_folder("compiled") == kept.parent


def test_what_is_read_is_ones_own(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert read_own(file) == b"content"
    file.chmod(0o664)
    with pytest.raises(PermissionError, match=r"can be written by others \(mode 664\)"):
        read_own(file)
    with pytest.raises(FileNotFoundError):
        read_own(tmp_path / "none")
    with pytest.raises(PermissionError, match="is no file"):
        read_own(tmp_path / "temporary")
