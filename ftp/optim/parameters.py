"""Trees of parameters after an update: choose between two, average."""

from typing import Any

import torch
from torch import Tensor

from ftp.errors import InputError
from ftp.optim.base import aligned
from ftp.sharding.pytree import flatten


def select(condition: Tensor, tree: Any, otherwise: Any) -> Any:
    """``tree`` if ``condition``, else ``otherwise``: skip an update without reading a value.

    Args:
        condition: a 0-d bool tensor.
        tree, otherwise: trees of one structure, shapes and dtypes.

    Raises:
        InputError: trees of different structure; a condition that is no tensor.

    >>> import ftp
    >>> bad = ftp.optim.count_nonfinite(torch.tensor([float("nan")]))
    >>> select(bad == 0, {"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])})
    {'w': tensor([1.])}
    """
    if not isinstance(condition, Tensor):
        raise InputError(f"select takes a 0-d bool tensor, not {condition!r}: write an if.")
    leaves, treedef = flatten(tree)
    old = aligned(treedef, otherwise, "otherwise", "tree")
    return treedef.unflatten(
        [torch.where(condition, a, b) for a, b in zip(leaves, old, strict=True)]
    )


def ema(average: Any, params: Any, decay: float | Tensor) -> Any:
    """Exponential moving average: ``decay * average + (1 - decay) * params``, in ``average``'s
    dtypes. For integers, such as counters in a model's buffers, the fraction is cut off.

    Args:
        average, params: trees of one structure and shapes.
        decay: a number or a 0-d tensor, between 0 and 1.

    Raises:
        InputError: trees of different structure.

    >>> ema({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.5)
    {'w': tensor([2.])}
    """
    leaves, treedef = flatten(average)
    new = aligned(treedef, params, "params")
    return treedef.unflatten(
        [
            (a * decay + p.to(a.dtype) * (1 - decay)).to(a.dtype)
            for a, p in zip(leaves, new, strict=True)
        ]
    )
