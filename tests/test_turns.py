"""Turns of ranks that are more than the cores of their host."""

import os
import threading
import time

import pytest

from ftp import turns
from ftp.turns import turn


@pytest.fixture(autouse=True)
def crowded(monkeypatch):
    """Three ranks on one core."""
    monkeypatch.setattr(turns, "_PLACE", f"\0ftp-test-{os.getpid()}")
    monkeypatch.setattr(turns, "_cores", lambda: {0})
    monkeypatch.setattr(turns, "_takes_turns", True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")


def is_free() -> bool:
    place = turns._free_place({0})
    if place is not None:
        place.close()
    return place is not None


def test_a_rank_waits_for_the_turn_of_another_one():
    other = turns._free_place({0})
    assert other is not None
    threading.Timer(0.15, other.close).start()
    start = time.monotonic()
    with turn():
        assert time.monotonic() - start > 0.1


def test_a_turn_within_a_turn_is_the_same_one(monkeypatch):
    monkeypatch.setattr(turns, "_PATIENCE", 0.05)
    with turn():
        with turn():
            pass
        assert not is_free()


def test_ranks_on_cores_of_their_own_do_not_wait(monkeypatch):
    other = turns._free_place({0})
    assert other is not None
    monkeypatch.setattr(turns, "_cores", lambda: {1})
    monkeypatch.setattr(turns, "_PATIENCE", 0.05)
    with other, turn():
        assert turns._takes_turns


def test_an_error_ends_the_turn():
    with pytest.raises(KeyError), turn():
        raise KeyError
    assert is_free()


def test_a_rank_does_not_wait_long_and_only_once(monkeypatch):
    monkeypatch.setattr(turns, "_PATIENCE", 0.05)
    other = turns._free_place({0})
    assert other is not None
    with other:
        with turn():
            pass
        monkeypatch.setattr(turns, "_PATIENCE", 60.0)
        start = time.monotonic()
        with turn():
            assert time.monotonic() - start < 1


@pytest.mark.parametrize("ranks", ["1", ""])
def test_few_ranks_take_no_turns(monkeypatch, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with turn():
        assert is_free()
