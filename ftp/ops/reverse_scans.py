"""Scans from the end of a dim, ``scan(x.flip(dim)).flip(dim)``, as in the gradients of scans."""

import torch
from torch import Tensor

from ftp.ops.define import define

aten = torch.ops.aten
REVERSE_CUMSUM = define("reverse_cumsum(Tensor x, int dim) -> Tensor")
REVERSE_LOGCUMSUMEXP = define("reverse_logcumsumexp(Tensor x, int dim) -> Tensor")
FROM_START = {
    REVERSE_CUMSUM: aten.cumsum.default,
    REVERSE_LOGCUMSUMEXP: aten.logcumsumexp.default,
}
REVERSED = {**FROM_START, **{scan: reverse for reverse, scan in FROM_START.items()}}


@torch.library.impl("ftp::reverse_cumsum", "CompositeExplicitAutograd")
def _reverse_cumsum(x: Tensor, dim: int) -> Tensor:
    """The sum of each element and of those after it.

    >>> REVERSE_CUMSUM(torch.tensor([1, 2, 3]), 0)
    tensor([6, 5, 3])
    """
    return x.flip(dim).cumsum(dim).flip(dim)


@torch.library.impl("ftp::reverse_logcumsumexp", "CompositeExplicitAutograd")
def _reverse_logcumsumexp(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).logcumsumexp(dim).flip(dim)
