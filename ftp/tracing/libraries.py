"""What other libraries need while a program is traced: a context manager for each."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from ftp.functional.remat import run_again
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


@contextmanager
def _checkpoint() -> Iterator[None]:
    """Blocks of torch.utils.checkpoint, in both of its forms, are recomputed as those of ``remat``
    are. Random numbers are drawn from keys, so torch's generator is left alone.
    """
    module: Any = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        yield
        return
    name, reentrant = "_checkpoint_without_reentrant_generator", module.CheckpointFunction
    generator, forward, compiling = getattr(module, name), reentrant.forward, module._is_compiling

    def repeated(run: Callable[..., Any]) -> Callable[..., Any]:
        again = run_again()

        def repeat(*args: Any, **kwargs: Any) -> Any:
            with again():
                return run(*args, **kwargs)

        return repeat

    def made(run: Callable[..., Any], preserve: bool, *args: Any, **kwargs: Any) -> Any:
        # The generator calls its function to recompute alone.
        return generator(repeated(run), False, *args, **kwargs)

    def entered(ctx: Any, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        again = repeated(run)
        results = forward(ctx, run, False, *args)
        ctx.run_function = again
        return results

    setattr(module, name, made)
    module._is_compiling = lambda *_: False
    reentrant.forward = staticmethod(entered)
    try:
        yield
    finally:
        setattr(module, name, generator)
        module._is_compiling = compiling
        reentrant.forward = staticmethod(forward)


PATCHES: tuple[Callable[[], AbstractContextManager[None]], ...] = (
    _transformers,
    _checkpoint,
    flex_attention,
    varlen_attention,
)
