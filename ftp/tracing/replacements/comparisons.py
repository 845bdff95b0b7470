"""Functions of torch that compare tensors and give a bool."""

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor


def _equal(input: Tensor, other: Any) -> Tensor | bool | None:
    if not isinstance(other, Tensor):
        return None
    return torch.eq(input, other).all() if input.shape == other.shape else False


def _allclose(input: Tensor, other: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    if not isinstance(other, Tensor) or input.shape != other.shape:
        return None
    return torch.isclose(input, other, *args, **kwargs).all()


def _contains(input: Tensor, element: Any) -> Tensor | None:
    if not isinstance(element, Tensor | Number):
        return None
    found: Any = input == element
    return found.any()


# Each gives the bool, or a tensor of it; None where torch computes it, or raises its error.
COMPARING: dict[Any, Callable[..., Tensor | bool | None]] = {
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _allclose,
    Tensor.allclose: _allclose,
    Tensor.__contains__: _contains,
}
