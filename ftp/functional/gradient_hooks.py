"""Gradient hooks of a model: run those of parameters, refuse others by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ftp.dataclass import dataclass
from ftp.errors import TraceError, join_failures
from ftp.functional.backward_code import as_now
from ftp.sharding.pytree import flatten
from ftp.torch_internals.fake_tensors import FakeTensor
from ftp.torch_internals.functorch import is_functorch_wrapped_tensor

_INSTEAD = (
    "Remove the hook; x.register_hook in the function runs, and a step returns its"
    " gradients, for the caller to change."
)


class GradientRefused(TraceError):
    """torch.func cannot take this gradient; torch.autograd can."""


@dataclass(frozen=True)
class GradientHooks:
    """The gradient hooks of a model at the time of ``functionalize``.

    Attributes:
        of_parameters: ``{path: hooks}`` of ``Tensor.register_hook``.
        of_modules: descriptions of the hooks that torch.autograd runs and torch.func does not.
        refused: descriptions of the hooks that neither runs.
    """

    of_parameters: Mapping[str, tuple[Callable[[Tensor], Any], ...]]
    of_modules: Sequence[str]
    refused: Sequence[str]

    def with_hooks(
        self, name: str, values: Mapping[str, Tensor], inputs: Any
    ) -> Mapping[str, Tensor]:
        """The tensors on which ``register`` puts the parameters' hooks, from ``values``.

        A tensor of the trace gets the hooks itself, so that a model called twice runs them once, on
        the whole gradient; a tensor of the caller is replaced by an alias with the hooks.

        Raises:
            TraceError: a gradient is taken, and a hook cannot run.
        """
        leaves = (*values.values(), *flatten(inputs)[0])
        if any(map(_is_differentiated, leaves)):
            hooks = (*self.refused, *self.of_modules)
        else:
            hooks = self.refused if _is_taken_by_autograd(values) else ()
        if hooks:
            kind = TraceError if self.refused else GradientRefused
            raise kind(
                join_failures(
                    f"{name}: {hook}, which torch.func does not run. {_INSTEAD}" for hook in hooks
                )
            )
        caller = {p: values[p] for p in self.of_parameters if not _is_of_trace(values[p])}
        return {**values, **{p: x.view_as(x) for p, x in caller.items() if self._lacks(p, x)}}

    def register(self, values: Mapping[str, Tensor]) -> None:
        """Register the parameters' hooks, which may call modules of the model, within its call."""
        for path, hooks in self.of_parameters.items():
            if self._lacks(path, values[path]):
                for hook in hooks:
                    values[path].register_hook(as_now(hook))

    def _lacks(self, path: str, value: Tensor) -> bool:
        known = tuple((value._backward_hooks or {}).values())
        return value.requires_grad and any(hook not in known for hook in self.of_parameters[path])


def gradient_hooks(model: nn.Module) -> GradientHooks:
    """The hooks of parameters that require a gradient, and of modules."""
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    refused = [
        f"parameter {path!r} has a hook for its accumulated gradient"
        " (register_post_accumulate_grad_hook)"
        for path, p in trained.items()
        if p._post_accumulate_grad_hooks
    ]
    of_modules = [
        f"module {path!r} ({type(module).__name__}) has a backward hook"
        " (register_full_backward_hook and its kin)"
        for path, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    return GradientHooks(
        {
            path: tuple(p._backward_hooks.values())
            for path, p in trained.items()
            if p._backward_hooks
        },
        of_modules,
        refused,
    )


def _is_of_trace(x: Tensor) -> bool:
    return is_functorch_wrapped_tensor(x) or isinstance(x, FakeTensor)


def _is_taken_by_autograd(values: Mapping[str, Tensor]) -> bool:
    """Whether a trace takes the gradient by torch.autograd."""
    return any(isinstance(x, FakeTensor) and x.requires_grad for x in values.values())


def _is_differentiated(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and is_functorch_wrapped_tensor(leaf)
