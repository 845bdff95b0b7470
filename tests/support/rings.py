"""Rings of tests that patch what their steps are made from."""

import functools
from typing import Any

from ftp.ops import key_ring


def forget_steps(monkeypatch: Any) -> None:
    """Make steps anew within a test, and keep none of them for the tests after it."""
    fresh = functools.lru_cache(key_ring._steps_of.__wrapped__)
    monkeypatch.setattr(key_ring, "_steps_of", fresh)
