"""Pauses of the garbage collector."""

import gc

import pytest

from ftp import paused_gc
from ftp.paused_gc import collection_paused


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch):
    """Tests freeze what was imported (tests/conftest.py)."""
    monkeypatch.setattr(paused_gc, "_is_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_a_long_pause_leaves_is_old():
    with collection_paused():
        assert not gc.isenabled()
        made = [[] for _ in range(paused_gc.MANY + 1000)]
    assert gc.isenabled()
    old = set(map(id, gc.get_objects(generation=2)))
    assert old.issuperset(map(id, made))


def test_a_frozen_heap_is_walked_once_and_not_by_a_short_pause(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(1) or 1)
    with collection_paused():
        pass
    assert not asked
    for _ in range(3):
        with collection_paused():
            made = [[] for _ in range(paused_gc.MANY + 1000)]
    assert asked == [1] and made


def test_a_frozen_heap_stays_frozen():
    gc.freeze()
    try:
        with collection_paused():
            made = [[] for _ in range(paused_gc.MANY + 1000)]
        assert gc.get_freeze_count() and made
    finally:
        gc.unfreeze()
