"""Waiting for ranks, and texts for messages about them."""

import time
from collections.abc import Callable

# Questions to the store, a second, of all waiting ranks together; it answers more (docs/faults.md).
QUESTIONS = 10_000
LINGER = 2.0  # seconds that a failing rank stays, at the most, for the others to read why

RESTART = (
    "\n  Restart from the last checkpoint: torchrun --max-restarts=N does, where the program"
    " resumes by itself."
)


def wait_until(timeout: float, ready: Callable[[], bool], ranks: int) -> bool:
    """Whether ``ready`` became true in ``timeout`` seconds. It is asked less often the longer this
    waits, and the more ranks there are. Ctrl-C interrupts it.
    """
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        time.sleep(min(max(0.1, ranks / QUESTIONS), max(0.0005, waited / 8)))
    return True


def shortened(text: str, width: int, around: int = 0) -> str:
    """At most ``width`` characters of a text, from a little before position ``around``.

    >>> shortened("abcdefghijklmnop", 6, around=12)
    '...klmnop'
    """
    start = max(0, min(around - width // 3, len(text) - width))
    end = start + width
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


def indented(text: str) -> str:
    return text.replace("\n", "\n  ")


def named_ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"Rank{'s' if len(ranks) > 1 else ''} {names}"
