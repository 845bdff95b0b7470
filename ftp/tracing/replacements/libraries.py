"""Patches of other libraries while a program is traced: a context manager for each."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.nn import functional as F
from torch.nn.modules import adaptive, batchnorm, transformer

from ftp.errors import TraceError
from ftp.functional.backward_code import backward_code_as_now
from ftp.functional.remat import run_again
from ftp.ops.assume import assume
from ftp.source import at_line, user_line
from ftp.torch_internals import pytree
from ftp.tracing.data_dependent.control_flow import control_flow
from ftp.tracing.data_dependent.traced_number import TracedNumber
from ftp.tracing.replacements.finite_numbers import finite_numbers
from ftp.tracing.replacements.flex_attention import flex_attention
from ftp.tracing.replacements.mapped_ops import mapped_ops
from ftp.tracing.replacements.python_draws import python_draws
from ftp.tracing.replacements.replaced import replaced
from ftp.tracing.replacements.varlen_attention import varlen_attention
from ftp.tracing.selected_rows.group import SelectionGroup
from ftp.tracing.selected_rows.selected import Selected


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
    tracing = {"is_tracing": lambda *args, **kwargs: True}
    masking, modeling = map(sys.modules.get, _OF_TRANSFORMERS)
    with replaced(masking, tracing), replaced(modeling, tracing):
        yield


_OF_TRANSFORMERS = ("transformers.masking_utils", "transformers.modeling_utils")


@contextmanager
def _torch_nn() -> Iterator[None]:
    """Skip nn.Transformer's comparison of a mask with a causal one, a hint to its layers: passing
    the mask itself gives the same result.
    """
    original = transformer._detect_is_causal_mask

    def detect(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        is_known = mask is None or is_causal is not None
        return original(mask, is_causal, size) if is_known else False

    with replaced(transformer, {"_detect_is_causal_mask": detect}):
        yield


@contextmanager
def _torch_checks() -> Iterator[None]:
    """Take what ``torch._check`` and its kin check of values as passed."""
    original: Any = torch._check_with

    def check(error_type: type[Exception], cond: Any, message: Callable[[], str] | None) -> None:
        if type(cond) is TracedNumber:
            said = f": {message()}" if callable(message) else ""
            assume(cond.value != 0, f"{user_line()} checks values{said}")
        else:
            original(error_type, cond, message)

    with replaced(torch, {"_check_with": check}):
        yield


@contextmanager
def _adaptive_softmax() -> Iterator[None]:
    """Compute all clusters of nn.AdaptiveLogSoftmaxWithLoss on all rows. torch computes each
    cluster on the rows whose target is in it, and their number depends on values.
    """
    owner = adaptive.AdaptiveLogSoftmaxWithLoss
    original = owner.forward

    def forward(self: Any, input_: Tensor, target_: Tensor) -> Any:
        if input_.ndim not in (1, 2) or input_.shape[:-1] != target_.shape:
            return original(self, input_, target_)  # for its error
        known = target_.detach()
        in_range = (known >= 0) & (known < self.n_classes)
        assume(in_range, f"targets of the adaptive softmax are in [0, {self.n_classes})")
        rows = self.log_prob(input_.reshape(-1, input_.shape[-1]))
        output = rows.gather(1, target_.reshape(-1, 1)).reshape(target_.shape)
        return adaptive._ASMoutput(output, (-output).mean())

    with replaced(owner, {"forward": forward}):
        yield


@contextmanager
def _cumulative_averages() -> Iterator[None]:
    """Let batch norm's cumulative averages (``momentum=None``) divide by a count that is a tensor,
    where torch reads it as a Python number at each step.
    """
    owner = batchnorm._BatchNorm
    original = owner.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        averaged = (self.running_mean, self.num_batches_tracked)
        is_averaged = all(isinstance(x, Tensor) for x in averaged)
        is_updated = self.training and self.track_running_stats and is_averaged
        if self.momentum is not None or not is_updated:
            return original(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        share = 1.0 / self.num_batches_tracked.to(torch.float64)
        for running, own in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(share * own + (1 - share) * running)
        return out

    with replaced(owner, {"forward": forward}):
        yield


@contextmanager
def _distributions() -> Iterator[None]:
    """Check matrices of torch.distributions without early returns, which read values."""
    module: Any = sys.modules.get("torch.distributions.constraints")
    if module is None:
        yield
        return
    square = module._Square.check

    def is_symmetric(self: Any, value: Tensor) -> Tensor:
        if value.shape[-2] != value.shape[-1]:
            return square(self, value)
        return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)

    def is_semidefinite(self: Any, value: Tensor) -> Tensor:
        found = is_symmetric(self, value)
        if value.shape[-2] != value.shape[-1]:
            return found
        found = found & value.isfinite().all(-1).all(-1)
        # eigvalsh raises for other matrices, and a rank that holds none of them would not.
        kept = torch.where(found[..., None, None], value, torch.zeros_like(value))
        return found & torch.linalg.eigvalsh(kept).ge(0).all(-1)

    def is_definite(self: Any, value: Tensor) -> Tensor:
        found = is_symmetric(self, value)
        if value.shape[-2] != value.shape[-1]:
            return found
        return found & torch.linalg.cholesky_ex(value).info.eq(0)

    checks = {
        module._Symmetric: is_symmetric,
        module._PositiveSemidefinite: is_semidefinite,
        module._PositiveDefinite: is_definite,
    }
    with ExitStack() as stack:
        for owner, check in checks.items():
            stack.enter_context(replaced(owner, {"check": check}))
        yield


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
    by_name = f"{name}_impl"  # from torch 2.14 on
    name = by_name if hasattr(module, by_name) else name
    generator, forward = getattr(module, name), reentrant.forward

    def repeated(run: Callable[..., Any]) -> Callable[..., Any]:
        again = run_again()

        def repeat(*args: Any, **kwargs: Any) -> Any:
            with again():
                return run(*args, **kwargs)

        return repeat

    def made(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == by_name:
            kwargs["preserve_rng_state"] = False
        else:
            args = (False, *args[1:])
        # The generator calls its function only to recompute.
        return generator(repeated(run), *args, **kwargs)

    def entered(ctx: Any, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return _without_gradient(run, args)
        again = repeated(run)
        results = forward(ctx, run, False, *args)
        ctx.run_function = again
        return results

    with (
        replaced(module, {name: made, "_is_compiling": lambda *_: False}),
        replaced(reentrant, {"forward": staticmethod(entered)}),
    ):
        yield


def _without_gradient(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """A reentrant block none of whose arguments has a gradient: no gradient goes through it."""
    with torch.enable_grad():
        results = run(*args)
    if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(results)):
        raise TraceError(
            f"{at_line()}torch.utils.checkpoint(use_reentrant=True) gives a gradient only if a"
            " tensor among its arguments has one, and none has: tensors that the block captures, or"
            " takes in a dict or list, would get a gradient of zero. Pass use_reentrant=False."
        )
    return results


@contextmanager
def _inference_mode() -> Iterator[None]:
    """Run ``torch.inference_mode`` as ``torch.no_grad``: torch refuses to change or transform
    tensors that were made in inference mode.
    """

    def enter(self: Any) -> None:
        self._inference_mode_context = torch.set_grad_enabled(not self.mode)

    with replaced(torch.inference_mode, {"__enter__": enter}):
        yield


@contextmanager
def _selected_rows_in_aux() -> Iterator[None]:
    """Let torch.func's gradients return rows that a mask selects, in ``aux``."""
    original = eager_transforms._undo_create_differentiable

    def undo(results: Any, level: int | None = None) -> Any:
        groups: dict[SelectionGroup, SelectionGroup] = {}

        def plain(x: Any) -> Any:
            return original(x, level)

        def of(x: Any) -> Any:
            if not isinstance(x, Selected):
                return plain(x)
            if x.group not in groups:
                own = x.group
                tensors = {name: plain(getattr(own, name)) for name in _TENSORS}
                groups[own] = SelectionGroup(**tensors, line=own.line)
            return Selected(plain(x.rows), groups[x.group], x.upper_bound)

        return pytree.tree_map(of, results)

    with replaced(eager_transforms, {"_undo_create_differentiable": undo}):
        yield


_TENSORS = ("mask", "valid", "first", "is_any")  # of a `SelectionGroup`
PATCHES: tuple[Callable[[], AbstractContextManager[None]], ...] = (
    _torch_nn,
    _torch_checks,
    _adaptive_softmax,
    _cumulative_averages,
    _distributions,
    _transformers,
    backward_code_as_now,
    _checkpoint,
    _inference_mode,
    _selected_rows_in_aux,
    flex_attention,
    varlen_attention,
    control_flow,
    finite_numbers,
    python_draws,
    mapped_ops,
)
