"""Attention by the full score matrix, for derivatives that flex_attention and varlen_attention have
no tiles for.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.tile_kernels import repeated_heads


def jvp_of(run: Callable[..., Any], given: Sequence[Tensor], tangents: Sequence[Any]) -> Any:
    known = [torch.zeros_like(x) if t is None else t for x, t in zip(given, tangents, strict=True)]
    return torch.func.jvp(run, tuple(given), tuple(known))[1]


def one_by_one(function: Any, info: Any, in_dims: tuple[Any, ...], args: Any) -> Any:
    """The vmap of a function by a loop over the members of the batch."""
    found = [
        function.apply(
            *(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True))
        )
        for i in range(info.batch_size)
    ]
    return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])


def scores_of(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(batch, heads, queries, keys), in single precision at least."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (query.to(wide) @ _like(key, query).to(wide).transpose(-2, -1)) * scale


def _like(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values expanded to the batch and the heads of the queries."""
    x = repeated_heads(x, query.shape[1])
    return x.expand(query.shape[0], *x.shape[1:])


def weighted(
    scores: Tensor,
    sees: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    dropped: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[Tensor, Tensor, Tensor]:
    """The values weighted by the softmax of the unmasked scores, its log-sum-exp, and the scores'
    maximum. Rows in which everything is masked are zero.

    Args:
        dropped: what dropout makes of the softmax.
    """
    scores = torch.where(sees, scores, -math.inf)
    weights = dropped(torch.ops.aten._safe_softmax.default(scores, -1))
    out = weights.to(dtype) @ _like(value, scores)
    return out, torch.logsumexp(scores, -1), scores.amax(-1)
