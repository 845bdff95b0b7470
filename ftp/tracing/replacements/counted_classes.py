"""``one_hot`` and ``bincount``, the size of whose results depends on a value, the largest class;
losses of classes.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ftp import static
from ftp.axis import is_inside
from ftp.ops.assume import assumptions_to, is_listening
from ftp.source import at_line
from ftp.tracing.data_dependent.values_read import read
from ftp.tracing.index_ranges import index_range


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes == -1 and input.numel():
        num_classes = read(input.max() + 1) or -1
    if num_classes < 1 or input.dtype is not torch.int64:
        return F.one_hot(input, num_classes)  # for its error
    # The layout marks these classes, so that check_inputs=True can find classes out of range
    # (ftp.tensors.check_indices).
    classes = torch.arange(num_classes, layout=torch.strided, device=input.device)
    return (input.unsqueeze(-1) == classes).to(torch.int64)


def _loss(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of classes in uint8: torch's kernel takes a list of them, its fake kernel does not."""

    def fn(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if target.dtype is torch.uint8 and target.ndim < 2:
            target = target.long()
        return loss(input, target, *args, **kwargs)

    return fn


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``torch.bincount`` with ``minlength`` counts: all values are known or assumed to be below."""
    if input.ndim == 1 and input.numel() and minlength == 0 and index_range(input) is None:
        minlength = read(input.max().long() + 1) or 0
    if input.ndim != 1 or type(minlength) is not int or not minlength or input.is_floating_point():
        return torch.bincount(input, weights, minlength)
    found = index_range(input)
    if found is not None and 0 < found <= minlength:
        with assumptions_to(None):
            return static.bincount(input, weights, minlength)
    if found is not None or is_inside() or not is_listening():
        return torch.bincount(input, weights, minlength)
    warnings.warn(
        f"{at_line()}torch.bincount of a tensor whose values are not known gives more than"
        f" {minlength} counts where one is {minlength} or more: it is assumed that all are in [0,"
        f" {minlength}). check_inputs=True checks it.",
        stacklevel=2,
    )
    return static.bincount(input, weights, minlength)


OF_CLASSES: dict[Any, Callable[..., Tensor]] = {
    F.one_hot: one_hot,
    F.cross_entropy: _loss(F.cross_entropy),
    F.nll_loss: _loss(F.nll_loss),
}
