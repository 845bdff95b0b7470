"""Pause the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 10_000  # objects; fewer are left to the next collection of young ones
_is_frozen = False  # was the heap found frozen by others, who want it to last


@contextmanager
def collection_paused() -> Iterator[None]:
    """Imports, tracing and planning make many small objects and no garbage worth a third of their
    time.

    What a pause leaves, if it is much, is old to the collector: a full collection visits it, and
    not the next three.
    """
    global _is_frozen
    was_on, before = gc.isenabled(), gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_count()[0] - before > MANY and not _is_frozen:
                _is_frozen = gc.get_freeze_count() > 0  # walks all that is frozen
                if not _is_frozen:
                    gc.freeze()
                    gc.unfreeze()
            gc.enable()
