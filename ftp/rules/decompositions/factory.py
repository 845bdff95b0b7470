"""Ops that make tensors from sizes as primitives."""

from torch import Tensor

from ftp.rules.decompositions.registry import decomposition
from ftp.rules.overloads import aten


@decomposition(aten._new_zeros_with_same_feature_meta.default)
def tangent_of_zeros(x: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """Zeros of the shape of ``other``, under the leading dims of ``x``: torch copies a tangent
    that is a view to them.
    """
    return other.new_zeros((*x.shape[:self_num_batch_dims], *other.shape))
