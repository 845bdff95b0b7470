"""Pause the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Imports, tracing and planning make many small objects and no garbage worth a third of their
    time.

    What a pause leaves is old to the collector: a full collection visits it, and not the next
    three.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # by others, who want it to last
                gc.freeze()
                gc.unfreeze()
            gc.enable()
