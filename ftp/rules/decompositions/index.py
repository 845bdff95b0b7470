"""Indexing and embedding bags as primitives."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.rules.call import Call
from ftp.rules.decompositions.registry import MEAN, decomposition
from ftp.rules.overloads import aten


@decomposition(aten.index_fill.int_Scalar)
def index_fill(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    shape = [1] * max(x.ndim, 1)
    size = shape[dim] = x.shape[dim] if x.ndim else 1
    index = index.reshape(-1)
    filled = torch.zeros((size,), dtype=torch.bool, device=x.device).scatter(
        0, torch.where(index < 0, index + size, index), True
    )
    return x.masked_fill(filled.reshape(shape[: x.ndim]), value)


# Gathers and writes under a mask.


def _clamped(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if i is None else i.clamp(0, x.shape[d] - 1) for d, i in enumerate(indices)]


@decomposition(aten._unsafe_masked_index.default)
def masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float) -> Tensor:
    return aten.index.Tensor(x, _clamped(x, indices)).masked_fill(~mask, fill)


@decomposition(aten._unsafe_masked_index_put_accumulate.default)
def masked_index_put(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> Tensor:
    return aten.index_put.default(x, _clamped(x, indices), values.masked_fill(~mask, 0), True)


# Embedding bags: rows are looked up, then added to their bag, so that the table may be cut along
# either dim.

MAX = 2


@decomposition(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    starts = offsets[:-1] if include_last_offset else offsets
    bags, width = starts.shape[0], weight.shape[1]
    bag = _bag_of(indices, starts)
    kept = indices != padding_idx
    count = torch.index_add(
        torch.zeros((bags,), dtype=indices.dtype, device=indices.device),
        0,
        bag,
        kept.to(indices.dtype),
    )
    rows = aten.embedding.default(weight, indices)
    if mode == MAX:
        at = torch.arange(indices.shape[0], device=indices.device, dtype=indices.dtype)
        spread = bag.unsqueeze(1).expand(-1, width)
        rows = rows.masked_fill(~kept.unsqueeze(1), -math.inf)
        least = torch.full((bags, width), -math.inf, dtype=rows.dtype, device=rows.device)
        top = torch.scatter_reduce(least, 0, spread, rows, "amax")
        beyond = torch.full(
            (bags, width), indices.shape[0], dtype=indices.dtype, device=indices.device
        )
        wins = (rows == aten.index.Tensor(top, [bag])) & kept.unsqueeze(1)
        first = torch.scatter_reduce(
            beyond, 0, spread, torch.where(wins, at.unsqueeze(1), indices.shape[0]), "amin"
        )
        winner = aten.index.Tensor(torch.nn.functional.pad(indices, (0, 1)), [first])
        return top.masked_fill((count == 0).unsqueeze(1), 0), bag, count, winner
    rows = rows.masked_fill(~kept.unsqueeze(1), 0)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(1)
    out = torch.index_add(
        torch.zeros((bags, width), dtype=rows.dtype, device=rows.device), 0, bag, rows
    )
    if mode == MEAN:
        out = out / count.clamp(min=1).unsqueeze(1).to(out.dtype)
    return out, bag, count, count


@decomposition(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag: Tensor,
    count: Tensor,
    winner: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    if mode == MAX:
        grad = grad.masked_fill((count == 0).unsqueeze(1), 0)
        return torch.scatter_add(
            torch.zeros((num_weights, grad.shape[1]), dtype=grad.dtype, device=grad.device),
            0,
            winner,
            grad,
        )
    if mode == MEAN:
        grad = grad / count.clamp(min=1).unsqueeze(1).to(grad.dtype)
    if indices.ndim == 2:
        rows = grad.unsqueeze(1).expand(-1, indices.shape[1], -1)
    else:
        rows = aten.index.Tensor(grad, [_bag_of(indices, offsets[: grad.shape[0]])])
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.view(indices.shape).unsqueeze(-1)
    return aten.embedding_dense_backward.default(
        rows, indices, num_weights, padding_idx, scale_grad_by_freq
    )


@decomposition(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Tensor:
    rows = aten.index.Tensor(grad, [_bag_of(indices, offsets[: grad.shape[0]])])
    rows = rows * aten.embedding.default(weight, indices)
    return rows.sum(1).masked_fill(indices == padding_idx, 0)


def _bag_of(indices: Tensor, starts: Tensor) -> Tensor:
    at = torch.arange(indices.shape[0], device=indices.device, dtype=starts.dtype)
    return (torch.searchsorted(starts, at, right=True) - 1).to(indices.dtype)


# Bags of equally many rows, as of two-dimensional ids, have a dim of their own.


def _are_even_bags(node: Any, shapes: Sequence[Sequence[Any]]) -> bool:
    """Whether a call's bags start at ``arange(0, rows, length)``, and it takes no maximum."""
    call = Call(node.target, node.args, node.kwargs, ())
    starts = getattr(call.arg("offsets"), "node", call.arg("offsets"))
    if starts.target is not aten.arange.start_step or len(starts.args) != 3:
        return False
    first, end, length = starts.args
    is_plain = all(type(n) is int for n in (*starts.args, *shapes[1]))
    if not is_plain or not end or (first, end) != (0, *shapes[1]) or end % length:
        return False
    if node.target is aten._embedding_bag_backward.default:
        has_all = shapes[0][0] == end // length
    else:
        has_all = not call.arg("include_last_offset")
    return has_all and call.arg("mode") != MAX


@decomposition(
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    where=_are_even_bags,
)
def even_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = indices.view(offsets.shape[0], -1)
    count = (ids != padding_idx).sum(1)
    rows = aten.embedding.default(weight, ids)
    if padding_idx >= 0:
        rows = rows.masked_fill((ids == padding_idx).unsqueeze(2), 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.view(ids.shape).unsqueeze(2)
    out = rows.sum(1)
    if mode == MEAN:
        out = _divided(out, ids, padding_idx)
    return out, _bag_of(indices, offsets), count, count


@decomposition(aten._embedding_bag_backward.default, where=_are_even_bags)
def even_embedding_bag_backward(grad: Tensor, indices: Tensor, *args: Any) -> Tensor:
    return embedding_bag_backward(grad, indices.view(grad.shape[0], -1), *args)


def _divided(x: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    """Sums of bags, or their gradients, divided by the number of rows that are not padding."""
    if padding_idx < 0:
        return x / ids.shape[1]
    return x / (ids != padding_idx).sum(1).clamp(min=1).unsqueeze(1).to(x.dtype)
