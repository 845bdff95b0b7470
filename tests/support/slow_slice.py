"""Runs a slice of the slow tests within a time limit, so that over many commits each runs again and
again.

``pytest tests -m slow --slow-slice=N/M --slow-limit=SECONDS`` keeps the slow tests whose name,
hashed, falls into part N of M (N is taken modulo M), in an order drawn from N. N is the commit's
hash in ``.ci/run``. When the limit is reached, the running test and those after it are skipped: the
limit fails nothing, a test that failed before it does.
"""

import hashlib
import signal
import time
from typing import Any

import pytest


def parse(text: str) -> tuple[int, int]:
    """N and M of ``N/M``.

    >>> parse("12/5")
    (12, 5)
    """
    number, _, parts = text.partition("/")
    if not number.isdecimal() or not parts.isdecimal() or int(parts) == 0:
        raise pytest.UsageError(f"--slow-slice={text}: expected N/M, two integers, M above zero")
    return int(number), int(parts)


def slice_of(names: list[str], number: int, parts: int) -> list[str]:
    """The names in part ``number`` of ``parts``, in an order that differs from number to number.

    A name's part depends on the name alone: a new test moves no other.
    """
    chosen = [name for name in names if _hash(name) % parts == number % parts]
    return sorted(chosen, key=lambda name: _hash(f"{number}:{name}"))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def add_options(parser: Any) -> None:
    group = parser.getgroup("slow tests")
    group.addoption("--slow-slice", metavar="N/M", help="run part N of M of the slow tests")
    group.addoption(
        "--slow-limit", metavar="SECONDS", type=float, help="skip what is left of the slice then"
    )


class SlowSlice:
    """The plugin that ``--slow-slice`` registers."""

    def __init__(self, text: str, limit: float | None) -> None:
        self.number, self.parts = parse(text)
        self.limit = limit
        self.end = float("inf") if limit is None else time.monotonic() + limit
        self.rang = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        slow = {item.nodeid: item for item in items if item.get_closest_marker("slow")}
        chosen = [slow[name] for name in slice_of(sorted(slow), self.number, self.parts)]
        kept = set(map(id, chosen))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            self._stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Any:
        """Skip the test at the limit, by an alarm."""
        if self.limit is None:
            return (yield)
        before = signal.signal(signal.SIGALRM, self._stop)
        signal.setitimer(signal.ITIMER_REAL, max(self.end - time.monotonic(), 1e-3))
        try:
            return (yield)
        except (Exception, pytest.fail.Exception):
            if self.rang:  # in a collector's callback: Python drops what that raises, pytest warns
                self._stop()
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _stop(self, *_: object) -> None:
        self.rang = True
        pytest.skip(f"the {self.limit:g} s of the slice are over")
