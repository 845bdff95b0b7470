"""Matrix products with an addend, and diagonals, as primitives."""

import torch
from torch import Tensor

from ftp.rules.decompositions.registry import decomposition, from_torch
from ftp.rules.overloads import aten

# Products with something added.


@decomposition(aten.addmm.default, aten.addmv.default, aten.baddbmm.default)
def added_product(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    alpha, beta = _scale(x, alpha), _scale(x, beta)
    product = torch.bmm(a, b) if a.ndim == 3 else torch.mm(a, b) if b.ndim == 2 else torch.mv(a, b)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (x if beta == 1 else x * beta)


def _scale(x: Tensor, factor: float) -> float:
    """``factor`` as the kernels take it: of integers its whole part."""
    return factor if x.is_floating_point() or x.is_complex() else int(factor)


@decomposition(aten.addbmm.default)
def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    batch, m, k = a.shape
    flat = a.transpose(0, 1).reshape(m, batch * k)
    return added_product(x, flat, b.reshape(batch * k, b.shape[2]), beta=beta, alpha=alpha)


from_torch(aten.diag_embed.default, aten.rot90.default, aten.trace.default)
