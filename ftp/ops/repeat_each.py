"""Repeat each element along a dim, and sum what was repeated: the keys of grouped-query attention,
one for each head of queries, and their gradients.
"""

import torch
from torch import Tensor

from ftp.ops.define import define

REPEAT_EACH = define("repeat_each(Tensor x, int times, int dim) -> Tensor")
SUM_EACH = define("sum_each(Tensor x, int times, int dim) -> Tensor")


@torch.library.impl("ftp::repeat_each", "CompositeExplicitAutograd")
def repeat_each(x: Tensor, times: int, dim: int) -> Tensor:
    """Each element along ``dim``, ``times`` times.

    >>> repeat_each(torch.tensor([1, 2]), 2, 0)
    tensor([1, 1, 2, 2])
    """
    return x.repeat_interleave(times, dim)


@torch.library.impl("ftp::sum_each", "CompositeExplicitAutograd")
def sum_each(x: Tensor, times: int, dim: int) -> Tensor:
    """The sums of ``times`` neighbours along ``dim``.

    >>> sum_each(torch.tensor([1, 2, 3, 4]), 2, 0)
    tensor([3, 7])
    """
    return x.unflatten(dim, (-1, times)).sum(dim + 1)
