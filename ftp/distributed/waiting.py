"""Waiting for ranks, and their texts in messages."""

import time
from collections.abc import Callable

# A second that all ranks together ask the store while they wait; it takes more (docs/faults.md).
QUESTIONS = 10_000
LINGER = 2.0  # seconds that a failing rank stays, at the most, for the others to read why

RESTART = (
    "\n  Restart from the last checkpoint: torchrun --max-restarts=N does, where the program"
    " resumes by itself."
)


def wait_until(timeout: float, ready: Callable[[], bool], ranks: int) -> bool:
    """Whether it became ready in time; asks the more rarely the longer it waits and the more do;
    can be interrupted from the keyboard.
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
