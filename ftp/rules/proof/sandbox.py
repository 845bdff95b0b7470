"""Work in a forked child with a time limit: a native kernel that crashes or hangs costs the
child, not the program.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ftp.dataclass import dataclass


@dataclass(frozen=True)
class Ended:
    """A child that ended without a result.

    Attributes:
        timed_out: whether a time limit ended it.
        how: how it ended, in words.
    """

    timed_out: bool
    how: str


def apart(work: Callable[[], Any], cpu_seconds: int, seconds: float) -> Any:
    """The result of ``work`` as JSON, computed on one thread of a forked child; ``Ended`` if the
    child crashed or ran too long.

    The child is a copy of this process, so ops that were registered here are known there. It must
    use CPU tensors only.

    Args:
        cpu_seconds: limit on the child's processor time, so that the result does not depend on
            other work of the machine.
        seconds: limit on elapsed time, for work that hangs without computing.

    >>> apart(lambda: [1, 2], cpu_seconds=5, seconds=5)
    [1, 2]
    """
    if not (hasattr(os, "fork") and sys.platform == "linux"):
        return Ended(False, f"there is no safe fork on {sys.platform}")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the child starts no thread and waits for none
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _work(work, writer, cpu_seconds)
    os.close(writer)
    try:
        text, in_time = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not in_time:
        return Ended(True, f"more than {seconds:g} s")
    try:
        return json.loads(text)
    except ValueError:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            return Ended(True, f"more than {cpu_seconds} s of processor time")
        return Ended(
            False,
            f"signal {os.WTERMSIG(status)}"
            if os.WIFSIGNALED(status)
            else text.decode(errors="replace") or "no answer",
        )


def _work(work: Callable[[], Any], writer: int, cpu_seconds: int) -> None:
    """Run in the child: work, write the result, and exit without the parent's exit handlers."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, used + cpu_seconds + 1))
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGSEGV,
            signal.SIGABRT,
            signal.SIGFPE,
            signal.SIGBUS,
            signal.SIGXCPU,
        ):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = json.dumps(work()).encode()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".encode()
    while said:
        said = said[os.write(writer, said) :]
    os._exit(0)


def _read(reader: int, deadline: float) -> tuple[bytes, bool]:
    """All that the child writes, and whether it finished in time."""
    said = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return said, False
        more = os.read(reader, 65536)
        if not more:
            return said, True
        said += more
