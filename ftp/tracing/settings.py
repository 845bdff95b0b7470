"""The settings of torch on which a trace depends."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from ftp.context import set_within
from ftp.functional.remat import CASTING, autocast_now
from ftp.torch_internals.autograd_state import is_any_autocast_enabled

Casts = tuple[torch.dtype | None, ...]
_of_call: ContextVar[Casts | None] = ContextVar("ftp_casts", default=None)


def settings() -> tuple[Any, ...]:
    """The default dtype, and what ``torch.autocast`` casts to: part of a trace's key."""
    return torch.get_default_dtype(), *(_of_call.get() or autocast_now())


def uncast() -> AbstractContextManager[None]:
    """Within the block ``torch.autocast`` is off, as programs are planned and run: their casts are
    ops, and where the function turned it off they have none. Functions are traced ``as_called``.
    """
    return _uncast() if is_cast() else nullcontext()


def is_cast() -> bool:
    """Whether ``torch.autocast`` is on for a type of device on which programs run."""
    return is_any_autocast_enabled() and any(autocast_now())


@contextmanager
def _uncast() -> Iterator[None]:
    with set_within(_of_call, autocast_now()), casting([None] * len(CASTING)):
        yield


@contextmanager
def as_called() -> Iterator[None]:
    """Within the block ``torch.autocast`` is as it is around the call of the step."""
    casts = _of_call.get()
    if casts is None:
        yield
        return
    with set_within(_of_call, None), casting(casts):
        yield


@contextmanager
def casting(dtypes: "Casts | list[None]") -> Iterator[None]:
    """Within the block ``torch.autocast`` casts to these dtypes, per device type."""
    with ExitStack() as stack:
        for device, dtype in zip(CASTING, dtypes, strict=True):
            stack.enter_context(
                torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)
            )
        yield
