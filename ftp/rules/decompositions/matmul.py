"""Matmuls with an addend, and diagonals, as primitives."""

import torch
from torch import Tensor
from torch.nn import functional as F

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


# Diagonals by masks, of which each rank computes its own part.


def _is_on(x: Tensor, offset: int) -> Tensor:
    """Where in the last two dims the diagonal is."""
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])
    return columns - rows[:, None] == offset


@decomposition(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    x = x.movedim((dim1, dim2), (-2, -1))
    nothing = -0.0 if x.is_floating_point() else 0  # -0.0 + x is x, also where x is -0.0
    by_row = x.masked_fill(~_is_on(x, offset), nothing).sum(-1).to(x.dtype)
    rows, columns = x.shape[-2:]
    first = min(max(-offset, 0), rows)
    return by_row.narrow(-1, first, max(min(rows - first, columns - max(offset, 0)), 0))


@decomposition(aten.diagonal_scatter.default)
def diagonal_scatter(
    x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    x = x.movedim((dim1, dim2), (-2, -1))
    before = min(max(-offset, 0), x.shape[-2])
    by_row = F.pad(src, (before, x.shape[-2] - before - src.shape[-1]))
    return torch.where(_is_on(x, offset), by_row[..., None], x).movedim((-2, -1), (dim1, dim2))


@decomposition(aten.diagonal_backward.default)
def diagonal_backward(
    grad: Tensor, input_sizes: list[int], offset: int, dim1: int, dim2: int
) -> Tensor:
    return diagonal_scatter(grad.new_zeros(input_sizes), grad, offset, dim1, dim2)
