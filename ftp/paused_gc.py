"""Pause the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 10_000  # objects; fewer are left to the next collection of young ones


@contextmanager
def collection_paused() -> Iterator[None]:
    """Imports, tracing and planning make many small objects and no garbage worth a third of their
    time.

    What a pause leaves, if it is much, is old to the collector: a full collection visits it, and
    not the next three.
    """
    was_on, before = gc.isenabled(), gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            # Asking whether others froze the heap, who want it to last, walks all of it.
            if gc.get_count()[0] - before > MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
