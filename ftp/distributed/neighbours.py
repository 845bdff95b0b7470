"""Processes on this host, watched through pidfds: the kernel reports at once that one has ended,
even if its children still hold its sockets.
"""

import os
import select
import socket
import threading
import zlib
from collections.abc import Callable, Mapping


def host() -> str | None:
    """A name of this host and process namespace; None where the kernel has no pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
        machine = socket.gethostname() + boot + os.readlink("/proc/self/ns/pid")
        return f"{zlib.crc32(machine.encode()):08x}"
    except (OSError, AttributeError):
        return None


class Neighbours:
    """A thread that calls ``gone(rank, pid)`` when one of these processes has ended; it sleeps
    until then.
    """

    def __init__(self, pids: Mapping[int, int], gone: Callable[[int, int], None]):
        self._read, write = os.pipe()
        self._write: int | None = write
        self._thread = threading.Thread(
            target=self._run, args=(dict(pids), gone), name="ftp-neighbours", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._write is not None:
            os.write(self._write, b"\0")
            os.close(self._write)
            self._write = None
            self._thread.join(1.0)

    def _run(self, pids: Mapping[int, int], gone: Callable[[int, int], None]) -> None:
        poll, ranks = select.poll(), {}
        poll.register(self._read, select.POLLIN)
        for rank, pid in pids.items():
            try:
                handle = os.pidfd_open(pid)
            except OSError:  # it has ended already
                gone(rank, pid)
                continue
            ranks[handle] = rank
            poll.register(handle, select.POLLIN)
        try:
            while True:
                for handle, _ in poll.poll():
                    if handle == self._read:
                        return
                    poll.unregister(handle)
                    gone(ranks[handle], pids[ranks[handle]])
        finally:
            for handle in (self._read, *ranks):
                os.close(handle)
