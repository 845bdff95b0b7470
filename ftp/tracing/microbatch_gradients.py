"""The gradients that torch.func takes in a trace for a pipeline, noted as means over
microbatches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._functorch import eager_transforms

from ftp.errors import TraceError
from ftp.ops.microbatch_means import current_means, is_plain, means_of_trace
from ftp.torch_internals import pytree


@contextmanager
def noted_gradients() -> Iterator[None]:
    """Inside the block, gradients by ``torch.func.grad`` and ``grad_and_value`` are noted, where a
    pipeline asks for them.
    """
    if means_of_trace() is None:
        yield
        return
    original = eager_transforms.grad_and_value_impl
    eager_transforms.grad_and_value_impl = _noting(original)
    try:
        yield
    finally:
        eager_transforms.grad_and_value_impl = original


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
