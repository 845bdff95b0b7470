"""Patches of other libraries while a program is traced: a context manager for each."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules import transformer

from ftp.functional.remat import run_again
from ftp.tracing.control_flow import control_flow
from ftp.tracing.flex_attention import flex_attention
from ftp.tracing.mapped_ops import mapped_ops
from ftp.tracing.varlen_attention import varlen_attention


@contextmanager
def patched_libraries() -> Iterator[None]:
    """All of ``PATCHES``, for libraries that are imported already."""
    with ExitStack() as stack:
        for patch in PATCHES:
            stack.enter_context(patch())
        yield


@contextmanager
def _transformers() -> Iterator[None]:
    """Tell transformers that it is traced: it then builds masks without reading values, and
    without warnings.
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
    """Skip nn.Transformer's comparison of a mask with a causal one, a hint to its layers: passing
    the mask itself gives the same result.
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


@contextmanager
def _checkpoint() -> Iterator[None]:
    """Recompute blocks of torch.utils.checkpoint, in both of its forms, like blocks of ``remat``.
    Random numbers are drawn from keys, so torch's generator is left alone.
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
        # The generator calls its function only to recompute.
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
    _torch_nn,
    _transformers,
    _checkpoint,
    flex_attention,
    varlen_attention,
    control_flow,
    mapped_ops,
)
