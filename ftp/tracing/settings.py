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
_of_call: ContextVar[tuple[Casts, bool] | None] = ContextVar("ftp_casts", default=None)


def settings() -> tuple[Any, ...]:
    """The default dtype, and what ``torch.autocast`` casts to: part of a trace's key."""
    casts, caches = _of_call.get() or _now()
    return torch.get_default_dtype(), *casts, caches


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
    with set_within(_of_call, _now()), casting([None] * len(CASTING), False):
        yield


def _now() -> tuple[Casts, bool]:
    """What ``torch.autocast`` casts to, and whether it casts a weight once for all its uses."""
    return autocast_now(), torch.is_autocast_cache_enabled()


@contextmanager
def as_called() -> Iterator[None]:
    """Within the block ``torch.autocast`` is as it is around the call of the step."""
    called = _of_call.get()
    if called is None:
        yield
        return
    with set_within(_of_call, None), casting(*called):
        yield


@contextmanager
def casting_once(is_on: bool) -> Iterator[None]:
    """Within the block ``torch.autocast`` casts a weight once for all its uses, whose gradients are
    summed in the dtype of the cast, as outside of a trace: make_fx turns that off. The cache is
    cleared around it: a captured weight's cast belongs to the trace, or to code outside.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(is_on)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@contextmanager
def casting(dtypes: "Casts | list[None]", caches: bool) -> Iterator[None]:
    """Within the block ``torch.autocast`` casts to these dtypes, per device type; a weight once for
    all its uses if it ``caches``.
    """
    with ExitStack() as stack:
        for device, dtype in zip(CASTING, dtypes, strict=True):
            stack.enter_context(
                torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=caches)
            )
        yield
