"""A call on a mesh while it runs."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ftp.errors import InputError, ReplicaError
from ftp.sharding.mesh_groups import set_timeout
from ftp.sharding.process_group import NCCL_LONGER

if TYPE_CHECKING:
    from ftp.distributed.calls import Calls


class Running:
    """See `Calls.running`; a class, as every call of every step enters it."""

    __slots__ = (
        "calls",
        "communicates",
        "describe",
        "has_issued",
        "is_first",
        "program",
        "timeout",
    )

    def __init__(
        self,
        calls: "Calls",
        program: str,
        describe: Callable[[BaseException], str],
        has_issued: Callable[[BaseException], bool],
        communicates: Callable[[], bool],
        timeout: float | None,
    ):
        self.calls, self.program, self.timeout = calls, program, timeout
        self.describe, self.has_issued, self.communicates = describe, has_issued, communicates
        self.is_first = calls._given is not None and program not in calls._finished

    def __enter__(self) -> None:
        calls, thread = self.calls, threading.get_ident()
        calls.check()
        if not calls._alone:
            if not calls._in_call.acquire(False) or calls._thread is not None:
                calls._refuse_overlap(thread)
            calls._holder = thread
        if self.program != calls.program or thread != calls._caller:
            try:
                calls._begin(self.program, thread, self.timeout)
            except BaseException:
                if not calls._alone:
                    calls._in_call.release()
                raise
        if self.is_first:
            set_timeout(calls.mesh, calls._timeouts.start)
        calls._thread, calls._communicates = thread, self.communicates

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        calls = self.calls
        # All ranks raise a ReplicaError or an InputError: their calls end alike.
        if error is not None and not isinstance(error, ReplicaError | InputError):
            try:
                if (
                    isinstance(error, RuntimeError)
                    and (explained := calls.explain(error, self.describe(error))) is not None
                ):
                    raise explained from error
                if not calls._alone:
                    calls.fail(error, self.has_issued(error))
            finally:
                calls._thread = None
                if not calls._alone:
                    calls._in_call.release()
            return
        calls._thread = None
        if not calls._alone:
            calls._in_call.release()
            if calls._is_overlapped:
                calls.check()
        calls.call += 1
        if calls._unfinished is not None:
            calls.check()
            seconds = calls._timeouts.start if self.is_first else calls._timeouts.step
            if calls._given is None:  # NCCL ends the process after that time
                seconds = max(seconds - NCCL_LONGER, seconds / 2)
            calls._unfinished.given(seconds)
        if self.is_first:
            calls._finished.add(self.program)
            set_timeout(calls.mesh, calls._timeouts.step)
