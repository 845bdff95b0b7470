"""What other libraries need while a program is traced: a context manager for each."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules import transformer


@contextmanager
def patched_libraries() -> Iterator[None]:
    """All of ``PATCHES``, for libraries that are imported already."""
    with ExitStack() as stack:
        for patch in PATCHES:
            stack.enter_context(patch())
        yield


@contextmanager
def _transformers() -> Iterator[None]:
    """transformers builds its masks without reading values, and warns of none, when it believes
    that it is traced.
    """
    found: list[Any] = [
        module
        for name in ("transformers.masking_utils", "transformers.modeling_utils")
        if hasattr(module := sys.modules.get(name), "is_tracing")
    ]
    originals = [module.is_tracing for module in found]
    for module in found:
        module.is_tracing = lambda *args, **kwargs: True
    try:
        yield
    finally:
        for module, original in zip(found, originals, strict=True):
            module.is_tracing = original


@contextmanager
def _torch_nn() -> Iterator[None]:
    """nn.Transformer compares a mask with a causal one, to say so to its layers; a mask that is
    given as it is comes to the same, whatever its values.
    """
    original = transformer._detect_is_causal_mask

    def detect(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        is_known = mask is None or is_causal is not None
        return original(mask, is_causal, size) if is_known else False

    transformer._detect_is_causal_mask = detect
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


PATCHES: tuple[Callable[[], AbstractContextManager[None]], ...] = (_torch_nn, _transformers)
