"""Matmuls with an addend, and diagonals, as primitives."""

import torch
from torch import Tensor

from ftp.rules.decompositions.registry import decomposition, from_torch
from ftp.rules.overloads import aten

# Matmuls with something added.


@decomposition(aten.addmm.default, aten.addmv.default, aten.baddbmm.default)
def added_matmul(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    alpha, beta = _scale(x, alpha), _scale(x, beta)
    matmul = torch.bmm(a, b) if a.ndim == 3 else torch.mm(a, b) if b.ndim == 2 else torch.mv(a, b)
    matmul = matmul if alpha == 1 else matmul * alpha
    if beta == 0:
        return matmul
    return matmul + (x if beta == 1 else x * beta)


def _scale(x: Tensor, factor: float) -> float:
    """``factor`` as the kernels use it: truncated for integer tensors."""
    return factor if x.is_floating_point() or x.is_complex() else int(factor)


@decomposition(aten.addbmm.default)
def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    batch, m, k = a.shape
    flat = a.transpose(0, 1).reshape(m, batch * k)
    return added_matmul(x, flat, b.reshape(batch * k, b.shape[2]), beta=beta, alpha=alpha)


from_torch(aten.block_diag.default, aten.diag_embed.default, aten.rot90.default, aten.trace.default)
