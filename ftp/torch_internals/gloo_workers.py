"""gloo's worker threads at the end of a process. Read at torch 2.13.

A worker drops a collective's tensors after it has told the program that the collective is done. To
drop one that Python holds too, it takes the interpreter's lock: if the interpreter goes down before
that, the process ends with "terminate called without an active exception".
"""

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"


def await_idle(seconds: float) -> bool:
    """Whether all workers of this process came to sleep in time. Without ``/proc`` it returns at
    once.
    """
    until = time.monotonic() + seconds
    while True:
        time.sleep(0.001)  # lets a worker that waits for the interpreter's lock have it
        if not any(_is_busy(task) for task in Path("/proc/self/task").glob("*")):
            return True
        if time.monotonic() > until:
            return False


def _is_busy(task: Path) -> bool:
    """Whether a thread is a worker that runs, or would if it had a processor."""
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name == _NAME and rest.split()[0] != "S"
