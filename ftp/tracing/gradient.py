"""Gradients in a traced function: ``grad_and_value`` over pytrees, the ways to take one, also those
that the function takes by torch.func; a trace for a pipeline notes them as means over microbatches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd.graph import saved_tensors_hooks

from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.errors import InputError, TraceError, raise_all
from ftp.ops.microbatch_means import current_means, is_plain, means_of_trace
from ftp.sharding.pytree import flatten, kind_of, leaf_names
from ftp.torch_internals import pytree
from ftp.torch_internals.error_texts import Meaning, meaning_of
from ftp.torch_internals.functorch import peek_interpreter_stack
from ftp.tracing.explain_errors import defined_at
from ftp.tracing.replacements.replaced import replaced
from ftp.tracing.selected_rows.refused import note_needed
from ftp.tracing.selected_rows.results import counted

aten = torch.ops.aten
T = TypeVar("T")
WAYS = ("func", "grad", "backward")  # each differentiates functions that those before it refuse


@dataclass
class GradientWay:
    """How gradients are taken in a trace: by torch.func, by torch.autograd.grad, or by backward().

    Attributes:
        is_taken: whether the traced function has asked for a gradient.
        is_within: whether one is being taken. Those inside of it are torch.func's.
    """

    by: str = "func"
    is_taken: bool = False
    is_within: bool = False

    def of(
        self, scalar: Callable[[list[Tensor]], tuple[Tensor, T]], leaves: Sequence[Tensor]
    ) -> tuple[list[Tensor], tuple[Tensor, T]]:
        """The gradients of a scalar by torch.autograd, and what ``scalar`` returns."""
        self.is_within = True
        try:
            with torch.enable_grad():
                given = [leaf.detach().requires_grad_() for leaf in leaves]
                loss, extras = scalar(given)
                if not loss.requires_grad:
                    grads: list[Tensor | None] = [None] * len(given)
                elif self.by == "grad":
                    grads = list(torch.autograd.grad(loss, given, allow_unused=True))
                else:
                    loss.backward()
                    grads = [leaf.grad for leaf in given]
        finally:
            self.is_within = False
        found = [
            torch.zeros_like(leaf) if grad is None else grad.detach()
            for leaf, grad in zip(leaves, grads, strict=True)
        ]
        return found, (loss.detach(), extras)


_gradient: ContextVar[GradientWay | None] = ContextVar("ftp.tracing.gradient", default=None)


@contextmanager
def taking(by: str) -> Iterator[GradientWay]:
    with set_within(_gradient, GradientWay(by)) as taken:
        yield taken


@contextmanager
def refusals_noted() -> Iterator[None]:
    """Within the block errors are noted that torch.func alone raises: a function that catches one
    is traced by another way, in which it gets none.
    """
    gradient = _gradient.get()
    if gradient is None or gradient.by != WAYS[0]:
        yield
        return

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except RuntimeError as error:
                if meaning_of(error) in _OF_FUNC:
                    note_needed(error)
                raise

        return run

    applied = vars(torch.autograd.Function)["apply"]  # from torch 2.14 on of C

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return applied.__get__(None, cls)(*args, **kwargs)

    hooked = noted(saved_tensors_hooks.__enter__)
    with (
        replaced(torch.autograd.Function, {"apply": classmethod(noted(apply))}),
        replaced(saved_tensors_hooks, {"__enter__": hooked}),
    ):
        yield


_OF_FUNC = (Meaning.FORWARD_TAKES_CTX, Meaning.SAVED_TENSOR_HOOKS)


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
    found, (loss, extras) = gradient.of(scalar, leaves)
    return found, (loss, [x.detach() for x in extras])


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
def gradients_by_torch() -> Iterator[None]:
    """Within the block ``torch.func.grad`` and ``grad_and_value`` take gradients in the trace's
    way, and a trace for a pipeline notes them.
    """
    taken = _in_the_traces_way(eager_transforms.grad_and_value_impl)
    taken = taken if means_of_trace() is None else _noting(taken)
    with replaced(eager_transforms, {"grad_and_value_impl": taken}):
        yield


def _in_the_traces_way(original: Callable[..., Any]) -> Callable[..., Any]:
    """``grad_and_value`` of torch.func by torch.autograd, where a trace takes gradients so, and the
    call is in no other transform.
    """

    def grad_and_value(func: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        gradient = _gradient.get()
        if gradient is None or gradient.is_within or peek_interpreter_stack() is not None:
            return original(func, argnums, has_aux, args, kwargs)
        gradient.is_taken = True
        if gradient.by == "func":
            return original(func, argnums, has_aux, args, kwargs)
        at = argnums if isinstance(argnums, tuple) else (argnums,)
        leaves, tree = pytree.tree_flatten([args[i] for i in at])

        def scalar(leaves: list[Tensor]) -> tuple[Tensor, Any]:
            given = dict(zip((i % len(args) for i in at), tree.unflatten(leaves), strict=True))
            out = func(*(given.get(i, x) for i, x in enumerate(args)), **kwargs)
            return out if has_aux else (out, None)

        found, (loss, aux) = gradient.of(scalar, leaves)
        grads = tuple(tree.unflatten(found))
        aux = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)
        value = (loss, aux) if has_aux else loss
        return grads if isinstance(argnums, tuple) else grads[0], value

    return grad_and_value


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
