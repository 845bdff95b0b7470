"""Gradients in a train step: global norm, clipping, non-finite elements, accumulation."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ftp.errors import InputError, raise_all
from ftp.ops.constrain import asked_for
from ftp.ops.microbatch_means import Means, current_means
from ftp.optim.base import natural_order
from ftp.sharding.pytree import flatten, kind_of, leaf_names, leaf_paths


def global_norm(tree: Any) -> Tensor:
    """The 2-norm of all leaves as one vector, a 0-d tensor; in a sharded program, of global leaves.
    For bfloat16 and float16 it is computed and returned in float32.

    Raises:
        InputError: a tree without tensors, or with other leaves.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    _tensors(tree, "global_norm")
    # A sum of sums is a pending sum over sharded leaves: only one number is reduced.
    return asked_for(_total(tree, lambda leaf: _wide(leaf).abs().square().sum())).sqrt()


def _tensors(tree: Any, what: str) -> list[Tensor]:
    leaves = flatten(tree)[0]
    if not leaves:
        raise InputError(f"{what} is given a tree without tensors.")
    raise_all(
        InputError,
        (
            f"{name} is {leaf!r}, {kind_of(leaf)}; {what} takes tensors alone."
            for leaf, name in zip(leaves, leaf_names(tree, "tree"), strict=True)
            if not isinstance(leaf, Tensor)
        ),
    )
    return leaves


