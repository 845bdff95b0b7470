"""Attention with dropout of its weights, by tiles."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.errors import InputError
from ftp.ops.attention import sum_dtype
from ftp.ops.flex_function import WHOLE, Flex, Kept
from ftp.ops.score_programs import as_program
from ftp.random.distributions import check_key


def attention_with_dropout(
    rng: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    p: float,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """``F.scaled_dot_product_attention`` whose weights are dropped as ``ftp.random.dropout(rng,
    weights, p)`` does, of which no more than a tile's exist at a time.
    """
    check_key(rng, "attention_with_dropout")
    if not 0 <= p <= 1:
        raise InputError(f"dropout takes a probability from 0 to 1, not p={p!r}.")
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    q, k, v = (_four_dims(x.expand(*lead, *x.shape[-2:])) for x in (query, key, value))
    sizes = *q.shape[:3], k.shape[2]
    given: Any = sizes, sum_dtype(q.dtype), q.device
    score, of_score, mask, of_mask = "", [], "", []
    sees: list[Callable[..., Tensor]] = [_is_before] if is_causal else []
    if attn_mask is not None:
        shape = *lead, query.shape[-2], key.shape[-2]
        lookup = _lookup(_four_dims(attn_mask.expand(shape) if len(lead) > 2 else attn_mask))
        if attn_mask.dtype is torch.bool:
            sees.append(lookup)
        else:
            score, of_score = as_program(lambda s, *at: s + lookup(*at), False, *given)
    if sees:
        both = lambda *at: functools.reduce(operator.and_, (f(*at) for f in sees))  # noqa: E731
        mask, of_mask = as_program(both, True, *given)
    counts = 0, len(of_score), len(of_mask), 1
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    kept = Kept(counts, (WHOLE, WHOLE), scale, score, mask, "", p)
    out = Flex.apply(q, k, v, kept, *of_score, *of_mask, rng)[0]
    return out.reshape(*lead, *out.shape[2:])


def _four_dims(x: Tensor) -> Tensor:
    """``x`` as (batch, heads, ...)."""
    return x.flatten(0, -4) if x.ndim > 4 else x.reshape(*(1,) * (4 - x.ndim), *x.shape)


def _is_before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _lookup(x: Tensor) -> Callable[..., Tensor]:
    """Gives the element at a position of the scores, to which ``x`` broadcasts."""
    held = x.reshape([size for size in x.shape if size != 1])

    def at(*place: Tensor) -> Tensor:
        index = tuple(i for i, size in zip(place, x.shape, strict=True) if size != 1)
        return held[index] if index else held

    return at
