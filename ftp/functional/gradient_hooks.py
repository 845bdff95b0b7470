"""Gradient hooks of a model: run those on parameters, refuse by name those that torch.func cannot
run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from ftp.errors import TraceError, join_failures
from ftp.sharding.pytree import flatten

_INSTEAD = (
    "Remove the hook; x.register_hook in the function runs, and a step returns its"
    " gradients, for the caller to change."
)


@dataclass(frozen=True)
class GradientHooks:
    """The gradient hooks of a model at the time of ``functionalize``.

    Attributes:
        of_parameters: ``{path: hooks}`` of ``Tensor.register_hook``.
        refused: a description of each other hook, with its parameter or module.
    """

    of_parameters: Mapping[str, tuple[Callable[[Tensor], Any], ...]]
    refused: Sequence[str]

    def registered(
        self, name: str, values: Mapping[str, Tensor], inputs: Any
    ) -> Mapping[str, Tensor]:
        """``values`` {path: tensor} with their parameters' hooks registered.

        Under torch.func on the given tensor, which lives as long as the transform: a model called
        twice runs its hooks once, on the whole gradient. Else on an alias: the tensor is the
        caller's.

        Raises:
            TraceError: a gradient is taken, and a hook cannot run.
        """
        if self.refused and any(map(_is_differentiated, (*values.values(), *flatten(inputs)[0]))):
            raise TraceError(
                join_failures(
                    f"{name}: {hook}, which torch.func does not run. {_INSTEAD}"
                    for hook in self.refused
                )
            )
        if not self.of_parameters:
            return values
        new = dict(values)
        for path, hooks in self.of_parameters.items():
            value = values[path]
            known = tuple((value._backward_hooks or {}).values())
            if not value.requires_grad or all(hook in known for hook in hooks):
                continue
            new[path] = value = (
                value if is_functorch_wrapped_tensor(value) else value.view_as(value)
            )
            for hook in hooks:
                value.register_hook(hook)
        return new


def gradient_hooks(model: nn.Module) -> GradientHooks:
    """The hooks of parameters that require a gradient, and of modules."""
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    refused = [
        f"parameter {path!r} has a hook for its accumulated gradient"
        " (register_post_accumulate_grad_hook)"
        for path, p in trained.items()
        if p._post_accumulate_grad_hooks
    ]
    refused += [
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
        refused,
    )


def _is_differentiated(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and is_functorch_wrapped_tensor(leaf)
