"""Parameters and state after an update: one of two trees, averages."""

from typing import Any

import torch
from torch import Tensor

from ftp.optim.torch_optimizer import aligned
from ftp.sharding.pytree import flatten


def select(condition: Tensor, tree: Any, otherwise: Any) -> Any:
    """``tree`` where the 0-d ``condition`` holds, ``otherwise`` where not: an update that is
    skipped leaves everything as it was.

    >>> import ftp
    >>> bad = ftp.optim.count_nonfinite(torch.tensor([float("nan")]))
    >>> select(bad == 0, {"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])})
    {'w': tensor([1.])}
    """
    leaves, treedef = flatten(tree)
    old = aligned(treedef, otherwise, "otherwise", "tree")
    return treedef.unflatten(
        [torch.where(condition, a, b) for a, b in zip(leaves, old, strict=True)]
    )


def ema(average: Any, params: Any, decay: float | Tensor) -> Any:
    """The exponential moving average after another step: ``decay * average + (1 - decay) *
    params``.

    >>> ema({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.5)
    {'w': tensor([2.])}
    """
    leaves, treedef = flatten(average)
    new = aligned(treedef, params, "params")
    return treedef.unflatten(
        [a * decay + p.to(a.dtype) * (1 - decay) for a, p in zip(leaves, new, strict=True)]
    )
