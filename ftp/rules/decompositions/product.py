"""Matrix products with an addend, and diagonals, as primitives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ftp.rules.decompositions.registry import decomposition
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


@decomposition(aten.trace.default)
def trace(x: Tensor) -> Tensor:
    return torch.diagonal(x).sum()


@decomposition(aten.diag_embed.default)
def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    padded = torch.constant_pad_nd(x, [offset, 0] if offset > 0 else [0, -offset])
    at = torch.arange(padded.shape[-1], device=x.device)
    made = torch.where(
        at.unsqueeze(0) == at.unsqueeze(1) + offset,
        padded.unsqueeze(-2),
        torch.zeros((), dtype=x.dtype, device=x.device),
    )
    return made.movedim((-2, -1), (dim1, dim2))


@decomposition(aten.rot90.default)
def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    match k % 4:
        case 0:
            return x.clone()
        case 1:
            return torch.flip(x, [second]).transpose(first, second)
        case 2:
            return torch.flip(x, [first, second])
        case _:
            return torch.flip(x, [first]).transpose(first, second)
