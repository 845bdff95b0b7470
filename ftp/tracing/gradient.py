"""Gradients in a traced function: ``grad_and_value`` over pytrees, the ways to take one, and
torch.func's, which a trace for a pipeline notes as means over microbatches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms

from ftp.context import set_within
from ftp.errors import InputError, TraceError, raise_all
from ftp.ops.microbatch_means import current_means, is_plain, means_of_trace
from ftp.sharding.pytree import flatten, kind_of, leaf_names
from ftp.torch_internals import pytree
from ftp.tracing.explain_errors import defined_at
from ftp.tracing.replaced import replaced
from ftp.tracing.selected_results import counted

aten = torch.ops.aten
WAYS = ("func", "grad", "backward")  # each differentiates functions that those before it refuse


@dataclass
class GradientWay:
    """How ``grad_and_value`` takes gradients in a trace: by torch.func, by torch.autograd.grad, or
    by backward().

    Attributes:
        is_taken: whether the traced function has asked for a gradient.
    """

    by: str = "func"
    is_taken: bool = False


_gradient: ContextVar[GradientWay | None] = ContextVar("ftp.tracing.gradient", default=None)


@contextmanager
def taking(by: str) -> Iterator[GradientWay]:
    with set_within(_gradient, GradientWay(by)) as taken:
        yield taken


def grad_and_value(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """``fn(params, *batch) -> (loss, grads)``, or ``((loss, aux), grads)``, over optree trees;
    ``grads`` has the structure of ``params``.

    >>> fn = grad_and_value(lambda params, x: (params["w"] * x).sum())
    >>> fn({"w": torch.ones(2)}, torch.tensor([2.0, 3.0]))
    (tensor(5.), {'w': tensor([2., 3.])})

    Raises:
        InputError: leaves that have no gradient, or a loss that is not one scalar tensor.

    Source: JAX, ``jax.value_and_grad``.
    """

    @wraps(loss_fn)
    def fn(params: Any, *batch: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(params)
        _check_differentiable(leaves, leaf_names(params, "params"))
        batch_leaves, batch_tree = flatten(batch)
        aux: list[Any] = []

        def scalar(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            # An alias, so that the graph shows a write to a batch tensor and an error can name it;
            # torch.func's own error does not.
            own = [aten.alias.default(x) if isinstance(x, Tensor) else x for x in batch_leaves]
            out = loss_fn(treedef.unflatten(tensors), *batch_tree.unflatten(own))
            loss, extra = _split(loss_fn, out, has_aux)
            aux_leaves, aux_tree = flatten(counted(extra))
            aux[:] = aux_tree, aux_leaves
            return loss, [leaf for leaf in aux_leaves if isinstance(leaf, Tensor)]

        grads, (loss, extras) = _differentiated(scalar, leaves)
        grads = treedef.unflatten(grads)
        if not has_aux:
            return loss, grads
        aux_tree, aux_leaves = aux
        fresh = iter(extras)
        aux_leaves = [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in aux_leaves]
        return (loss, aux_tree.unflatten(aux_leaves)), grads

    return fn


def _differentiated(
    scalar: Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]], leaves: list[Tensor]
) -> tuple[list[Tensor], tuple[Tensor, list[Tensor]]]:
    """The gradients, and the pair of the loss and the other results."""
    gradient = _gradient.get()
    if gradient is not None:
        gradient.is_taken = True
    if gradient is None or gradient.by == "func":
        return torch.func.grad_and_value(scalar, has_aux=True)(leaves)
    with torch.enable_grad():
        given = [leaf.detach().requires_grad_() for leaf in leaves]
        loss, extras = scalar(given)
        if not loss.requires_grad:
            grads: list[Tensor | None] = [None] * len(given)
        elif gradient.by == "grad":
            grads = list(torch.autograd.grad(loss, given, allow_unused=True))
        else:
            loss.backward()
            grads = [leaf.grad for leaf in given]
    found = [
        torch.zeros_like(leaf) if grad is None else grad.detach()
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
    return found, (loss.detach(), [x.detach() for x in extras])


def _split(loss_fn: Callable[..., Any], out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    where = defined_at(loss_fn)
    if has_aux:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise InputError(
                f"has_aux=True, so the loss function{where} must return a pair (loss, aux), not"
                f" {_kind(out)}."
            )
        loss, aux = out
    else:
        loss, aux = out, ()
        if isinstance(out, tuple | list):
            raise InputError(
                f"The loss function{where} returns {_kind(out)}. Return the loss alone, or (loss,"
                " aux) with has_aux=True."
            )
    if not isinstance(loss, Tensor):
        raise InputError(
            f"The loss function{where} returns {_kind(loss)}, not a tensor. Return a scalar"
            " computed from the parameters."
        )
    if loss.ndim:
        raise InputError(
            f"The loss function{where} returns a tensor of shape {tuple(loss.shape)}; a gradient"
            " needs a scalar, of shape (). Reduce it with .mean() or .sum()."
        )
    if not loss.dtype.is_floating_point:
        raise InputError(
            f"The loss function{where} returns {loss.dtype}; a gradient needs a real"
            " floating-point scalar."
        )
    return loss, aux


def _kind(value: Any) -> str:
    of = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{kind_of(value)}{of}"


def _check_differentiable(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, Tensor):
            failures.append(
                f"{name} is {leaf!r}, {kind_of(leaf)}: it has no gradient. Close over it, or pass"
                " it as a batch argument."
            )
        elif not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            failures.append(
                f"{name} is {leaf.dtype}: it has no gradient. Make it a buffer or a batch"
                " argument, or a floating-point tensor."
            )
    raise_all(InputError, failures)


@contextmanager
def noted_gradients() -> Iterator[None]:
    """In a trace for a pipeline, note gradients by ``torch.func.grad`` and ``grad_and_value``
    within the block.
    """
    noting = _noting(eager_transforms.grad_and_value_impl)
    owner = None if means_of_trace() is None else eager_transforms
    with replaced(owner, {"grad_and_value_impl": noting}):
        yield


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def grad_and_value(func: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        means = current_means()
        if means is None:
            return original(func, argnums, has_aux, args, kwargs)
        with means.taking():
            grads, value = original(func, argnums, has_aux, args, kwargs)
        given = tuple(args[i] for i in argnums) if isinstance(argnums, tuple) else args[argnums]
        leaves = pytree.tree_leaves(given)
        found, tree = pytree.tree_flatten(grads)
        values, value_tree = pytree.tree_flatten(value)
        if not all(is_plain(x) for x in (*found, *values) if isinstance(x, Tensor)):
            raise TraceError(
                "The gradient is taken within torch.func.vmap or another transform. A pipeline"
                " takes it once for each microbatch: call torch.func.grad_and_value outside of"
                " transforms, or pass the transformed function to ftp.optim.accumulate."
            )
        grads = tree.unflatten(means.mean(x, leaf) for x, leaf in zip(found, leaves, strict=True))
        return grads, value_tree.unflatten(
            means.mean(x) if isinstance(x, Tensor) else x for x in values
        )

    return grad_and_value
