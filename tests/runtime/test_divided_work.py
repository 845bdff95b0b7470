"""Divided work: what another process does is left to it, and done last."""

import os
from pathlib import Path

from ftp.runtime import divided_work
from ftp.runtime.divided_work import divided


def in_a_process(work):
    """Fork a process that does ``work`` and ends; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_a_key_that_another_process_does_comes_last(tmp_path: Path):
    has_begun, may_end = os.pipe(), os.pipe()

    def theirs(key: str) -> None:
        os.write(has_begun[1], b".")
        os.read(may_end[0], 1)
        (tmp_path / "done").touch()

    other = in_a_process(lambda: divided(["a"], tmp_path, theirs))
    os.read(has_begun[0], 1)
    seen = []

    def ours(key: str) -> str:
        seen.append((key, (tmp_path / "done").exists()))
        if key == "c":
            os.write(may_end[1], b".")
        return key.upper()

    made = divided(["a", "b", "c"], tmp_path, ours)
    os.waitpid(other, 0)
    assert seen == [("b", False), ("c", False), ("a", True)]
    assert list(made.items()) == [("a", "A"), ("b", "B"), ("c", "C")]


def test_a_process_that_ends_or_hangs_holds_nobody_up(tmp_path: Path, monkeypatch):
    has_begun, never = os.pipe(), os.pipe()

    def ends(key: str) -> None:
        os._exit(1)

    def hangs(key: str) -> None:
        os.write(has_begun[1], b".")
        os.read(never[0], 1)

    os.waitpid(in_a_process(lambda: divided(["a"], tmp_path, ends)), 0)
    assert divided(["a"], tmp_path, str.upper) == {"a": "A"}

    other = in_a_process(lambda: divided(["a"], tmp_path, hangs))
    os.read(has_begun[0], 1)
    monkeypatch.setattr(divided_work, "_PATIENCE", 0.05)
    assert divided(["a", "b"], tmp_path, str.upper) == {"a": "A", "b": "B"}
    os.write(never[1], b".")
    os.waitpid(other, 0)


def test_no_lock_is_needed(tmp_path: Path):
    assert divided(["a"], tmp_path / "missing", str.upper) == {"a": "A"}
