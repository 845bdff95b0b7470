"""The slow tests that a commit's continuous integration adds to the default ones."""

from pathlib import Path

import own_process  # type: ignore[import-not-found]
import pytest
from hypothesis import settings
from slow_slice import parse, slice_of

SUPPORT = Path(__file__).parent / "support"
NAMES = [f"tests/test_{i % 7}.py::test_case[{i}]" for i in range(200)]


def test_the_slices_of_all_numbers_are_all_tests_once():
    slices = [slice_of(NAMES, number, 8) for number in range(8)]
    assert sorted(name for part in slices for name in part) == sorted(NAMES)
    assert all(10 <= len(part) <= 50 for part in slices)


def test_a_number_is_taken_modulo_the_parts_and_draws_the_order():
    few, many = slice_of(NAMES, 3, 8), slice_of(NAMES, 3 + 8 * 10**12, 8)
    assert sorted(few) == sorted(many)
    assert few != many


def test_a_new_test_moves_no_other():
    before, after = slice_of(NAMES, 5, 8), slice_of([*NAMES, "tests/test_new.py::test"], 5, 8)
    assert [name for name in after if name in NAMES] == before


def test_each_test_comes_first_in_its_slice_for_some_number():
    """So that a limit on time leaves none out for ever."""
    chosen = slice_of(NAMES[:40], 0, 4)
    assert {slice_of(NAMES[:40], 4 * i, 4)[0] for i in range(200)} == set(chosen)


@pytest.mark.parametrize("text", ["3", "3/", "3/0", "/4", "-1/4", "a/4"])
def test_what_is_no_slice_is_a_usage_error(text: str):
    with pytest.raises(pytest.UsageError, match="expected N/M"):
        parse(text)


FILE = """
import gc, time, pytest

pytestmark = pytest.mark.slow

def test_first(): pass
def test_long(): time.sleep(60)
def test_other(): BODY
"""


def run(tmp_path: Path, body: str, *options: str) -> tuple[int, str]:
    """Exit status and closing line of a session of its own with the plugin."""
    conftest = (SUPPORT.parent / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {SUPPORT}\nmarkers = slow: slow\nfilterwarnings = error\n"
    )
    (tmp_path / "test_file.py").write_text(FILE.replace("BODY", body))
    arguments = ["-p", "no:cacheprovider", "-rs", *options]
    program = f"import pytest\nraise SystemExit(int(pytest.main({arguments})))"
    found = own_process.run(program, folder=tmp_path)
    return found.returncode, found.stdout


@pytest.mark.slow
def test_the_limit_skips_what_is_left_and_fails_nothing(tmp_path: Path):
    status, printed = run(tmp_path, "pass", "--slow-slice=0/1", "--slow-limit=1", "-k", "long")
    assert status == 0
    assert "the 1 s of the slice are over" in printed
    assert "1 skipped" in printed
    status, printed = run(tmp_path, "pass", "--slow-slice=0/1", "--slow-limit=0")
    assert status == 0
    assert "3 skipped" in printed


@pytest.mark.slow
def test_a_limit_that_is_reached_where_python_drops_exceptions_fails_nothing(tmp_path: Path):
    body = "gc.callbacks.append(lambda *_: time.sleep(2)); gc.collect(); gc.callbacks.pop()"
    status, printed = run(tmp_path, body, "--slow-slice=0/1", "--slow-limit=1", "-k", "other")
    assert status == 0
    assert "1 skipped" in printed


def test_a_slow_test_that_fails_fails_the_slice(tmp_path: Path):
    status, printed = run(
        tmp_path, "assert False", "--slow-slice=0/1", "--slow-limit=30", "-k", "not long"
    )
    assert status == 1
    assert "1 failed, 1 passed" in printed


def test_a_slice_has_slow_tests_alone(tmp_path: Path):
    (tmp_path / "test_quick.py").write_text("def test_quick(): pass\n")
    status, printed = run(tmp_path, "pass", "--slow-slice=0/1", "-k", "not long")
    assert status == 0
    assert "2 passed, 2 deselected" in printed


def test_no_property_has_a_deadline():
    assert settings.default is not None
    assert settings.default.deadline is None
