"""What other libraries need while a program is traced: a context manager for each."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from ftp.tracing.attention_functions import flex_attention, varlen_attention


@contextmanager
def patched_libraries() -> Iterator[None]:
    """All of ``PATCHES``, for libraries that are imported already."""
    with ExitStack() as stack:
        for patch in PATCHES:
            stack.enter_context(patch())
        yield


@contextmanager
def _transformers() -> Iterator[None]:
    """transformers builds its masks without reading values when it believes that it is traced."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "is_tracing"):
        yield
        return
    original = masking.is_tracing
    masking.is_tracing = lambda *args, **kwargs: True
    try:
        yield
    finally:
        masking.is_tracing = original


PATCHES: tuple[Callable[[], AbstractContextManager[None]], ...] = (
    _transformers,
    flex_attention,
    varlen_attention,
)
