"""Calls whose work a GPU has not finished.

NCCL's collectives return when they are issued, and one whose peer is missing neither ends nor
raises. Whatever reads a result blocks.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

_LOOK = 0.5  # seconds between two looks at the oldest mark

Reached = Callable[[], bool]
Mark = Callable[[], Reached]


class Unfinished:
    """CUDA events after the calls of a mesh, and a thread that queries them.

    Args:
        late: called once, by the thread, with the seconds for which the GPU has not reached an
            event.
        mark: records an event, and returns its query.
    """

    def __init__(self, late: Callable[[float], None], mark: Mark | None = None):
        self._late, self._mark = late, mark or _event
        self._marks: deque[tuple[Reached, float]] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __bool__(self) -> bool:
        return bool(self._marks)

    def given(self, seconds: float) -> None:
        """Records that a call was issued, for which the GPU may take ``seconds``."""
        if self._stop.is_set():
            return
        self._marks.append((self._mark(), seconds))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftp-unfinished", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def stop(self) -> None:
        self._stop.set()
        atexit.unregister(self.stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        since = time.monotonic()
        while not self._stop.wait(_LOOK):
            try:
                while self._marks and self._marks[0][0]():
                    self._marks.popleft()
                    since = time.monotonic()
            except RuntimeError:  # the GPU has failed, which whoever uses it next is told
                self._stop.set()
                return
            if not self._marks:
                since = time.monotonic()
            elif (waited := time.monotonic() - since) > self._marks[0][1]:
                self._stop.set()
                self._late(waited)


def _event() -> Reached:
    event = torch.cuda.Event()
    event.record()
    return event.query