def _wide(x: Tensor) -> Tensor:
    # In half precision squares overflow, and long sums stop growing.
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _total(tree: Any, term: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of ``term(leaf)``: first over the leaves in layers, then over the others, so that the
    planner can fold repeated layers.
    """
    leaves, order = flatten(tree)[0], _by_layer(tree)
    parts = [
        [term(leaves[i]) for i, in_layer in order.items() if in_layer is which]
        for which in (True, False)
    ]
    return reduce(torch.add, [reduce(torch.add, part) for part in parts if part])


def _by_layer(tree: Any) -> dict[int, bool]:
    """``{leaf's index: whether the leaf is in a numbered layer}``, layer 2 before layer 10."""
    names = list(map(natural_order, leaf_paths(tree)))
    return {i: len(names[i]) > 1 for i in sorted(range(len(names)), key=names.__getitem__)}


def clip_by_global_norm(
    grads: Any, max_norm: float | Tensor, *, eps: float = 1e-6
) -> tuple[Any, Tensor]:
    """Scale gradients down to a global norm of at most ``max_norm``.

    Args:
        max_norm: a number or a 0-d tensor.
        eps: added to the norm before dividing.

    Returns:
        ``(grads, norm)``: the scaled gradients, and the norm before scaling, a 0-d tensor.

    Raises:
        InputError: a tree without tensors.

    >>> clipped, norm = clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
    >>> clipped["w"], norm
    (tensor([0.6000, 0.8000]), tensor(5.))

    Source: ``torch.nn.utils.clip_grad_norm_``.
    """
    if isinstance(max_norm, str | None):
        raise InputError(f"max_norm is {max_norm!r}; give a number or a 0-d tensor.")
    leaves, treedef = flatten(grads)
    norm = global_norm(grads)
    scale = torch.clamp(max_norm / (norm + eps), max=1.0)
    scaled = {i: leaves[i] * scale.to(leaves[i].dtype) for i in _by_layer(grads)}
    return treedef.unflatten([scaled[i] for i in range(len(leaves))]), norm


def count_nonfinite(tree: Any, *, by_leaf: bool = False) -> Any:
    """Count NaN and infinite elements of all leaves, an int64 0-d tensor. A sharded program reduces
    one number.

    Args:
        by_leaf: return a tree of counts, one for each leaf; a sharded program reduces each.

    Raises:
        InputError: a tree without tensors.

    >>> tree = {"w": torch.tensor([1.0, float("nan")]), "b": torch.tensor(float("inf"))}
    >>> count_nonfinite(tree)
    tensor(2)
    >>> count_nonfinite(tree, by_leaf=True)
    {'w': tensor(1), 'b': tensor(1)}
    """
    leaves, treedef = _tensors(tree, "count_nonfinite"), flatten(tree)[1]
    if by_leaf:
        return treedef.unflatten([_nonfinite(leaf) for leaf in leaves])
    return _total(tree, _nonfinite)


def _nonfinite(leaf: Tensor) -> Tensor:
    return leaf.isfinite().logical_not().sum()


def accumulate(grad_fn: Callable[..., tuple[Any, Any]], n: int) -> Callable[..., tuple[Any, Any]]:
    """Run ``grad_fn`` on ``n`` microbatches in turn and average its results.

    Microbatch ``i`` is rows ``i``, ``i + n``, ... of every batch tensor, so a batch sharded on dim
    0 is not resharded. A sharded program sums the gradients locally and reduces them once. In a
    program with a pipeline the microbatches are the pipeline's. All tensors but ``params`` are cut:
    for dropout pass ``ftp.random.split(key, n)`` and draw from ``keys[0]``; capture what is whole.

    Args:
        grad_fn: ``(params, *batch) -> (grads, value)``, means over the batch, such as the result of
            ``torch.func.grad_and_value``. It may return any tree of floating-point tensors.
        n: number of microbatches; it must divide dim 0 of every batch tensor.

    Returns:
        A function with ``grad_fn``'s arguments and results.

    Raises:
        InputError: ``n`` below 1; when called, a batch tensor whose dim 0 ``n`` does not divide, or
            a pipeline of another number of microbatches.

    >>> grad_fn = torch.func.grad_and_value(lambda w, x: (w * x).mean())
    >>> accumulate(grad_fn, 2)(torch.tensor(1.0), torch.arange(4.0))
    (tensor(1.5000), tensor(1.5000))
    """
    if n < 1:
        raise InputError(f"accumulate needs at least one microbatch, not {n}.")

    def fn(params: Any, *batch: Any) -> Any:
        leaves, treedef = flatten(batch)
        if (means := current_means()) is not None:
            return _noted(grad_fn, n, means, params, batch)
        uneven = [
            f"{name} has shape {tuple(leaf.shape)}: its first dim must divide into {n}"
            f" microbatches.{_hint(leaf, n)}"
            for leaf, name in zip(leaves, leaf_names(batch, "batch"), strict=True)
            if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] % n)
        ]
        raise_all(InputError, uneven)
        total: list[Tensor] = []
        tree = None
        for i in range(n):
            rows = [
                leaf.unflatten(0, (-1, n)).select(1, i).contiguous()
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
            out, tree = flatten(grad_fn(params, *treedef.unflatten(rows)))
            total = [a + b for a, b in zip(total, out, strict=True)] if total else out
        assert tree is not None
        return tree.unflatten([x / n for x in total])

    return fn


def _hint(leaf: Tensor, n: int) -> str:
    if leaf.shape == (2,) and leaf.dtype is torch.int64:
        return f" Of a key give ftp.random.split(key, {n}), and draw from keys[0]."
    return "" if leaf.ndim else " Capture what is no batch."


def _noted(
    grad_fn: Callable[..., tuple[Any, Any]], n: int, means: Means, params: Any, batch: Any
) -> Any:
    """Call ``grad_fn`` on one microbatch, and mark its results as means over microbatches. The
    pipeline repeats the call for each microbatch.
    """
    if n != means.microbatches:
        raise InputError(
            f"accumulate(grad_fn, {n}) in a step with a pipeline of {means.microbatches}"
            " microbatches. Give both the same number."
        )
    leaves, batch_tree = flatten(batch)
    rows = {id(x): means.cut(x) for x in leaves if isinstance(x, Tensor)}
    with means.taking():
        out = grad_fn(params, *batch_tree.unflatten([rows.get(id(x), x) for x in leaves]))
    given, tree = flatten(params)
    grads, *rest = out if isinstance(out, tuple) else (out,)
    found, found_tree = flatten(grads)
    is_gradient = tree == found_tree and all(
        a.shape == b.shape for a, b in zip(given, found, strict=True)
    )
    of = given if is_gradient else [None] * len(found)
    averaged = found_tree.unflatten(
        [means.mean(x, leaf) for x, leaf in zip(found, of, strict=True)]
    )
    values, value_tree = flatten(rest)
    if not any(isinstance(x, Tensor) for x in values):
        raise InputError(
            "The function given to accumulate returns only gradients. In a step with a pipeline it"
            " must return (grads, value), as torch.func.grad_and_value(loss) does."
        )
    others = value_tree.unflatten([means.mean(x) if isinstance(x, Tensor) else x for x in values])
    return (averaged, *others) if isinstance(out, tuple) else averaged
